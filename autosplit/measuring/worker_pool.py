"""The pool of workers of a measurement, one pinned to each device, and the commands under way."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from autosplit.devices.accelerators import PROVIDERS
from autosplit.devices.processes import WorkerProcess, receive, spawn_worker
from autosplit.errors import WorkerError
from autosplit.measuring.measuring_worker import Answer, Command, Open
from autosplit.values.machine import Device

TIMEOUT_S = 900.0
WORKER = "autosplit.measuring.measuring_worker:main"


@dataclass(eq=False)
class WorkerPool:
    """Workers by device name. Commands to one device run in order, those to several devices at once."""

    workers: Mapping[str, WorkerProcess]
    _sent: list[tuple[str, str]] = field(default_factory=list)

    def ask(self, commands: Mapping[str, Command]) -> dict[str, Any]:
        """Send each device its command and wait for every answer. Raises: WorkerError: as ``answers``."""
        self.send(commands)
        return self.answers()

    def send(self, commands: Mapping[str, Command]) -> None:
        """Send each device its command, to run after those that it has. Raises: WorkerError: a worker died."""
        for device, command in commands.items():
            try:
                self.workers[device].connection.send(command)
            except OSError:
                raise WorkerError(f"the worker that measures on '{device}' {self.workers[device].fate()}") from None
            self._sent.append((device, type(command).__name__))

    def answers(self) -> dict[str, Any]:
        """Wait for all commands that were sent; returns each device's last answer.

        Raises: WorkerError: a worker died, or a command failed in it.
        """
        sent, found = list(self._sent), {}
        self._sent.clear()
        for device, what in sent:
            answer: Answer = receive(self.workers[device], TIMEOUT_S, f"{what} on '{device}'")
            if answer.fault:
                raise WorkerError(f"measuring on '{device}' failed at {what}. The worker's traceback:\n{answer.fault}")
            found[device] = answer.value
        return found


@contextmanager
def open_pool(
    devices: Sequence[Device], fds: Callable[[str], Sequence[int]] = lambda device: (), packages: Sequence[str] = ()
) -> Iterator[WorkerPool]:
    """A worker on every device, killed when the block ends.

    Args:
        devices: the devices.
        fds: the descriptors that the worker on a device inherits, by its name.
        packages: modules that define the user's operators.
    """
    with ExitStack() as stack:
        workers = {}
        for device in devices:
            worker = spawn_worker(WORKER, name=f"measuring {device.name}", cores=device.cores, fds=fds(device.name))
            stack.callback(worker.close)
            stack.callback(worker.kill)
            workers[device.name] = worker
        pool = WorkerPool(workers)
        pool.send({device.name: Open(device.name, device.cores, dict(PROVIDERS), tuple(packages)) for device in devices})
        yield pool
