"""Engine: a network that takes requests, in worker processes (``Pipeline``) or in the caller's process (``InProcess``)."""

import atexit
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from autosplit.errors import AutosplitError, RefusedError, UsageError
from autosplit.reports.results import LatencyStats, RunStats
from autosplit.running.feed import Feed
from autosplit.running.intake import Intake
from autosplit.running.messages import WorkerEvent
from autosplit.running.monitor import BatchCounts, WorkerHealth, latency_of
from autosplit.running.request import AnswerFuture, Request, Tensors, monotonic_deadline
from autosplit.running.wiring import Wiring


class Engine(ABC):
    """One network that takes requests until it is closed.

    Args:
        wiring: the stages.
        room: requests that may wait in the admission queue; by default the number of requests in flight.
    Raises: UsageError: the room is below 0.
    """

    _executor: Feed
    _num_lanes = 1
    """Lanes of replicas that never meet (see ``lanes``)."""

    def __init__(self, wiring: Wiring, room: int | None) -> None:
        if room is not None and room < 0:
            raise UsageError(f"room must be at least 0 requests, but is {room}")
        self.wiring = wiring
        self.batches = BatchCounts()
        """The rows that a Batcher, if there is one, has put into requests."""
        self._room = wiring.window if room is None else room
        self._intake = Intake(wiring)
        self._owner, self._closed = os.getpid(), False
        self._lifecycle = threading.Lock()
        """Held while the engine is opened again or closed."""

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

        Cancelling the future, or passing the deadline, ends the request at the next stage border.

        Args:
            inputs: one tensor for each input, with the shapes and dtypes that the pipeline was built for.
            priority: lower leaves the admission queue sooner; then arrival counts.
            deadline_s: seconds from now after which no stage begins the request; a request in its last stage is answered.
            timeout_s: seconds to wait for room in the admission queue; None waits without limit, 0 refuses at once.
            returns: makes the future's result of the outputs; by default they are the result.
        Raises:
            UsageError: the inputs do not fit, or a setting is not understood.
            RefusedError: no room within ``timeout_s`` (the message has the numbers), or the pipeline is closed.
            WorkerError: the pipeline has given up.
        """
        if not isinstance(priority, int):
            raise UsageError(f"priority must be a whole number, lower is sooner, but is {priority!r}")
        request = self._intake(inputs, monotonic_deadline(deadline_s))
        request.returns = returns
        return self._submit(request, priority, timeout_s)

    def forward(self, inputs: Sequence[torch.Tensor], *, priority: int = 0, deadline_ns: int = 0) -> AnswerFuture:
        """Take in tensors that will not change any more, whether there is room or not: the caller bounds their number.

        Raises: UsageError: the inputs do not fit. RefusedError: the pipeline is closed. WorkerError: it has given up.
        """
        return self._submit(self._intake(inputs, deadline_ns, borrowed=True), priority, None)

    def run(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """Submit one request and wait for its answer."""
        request = self._intake(inputs)
        self._enter(request)
        return self._executor.result(request)

    def run_many(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[Tensors]:
        """The answers to all requests, in their order; the inputs must not change until then.

        Raises: StageError, WorkerError: the first request that failed, once all are done.
        """
        taken = [self._intake(inputs, borrowed=True) for inputs in requests]
        for request in taken:
            self._enter(request)
        self.check_thread()
        for request in reversed(taken):  # most of the others are done when the last one is
            request.wait()
        return [self._executor.result(request) for request in taken]

    def stream(self, requests: Iterable[Sequence[torch.Tensor]]) -> Iterator[Tensors]:
        """The answers to any number of requests, in their order, with only a few of either in memory at a time.

        The inputs of a request must not change until its answer is taken.

        Raises: StageError, WorkerError: a request failed; later requests that were taken in run all the same.
        """
        under_way: deque[Request] = deque()
        for inputs in requests:
            request = self._intake(inputs, borrowed=True)
            self._enter(request)
            under_way.append(request)
            while len(under_way) >= 2 * self._executor.pace.size:
                if not under_way[0].answered:
                    self.check_thread()
                    under_way[self._executor.pace.num_soon - 1].wait()
                yield self._executor.result(under_way.popleft())
        while under_way:
            yield self._executor.result(under_way.popleft())

    @property
    def prompt(self) -> bool:
        """Whether ``submit`` would return soon: there is room, and it does not compute for long in the calling thread."""
        return self._executor.prompt()

    @property
    def num_waiting(self) -> int:
        """Requests in the admission queue."""
        return self._executor.occupancy().num_waiting

    @property
    def num_held(self) -> int:
        """Requests of ``run_many``, ``stream`` and chains that wait in memory of their callers and take no room in the queue."""
        return self._executor.occupancy().num_held

    @property
    def num_running(self) -> int:
        """Requests between the first stage and their answer."""
        return self._executor.occupancy().num_running

    @property
    def window(self) -> int:
        """The most requests between the first stage and their answer, for now: more if they are small and come fast."""
        return self._executor.occupancy().window

    @property
    def num_answered(self) -> int:
        """Requests that have their answer."""
        return self._executor.occupancy().num_answered

    @property
    def room(self) -> int:
        """Requests that may wait in the admission queue."""
        return self._executor.occupancy().room

    @property
    def num_rows(self) -> int | None:
        """Size of dimension 0 of the first input, which is the number of rows of a request; None without dimensions."""
        shapes = [spec.shape for spec in self.wiring.input_specs.values()]
        return shapes[0][0] if shapes and shapes[0] else None

    @property
    def failure(self) -> AutosplitError | None:
        """Why the pipeline has given up or was closed, if it has."""
        return self._executor.failure

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """The process of each copy of each stage."""

    @property
    @abstractmethod
    def restarts(self) -> int:
        """Workers that died and were started anew so far."""

    def latency(self, last: int = 16_384) -> LatencyStats:
        """Seconds from the first stage to the answer, for the ``last`` requests."""
        return latency_of(self._executor.last_times()[-last:])

    def made_ns(self, count: int) -> list[list[int]]:
        """Times at which the last stage computed the last ``count`` requests (at most 16,384), ascending, for each lane.

        Monotonic nanoseconds. The host may take an answer later, together with others.
        """
        lanes: dict[int, list[int]] = {}
        for one in self._executor.last_times()[-count:]:
            lanes.setdefault(one.sequence % self._num_lanes, []).append(one.made_ns)
        return [sorted(times_ns) for times_ns in lanes.values()]

    @abstractmethod
    def health(self, network: str = "") -> list[WorkerHealth]:
        """The state and the sums of each copy of each stage."""

    @abstractmethod
    def stats(self, *, clear: bool = False) -> RunStats:
        """Latency and the times of each copy, since the start or since the last call with ``clear``."""

    @abstractmethod
    def events(self, *, clear: bool = False) -> list[list[WorkerEvent]]:
        """The times of the last requests of each copy."""

    def close(self, *, drain: bool = True) -> None:
        """Answer the requests that were taken in (``drain``) or fail them, then end.

        The end of the process fails the requests of an engine that is still open. In a process that was forked from the one that
        opened the engine, nothing happens.

        Raises: UsageError: called in a callback of an answer.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self.check_thread()
        with self._lifecycle:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self.close)
            self._end(drain=drain)

    def _submit(self, request: Request, priority: int, timeout_s: float | None) -> AnswerFuture:
        """``_enter``, and the future of the answer."""
        while True:
            executor = self._executor
            try:
                return executor.submit(request, priority, timeout_s)
            except RefusedError:
                if executor is self._executor:
                    raise  # otherwise weights were swapped meanwhile, and the request goes to the new stages

    def _enter(self, request: Request) -> None:
        """Take a request in. Raises: RefusedError: closed."""
        while True:
            executor = self._executor
            try:
                return executor.enter(request)
            except RefusedError:
                if executor is self._executor:
                    raise

    @abstractmethod
    def _end(self, *, drain: bool) -> None:
        """End the executor and what it runs on; called once."""

    def _end_at_exit(self) -> None:
        """Close this engine at the end of the process: a thread that the interpreter stops in torch aborts the process."""
        atexit.register(self.close, drain=False)

    def check_thread(self) -> None:
        """Raise an error in a thread that must not wait for the pipeline.

        Raises: UsageError: this is a callback of an answer, which must not close the pipeline either. RefusedError: this process
            was forked from the one that opened it.
        """
        self._executor.check_thread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close(drain=kind is None)
