"""The worker that measures on one device: it carries out one command of the host at a time."""

import importlib
import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from autosplit.backends.base import check, get_backend, reference
from autosplit.backends.probing import one_line
from autosplit.devices import accelerators
from autosplit.devices.accelerators import PROVIDERS, Accelerator, open_accelerator
from autosplit.errors import BackendError
from autosplit.measuring.accelerator_timer import AcceleratorTimer
from autosplit.measuring.calibration import kernel_s
from autosplit.measuring.link_ends import LinkEnd, OnAccelerator, OnCores, play
from autosplit.measuring.model_files import INPUTS
from autosplit.measuring.stage_timer import PassBudget, Timer, cut_s, eager_op_s
from autosplit.tracing.splitting import StageProgram, load_stage
from autosplit.tracing.tensorspec import zeros
from autosplit.values.samples import Precision

NUM_EAGER_PASSES = 2


@dataclass(frozen=True, slots=True)
class Open:
    """Open the device: the name may be of an accelerator, ``providers`` serve those, ``packages`` define the user's operators."""

    device: str
    cores: tuple[int, ...]
    providers: Mapping[str, str]
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Calibrate:
    """Run the calibration kernel for some seconds. Answer: its fastest time in seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Prepare:
    """Load the stage in ``folder`` and check its numbers against f32 eager's, unless it is ready. Answer: Prepared.

    Attributes:
        eager: also time every op in eager.
        keep: keep the stages that were prepared before.
    """

    folder: Path
    backend: str
    threads: int
    precision: Precision = "f32"
    eager: bool = False
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """Eager's seconds of every op, empty unless asked for; the largest relative error; the fault, or ''."""

    eager_s: Mapping[str, float]
    error: float
    fault: str = ""


@dataclass(frozen=True, slots=True)
class TimeWhole:
    """Time passes of the prepared stage, after one that ``wake`` leaves out. Answer: seconds of each."""

    budget: PassBudget
    wake: bool = False


@dataclass(frozen=True, slots=True)
class TimeOps:
    """Time whole and profiled passes in turn. Answer: Timed."""

    budget: PassBudget


@dataclass(frozen=True, slots=True)
class TimeCut:
    """Time the stages before and behind a cut, and both as one. Answer: the extra seconds of the cut; None if they do not run."""

    folders: tuple[Path, Path, Path]
    backend: str
    threads: int
    precision: Precision
    budget: PassBudget


Command = Open | Calibrate | LinkEnd | Prepare | TimeWhole | TimeOps | TimeCut


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a command, or the traceback of its failure."""

    value: Any = None
    fault: str = ""


class DeviceState:
    """The device of a worker, and the stages that are ready on it."""

    def __init__(self) -> None:
        self._cores: tuple[int, ...] = ()
        self._accelerator: Accelerator | None = None
        self._place: OnCores | OnAccelerator | None = None
        self._loaded: dict[Path, tuple[StageProgram, tuple[torch.Tensor, ...]]] = {}
        self._expected: dict[tuple[Path, int], list[torch.Tensor]] = {}
        self._ready: dict[tuple[Path, str, int], tuple[Timer | AcceleratorTimer, Prepared]] = {}
        self._timer: Timer | AcceleratorTimer | None = None

    def obey(self, command: Command) -> Any:
        """Carry out one command."""
        match command:
            case Open(device, cores, providers, packages):
                for package in packages:
                    importlib.import_module(package)
                PROVIDERS.update(providers)
                self._cores, self._accelerator = cores, open_accelerator(device)
                return None
            case Calibrate(seconds):
                found = self._accelerator
                return kernel_s(self._cores, 0.0, seconds) if found is None else accelerators.calibration_s(found)
            case LinkEnd():
                if self._place is None:
                    self._place = OnCores() if self._accelerator is None else OnAccelerator(self._accelerator)
                torch.set_num_threads(1)  # a stage copies and reads its messages in one thread
                return play(command, self._place)
            case Prepare():
                return self._prepare(command)
            case TimeWhole(budget, wake):
                return self._prepared.whole(budget, wake)
            case TimeOps(budget):
                return self._prepared.interleaved(budget)
            case TimeCut():
                return _time_cut(command)

    @property
    def _prepared(self) -> Timer | AcceleratorTimer:
        if self._timer is None:
            raise RuntimeError("the host timed a stage before it prepared it")
        return self._timer

    def _prepare(self, command: Prepare) -> Prepared:
        folder, name, threads, precision = command.folder, command.backend, command.threads, command.precision
        self._timer = None
        if (folder, name, threads) in self._ready:
            self._timer, prepared = self._ready[folder, name, threads]
            return prepared
        if not command.keep or self._accelerator is not None:
            self._ready.clear()
        program, inputs = self._load(folder)
        backend, eager_s = get_backend(name), {}
        if self._accelerator is None:
            # Outside the try: a model that fails in eager is no fault of the backend.
            eager_s = eager_op_s(program, threads, inputs, NUM_EAGER_PASSES) if command.eager else {}
            if (folder, threads) not in self._expected:
                self._expected[folder, threads] = reference(program, inputs, threads)
        timer: Timer | AcceleratorTimer
        try:
            if self._accelerator is None:
                timer, expected = Timer(program, folder, name, threads, inputs, precision), self._expected[folder, threads]
                error = check(
                    backend, program, inputs, precision=precision, threads=threads, runnable=timer.run, expected=expected
                )
            else:
                timer = AcceleratorTimer(program, folder, name, self._accelerator, inputs, precision)
                eager_s = timer.eager_op_s(program, NUM_EAGER_PASSES) if command.eager else {}
                error = check(backend, program, inputs, precision=precision, runnable=timer.run, exact=False)
        except Exception as failure:
            return Prepared(eager_s, math.inf, _fault(name, failure))
        self._timer, prepared = timer, Prepared(eager_s, error.relative)
        self._ready[folder, name, threads] = timer, prepared
        return prepared

    def _load(self, folder: Path) -> tuple[StageProgram, tuple[torch.Tensor, ...]]:
        if folder not in self._loaded:
            self._loaded[folder] = load_stage(folder), tuple(torch.load(folder / INPUTS, weights_only=True))
        return self._loaded[folder]


def _fault(backend: str, failure: Exception) -> str:
    """The sentence on a backend that raised, so that the others are still measured."""
    if isinstance(failure, torch.OutOfMemoryError):
        limit = "device memory is too small: measuring needs room for the weights twice"
        return f"backend '{backend}' cannot be measured, {limit}: {' '.join(str(failure).split())[:200]}"
    return str(failure) if isinstance(failure, BackendError) else f"backend '{backend}' failed: {one_line(failure)}"


def _time_cut(command: TimeCut) -> float | None:
    try:
        inputs = [[zeros(spec) for spec in load_stage(folder).inputs] for folder in command.folders]
        load = get_backend(command.backend).load
        runs = [load(folder, command.threads, command.precision) for folder in command.folders]
        return cut_s(list(zip(runs, inputs, strict=True)), command.budget)
    except Exception:  # an op of the user's may refuse zeros, and a profile without the cost of a cut is better than none
        return None


def main(connection: Connection) -> None:
    """Obey until the host closes the connection."""
    state = DeviceState()
    with torch.inference_mode():
        while True:
            command = connection.recv()
            try:
                answer = Answer(state.obey(command))
            except Exception:
                answer = Answer(fault=traceback.format_exc())
            connection.send(answer)
