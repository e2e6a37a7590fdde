"""The workers of a measurement, one pinned to each device: ``MeasuringWorker`` runs there, ``Workers`` is the host's end."""

import gc
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from autosplit.backends.base import get_backend
from autosplit.backends.checking import Reference, check, stage_reference
from autosplit.backends.probing import innermost
from autosplit.closing import Closing
from autosplit.devices import accelerators
from autosplit.devices.accelerators import PROVIDERS, Accelerator, open_accelerator
from autosplit.devices.calls import Call, begin, serve
from autosplit.devices.processes import Worker, spawn_worker
from autosplit.errors import AutosplitError, BackendError, HungError, one_line
from autosplit.measuring.accelerator_timer import AcceleratorTimer
from autosplit.measuring.calibration import kernel_s
from autosplit.measuring.link_ends import EndTimes, LinkEnd, OnAccelerator, OnCores, play
from autosplit.measuring.stage_timer import LoadedStage, OpTimer, PassBudget, Timed, Timer, cut_s
from autosplit.tracing.splitting import load_stage
from autosplit.tracing.tensorspec import zeros
from autosplit.values.machine import Device
from autosplit.values.samples import Precision

LIMIT_S = 900.0
"""Seconds that a worker may take for one call. The longest compiles for an accelerator, at the first pass of a stage."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prepared:
    """Eager's seconds of every op, empty unless asked for, and the largest relative error."""

    eager_s: Mapping[str, float]
    error: float


class MeasuringWorker:
    """The device of a worker, and the stages that are ready on it."""

    def __init__(self) -> None:
        self._cores: tuple[int, ...] = ()
        self._accelerator: Accelerator | None = None
        self._place: OnCores | OnAccelerator | None = None
        self._loaded: dict[Path, LoadedStage] = {}
        self._references: dict[tuple[Path, int], Reference] = {}
        self._ready: dict[tuple[Path, str, int], tuple[Timer, Prepared]] = {}
        self._timer: Timer | None = None

    def open(self, device: str, cores: Sequence[int], providers: Mapping[str, str], packages: Sequence[str] = ()) -> None:
        """Open the device, which may be an accelerator; ``packages`` are modules that define the user's operators."""
        for package in packages:
            importlib.import_module(package)
        PROVIDERS.update(providers)
        self._cores, self._accelerator = tuple(cores), open_accelerator(device)

    def calibrate(self) -> float:
        """Fastest time in seconds of the calibration kernel."""
        found = self._accelerator
        return kernel_s(self._cores) if found is None else accelerators.calibration_s(found)

    def pinned_s_per_byte(self) -> float:
        """Seconds in which a byte of pinned memory comes to the device; 0 for cores."""
        return 0.0 if self._accelerator is None else accelerators.pinned_s_per_byte(self._accelerator)

    def play(self, end: LinkEnd) -> EndTimes:
        """One end of the measurement of a link."""
        if self._accelerator is not None:
            self._drop()
        if self._place is None:
            self._place = OnCores() if self._accelerator is None else OnAccelerator(self._accelerator)
        return play(end, self._place)

    def prepare(
        self, folder: Path, backend: str, threads: int, precision: Precision = "f32", eager: bool = False, keep: bool = False
    ) -> Prepared:
        """Load the stage in ``folder`` and ``check`` its numbers, unless it is ready.

        Args:
            folder: the stage, prepared, with its inputs.
            eager: also time every op in eager.
            keep: keep the stages that were prepared before.
        Raises: BackendError: the backend fails or gives wrong numbers.
        """
        self._timer = None
        ready = self._ready.get((folder, backend, threads))
        if ready is not None and (ready[1].eager_s or not eager):
            self._timer, prepared = ready
            return prepared
        if not keep or self._accelerator is not None:
            self._drop()
        if folder not in self._loaded:
            self._loaded[folder] = LoadedStage.load(folder)
        stage, found, eager_s = self._loaded[folder], get_backend(backend), {}
        program, inputs = stage.program, stage.inputs
        if self._accelerator is None:
            # Outside the try: a model that fails in eager is no fault of the backend.
            eager_s = OpTimer(program.module, threads).least_s(inputs) if eager else {}
            if (folder, threads) not in self._references:
                self._references[folder, threads] = stage_reference(program, inputs, threads)
        try:
            if self._accelerator is None:
                timer, reference = Timer(stage, backend, threads, precision), self._references[folder, threads]
                made = timer.outputs
                error = check(
                    found, program, inputs, precision=precision, threads=threads, runnable=lambda _: made, reference=reference
                )
            else:
                timer = AcceleratorTimer(stage, backend, self._accelerator, precision)
                eager_s = timer.eager_op_s() if eager else {}
                error = check(found, program, inputs, precision=precision, runnable=timer.run, exact=False)
        except BackendError:
            raise
        except torch.OutOfMemoryError as failure:
            limit = "device memory is too small: measuring needs room for the weights twice"
            raise BackendError(f"backend '{backend}' cannot be measured, {limit}: {one_line(failure)}") from None
        except Exception as failure:
            raise BackendError(f"backend '{backend}' failed: {innermost(failure)}") from None
        self._timer, prepared = timer, Prepared(eager_s, error.relative)
        self._ready[folder, backend, threads] = timer, prepared
        return prepared

    def _drop(self) -> None:
        """Free the stages that are ready. Graphs and modules refer to each other, and their weights may fill an accelerator."""
        held, self._timer = bool(self._ready), None
        self._ready.clear()
        if held and self._accelerator is not None:
            gc.collect()

    def time(self, budget: PassBudget, ops: bool = False, wake: bool = False) -> Timed:
        """Time passes of the stage that was prepared last; ``ops`` and ``wake`` as in ``Timer.time``."""
        if self._timer is None:
            raise RuntimeError("the host timed a stage before it prepared it")
        return self._timer.time(budget, ops, wake)

    def time_cut(
        self, folders: Sequence[Path], backend: str, threads: int, precision: Precision, budget: PassBudget
    ) -> float | None:
        """Extra seconds of a cut: the stages before and behind it, and both as one. None if they do not run."""
        try:
            inputs = [[zeros(spec) for spec in load_stage(folder, trust=True).inputs] for folder in folders]
            load = get_backend(backend).load
            runs = [load(folder, threads, precision, trust=True) for folder in folders]
            return cut_s(list(zip(runs, inputs, strict=True)), budget)
        except Exception:  # an op of the user's may refuse zeros, and a profile without the cost of a cut is better than none
            return None


def main(connection: Connection) -> None:
    """The main function of a worker."""
    with torch.inference_mode():
        serve(connection, MeasuringWorker())


class DeviceFaults(BackendError):  # noqa: N818 - the faults of a group of devices
    """A backend failed on some devices.

    Attributes:
        by_device: device name to the reason.
        lost: whether a worker died or hung.
    """

    def __init__(self, by_device: Mapping[str, str], lost: bool) -> None:
        super().__init__(next(iter(by_device.values())))
        self.by_device, self.lost = dict(by_device), lost


class Workers(Closing):
    """A worker on every device, best used in a ``with`` block. Calls on one device run in order, those on several at once.

    Args:
        fds: the descriptors that the worker on a device inherits, by its name.
        packages: modules that define the user's operators.
    """

    def __init__(
        self, devices: Sequence[Device], fds: Callable[[str], Sequence[int]] = lambda device: (), packages: Sequence[str] = ()
    ) -> None:
        self._devices = {device.name: device for device in devices}
        self._fds, self._packages = fds, tuple(packages)
        self._workers: dict[str, Worker] = {}
        self._opening: dict[str, Call[None]] = {}
        self.watch: Callable[[float], None] | None = None
        """Called several times a second with the seconds that a call has taken."""
        with ExitStack() as stack:
            stack.callback(self.close)
            for name in self._devices:
                self.start(name)
            stack.pop_all()

    def start(self, name: str) -> None:
        """Start the worker on a device, in place of an earlier one."""
        self._end(name)
        device = self._devices[name]
        self._workers[name] = spawn_worker(f"{__name__}:main", name=f"measuring {name}", cores=device.cores, fds=self._fds(name))
        self._opening |= self.begin(MeasuringWorker.open, {name: (name, device.cores, dict(PROVIDERS), self._packages)})

    def begin(self, function: Callable[..., Result], arguments: Mapping[str, Sequence[Any]]) -> dict[str, Call[Result]]:
        """Begin a call of a MeasuringWorker on some devices, each with its arguments."""
        doing = "during {} on '{}'".format
        return {
            name: begin(self._workers[name], doing(function.__name__, name), function, *given)
            for name, given in arguments.items()
        }

    def results(self, calls: Mapping[str, Call[Result]]) -> dict[str, Result]:
        """Wait for all calls, in the order in which they began.

        Raises: DeviceFaults: the backend failed on some devices; a worker that died or hung was replaced. WorkerError: a worker
            failed in another way.
        """
        found: dict[str, Result] = {}
        faults: dict[str, AutosplitError] = {}
        lost = False
        for name, call in calls.items():
            try:
                if opening := self._opening.pop(name, None):
                    opening.result(LIMIT_S)
                found[name] = call.result(LIMIT_S, progress=self.watch)
            except AutosplitError as failure:
                faults[name] = failure
                if isinstance(failure, HungError) or not self._workers[name].alive():
                    faults[name], lost = BackendError(str(failure)), True
                    self.start(name)
        for fault in faults.values():
            if not isinstance(fault, BackendError):
                raise fault
        if faults:
            raise DeviceFaults({name: str(fault) for name, fault in faults.items()}, lost)
        return found

    def call(self, function: Callable[..., Result], arguments: Mapping[str, Sequence[Any]]) -> dict[str, Result]:
        """``begin`` and ``results``."""
        return self.results(self.begin(function, arguments))

    def close(self) -> None:
        """End all workers."""
        for name in [*self._workers]:
            self._end(name)

    def _end(self, name: str) -> None:
        if worker := self._workers.pop(name, None):
            worker.kill()
            worker.close()
