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
from autosplit.measuring.stage_timer import LoadedStage, PassBudget, Timer, cut_s, eager_op_s
from autosplit.tracing.splitting import load_stage
from autosplit.tracing.tensorspec import zeros
from autosplit.values.samples import Precision


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
class Time:
    """Time passes of the prepared stage; ``ops`` and ``wake`` as in ``Timer.time``. Answer: Timed."""

    budget: PassBudget
    ops: bool = False
    wake: bool = False


@dataclass(frozen=True, slots=True)
class TimeCut:
    """Time the stages before and behind a cut, and both as one. Answer: the extra seconds of the cut; None if they do not run."""

    folders: tuple[Path, Path, Path]
    backend: str
    threads: int
    precision: Precision
    budget: PassBudget


Command = Open | Calibrate | LinkEnd | Prepare | Time | TimeCut


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
        self._loaded: dict[Path, LoadedStage] = {}
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
            case Time(budget, ops, wake):
                if self._timer is None:
                    raise RuntimeError("the host timed a stage before it prepared it")
                return self._timer.time(budget, ops, wake)
            case TimeCut():
                return _time_cut(command)

    def _prepare(self, command: Prepare) -> Prepared:
        folder, name, threads, precision = command.folder, command.backend, command.threads, command.precision
        self._timer = None
        if (folder, name, threads) in self._ready:
            self._timer, prepared = self._ready[folder, name, threads]
            return prepared
        if not command.keep or self._accelerator is not None:
            self._ready.clear()
        if folder not in self._loaded:
            self._loaded[folder] = LoadedStage.load(folder)
        stage, backend, eager_s = self._loaded[folder], get_backend(name), {}
        program, inputs = stage.program, stage.inputs
        if self._accelerator is None:
            # Outside the try: a model that fails in eager is no fault of the backend.
            eager_s = eager_op_s(stage, threads) if command.eager else {}
            if (folder, threads) not in self._expected:
                self._expected[folder, threads] = reference(program, inputs, threads)
        timer: Timer | AcceleratorTimer
        try:
            if self._accelerator is None:
                timer, expected = Timer(stage, name, threads, precision), self._expected[folder, threads]
                made = timer.outputs
                error = check(
                    backend, program, inputs, precision=precision, threads=threads, runnable=lambda _: made, expected=expected
                )
            else:
                timer = AcceleratorTimer(stage, name, self._accelerator, precision)
                eager_s = timer.eager_op_s() if command.eager else {}
                error = check(backend, program, inputs, precision=precision, runnable=timer.run, exact=False)
        except Exception as failure:
            return Prepared(eager_s, math.inf, _fault(name, failure))
        self._timer, prepared = timer, Prepared(eager_s, error.relative)
        self._ready[folder, name, threads] = timer, prepared
        return prepared


def _fault(backend: str, failure: Exception) -> str:
    """The sentence on a backend that raised, so that the others are still measured."""
    if isinstance(failure, torch.OutOfMemoryError):
        limit = "device memory is too small: measuring needs room for the weights twice"
        return f"backend '{backend}' cannot be measured, {limit}: {' '.join(str(failure).split())[:200]}"
    return str(failure) if isinstance(failure, BackendError) else f"backend '{backend}' failed: {one_line(failure)}"


def _time_cut(command: TimeCut) -> float | None:
    try:
        inputs = [[zeros(spec) for spec in load_stage(folder, trust=True).inputs] for folder in command.folders]
        load = get_backend(command.backend).load
        runs = [load(folder, command.threads, command.precision, trust=True) for folder in command.folders]
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
