"""HostsTransport: requests under way over hosts, with one thread that gives the answers; HostsPipeline: an engine over it.

::

    Admission -> first host ... last host -> events -> the thread: settle, deliver

Requests keep their inputs until they are answered, so they can run again on other hosts once a host is lost.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Sequence
from functools import partial

from autosplit import errors
from autosplit.clusters.fleet import Fleet
from autosplit.clusters.hostsdeployment import ENDING_S, Answered, Events, HostsDeployment, Lost
from autosplit.errors import AutosplitError, RefusedError, StageError, WorkerError
from autosplit.running.admission import Admission
from autosplit.running.engine import Engine
from autosplit.running.inflight import Pace
from autosplit.running.intake import InputCopies
from autosplit.running.monitor import BatchCounts, WorkerHealth, WorkerReport
from autosplit.running.request import Request
from autosplit.running.stage import StagePlacement
from autosplit.running.wiring import Replan, Wiring, planned_anew, wire

log = logging.getLogger(__name__)


class HostsTransport:
    """Runs requests through the stages on hosts.

    Args:
        replan: finds stages for the hosts that are left when one is lost; None gives up with the first host.
    Raises: as HostsDeployment.
    """

    admission_class = Admission

    def __init__(self, cluster: Fleet, wiring: Wiring, replan: Replan | None = None) -> None:
        self._thread = threading.Thread(target=self._run, name="autosplit-hosts", daemon=True)
        self._cluster, self._replan, self._events = cluster, replan, Events()
        self.replanned, self.batches = list[str](), BatchCounts()
        self._running: dict[int, Request] = {}
        self._is_over = False
        self._deployment = self._open(wiring)
        self.pace = Pace(self._deployment.max_in_flight)

    def _open(self, wiring: Wiring) -> HostsDeployment:
        return HostsDeployment(self._cluster, wiring, self._events)

    def start(self, admission: Admission) -> None:
        """Take requests."""
        self._admission = admission
        self._copies = InputCopies(self.wiring, admission.queue_capacity + self.pace.size)
        self._thread.start()
        admission.answers.threads.add(self._thread.ident)

    @property
    def wiring(self) -> Wiring:
        """The stages, where they are now."""
        return self._deployment.wiring

    @property
    def restarts(self) -> int:
        """Hosts that were replaced, and workers that hosts started anew until the last reports."""
        return len(self.replanned) + self._deployment.num_restarts

    def has_room(self) -> bool:
        """Whether one more request may be sent now."""
        return len(self._running) < self.pace.size

    def hold(self, request: Request, *, is_soonest: bool) -> None:
        """Copy the inputs of a request that waits; let the thread look at its deadline in time."""
        self._copies.hold(request)
        if is_soonest:
            self._events.put(None)

    def send(self, request: Request) -> None:
        """Send a request, which keeps its inputs, to the first host."""
        self._copies.hold(request)
        self._running[request.number] = request
        self._deployment.send(request)

    def cancel(self, request: Request) -> None:
        """Let the hosts skip a request."""
        if request.number in self._running:
            self._deployment.skip(request.number)

    def health(self) -> list[WorkerHealth]:
        """The state of each worker."""
        return self._deployment.health()

    def reports(self, *, clear: bool) -> list[WorkerReport]:
        """The work of each worker."""
        return self._deployment.reports(clear=clear)

    def close(self, *, patiently: bool) -> None:
        """Fail requests without an answer, and end the stages on all hosts."""
        try:
            self._is_over = True
            self._events.put(None)
            if self._thread.ident is not None:
                self._thread.join()
                self._admission.answers.threads.discard(self._thread.ident)
                self._admission.fail(RefusedError("the pipeline was closed before the request was done"), self._forget)
        finally:
            self._deployment.close(ENDING_S if patiently else 0.5)

    def _run(self) -> None:
        """The thread: settle answers, expire late requests, replace lost hosts."""
        answers = self._admission.answers
        try:
            while (event := self._next_event()) is not None or not self._is_over:
                if isinstance(event, Lost):
                    answers.deliver(self._recover(event))
                elif isinstance(event, Answered):
                    answers.deliver(self._settle(event))
                else:
                    answers.deliver(self._admission.pop_expired())
        except AutosplitError as failure:
            self._admission.fail(failure, self._forget)
        except BaseException as failure:
            self._admission.fail(WorkerError(f"the pipeline over hosts stopped: {failure!r}"), self._forget)

    def _next_event(self) -> Answered | Lost | None:
        """The next event, or None once a waiting request may be late."""
        alarm_ns = self._admission.alarm_ns
        try:
            return self._events.get(timeout=None if math.isinf(alarm_ns) else max(0.0, (alarm_ns - time.monotonic_ns()) / 1e9))
        except queue.Empty:
            return None

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
        """Go on without a host: on other hosts, run every request again that has no result yet; return late ones.

        Raises: WorkerError: no other hosts can take the stages; the message names the lost host.
        """
        self._admission.suspend()
        self._cluster.lose(lost.host, lost.reason)
        self._deployment.close(ENDING_S)
        what = f"host '{lost.host}' was lost: {lost.reason}"
        if self._replan is None:
            raise WorkerError(f"{what}. Its stages have no other host; open the pipeline again without it.")
        try:
            stages = self._replan(lost.host)
            deployment = self._open(wire(stages, self.wiring.inputs, self.wiring.outputs))
        except AutosplitError as failure:
            raise WorkerError(f"{what}, and the hosts that are left cannot take its stages: {failure}") from None
        self.replanned.append(planned_anew(what, stages))
        log.warning("%s", self.replanned[-1])

        def restart() -> None:
            self._deployment, self.pace.size = deployment, deployment.max_in_flight
            for request in self._running.values():
                deployment.send(request)

        return self._admission.resume(restart)

    def _forget(self) -> list[Request]:
        """Forget all requests under way, and return them (the lock is held)."""
        running, self._running = self._running, {}
        return list(running.values())


class HostsPipeline(Engine):
    """A pipeline over the hosts of a cluster, with the calls of every Engine.

    Where a host is lost, its stages move to other hosts if ``replan`` finds room there, and requests without a result run again.
    Otherwise every request fails with a WorkerError that names the host.

    Args:
        stages, inputs, outputs: as for Pipeline; each device is on a host.
        replan: finds stages for the hosts that are left; None gives up with the first host.
        queue_capacity: as for Pipeline.
    """

    def __init__(
        self,
        cluster: Fleet,
        stages: Sequence[StagePlacement],
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        replan: Replan | None = None,
        queue_capacity: int | None = None,
    ) -> None:
        super().__init__(partial(HostsTransport, cluster, replan=replan), wire(stages, inputs, outputs), queue_capacity)


def error_of(text: str) -> AutosplitError:
    """The error of a request, from the name of its class and its text as an agent sends them."""
    name, _, message = text.partition("\n")
    kind = getattr(errors, name, StageError)
    return kind(message) if isinstance(kind, type) and issubclass(kind, AutosplitError) else StageError(message)
