"""The workers of a measurement, one on each device, and the model in a folder where they can load it."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autosplit.backends.base import get_backend
from autosplit.backends.profiling import onnx_names
from autosplit.deploying.workspace import Workspace
from autosplit.devices.accelerators import PROVIDERS, is_accelerator
from autosplit.devices.processes import WorkerProcess, prepare_to_spawn, receive
from autosplit.errors import BackendError, WorkerError
from autosplit.measuring.cutting import Cut, loses_at_cuts, save_cut, typical_cut
from autosplit.measuring.links import LinkBench, measuring_worker
from autosplit.measuring.parts import Part, save_parts
from autosplit.measuring.timing import Rounds
from autosplit.measuring.worker import INPUTS, Canary, Load, TimeCut
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import StageProgram, unsplit
from autosplit.values.machine import Device, Machine
from autosplit.values.samples import Precision, Setting

TIMEOUT_S = 900.0

CANARY_S, CANARIES_S = 0.6, 5.0
"""For the canary of a device, whose fastest is what later runs are held to, and at most for those of all devices."""


@dataclass(eq=False)
class WorkerBench:
    """The running workers of a measurement, with the model saved where they can load it.

    Attributes:
        traced: the model.
        program: all of it as one stage.
        folder: where that is saved.
        workspace: where parts of it are saved.
        workers: device name to its worker.
        cut: one that is typical of the model, where there is one to time.
        canaries: device name to the seconds of its canary, once they were taken.
    """

    traced: Traced
    program: StageProgram
    folder: Path
    workspace: Workspace
    workers: Mapping[str, WorkerProcess]
    cut: Cut | None
    canaries: dict[str, float] = field(default_factory=dict)
    _loaded: Path = Path()
    _parts: dict[str, list[Part]] = field(default_factory=dict)
    _refused: dict[str, dict[str, str]] = field(default_factory=dict)
    _cuts: dict[str, tuple[Path, Path, Path]] = field(default_factory=dict)
    _begun: list[tuple[str, str]] = field(default_factory=list)

    def prepare(self, backend: str, precision: Precision) -> None:
        """Let the host write what the backend loads; in parts, if it refuses some ops. Raises: BackendError: it refuses all."""
        try:
            get_backend(backend).prepare(self.program, self.folder, precision)
        except BackendError as failure:
            self.divide(backend, precision, failure)
            return
        if self.cut is not None and loses_at_cuts(backend):
            with contextlib.suppress(BackendError):
                self._cuts[backend] = save_cut(self.traced, self.cut, backend, precision, self.workspace)

    def divide(self, backend: str, precision: Precision, failure: BackendError) -> None:
        """Prepare the parts of the model that a backend takes, after it failed. Raises: failure: not for some ops."""
        refused = failure.refused or get_backend(backend).refuses(self.program)
        if backend in self._parts or not refused or len(refused) == len(self.program.ops):
            raise failure
        self._parts[backend] = save_parts(self.traced, refused, backend, precision, self.workspace)
        self._refused[backend] = refused

    def parts(self, backend: str) -> list[Part]:
        """What a backend is timed on: the whole model, or all but what it refuses."""
        return self._parts.get(backend, [Part(self.program.ops, self.folder)])

    def is_divided(self, backend: str) -> bool:
        """Whether a backend is timed on parts of the model."""
        return backend in self._parts

    def refused(self, backend: str) -> dict[str, str]:
        """Op name to the reason, for each op that a backend was found to refuse."""
        return self._refused.get(backend, {})

    def time_cuts(self, group: Sequence[Setting], precision: Precision, rounds: Rounds) -> dict[str, float]:
        """Device to the seconds that each byte costs which passes a cut there; all at once, none where it cannot be measured.

        Raises: WorkerError: see ``finish``.
        """
        if self.cut is None:
            return {}
        timed = [setting for setting in group if setting.backend in self._cuts]
        commands = {one.device: TimeCut(self._cuts[one.backend], one.backend, one.threads, precision, rounds) for one in timed}
        found = self.all(commands)
        return {device: seconds / self.cut.num_bytes for device, seconds in found.items() if seconds is not None}

    def load(self, devices: Sequence[Device], part: Part | None = None) -> None:
        """Let every worker load a part, or the model, once it has started."""
        self._loaded = self.folder if part is None else part.folder
        same: Any = dict(PROVIDERS), self.program.packages
        self.begin({device.name: Load(self._loaded, device.cores, device.name, *same) for device in devices})

    def require(self, devices: Sequence[Device], part: Part) -> None:
        """Let every worker load a part, unless it has it."""
        if part.folder != self._loaded:
            self.load(devices, part)

    def take_canaries(self, devices: Sequence[Device]) -> None:
        """One after the other: the canary is later repeated with its neighbours idle."""
        seconds = min(CANARY_S, CANARIES_S / len(devices))
        for device in devices:
            self.canaries |= self.all({device.name: Canary(seconds)})

    def names(self, backend: str, part: Part) -> dict[str, str]:
        """What the nodes of the backend's file are called, to the ops that they come from."""
        return onnx_names(part.folder) if backend in ("onnxruntime", "openvino") else {}

    def all(self, commands: Mapping[str, Any]) -> dict[str, Any]:
        """Send each device its command, all at once, and wait for every answer. Raises: WorkerError: see ``finish``."""
        self.begin(commands)
        return self.finish()

    def begin(self, commands: Mapping[str, Any]) -> None:
        """Send each device its command, to be obeyed after those that it has. Raises: WorkerError: a worker died."""
        for device, command in commands.items():
            try:
                self.workers[device].connection.send(command)
            except OSError:
                raise WorkerError(f"the worker that measures on '{device}' {self.workers[device].fate()}") from None
            self._begun.append((device, type(command).__name__))

    def finish(self) -> dict[str, Any]:
        """Wait until every command that was begun is carried out; returns each device's last answer.

        Raises: WorkerError: a worker died, or what it raised.
        """
        begun, answers = list(self._begun), {}
        self._begun.clear()
        for device, what in begun:
            answer = receive(self.workers[device], TIMEOUT_S, f"{what} on '{device}'")
            if answer.fault:
                raise WorkerError(f"measuring on '{device}' failed at {what}. The worker's traceback:\n{answer.fault}")
            answers[device] = answer.value
        return answers


@contextmanager
def open_bench(traced: Traced, machine: Machine, linking: LinkBench | None, workspace: Workspace | None) -> Iterator[WorkerBench]:
    """The model as one stage in a folder, and a worker on every device; both are gone at the end, whatever ends it.

    Args:
        traced: the model.
        machine: the devices.
        linking: links that the workers can measure too.
        workspace: where the stage is saved and stays; by default in one that ends with the bench.
    """
    prepare_to_spawn()
    with ExitStack() as stack:
        workspace = workspace or stack.enter_context(Workspace())
        program = unsplit(traced)
        folder = workspace.save(program, program.ops)
        examples = dict(zip(traced.graph.inputs, traced.example_inputs, strict=True))  # the stage takes those that an op reads
        torch.save([examples[spec.name] for spec in program.inputs], folder / INPUTS)
        workers = {
            device.name: stack.enter_context(measuring_worker(device, "measuring", linking.fds(device.name) if linking else ()))
            for device in machine.devices
        }
        cut = None if all(map(is_accelerator, machine.devices)) else typical_cut(traced.graph)
        yield WorkerBench(traced=traced, program=program, folder=folder, workspace=workspace, workers=workers, cut=cut)
