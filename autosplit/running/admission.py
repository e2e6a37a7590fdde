"""Admission control: a request is fed at once if the window has room, waits in the admission queue, or is refused."""

import heapq
import itertools
import math
import threading
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

from autosplit.compat.futures import SafeCondition
from autosplit.errors import AutosplitError, RefusedError
from autosplit.running.entrance import Entrance
from autosplit.running.hostrings import InputRings
from autosplit.running.inflight import InFlight
from autosplit.running.lanes import Lanes
from autosplit.running.request import AnswerFuture, Request, RequestTimes, Tensors, spent

FILL_S = 10.0
"""Seconds for which ``close`` waits for a caller that fills a buffer while other requests wait behind it."""


class AdmissionQueue:
    """Requests that wait, the most urgent first, then in order of arrival. Not for several threads at once."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Request]] = []
        self._arrivals = itertools.count()
        self.num_borrowed = 0
        """Requests that take no room, as their callers keep the inputs for them."""

    @property
    def num_all(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that take room."""
        return len(self._waiting) - self.num_borrowed

    @property
    def first(self) -> Request:
        """The next request, which stays."""
        return self._waiting[0][2]

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, request: Request, priority: int) -> None:
        """Let a request wait."""
        heapq.heappush(self._waiting, (priority, next(self._arrivals), request))
        self.num_borrowed += request.borrowed

    def pop(self) -> tuple[Request, int]:
        """The next request, and its priority."""
        priority, _, request = heapq.heappop(self._waiting)
        self.num_borrowed -= request.borrowed
        return request, priority

    def pop_expired(self) -> list[Request]:
        """Take away the requests whose deadline has passed."""
        return self.remove([request for _, _, request in self._waiting if request.expired()])

    def next_deadline_ns(self) -> float:
        """The first deadline of a waiting request; infinity if there is none."""
        return min((request.deadline_ns for _, _, request in self._waiting if request.deadline_ns), default=math.inf)

    def remove(self, leaving: Collection[Request]) -> list[Request]:
        """Take these requests away; return those that were here, in the order in which they would have been fed."""
        leaving = set(leaving)
        found = [request for _, _, request in sorted(self._waiting, key=itemgetter(0, 1)) if request in leaving]
        if found:
            self._waiting = [entry for entry in self._waiting if entry[2] not in leaving]
            heapq.heapify(self._waiting)
            self.num_borrowed -= sum(request.borrowed for request in found)
        return found

    def clear(self) -> list[Request]:
        """Take all requests away, and return them."""
        return self.remove([request for _, _, request in self._waiting])


def wait_until(
    holds: Callable[[], bool], changed: threading.Condition, timeout_s: float | None, check_thread: Callable[[], None]
) -> bool:
    """Wait until ``holds`` is true, which is looked at when ``changed``, which the caller has entered, is notified.

    Args:
        holds: what is waited for.
        changed: notified when a request is done.
        timeout_s: how long to wait; None waits without limit.
        check_thread: called before a wait; raises UsageError in a thread that must not wait.
    Returns: whether it is true.
    """
    if holds():
        return True
    if timeout_s is None or timeout_s > 0:
        check_thread()
    return changed.wait_for(holds, None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))


def no_room(num_running: int, window: int, num_waiting: int, room: int) -> RefusedError:
    """The refusal of a request that found no room in time."""
    return RefusedError(
        f"the request was refused: {num_running} requests are running (limit {window}) and {num_waiting} are waiting "
        f"(limit {room}). Submit with a longer timeout_s, or less often."
    )


def closed() -> RefusedError:
    """The refusal of a request that came too late."""
    return RefusedError("the request was refused: the pipeline is closed")


class Admission:
    """Decides which requests are fed, wait or are refused; a condition guards them until their results are here.

    Args:
        in_flight: the requests that were fed.
        inputs: where requests are fed.
        room: requests that may wait in the admission queue while the window is full.
        wake: wakes the executor's thread.
        check_thread: raises UsageError in the executor's thread, which must never wait for room.

    Attributes:
        changed: held around each change; waiters for room, or for the end, are notified.
        failure: why every further request is refused, once there is a reason.
        alarm_ns: no deadline of a waiting request passes before.
    """

    def __init__(
        self,
        in_flight: InFlight,
        inputs: InputRings,
        room: int,
        wake: Callable[[], None],
        check_thread: Callable[[], None],
    ) -> None:
        self.changed = SafeCondition()
        self._entrance = Entrance(self.changed.beside(), self._has_room, check_thread)
        self.room = room
        self.queue = AdmissionQueue()
        self.failure: AutosplitError | None = None
        self.alarm_ns: float = math.inf
        self._in_flight = in_flight
        self._inputs = inputs
        self._wake = wake
        self._check_thread = check_thread
        self._is_open = True
        self._is_feeding = True
        self._filling: Request | None = None
        """The request whose caller fills its slots now; none is fed until it is done."""
        self._last_awaited = -1
        """Number of the last request in flight that a caller may wait for alone."""
        self._idle = False
        """Whether the executor's thread waits for more than the next result."""

    def enter(self, request: Request, priority: int, timeout_s: float | None) -> bool:
        """Feed a request, or let it wait; True if its deadline has passed already, so that it is to be answered now.

        Args:
            request: the request; its inputs were checked.
            priority: lower is sooner, then arrival counts.
            timeout_s: how long to wait for room in the queue; 0 refuses at once, None waits.
        Raises: RefusedError: no room in time, or closed. WorkerError: the pipeline has given up.
        """
        with self.changed:
            try:
                if not request.borrowed and not self._entrance.enter(timeout_s):
                    raise self._no_room()
                self._check_open()
                if self._may_feed():  # then the queue is empty
                    return self._feed(request, priority)
                self.queue.push(request, priority)
            finally:  # a request that is late, for example, will not end and call the next caller
                if not (self.queue or self._in_flight):
                    self._entrance.call(1)
            if not request.borrowed:
                self._inputs.copy_inputs(request)
            if 0 < request.deadline_ns < self.alarm_ns:
                self.alarm_ns = request.deadline_ns
                self._wake()
            elif request.awaited and self._idle:
                self._wake()
        return False

    def await_turn(self, request: Request, timeout_s: float | None) -> bool:
        """Wait until it is the turn of an unfilled request that has entered. In any case ``fill`` or ``leave`` must follow.

        Returns: whether its inputs may be filled; otherwise it was answered with an error. Raises: RefusedError: not in time.
        """
        if request is not self._filling and not request.answered:
            self._check_thread()
        in_time = request.wait(timeout_s)
        with self.changed:
            if not in_time and self.queue.remove([request]):
                raise self._no_room()
        return not request.answered

    def fill(self, request: Request, priority: int) -> list[Request]:
        """Feed a request whose inputs lie in its slots, and then waiting ones; return those to be answered now.

        Raises: RefusedError, WorkerError: the pipeline was closed or has given up meanwhile. UsageError: it was given up. Then
            ``leave`` must follow.
        """
        with self.changed:
            wait_until(lambda: self._is_feeding or self.failure is not None, self.changed, None, self._check_thread)
            self._check_open()
            if request is not self._filling:  # another thread gave it up, and its slots are those of another request
                raise spent()
            self._filling = None
            late = [request] if self._feed(request, priority) else []
            late += self._feed_waiting()
            self._call()
        return late

    def leave(self, request: Request) -> list[Request]:
        """Give up an unfilled request, and feed waiting ones; return those to be answered now."""
        with self.changed:
            self.queue.remove([request])
            self._filling = None if request is self._filling else self._filling
            late = self._feed_waiting()
            self._call()
        return late

    def slots_of(self, request: Request) -> Tensors:
        """The tensors that are the inputs of a request whose turn it is."""
        return self._inputs.slots_of(request.sequence)

    def settle(self, done: list[Request], times: Sequence[RequestTimes]) -> list[Request]:
        """Let go of finished requests and feed waiting ones; return those to be answered now, also the late ones."""
        with self.changed:
            due = self._in_flight.settle(done, times)  # with the lock: new room is for waiting requests, not for new ones
            due += self._feed_waiting()
            self._entrance.call_at_half(self.queue.num_waiting, self.room)
            if not self._is_open:
                self.changed.notify_all()
        return due

    def pop_expired(self) -> list[Request]:
        """Take the requests whose deadline has passed out of the queue."""
        with self.changed:
            expired = self.queue.pop_expired()
            self.alarm_ns = self.queue.next_deadline_ns()
            self._call()
        return expired

    def cancel(self, request: Request, future: AnswerFuture) -> None:
        """End a request: the stages skip it, or it leaves the queue."""
        with self.changed:
            if not self._in_flight.skip(request.sequence) and self.queue.remove([request]):
                future.set_running_or_notify_cancel()
                self._call()

    def suspend(self) -> None:
        """Feed no request until ``resume``."""
        with self.changed:
            self._is_feeding = False

    def resume(self, restart: Callable[[Lanes], None]) -> list[Request]:
        """Run all requests in flight again, which ``restart`` prepares, and feed waiting ones; return those that are late."""
        with self.changed:
            self._in_flight.restart()
            restart(self._in_flight.lanes)
            self._is_feeding = True
            late = self._feed_waiting()
            self._call()
        return late

    def fail(self, error: AutosplitError) -> list[Request]:
        """Refuse every further request with ``error``; return the requests without an answer."""
        with self.changed:
            self.failure = self.failure or error
            requests = [*self._in_flight.clear(), *self.queue.clear()]
            self._end()
        return requests

    def close(self, *, drain: bool) -> None:
        """Refuse new requests and buffers that are not submitted; wait for the end of requests taken in if ``drain``.

        Requests behind a buffer that is neither submitted nor given up within ``FILL_S`` are not waited for.
        """
        with self.changed:
            self._is_open = False
            self._end()
            if drain:
                check = self._check_thread
                wait_until(lambda: self._filling is None or self._is_done(), self.changed, FILL_S, check)
                wait_until(lambda: self._is_done() or self._is_stuck(), self.changed, None, check)

    def num_to_await(self) -> int:
        """Results that the executor's thread waits for now: several if no caller waits for one of them alone.

        From here to ``awake``, a request that a caller waits for alone wakes the thread.
        """
        in_flight = self._in_flight
        alone = self._last_awaited >= in_flight.num_answered or self.queue.num_waiting > 0
        self._idle = in_flight.in_order and in_flight.pace.num_soon > 1 and in_flight.num_running > 0 and not alone
        return in_flight.pace.num_soon if self._idle else 1

    def awake(self) -> None:
        """The executor's thread does not wait any more."""
        self._idle = False

    def _is_done(self) -> bool:
        return self.failure is not None or not (self.queue or self._in_flight)

    def _is_stuck(self) -> bool:
        return self._filling is not None and not self._in_flight

    def is_free(self) -> bool:
        """Whether a request need not wait to be taken in, or is refused in any case."""
        return self._entrance.is_free()

    def _call(self) -> None:
        """Call callers for whom there is room, and let those who wait for something else look again (the lock is held)."""
        self._entrance.call(self.room - self.queue.num_waiting)
        self.changed.notify_all()

    def _end(self) -> None:
        """Let nobody wait for room any more: every further request is refused (the lock is held)."""
        self._entrance.end()
        self.changed.notify_all()

    def _has_room(self) -> bool:
        return self.queue.num_waiting < self.room or self._may_feed()

    def _may_feed(self) -> bool:
        return self._is_feeding and self._filling is None and self._in_flight.has_room()

    def _check_open(self) -> None:
        if not self._is_open:
            raise closed()
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    def _no_room(self) -> RefusedError:
        return no_room(self._in_flight.num_running, self._in_flight.pace.size, self.queue.num_waiting, self.room)

    def _feed_waiting(self) -> list[Request]:
        """Feed waiting requests while the window has room (the lock is held); return those to be answered with their error."""
        late = []
        while self.queue and self._may_feed():
            request, priority = self.queue.pop()
            if self._feed(request, priority):
                late.append(request)
        return late

    def _feed(self, request: Request, priority: int) -> bool:
        """Feed a request, unless it was cancelled; True if it is to be answered with its error (the lock is held)."""
        if request.deadline_ns and request.expired():
            return True
        if request.future is not None and request.future.cancelled():
            request.future.set_running_or_notify_cancel()
            return False
        if request.unfilled and request.sequence < 0:
            if not self._is_open:  # its inputs would be filled in vain
                request.error = closed()
                return True
            self._filling, request.sequence = request, self._in_flight.lanes.peek()
            request.wake()
            return False
        self._in_flight.add(request, priority)
        if request.awaited:
            self._last_awaited = request.number
            if self._idle:
                self._wake()
        self._inputs.write(request)
        return False
