"""A request, its future, and Answers: they give the answer to its caller, and keep its times."""

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from autosplit.compat.futures import DoneFuture, SafeFuture
from autosplit.errors import AutosplitError, DeadlineError, RefusedError, UsageError

Tensors = tuple[torch.Tensor, ...]
Kept = TypeVar("Kept")

_NEVER_NS = 2.0**62
"""The latest deadline, in 146 years: a word of shared memory still holds it."""

NUM_TIMES = 16_384
"""Last requests whose times are kept."""

log = logging.getLogger(__name__)


class MatchingTensors(tuple[torch.Tensor, ...]):
    """Tensors with the layout of the network's inputs, which need no further check."""

    __slots__ = ()


class RequestTimes(NamedTuple):
    """Times at which a request was submitted, sent, finished by the last stage, and answered, in monotonic nanoseconds.

    ``lane`` is its lane of replicas that never meet (see ``inflight``).
    """

    lane: int
    submitted_ns: int
    sent_ns: int
    made_ns: int
    done_ns: int


class AnswerFuture(SafeFuture[Any]):
    """The future of a request. Cancelling it calls ``stop`` with it, which reaches the stages.

    Attributes:
        number: the number by which messages and logs name the request; None while it waits in the queue.
    """

    def __init__(self, stop: "Callable[[AnswerFuture], None]") -> None:
        super().__init__()
        self.number: int | None = None
        self._stop = stop

    def cancel(self) -> bool:
        """Cancel the request; if it runs, it ends at the next stage border."""
        if not super().cancel():
            return False
        self._stop(self)
        return True


class Finished(DoneFuture[Any], AnswerFuture):
    """The future of a request that was answered at once."""

    def __init__(self, number: int, result: Any, error: Exception | None) -> None:
        DoneFuture.__init__(self, result, error)
        self.number = number


@dataclass(eq=False, slots=True)
class Request:
    """One request.

    The answer goes to ``future`` if there is one, else it stays here: ``wake`` is called once ``answered`` is set.
    """

    inputs: Sequence[torch.Tensor]
    deadline_ns: int
    submitted_ns: int
    future: AnswerFuture | None = None
    returns: Callable[[Tensors], Any] | None = None
    """Makes the result of the future; None for the tensors themselves."""
    caller_keeps_inputs: bool = False
    """The caller does not change the inputs until the answer, so the request takes no place in the queue."""
    holds_inputs: bool = False
    """The inputs are a copy that no other code changes."""
    priority: int = 0
    variant: int = 0
    """The variant of the stages whose inputs have these shapes."""
    number: int = -1
    """By default the number of requests that were sent before it."""
    sequence: int = -1
    """The number in its lane, by which workers know it, once it was sent to them."""
    lane: int = 0
    sent_ns: int = 0
    """When it was sent; 0 before."""
    made_ns: int = 0
    tokens: int = 0
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    error: AutosplitError | None = None
    answered: bool = False
    waiter: "threading.Lock | None" = None

    @property
    def has_waiter(self) -> bool:
        """Whether a caller may wait for this answer alone, and not for the last of many."""
        return self.future is not None or not self.caller_keeps_inputs

    def times(self) -> RequestTimes:
        """The times of a request that is answered now."""
        now_ns = time.monotonic_ns()
        return RequestTimes(self.lane, self.submitted_ns, self.sent_ns, self.made_ns or now_ns, now_ns)

    def will_wait(self) -> None:
        """Let ``wake`` end the next ``wait``, also if it is called before."""
        self.waiter = threading.Lock()
        self.waiter.acquire()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is answered or ``wake`` is called; False if ``timeout_s`` passed first."""
        if self.answered:
            return True
        if self.waiter is None:
            self.will_wait()
        assert self.waiter is not None
        if self.answered:  # before there was a lock to be released
            return True
        return self.waiter.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))

    def wake(self) -> None:
        """End the present or the next ``wait``."""
        if self.waiter is not None:
            with contextlib.suppress(RuntimeError):  # it was woken already
                self.waiter.release()

    def expired(self) -> bool:
        """Whether the deadline has passed while the request waited, which becomes its error then."""
        if not 0 < self.deadline_ns <= time.monotonic_ns():
            return False
        self.error = DeadlineError("the request's deadline passed while it waited in the admission queue")
        return True


def taken(kept: deque[Kept], *, clear: bool) -> list[Kept]:
    """The kept values, to which other threads may add some; with ``clear``, each comes once."""
    return [kept.popleft() for _ in range(len(kept))] if clear else list(kept)


def monotonic_deadline(deadline_s: float | None) -> int:
    """A deadline in seconds from now as monotonic nanoseconds; 0 stands for no deadline."""
    if deadline_s is None:
        return 0
    if not deadline_s > 0 or math.isinf(deadline_s):
        raise UsageError(f"deadline_s must be more than 0 seconds from now, but is {deadline_s}")
    return time.monotonic_ns() + int(min(deadline_s * 1e9, _NEVER_NS))


class Answers:
    """The answers of one pipeline.

    Args:
        outputs: names of the pipeline's outputs, in the order of an answer.

    Attributes:
        threads: identifiers of the threads that deliver answers; no callback may end them.
        times: the times of the last ``NUM_TIMES`` requests.
        owner: the process that gives the answers.
    """

    def __init__(self, outputs: Sequence[str]) -> None:
        self.times: deque[RequestTimes] = deque(maxlen=NUM_TIMES)
        self._outputs = outputs
        self.threads: set[int | None] = set()
        self.owner = os.getpid()

    def deliver(self, requests: Sequence[Request]) -> None:
        """Answer requests; those that have an answer already are left out.

        Raises: in the thread of a caller, with which a callback ended it, once all requests are answered.
        """
        ended: BaseException | None = None
        for request in requests:
            if request.answered:
                continue
            self.times.append(request.times())
            request.answered = True
            if request.waiter is not None:
                request.wake()
            future, request.future = request.future, None  # without a reference cycle the answer's memory is free at once
            if future is None or not future.set_running_or_notify_cancel():
                continue
            try:
                try:
                    result = self.result(request)
                except Exception as failure:
                    future.set_exception(failure)
                else:
                    future.set_result(result)
            except BaseException as failure:  # a callback raised SystemExit, for example; a future catches every Exception
                if threading.get_ident() in self.threads:
                    log.exception("a callback of request %d ended its thread, which goes on with others", request.number)
                else:
                    ended = failure
        if ended is not None:
            raise ended

    def deliver_here(self, requests: Sequence[Request]) -> None:
        """Answer requests as a thread of the pipeline, though this one is not always that: no callback may wait in it."""
        thread = threading.get_ident()
        self.threads.add(thread)
        try:
            self.deliver(requests)
        finally:
            self.threads.discard(thread)

    def fail(self, requests: Sequence[Request], error: AutosplitError) -> None:
        """Answer requests with an error, each with one of its own, unless they have one already."""
        for request in requests:
            request.error = request.error or copy(error)
        self.deliver(requests)

    def result(self, request: Request) -> Any:
        """The outputs of an answered request, or its return value made of them. Raises: the error with which it failed."""
        if request.error is not None:
            raise request.error
        values = request.values
        outputs = tuple([values[name] for name in self._outputs])
        return outputs if request.returns is None else request.returns(outputs)

    def wait_for(self, request: Request) -> Tensors:
        """The outputs of a request, once it is answered. Raises: as ``check_thread``; the error of the request."""
        if not request.answered:
            self.check_thread()
            request.wait()
        outputs: Tensors = self.result(request)
        return outputs

    def check_thread(self) -> None:
        """Raise an error in a thread that must not wait for an answer.

        Raises: UsageError: this is a callback, for the end of which other requests wait. RefusedError: as ``check_process``.
        """
        self.check_process()
        if threading.get_ident() in self.threads:
            raise UsageError("a callback of an answer cannot wait for the same pipeline, nor close it; do that in another thread")

    def check_process(self) -> None:
        """Raises: RefusedError: this process was forked from the one that gives the answers, which never come here."""
        if os.getpid() != self.owner:
            raise RefusedError(f"the request was refused: process {self.owner} opened the pipeline. Open one after the fork.")
