"""RingTransport: workers that are joined by rings, with one thread that waits for everything that can happen.

::

    Admission -> InputRings -> stages -> ResultRings -> the thread -> Admission -> Answers

The caller writes its request into the rings if they have room; otherwise the thread does once another request ends. The thread
waits for results, the death of a worker, a deadline in the queue, and the end.
"""

import logging
import math
import threading
import time

from autosplit.devices.processes import MOST_WAIT_S
from autosplit.errors import AutosplitError, BackendError, RefusedError, WorkerError
from autosplit.running.admission import Admission
from autosplit.running.hostrings import InputRings, ResultRings
from autosplit.running.inflight import SOON_NS, InFlight
from autosplit.running.intake import InputCopies
from autosplit.running.monitor import BatchCounts, WorkerHealth, WorkerReport, health_of, reports_of
from autosplit.running.provisioner import Deployment, provision
from autosplit.running.recovery import Recovery
from autosplit.running.request import Request
from autosplit.running.wiring import Replan, Wiring, planned_anew, require_here, wire

log = logging.getLogger(__name__)

LOOK_NS = 1_000_000
"""How long results may keep the thread from looking at workers, deadlines and the end."""


class RingTransport:
    """Workers and rings of one wiring.

    Args:
        max_restarts: restarts of one worker without progress after which the pipeline gives up.
        replan: finds stages for the other devices when one cannot be opened any more; None gives up with the first lost device.
        max_in_flight: as for Pipeline.
    Raises: DeviceError: a stage is on another host. BackendError: a stage could not be loaded. WorkerError: a worker died.
    """

    admission_class = Admission

    def __init__(self, wiring: Wiring, max_restarts: int, replan: Replan | None = None, max_in_flight: int | None = None) -> None:
        require_here(wiring)
        self.replanned, self.batches = list[str](), BatchCounts()
        self._max_restarts, self._replan, self._max_in_flight = max_restarts, replan, max_in_flight
        self._past_restarts = 0
        self._is_idle = False
        """Whether the thread waits for more than the next result."""
        self._thread = threading.Thread(target=self._run, name="autosplit-rings", daemon=True)
        self._use(provision(wiring))

    def _use(self, deployment: Deployment) -> None:
        """Send requests to these workers from now on. Where that fails, they are ended."""
        try:
            inputs, results = InputRings(deployment), ResultRings(deployment)
        except BaseException:
            deployment.close(timeout_s=0.5)
            raise
        self.wiring, self.deployment = deployment.wiring, deployment
        self._inputs, self._results = inputs, results
        self._in_flight = InFlight(self.wiring, deployment.status_block)
        self._lanes, self.pace = self._in_flight.lanes, self._in_flight.pace
        self._recovery = Recovery(deployment, self._max_restarts)

    def start(self, admission: Admission) -> None:
        """Let the workers take requests."""
        self._admission = admission
        self._copies = InputCopies(self.wiring, admission.queue_capacity)
        self.deployment.run(self._lanes)
        self._thread.start()
        admission.answers.threads.add(self._thread.ident)

    @property
    def restarts(self) -> int:
        """Workers that were started anew so far."""
        return self._past_restarts + self._recovery.restarts

    def has_room(self) -> bool:
        """Whether one more request may be sent now."""
        return self._in_flight.has_room()

    def hold(self, request: Request, *, is_soonest: bool) -> None:
        """Copy the inputs of a request that waits; wake the thread if it would look too late."""
        self._copies.hold(request)
        if is_soonest or (self._is_idle and request.has_waiter):
            self._results.wake()

    def send(self, request: Request) -> None:
        """Write a request into the rings of the first stages."""
        self._in_flight.add(request)
        if self._is_idle and request.has_waiter:
            self._results.wake()
        self._inputs.write(request)

    def cancel(self, request: Request) -> None:
        """Let the stages skip a request."""
        self._in_flight.skip(request.sequence)

    def health(self) -> list[WorkerHealth]:
        """The state and the sums of each worker, read from shared memory without asking it."""
        return health_of(self.deployment, self._lanes)

    def reports(self, *, clear: bool) -> list[WorkerReport]:
        """The work of each worker, in the order of stages and replicas."""
        return reports_of(self.deployment, clear=clear)

    def close(self, *, patiently: bool) -> None:
        """Fail requests without an answer and end every worker, which is killed after 5 s, or 0.5 s if not ``patiently``."""
        timeout_s = 0.5
        try:
            self.deployment.stopping.set()
            self._results.wake()
            if self._thread.ident is not None:
                self._thread.join()
                self._admission.answers.threads.discard(self._thread.ident)
                self._admission.fail(RefusedError("the pipeline was closed before the request was done"), self._in_flight.clear)
            self._results.close()
            timeout_s = 5.0 if patiently else 0.5
        finally:  # also after Ctrl-C
            self.deployment.close(timeout_s)

    def _run(self) -> None:
        """The thread: take results, wait while there are none, expire late requests, replace dead workers."""
        look_ns = 0
        admission = self._admission
        try:
            while True:
                while self._take_results() and time.monotonic_ns() < look_ns:
                    pass
                worker_ended = self._wait()
                look_ns = time.monotonic_ns() + LOOK_NS
                if self.deployment.stopping.is_set():
                    return
                if admission.alarm_ns <= time.monotonic_ns():
                    admission.answers.deliver(admission.pop_expired())
                self._recovery.kill_hanging(self._lanes.nexts)
                if worker_ended:
                    admission.answers.deliver(self._recover())
                    if self.deployment.stopping.is_set():  # what ``close`` woke may be gone
                        return
        except AutosplitError as failure:
            admission.fail(failure, self._in_flight.clear)
        except BaseException as failure:
            admission.fail(WorkerError(f"the thread of the rings stopped: {failure!r}"), self._in_flight.clear)

    def _wait(self) -> bool:
        """Wait for results, or until it is time to look for hanging workers and late requests; True if a worker ended."""
        patience_s = min(self._recovery.look_s, max(0.0, self._admission.alarm_ns - time.monotonic_ns()) / 1e9)
        num_results = self._num_to_collect()
        if num_results > 1:
            patience_s = min(patience_s, SOON_NS / 1e9)
        patience_ms = None if math.isinf(patience_s) else math.ceil(min(patience_s, MOST_WAIT_S) * 1000)
        worker_ended = self._results.wait(patience_ms, num_results, self._lanes)
        self._is_idle = False
        return worker_ended

    def _num_to_collect(self) -> int:
        """Results that the thread waits for now: several if no caller waits for one of them alone.

        While ``_is_idle``, a request that a caller waits for alone wakes the thread.
        """
        is_busy = self._lanes.num_places > 0
        has_waiter = self._in_flight.num_with_waiter > 0 or self._admission.queue.num_waiting > 0
        self._is_idle = self.pace.batch_to_collect > 1 and is_busy and not has_waiter
        return self.pace.batch_to_collect if self._is_idle else 1

    def _take_results(self) -> bool:
        """Take all results that are here, and answer the requests that are done; whether there was any."""
        found, due = self._collect()
        self._admission.answers.deliver(due)
        return found

    def _collect(self) -> tuple[bool, list[Request]]:
        """Take all results that are here; whether there was any, and the requests to be answered now."""
        found = False
        done = []
        for ring in self._results:
            for sequence, slot in ring.take():
                found = True
                request = self._in_flight[sequence]
                ring.read(slot, request)
                if request.tokens == 0:
                    done.append(request)
        return found, self._admission.settle(done, self._release) if done else []

    def _release(self, done: list[Request]) -> list[Request]:
        """Free the places of finished requests; return those without an answer (the lock is held)."""
        return self._in_flight.settle(done, self._admission.answers.times)

    def _recover(self) -> list[Request]:
        """Replace dead workers, and run again the requests in flight without a result; return those to be answered now."""
        try:
            return self._replace_dead()
        except BackendError as failure:
            if not failure.device or self._replan is None:
                raise
            return self._move(failure, self._replan)

    def _replace_dead(self) -> list[Request]:
        """``_recover`` on the same devices. Raises: BackendError, WorkerError: as ``Recovery.replace_dead``."""
        with self.deployment.control_lock:
            self._admission.suspend()
            self._results.forget_workers()
            given_up = self._recovery.replace_dead(self._lanes)
            due = self._collect()[1]
            for sequence, error in given_up.items():
                self._in_flight.skip(sequence, error)
            due += self._admission.resume(self._restart)
            self._results.watch_workers()
        return due

    def _move(self, failure: BackendError, replan: Replan) -> list[Request]:
        """Go on without a lost device: other workers run the requests again that have no answer; return those that are late.

        Raises: AutosplitError: no stages fit the other devices, or they could not be loaded. RefusedError: the pipeline is being
            closed.
        """
        self._admission.answers.deliver(self._collect()[1])
        requests, old, results = self._in_flight.unanswered(), self.deployment, self._results
        for request in requests:
            self._inputs.take_back(request)
        with old.control_lock:
            old.close(timeout_s=0.5)  # the new workers need the memory and the cores
        while True:
            wiring = self._without(failure, replan)
            try:
                deployment = provision(wiring, old.stopping)
                break
            except BackendError as another:
                if not another.device:
                    raise
                failure = another

        def restart() -> None:
            self._past_restarts += self._recovery.restarts
            self._use(deployment)
            for request in requests:
                self.send(request)
            deployment.run(self._lanes)

        with deployment.control_lock:
            late = self._admission.resume(restart)
        results.close()
        return late

    def _without(self, failure: BackendError, replan: Replan) -> Wiring:
        """Stages without the device that the failure names, with room for all requests in flight. Raises: BackendError: none."""
        what, old = f"device '{failure.device}' was lost: {failure}", self.wiring
        try:
            stages = replan(failure.device)
            found = wire(stages, old.inputs, old.outputs, self._max_in_flight)
            if found.most_in_flight < old.most_in_flight:
                found = wire(stages, old.inputs, old.outputs, old.most_in_flight)
        except AutosplitError as reason:
            text = f"{what}. The devices that are left cannot take its stages: {reason}"
            raise BackendError(text, backend=failure.backend, device=failure.device) from None
        self.replanned.append(planned_anew(what, stages))
        log.warning("%s", self.replanned[-1])
        return found

    def _restart(self) -> None:
        self._in_flight.restart()
        self._results.rewind(self._lanes)
        self._recovery.resume(self._lanes)
