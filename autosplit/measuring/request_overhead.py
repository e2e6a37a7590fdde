"""Measure the per-request overhead of the real transport: processor time of the host and of a worker beside its stage.

A pipeline whose stage only reads memory runs on all devices at once. The amount that it reads decides how much of the host's
and the worker's data is still cached when a request is done: after 64 MiB the overhead is four to six times that after 1 MiB.
Processor time does not depend on other load of the cores.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autosplit.devices.processes import thread_times_s
from autosplit.running.modules import PythonFunction
from autosplit.running.pipeline import Pipeline
from autosplit.running.stage import StagePlacement
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import Device

WARM_BYTES, COLD_BYTES = 1 << 20, 64 << 20
"""Bytes that a stage reads to leave the last-level cache as it was, and to sweep it."""
WARM_REQUESTS, COLD_REQUESTS = 160, 48
"""Requests in all, shared by the devices."""
WARM_UP = 8
SIZE = 1024
"""Elements of a request and of its answer; the links charge for bytes."""

_memory: list[torch.Tensor] = []


@dataclass(frozen=True, slots=True)
class RequestOverhead:
    """Processor time of one request in seconds: of the host, and of a worker outside its stage."""

    host_s: float
    worker_s: float


def read_memory(request: torch.Tensor) -> torch.Tensor:
    """The stage: read as many bytes as the request says. The answer is the processor time of that, in seconds."""
    begun_s = time.thread_time()
    if not _memory:
        _memory.append(torch.ones(COLD_BYTES // 4))
    _memory[0][: int(request[0]) // 4].sum()
    answer = request.clone()
    answer[0] = time.thread_time() - begun_s
    return answer


def measure_request_overhead(devices: Sequence[Device]) -> tuple[RequestOverhead, RequestOverhead]:
    """The overhead while all these CPU devices are busy: with warm caches, and with stages that sweep them."""
    stage = StagePlacement(
        "read_memory",
        PythonFunction(f"{__name__}:read_memory", (__name__,)),
        inputs=(TensorSpec("request", (SIZE,), (1,), "float32"),),
        outputs=(TensorSpec("answer", (SIZE,), (1,), "float32"),),
        devices=tuple(devices),
        threads=1,
    )
    with Pipeline([stage], ["request"], ["answer"]) as pipeline:
        return _overhead(pipeline, WARM_BYTES, WARM_REQUESTS), _overhead(pipeline, COLD_BYTES, COLD_REQUESTS)


def _overhead(pipeline: Pipeline, num_bytes: int, count: int) -> RequestOverhead:
    request = [torch.full((SIZE,), float(num_bytes))]
    pipeline.run_many([request] * WARM_UP)
    workers_s, host_s = sum(map(processor_s, pipeline.pids)), time.process_time()
    answers = pipeline.run_many([request] * count)
    host_s = time.process_time() - host_s
    workers_s = sum(map(processor_s, pipeline.pids)) - workers_s
    stages_s = sum(float(answer[0]) for (answer,) in answers)
    return RequestOverhead(host_s / count, max(0.0, workers_s - stages_s) / count)


def processor_s(pid: int) -> float:
    """Processor time of all threads of a process, in seconds; 0 where the kernel does not say."""
    return sum(thread_times_s(pid, 0))
