"""Models in the runtimes themselves, without autosplit: what a user has who calls torch, ONNX Runtime or OpenVINO directly.

Each runtime runs a tight loop over one input, once in a process with every core and once in pinned processes, one a core;
all runtimes are loaded into the same processes, of which one is at work at a time, or those on single cores together.
All compute in f32. Only the files of a stage folder are read, so that every runtime starts from the same traced program.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from autosplit.backends.base import get_backend
from autosplit.backends.onnxfile import open_onnx
from autosplit.backends.openvino import settings
from autosplit.devices.processes import Worker, receive, spawn_worker
from autosplit.errors import AutosplitError
from autosplit.tracing.splitting import StageProgram, save_stage

RUNTIMES = {
    "torch eager": "eager",
    "torch.compile": "inductor",
    "ONNX Runtime": "onnxruntime",
    "OpenVINO latency": "openvino",
    "OpenVINO throughput": "openvino",
}
"""Runtime to the backend that prepares its files. torch.compile is TorchInductor ahead of time, with freezing."""

START_S = 240.0
TRY_S, SLOW_S = 0.35, 0.7
Turn = Callable[[float], int]
"""Runs for about so many seconds; how many inputs were done."""


@dataclass(frozen=True, slots=True)
class Load:
    """Get a runtime ready for the stage in ``folder``, and try it. Answer: inputs per second, or why it does not take it."""

    runtime: str
    folder: Path
    threads: int
    arrays: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Run:
    """Run a runtime that was loaded for about so many seconds. Answer: inputs per second."""

    runtime: str
    seconds: float


@dataclass
class Native:
    """A runtime in one or several processes, and the inputs that all of them did in each round, per second."""

    name: str
    runtime: str
    workers: Sequence[Worker]
    tried_per_s: float
    rounds_per_s: list[float] = field(default_factory=list)

    def run(self, seconds: float) -> float:
        """One round in all processes at once; inputs per second."""
        for worker in self.workers:
            worker.connection.send(Run(self.runtime, seconds))
        return sum(float(receive(worker, START_S, f"during a round of {self.name}")) for worker in self.workers)

    @property
    def throughput_per_s(self) -> float:
        """The median round."""
        return median(self.rounds_per_s)


def prepare_all(runtimes: Sequence[str], program: StageProgram, folder: Path) -> dict[str, str]:
    """Write what the runtimes load into ``folder``; what is there already stays. Returns: what refuses it, with the reason."""
    if not folder.exists():
        save_stage(program, folder)
    failures = {}
    for runtime in runtimes:
        try:
            get_backend(RUNTIMES[runtime]).prepare(program, folder)
        except AutosplitError as failure:
            failures[runtime] = str(failure).splitlines()[0]
    return failures


def start_all(
    runtimes: Sequence[str],
    folder: Path,
    inputs: Sequence[Any],
    cores: Sequence[int],
    stack: ExitStack,
    failures: Mapping[str, str],
) -> tuple[list[Native], dict[str, str]]:
    """The runtimes with all cores in one process, and in a pinned process on each; they end with ``stack``.

    ``failures``: what ``prepare_all`` gave for the folder. Returns: those that take the model, and of the others the reason.
    """
    failures = dict(failures)
    arrays = [value.numpy() for value in inputs]
    crews = {"all cores": [list(cores)], "a process a core": [[core] for core in cores]}
    workers = {
        way: [spawn_worker("benchmarks.natives:serve", name=way, cores=group) for group in groups]
        for way, groups in crews.items()
    }
    for worker in (worker for crew in workers.values() for worker in crew):
        stack.callback(worker.close)
    loaded = []
    for runtime in (runtime for runtime in runtimes if runtime not in failures):
        for way, crew in workers.items():
            for worker, group in zip(crew, crews[way], strict=True):
                worker.connection.send(Load(runtime, folder, len(group), arrays))
            answers = [receive(worker, START_S, f"during loading {runtime}") for worker in crew]
            refusals = [answer for answer in answers if isinstance(answer, str)]
            if refusals:
                failures[runtime] = refusals[0]
            else:
                loaded.append(Native(f"{runtime}, {way}", runtime, crew, sum(answers)))
    return loaded, failures


def serve(connection: Any) -> None:
    """A worker: obey until the host closes the connection."""
    turns: dict[str, Turn] = {}
    while True:
        match connection.recv():
            case Load(runtime, folder, threads, arrays):
                try:
                    turns[runtime] = load_turn(runtime, folder, threads, arrays)
                    connection.send(_try(turns[runtime]))
                except Exception as failure:
                    connection.send(f"{type(failure).__name__}: {failure}".splitlines()[0])
            case Run(runtime, seconds):
                connection.send(_per_s(turns[runtime], seconds))


def load_turn(runtime: str, folder: Path, threads: int, arrays: Sequence[Any]) -> Turn:
    """A prepared runtime as a loop over one input."""
    load = {"ONNX Runtime": _onnxruntime, "OpenVINO latency": _openvino, "OpenVINO throughput": _openvino_streams}
    return load.get(runtime, _torch)(runtime, folder, threads, arrays)


def _try(turn: Turn) -> float:
    """Inputs per second in a short run, after a shorter one, unless that took long: then it is the answer itself."""
    started = time.perf_counter()
    first_per_s = _per_s(turn, 0.1)
    return first_per_s if time.perf_counter() - started > SLOW_S else _per_s(turn, TRY_S)


def _per_s(turn: Turn, seconds: float) -> float:
    started = time.perf_counter()
    count = turn(seconds)
    return count / (time.perf_counter() - started)


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
    run = get_backend(RUNTIMES[name]).load(folder, threads, trust=True)
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
