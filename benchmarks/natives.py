"""Models in the runtimes themselves, without autosplit: what a user has who calls torch, ONNX Runtime or OpenVINO directly.

Each runtime runs a tight loop over one input, once in a process with every core and once in pinned processes, one a core.
All compute in f32. Only the files of a stage folder are read, so that every runtime starts from the same traced program.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from autosplit.backends.base import get_backend
from autosplit.backends.onnxfile import open_onnx
from autosplit.backends.openvino import settings
from autosplit.processes import WorkerProcess, receive, spawn_worker
from autosplit.splitting import StageProgram, save_stage

RUNTIMES = {
    "torch eager": "eager",
    "torch.compile": "inductor",
    "ONNX Runtime": "onnxruntime",
    "OpenVINO latency": "openvino",
    "OpenVINO throughput": "openvino",
}
"""Runtime to the backend that prepares its files. torch.compile is TorchInductor ahead of time, with freezing."""

START_S = 240.0
Turn = Callable[[float], int]
"""Runs for about so many seconds; how many inputs were done."""


@dataclass
class Native:
    """A runtime in one or several processes, and the inputs that all of them did in each round, per second."""

    name: str
    workers: list[WorkerProcess]
    rounds_per_s: list[float] = field(default_factory=list)

    def run(self, seconds: float) -> float:
        """One round in all processes at once; inputs per second."""
        for worker in self.workers:
            worker.connection.send(seconds)
        return sum(float(receive(worker, START_S, f"a round of {self.name}")) for worker in self.workers)

    @property
    def throughput_per_s(self) -> float:
        """The median round."""
        return median(self.rounds_per_s)


def start(
    name: str, program: StageProgram, folder: Path, inputs: Sequence[Any], cores: Sequence[int], *, apart: bool, stack: ExitStack
) -> Native:
    """A runtime with all cores in one process, or in a pinned process on each; it ends with ``stack``.

    Raises: BackendError, WorkerError: the runtime does not take the model.
    """
    if not folder.exists():
        save_stage(program, folder)
    get_backend(RUNTIMES[name]).prepare(program, folder)
    arrays = [value.numpy() for value in inputs]
    workers = []
    for group in [[core] for core in cores] if apart else [list(cores)]:
        worker = spawn_worker("benchmarks.natives:serve", name=name, cores=group)
        stack.callback(worker.close)
        worker.connection.send((name, str(folder), len(group), arrays))
        workers.append(worker)
    for worker in workers:
        receive(worker, START_S, f"loading {name}")
    return Native(f"{name}, {'a process a core' if apart else 'all cores'}", workers)


def serve(connection: Any) -> None:
    """A worker: load, say so, then run for as long as each message says and answer with inputs per second."""
    name, folder, threads, arrays = connection.recv()
    load = {"ONNX Runtime": _onnxruntime, "OpenVINO latency": _openvino, "OpenVINO throughput": _openvino_streams}
    turn = load.get(name, _torch)(name, Path(folder), threads, arrays)
    turn(0.1)
    connection.send(os.getpid())
    while True:
        seconds = connection.recv()
        started = time.perf_counter()
        count = turn(seconds)
        connection.send(count / (time.perf_counter() - started))


def _repeat(call: Callable[[], object]) -> Turn:
    def turn(seconds: float) -> int:
        count, until = 0, time.perf_counter() + seconds
        while count == 0 or time.perf_counter() < until:
            call()
            count += 1
        return count

    return turn


def _torch(name: str, folder: Path, threads: int, arrays: Sequence[Any]) -> Turn:
    import torch

    torch.set_num_threads(threads)
    run = get_backend(RUNTIMES[name]).load(folder, threads)
    inputs = [torch.from_numpy(array) for array in arrays]

    def call() -> object:
        with torch.inference_mode():
            return run(inputs)

    return _repeat(call)


def _onnxruntime(name: str, folder: Path, threads: int, arrays: Sequence[Any]) -> Turn:
    """A session as a user opens it, apart from the number of threads: they spin while they wait."""
    import onnxruntime

    stage = open_onnx(folder)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(stage.path, options, providers=["CPUExecutionProvider"])
    feed = _feed(stage, arrays)
    return _repeat(lambda: session.run(None, feed))


def _openvino(name: str, folder: Path, threads: int, arrays: Sequence[Any]) -> Turn:
    import openvino

    stage = open_onnx(folder)
    core = openvino.Core()
    request = core.compile_model(core.read_model(stage.path), "CPU", settings(threads, "f32")).create_infer_request()
    feed = list(_feed(stage, arrays).values())
    return _repeat(lambda: request.infer(feed, share_inputs=True))


def _openvino_streams(name: str, folder: Path, threads: int, arrays: Sequence[Any]) -> Turn:
    """The throughput hint: OpenVINO chooses the streams, and as many requests as it asks for are under way."""
    import openvino

    stage = open_onnx(folder)
    core = openvino.Core()
    hints = {"PERFORMANCE_HINT": "THROUGHPUT", "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": str(threads)}
    queue = openvino.AsyncInferQueue(core.compile_model(core.read_model(stage.path), "CPU", hints))
    feed = list(_feed(stage, arrays).values())

    def turn(seconds: float) -> int:
        count, until = 0, time.perf_counter() + seconds
        while count == 0 or time.perf_counter() < until:
            queue.start_async(feed, share_inputs=True)
            count += 1
        queue.wait_all()
        return count

    return turn


def _feed(stage: Any, arrays: Sequence[Any]) -> dict[str, Any]:
    import torch

    return {port.name: port.dense(torch.from_numpy(array)).numpy() for port, array in zip(stage.inputs, arrays, strict=True)}
