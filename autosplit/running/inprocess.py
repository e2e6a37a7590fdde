"""InProcess: a network of one stage in the caller's own process, without rings and workers.

With one copy of the stage, the thread that calls ``submit`` computes the answer itself, so a request costs what the runtime
alone takes. Several threads take turns, the most urgent request first. With several copies, each has a thread on the cores of
its device, and the threads take requests from one queue::

    one copy:        submit -> queue -> the caller's thread -> answer
    several copies:  submit -> queue -> a thread of each copy -> answer

A crash of the stage takes the caller along, and a stage that hangs is not killed. Worker processes (``Pipeline``) prevent both.
"""

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from autosplit.errors import AutosplitError, PlanError, RefusedError, UsageError
from autosplit.reports.results import LatencyStats, RunStats
from autosplit.running.admission import AdmissionQueue, no_room, wait_until
from autosplit.running.answers import Answers
from autosplit.running.copying import CopyPool
from autosplit.running.intake import Intake
from autosplit.running.messages import WorkerEvent
from autosplit.running.monitor import BatchCounts, WorkerHealth
from autosplit.running.request import AnswerFuture, Finished, Request, Tensors, monotonic_deadline
from autosplit.running.stagecopy import StageCopy
from autosplit.running.wiring import StagePlacement, wire


class InProcess:
    """One stage in this process; open until ``close``, best used in a ``with`` block. Arguments as for ``Pipeline``.

    Raises: PlanError: there is not exactly one stage, or it is on an accelerator. BackendError: it could not be loaded.
    """

    def __init__(
        self, stages: Sequence[StagePlacement], inputs: Sequence[str], outputs: Sequence[str], *, room: int | None = None
    ) -> None:
        if room is not None and room < 0:
            raise UsageError(f"room must be at least 0 requests, but is {room}")
        self.wiring = wire(stages, inputs, outputs)
        if len(stages) != 1:
            raise PlanError(f"the caller's process can hold one stage, and there are {len(stages)}; run them in workers")
        for device in stages[0].devices:
            if device.kind not in ("cpu", "null"):
                raise PlanError(f"the caller's process computes on cores, and '{device.name}' is an accelerator; use workers")
        self.batches = BatchCounts()
        self.room = self.wiring.window if room is None else room
        self.failure: AutosplitError | None = None
        self.num_answered = self._num_fed = self._num_serving = 0
        self._owner, self._is_open, self._begun_s = os.getpid(), True, time.monotonic()
        self._intake = Intake(self.wiring)
        self._queue = AdmissionQueue()
        self._lock = threading.RLock()  # Ctrl-C in ``Condition.wait`` frees a Lock that another thread holds
        self._work, self._changed = threading.Condition(self._lock), threading.Condition(self._lock)
        specs = self.wiring.input_specs
        self._pools = [CopyPool(specs[name], self.room + 1) if name in specs else None for name in self.wiring.inputs]
        count = len(stages[0].devices)
        self._copies: list[StageCopy] = [StageCopy(self.wiring, 0)] if count == 1 else []
        numbers = range(count if count > 1 else 0)
        self._threads = [threading.Thread(target=self._serve_copy, args=(number,), daemon=True) for number in numbers]
        self._answers = Answers(self.wiring.outputs, self._threads)
        self._load()

    def submit(
        self,
        inputs: Sequence[torch.Tensor],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        returns: Callable[[Tensors], Any] | None = None,
    ) -> AnswerFuture:
        """As ``Pipeline.submit``. With one copy of the stage the answer is there when this returns; ``timeout_s`` is the wait
        for requests of other threads.
        """
        if not isinstance(priority, int):
            raise UsageError(f"priority must be a whole number, lower is sooner, but is {priority!r}")
        request = self._intake(inputs, monotonic_deadline(deadline_s))
        request.returns = returns
        return self._submit(request, priority, timeout_s)

    def forward(self, inputs: Sequence[torch.Tensor], *, priority: int = 0, deadline_ns: int = 0) -> AnswerFuture:
        """As ``Pipeline.forward``."""
        return self._submit(self._intake(inputs, deadline_ns, borrowed=True), priority, None)

    def run(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """Submit one request and wait for its answer."""
        return self._answers.wait_for(self._enter(self._intake(inputs)))

    def run_many(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[Tensors]:
        """The answers to all requests, in their order; the inputs must not change until then."""
        taken = [self._enter(self._intake(inputs, borrowed=True)) for inputs in requests]
        for request in taken:
            request.wait()
        return [self._answers.wait_for(request) for request in taken]

    def stream(self, requests: Iterable[Sequence[torch.Tensor]]) -> Iterator[Tensors]:
        """The answers to any number of requests, in their order; the inputs must not change until the answer is taken."""
        under_way: deque[Request] = deque()
        for inputs in requests:
            under_way.append(self._enter(self._intake(inputs, borrowed=True)))
            while len(under_way) >= 2 * self.window:
                yield self._answers.wait_for(under_way.popleft())
        while under_way:
            yield self._answers.wait_for(under_way.popleft())

    @property
    def pids(self) -> list[int]:
        """This process, once for each copy of the stage."""
        return [os.getpid()] * len(self._copies)

    @property
    def restarts(self) -> int:
        """0: a thread of this process cannot be replaced."""
        return 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.num_waiting

    @property
    def num_running(self) -> int:
        """Requests that are being computed."""
        return self._num_fed - self.num_answered

    @property
    def num_held(self) -> int:
        """Requests of ``run_many``, ``stream`` and chains that wait in memory of their callers."""
        return self._queue.num_borrowed

    @property
    def window(self) -> int:
        """The copies of the stage: each computes one request."""
        return len(self._copies)

    @property
    def num_rows(self) -> int | None:
        """Size of dimension 0 of the first input; None without dimensions."""
        shapes = [spec.shape for spec in self.wiring.input_specs.values()]
        return shapes[0][0] if shapes and shapes[0] else None

    def latency(self, last: int = 16_384) -> LatencyStats:
        """Seconds from the admission to the answer, for the ``last`` requests."""
        return LatencyStats.of([(one.done_ns - one.fed_ns) / 1e9 for one in list(self._answers.times)[-last:]])

    def made_ns(self, count: int) -> list[list[int]]:
        """Times at which the last ``count`` requests were computed, ascending; one lane, as the copies share a queue."""
        return [sorted(one.made_ns for one in list(self._answers.times)[-count:])]

    def health(self, network: str = "") -> list[WorkerHealth]:
        """The state and the sums of each copy."""
        return [copy.health(network) for copy in self._copies]

    def stats(self, *, clear: bool = False) -> RunStats:
        """Latency and the times of each copy, since the start or since the last call with ``clear``."""
        with self._lock:
            now_s = time.monotonic()
            elapsed_s, self._begun_s = now_s - self._begun_s, now_s if clear else self._begun_s
            times = self._answers.take_times(clear=clear)
            told = [(copy, copy.events(clear=clear)) for copy in self._copies]
        return RunStats(
            num_requests=len(times),
            elapsed_s=elapsed_s,
            latency=LatencyStats.of([(one.done_ns - one.fed_ns) / 1e9 for one in times]),
            waiting=LatencyStats.of([(one.fed_ns - one.submitted_ns) / 1e9 for one in times]),
            stages=tuple(copy.stats(events) for copy, events in told),
            restarts=0,
        )

    def events(self, *, clear: bool = False) -> list[list[WorkerEvent]]:
        """The times of the last requests of each copy."""
        with self._lock:
            return [copy.events(clear=clear) for copy in self._copies]

    def close(self, *, drain: bool = True) -> None:
        """Answer the requests that were taken in (``drain``) or fail them, then let go of the stage.

        Raises: UsageError: called in a callback of an answer.
        """
        if os.getpid() != self._owner:
            return
        self.check_thread()
        closed = RefusedError("the pipeline was closed before the request was done")
        with self._lock:
            self._is_open, self.failure = False, self.failure or closed
            failed = [] if drain else self._queue.clear()
            self._work.notify_all()
            self._changed.notify_all()
            self._wait_until(lambda: not self._queue and not self._num_serving, None)
        for request in failed:
            request.error = RefusedError(str(closed))
        self._answers.deliver(failed)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for copy in self._copies:
            copy.unload()

    def check_thread(self) -> None:
        """Raises: UsageError: see ``Answers.check_thread``."""
        self._answers.check_thread()

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close(drain=kind is None)

    def _load(self) -> None:
        """Start the threads and wait until each has loaded its copy."""
        for thread in self._threads:
            thread.start()
        with self._lock:
            self._changed.wait_for(lambda: len(self._copies) == max(1, len(self._threads)) or self.failure is not None)
            failure = self.failure
        if failure is not None:
            self.close(drain=False)
            raise failure

    def _submit(self, request: Request, priority: int, timeout_s: float | None) -> AnswerFuture:
        if self._threads:
            request.future = future = AnswerFuture(functools.partial(self._cancel, request))
            self._enter(request, priority, timeout_s)
            return future
        self._enter(request, priority, timeout_s)
        try:
            return Finished(request.number, self._answers.result(request), None)
        except Exception as failure:
            return Finished(request.number, None, failure)

    def _enter(self, request: Request, priority: int = 0, timeout_s: float | None = None) -> Request:
        """Take a request in; with one copy, compute it in this thread. Raises: RefusedError: closed, or no room in time."""
        if os.getpid() != self._owner:
            raise RefusedError(f"the request was refused: process {self._owner} opened the pipeline. Open one after the fork.")
        with self._lock:
            if self._threads and not request.borrowed and not self._wait_until(self._has_room, timeout_s):
                raise self._no_room()
            if not self._is_open:
                raise RefusedError("the request was refused: the pipeline is closed")
            alone = not (self._threads or self._queue or self._num_serving)
            if alone:
                self._begin(request)
            else:
                self._queue.push(request, priority)
            if self._threads:
                if not request.borrowed:
                    self._copy_inputs(request)
                self._work.notify()
                return request
        if alone:
            self._serve(self._copies[0], request)
        else:
            self._compute(request, timeout_s)
        return request

    def _copy_inputs(self, request: Request) -> None:
        """Copy the inputs of a request that has to wait: its caller may write into its tensors once submit returns."""
        pairs = zip(self._pools, request.inputs, strict=True)
        request.inputs = tuple([pool.copy(value) if pool is not None else value.clone() for pool, value in pairs])

    def _compute(self, request: Request, timeout_s: float | None) -> None:
        """Compute a waiting request in the caller's thread, after those that are more urgent or came earlier."""
        while True:
            with self._lock:
                done = self._wait_until(lambda: request.answered or not self._num_serving, timeout_s)
                if not done and self._queue.remove([request]):
                    raise self._no_room()
                if request.answered:
                    return
                if self._num_serving:
                    continue
                taken = self._take()
            self._serve(self._copies[0], taken)

    def _serve_copy(self, number: int) -> None:
        """A thread: load a copy on the cores of its device, then take requests from the queue until the end."""
        try:
            cores = self.wiring.stages[0].devices[number].cores
            if cores:
                os.sched_setaffinity(0, cores)
            copy = StageCopy(self.wiring, number)
        except (AutosplitError, OSError) as failure:
            with self._lock:
                self.failure = failure if isinstance(failure, AutosplitError) else PlanError(str(failure))
                self._changed.notify_all()
            return
        with self._lock:
            self._copies.append(copy)
            self._changed.notify_all()
        while True:
            with self._lock:
                while not self._queue and self._is_open:
                    self._work.wait()
                if not self._queue:
                    return
                taken = self._take()
            self._serve(copy, taken)

    def _take(self) -> Request:
        """Begin the most urgent request (the lock is held)."""
        taken, _ = self._queue.pop()
        self._begin(taken)
        return taken

    def _begin(self, request: Request) -> None:
        request.number = request.sequence = self._num_fed
        if request.future is not None:
            request.future.number = request.number
        request.fed_ns = time.monotonic_ns()
        self._num_fed += 1
        self._num_serving += 1

    def _serve(self, copy: StageCopy, request: Request) -> None:
        """Compute and answer a request, unless it was cancelled."""
        try:
            try:
                if request.future is None or not request.future.cancelled():
                    copy.serve(request)
            finally:
                with self._lock:
                    self.num_answered += 1
            self._answers.deliver([request])
        finally:
            with self._lock:
                self._num_serving -= 1
                self._changed.notify_all()

    def _cancel(self, request: Request, future: AnswerFuture) -> None:
        """Take a cancelled request out of the queue."""
        with self._lock:
            if self._queue.remove([request]):
                future.set_running_or_notify_cancel()
                self._changed.notify_all()

    def _has_room(self) -> bool:
        waiting = self._queue.num_waiting
        return waiting < self.room or self.num_running + waiting < self.window or not self._is_open

    def _wait_until(self, holds: Callable[[], bool], timeout_s: float | None) -> bool:
        return wait_until(holds, self._changed, timeout_s, self._answers.check_thread)

    def _no_room(self) -> RefusedError:
        return no_room(self.num_running, self.window, self._queue.num_waiting, self.room)
