"""Worker processes: forked, pinned, tied to the host by inherited file descriptors only.

A worker is a fork of the fork server, which never imports the user's ``__main__``, so scripts need no main guard. It inherits
one end of a socket pair for control and the descriptors that the caller names, and leaves no name anywhere: no file, no port,
no ``/dev/shm`` entry. The kernel kills it when the host dies, however the host dies.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from autosplit.children import variables_for_torch
from autosplit.devices import forkserver
from autosplit.devices.forking import Fork
from autosplit.devices.limits import affinity
from autosplit.errors import HungError, RefusedError, UsageError, WorkerError

MOST_WAIT_S = 1e6
"""The kernel counts milliseconds in 31 bits."""

MOST_TRIES = 3
"""Fork servers that may die or stop answering while they should fork one worker."""

REAP_TIMEOUT_S = 1.0
"""Seconds for which the end of a worker waits for its exit code; the answer may lie behind the start of a fork server."""

KILL_TIMEOUT_S = 10.0
"""Seconds within which the kernel must end a killed worker; one that hangs in a driver takes longer and is left behind."""

THREAD_TIMEOUT_S = 5.0
"""Seconds within which a thread in place of a process should look at its control channel."""


def hang_up(connection: Connection) -> None:
    """Close a control channel for good: the other end notices, also while processes that the user forked hold copies of it."""
    if not connection.closed:
        _shut(socket.socket(fileno=connection.fileno())).detach()
        connection.close()


def _shut(end: socket.socket) -> socket.socket:
    with contextlib.suppress(OSError):  # the other end is gone
        end.shutdown(socket.SHUT_RDWR)
    return end


@dataclass(slots=True)
class Worker:
    """The host's handle on one worker: a process, or a thread of the host in place of one.

    Attributes:
        name: for messages.
        connection: the host's end of the control channel.
        pidfd: readable once the worker has ended, so that the host can wait on it beside other descriptors.
        pid: the process that it runs in.
        server: the fork server that a process was forked from; None for a thread, which nobody can kill.
        thread: the thread, if it is one.
    """

    name: str
    connection: Connection
    pidfd: int
    pid: int
    server: forkserver.ForkServer | None = None
    thread: threading.Thread | None = None
    _ended: bool = False
    _code: Future[int | None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def orphaned(self) -> bool:
        """Whether its fork server has ended too, which ends all workers of that fork server."""
        return self.server is not None and self.server.dead

    def alive(self) -> bool:
        """Whether it still runs."""
        return not self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most ``timeout_s``; True if it has ended."""
        if not self._ended:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            self._ended = bool(poll.poll(1000 * min(MOST_WAIT_S, max(0.0, timeout_s))))
        return self._ended

    def kill(self, timeout_s: float = KILL_TIMEOUT_S) -> None:
        """Kill the process if it still runs, and wait for its end, at most ``timeout_s``.

        A thread ends at its next look at the control channel, which is closed.
        """
        if not self.wait(0.0):
            if self.server is None:
                hang_up(self.connection)
                self.wait(THREAD_TIMEOUT_S)
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.wait(timeout_s)

    def close(self, timeout_s: float = 5.0, until_s: float = inf) -> None:
        """Close the control channel, which ends a worker that reads it; kill it if it is not gone in ``timeout_s``.

        The kernel has ``KILL_TIMEOUT_S`` more, and the fork server ``REAP_TIMEOUT_S``. The rest of the worker goes a little later
        if the fork server answers late. With a monotonic second ``until_s`` the ends of many workers take as long as that of one.
        """
        until_s = min(until_s, time.monotonic() + timeout_s)
        hang_up(self.connection)
        if not self.wait(until_s - time.monotonic()) and self.server is not None:
            self.kill(max(forkserver.LOOK_S, until_s + KILL_TIMEOUT_S - time.monotonic()))
        if self.server is not None:
            if self._ended:
                wait([self._reap(self.server)], max(0.0, min(REAP_TIMEOUT_S, until_s + REAP_TIMEOUT_S - time.monotonic())))
            self._ended = True  # one that the kernel cannot end is left behind
        elif self._ended and self.thread is not None:
            self.thread.join()
        if self._ended and self.pidfd >= 0:  # a thread that has not ended will write to the descriptor
            os.close(self.pidfd)
            self.pidfd = -1

    def fate(self, stop: threading.Event | None = None) -> str:
        """How it ended: ``was killed by SIGKILL``, ``exited with code 1``, ``died`` for a thread, or ``is alive``.

        Raises: RefusedError: another thread set ``stop`` while the fork server did not answer.
        """
        if self.alive():
            return "is alive"
        if self.server is None:
            return "died"
        code = forkserver.answer(self._reap(self.server), f"while the end of worker '{self.name}' was looked into", stop)
        if code is None:
            return "ended, and the stopped process that it was forked from does not say how"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _reap(self, server: forkserver.ForkServer) -> Future[int | None]:
        with self._lock:
            if self._code is None:
                self._code = forkserver.reap(server, self.pid)
        return self._code


def receive(
    worker: Worker,
    limit_s: float,
    doing: str,
    stop: threading.Event | None = None,
    progress: Callable[[float], None] | None = None,
) -> Any:
    """The worker's next message; ``doing`` ends the sentences about it, and ``progress`` is called with the seconds so far.

    Raises: HungError: none came within ``limit_s``. WorkerError: the worker died. RefusedError: ``stop`` was set meanwhile.
    """
    begun_s, waited_s, look_s = time.monotonic(), 0.0, forkserver.LOOK_S if stop or progress else MOST_WAIT_S
    while True:
        try:
            if worker.connection.poll(max(0.0, min(limit_s - waited_s, look_s))):
                return worker.connection.recv()
        except (EOFError, OSError):
            worker.wait(1.0)
            raise WorkerError(f"worker '{worker.name}' {worker.fate(stop)} {doing}") from None
        waited_s = time.monotonic() - begun_s
        if stop is not None and stop.is_set():
            raise RefusedError(f"the pipeline was closed {doing}")
        if waited_s >= limit_s:
            raise HungError(f"worker '{worker.name}' gave no answer within {max(0.0, limit_s):.3g} s {doing}")
        if progress is not None:
            progress(waited_s)


def spawn_worker(
    target: str,
    *,
    name: str = "worker",
    cores: Sequence[int] = (),
    fds: Sequence[int] = (),
    threads: int | None = None,
    stop: threading.Event | None = None,
) -> Worker:
    """Start a worker that calls ``target`` with its control connection and ends when the function returns.

    Args:
        target: ``module:function``; the function takes one ``multiprocessing.connection.Connection``.
        name: for messages.
        cores: the cores it is pinned to; empty leaves the host's affinity.
        fds: descriptors that it inherits, under the same numbers.
        threads: size of the torch and OpenMP pools; the number of cores by default.
        stop: set by another thread if the worker is not wanted any more.
    Raises: UsageError: a core is not available to this process. OSError: one of ``fds`` is not open. WorkerError: the kernel
        refuses another process or descriptor, or no fork server answers. RefusedError: ``stop`` was set meanwhile.
    """
    refused = sorted(set(cores) - set(affinity()))
    if refused:
        usable = ", ".join(map(str, affinity()))
        raise UsageError(f"worker '{name}' asks for core {', '.join(map(str, refused))}; this process may use {usable}")
    num_threads = threads or len(cores) or len(affinity())
    size, folder = str(num_threads), _working_folder()
    for _ in range(MOST_TRIES):
        ours, theirs = socket.socketpair()
        with theirs:
            order = Fork(
                target,
                theirs.fileno(),
                (theirs.fileno(), *filter(_is_open, (1, 2)), *fds),
                tuple(cores),
                num_threads,
                {**variables_for_torch(), **os.environ, "OMP_NUM_THREADS": size, "MKL_NUM_THREADS": size},
                tuple(entry or folder for entry in sys.path),
                folder,
            )
            try:
                pid, pidfd, server = forkserver.fork(order, stop)
                return Worker(name, Connection(ours.detach()), pidfd, pid, server)
            except forkserver.ForkServerLost:
                ours.close()
            except BaseException:
                ours.close()
                raise
    raise WorkerError(
        f"worker '{name}' could not be forked: the process that forks it died or did not answer within "
        f"{forkserver.ANSWER_TIMEOUT_S:g} s, {MOST_TRIES} times; close other programs, or allow more memory"
    )


def prepare_to_spawn() -> None:
    """Start the fork server unless it runs: it imports while the host does other work."""
    forkserver.start()


def resident_bytes(pid: int | None = None) -> int:
    """Bytes of physical memory that a process maps now, shared pages included; by default this process. 0 if it is gone."""
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid or os.getpid()}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def reset_peak(pid: int) -> None:
    """Let the peak of a process's physical memory begin anew at its present memory. Raises: OSError: it is not ours, or gone."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def anonymous_bytes(pid: int) -> int:
    """Bytes of physical memory of a process that no file has; pages shared with the process that it was forked from count."""
    return _sizes(f"/proc/{pid}/status").get("RssAnon", 0)


class MemoryHeld(NamedTuple):
    """Bytes of physical memory of a forked process.

    Attributes:
        base_bytes: the memory of the fork that it has written to since, so that it has copies of its own.
        held_bytes: the most bytes of data that it held since its start, or since ``reset_peak``, beyond the memory of the fork:
            its anonymous memory and the files that it maps. Libraries and memory that processes share for writing, such as rings,
            are left out.
        resident_bytes: physical memory that it maps now, shared pages included.
        proportional_bytes: the same, each page divided by the number of processes that map it. Linux calls it PSS;
            processes that map the same weights share their bytes, and the sums over processes add up.
    """

    base_bytes: int
    held_bytes: int
    resident_bytes: int
    proportional_bytes: int


def memory_held(pid: int, before_bytes: int = 0) -> MemoryHeld:
    """The memory of a process, all 0 if it is gone. ``before_bytes`` is its ``anonymous_bytes`` when it was new.

    The kernel walks all pages of the process for it, which takes 15 ms for a process with torch.
    """
    now = _sizes(f"/proc/{pid}/status")
    if not now.get("VmRSS"):
        return MemoryHeld(0, 0, 0, 0)
    mapped = _mapped(pid)
    most = now["RssAnon"] + mapped.data_bytes + max(0, now["VmHWM"] - now["VmRSS"])
    base = max(0, min(before_bytes, mapped.own_bytes - (now["RssAnon"] - before_bytes)))
    return MemoryHeld(base, max(0, most - before_bytes), now["VmRSS"], mapped.proportional_bytes)


class _Mapped(NamedTuple):
    """Physical memory that a process maps: its share of all pages, anonymous pages that it alone has, and files of data."""

    proportional_bytes: int
    own_bytes: int
    data_bytes: int


def _mapped(pid: int) -> _Mapped:
    """The mappings of a process, all 0 if it is gone. Pages of a file that is mapped several times count once.

    ``Private_Dirty`` also counts a file's pages that wait to be written to disk, such as weights that were saved a moment ago.
    """
    proportional = own = 0
    data = dict[tuple[str, ...], int]()
    path, place, fields = "", tuple[str, ...](), dict[str, int]()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, text = line.partition(":")
            if not line[0].isupper():  # the first line of a mapping
                words = line.split(maxsplit=5)
                path, place, fields = words[5] if len(words) > 5 else "", tuple(words[2:5]), {}
            elif name in ("Rss", "Pss", "Private_Dirty"):
                fields[name] = int(text.split()[0]) * 1024
            elif name == "Anonymous":  # after the others
                proportional += fields["Pss"]
                own += min(fields["Private_Dirty"], int(text.split()[0]) * 1024)
                if _is_data(path):
                    data[place] = max(data.get(place, 0), fields["Rss"])
    return _Mapped(proportional, own, sum(data.values()))


def _is_data(path: str) -> bool:
    """Whether the path of a mapping in ``smaps`` is that of a file, but not of a library, a system file or a memory file."""
    return path.startswith("/") and not (".so" in path or path.startswith(("/usr/", "/lib", "/dev/", "/memfd:")))


def _sizes(path: str) -> dict[str, int]:
    """The sizes in a file of the kernel, in bytes; empty if the process is gone."""
    with contextlib.suppress(OSError):
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
    return {}


def thread_times_s(process: int | str, field: int) -> list[float]:
    """Seconds of each thread of a process (its id, or ``self``): 0 is its time on a core, 1 its wait for one.

    Empty where the kernel does not say.
    """
    found = []
    for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
        # A thread may end after it was listed.
        with contextlib.suppress(OSError, IndexError, ValueError):
            found.append(int(path.read_text(encoding="ascii").split()[field]) * 1e-9)
    return found


def _working_folder() -> str:
    """The working directory, or the root where it was removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "/"


def _is_open(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return True
    return False
