"""Fork server, the host's end: start it, let it fork and reap workers, and replace it once it is dead or does not answer.

One without workers ends when nobody has asked for one for ``IDLE_S``: with torch and numba it takes 202 MB.

Only the spawner thread talks to a fork server, one question at a time, and every question has a time limit. A fork server that
exceeds the limit gets no further question. It stays until its last worker has ended, because its workers end with it.
"""

import atexit
import contextlib
import os
import queue
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from autosplit.children import python_running
from autosplit.devices.forking import Fork, Import, Reap, send_descriptors
from autosplit.devices.limits import refusal, refusals_named
from autosplit.errors import RefusedError, WorkerError

Result = TypeVar("Result")

PRELOADED = ("autosplit.running.stageworker", "autosplit.measuring.measuring_worker", "autosplit.backends.eager")
"""Modules that a fork server imports, because most workers need them; torch is all but a tenth of the work."""

START_TIMEOUT_S = 60.0
"""Seconds within which a fork server must have imported torch, or modules that were asked for later."""

ANSWER_TIMEOUT_S = 10.0
"""Seconds within which a fork server must answer a question."""

IDLE_S = 60.0
"""Seconds that a fork server without workers waits for a question; the next one takes two seconds of a core to start."""

LOOK_S = 0.1
"""Seconds between two looks at whether a wait is to be given up."""

NO_THREAD_CACHE = "glibc.malloc.tcache_count=0"
"""Setting of glibc's malloc, which only a process that starts can take: freed blocks join their neighbours at once.

Torch asks for aligned blocks, and malloc cuts the splinters off. Splinters in the cache of a thread keep the hole of a freed
block too small for the next block of its size. Then the heap grows to several times the used bytes, and by another amount in
each process.
"""


class ForkServerLost(Exception):  # noqa: N818 - not an error: the next fork server is asked
    """The fork server died or did not answer in time."""


class ForkServer:
    """One fork server and the number of its workers that were not reaped."""

    def __init__(self) -> None:
        self.num_workers = 0
        self.answers = True
        """Whether the fork server has answered every question in time."""
        self._owner = os.getpid()
        self._started = False
        self._sock, theirs = socket.socketpair()
        with theirs:
            limit = struct.pack("@2q", int(ANSWER_TIMEOUT_S), int(ANSWER_TIMEOUT_S % 1 * 1e6))
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                self._sock.setsockopt(socket.SOL_SOCKET, option, limit)
            self._connection = Connection(os.dup(self._sock.fileno()))
            code = "from autosplit.devices.forking import main; main()"
            # A process with several threads must not fork, and each of these libraries starts threads when it is imported.
            one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            # The last setting of a name counts, so the user's value stays.
            tunables = ":".join(filter(None, (NO_THREAD_CACHE, os.environ.get("GLIBC_TUNABLES"))))
            self._process = subprocess.Popen(
                python_running(code, str(theirs.fileno()), str(os.getpid()), " ".join(PRELOADED), " ".join(_wanted)),
                env={**os.environ, "GLIBC_TUNABLES": tunables, **one},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def dead(self) -> bool:
        """Whether the process has ended, or belongs to the process that this one was forked from."""
        return self._owner != os.getpid() or self._process.poll() is not None

    def fork(self, order: Fork, descriptors: Sequence[int]) -> tuple[int, int]:
        """Fork a worker; return its process id and a descriptor of it.

        Raises: ForkServerLost. WorkerError: the kernel refuses another process or descriptor. OSError: as ``os.pidfd_open``.
        """
        answer = self._ask(order, descriptors)
        if not isinstance(answer, int):
            raise WorkerError(refusal("no worker could be forked", answer))
        self.num_workers += 1
        try:
            return answer, os.pidfd_open(answer)
        except ProcessLookupError:
            raise ForkServerLost from None
        except OSError:
            os.kill(answer, signal.SIGKILL)
            self.reap(answer)
            raise

    def load(self, modules: Sequence[str]) -> None:
        """Let it import modules; the next question waits until it has. Raises: ForkServerLost."""
        self._ask(Import(tuple(modules)))

    def reap(self, pid: int) -> int | None:
        """The exit code of a worker that has ended, or None if the fork server does not say it."""
        self.num_workers -= 1
        try:
            return int(self._ask(Reap(pid)))
        except ForkServerLost:
            if not self.num_workers:
                self.end()
            return -signal.SIGKILL if self.dead else None

    def kill(self) -> None:
        """Kill the process, and with it the workers that are left; calls that wait for its answer end."""
        if self._owner == os.getpid():
            self._process.kill()

    def end(self) -> None:
        """Kill the process, and with it the workers that are left; ask it nothing more."""
        self._connection.close()
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._process.kill()
            self._process.wait()
        self._sock.close()

    def _ask(self, question: Fork | Reap | Import, descriptors: Sequence[int] = ()) -> Any:
        if not self.answers or self._connection.closed or self._owner != os.getpid():
            raise ForkServerLost
        try:
            if not self._started:
                self._await_start()
            self._connection.send(question)
            send_descriptors(self._sock, descriptors)
            if isinstance(question, Import):
                self._started = False
                return None
            return self._connection.recv()
        except BlockingIOError:  # the kernel says so when a time limit of the socket has passed
            self.answers = False
            raise ForkServerLost from None
        except (EOFError, ConnectionError):
            # The kernel closes the connection before the process has ended; the next question would find it alive.
            self.end()
            raise ForkServerLost from None

    def _await_start(self) -> None:
        if not self._connection.poll(START_TIMEOUT_S):
            raise BlockingIOError
        fault = self._connection.recv()
        if fault:
            self.end()
            raise WorkerError(refusal("the process that workers are forked from could not start", fault))
        self._started = True


_wanted: list[str] = []
"""Modules that were asked for beside ``PRELOADED``."""
_server: ForkServer | None = None
"""The fork server that is asked for the next worker."""
_retired: list[ForkServer] = []
"""Fork servers that do not answer and whose workers still run."""


def start() -> None:
    """Start the fork server unless it runs; it imports while the host does other work."""
    _in_spawner(_running).result()


def preload(*modules: str) -> None:
    """Let workers from now on share the memory of modules of autosplit, which each would import later. Returns at once."""
    _in_spawner(lambda: _preload(modules))


def _preload(modules: Sequence[str]) -> None:
    fresh = [name for name in modules if name not in _wanted]
    _wanted.extend(fresh)
    if fresh and _server is not None:
        with contextlib.suppress(ForkServerLost):
            _server.load(fresh)


def fork(order: Fork, stop: threading.Event | None = None) -> tuple[int, int, ForkServer]:
    """Fork a worker; return its process id, a descriptor of it and its fork server.

    Raises: ForkServerLost: ask again, with another control connection: the lost one may still fork this worker.
        OSError: a descriptor of the order is not open. WorkerError: the kernel refuses a process or a thread.
        RefusedError: ``stop`` was set meanwhile.
    """
    # The caller may be interrupted and close its descriptors before all of them were sent.
    with contextlib.ExitStack() as stack:
        copies = []
        for number in order.numbers:
            copies.append(os.dup(number))
            stack.callback(os.close, copies[-1])
        held = stack.pop_all()

    def forked() -> tuple[int, int, ForkServer]:
        with held:
            server = _running()
            return (*server.fork(order, copies), server)

    try:
        forking = _in_spawner(forked)
    except WorkerError:  # the thread could not start
        held.close()
        raise
    return answer(forking, "while a worker was started", stop)


def answer(asked: Future[Result], doing: str, stop: threading.Event | None) -> Result:
    """What the spawner thread found. Raises: RefusedError: ``stop`` was set before. Others as the function that it was given."""
    while stop is not None and not wait([asked], LOOK_S).done:
        if stop.is_set():
            raise RefusedError(f"the pipeline was closed {doing}")
    return asked.result()


def reap(server: ForkServer, pid: int) -> Future[int | None]:
    """Will have the exit code of a worker that has ended, or None if its fork server does not say it."""
    return _in_spawner(lambda: server.reap(pid))


def _end_unused() -> None:
    """End the fork server if it has no workers."""
    global _server
    if _server is not None and not _server.num_workers:
        _server.end()
        _server = None


def _running() -> ForkServer:
    global _server
    _retired[:] = [server for server in _retired if server.num_workers]
    if _server is not None and (_server.dead or not _server.answers):
        if _server.dead or not _server.num_workers:
            _server.end()
        else:
            _retired.append(_server)
        _server = None
    if _server is None:
        with refusals_named():
            _server = ForkServer()
    return _server


def _end_all() -> None:
    for server in [*_retired, *([_server] if _server else [])]:
        server.end()


def close() -> None:
    """End every fork server, and the workers that are left."""
    if (_server is not None and not _server.dead) or _retired:
        for server in [*_retired, *([_server] if _server else [])]:
            server.kill()  # the spawner thread may wait for one that imports
        _in_spawner(_end_all).result()


atexit.register(close)

_jobs: "queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]" = queue.SimpleQueue()
_spawner: threading.Thread | None = None
_spawner_lock = threading.Lock()


def _in_spawner(function: Callable[[], Result]) -> Future[Result]:
    """Run ``function`` in a thread that lives as long as the host, after all that was given to it before.

    The kernel sends the parent-death signal when the *thread* that forked ends, so a short-lived thread must not fork.
    """
    global _spawner
    with _spawner_lock:
        if _spawner is None or not _spawner.is_alive():
            _spawner = threading.Thread(target=_spawn_forever, name="autosplit-spawner", daemon=True)
            with refusals_named():
                _spawner.start()
    future: Future[Result] = Future()
    _jobs.put((function, future))
    return future


def _spawn_forever() -> None:
    while True:
        try:
            function, future = _jobs.get(timeout=IDLE_S)
        except queue.Empty:
            _end_unused()
            continue
        try:
            future.set_result(function())
        except BaseException as failure:
            future.set_exception(failure)
