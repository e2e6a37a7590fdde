"""Requests through ``submit`` of an opened plan, as users send them; run as a program, it shows what each change brings.

    python -m benchmarks.submitting [--rounds 7] [--seconds 1] [--models NAME,...]

Each change is measured with and without it, in interleaved rounds on one opened plan or on two: requests per second, and
processor time of this process for a request, which a busy machine changes less. Both go to benchmarks/changes.json, and from
there into benchmarks/models.md (``python -m benchmarks.models --write-table``).
"""

import argparse
import asyncio
import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from autosplit import api
from autosplit.deploying.calling import as_call
from autosplit.deploying.service import Call, Service, open_pipeline
from autosplit.devices.discovering import machine_for
from autosplit.planning.baselines import CALLER_THREADS, IN_CALLER, REPLICAS, baselines_by_backend
from autosplit.running.awaiting import Awaiting
from autosplit.running.hostrings import InputRings
from autosplit.running.request import Request

CHANGES = Path("benchmarks/changes.json")
NUM_THREADS = 8
ONE_THREAD, THREADS, ASYNCIO = "one thread", f"{NUM_THREADS} threads", "asyncio"
LOADS = ((ONE_THREAD, 1), (ONE_THREAD, 4), (ONE_THREAD, 12), (ONE_THREAD, 64), (THREADS, 64), (ASYNCIO, 12), (ASYNCIO, 64))
"""Who sends requests, and how many are in flight."""

MODELS = {
    "MLP 6 x 256²": ("autosplit.examples.mlp:mlp?depth=6&width=256", "onnxruntime"),
    "MLP 24 x 512²": ("autosplit.examples.mlp:mlp?depth=24&width=512", "onnxruntime"),
    "MobileNetV2": ("transformers:MobileNetV2Model", "openvino"),
}


def rate(service: Service, call: Call, inputs: tuple[Any, Any], who: str, in_flight: int, seconds: float) -> float:
    """Requests that are answered per second, over about ``seconds``."""
    started = time.perf_counter()
    until = started + seconds
    if who == ASYNCIO:
        args, kwargs = inputs
        count = asyncio.run(_from_asyncio(lambda: service.call_async(*args, **kwargs), in_flight, until))
    elif who == THREADS:
        counts: list[int] = []
        each = max(1, in_flight // NUM_THREADS)
        threads = [threading.Thread(target=lambda: counts.append(_keep(call, each, until))) for _ in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        count = sum(counts)
    else:
        count = _keep(call, in_flight, until)
    return count / (time.perf_counter() - started)


def _keep(call: Call, in_flight: int, until: float) -> int:
    """Keep ``in_flight`` requests in flight until the time ``until``; return how many were answered."""
    count, under_way = 0, deque[Future[Any]]()
    while time.perf_counter() < until:
        under_way.append(call())
        if len(under_way) == in_flight:
            under_way.popleft().result()
            count += 1
    for future in under_way:
        future.result()
    return count + len(under_way)


async def _from_asyncio(call: Callable[[], Any], in_flight: int, until: float) -> int:
    async def caller() -> int:
        count = 0
        while count == 0 or time.perf_counter() < until:
            await call()
            count += 1
        return count

    return sum(await asyncio.gather(*[caller() for _ in range(in_flight)]))


def rates(service: Service, traced: Any, latency_s: float, num_rounds: int) -> dict[str, float]:
    """Requests per second for each of LOADS in interleaved rounds, the median; fewer loads where a request takes long."""
    inputs = as_call(traced, traced.example_inputs)
    call = service.bind_call(traced.example_inputs)
    loads = [load for load in LOADS if latency_s < 0.05 or load in ((ONE_THREAD, 4), (ONE_THREAD, 12))]
    seconds = max(0.4, 10 * latency_s)
    found: dict[str, list[float]] = {f"{who}, {count}": [] for who, count in loads}
    for number in range(num_rounds if latency_s < 0.05 else 1):
        for who, count in loads if number % 2 == 0 else reversed(loads):
            found[f"{who}, {count}"].append(rate(service, call, inputs, who, count, seconds))
    return {name: median(several) for name, several in found.items()}


@contextlib.contextmanager
def _cloned() -> Iterator[None]:
    """Torch copies the requests that wait for admission, in place of ``memmove``."""

    def clone(rings: InputRings, request: Request) -> None:
        request.inputs = tuple(value.clone() for value in request.inputs)

    kept, InputRings.copy_inputs = InputRings.copy_inputs, clone  # type: ignore[method-assign]
    try:
        yield
    finally:
        InputRings.copy_inputs = kept  # type: ignore[method-assign]


@contextlib.contextmanager
def _walked(service: Service) -> Iterator[None]:
    """Every call walks through the containers of its arguments."""
    kept, service._plain = service._plain, lambda args, kwargs: None
    try:
        yield
    finally:
        service._plain = kept


@contextlib.contextmanager
def _by_threads() -> Iterator[None]:
    """Each awaited request is submitted in a thread of a pool, and each answer wakes the event loop."""

    async def call(self: Awaiting, submit: Callable[..., Future[Any]], **settings: Any) -> Any:
        return await asyncio.wrap_future(await asyncio.to_thread(submit))

    kept, Awaiting.__call__ = Awaiting.__call__, call  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Awaiting.__call__ = kept  # type: ignore[method-assign]


def changes_of(name: str, num_rounds: int, seconds: float) -> list[dict[str, Any]]:
    """For one model, each change: requests per second with it and without it."""
    spec, backend = MODELS[name]
    traced, machine = api.trace(spec, batch=1), machine_for(None)
    first = machine.devices[0].name
    plans = baselines_by_backend(traced.graph, machine, traced.source, [], backend, first, in_caller=[backend])
    inputs = as_call(traced, traced.example_inputs)
    with ExitStack() as stack:
        ways = {way: plans[f"{way} ({backend})"] for way in (REPLICAS, IN_CALLER, CALLER_THREADS)}
        opened = {way: stack.enter_context(open_pipeline(traced, plan)) for way, plan in ways.items()}

        def run(
            way: str,
            who: str = ONE_THREAD,
            in_flight: int = 12,
            block: contextlib.AbstractContextManager[None] | None = None,
        ) -> tuple[float, float]:
            service = opened[way]
            call = service.bind_call(traced.example_inputs)
            with block or contextlib.nullcontext():
                begun_s, cpu_s = time.perf_counter(), time.process_time()
                per_s = rate(service, call, inputs, who, in_flight, seconds)
                spent_s = time.process_time() - cpu_s
            return per_s, 1e6 * spent_s / (per_s * (time.perf_counter() - begun_s))

        calling = opened[IN_CALLER]
        pairs: dict[str, tuple[Callable[[], tuple[float, float]], Callable[[], tuple[float, float]]]] = {
            "what waits is copied by one memmove, 32 in flight": (
                lambda: run(REPLICAS, in_flight=32),
                lambda: run(REPLICAS, in_flight=32, block=_cloned()),
            ),
            "no walk through a plain call": (lambda: run(IN_CALLER), lambda: run(IN_CALLER, block=_walked(calling))),
            "asyncio, 12 in flight: one wake-up for answers that come together": (
                lambda: run(REPLICAS, ASYNCIO),
                lambda: run(REPLICAS, ASYNCIO, block=_by_threads()),
            ),
            "asyncio, 12 in flight, in the caller: computed in the loop where it is quick": (
                lambda: run(IN_CALLER, ASYNCIO),
                lambda: run(IN_CALLER, ASYNCIO, block=_by_threads()),
            ),
            "the calling thread in place of replicas": (lambda: run(IN_CALLER), lambda: run(REPLICAS)),
            "threads of the caller in place of replicas": (lambda: run(CALLER_THREADS), lambda: run(REPLICAS)),
        }
        rows = []
        for change, (with_it, without) in pairs.items():
            rounds = []
            for number in range(num_rounds):
                one = with_it() if number % 2 == 0 else None
                other = without()
                rounds.append((one or with_it(), other))
            ratios = sorted(one / other for (one, _), (other, _) in rounds)
            row = {"model": name, "change": change, "with_per_s": median(one for (one, _), _ in rounds)}
            row |= {"without_per_s": median(other for _, (other, _) in rounds), "ratio": median(ratios)}
            row |= {"low": ratios[len(ratios) // 4], "high": ratios[-1 - len(ratios) // 4]}
            row |= {"with_us": median(us for (_, us), _ in rounds), "without_us": median(us for _, (_, us) in rounds)}
            rows.append(row)
            print(*(f"{key}={value}" for key, value in row.items()), flush=True)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help="names with commas between")
    given = parser.parse_args()
    rows = [row for name in given.models for row in changes_of(name, given.rounds, given.seconds)]
    CHANGES.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
