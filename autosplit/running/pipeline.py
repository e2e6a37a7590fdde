"""Pipeline: one network in worker processes, from placements to answers."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from autosplit.errors import AutosplitError, PlanError, RefusedError, UsageError, listed, raise_faults
from autosplit.reports.results import LatencyStats, RunStats
from autosplit.running.executor import Executor
from autosplit.running.intake import Intake
from autosplit.running.messages import WorkerEvent
from autosplit.running.monitor import BatchCounts, Monitor, WorkerHealth
from autosplit.running.provisioner import provision
from autosplit.running.request import AnswerFuture, Request, Tensors, monotonic_deadline
from autosplit.running.swapping import swap_weights
from autosplit.running.wiring import StagePlacement, Wiring, wire


class Pipeline:
    """Stages in worker processes, joined by rings; open until ``close``, best used in a ``with`` block.

    Args:
        stages: in topological order.
        inputs: names of the inputs, in the order in which requests give them.
        outputs: names of the outputs, in the order in which answers bring them; an input may be an output too.
        max_in_flight: requests between the first stage and their answer; by default enough to keep every stage at work,
            and up to 16 small ones while answers come fast.
        room: requests that may wait in the admission queue before ``submit`` blocks or refuses; by default the number of
            requests in flight.
        in_order: answer in the order of admission; False answers each request as soon as it is done, and lets more urgent
            ones overtake it at every stage.
        max_restarts: restarts of one worker without progress before the pipeline gives up. Deaths that a request is to blame for
            do not count.
        groups: names of parameter groups, each with the names of its stages, for ``swap``.
    Raises:
        PlanError: the stages do not fit together.
        BackendError: a stage could not be loaded. WorkerError: a worker died. Nothing is left running.
    """

    def __init__(
        self,
        stages: Sequence[StagePlacement],
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        max_in_flight: int | None = None,
        room: int | None = None,
        in_order: bool = True,
        max_restarts: int = 5,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        if room is not None and room < 0:
            raise UsageError(f"room must be at least 0 requests, but is {room}")
        if max_restarts < 0:
            raise UsageError(f"max_restarts must be at least 0, but is {max_restarts}")
        self.wiring = wire(stages, inputs, outputs, max_in_flight, in_order)
        self.groups = {name: listed(f"group '{name}'", members, str) for name, members in (groups or {}).items()}
        known = [stage.name for stage in stages]
        strange = [(group, stage) for group, members in self.groups.items() for stage in members if stage not in known]
        faults = [f"group '{group}' names '{stage}'; the stages are: {', '.join(known)}" for group, stage in strange]
        raise_faults(PlanError, "the parameter groups do not fit the pipeline", faults)
        self.batches = BatchCounts()
        """The rows that a Batcher, if there is one, has put into requests."""
        self._room, self._max_restarts = self.wiring.window if room is None else room, max_restarts
        self._past_restarts = 0
        self._lifecycle = threading.Lock()
        """Held while the pipeline is opened again or closed."""
        self._open(self.wiring)
        self._intake = Intake(self.wiring)
        self._closed = False
        self._owner = os.getpid()

    def _open(self, wiring: Wiring) -> None:
        deployment = provision(wiring)
        try:
            executor = Executor(deployment, room=self._room, max_restarts=self._max_restarts)
        except BaseException:
            deployment.close(timeout_s=0.5)
            raise
        self._deployment, self._executor, self._monitor = deployment, executor, Monitor(deployment, executor)

    def reopen(self) -> None:
        """Start all workers anew after the pipeline has given up; it takes requests again, on the weights that it had.

        Raises: UsageError: it has not given up, or this is a callback. RefusedError: it is closed. BackendError, WorkerError: a
            stage could not be loaded; the pipeline can be opened again later.
        """
        self.check_thread()
        with self._lifecycle:
            if self._closed:
                raise RefusedError("the pipeline is closed and cannot be opened again; make a new one")
            if self.failure is None:
                raise UsageError("the pipeline runs and need not be opened again")
            old = self._executor
            self._deployment.close(timeout_s=0.5)
            modules = {config.stage: config.module for config in self._deployment.worker_configs}
            stages = tuple(replace(stage, module=modules[stage.name]) for stage in self.wiring.stages)
            self._open(replace(self.wiring, stages=stages))
            self._past_restarts += old.restarts
            old.close(drain=False)

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
            priority: lower is sooner, then arrival counts: in the admission queue, and at every stage if not ``in_order``.
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
        return self._executor.submit(request, priority, timeout_s)

    def forward(self, inputs: Sequence[torch.Tensor], *, priority: int = 0, deadline_ns: int = 0) -> AnswerFuture:
        """Take in tensors that will not change any more, whether there is room or not: the caller bounds their number.

        Raises: UsageError: the inputs do not fit. RefusedError: the pipeline is closed. WorkerError: it has given up.
        """
        return self._executor.submit(self._intake(inputs, deadline_ns, borrowed=True), priority, None)

    def run(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """Submit one request and wait for its answer."""
        request = self._intake(inputs)
        self._executor.enter(request)
        return self._executor.result(request)

    def run_many(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[Tensors]:
        """The answers to all requests, in their order; the inputs must not change until then.

        Raises: StageError, WorkerError: the first request that failed, once all are done.
        """
        taken = [self._intake(inputs, borrowed=True) for inputs in requests]
        for request in taken:
            self._executor.enter(request)
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
            self._executor.enter(request)
            under_way.append(request)
            while len(under_way) >= 2 * self._executor.pace.size:
                if not under_way[0].answered:
                    under_way[self._executor.pace.num_soon - 1].wait()
                yield self._executor.result(under_way.popleft())
        while under_way:
            yield self._executor.result(under_way.popleft())

    @property
    def pids(self) -> list[int]:
        """The process of each worker, in the order of stages and replicas; a null device runs in this process."""
        return [worker.pid for worker in self._deployment.workers]

    @property
    def restarts(self) -> int:
        """Workers that died and were started anew so far."""
        return self._past_restarts + self._executor.restarts

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
        """Requests that have their answer, as all requests before them."""
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

    def latency(self, last: int = 16_384) -> LatencyStats:
        """Seconds from the first stage to the answer, for the ``last`` requests."""
        return self._monitor.latency(last)

    def made_ns(self, count: int) -> list[list[int]]:
        """When the last stage handed over the last requests: see ``Monitor.made_ns``."""
        return self._monitor.made_ns(count)

    def health(self, network: str = "") -> list[WorkerHealth]:
        """The state and the sums of each worker, read from shared memory without asking it."""
        return self._monitor.health(network)

    def stats(self, *, clear: bool = False) -> RunStats:
        """Latency and the times of each worker, since the workers were started or since the last call with ``clear``."""
        return self._monitor.stats(self.restarts, clear=clear)

    def events(self, *, clear: bool = False) -> list[list[WorkerEvent]]:
        """The times of the last requests in each worker; empty for a worker that does not answer."""
        return self._monitor.events(clear=clear)

    def swap(self, group: str, weights: Mapping[str, torch.Tensor], folder: Path) -> int:
        """Give the stages of a parameter group other weights while requests run; no request sees both old and new ones.

        Args:
            group: a parameter group.
            weights: new tensors by weight name, as in the stages' programs; other weights stay.
            folder: an empty folder for the stages with their new weights.
        Returns: the number of the first request that runs on the new weights.
        Raises: UsageError: no such group or weight, or a tensor that does not fit. BackendError, WorkerError: a worker could
            not load them; the old weights stay in use.
        """
        return swap_weights(self._deployment, self._executor, self.groups, group, weights, folder)

    def close(self, *, drain: bool = True) -> None:
        """Answer the requests that were taken in (``drain``) or fail them, then end every worker.

        In a process that was forked from the one that opened the pipeline, nothing happens.

        Raises: UsageError: called in a callback of an answer.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self.check_thread()
        with self._lifecycle:
            if self._closed:
                return
            self._closed = True
            try:
                self._executor.close(drain=drain)
            finally:
                self._deployment.close(timeout_s=5.0 if drain else 0.5)

    def check_thread(self) -> None:
        """Raises: UsageError: this is a callback of an answer, which must not wait for the pipeline, nor close it."""
        self._executor.check_thread()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close(drain=kind is None)
