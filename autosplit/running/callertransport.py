"""CallerTransport: copies of one stage in the caller's own process, without workers and rings.

One copy has no thread: callers compute their requests themselves (see ``turns``). Each of several copies has a thread on the
cores of its device. A crash of the stage takes the caller along, and a stage that hangs is not killed.
"""

import logging
import os
import threading
from collections import deque

from autosplit.errors import AutosplitError, PlanError, RefusedError
from autosplit.reports.results import StageStats
from autosplit.running.admission import Admission, FixedPace, wait_until
from autosplit.running.inputcopies import InputCopies
from autosplit.running.localstage import LocalStage
from autosplit.running.messages import WorkerEvent
from autosplit.running.monitor import WorkerHealth
from autosplit.running.request import Request
from autosplit.running.turns import Turns
from autosplit.running.wiring import Wiring, require_here

log = logging.getLogger(__name__)


class CallerTransport:
    """Runs requests through the only stage of a network in this process.

    Args:
        wiring: the network.
    Raises: PlanError: there is not exactly one stage, it is on an accelerator, or it comes from a file of an untrusted maker and
        runs in torch.
    """

    restarts = 0
    turns: Turns | None = None

    def __init__(self, wiring: Wiring) -> None:
        require_here(wiring)
        if len(wiring.stages) != 1:
            raise PlanError(f"the caller's process can hold one stage, and there are {len(wiring.stages)}; run them in workers")
        [stage] = wiring.stages
        stage.refuse_isolated()
        for device in stage.devices:
            if device.kind not in ("cpu", "null"):
                raise PlanError(f"the caller's process computes on cores, and '{device.name}' is an accelerator; use workers")
        self.wiring = wiring
        self.pace = FixedPace(len(stage.devices))
        self._stages: list[LocalStage] = []
        self._sent: deque[Request] = deque()
        """Requests that no thread has begun."""
        self._num_in_flight = 0
        self._threads: list[threading.Thread] = []
        self._failure: AutosplitError | None = None
        self._is_over = False

    def start(self, admission: Admission) -> None:
        """Load the copies. Raises: BackendError: a stage could not be loaded. PlanError: the cores of a device are not here."""
        self._admission = admission
        self._work = admission.changed.beside()
        self._copies = InputCopies(self.wiring, admission.queue_capacity + self.pace.size)
        if self.pace.size == 1:
            self._stages.append(LocalStage(self.wiring, 0))
            self.turns = Turns(self._stages[0], admission)
            return
        for number in range(self.pace.size):
            thread = threading.Thread(target=self._serve, args=(number,), daemon=True)
            thread.start()
            self._threads.append(thread)
            admission.answers.threads.add(thread)
        with admission.changed:
            self._work.wait_for(lambda: len(self._stages) == self.pace.size or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    @property
    def pids(self) -> list[int]:
        """This process, once for each copy of the stage."""
        return [os.getpid()] * len(self._stages)

    def has_room(self) -> bool:
        """Whether a copy is idle."""
        return self._num_in_flight < self.pace.size

    def hold(self, request: Request, *, is_soonest: bool) -> None:
        """Copy the inputs of a request that waits; its deadline is looked at when it is sent."""
        self._copies.hold(request)

    def send(self, request: Request) -> None:
        """Leave a request to the thread of an idle copy."""
        self._copies.hold(request)
        self._num_in_flight += 1
        self._sent.append(request)
        self._work.notify()

    def cancel(self, request: Request) -> None:
        """Nothing: a copy computes the request already."""

    def health(self, network: str) -> list[WorkerHealth]:
        """The state and the sums of each copy."""
        return [stage.health(network) for stage in self._stages]

    def stats(self, *, clear: bool) -> tuple[list[StageStats], int]:
        """The work of each copy, and 0: a thread of this process cannot be replaced."""
        with self._admission.changed:
            seen = [(stage, stage.events(clear=clear)) for stage in self._stages]
        return [stage.stats(events) for stage, events in seen], 0

    def events(self, *, clear: bool) -> list[list[WorkerEvent]]:
        """The times of the last requests of each copy."""
        with self._admission.changed:
            return [stage.events(clear=clear) for stage in self._stages]

    def close(self, *, patiently: bool) -> None:
        """Fail waiting requests, wait for those that are computed now, and let go of the stage."""
        admission = self._admission
        admission.fail(RefusedError("the pipeline was closed before the request was done"))
        with admission.changed:
            self._is_over = True
            self._work.notify_all()
            if self.turns is not None:
                turns = self.turns
                wait_until(lambda: not turns.is_taken, admission.changed, None, admission.answers.check_thread)
        for thread in self._threads:
            thread.join()
            admission.answers.threads.discard(thread)
        for stage in self._stages:
            stage.unload()

    def _serve(self, number: int) -> None:
        """A thread: load a copy on the cores of its device, then compute requests until the end."""
        changed = self._admission.changed
        try:
            cores = self.wiring.stages[0].devices[number].cores
            if cores:
                os.sched_setaffinity(0, cores)
            stage = LocalStage(self.wiring, number)
        except (AutosplitError, OSError) as failure:
            with changed:
                self._failure = failure if isinstance(failure, AutosplitError) else PlanError(str(failure))
                self._work.notify_all()
            return
        with changed:
            self._stages.append(stage)
            self._work.notify_all()
        while True:
            with changed:
                while not self._sent:
                    if self._is_over:
                        return
                    self._work.wait()
                request = self._sent.popleft()
            self._answer(stage, request)

    def _answer(self, stage: LocalStage, request: Request) -> None:
        """Compute and answer a request in the thread of its copy."""
        try:
            if request.future is None or not request.future.cancelled():
                stage.compute(request)
        except BaseException:  # SystemExit in the stage, for example
            log.exception("request %d ended the thread of its copy, which goes on with others", request.number)
        self._admission.answers.deliver(self._admission.settle([request], self._release))

    def _release(self, done: list[Request]) -> list[Request]:
        """Count the copies that are idle again (the lock is held)."""
        self._num_in_flight -= len(done)
        return done
