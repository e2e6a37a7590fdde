"""The worker of a null device: a thread of the host, for tests and simulations without processes."""

import os
import threading
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from autosplit.devices.processes import Worker
from autosplit.running import stageworker
from autosplit.running.messages import WorkerConfig


class SimulatedDeath(BaseException):
    """Raised by a function on a null device, it ends the worker without a message, as SIGKILL ends a process."""


def start_thread(name: str, config: WorkerConfig) -> Worker:
    """A worker thread with this config."""
    ours, theirs = Pipe()
    ended_fd = os.eventfd(0, os.EFD_CLOEXEC)
    thread = threading.Thread(target=_run, args=(theirs, ended_fd, config), name=name, daemon=True)
    thread.start()
    return Worker(name, ours, ended_fd, os.getpid(), thread=thread)


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
