"""Admission control: a request is sent at once if the transport has room, waits in the admission queue, or is refused.

``Transport`` is the protocol that carries requests to the stages and their results back, below one ``Admission``.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple, Protocol

from autosplit.compat.futures import SafeCondition
from autosplit.errors import AutosplitError, RefusedError
from autosplit.running.inflight import Pace
from autosplit.running.monitor import BatchCounts, WorkerHealth, WorkerReport
from autosplit.running.request import AnswerFuture, Answers, Request
from autosplit.running.waitingroom import AdmissionQueue, WaitingRoom
from autosplit.running.wiring import Wiring


def closed() -> RefusedError:
    """The refusal of a request that came too late."""
    return RefusedError("the request was refused: the pipeline is closed")


class Transport(Protocol):
    """Rings between workers (``RingTransport``), the caller's process (``CallerTransport``) or hosts (``HostsTransport``).

    ``shapes.joining`` has a fourth one, over another engine.

    The admission calls ``has_room``, ``hold``, ``send`` and ``cancel`` with its lock held, so they never wait.
    """

    @property
    def admission_class(self) -> "type[Admission]":
        """The class of its admission: ``Turns`` for a transport without a thread, whose callers compute their requests."""

    @property
    def wiring(self) -> Wiring:
        """The stages."""

    @property
    def pace(self) -> Pace:
        """The most requests in flight."""

    @property
    def restarts(self) -> int:
        """Workers that were started anew so far."""

    @property
    def replanned(self) -> Sequence[str]:
        """A sentence for each device or host that was lost and replaced."""

    @property
    def batches(self) -> BatchCounts:
        """Batches of joined requests."""

    def start(self, admission: "Admission") -> None:
        """Take requests, and settle them with this admission. Raises: BackendError: a stage could not be loaded."""

    def has_room(self) -> bool:
        """Whether one more request may be sent now."""

    def hold(self, request: Request, *, is_soonest: bool) -> None:
        """Copy the inputs of a request that waits, unless its caller keeps them. ``is_soonest``: no deadline comes earlier."""

    def send(self, request: Request) -> None:
        """Hand a numbered request to the first stages."""

    def cancel(self, request: Request) -> None:
        """Let the stages skip a request, if they have it."""

    def health(self) -> list[WorkerHealth]:
        """The state and the sums of each copy of each stage."""

    def reports(self, *, clear: bool) -> list[WorkerReport]:
        """The work of each copy of each stage, since its start or since the last call with ``clear``."""

    def close(self, *, patiently: bool) -> None:
        """Fail requests without an answer, and end the stages; a second call does nothing. ``patiently``: in good order."""


class Occupancy(NamedTuple):
    """Queued and running request counts.

    ``num_waiting`` of at most ``queue_capacity`` are in the admission queue. ``num_held`` wait beside it in memory of their
    callers (``run_many``, ``stream``, chains). ``num_running`` of at most ``max_in_flight`` are between the first stage and their
    answer, and ``num_answered`` are past it.
    """

    num_waiting: int
    queue_capacity: int
    num_held: int
    num_running: int
    max_in_flight: int
    num_answered: int


class Admission:
    """Sends requests, lets them wait or refuses them; one lock guards them until they are settled.

    Args:
        transport: where requests go.
        answers: sets the results of futures.
        queue_capacity: requests that may wait in the queue.

    Attributes:
        changed: held around each change; waiters for the end are notified.
        failure: why every further request is refused, once there is a reason.
        alarm_ns: earliest deadline among waiting requests, or earlier.
        num_sent: number of the next request that is sent.
        num_running: requests that were sent and are not settled.
    """

    def __init__(self, transport: Transport, answers: Answers, queue_capacity: int) -> None:
        self.changed = SafeCondition()
        self.answers = answers
        self.queue, self.queue_capacity = AdmissionQueue(), queue_capacity
        self.failure: AutosplitError | None = None
        self.alarm_ns: float = math.inf
        self.num_sent = self.num_running = 0
        self.is_open, self._is_sending = True, True
        self._transport = transport
        self._waiting_room = WaitingRoom(self.changed.beside(), self._has_room, answers.check_thread)

    def submit(self, request: Request, timeout_s: float | None) -> AnswerFuture:
        """Take a request in, and return the future of its answer. Raises: as ``enter``."""
        request.future = future = AnswerFuture(functools.partial(self.cancel, request))
        self.enter(request, timeout_s)
        return future

    def enter(self, request: Request, timeout_s: float | None = None) -> None:
        """Send a request, or let it wait; answer it if its deadline has passed already.

        Args:
            request: the request; its inputs were checked.
            timeout_s: how long to wait for a place in the queue; 0 refuses at once, None waits.
        Raises: RefusedError: no place in time, or closed. WorkerError: the pipeline has given up.
        """
        self.answers.check_process()
        is_late = False
        with self.changed:
            try:
                if not request.caller_keeps_inputs and not self._waiting_room.enter(timeout_s):
                    raise self.no_room()
                self.check_open()
                if self._may_send():  # then the queue is empty
                    is_late = self._send(request)
                else:
                    self.queue.push(request)
            finally:  # a request that is late, for example, will not end and wake the next caller
                if not (self.queue or self.num_running):
                    self._waiting_room.wake(1)
            if not (request.sent_ns or is_late):
                is_soonest = 0 < request.deadline_ns < self.alarm_ns
                self.alarm_ns = request.deadline_ns if is_soonest else self.alarm_ns
                self._transport.hold(request, is_soonest=is_soonest)
        if is_late:
            self.answers.deliver((request,))

    def settle(self, done: list[Request], release: Callable[[list[Request]], list[Request]] = list) -> list[Request]:
        """Send waiting requests in place of finished ones; return the requests to be answered now, also late ones.

        Args:
            done: requests with all their results.
            release: called with them and the lock held, so that free places are for waiting requests and not for new ones;
                returns those without an answer.
        """
        with self.changed:
            due = release(done)
            self.num_running -= len(due)
            due += self._send_waiting()
            self._waiting_room.wake_when_half_empty(self.queue.num_waiting, self.queue_capacity)
            if not self.is_open:
                self.changed.notify_all()
        return due

    def pop_expired(self) -> list[Request]:
        """Take the requests whose deadline has passed out of the queue."""
        with self.changed:
            expired = self.queue.pop_expired()
            self.alarm_ns = self.queue.next_deadline_ns()
            self._wake_callers()
        return expired

    def cancel(self, request: Request, future: AnswerFuture) -> None:
        """End a request: the stages skip it, or it leaves the queue."""
        with self.changed:
            if request.sent_ns:
                self._transport.cancel(request)
            elif self.queue.remove([request]):
                future.set_running_or_notify_cancel()
                self._wake_callers()

    def suspend(self) -> None:
        """Send no request until ``resume``."""
        with self.changed:
            self._is_sending = False

    def resume(self, restart: Callable[[], None]) -> list[Request]:
        """Run all requests in flight again, which ``restart`` prepares, and send waiting ones; return those that are late."""
        with self.changed:
            restart()
            self._is_sending = True
            late = self._send_waiting()
            self._wake_callers()
        return late

    def fail(self, error: AutosplitError, forget: Callable[[], list[Request]] = list) -> None:
        """Refuse every further request with ``error``, and answer the waiting ones with it, and those in flight.

        ``forget`` is called with the lock held, and returns those in flight without an answer.
        """
        with self.changed:
            self.failure = self.failure or error
            in_flight = forget()
            requests = [*in_flight, *self.queue.clear()]
            self.num_running -= len(in_flight)
            self._end()
        self.answers.fail(requests, error)

    def close(self, *, drain: bool) -> None:
        """Refuse new requests; wait for the end of requests taken in if ``drain``."""
        with self.changed:
            self.is_open = False
            self._end()
            if drain:
                self.wait_until(self._is_done)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds()`` is true (the lock is held). Raises: as ``Answers.check_thread``, if it is not true yet."""
        if not holds():
            self.answers.check_thread()
            self.changed.wait_for(holds)

    def hand_over(self, successor: "Admission") -> int:
        """Refuse new requests, which go to the successor; return the number of its first request (the lock is held)."""
        self.close(drain=False)
        successor.num_sent = self.num_sent + self.queue.num_all
        return successor.num_sent

    @property
    def returns_immediately(self) -> bool:
        """Whether a request need not wait to be taken in, or is refused in any case."""
        return self._waiting_room.is_free()

    def occupancy(self) -> Occupancy:
        """Queued and running request counts."""
        return Occupancy(
            num_waiting=self.queue.num_waiting,
            queue_capacity=self.queue_capacity,
            num_held=self.queue.num_held,
            num_running=self.num_running,
            max_in_flight=self._transport.pace.size,
            num_answered=self.num_sent - self.num_running,
        )

    def number(self, request: Request) -> None:
        """Number a request that is sent now (the lock is held)."""
        request.number = self.num_sent if request.number < 0 else request.number
        request.sent_ns = time.monotonic_ns()
        if request.future is not None:
            request.future.number = request.number
        self.num_sent += 1
        self.num_running += 1

    def check_open(self) -> None:
        """Raises: RefusedError: closed. WorkerError: the pipeline has given up."""
        if not self.is_open:
            raise closed()
        if self.failure is not None:
            raise copy(self.failure)

    def no_room(self) -> RefusedError:
        """The refusal of a request that found no place in time."""
        here = self.occupancy()
        return RefusedError(
            f"the request was refused: {here.num_running} requests are running (limit {here.max_in_flight}) and "
            f"{here.num_waiting} are waiting (limit {here.queue_capacity}). Submit with a longer timeout_s, or less often."
        )

    def _is_done(self) -> bool:
        return self.failure is not None or not (self.queue or self.num_running)

    def _wake_callers(self) -> None:
        """Wake callers for free places, and waiters for the end (the lock is held)."""
        self._waiting_room.wake(self.queue_capacity - self.queue.num_waiting)
        self.changed.notify_all()

    def _end(self) -> None:
        """Wake all waiting callers; refuse further requests (the lock is held)."""
        self._waiting_room.end()
        self.changed.notify_all()

    def _has_room(self) -> bool:
        return self.queue.num_waiting < self.queue_capacity or self._may_send()

    def _may_send(self) -> bool:
        return self._is_sending and self._transport.has_room()

    def _send_waiting(self) -> list[Request]:
        """Send waiting requests while the transport has room (the lock is held); return those to be answered with their error."""
        late = []
        while self.queue and self._may_send():
            request = self.queue.pop()
            if self._send(request):
                late.append(request)
        return late

    def _send(self, request: Request) -> bool:
        """Send a request, unless it was cancelled; True if it is to be answered with its error (the lock is held)."""
        if request.deadline_ns and request.expired():
            return True
        if request.future is not None and request.future.cancelled():
            request.future.set_running_or_notify_cancel()
            return False
        self.number(request)
        self._transport.send(request)
        return False
