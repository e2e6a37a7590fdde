"""Limit: how many requests may be without an answer, and the policy for a request beyond that."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Literal, TypeVar

from autosplit.compat.futures import SafeFuture
from autosplit.errors import BRIEF, RefusedError, UsageError
from autosplit.running.request import Tensors

Policy = Literal["block", "refuse", "drop_oldest"]
POLICIES: tuple[Policy, ...] = ("block", "refuse", "drop_oldest")

Answering = TypeVar("Answering", bound=Future[Tensors])


class Limit:
    """Counts requests without an answer. It may be used by several threads.

    Args:
        most: requests that may be without an answer.
        when_full: the policy for the next request. ``block`` waits until an answer is there, ``refuse`` raises RefusedError,
            ``drop_oldest`` cancels the oldest request.
        unit: the counted thing in messages, such as ``run``.
        check_thread: called before it blocks; raises UsageError in a thread that must not wait.
        place: where it is, in messages, such as `` of the chain``.
    Raises: UsageError: the limit is below 1, or there is no such policy.
    """

    def __init__(self, most: int, when_full: Policy, unit: str, check_thread: Callable[[], None], place: str = "") -> None:
        if not isinstance(most, int) or most < 1:
            raise UsageError(f"limit must be at least 1 {unit}, but is {BRIEF.repr(most)}")
        if when_full not in POLICIES:
            raise UsageError(f"when_full must be one of {', '.join(POLICIES)}, but is {BRIEF.repr(when_full)}")
        self.most = most
        self._when_full = when_full
        self._unit, self._place = unit, place
        self._check_thread = check_thread
        self._lock = threading.Lock()
        self._unfinished: list[Future[Tensors]] = []
        """The requests without an answer, the oldest first."""
        self._starting: list[Future[Tensors]] = []
        """A future for each request that is being submitted; it is done once the request is among the others."""

    def submit(self, start: Callable[[float | None], Answering], timeout_s: float | None = None) -> Answering:
        """Call ``start``, which submits a request, once the limit allows it.

        Args:
            start: submits the request and returns its future; called with the seconds that are left of ``timeout_s``.
            timeout_s: how long ``block`` waits; None waits until an answer is there.
        Raises: RefusedError: the limit is reached; any exception of ``start``.
        """
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        place = self._take_place(until_s)
        future: Answering | None = None
        try:
            future = start(None if timeout_s is None else max(0.0, until_s - time.monotonic()))
        finally:
            with self._lock:
                self._starting.remove(place)
                self._unfinished += [future] if future is not None else []
            place.set_result(())  # threads that wait for room look again
        return future

    def _take_place(self, until_s: float) -> "Future[Tensors]":
        while True:
            with self._lock:
                self._unfinished = [future for future in self._unfinished if not future.done()]
                held = [*self._unfinished, *self._starting]
                if len(held) < self.most:
                    place: Future[Tensors] = SafeFuture()
                    self._starting.append(place)
                    return place
                oldest = self._unfinished.pop(0) if self._when_full == "drop_oldest" and self._unfinished else None
            left_s = until_s - time.monotonic()
            if oldest is not None:
                oldest.cancel()
            elif self._when_full == "refuse" or left_s <= 0:
                higher = "set a higher limit or when_full='drop_oldest'"
                way_out = "submit with a longer timeout_s" if self._when_full == "block" else higher
                raise RefusedError(
                    f"the {self._unit} was refused: {len(held)} {self._unit}s{self._place} are unfinished, which is the limit. "
                    f"Wait for answers, or {way_out}."
                )
            else:
                self._check_thread()
                wait(held, min(left_s, threading.TIMEOUT_MAX), FIRST_COMPLETED)
