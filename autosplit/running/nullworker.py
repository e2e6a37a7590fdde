"""The worker of a null device: a thread of the host, for tests and simulations without processes."""

import os
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from autosplit.running import stageworker
from autosplit.running.messages import WorkerConfig


class SimulatedDeath(BaseException):
    """Raised by a function on a null device, it ends the worker without a message, as SIGKILL ends a process."""


@dataclass(frozen=True, slots=True)
class ThreadWorker:
    """A worker that shares the host's memory and its interpreter lock."""

    name: str
    connection: Connection
    pidfd: int
    thread: threading.Thread

    @property
    def pid(self) -> int:
        """The process of the host."""
        return os.getpid()

    @property
    def orphaned(self) -> bool:
        """False: a thread has no fork server."""
        return False

    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self.thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; True if it has ended."""
        self.thread.join(timeout_s)
        return not self.alive()

    def kill(self) -> None:
        """Close the control channel; a thread ends at its next look at it."""
        self.connection.close()
        self.wait(5.0)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the control channel and wait for the end of the thread."""
        self.connection.close()
        if self.wait(timeout_s):
            os.close(self.pidfd)

    def fate(self) -> str:
        """How it ended."""
        return "is alive" if self.alive() else "died"


def start_thread(name: str, config: WorkerConfig) -> ThreadWorker:
    """A worker thread with this config."""
    ours, theirs = Pipe()
    ended_fd = os.eventfd(0, os.EFD_CLOEXEC)
    thread = threading.Thread(target=_run, args=(theirs, ended_fd, config), name=name, daemon=True)
    thread.start()
    return ThreadWorker(name, ours, ended_fd, thread)


def _run(control: Connection, ended_fd: int, config: WorkerConfig) -> None:
    try:
        stageworker.serve_stage(control, config)
    except (EOFError, ConnectionError, SimulatedDeath):
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        control.close()
        os.eventfd_write(ended_fd, 1)
