"""Requests through ``submit`` of an opened plan, as users send them; run as a program, it shows what each change brings.

    python -m benchmarks.submitting [--rounds 7] [--seconds 1] [--models NAME,...]

Each change is measured with and without it, in interleaved rounds on one opened plan or on two: requests per second, and
processor time of this process for a request, which a busy machine changes less. Both go to benchmarks/changes.json, and from
there into benchmarks/models.md (``python -m benchmarks.models --write-table``).

Two small models are measured beside the runtimes' own loops: OpenVINO's AsyncInferQueue that one thread feeds and whose
answers nobody reads, and two threads that call one session of ONNX Runtime.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from autosplit import api
from autosplit.backends.base import has_streams
from autosplit.deploying.service import Call, Service, as_call
from autosplit.devices.discovering import machine_for
from autosplit.planning.baselines import CALLER_THREADS, IN_CALLER, REPLICAS, baselines_by_backend
from autosplit.running.awaiting import Awaiting
from autosplit.running.intake import InputCopies
from autosplit.running.request import Request
from autosplit.shapes.pipelines import open_pipeline
from autosplit.tracing.splitting import split
from benchmarks import natives

CHANGES = Path("benchmarks/changes.json")
NUM_THREADS = 8
ONE_THREAD, THREADS, ASYNCIO = "one thread", f"{NUM_THREADS} threads", "asyncio"
LOADS = ((ONE_THREAD, 1), (ONE_THREAD, 4), (ONE_THREAD, 12), (ONE_THREAD, 64), (THREADS, 64), (ASYNCIO, 12), (ASYNCIO, 64))
"""Who sends requests, and how many are in flight."""

SMALL = {"two-tower ranker": "benchmarks.submitting:ranker", "keyword spotter": "benchmarks.submitting:spotter"}
"""Models of about 1 ms and 0.3 ms on one core."""

MODELS = {
    "MLP 6 x 256²": ("autosplit.examples.mlp:mlp?depth=6&width=256", "onnxruntime"),
    "MLP 24 x 512²": ("autosplit.examples.mlp:mlp?depth=24&width=512", "onnxruntime"),
    "MobileNetV2": ("transformers:MobileNetV2Model", "openvino"),
}


def ranker() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Scores of 64 candidates for a history of 50 items: embeddings, and a tower of three linear layers for each side."""

    def tower() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 128))

    class Ranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(10_000, 64)
            self.user, self.item = tower(), tower()

        def forward(self, history: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
            user, item = self.user(self.items(history).sum(1)), self.item(self.items(candidates))
            return nn.functional.normalize(item, dim=-1) @ nn.functional.normalize(user, dim=-1).unsqueeze(-1)

    torch.manual_seed(0)
    return Ranker().eval(), (torch.randint(0, 10_000, (1, 50)), torch.randint(0, 10_000, (1, 64)))


def spotter() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Classes of 98 frames of 40 coefficients: temporal convolutions with residuals, as TC-ResNet (Choi et al., 2019)."""

    class Block(nn.Module):
        def __init__(self, num_in: int, num_out: int) -> None:
            super().__init__()
            first = nn.Conv1d(num_in, num_out, 9, stride=2, padding=4, bias=False)
            second = nn.Conv1d(num_out, num_out, 9, padding=4, bias=False)
            self.long = nn.Sequential(first, nn.BatchNorm1d(num_out), nn.ReLU(), second, nn.BatchNorm1d(num_out))
            self.short = nn.Sequential(nn.Conv1d(num_in, num_out, 1, stride=2, bias=False), nn.BatchNorm1d(num_out))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.long(x) + self.short(x))

    class Spotter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (32, 48, 64, 96)
            blocks = [Block(*pair) for pair in pairwise(widths)]
            self.frames = nn.Sequential(nn.Conv1d(40, widths[0], 3, padding=1, bias=False), *blocks)
            self.classes = nn.Linear(widths[-1], 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.classes(self.frames(x).mean(2))

    torch.manual_seed(0)
    return Spotter().eval(), (torch.randn(1, 40, 98),)


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

    def clone(copies: InputCopies, request: Request) -> None:
        request.inputs = tuple(value.clone() for value in request.inputs)

    kept, InputCopies.hold = InputCopies.hold, clone  # type: ignore[method-assign]
    try:
        yield
    finally:
        InputCopies.hold = kept  # type: ignore[method-assign]


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
        return [_compare(name, change, with_it, without, num_rounds) for change, (with_it, without) in pairs.items()]


Measured = Callable[[], tuple[float, float]]
"""One round: requests per second, and microseconds of processor time for a request."""


def _compare(model: str, change: str, with_it: Measured, without: Measured, num_rounds: int) -> dict[str, Any]:
    """A row: medians of interleaved rounds with a change and without it, and the ratio with its quartiles."""
    rounds = []
    for number in range(num_rounds):
        one = with_it() if number % 2 == 0 else None
        other = without()
        rounds.append((one or with_it(), other))
    ratios = sorted(one / other for (one, _), (other, _) in rounds)
    row: dict[str, Any] = {"model": model, "change": change, "with_per_s": median(one for (one, _), _ in rounds)}
    row |= {"without_per_s": median(other for _, (other, _) in rounds), "ratio": median(ratios)}
    row |= {"low": ratios[len(ratios) // 4], "high": ratios[-1 - len(ratios) // 4]}
    row |= {"with_us": median(us for (_, us), _ in rounds), "without_us": median(us for _, (_, us) in rounds)}
    print(*(f"{key}={value}" for key, value in row.items()), flush=True)
    return row


def beside_runtimes(name: str, num_rounds: int, seconds: float) -> list[dict[str, Any]]:
    """For a small model, ``submit`` with 12 in flight beside the own loop of each runtime."""
    traced, machine = api.trace(SMALL[name]), machine_for(None)
    arrays, rows = [value.numpy() for value in traced.example_inputs], []
    [program] = split(traced, [[op.name for op in traced.graph.ops]])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "stage"
        natives.prepare_all(["ONNX Runtime", "OpenVINO throughput"], program, folder)
        queue = natives.load_turn("OpenVINO throughput", folder, len(machine.devices), arrays)
        session = natives.load_turn("ONNX Runtime", folder, 1, arrays)

        def feed_session(seconds: float) -> int:
            with ThreadPoolExecutor(len(machine.devices)) as pool:
                return sum(pool.map(session, [seconds] * len(machine.devices)))

        loops = {"openvino": ("OpenVINO's own queue", queue), "onnxruntime": ("ONNX Runtime fed by threads", feed_session)}
        for backend, (way, loop) in loops.items():
            streaming = [backend] if has_streams(backend) else []
            first = machine.devices[0].name
            plans = baselines_by_backend(traced.graph, machine, traced.source, [], backend, first, streaming, [backend])
            service = stack.enter_context(open_pipeline(traced, plans[f"{CALLER_THREADS} ({backend})"]))
            call = service.bind_call(traced.example_inputs)
            with_it = functools.partial(_measured, functools.partial(_keep_for, call), seconds)
            without = functools.partial(_measured, loop, seconds)
            rows.append(_compare(name, f"submit in place of {way}", with_it, without, num_rounds))
    return rows


def _keep_for(call: Call, seconds: float) -> int:
    """Keep 12 requests in flight; return how many were answered."""
    return _keep(call, 12, time.perf_counter() + seconds)


def _measured(loop: Callable[[float], int], seconds: float) -> tuple[float, float]:
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    count = loop(seconds)
    return count / (time.perf_counter() - begun_s), 1e6 * (time.process_time() - cpu_s) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    names = [*MODELS, *SMALL]
    parser.add_argument("--models", type=lambda text: text.split(","), default=names, help="names with commas between")
    given = parser.parse_args()
    rows = [row for row in json.loads(CHANGES.read_text(encoding="utf-8")) if row["model"] not in given.models]
    for name in given.models:
        rows += (beside_runtimes if name in SMALL else changes_of)(name, given.rounds, given.seconds)
    CHANGES.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
