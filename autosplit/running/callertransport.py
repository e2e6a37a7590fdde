"""CallerTransport: copies of one stage in the caller's own process, without workers and rings.

One copy has no thread: callers compute their requests themselves (see ``turns``). Several requests at once are computed in
threads of the runtime where it has them (``Streams``), else in a thread for each copy, on the cores of its device. That thread
gives the answer too, after it has started the next request: no other Python thread stands between a request and its answer.

A crash of the stage ends the caller's process, and a stage that hangs is not killed. Done-callbacks of futures run in the thread
that gives the answer. One that blocks holds up further requests of its pipeline, and of no other one.
"""

import functools
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autosplit.errors import AutosplitError, PlanError, RefusedError
from autosplit.running.admission import Admission
from autosplit.running.inflight import Pace
from autosplit.running.intake import InputCopies
from autosplit.running.localstage import Inbox, LocalStage
from autosplit.running.monitor import BatchCounts, WorkerHealth, WorkerReport
from autosplit.running.request import Request
from autosplit.running.turns import Turns
from autosplit.running.wiring import Wiring, require_here
from autosplit.values.machine import HOST_KINDS

if TYPE_CHECKING:
    from autosplit.backends.base import Context

log = logging.getLogger(__name__)

_Place = tuple[LocalStage, tuple["Context", ...]]
"""A copy, and one of its contexts for each variant."""

WATCH_S = 0.5
"""Seconds between two looks for failed requests whose runtime reports failures only on request."""


class CallerTransport:
    """Runs requests through the only stage of a network in this process.

    Args:
        wiring: the network.
    Raises: PlanError: there is not exactly one stage, it is on an accelerator, or it comes from a file of an untrusted maker and
        runs in torch.
    """

    restarts, replanned = 0, ()

    def __init__(self, wiring: Wiring) -> None:
        require_here(wiring)
        if len(wiring.stages) != 1:
            raise PlanError(f"the caller's process can hold one stage, and there are {len(wiring.stages)}; run them in workers")
        [stage] = wiring.stages
        stage.refuse_isolated()
        for device in stage.devices:
            if device.kind not in HOST_KINDS:
                raise PlanError(f"the caller's process computes on cores, and '{device.name}' is an accelerator; use workers")
        self.wiring = wiring
        self.pace, self.batches = Pace(len(stage.devices)), BatchCounts()
        self.admission_class = Turns if len(stage.devices) == stage.streams == 1 else Admission
        self._stages: list[LocalStage] = []
        self._idle: deque[_Place] = deque()
        self._num_places = 0
        self._running: dict[Request, _Place] = {}
        self._unreported: queue.SimpleQueue[tuple[Request, _Place, BaseException] | None] = queue.SimpleQueue()
        """Requests that could not start; None wakes the watching thread."""
        self._is_watched, self._is_over = False, False
        self._threads: list[threading.Thread] = []
        self._inboxes: list[Inbox] = []
        self._failures: list[AutosplitError] = []

    def start(self, admission: Admission) -> None:
        """Load the copies. Raises: BackendError: a stage could not be loaded. PlanError: the cores of a device are not here."""
        self._admission = admission
        if isinstance(admission, Turns):
            self._stages.append(LocalStage(self.wiring, 0))
            admission.stage = self._stages[0]
            return
        loaded: queue.SimpleQueue[Sequence[_Place]] = queue.SimpleQueue()
        for replica in range(self.pace.size):
            self._run(self._serve, replica, loaded)
        places = [loaded.get() for _ in range(self.pace.size)]
        for turn in range(max(map(len, places))):
            self._idle.extend(several[turn] for several in places if turn < len(several))
        self._num_places = len(self._idle)
        if self._failures:
            raise self._failures[0]
        self._stages.sort(key=lambda stage: stage.replica)
        self.pace = Pace(self._num_places)
        self._copies = InputCopies(self.wiring, admission.queue_capacity + self.pace.size)
        self._run(self._watch)

    def has_room(self) -> bool:
        """Whether a place is idle."""
        return bool(self._idle)

    def hold(self, request: Request, *, is_soonest: bool) -> None:
        """Copy the inputs of a request that waits; its deadline is looked at when it is sent."""
        self._copies.hold(request)

    def send(self, request: Request) -> None:
        """Start a request in an idle place."""
        self._copies.hold(request)
        stage, contexts = place = self._idle.popleft()
        self._running[request] = place
        try:
            stage.start(request, contexts[request.variant], functools.partial(self._finish, request, place))
        except Exception as failure:  # the text of the error may take long, and the lock is held here
            self._unreported.put((request, place, failure))
        if not self._is_watched:
            self._is_watched = True
            self._unreported.put(None)

    def cancel(self, request: Request) -> None:
        """Nothing: a copy computes the request already."""

    def health(self) -> list[WorkerHealth]:
        """The state and the sums of each copy."""
        return [stage.health() for stage in self._stages]

    def reports(self, *, clear: bool) -> list[WorkerReport]:
        """The work of each copy."""
        with self._admission.changed:
            seen = [(stage, stage.events(clear=clear)) for stage in self._stages]
        return [stage.report(events) for stage, events in seen]

    def close(self, *, patiently: bool) -> None:
        """Fail waiting requests, wait for those that are computed now, and let go of the stage."""
        admission = self._admission
        admission.fail(RefusedError("the pipeline was closed before the request was done"))
        with admission.changed:
            admission.wait_until(self._is_still)
            self._is_over = True
        self._unreported.put(None)
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()
        for stage in self._stages:
            stage.unload()

    def _is_still(self) -> bool:
        """Whether no request is computed and the last one of each place was answered."""
        admission = self._admission
        return not admission.is_taken if isinstance(admission, Turns) else len(self._idle) == self._num_places

    def _run(self, target: Callable[..., None], *arguments: object) -> None:
        """Start a thread, which ``close`` joins."""
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _serve(self, replica: int, loaded: "queue.SimpleQueue[Sequence[_Place]]") -> None:
        """A thread: load a copy on the cores of its device; compute its requests, unless threads of the runtime do."""
        try:
            cores = self.wiring.stages[0].devices[replica].cores
            if cores:
                os.sched_setaffinity(0, cores)
            stage = LocalStage(self.wiring, replica)
        except (AutosplitError, OSError) as failure:
            self._failures.append(failure if isinstance(failure, AutosplitError) else PlanError(str(failure)))
            loaded.put(())
            return
        self._stages.append(stage)
        if places := stage.places():
            loaded.put([(stage, contexts) for contexts in places])
        else:
            inbox = Inbox()
            self._inboxes.append(inbox)
            loaded.put([(stage, stage.thread_place(inbox))])
            while not self._is_over and (work := inbox.get()) is not None:  # it is over if Ctrl-C ended the wait for this copy
                work()
                del work  # it holds the inputs

    def _finish(self, request: Request, place: _Place, failure: BaseException | None) -> None:
        """Answer a request in the thread that computed it, once the next request has its place; a second call does nothing."""
        if self._running.pop(request, None) is None:
            return
        try:
            place[0].finish(request, place[1][request.variant], failure)
            due = self._admission.settle([request], functools.partial(self._release, place))
            self._admission.answers.deliver_here(due)
        except BaseException:
            log.exception("request %d was not answered", request.number)

    def _release(self, place: _Place, done: list[Request]) -> list[Request]:
        """Count a request and let another one have its place (the lock is held)."""
        place[0].count(done[0])
        self._idle.append(place)
        return done

    def _watch(self) -> None:
        """A thread: answer requests that could not start, and failed ones that their runtime does not report."""
        while True:
            try:
                found = self._unreported.get(timeout=WATCH_S if self._is_watched else None)
            except queue.Empty:
                with self._admission.changed:
                    running = list(self._running.items())
                    self._is_watched = bool(running)
                for request, place in running:
                    try:
                        place[1][request.variant].wait(0)
                    except Exception as failure:
                        self._finish(request, place, failure)
                continue
            if found is not None:
                self._finish(*found)
            elif self._is_over:
                return
