"""Exporters and compilers run in a process apart: where one crashes or hangs, it costs its answer and not the user's process.

The process is kept for further calls. It ends once the stages of a workspace are open, or the workspace is closed, unless
``kept`` waits for more; and when no call comes for ``IDLE_S``.
"""

import atexit
import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import TypeVar

from autosplit.devices.calls import begin, serve
from autosplit.devices.limits import refusals_named
from autosplit.devices.processes import Worker, spawn_worker
from autosplit.errors import AutosplitError, BackendError, RefusedError, WorkerError
from autosplit.scratch import scratch_folder, sweep

T = TypeVar("T")
Watch = Callable[[float], None]

IDLE_S = 60.0
"""Seconds that the process waits for its next call. A search may measure for long between two exports, and a new process loads
exporters for 4 s."""

LIMIT_S = 900.0
"""Seconds that one call may take. The slowest compilation that was seen, inductor with 819 ops on two cores, took 56 s."""

LEAVING_S = 5.0
"""Most seconds for which the end of this process waits for that of the other one."""

_idle: list[Worker] = []
num_keeping = 0
"""Blocks of ``kept`` that are entered. Tests set it, to keep the process from test to test."""
_lock = threading.Lock()
_warming: threading.Thread | None = None
"""The call of ``begin_apart``, until the next call has waited for it."""
_leaving = threading.Event()
"""Set when this process ends, to end every wait for the other one."""
_is_apart = False
"""Whether this process is one of them."""
_limits: ContextVar[tuple[float, Watch | None]] = ContextVar("limits", default=(LIMIT_S, None))


@contextmanager
def limited(limit_s: float = LIMIT_S, watch: Watch | None = None) -> Iterator[None]:
    """Give each call of this block a limit, and call ``watch`` several times a second with the seconds that it has taken.

    An error of ``watch`` ends the call and its process. Without one, that of a block around this one goes on.
    """
    token = _limits.set((limit_s, watch or _limits.get()[1]))
    try:
        yield
    finally:
        _limits.reset(token)


def apart(function: Callable[..., T], *arguments: object, doing: str, packages: Sequence[str] = ()) -> T:
    """The result of a function of some module, called in the other process; here, if this is such a process.

    Args:
        function: the function to call; it and its arguments are pickled.
        doing: for messages, such as "while OpenVINO compiled stage 'stage0'".
        packages: modules that define the user's operators.
    Raises: BackendError: the process died, or took longer than ``limited`` allows (its cause is a HungError), or the function
        raised another error. RefusedError: this process ends. AutosplitError: the function raised it.
    """
    if _is_apart:
        return function(*arguments)
    limit_s, watch = _limits.get()
    try:
        worker, is_free = _taken(), False
        try:
            call = begin(worker, doing, _run, doing, tuple(packages), function, arguments)
            result = call.result(limit_s, progress=watch, stop=_leaving)
            is_free = True
        except AutosplitError as failure:
            is_free = not isinstance(failure, WorkerError | RefusedError)
            raise
        finally:
            if is_free:
                with _lock:
                    _idle.append(worker)
            else:
                _end(worker)
    except WorkerError as failure:  # a crash costs a backend a stage
        raise BackendError(str(failure)) from failure
    return result  # type: ignore[return-value]


def begin_apart(function: Callable[..., object], *arguments: object, doing: str) -> None:
    """Begin a call in the other process that only loads modules there; the next call waits for its end.

    The function gets a folder first, which is removed when the call or this process ends. A failure is ignored, because the next
    call meets it too. Does nothing if such a process exists.
    """
    global _warming

    def call() -> None:
        with suppress(AutosplitError, OSError), scratch_folder() as folder:
            apart(function, folder, *arguments, doing=doing)

    with _lock:
        if _idle or _warming is not None:
            return
        _warming = threading.Thread(target=call, name="autosplit-loading", daemon=True)
    with refusals_named():
        _warming.start()


@atexit.register
def _leave() -> None:
    """End the call of ``begin_apart``, whose thread would end with this process and leave its folder."""
    _leaving.set()
    if _warming is not None:
        _warming.join(LEAVING_S)


def _run(_: object, doing: str, packages: Sequence[str], function: Callable[..., object], arguments: Sequence[object]) -> object:
    """In the other process: the result of the function. Raises: AutosplitError: as ``apart``."""
    try:
        for package in packages:
            importlib.import_module(package)
        return function(*arguments)
    except AutosplitError:
        raise
    except Exception as failure:
        raise BackendError(f"{type(failure).__name__} {doing}: {failure}") from None


def _taken() -> Worker:
    """A process that is idle, or a new one."""
    global _warming
    if (warming := _warming) is not None and warming is not threading.current_thread():
        warming.join()
        _warming = None
    while True:
        with _lock:
            worker = _idle.pop() if _idle else None
        if worker is None:
            return spawn_worker("autosplit.backends.apart:main", name="compiling", stop=_leaving)
        if worker.alive() and not worker.connection.poll(0):
            return worker
        _end(worker)


@contextmanager
def kept() -> Iterator[None]:
    """Let the processes of all workspaces in this block wait for further calls until its end."""
    global num_keeping
    with _lock:
        num_keeping += 1
    try:
        yield
    finally:
        with _lock:
            num_keeping -= 1
        end_idle()


def end_idle() -> None:
    """End the processes that wait for further calls, unless ``kept`` keeps them."""
    with _lock:
        workers = [] if num_keeping else _idle[:]
        del _idle[: len(workers)]
    for worker in workers:
        _end(worker)


def _end(worker: Worker) -> None:
    """End the process and the compilers that it called, which are in its process group, and remove the folders that it had."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.close()
    with suppress(AutosplitError, OSError):
        sweep()


def main(connection: Connection) -> None:
    """The main function of the other process."""
    global _is_apart
    _is_apart = True
    serve(connection, idle_s=IDLE_S)
