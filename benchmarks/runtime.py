"""Measure the runtime's speed and steadiness: ``python -m benchmarks.runtime [ring|empty|peers|soak ...]``; all by default.

Things that are compared run in interleaved rounds in one process. Each figure is a median with its smallest and largest round,
because a single figure says little on a shared machine.
"""

import argparse
import itertools
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from autosplit.running.messages import WorkerEvent
from autosplit.running.modules import PythonFunction, StageFolder
from autosplit.running.pipeline import Pipeline
from autosplit.running.stage import StagePlacement
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import parse_device
from benchmarks import peers, ringbench

MODELS = ["autosplit.examples.mlp:mlp?depth=8&width=256", "transformers:MobileNetV2Model"]
"""A model of stages so small that the transport decides, and one of common stages."""


def same(x: torch.Tensor) -> torch.Tensor:
    """An empty stage."""
    return x


def show(title: str, rows: Iterable[Mapping[str, object]]) -> None:
    """Print a table."""
    cells = [{key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()} for row in rows]
    print(f"\n{title}")
    widths = {key: max(len(key), *(len(row[key]) for row in cells)) for key in cells[0]}
    print("  ".join(key.rjust(width) for key, width in widths.items()))
    for row in cells:
        print("  ".join(row[key].rjust(width) for key, width in widths.items()), flush=True)


def take(pipeline: Pipeline, request: Sequence[torch.Tensor], count: int) -> None:
    """Stream ``count`` requests through a pipeline, and drop each answer."""
    for _ in pipeline.stream(itertools.repeat(request, count)):
        pass


def empty_pipeline(num_bytes: int, num_stages: int, queue_depth: int = 4) -> Pipeline:
    """A pipeline of stages that do nothing, on two cores in turn."""
    cores = peers.two_cores()
    module = PythonFunction("benchmarks.runtime:same", ("benchmarks",))
    specs = [TensorSpec(f"v{number}", (num_bytes // 4,), (1,), "float32") for number in range(num_stages + 1)]
    stages = [
        StagePlacement(
            f"empty{number}",
            module,
            (specs[number],),
            (specs[number + 1],),
            (parse_device(f"cpu:{cores[number % 2]}"),),
            queue_depth=queue_depth,
        )
        for number in range(num_stages)
    ]
    return Pipeline(stages, ["v0"], [f"v{num_stages}"])


def empty(rounds: int = 5) -> None:
    """Requests per second and latency of stages that do nothing, which is the cost of the runtime itself."""
    rows = []
    for num_stages, (num_bytes, queue_depth) in itertools.product((1, 2, 3), ((4096, 4), (4096, 16), (614_400, 4))):
        with empty_pipeline(num_bytes, num_stages, queue_depth) as pipeline:
            request = [torch.ones(num_bytes // 4)]
            take(pipeline, request, 200)
            rates = []
            for _ in range(rounds):
                start = time.perf_counter()
                take(pipeline, request, 1000)
                rates.append(1000 / (time.perf_counter() - start))
            pipeline.stats(clear=True)
            for _ in range(300):
                pipeline.run(request)
            alone = pipeline.stats().latency
        rows.append(
            {
                "stages": num_stages,
                "bytes": num_bytes,
                "queue_depth": queue_depth,
                "requests_per_s": statistics.median(rates),
                "min": min(rates),
                "max": max(rates),
                "latency_us": alone.p50_s * 1e6,
                "p99_us": alone.p99_s * 1e6,
            }
        )
    show("Empty stages: throughput in a stream, latency of one request at a time", rows)


def compare(spec: str, rounds: int = 7, round_s: float = 2.5) -> None:
    """Two stages in this runtime and in others, each stage on one thread of its own core."""
    traced = trace(load_model(spec))
    programs = peers.balanced_cut(traced)
    value = traced.example_inputs[0]
    cores = peers.two_cores()
    with ExitStack() as stack:
        folders = peers.save(programs, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stages = [
            StagePlacement(
                program.name, StageFolder(folder, trust=True), program.inputs, program.outputs, (parse_device(f"cpu:{core}"),)
            )
            for program, folder, core in zip(programs, folders, cores, strict=True)
        ]
        pipeline = stack.enter_context(Pipeline(stages, traced.graph.inputs, traced.graph.outputs))
        shares: list[Shares] = []

        def ours(count: int) -> float:
            start = time.perf_counter()
            take(pipeline, [value], count)
            seconds = time.perf_counter() - start
            shares.append(bottleneck_shares(pipeline.events(clear=True), seconds))
            return seconds

        ways = {
            "autosplit": ours,
            "plain loop, 1 core": peers.plain_loop(stack, folders, value, cores[:1]),
            "plain loop, 2 threads": peers.plain_loop(stack, folders, value, cores),
            "gloo pipelining": peers.gloo(stack, folders, value, cores),
        }
        try:
            ways["Ray compiled graph"] = peers.ray_graph(stack, folders, value, cores)
        except ImportError:
            print("Ray is left out: it is not installed (pip install 'autosplit[ray]')", file=sys.stderr)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        ours(64)
        batch = peers.NUM_MICROBATCHES
        num_requests = batch * max(4, min(500, round(round_s * 64 / ours(64) / batch)))
        for way in ways.values():
            way(2 * batch)
        shares.clear()
        for number in range(rounds):
            for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
                rates[name].append(num_requests / ways[name](num_requests))
    rows = [
        {
            "way": name,
            "items_per_s": statistics.median(found),
            "min": min(found),
            "max": max(found),
            "of autosplit": statistics.median(one / ours for one, ours in zip(found, rates["autosplit"], strict=True)),
        }
        for name, found in rates.items()
    ]
    crossing = peers.stages_between(programs)
    show(f"{spec} in two stages, {crossing} bytes between them, rounds of {num_requests} requests", rows)
    busy, transfer, wait, ends = (statistics.median(part) for part in zip(*shares, strict=True))
    print(
        f"throughput x mean time of the slowest stage: {busy:.3f}; it copies {transfer:.3f} of the time and waits {wait:.3f}, "
        f"and for {ends:.3f} the pipeline fills or drains"
    )


class Shares(NamedTuple):
    """Shares of a round that the busiest worker computed, copied and waited; the rest is its bookkeeping."""

    busy: float
    transfer: float
    wait: float
    ends: float


def bottleneck_shares(events: Sequence[Sequence[WorkerEvent]], seconds: float) -> Shares:
    """Shares of a round of ``seconds`` for the worker that was busy longest.

    Its busy share is the throughput times its mean time for a request.
    """
    busiest = max(events, key=lambda mine: sum(event.ran_ns - event.got_ns for event in mine))
    first_ns = busiest[0].got_ns
    busy = sum(event.ran_ns - event.got_ns for event in busiest)
    transfer = sum(event.sent_ns - event.ran_ns - event.blocked_ns for event in busiest)
    wait = sum(max(0, event.got_ns - max(event.asked_ns, first_ns)) + event.blocked_ns for event in busiest)
    ends = seconds - (busiest[-1].sent_ns - first_ns) / 1e9
    return Shares(busy / 1e9 / seconds, transfer / 1e9 / seconds, wait / 1e9 / seconds, ends / seconds)


def soak(seconds: float = 60.0) -> None:
    """Full load for ``seconds``: memory and descriptors of the host and of its workers before and after."""
    host = psutil.Process()
    with empty_pipeline(65_536, 2) as pipeline:
        request = [torch.ones(16_384)]
        for _ in range(20):  # until the bounded histories are full
            take(pipeline, request, 1000)
        processes = [host, *(psutil.Process(pid) for pid in pipeline.pids)]
        before = [(one.memory_info().rss, one.num_fds()) for one in processes]
        count, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            take(pipeline, request, 1000)
            count += 1000
        after = [(one.memory_info().rss, one.num_fds()) for one in processes]
        restarts = pipeline.restarts
    rows = [
        {
            "process": name,
            "resident_before_mb": start[0] / 1e6,
            "resident_after_mb": end[0] / 1e6,
            "descriptors_before": start[1],
            "descriptors_after": end[1],
        }
        for name, start, end in zip(("host", "stage 0", "stage 1"), before, after, strict=True)
    ]
    show(f"Soak: {count} requests in {seconds:.0f} s, {restarts} restarts", rows)


def main() -> None:
    """Run the parts that are named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["ring", "empty", "peers", "soak"], help="ring, empty, peers, soak")
    parser.add_argument("--models", nargs="+", default=MODELS, help="the models of the comparison with peers")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the soak")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    parts = {
        "ring": lambda: show("Ring between two pinned processes", ringbench.measure(options.rounds)),
        "empty": lambda: empty(options.rounds),
        "peers": lambda: [compare(model, options.rounds) for model in options.models],
        "soak": lambda: soak(options.seconds),
    }
    for part in options.parts:
        if part not in parts:
            parser.error(f"'{part}' is none of {', '.join(parts)}")
        parts[part]()


if __name__ == "__main__":
    main()
