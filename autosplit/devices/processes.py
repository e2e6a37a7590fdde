"""Worker processes: forked, pinned, tied to the host by inherited file descriptors only.

A worker is a fork of a process of its own kind (``forking``), which never imports the user's ``__main__``, so scripts
need no main guard. It inherits one end of a socket pair for control and the descriptors that the caller names, and leaves no
name anywhere: no file, no port, no ``/dev/shm`` entry. The kernel kills it when the host dies, however the host dies.
"""

import atexit
import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

from autosplit.devices.forking import Fork, Reap, send_descriptors
from autosplit.devices.limits import affinity
from autosplit.errors import UsageError, WorkerError

Result = TypeVar("Result")

MOST_WAIT_S = 1e6
"""The kernel counts milliseconds in 31 bits."""

MOST_TRIES = 3
"""The process that workers are forked from is started anew if it is killed while it should fork one."""


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
        if worker.connection.poll(min(MOST_WAIT_S, timeout_s)):
            return worker.connection.recv()
    except (EOFError, OSError):
        worker.wait(1.0)
        raise WorkerError(f"worker '{worker.name}' {worker.fate()} during {what}") from None
    raise WorkerError(f"worker '{worker.name}' gave no answer to {what} within {timeout_s:g} s")


def hang_up(connection: Connection) -> None:
    """Close a control channel for good: the other end hears it, also while processes that the user forked hold copies of it."""
    if not connection.closed:
        _shut(socket.socket(fileno=connection.fileno())).detach()
        connection.close()


def _shut(end: socket.socket) -> socket.socket:
    with contextlib.suppress(OSError):  # the other end is gone
        end.shutdown(socket.SHUT_RDWR)
    return end


@dataclass(slots=True)
class WorkerProcess:
    """The host's handle on one worker.

    Attributes:
        name: for messages.
        connection: the host's end of the control channel.
        pidfd: readable once the process has ended, so that the host can wait on it beside other descriptors.
        pid: the process id.
    """

    name: str
    connection: Connection
    pidfd: int
    pid: int
    _code: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def alive(self) -> bool:
        """Whether the process still runs."""
        return not self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process, at most ``timeout_s``; True if it has ended."""
        if self._code is None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            if not poll.poll(1000 * min(MOST_WAIT_S, max(0.0, timeout_s))):
                return False
            with self._lock:
                if self._code is None:
                    self._code = _nursery.reap(self.pid)
        return True

    def kill(self) -> None:
        """Kill the process if it still runs, and reap it."""
        if not self.wait(0.0):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.wait(MOST_WAIT_S)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the control channel, which ends a worker that reads it; kill it if it is not gone in ``timeout_s``."""
        hang_up(self.connection)
        if not self.wait(timeout_s):
            self.kill()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def fate(self) -> str:
        """How it ended: ``was killed by SIGKILL``, ``exited with code 1``, or ``is alive``."""
        if self.alive():
            return "is alive"
        code = self._code or 0
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
    Raises: UsageError: a core is not available to this process. OSError: one of ``fds`` is not open. WorkerError: the kernel
        refuses another process or descriptor.
    """
    refused = sorted(set(cores) - set(affinity()))
    if refused:
        usable = ", ".join(map(str, affinity()))
        raise UsageError(f"worker '{name}' asks for core {', '.join(map(str, refused))}; this process may use {usable}")
    num_threads = threads or len(cores) or len(affinity())
    size = str(num_threads)
    ours, theirs = socket.socketpair()
    with theirs:
        descriptors = (theirs.fileno(), *filter(_is_open, (1, 2)), *fds)
        order = Fork(
            target,
            theirs.fileno(),
            descriptors,
            tuple(cores),
            num_threads,
            {**os.environ, "OMP_NUM_THREADS": size, "MKL_NUM_THREADS": size},
            tuple(entry or str(Path.cwd()) for entry in sys.path),
            str(Path.cwd()),
        )
        try:
            pid, pidfd = _nursery.fork(order)
        except BaseException:
            ours.close()
            raise
    return WorkerProcess(name, Connection(ours.detach()), pidfd, pid)


def prepare_to_spawn() -> None:
    """Start the process that workers are forked from, unless it runs: it imports beside what the host does meanwhile."""
    _nursery.open()


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


def thread_times_s(process: int | str, field: int) -> list[float]:
    """Seconds of each thread of a process (its id, or ``self``): 0 is what it had of a core, 1 what it waited for one.

    Empty where the kernel does not say.
    """
    found = []
    for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
        # A thread may end after it was listed.
        with contextlib.suppress(OSError, IndexError, ValueError):
            found.append(int(path.read_text(encoding="ascii").split()[field]) * 1e-9)
    return found


def _is_open(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


class _Nursery:
    """The host's end of the process that workers are forked from, which is started when the first one is wanted.

    All that is said to it is said in the spawner thread, one thing at a time, and to the end, whoever interrupts the caller.
    """

    def __init__(self) -> None:
        self._owner = 0
        self._sock: socket.socket | None = None
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Start the process unless it runs."""
        _in_spawner(self._running)

    def fork(self, order: Fork) -> tuple[int, int]:
        """Fork a worker; its process id, and a descriptor of it.

        Raises: OSError: one of its descriptors is not open. WorkerError: the kernel refuses, or kills who should fork.
        """
        # Of a worker whose order is under way all must be sent, even if the caller is interrupted and closes its own.
        with contextlib.ExitStack() as stack:
            copies = []
            for number in order.numbers:
                copies.append(os.dup(number))
                stack.callback(os.close, copies[-1])
            held = stack.pop_all()
        return _in_spawner(lambda: self._fork(order, copies, held))

    def reap(self, pid: int) -> int:
        """The exit code of a worker that has ended."""
        return _in_spawner(lambda: self._reap(pid))

    def close(self) -> None:
        """End the process, and workers that are left."""
        if self._owner == os.getpid() and self._process is not None:
            _in_spawner(self._end)

    def _running(self) -> None:
        if self._owner == os.getpid() and self._process is not None and self._process.poll() is None:
            return
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            code = "from autosplit.devices.forking import main; main()"
            command = [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(os.getpid())]
            path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
            # One thread for each library that starts its threads when it is imported: a process with several must not fork.
            one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path, **one},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        self._sock, self._connection, self._owner = ours, Connection(os.dup(ours.fileno())), os.getpid()

    def _fork(self, order: Fork, descriptors: Sequence[int], held: contextlib.ExitStack) -> tuple[int, int]:
        with held:
            for _ in range(MOST_TRIES):
                self._running()
                assert self._connection is not None and self._sock is not None
                try:
                    self._connection.send(order)
                    send_descriptors(self._sock, descriptors)
                    answer = self._connection.recv()
                    if isinstance(answer, int):
                        return answer, self._open(answer)
                    way_out = "raise that limit ('ulimit -u' or '-n', or the container's), or name fewer devices"
                    raise WorkerError(f"no worker could be forked: {answer}; {way_out}")
                except (EOFError, ConnectionError, ProcessLookupError):  # it was killed meanwhile, and the worker with it
                    self._end()
        raise WorkerError(f"the process that workers are forked from ended {MOST_TRIES} times before it had forked one")

    def _open(self, pid: int) -> int:
        """A descriptor of a worker, which is ended if there is none left."""
        try:
            return os.pidfd_open(pid)
        except OSError as failure:
            if not isinstance(failure, ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._reap(pid)
            raise

    def _reap(self, pid: int) -> int:
        try:
            assert self._connection is not None
            self._connection.send(Reap(pid))
            return int(self._connection.recv())
        except (EOFError, OSError):
            return -signal.SIGKILL  # the kernel killed it when the process that it was forked from died

    def _end(self) -> None:
        if self._sock is not None and self._owner == os.getpid():
            _shut(self._sock)
        for end in (self._connection, self._sock):
            if end is not None:
                end.close()
        if self._process is not None and self._owner == os.getpid():
            self._process.wait()
        self._process = self._connection = self._sock = None


_nursery = _Nursery()
atexit.register(_nursery.close)


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
