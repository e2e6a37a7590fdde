"""The door: requests that wait until there is room in the stages, the most urgent first, then the one that came first."""

import heapq
import itertools
import math
from collections.abc import Collection

from autosplit.running.request import Request


class Door:
    """Not for several threads at once: the executor holds its lock around each call."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Request]] = []
        self._arrivals = itertools.count()
        self.num_held = 0
        """Requests that take no room here, as their callers keep the inputs for them."""

    @property
    def num_waiting(self) -> int:
        """Requests that take room."""
        return len(self._waiting) - self.num_held

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, request: Request, priority: int) -> None:
        """Let a request wait."""
        heapq.heappush(self._waiting, (priority, next(self._arrivals), request))
        self.num_held += request.keep

    def pop(self) -> tuple[Request, int]:
        """The next request, and its priority."""
        priority, _, request = heapq.heappop(self._waiting)
        self.num_held -= request.keep
        return request, priority

    def late(self) -> list[Request]:
        """Take away those whose deadline has passed."""
        found = [request for _, _, request in self._waiting if request.late()]
        self.remove(found)
        return found

    def next_deadline_ns(self) -> float:
        """The first deadline of those who wait; infinity if there is none."""
        return min((request.deadline_ns for _, _, request in self._waiting if request.deadline_ns), default=math.inf)

    def remove(self, leaving: Collection[Request]) -> list[Request]:
        """Take these away; return those that were here."""
        leaving = set(leaving)
        found = [request for _, _, request in self._waiting if request in leaving]
        if found:
            self._waiting = [entry for entry in self._waiting if entry[2] not in leaving]
            heapq.heapify(self._waiting)
            self.num_held -= sum(request.keep for request in found)
        return found

    def clear(self) -> list[Request]:
        """Take all away, and return them."""
        return self.remove([request for _, _, request in self._waiting])
