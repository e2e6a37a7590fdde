"""A request: what was asked, until when, and what has become of it."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from autosplit.errors import AutosplitError, DeadlineError, UsageError

Tensors = tuple[torch.Tensor, ...]

_NEVER_NS = 2.0**62
"""A deadline as good as none: 146 years, which a word of the shared memory still holds."""


class RequestTimes(NamedTuple):
    """When a request was submitted, fed to the first stage, made by the last one, and answered, in monotonic nanoseconds.

    ``sequence`` is its number in its lane, ``number`` how many were fed before it.
    """

    sequence: int
    number: int
    submitted_ns: int
    fed_ns: int
    made_ns: int
    done_ns: int


class Answer(Future[Tensors]):
    """The future of a request, whose cancelling reaches the stages: ``stop`` is called with it then."""

    def __init__(self, stop: "Callable[[Answer], None]") -> None:
        super().__init__()
        self._stop = stop

    def cancel(self) -> bool:
        """As of any future; a request that runs ends at the next stage border."""
        if not super().cancel():
            return False
        self._stop(self)
        return True


@dataclass(eq=False, slots=True)
class Request:
    """One request from the door to its answer.

    The answer goes to ``future``, if somebody asked for one, or stays here: ``waiter`` is unlocked once ``answered`` is set.
    """

    inputs: Sequence[torch.Tensor]
    deadline_ns: int
    submitted_ns: int
    future: Answer | None = None
    borrowed: bool = False
    """The caller leaves the inputs as they are until the answer, and answers for the room they take."""
    sequence: int = -1
    """Its number in its lane (see ``lanes``), once it was fed; ``number``: how many were fed before it."""
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
        """Whether somebody may wait for this very answer, not for the last of many."""
        return self.future is not None or not self.borrowed

    def times(self) -> RequestTimes:
        """Of a request that is answered now."""
        now_ns = time.monotonic_ns()
        return RequestTimes(self.sequence, self.number, self.submitted_ns, self.fed_ns, self.made_ns or now_ns, now_ns)

    def wait(self) -> None:
        """Block until it is answered."""
        if not self.answered:
            waiter = threading.Lock()
            waiter.acquire()
            self.waiter = waiter
            if not self.answered:  # else it may have been before anybody could see the lock
                waiter.acquire()

    def expired(self) -> bool:
        """Whether its deadline passed; asked while it waits at the door."""
        if not 0 < self.deadline_ns <= time.monotonic_ns():
            return False
        self.error = DeadlineError("the request's deadline passed while it waited at the door")
        return True


def monotonic_deadline(deadline_s: float | None) -> int:
    """Seconds from now as a monotonic nanosecond count; 0 for none."""
    if deadline_s is None:
        return 0
    if not deadline_s > 0 or math.isinf(deadline_s):
        raise UsageError(f"deadline_s must be more than 0 seconds from now, but is {deadline_s}")
    return time.monotonic_ns() + int(min(deadline_s * 1e9, _NEVER_NS))
