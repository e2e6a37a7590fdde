"""A request, from its inputs to its answer."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from autosplit.compat.futures import DoneFuture, SafeFuture
from autosplit.errors import AutosplitError, DeadlineError, UsageError

Tensors = tuple[torch.Tensor, ...]

_NEVER_NS = 2.0**62
"""The latest deadline, in 146 years: a word of shared memory still holds it."""


class Checked(tuple[torch.Tensor, ...]):
    """Tensors of which it is known that they have the layout of the network's inputs."""

    __slots__ = ()


class RequestTimes(NamedTuple):
    """Times at which a request was submitted, fed, finished by the last stage, and answered, in monotonic nanoseconds.

    ``sequence`` is its number in its lane, ``number`` the number of requests that were fed before it.
    """

    sequence: int
    number: int
    submitted_ns: int
    fed_ns: int
    made_ns: int
    done_ns: int


class AnswerFuture(SafeFuture[Any]):
    """The future of a request. Cancelling it calls ``stop`` with it, which reaches the stages.

    Attributes:
        number: the number by which messages and logs name the request; None while it waits in the queue.
        sequence: the number in its lane (see ``lanes``), by which workers know the request; None while it waits in the queue.
        lent_by: the request, if its answer may lie in the ring.
    """

    def __init__(self, stop: "Callable[[AnswerFuture], None]") -> None:
        super().__init__()
        self.number: int | None = None
        self.sequence: int | None = None
        self._stop = stop
        self.lent_by: Request | None = None

    def release(self) -> None:
        """Give back the memory of an answer that was asked for ``in_place``: its tensors must not be read any more.

        Nothing happens to another answer, nor a second time.
        """
        if self.lent_by is not None and self.lent_by.lent is not None:
            self.lent_by.lent()

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
        self.number, self.sequence, self.lent_by = number, number, None


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
    borrowed: bool = False
    """The inputs stay in memory of the caller, which does not change them until the answer; they take no room in the queue."""
    in_place: bool = False
    """The answer may lie in the ring until the caller releases it; ``lent`` gives the slot back."""
    lent: Callable[[], None] | None = None
    unfilled: bool = False
    """The caller will write the inputs into the slots of the request, once it is its turn to be fed."""
    sequence: int = -1
    """The number in its lane (see ``lanes``) once it was fed; ``number``: the number of requests that were fed before it."""
    number: int = -1
    fed_ns: int = 0
    made_ns: int = 0
    tokens: int = 0
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    error: AutosplitError | None = None
    answered: bool = False
    waiter: "threading.Lock | None" = None

    @property
    def awaited(self) -> bool:
        """Whether a caller may wait for this answer alone, and not for the last of many."""
        return self.future is not None or not self.borrowed

    def feed(self, sequence: int, number: int) -> None:
        """Number a request that is fed now."""
        self.sequence, self.number, self.fed_ns = sequence, number, time.monotonic_ns()
        if self.future is not None:
            self.future.number, self.future.sequence = number, sequence

    def times(self) -> RequestTimes:
        """The times of a request that is answered now."""
        now_ns = time.monotonic_ns()
        return RequestTimes(self.sequence, self.number, self.submitted_ns, self.fed_ns, self.made_ns or now_ns, now_ns)

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


def spent() -> UsageError:
    """The refusal of a buffer that has lost its turn."""
    return UsageError("the buffer was submitted or given up already; ask for another one")


def monotonic_deadline(deadline_s: float | None) -> int:
    """A deadline in seconds from now as monotonic nanoseconds; 0 stands for no deadline."""
    if deadline_s is None:
        return 0
    if not deadline_s > 0 or math.isinf(deadline_s):
        raise UsageError(f"deadline_s must be more than 0 seconds from now, but is {deadline_s}")
    return time.monotonic_ns() + int(min(deadline_s * 1e9, _NEVER_NS))
