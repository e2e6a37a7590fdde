"""AdmissionQueue: requests that wait. WaitingRoom: callers wait for a place there in the order in which they came.

Callers are woken once the queue is half empty, because waking one for each free place costs a core. Meanwhile there are free
places, and a newcomer would take one. So it waits behind the others, which might wait for ever otherwise.
"""

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection
from operator import itemgetter

from autosplit.running.request import Request


class AdmissionQueue:
    """Requests that wait, the most urgent first, then in order of arrival. Not for several threads at once."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Request]] = []
        self._arrivals = itertools.count()
        self.num_held = 0
        """Requests that take no place, as their callers keep the inputs for them."""

    @property
    def num_all(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that take a place."""
        return len(self._waiting) - self.num_held

    @property
    def first(self) -> Request:
        """The next request, which stays."""
        return self._waiting[0][2]

    def soonest(self, count: int) -> list[Request]:
        """The next requests, at most ``count``, which stay."""
        return [request for _, _, request in heapq.nsmallest(count, self._waiting)]

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, request: Request) -> None:
        """Let a request wait."""
        heapq.heappush(self._waiting, (request.priority, next(self._arrivals), request))
        self.num_held += request.caller_keeps_inputs

    def pop(self) -> Request:
        """Take the next request away."""
        _, _, request = heapq.heappop(self._waiting)
        self.num_held -= request.caller_keeps_inputs
        return request

    def pop_expired(self) -> list[Request]:
        """Take away the requests whose deadline has passed."""
        return self.remove([request for _, _, request in self._waiting if request.expired()])

    def next_deadline_ns(self) -> float:
        """Earliest deadline among waiting requests; infinity without one."""
        return min((request.deadline_ns for _, _, request in self._waiting if request.deadline_ns), default=math.inf)

    def remove(self, leaving: Collection[Request]) -> list[Request]:
        """Take these requests away; return those that were here, in the order in which they would have left."""
        leaving = set(leaving)
        found = [request for _, _, request in sorted(self._waiting, key=itemgetter(0, 1)) if request in leaving]
        if found:
            self._waiting = [entry for entry in self._waiting if entry[2] not in leaving]
            heapq.heapify(self._waiting)
            self.num_held -= sum(request.caller_keeps_inputs for request in found)
        return found

    def clear(self) -> list[Request]:
        """Take all requests away, and return them."""
        return self.remove([request for _, _, request in self._waiting])


class WaitingRoom:
    """Callers that wait for a place. The lock of the condition is held around every call.

    Args:
        condition: on the lock that guards the queue; no other code waits on it.
        has_room: whether a caller need not wait.
        check_thread: called before a wait; raises UsageError in a thread that must not wait.
    """

    def __init__(self, condition: threading.Condition, has_room: Callable[[], bool], check_thread: Callable[[], None]) -> None:
        self._condition = condition
        self._has_room = has_room
        self._check_thread = check_thread
        self._num_here = 0
        self._is_over = False

    def is_free(self) -> bool:
        """Whether a caller would not wait."""
        return self._is_over or (self._has_room() and not self._num_here)

    def enter(self, timeout_s: float | None) -> bool:
        """Wait for a place behind all other callers; return whether the caller may go on.

        Args:
            timeout_s: how long to wait; None waits without limit, and 0 returns at once.
        """
        if self.is_free():
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        self._check_thread()
        until_s = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        enters = False
        self._num_here += 1
        try:
            while self._condition.wait(max(0.0, until_s - time.monotonic())) and not (self._has_room() or self._is_over):
                pass
            enters = self._has_room() or self._is_over
        finally:
            self._num_here -= 1
            if not enters:  # a timeout or Ctrl-C: the wake-up may have come at that moment, and another caller waits for it
                self.wake(1)
        return enters

    def wake_when_half_empty(self, num_waiting: int, queue_capacity: int) -> None:
        """Wake callers once at most half of the places of the queue are taken."""
        if num_waiting <= queue_capacity // 2:
            self.wake(queue_capacity - num_waiting)

    def wake(self, num_places: int) -> None:
        """Wake the callers that have waited longest, one for each free place, if there is any."""
        if self._has_room():
            self._condition.notify(max(1, num_places))

    def end(self) -> None:
        """Wake all callers and let every later one pass: the owner refuses them with the reason."""
        self._is_over = True
        self._condition.notify_all()
