"""The worker that measures on one device: it loads the stage, then obeys the host one command at a time."""

import importlib
import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from autosplit.backends.base import check, get_backend, reference
from autosplit.backends.probing import one_line
from autosplit.devices import accelerators
from autosplit.devices.accelerators import PROVIDERS, Accelerator, open_accelerator
from autosplit.errors import BackendError
from autosplit.measuring.canary import canary_s
from autosplit.measuring.events import AcceleratedTimer
from autosplit.measuring.links import Duty, Player
from autosplit.measuring.timing import Rounds, Timer, cut_s, eager_weights
from autosplit.tracing.splitting import StageProgram, load_stage
from autosplit.tracing.tensorspec import zeros
from autosplit.values.samples import Precision

INPUTS = "inputs.pt"
WEIGHT_PASSES = 2


@dataclass(frozen=True, slots=True)
class Load:
    """Load the stage saved in ``folder`` with the inputs beside it, for a device with these cores. No answer but None.

    ``providers``: who serves the kinds of accelerators, of which ``device`` may be one.
    ``packages``: the modules that define the user's operators.
    """

    folder: Path
    cores: tuple[int, ...]
    device: str = ""
    providers: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Canary:
    """Run the canary for so long. Answer: its seconds on the first core of the device at its fastest, or on the GPU."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Prepare:
    """Get ready to run the stage on a backend, and compare its numbers with f32 eager's. Answer: Prepared.

    ``keep``: what it was ready for before stays loaded, for ``Resume``.
    """

    backend: str
    threads: int
    weights: bool
    precision: Precision = "f32"
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """Get ready again for what was kept of the stage that is loaded. No answer but None."""

    backend: str
    threads: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Eager weights of the ops, empty unless asked for; the largest relative error; what is wrong with the numbers, or ''."""

    weights: Mapping[str, float]
    error: float
    fault: str = ""


@dataclass(frozen=True, slots=True)
class TimeWhole:
    """Time passes of the whole stage. Answer: seconds of each."""

    rounds: Rounds


@dataclass(frozen=True, slots=True)
class TimeOps:
    """Time whole passes and profiled ones in turn. Answer: Timed."""

    rounds: Rounds


@dataclass(frozen=True, slots=True)
class TimeCut:
    """Time the stages before and behind a cut, and both in one. Answer: seconds that the two take more; None if they cannot run.

    ``folders``: where these three are saved and prepared.
    """

    folders: tuple[Path, Path, Path]
    backend: str
    threads: int
    precision: Precision
    rounds: Rounds


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command gave, or the traceback of what it raised."""

    value: Any = None
    fault: str = ""


class Bench:
    """What the worker holds between commands."""

    def __init__(self) -> None:
        self._folder = Path()
        self._player = Player()
        self._cores: tuple[int, ...] = ()
        self._program: StageProgram | None = None
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._expected: dict[int, list[torch.Tensor]] = {}
        self._timer: Timer | AcceleratedTimer | None = None
        self._kept: dict[tuple[Path, str, int], Timer] = {}
        self._accelerator: Accelerator | None = None

    def obey(self, command: Load | Canary | Duty | Prepare | Resume | TimeWhole | TimeOps | TimeCut) -> Any:
        """Carry one command out."""
        match command:
            case Load(folder, cores, device, providers, packages):
                for package in packages:
                    importlib.import_module(package)
                self._folder, self._cores, self._program = folder, cores, load_stage(folder)
                self._expected.clear()
                self._inputs = tuple(torch.load(folder / INPUTS, weights_only=True))
                PROVIDERS.update(providers)
                self._accelerator = open_accelerator(device)
                return None
            case Canary(seconds):
                found = self._accelerator
                return canary_s(self._cores, 0.0, seconds) if found is None else accelerators.canary_s(found)
            case Duty():
                return self._player.play(command)
            case Prepare(backend, threads, weights, precision, keep):
                if not keep:
                    self._kept.clear()
                return self._prepare(backend, threads, weights, precision, keep)
            case Resume(backend, threads):
                self._timer = timer = self._kept[self._folder, backend, threads]
                timer.rouse()
                return None
            case TimeWhole(rounds):
                return self._ready.whole(rounds)
            case TimeOps(rounds):
                return self._ready.interleaved(rounds)
            case TimeCut():
                return _time_cut(command)

    @property
    def _ready(self) -> Timer | AcceleratedTimer:
        if self._timer is None:
            raise RuntimeError("the host timed a stage before it prepared it")
        return self._timer

    def _prepare(self, backend: str, threads: int, weights: bool, precision: Precision, keep: bool) -> Prepared:
        if self._program is None:
            raise RuntimeError("the host prepared a stage before it loaded it")
        self._timer = None
        if self._accelerator is not None:
            return self._place(self._program, self._accelerator, backend, weights, precision)
        shares = eager_weights(self._program, threads, self._inputs, WEIGHT_PASSES) if weights else {}
        if threads not in self._expected:
            self._expected[threads] = reference(self._program, self._inputs, threads)
        expected = self._expected[threads]
        try:
            self._timer = timer = Timer(self._program, self._folder, backend, threads, self._inputs, precision)
            error = check(
                get_backend(backend),
                self._program,
                self._inputs,
                precision=precision,
                threads=threads,
                runnable=timer.run,
                expected=expected,
            )
        except Exception as failure:
            return Prepared(shares, math.inf, _fault(backend, failure))
        if keep:
            self._kept[self._folder, backend, threads] = timer
        return Prepared(shares, error.relative)

    def _place(
        self, program: StageProgram, accelerator: Accelerator, backend: str, weights: bool, precision: Precision
    ) -> Prepared:
        """The same on an accelerator; no backend has eager's bits there."""
        shares: dict[str, float] = {}
        try:
            self._timer = timer = AcceleratedTimer(program, self._folder, backend, accelerator, self._inputs, precision)
            if weights:
                shares = timer.weights(program, WEIGHT_PASSES)
            error = check(get_backend(backend), program, self._inputs, precision=precision, runnable=timer.run, exact=False)
        except torch.OutOfMemoryError as failure:
            where = f"backend '{backend}' cannot be measured on {accelerator.device}, which takes the weights twice meanwhile"
            return Prepared(shares, math.inf, f"{where}: {' '.join(str(failure).split())[:200]}")
        except Exception as failure:
            return Prepared(shares, math.inf, _fault(backend, failure))
        return Prepared(shares, error.relative)


def _fault(backend: str, failure: Exception) -> str:
    """What to say of a backend that raised, so that the others are still measured."""
    return str(failure) if isinstance(failure, BackendError) else f"backend '{backend}' failed: {one_line(failure)}"


def _time_cut(command: TimeCut) -> float | None:
    try:
        inputs = [[zeros(spec) for spec in load_stage(folder).inputs] for folder in command.folders]
        load = get_backend(command.backend).load
        runs = [load(folder, command.threads, command.precision) for folder in command.folders]
        return cut_s(list(zip(runs, inputs, strict=True)), command.rounds)
    except Exception:  # an op of the user's may take no zeros, and a profile without the cost of a cut is better than none
        return None


def main(connection: Connection) -> None:
    """Obey until the host closes the connection."""
    bench = Bench()
    with torch.inference_mode():
        while True:
            command = connection.recv()
            try:
                answer = Answer(bench.obey(command))
            except Exception:
                answer = Answer(fault=traceback.format_exc())
            connection.send(answer)
