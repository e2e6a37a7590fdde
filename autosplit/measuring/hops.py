"""Measure what a request costs beside its stage, on the real transport: the host's processor time, and a worker's.

A pipeline whose stage only reads memory runs on all devices at once. How much it reads decides how much of the host and of
the worker is still in the caches when a request is done: after 64 MiB they take four to six times as long as after 1 MiB.
All is processor time, so it holds whatever else the cores do.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autosplit.devices.processes import thread_times_s
from autosplit.running.modules import PythonFunction
from autosplit.running.pipeline import Pipeline
from autosplit.running.wiring import StagePlacement
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import Device

WARM_BYTES, COLD_BYTES = 1 << 20, 64 << 20
"""What a stage reads that leaves the last cache as it was, and one that leaves nothing of it."""
WARM_REQUESTS, COLD_REQUESTS = 160, 48
"""Over all devices."""
WARM_UP = 8
SIZE = 1024
"""Elements of a request and of its answer: what bytes cost, the links say."""

_memory: list[torch.Tensor] = []


@dataclass(frozen=True, slots=True)
class Hop:
    """Processor time of one request, in seconds: the host's, and a worker's outside of its stage."""

    host_s: float
    worker_s: float


def walk(request: torch.Tensor) -> torch.Tensor:
    """Read as many bytes as the request says; the answer is the processor time that this took, in seconds."""
    begun_s = time.thread_time()
    if not _memory:
        _memory.append(torch.ones(COLD_BYTES // 4))
    _memory[0][: int(request[0]) // 4].sum()
    answer = request.clone()
    answer[0] = time.thread_time() - begun_s
    return answer


def measure_hops(devices: Sequence[Device]) -> tuple[Hop, Hop]:
    """What a request costs while all these CPU devices are busy, with stages that leave the caches as they were or sweep them."""
    stage = StagePlacement(
        "walk",
        PythonFunction(f"{__name__}:walk", (__name__,)),
        inputs=(TensorSpec("request", (SIZE,), (1,), "float32"),),
        outputs=(TensorSpec("answer", (SIZE,), (1,), "float32"),),
        devices=tuple(devices),
        threads=1,
    )
    with Pipeline([stage], ["request"], ["answer"]) as pipeline:
        return _hop(pipeline, WARM_BYTES, WARM_REQUESTS), _hop(pipeline, COLD_BYTES, COLD_REQUESTS)


def _hop(pipeline: Pipeline, num_bytes: int, count: int) -> Hop:
    request = [torch.full((SIZE,), float(num_bytes))]
    pipeline.run_many([request] * WARM_UP)
    workers_s, host_s = sum(map(processor_s, pipeline.pids)), time.process_time()
    answers = pipeline.run_many([request] * count)
    host_s = time.process_time() - host_s
    workers_s = sum(map(processor_s, pipeline.pids)) - workers_s
    stages_s = sum(float(answer[0]) for (answer,) in answers)
    return Hop(host_s / count, max(0.0, workers_s - stages_s) / count)


def processor_s(pid: int) -> float:
    """The processor time that a process has had, all its threads together; 0 where the kernel does not say."""
    return sum(thread_times_s(pid, 0))
