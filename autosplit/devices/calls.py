"""Typed calls in a worker: the host sends a function with its arguments, and the worker replies with the result or an error.

A worker carries out its calls in order. The host may begin several, in one worker or in many, before it waits for a result.
Each reply has the number of its call, so a late reply is never taken for another one.
"""

import itertools
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from autosplit.devices.processes import Worker, receive
from autosplit.errors import AutosplitError, WorkerError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

START = 0
"""Number of the call that a worker begins with: its own start."""

REASON_OF_END = -1
"""Number of the reply with which a worker says why it ends, without a call."""

_numbers = itertools.count(START + 1)


@dataclass(frozen=True, slots=True)
class Invocation:
    """A call on its way to a worker; ``function`` is pickled by name."""

    number: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a call: its result, an error of autosplit's, or the traceback of any other error."""

    number: int
    result: Any = None
    error: AutosplitError | None = None
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """A call in a worker; ``doing`` ends sentences about it, such as "during loading" or "while OpenVINO compiled"."""

    worker: Worker
    doing: str
    number: int = START

    def result(
        self, limit_s: float = inf, *, progress: Callable[[float], None] | None = None, stop: threading.Event | None = None
    ) -> Result:
        """Wait for the result.

        Args:
            limit_s: most seconds from now.
            progress: called several times a second with the seconds that have passed.
            stop: set by another thread to end the wait.
        Raises: HungError: ``limit_s`` passed. WorkerError: the worker died, or the function raised an error that is not
            autosplit's. RefusedError: ``stop`` was set. AutosplitError: the function raised it.
        """
        until_s = time.monotonic() + limit_s
        while True:
            reply = receive(self.worker, until_s - time.monotonic(), self.doing, stop, progress)
            if isinstance(reply, Reply) and reply.number == self.number:
                break
        if reply.error is not None:
            raise reply.error
        if reply.trace:
            raise WorkerError(f"worker '{self.worker.name}' failed {self.doing}. The worker's traceback:\n{reply.trace}")
        return cast(Result, reply.result)


def begin(
    worker: Worker,
    doing: str,
    function: Callable[Concatenate[Any, Arguments], Result],
    *arguments: Arguments.args,
    **named: Arguments.kwargs,
) -> Call[Result]:
    """Send a call to a worker, which adds its own state as the first argument. ``result`` reports a worker that died."""
    number = next(_numbers)
    with suppress(OSError):
        worker.connection.send(Invocation(number, function, arguments, named))
    return Call(worker, doing, number)


def answer(connection: Connection, state: Any = None) -> None:
    """In the worker: carry out the next call. Raises: EOFError, OSError: the host closed the channel."""
    invocation: Invocation = connection.recv()
    reply_with(connection, invocation.number, lambda: invocation.function(state, *invocation.arguments, **invocation.named))


def reply_with(connection: Connection, number: int, work: Callable[[], Any]) -> bool:
    """In the worker: send the result of ``work``, or its error; return whether it succeeded."""
    try:
        reply = Reply(number, work())
    except AutosplitError as failure:
        failure.__cause__ = failure.__context__ = None  # they may hold anything
        reply = Reply(number, error=failure.with_traceback(None))
    except Exception:
        reply = Reply(number, trace=traceback.format_exc())
    try:
        connection.send(reply)
    except OSError:
        raise
    except Exception:  # the result cannot be pickled
        reply = Reply(number, trace=traceback.format_exc())
        connection.send(reply)
    return reply.error is None and not reply.trace


def reply_reason(connection: Connection, failure: AutosplitError) -> None:
    """In the worker: say why it is about to end. The host may be gone too."""
    with suppress(OSError):
        connection.send(Reply(REASON_OF_END, error=failure))


def reason_of_end(worker: Worker) -> str:
    """The reason that a worker gave for its end, '' if it gave none. Other replies of it are lost."""
    with suppress(EOFError, OSError):
        while worker.connection.poll(0):
            reply = worker.connection.recv()
            if isinstance(reply, Reply) and reply.number == REASON_OF_END:
                return str(reply.error)
    return ""


def serve(connection: Connection, state: Any = None, idle_s: float | None = None) -> None:
    """In the worker: carry out calls until the host closes the channel, or until none came for ``idle_s``."""
    with suppress(EOFError):
        while connection.poll(idle_s):
            answer(connection, state)
