"""Worker processes: spawned, pinned, tied to the host by inherited file descriptors only.

A worker is ``python -m autosplit.processes``: it never imports the user's ``__main__``, so scripts need no main guard. It
inherits one end of a socket pair for control and the descriptors that the caller names, and leaves no name anywhere: no
file, no port, no ``/dev/shm`` entry. The kernel kills it when the host dies, however the host dies.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

from autosplit.errors import UsageError, WorkerError
from autosplit.limits import affinity

Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1
_MALLOPT = ((-3, 1 << 30), (-1, 2**31 - 1), (-2, 64 << 20))
"""M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD: activations are reused instead of faulted in again on each pass."""


class Worker(Protocol):
    """What the host needs of a worker; WorkerProcess is one, and a thread that plays one is another."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def pid(self) -> int:
        """The process that it runs in."""

    @property
    def connection(self) -> Connection:
        """The host's end of the control channel."""

    @property
    def pidfd(self) -> int:
        """A descriptor that is readable once the worker has ended."""

    def alive(self) -> bool:
        """Whether it still runs."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most ``timeout_s``; True if it has ended."""

    def kill(self) -> None:
        """End it now."""

    def close(self, timeout_s: float = 5.0) -> None:
        """End it in good order, or kill it after ``timeout_s``; free what the host holds for it."""

    def fate(self) -> str:
        """How it ended, as the rest of a sentence."""


def receive(worker: Worker, timeout_s: float, what: str) -> Any:
    """The worker's next message.

    Raises: WorkerError: none came within ``timeout_s``, or the worker died; ``what`` says what was waited for.
    """
    try:
        if worker.connection.poll(timeout_s):
            return worker.connection.recv()
    except (EOFError, OSError):
        worker.wait(1.0)
        raise WorkerError(f"worker '{worker.name}' {worker.fate()} during {what}") from None
    raise WorkerError(f"worker '{worker.name}' gave no answer to {what} within {timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """The host's handle on one worker.

    Attributes:
        name: for messages.
        connection: the host's end of the control channel.
        pidfd: readable once the process has ended, so that the host can wait on it beside other descriptors.
    """

    name: str
    connection: Connection
    pidfd: int
    process: "subprocess.Popen[bytes]"

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process, at most ``timeout_s``; True if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        return not self.alive()

    def kill(self) -> None:
        """Kill the process if it still runs, and reap it."""
        self.process.kill()
        self.process.wait()

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the control channel, which ends a worker that reads it; kill it if it is not gone in ``timeout_s``."""
        self.connection.close()
        if not self.wait(timeout_s):
            self.kill()
        with contextlib.suppress(OSError):
            os.close(self.pidfd)

    def fate(self) -> str:
        """How it ended: ``was killed by SIGKILL``, ``exited with code 1``, or ``is alive``."""
        code = self.process.poll()
        if code is None:
            return "is alive"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def spawn_worker(
    target: str, *, name: str = "worker", cores: Sequence[int] = (), fds: Sequence[int] = (), threads: int | None = None
) -> WorkerProcess:
    """Start a worker that calls ``target`` with its control connection and ends when the function returns.

    Args:
        target: ``module:function``; the function takes one ``multiprocessing.connection.Connection``.
        name: for messages.
        cores: the cores it is pinned to; empty leaves the host's affinity.
        fds: descriptors that it inherits, under the same numbers.
        threads: size of the torch and OpenMP pools; the number of cores by default.
    Raises: UsageError: a core is not available to this process.
    """
    refused = sorted(set(cores) - set(affinity()))
    if refused:
        usable = ", ".join(map(str, affinity()))
        raise UsageError(f"worker '{name}' asks for core {', '.join(map(str, refused))}; this process may use {usable}")
    size = str(threads or len(cores) or len(affinity()))
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", "autosplit.processes", target, str(theirs.fileno())]
        command += [str(os.getpid()), ",".join(map(str, cores))]
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": size, "MKL_NUM_THREADS": size}
        try:
            process, pidfd = _in_spawner(lambda: _start(command, environment, (theirs.fileno(), *fds)))
        except BaseException:
            ours.close()
            raise
    return WorkerProcess(name, Connection(ours.detach()), pidfd, process)


def resident_bytes() -> int:
    """Bytes of physical memory that this process maps now, shared pages included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def proportional_bytes(pid: int) -> int:
    """Bytes of physical memory of a process, each page divided by the number of processes that map it; 0 if it is gone.

    Linux calls it PSS; processes that map the same weights share their bytes, and the sums over processes add up.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _start(command: list[str], environment: dict[str, str], fds: Sequence[int]) -> tuple["subprocess.Popen[bytes]", int]:
    # A process group of its own: Ctrl-C in the terminal reaches the host alone, which then ends its workers.
    process = subprocess.Popen(command, env=environment, pass_fds=fds, stdin=subprocess.DEVNULL, process_group=0)
    return process, os.pidfd_open(process.pid)


_jobs: "queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]" = queue.SimpleQueue()
_spawner: threading.Thread | None = None
_spawner_lock = threading.Lock()


def _in_spawner(function: Callable[[], Result]) -> Result:
    """Run ``function`` in a thread that lives as long as the host.

    The kernel sends the parent-death signal when the *thread* that forked ends, so a short-lived thread must not fork.
    """
    global _spawner
    with _spawner_lock:
        if _spawner is None or not _spawner.is_alive():
            _spawner = threading.Thread(target=_spawn_forever, name="autosplit-spawner", daemon=True)
            _spawner.start()
    future: Future[Result] = Future()
    _jobs.put((function, future))
    return future.result()


def _spawn_forever() -> None:
    while True:
        function, future = _jobs.get()
        try:
            future.set_result(function())
        except BaseException as failure:
            future.set_exception(failure)


def _prepare(host_pid: int, cores: Sequence[int]) -> None:
    """Tie this process to the host, pin it and set its allocator."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != host_pid:
        os._exit(0)
    if cores:
        os.sched_setaffinity(0, cores)
    if hasattr(libc, "mallopt"):
        for parameter, value in _MALLOPT:
            libc.mallopt(parameter, value)


def _main() -> None:
    target, control, host_pid, cores = sys.argv[1:]
    _prepare(int(host_pid), [int(core) for core in cores.split(",") if core])
    module, function = target.split(":")
    connection = Connection(int(control))
    # What is imported stays: looking for garbage in it takes an eighth of the start, and a while in every collection after it.
    gc.disable()
    call = getattr(importlib.import_module(module), function)
    gc.freeze()
    gc.enable()
    with contextlib.suppress(EOFError, ConnectionError):
        call(connection)
    sys.stdout.flush()
    sys.stderr.flush()
    # The workers of a pipeline end together: skip the teardown of torch, which takes longer than all the rest.
    os._exit(0)


if __name__ == "__main__":
    _main()
