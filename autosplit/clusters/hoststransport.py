"""HostsTransport: requests that are under way over hosts, with one thread that gives the answers.

::

    Admission -> first host ... last host -> events -> the thread: settle, deliver

Requests keep their inputs until they are answered, so they can run again on other hosts once a host is lost.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from autosplit import errors
from autosplit.errors import AutosplitError, RefusedError, StageError, WorkerError
from autosplit.reports.results import StageStats
from autosplit.running.admission import Admission
from autosplit.running.inflight import Pace
from autosplit.running.messages import WorkerEvent
from autosplit.running.monitor import WorkerHealth
from autosplit.running.request import Request
from autosplit.running.wiring import Wiring


class Route(Protocol):
    """Where requests go: a deployment of the stages on hosts."""

    @property
    def wiring(self) -> Wiring:
        """The stages."""

    @property
    def max_in_flight(self) -> int:
        """The most requests that may be under way."""

    def send(self, request: Request) -> None:
        """Send a request to the first host; does not wait."""

    def cancel(self, number: int) -> None:
        """Let the hosts skip a request."""

    def health(self, network: str) -> list[WorkerHealth]:
        """The state of each worker."""

    def stats(self, *, clear: bool) -> tuple[Sequence[StageStats], int]:
        """The work of each worker, and the workers that hosts started anew."""

    def events(self, *, clear: bool) -> list[list[WorkerEvent]]:
        """The times of the last requests in each worker."""

    def close(self, timeout_s: float) -> None:
        """End the stages."""


class Answered(NamedTuple):
    """The number of a request, and its outputs by name or the text of its error, from the last host."""

    number: int
    values: dict[str, torch.Tensor] | None
    error: str


class Lost(NamedTuple):
    """A host was lost, with the reason."""

    host: str
    reason: str


class Look(NamedTuple):
    """A waiting request may have passed its deadline."""


Events = queue.SimpleQueue[Answered | Lost | Look | None]

ENDING_S = 5.0
"""Seconds for ending the stages of a host."""


class HostsTransport:
    """Runs requests through a route.

    Args:
        route: the deployed stages.
        events: filled by the hosts of the route, and of each later one.
        replace: called with a lost host; returns the route with which the requests go on. Raises: AutosplitError: there is none.
    """

    turns = None

    def __init__(self, route: Route, events: Events, replace: Callable[[Lost, Route, Events], Route]) -> None:
        self._thread = threading.Thread(target=self._run, name="autosplit-hosts", daemon=True)
        self._route, self._events, self._replace = route, events, replace
        self._running: dict[int, Request] = {}
        self.restarts = 0
        self.pace = Pace(route.max_in_flight)

    def start(self, admission: Admission) -> None:
        """Take requests."""
        self._admission = admission
        self._thread.start()
        admission.answers.threads.add(self._thread.ident)

    @property
    def wiring(self) -> Wiring:
        """The stages, where they are now."""
        return self._route.wiring

    @property
    def pids(self) -> list[int]:
        """The process of each worker on its own host, in the order of stages and replicas."""
        return [worker.pid for worker in self.health("")]

    def has_room(self) -> bool:
        """Whether one more request may be sent now."""
        return len(self._running) < self.pace.size

    def hold(self, request: Request, *, is_soonest: bool) -> None:
        """Copy the inputs of a request that waits; let the thread look at its deadline in time."""
        if not (request.caller_keeps_inputs or request.holds_inputs):
            request.inputs, request.holds_inputs = tuple([value.clone() for value in request.inputs]), True
        if is_soonest:
            self._events.put(Look())

    def send(self, request: Request) -> None:
        """Send a request, which keeps its inputs, to the first host."""
        self.hold(request, is_soonest=False)
        self._running[request.number] = request
        self._route.send(request)

    def cancel(self, request: Request) -> None:
        """Let the hosts skip a request."""
        if request.number in self._running:
            self._route.cancel(request.number)

    def health(self, network: str) -> list[WorkerHealth]:
        """The state of each worker."""
        return self._route.health(network)

    def stats(self, *, clear: bool) -> tuple[Sequence[StageStats], int]:
        """The work of each worker; hosts that were replaced, and workers that hosts started anew."""
        stages, restarts = self._route.stats(clear=clear)
        return stages, self.restarts + restarts

    def events(self, *, clear: bool) -> list[list[WorkerEvent]]:
        """The times of the last requests in each worker."""
        return self._route.events(clear=clear)

    def close(self, *, patiently: bool) -> None:
        """Fail requests without an answer, and end the stages on all hosts."""
        try:
            self._events.put(None)
            if self._thread.ident is not None:
                self._thread.join()
                self._admission.answers.threads.discard(self._thread.ident)
                self._fail(RefusedError("the pipeline was closed before the request was done"))
        finally:
            self._route.close(ENDING_S if patiently else 0.5)

    def _run(self) -> None:
        """The thread: settle answers, expire late requests, replace lost hosts."""
        answers = self._admission.answers
        try:
            while (event := self._next_event()) is not None:
                if isinstance(event, Lost):
                    answers.deliver(self._recover(event))
                elif isinstance(event, Answered):
                    answers.deliver(self._settle(event))
                else:
                    answers.deliver(self._admission.pop_expired())
        except AutosplitError as failure:
            self._fail(failure)
        except BaseException as failure:
            self._fail(WorkerError(f"the pipeline over hosts stopped: {failure!r}"))

    def _next_event(self) -> Answered | Lost | Look | None:
        """The next event; None for the end."""
        alarm_ns = self._admission.alarm_ns
        try:
            return self._events.get(timeout=None if math.isinf(alarm_ns) else max(0.0, (alarm_ns - time.monotonic_ns()) / 1e9))
        except queue.Empty:
            return Look()

    def _settle(self, answered: Answered) -> list[Request]:
        """Note an answer; return the requests to be answered now."""
        request = self._running.get(answered.number)
        if request is None:
            return []
        request.made_ns = time.monotonic_ns()
        if answered.values is None:
            request.error = error_of(answered.error)
        else:
            request.values = answered.values
        return self._admission.settle([request], self._release)

    def _release(self, done: list[Request]) -> list[Request]:
        """Free the places of finished requests (the lock is held)."""
        for request in done:
            del self._running[request.number]
        return done

    def _recover(self, lost: Lost) -> list[Request]:
        """Go on without a host: on another route, run every request again that has no result yet; return late ones."""
        self._admission.suspend()
        route = self._replace(lost, self._route, self._events)

        def restart() -> None:
            self._route, self.pace.size = route, route.max_in_flight
            self.restarts += 1
            for request in self._running.values():
                route.send(request)

        return self._admission.resume(restart)

    def _fail(self, error: AutosplitError) -> None:
        """Answer every request with ``error``, and each that comes later."""
        with self._admission.changed:
            in_flight = list(self._running.values())
            self._running.clear()
        self._admission.fail(error, in_flight)


def error_of(text: str) -> AutosplitError:
    """The error of a request, from the name of its class and its text as an agent sends them."""
    name, _, message = text.partition("\n")
    kind = getattr(errors, name, StageError)
    return kind(message) if isinstance(kind, type) and issubclass(kind, AutosplitError) else StageError(message)
