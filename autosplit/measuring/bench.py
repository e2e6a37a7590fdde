"""The workers of a measurement, one on each device, and the model in a folder where they can load it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from autosplit.accelerators import PROVIDERS
from autosplit.backends.base import get_backend
from autosplit.backends.profiling import onnx_names
from autosplit.errors import WorkerError
from autosplit.files import temporary_folder
from autosplit.machine import Device, Machine
from autosplit.measuring.links import WORKER, LinkBench
from autosplit.measuring.worker import INPUTS, Canary, Load
from autosplit.processes import WorkerProcess, receive, spawn_worker
from autosplit.samples import Precision
from autosplit.splitting import StageProgram, save_stage, split
from autosplit.tracing import Traced

TIMEOUT_S = 900.0


class WorkerBench:
    """The running workers of a measurement, with the model saved where they can load it."""

    def __init__(self, program: StageProgram, folder: Path, workers: Mapping[str, WorkerProcess]) -> None:
        self._program = program
        self._folder = folder
        self.workers = workers
        self._begun: list[tuple[str, str]] = []
        self.canaries: dict[str, float] = {}

    def prepare(self, backend: str, precision: Precision) -> None:
        """Let the host write what the backend loads. Raises: BackendError: it refuses the model."""
        get_backend(backend).prepare(self._program, self._folder, precision)

    def load(self, devices: Sequence[Device]) -> None:
        """Let every worker load the model, once it has started."""
        self.begin({device.name: Load(self._folder, device.cores, device.name, dict(PROVIDERS)) for device in devices})

    def take_canaries(self, devices: Sequence[Device]) -> None:
        """One after the other: the canary is later repeated with its neighbours idle."""
        for device in devices:
            self.canaries |= self.all({device.name: Canary()})

    def names(self, backend: str) -> dict[str, str]:
        """What the nodes of the backend's file are called, to the ops that they come from."""
        return onnx_names(self._folder) if backend in ("onnxruntime", "openvino") else {}

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
def open_bench(traced: Traced, machine: Machine, linking: LinkBench | None) -> Iterator[WorkerBench]:
    """The model as one stage in a temporary folder, and a worker on every device; both are gone at the end, whatever ends it.

    With ``linking`` the workers can measure these links too.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        workers = {
            device.name: stack.enter_context(_worker(device, linking.fds(device.name) if linking else ()))
            for device in machine.devices
        }
        [program] = split(traced, [[op.name for op in traced.graph.ops]])
        save_stage(program, folder / "stage")
        torch.save(list(traced.example_inputs), folder / "stage" / INPUTS)
        yield WorkerBench(program, folder / "stage", workers)


@contextmanager
def _worker(device: Device, fds: Sequence[int]) -> Iterator[WorkerProcess]:
    worker = spawn_worker(WORKER, name=f"measuring {device.name}", cores=device.cores, fds=fds)
    try:
        yield worker
    finally:
        worker.kill()
        worker.close()
