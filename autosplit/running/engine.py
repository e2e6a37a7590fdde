"""Engine: a network that takes requests until it is closed, over any transport."""

import atexit
import functools
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from autosplit.closing import Draining
from autosplit.devices.limits import refusals_named
from autosplit.errors import BRIEF, AutosplitError, BackendError, PlanError, RefusedError, UsageError, listed, raise_faults
from autosplit.reports.results import LatencyStats, RunStats
from autosplit.running.admission import Admission, Occupancy, Transport, closed
from autosplit.running.awaiting import Awaiting
from autosplit.running.intake import Intake
from autosplit.running.messages import WorkerEvent
from autosplit.running.monitor import BatchCounts, WorkerHealth, WorkerReport
from autosplit.running.request import AnswerFuture, Answers, Request, RequestTimes, Tensors, monotonic_deadline, taken
from autosplit.running.swapping import with_swapped_weights
from autosplit.running.wiring import Wiring
from autosplit.tables import bytes_text

Accepted = TypeVar("Accepted")

log = logging.getLogger(__name__)


class Engine(Draining):
    """One network that takes requests until ``close``, best used in a ``with`` block.

    Args:
        open_transport: makes a transport for the stages.
        queue_capacity: requests that may wait in the admission queue; by default the number of requests in flight.
        groups: names of parameter groups, each with the names of its stages, for ``swap``.
        intake: makes requests of tensors, as ``Intake`` does by default.
    Raises: UsageError: the capacity is below 0. PlanError: a group names no stage. BackendError: a stage could not be loaded.
        WorkerError: a worker died. Nothing is left running.
    """

    def __init__(
        self,
        open_transport: Callable[[Wiring], Transport],
        wiring: Wiring,
        queue_capacity: int | None,
        groups: Mapping[str, Sequence[str]] | None = None,
        intake: Callable[..., Request] | None = None,
    ) -> None:
        if queue_capacity is not None and queue_capacity < 0:
            raise UsageError(f"queue_capacity must be at least 0 requests, but is {queue_capacity}")
        self.groups = {name: listed(f"group '{name}'", members, str) for name, members in (groups or {}).items()}
        known = [stage.name for stage in wiring.stages]
        strange = [(group, stage) for group, members in self.groups.items() for stage in members if stage not in known]
        faults = [f"group '{group}' names '{stage}'; the stages are: {', '.join(known)}" for group, stage in strange]
        raise_faults(PlanError, "the parameter groups do not fit the pipeline", faults)
        self._open_transport = open_transport
        self._queue_capacity = wiring.window if queue_capacity is None else queue_capacity
        self._intake: Callable[..., Request] = intake or Intake(wiring)
        self._answers, self.awaiting = Answers(wiring.outputs), Awaiting()
        self._closed = False
        self._lifecycle = threading.Lock()
        """Held while the engine is opened again, swaps weights or is closed."""
        self._since_s, self._past_restarts = time.monotonic(), 0
        self._use(*self._open(wiring))
        atexit.register(self.close, drain=False)  # a thread that the interpreter stops in torch aborts the process

    @refusals_named()
    def _open(self, wiring: Wiring) -> tuple[Transport, Admission]:
        """A transport with loaded stages, and the admission before it."""
        transport = self._open_transport(wiring)
        admission = transport.admission_class(transport, self._answers, self._queue_capacity)
        try:
            transport.start(admission)
        except BaseException:
            transport.close(patiently=False)
            raise
        return transport, admission

    def _use(self, transport: Transport, admission: Admission) -> None:
        """Send requests to this transport from now on."""
        self._transport, self._admission = transport, admission

    def submit(
        self,
        inputs: Sequence[torch.Tensor],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        returns: Callable[[Tensors], Any] | None = None,
    ) -> AnswerFuture:
        """Take in one request and return its future; the caller may write to the inputs once this returns.

        The future resolves when its own answer is there. Cancelling it, or passing the deadline, ends the request at the next
        stage border. With one copy of a stage in the caller's process, the answer is there when this returns.

        Args:
            inputs: one tensor for each input, with the shapes of one of the pipeline's variants and the dtypes of all.
            priority: lower leaves the admission queue sooner; then arrival counts.
            deadline_s: seconds from now after which no stage begins the request; a request in its last stage is answered.
            timeout_s: seconds to wait for a place in the admission queue; None waits without limit, 0 refuses at once.
            returns: makes the future's result of the outputs; by default they are the result.
        Raises:
            UsageError: the inputs do not fit, or a setting is not understood.
            RefusedError: no place within ``timeout_s`` (the message has the numbers), or the pipeline is closed.
            WorkerError: the pipeline has given up.
        """
        if not isinstance(priority, int):
            raise UsageError(f"priority must be a whole number, lower is sooner, but is {BRIEF.repr(priority)}")
        request = self._intake(inputs, monotonic_deadline(deadline_s))
        request.returns, request.priority = returns, priority
        return self._submit(request, timeout_s)

    def submit_unbounded(
        self, inputs: Sequence[torch.Tensor], *, priority: int = 0, deadline_ns: int = 0, variant: int = 0, number: int = -1
    ) -> AnswerFuture:
        """Take in tensors that will not change any more, whether the queue is full or not: the caller bounds their number.

        ``deadline_ns`` is monotonic, 0 for none. ``variant`` is that of MatchingTensors; that of other tensors follows from their
        shapes. ``number`` is for messages and records; below 0 the pipeline counts its requests.

        Raises: UsageError: the inputs do not fit. RefusedError: the pipeline is closed. WorkerError: it has given up.
        """
        request = self._intake(inputs, deadline_ns, caller_keeps_inputs=True, variant=variant)
        request.priority, request.number = priority, number
        return self._submit(request, None)

    def run(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """Submit one request and wait for its answer."""
        request = self._intake(inputs)
        self._enter(request)
        return self._answers.wait_for(request)

    async def run_async(
        self, inputs: Sequence[torch.Tensor], *, deadline_s: float | None = None, timeout_s: float | None = None, **settings: Any
    ) -> Any:
        """Submit one request and await its answer; arguments and errors as for ``submit``.

        Waiting for room does not hold up the event loop, nor does a stage in this process that takes longer than 1 ms.
        """
        submit = functools.partial(self.submit, inputs, **settings)
        immediately = self.returns_immediately
        return await self.awaiting(submit, returns_immediately=immediately, timeout_s=timeout_s, deadline_s=deadline_s)

    def run_many(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[Tensors]:
        """The answers to all requests, in their order; the inputs must not change until then.

        Raises: StageError, WorkerError: the first request that failed, once all are done.
        """
        taken = [self._intake(inputs, caller_keeps_inputs=True) for inputs in requests]
        for request in taken:
            self._enter(request)
        self.check_thread()
        for request in reversed(taken):  # most of the others are done when the last one is
            request.wait()
        return [self._answers.wait_for(request) for request in taken]

    def stream(self, requests: Iterable[Sequence[torch.Tensor]]) -> Iterator[Tensors]:
        """The answers to any number of requests, in their order, with only a few of either in memory at a time.

        The inputs of a request must not change until its answer is taken.

        Raises: StageError, WorkerError: a request failed; later requests that were taken in run all the same.
        """
        under_way: deque[Request] = deque()
        for inputs in requests:
            request = self._intake(inputs, caller_keeps_inputs=True)
            self._enter(request)
            under_way.append(request)
            while len(under_way) >= 2 * self._transport.pace.size:
                if not under_way[0].answered:
                    self.check_thread()
                    under_way[self._transport.pace.batch_to_collect - 1].wait()
                yield self._answers.wait_for(under_way.popleft())
        while under_way:
            yield self._answers.wait_for(under_way.popleft())

    @property
    def wiring(self) -> Wiring:
        """The stages."""
        return self._transport.wiring

    @property
    def returns_immediately(self) -> bool:
        """Whether ``submit`` would return soon: there is a place, and it does not compute for long in the calling thread."""
        return self._admission.returns_immediately

    @property
    def occupancy(self) -> Occupancy:
        """Queued and running request counts."""
        return self._admission.occupancy()

    @property
    def max_in_flight(self) -> int:
        """The most requests between the first stage and their answer, for now: more if they are small and come fast."""
        return self.occupancy.max_in_flight

    @property
    def queue_capacity(self) -> int:
        """Requests that may wait in the admission queue."""
        return self._queue_capacity

    @property
    def num_rows(self) -> int | None:
        """Size of dimension 0 of the first input, which is the number of rows of a request; None without dimensions."""
        shapes = [spec.shape for spec in self.wiring.input_specs.values()]
        return shapes[0][0] if shapes and shapes[0] else None

    @property
    def failure(self) -> AutosplitError | None:
        """Why the pipeline has given up or was closed, if it has."""
        return self._admission.failure

    @property
    def pids(self) -> list[int]:
        """The process of each copy of each stage."""
        return [worker.pid for worker in self.health()]

    @property
    def restarts(self) -> int:
        """Workers that died and were started anew so far."""
        return self._past_restarts + self._transport.restarts

    @property
    def replanned(self) -> Sequence[str]:
        """A sentence for each device or host that was lost and replaced since the pipeline was opened."""
        return self._transport.replanned

    @property
    def batches(self) -> BatchCounts:
        """The rows that a service has joined, if it joins requests."""
        return self._transport.batches

    def latency(self, last: int = 16_384) -> LatencyStats:
        """Seconds from the first stage to the answer, for the ``last`` requests."""
        return _latency(list(self._answers.times)[-last:])

    def made_ns(self, count: int) -> list[list[int]]:
        """Times at which the last stage computed the last ``count`` requests (at most 16,384), ascending, for each lane.

        Monotonic nanoseconds. The host may take an answer later, together with others.
        """
        lanes: dict[int, list[int]] = {}
        for one in list(self._answers.times)[-count:]:
            lanes.setdefault(one.lane, []).append(one.made_ns)
        return [sorted(times_ns) for times_ns in lanes.values()]

    def health(self) -> list[WorkerHealth]:
        """The state and the sums of each copy of each stage."""
        return self._transport.health()

    def stats(self, *, clear: bool = False) -> RunStats:
        """Latency and the times of each copy, since the start or since the last call with ``clear``."""
        with self._admission.changed:  # at once: asking workers takes a while, and answers come meanwhile
            now_s = time.monotonic()
            elapsed_s, times = now_s - self._since_s, taken(self._answers.times, clear=clear)
            self._since_s = now_s if clear else self._since_s
        stages = tuple(one.stats for one in self.reports(clear=clear))
        waiting = LatencyStats.of([(one.sent_ns - one.submitted_ns) / 1e9 for one in times])
        return RunStats(len(times), elapsed_s, _latency(times), waiting, stages, self.restarts)

    def events(self, *, clear: bool = False) -> list[list[WorkerEvent]]:
        """The times of the last requests of each copy."""
        return [one.events for one in self.reports(clear=clear)]

    def reports(self, *, clear: bool = False) -> list[WorkerReport]:
        """The times of each copy as figures and one by one, since the start or since the last call with ``clear``."""
        return self._transport.reports(clear=clear)

    def swap(self, group: str, weights: Mapping[str, torch.Tensor], folder: Path) -> int:
        """Give the stages of a parameter group other weights while requests run; no request sees both old and new ones.

        All stages are loaded a second time, beside those in use. Until the last request on the old weights is answered, the
        pipeline takes up to twice its memory (see ``swap_bytes``).

        Args:
            group: a parameter group.
            weights: new tensors by weight name, as in the stages' programs; other weights stay.
            folder: an empty folder for the stages with their new weights.
        Returns: the number of the first request that runs on the new weights.
        Raises: UsageError: no such group or weight, or a tensor that does not fit. BackendError, WorkerError: a worker could
            not load them; the old weights stay in use. RefusedError: the pipeline is closed.
        """
        if group not in self.groups:
            raise UsageError(f"there is no parameter group '{group}'; the groups are: {', '.join(self.groups) or 'none'}")
        self.check_thread()
        with self._lifecycle:
            if self._closed:
                raise closed()
            wiring = with_swapped_weights(self.wiring, self.groups[group], group, weights, folder)
            more = ", ".join(f"{bytes_text(num_bytes)} on {device}" for device, num_bytes in self.swap_bytes.items())
            log.info("stages are loaded beside those in use, which takes %s more until the old ones are closed", more)
            try:
                transport, admission = self._open(wiring)
            except BackendError as failure:
                raise BackendError(f"the new weights could not be loaded, and the old ones stay in use: {failure}") from None
            old_transport, old_admission = self._transport, self._admission
            with old_admission.changed:
                first = old_admission.hand_over(admission)
                self._use(transport, admission)
            self._end(old_transport, old_admission, drain=True)
            self._past_restarts += old_transport.restarts
        return first

    @property
    def swap_bytes(self) -> dict[str, int]:
        """Device name to the bytes that ``swap`` takes there beside those in use; a stage of unknown size counts as 0."""
        found: Counter[str] = Counter()
        for stage in self.wiring.stages:
            for device in stage.devices:
                found[device.name] += stage.needs_bytes(device.name) or 0
        return dict(found)

    def reopen(self) -> None:
        """Load all stages anew after the pipeline has given up; it takes requests again, on the weights that it had.

        Raises: UsageError: it has not given up, or this is a callback. RefusedError: it is closed. BackendError, WorkerError: a
            stage could not be loaded; the pipeline can be opened again later.
        """
        self.check_thread()
        with self._lifecycle:
            if self._closed:
                raise RefusedError("the pipeline is closed and cannot be opened again; make a new one")
            if self.failure is None:
                raise UsageError("the pipeline runs and need not be opened again")
            self._transport.close(patiently=False)  # first: all requests of this one have failed then
            restarts = self._transport.restarts
            self._use(*self._open(self.wiring))
            self._past_restarts += restarts

    def close(self, *, drain: bool = True) -> None:
        """Answer the requests that were taken in (``drain``) or fail them, then end the stages.

        The end of the process fails the requests of an engine that is still open. In a process that was forked from the one that
        opened the engine, nothing happens.

        Raises: UsageError: called in a callback of an answer.
        """
        if self._closed or os.getpid() != self._answers.owner:
            return
        self.check_thread()
        with self._lifecycle:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self.close)
            self._end(self._transport, self._admission, drain=drain)

    def _end(self, transport: Transport, admission: Admission, *, drain: bool) -> None:
        """Wait for answers if ``drain``; then end the stages, also after Ctrl-C."""
        patiently = False
        try:
            admission.close(drain=drain)
            patiently = drain
        finally:
            transport.close(patiently=patiently)

    def _submit(self, request: Request, timeout_s: float | None) -> AnswerFuture:
        """Take a request in, and return the future of its answer. Raises: as ``Admission.enter``."""
        return self._admitted(lambda admission: admission.submit(request, timeout_s))

    def _enter(self, request: Request) -> None:
        """Take a request in. Raises: as ``Admission.enter``."""
        self._admitted(lambda admission: admission.enter(request))

    def _admitted(self, take: Callable[[Admission], Accepted]) -> Accepted:
        """Let the admission of the moment take a request in; return its result."""
        while True:
            admission = self._admission
            try:
                return take(admission)
            except RefusedError:
                if admission is self._admission:
                    raise  # otherwise weights were swapped meanwhile, and the request goes to the new stages

    def check_thread(self) -> None:
        """Raise an error in a thread that must not wait for the pipeline.

        Raises: UsageError: this is a callback of an answer, which must not close the pipeline either. RefusedError: this process
            was forked from the one that opened it.
        """
        self._answers.check_thread()


def _latency(times: Sequence[RequestTimes]) -> LatencyStats:
    """Seconds from the first stage to the answer."""
    return LatencyStats.of([(one.done_ns - one.sent_ns) / 1e9 for one in times])
