"""Exporters and compilers run in a process apart: where one crashes, it costs its answer and not the user's process.

The process is kept for further calls. It ends with the workspace that it worked for, or when none comes for ``IDLE_S``.
"""

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from multiprocessing.connection import Connection
from typing import TypeVar

from autosplit.devices.processes import WorkerProcess, receive, spawn_worker
from autosplit.errors import BackendError, DeadlineError, WorkerError

T = TypeVar("T")

IDLE_S = 10.0
LOOK_S = 0.25
"""Seconds between two looks at a process that has a limit."""

_idle: list[WorkerProcess] = []
_lock = threading.Lock()
_apart = False
"""Whether this process is one of them."""


def apart(function: Callable[..., T], *arguments: object, doing: str, packages: Sequence[str] = (), limit_s: float = inf) -> T:
    """``ask`` where a crash costs a backend a stage. Raises: BackendError: the process died; else as ``ask``."""
    try:
        return ask(function, *arguments, doing=doing, packages=packages, limit_s=limit_s)
    except WorkerError as failure:
        raise BackendError(str(failure)) from None


def ask(
    function: Callable[..., T],
    *arguments: object,
    doing: str,
    packages: Sequence[str] = (),
    limit_s: float = inf,
    tell: Callable[[float], None] = lambda share: None,
) -> T:
    """The result of a function of some module, called in the other process; here, if this is such a process.

    Args:
        function: what to call; it and its arguments are pickled.
        arguments: its arguments.
        doing: for messages, such as "while OpenVINO compiled stage 'stage0'".
        packages: modules that define the user's operators.
        limit_s: most seconds.
        tell: called now and then with the share of ``limit_s`` that has passed.
    Raises: WorkerError: the process died. DeadlineError: ``limit_s`` passed. Whatever the function raises.
    """
    if _apart:
        return function(*arguments)
    worker, begun_s, is_free = _taken(), time.monotonic(), False
    try:
        with suppress(ConnectionError):  # it has died; ``receive`` reports how
            worker.connection.send((tuple(packages), function, arguments))
        while limit_s < inf and not worker.connection.poll(LOOK_S):
            taken_s = time.monotonic() - begun_s
            if taken_s > limit_s:
                raise DeadlineError(f"no answer came within {limit_s:.0f} s {doing}")
            tell(taken_s / limit_s)
        failure, result = receive(worker, inf, doing)
        is_free = True
    except WorkerError:
        raise WorkerError(f"the process {worker.fate()} {doing}") from None
    finally:
        if is_free:
            with _lock:
                _idle.append(worker)
        else:
            _end(worker)
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]


def _taken() -> WorkerProcess:
    """A process that is idle, or a new one."""
    while True:
        with _lock:
            worker = _idle.pop() if _idle else None
        if worker is None:
            return spawn_worker("autosplit.backends.apart:serve", name="compiling")
        if worker.alive() and not worker.connection.poll(0):
            return worker
        _end(worker)


def end_idle() -> None:
    """End the processes that are kept for further calls."""
    with _lock:
        workers = _idle[:]
        _idle.clear()
    for worker in workers:
        _end(worker)


def _end(worker: WorkerProcess) -> None:
    """End the process and the compilers that it called, which are in its process group."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.close()


def serve(connection: Connection) -> None:
    """The whole life of the other process."""
    global _apart
    _apart = True
    while connection.poll(IDLE_S):
        try:
            packages, function, arguments = connection.recv()
        except EOFError:
            return
        try:
            for package in packages:
                importlib.import_module(package)
            answer: tuple[Exception | None, object] = None, function(*arguments)
        except Exception as failure:
            answer = _picklable(failure), None
        connection.send(answer)


def _picklable(failure: Exception) -> Exception:
    """The failure without its causes, which may hold anything; an error of another package as its text."""
    if type(failure).__module__.partition(".")[0] in ("autosplit", "builtins"):
        failure.__cause__ = failure.__context__ = None
        return failure.with_traceback(None)
    return BackendError(f"{type(failure).__name__}: {failure}")
