"""HostsFeed: the requests of a pipeline over hosts, from admission to their answers, with one thread that gives the answers.

::

    enter -> AdmissionQueue -> first host ... last host -> inbox -> the thread: order, deliver, feed waiting requests

Requests keep their inputs until they are answered, so they can run again on other hosts once a host is lost.
"""

import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from autosplit import errors
from autosplit.compat.futures import SafeCondition
from autosplit.errors import AutosplitError, RefusedError, StageError, WorkerError
from autosplit.running.admission import AdmissionQueue, no_room
from autosplit.running.answers import Answering, Answers
from autosplit.running.entrance import Entrance
from autosplit.running.feed import FixedPace, Occupancy
from autosplit.running.request import AnswerFuture, Request, RequestTimes


class Route(Protocol):
    """Where requests go: a deployment of the stages on hosts."""

    @property
    def window(self) -> int:
        """The most requests that may be under way."""

    def send(self, number: int, inputs: Sequence[torch.Tensor], priority: int, deadline_ns: int) -> None:
        """Send a request to the first host; does not wait."""

    def cancel(self, number: int) -> None:
        """Tell the hosts that a request is not wanted any more."""

    def close(self, timeout_s: float) -> None:
        """End the stages."""


class Answered(NamedTuple):
    """What came from the last host: the number of a request, and its outputs by name or the text of its error."""

    number: int
    values: dict[str, torch.Tensor] | None
    error: str


class Lost(NamedTuple):
    """A host was lost, with the reason."""

    host: str
    reason: str


class Look(NamedTuple):
    """It is time to look for waiting requests whose deadline has passed."""


Inbox = queue.SimpleQueue[Answered | Lost | Look | None]


class HostsFeed(Answering):
    """Runs requests through a route. It does what ``Executor`` does for a pipeline in one host.

    Args:
        route: the deployed stages.
        inbox: what comes back from the hosts of the route, and of each later one.
        outputs: names of the outputs, in the order of answers.
        room: requests that may wait while the window is full.
        in_order: whether answers come in the order of admission.
        replace: called with a lost host; returns the route with which the requests go on. Raises: AutosplitError: there is none.
    """

    def __init__(
        self,
        route: Route,
        inbox: Inbox,
        outputs: Sequence[str],
        *,
        room: int,
        in_order: bool,
        replace: Callable[[Lost, Route], Route],
    ) -> None:
        self._thread = threading.Thread(target=self._run, name="autosplit-hosts", daemon=True)
        self._changed = SafeCondition()
        self._route, self._inbox, self._replace, self._room, self._in_order = route, inbox, replace, room, in_order
        self._queue, self._answers = AdmissionQueue(), Answers(outputs, [self._thread])
        self._running: dict[int, tuple[Request, int]] = {}
        self._done: set[int] = set()
        """Numbers of running requests whose result is here and which wait for earlier ones."""
        self._num_fed = self._num_answered = 0
        self._is_open = self._is_feeding = True
        self.failure: AutosplitError | None = None
        self.restarts = 0
        self.pace = FixedPace(route.window)
        self._entrance = Entrance(self._changed.beside(), self._has_room, self.check_thread)
        self._thread.start()

    def submit(self, request: Request, priority: int, timeout_s: float | None) -> AnswerFuture:
        """``enter``, and the future of the answer."""
        future = request.future = AnswerFuture(functools.partial(self._cancel, request))
        self.enter(request, priority, timeout_s)
        return future

    def enter(self, request: Request, priority: int = 0, timeout_s: float | None = None) -> None:
        """Feed a request, or let it wait for at most ``timeout_s``. Raises: RefusedError, WorkerError: as ``Admission.enter``."""
        self._answers.check_process()
        if not request.borrowed:
            request.inputs = tuple(value.clone() for value in request.inputs)  # the caller may write to its own
        with self._changed:
            try:
                if not request.borrowed and not self._entrance.enter(timeout_s):
                    raise no_room(len(self._running), self.pace.size, self._queue.num_waiting, self._room)
                if not self._is_open:
                    raise RefusedError("the request was refused: the pipeline is closed")
                if self.failure is not None:
                    raise type(self.failure)(str(self.failure))
                self._queue.push(request, priority)
                late = self._feed_waiting()
            finally:  # a request that is late, for example, will not end and call the next caller
                if not (self._queue or self._running):
                    self._entrance.call(1)
            if request.deadline_ns and request.number < 0:
                self._inbox.put(Look())  # the thread may wait for something later
        self._answers.deliver(late)

    def reserve(self, request: Request, priority: int, timeout_s: float | None) -> None:
        """None: requests are sent from any memory, which the caller leaves as it is."""

    def fill(self, request: Request, priority: int) -> AnswerFuture:
        """Send a request whose inputs were filled."""
        return self.submit(request, priority, None)

    def leave(self, request: Request) -> None:
        """Give up a request whose inputs were to be filled."""

    def prompt(self) -> bool:
        """Whether there is room for a request."""
        return self._entrance.is_free()

    def occupancy(self) -> Occupancy:
        """How many requests are here."""
        return Occupancy(
            num_waiting=self._queue.num_waiting,
            room=self._room,
            num_held=self._queue.num_borrowed,
            num_running=len(self._running),
            window=self.pace.size,
            num_answered=self._num_answered,
        )

    def take_times(self, *, clear: bool) -> list[RequestTimes]:
        """The times of the last requests; with ``clear``, each comes once."""
        with self._changed:
            return self._answers.take_times(clear=clear)

    def close(self, *, drain: bool) -> None:
        """Refuse new requests; wait for those taken in if ``drain``, else fail them; end the thread."""
        with self._changed:
            self._is_open = False
            self._entrance.end()
            if drain:
                self._changed.wait_for(lambda: self.failure is not None or not (self._queue or self._running))
        self._inbox.put(None)
        self._thread.join()
        self._fail(RefusedError("the pipeline was closed before the request was done"))

    def _run(self) -> None:
        try:
            while (event := self._next_event()) is not None:
                if isinstance(event, Lost):
                    self._recover(event)
                elif isinstance(event, Answered):
                    self._answers.deliver(self._settle(event))
                else:
                    self._answers.deliver(self._expire())
        except AutosplitError as failure:
            self._fail(failure)
        except BaseException as failure:
            self._fail(WorkerError(f"the pipeline over hosts stopped: {failure!r}"))

    def _next_event(self) -> Answered | Lost | Look | None:
        """The next event; None for the end."""
        with self._changed:
            alarm_ns = self._queue.next_deadline_ns()
        try:
            return self._inbox.get(timeout=None if math.isinf(alarm_ns) else max(0.0, (alarm_ns - time.monotonic_ns()) / 1e9))
        except queue.Empty:
            return Look()

    def _expire(self) -> list[Request]:
        with self._changed:
            expired = self._queue.pop_expired()
            self._call()
        return expired

    def _settle(self, answered: Answered) -> list[Request]:
        """Note a result, feed waiting requests, and return the requests to be answered now."""
        with self._changed:
            if answered.number in self._running:
                request, _ = self._running[answered.number]
                request.made_ns = time.monotonic_ns()
                if answered.values is None:
                    request.error = error_of(answered.error)
                else:
                    request.values = answered.values
                self._done.add(answered.number)
            ready = []
            for number in list(self._running):
                if number in self._done:
                    ready.append(self._running.pop(number)[0])
                    self._done.discard(number)
                elif self._in_order:
                    break
            self._num_answered += len(ready)
            ready += self._feed_waiting()
            self._entrance.call_at_half(self._queue.num_waiting, self._room)
            self._changed.notify_all()
        return ready

    def _recover(self, lost: Lost) -> None:
        """Go on without a host: on another route, run every request again that has no result yet."""
        with self._changed:
            self._is_feeding = False
        route = self._replace(lost, self._route)
        with self._changed:
            self._route, self._is_feeding = route, True
            self.pace.size = route.window
            self.restarts += 1
            for number, (request, priority) in self._running.items():
                if number not in self._done:
                    route.send(number, request.inputs, priority, request.deadline_ns)
            late = self._feed_waiting()
            self._call()
        self._answers.deliver(late)

    def _cancel(self, request: Request, future: AnswerFuture) -> None:
        with self._changed:
            if self._queue.remove([request]):
                future.set_running_or_notify_cancel()
                self._call()
            elif request.number in self._running:
                self._route.cancel(request.number)

    def _call(self) -> None:
        """Call callers for whom there is room, and ``close``, which waits for the last request (the lock is held)."""
        self._entrance.call(self._room - self._queue.num_waiting)
        self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._queue.num_waiting < self._room or self._may_feed()

    def _may_feed(self) -> bool:
        return self._is_feeding and len(self._running) < self.pace.size

    def _feed_waiting(self) -> list[Request]:
        """Feed waiting requests while the window has room (the lock is held); return those past their deadline."""
        late = []
        while self._queue and self._may_feed():
            request, priority = self._queue.pop()
            if request.deadline_ns and request.expired():
                late.append(request)
            elif request.future is not None and request.future.cancelled():
                request.future.set_running_or_notify_cancel()
            else:
                request.feed(self._num_fed, self._num_fed)
                self._num_fed += 1
                self._running[request.number] = request, priority
                self._route.send(request.number, request.inputs, priority, request.deadline_ns)
        return late

    def _fail(self, error: AutosplitError) -> None:
        """Answer every request with ``error``, and each that comes later."""
        with self._changed:
            self.failure = self.failure or error
            requests = [*(request for request, _ in self._running.values()), *self._queue.clear()]
            self._running.clear()
            self._entrance.end()
            self._changed.notify_all()
        self._answers.fail(requests, error)


def error_of(text: str) -> AutosplitError:
    """The error of a request, from the name of its class and its text as an agent sends them."""
    name, _, message = text.partition("\n")
    kind = getattr(errors, name, StageError)
    return kind(message) if isinstance(kind, type) and issubclass(kind, AutosplitError) else StageError(message)
