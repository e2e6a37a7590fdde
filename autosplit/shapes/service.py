"""ShapedService: a running service that takes requests of any size within its ranges.

::

    submit -> waiting -> a batch of requests that fit a variant -> padded -> Engine -> cut back -> each caller's answer

While the stages have enough to do, requests wait, and waiting requests are joined (``batching.choose``). So batches grow with
the load, and a single request is sent at once. No batch size is asked of the user.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from autosplit.arguments import checked
from autosplit.compat.futures import SafeCondition, SafeFuture
from autosplit.deploying.service import Service
from autosplit.errors import DeadlineError, RefusedError, StageError, UsageError, raise_faults
from autosplit.running.engine import Engine
from autosplit.running.request import Tensors, monotonic_deadline
from autosplit.shapes.batching import Asked, Bucket, Grid, asked, choose, joined, rows_of, separated
from autosplit.shapes.buckets import fit_times
from autosplit.shapes.rowcheck import require_independent_rows
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import At, Family
from autosplit.tracing.tensorspec import is_dense, kind_of
from autosplit.tracing.verifying import distinct_inputs
from autosplit.values.shapes import Traffic, write_traffic

NUM_TRIALS, TRIALS_S = 3, 0.1
"""Requests by which the seconds of each variant are measured, of which the fastest counts; fewer once they took so long."""

MOST_TIMED = 16
"""Variants that are timed when a service starts."""


@dataclass(eq=False)
class _Waiting:
    """A request that waits to be joined with others."""

    inputs: Sequence[torch.Tensor]
    asked: Asked
    answer: Callable[[Sequence[torch.Tensor]], Any]
    priority: int
    since_s: float
    deadline_ns: int
    future: "Future[Any]" = field(default_factory=SafeFuture)


def measured(
    family: Family, engine: Engine, check: Callable[[Traced, At, Tensors], None] = lambda traced, sizes, answer: None
) -> list[Bucket]:
    """The variants of a family with their seconds of a request that is sent alone: measured, or of many fitted to some.

    ``check`` sees the answer to the example inputs of each variant that is timed.
    """
    known_s = dict[tuple[int, ...], float]()
    step = -(-len(family.variants) // MOST_TIMED)
    for traced, sizes in zip(family.variants[::step], family.sizes[::step], strict=True):
        times_s = list[float]()
        while len(times_s) < NUM_TRIALS and sum(times_s) < TRIALS_S:
            begun_s = time.perf_counter()
            answer = engine.run(traced.example_inputs)
            times_s.append(time.perf_counter() - begun_s)
        check(traced, sizes, answer)
        known_s[tuple(sizes.values())] = min(times_s)
    fitted_s = fit_times(known_s).seconds if step > 1 else known_s.__getitem__
    return [Bucket(number, sizes, fitted_s(tuple(sizes.values()))) for number, sizes in enumerate(family.sizes)]


@checked
class ShapedService(Service):
    """A family of variants that runs: a request is a call of the model at any size within the ranges.

    Args:
        family: the variants, whose padding was checked.
        engine: runs them: ``deploy`` of the family.
        max_wait_s: seconds that a request may wait for others though stages have room; 0 joins only requests that wait anyway.
        queue_capacity: requests that may wait before ``submit`` blocks or refuses.
        opened: closes the engine and its resources; None if others close them.
    Raises: UsageError: a setting is not understood. The rows of a request depend on other rows: then requests are not joined,
        and ``why_not_joined`` says why.

    Attributes:
        grid: the variants with their measured seconds, and the dimension along which requests are joined.
        seen: sizes to the number of requests that had them.
    """

    def __init__(
        self,
        family: Family,
        engine: Engine,
        *,
        max_wait_s: float = 0.0,
        queue_capacity: int = 256,
        opened: ExitStack | None = None,
    ) -> None:
        if not 0 <= max_wait_s < float("inf") or queue_capacity < 1:
            limits = "max_wait_s must be at least 0 seconds and queue_capacity at least 1 request"
            raise UsageError(f"{limits}, but are {max_wait_s} and {queue_capacity}")
        self.family = family
        self._max_wait_s, self._capacity = max_wait_s, queue_capacity
        self.seen = Counter[tuple[int, ...]]()
        self.why_not_joined = ""
        rows = rows_of(family)
        if rows is not None:
            self.why_not_joined = _mixing_rows(family, engine)
        self.grid = Grid.of(measured(family, engine), None if self.why_not_joined else rows, family.unpaddable)
        self._room = 1 + sum(len(stage.devices) * stage.streams for stage in engine.wiring.stages)
        """Batches under way at most: as many as are computed at once, and one that is ready."""
        self._waiting: list[_Waiting] = []
        self._num_running = 0
        self._open = True
        self._changed = SafeCondition()
        self._thread = threading.Thread(target=self._send_all, name="autosplit-shapes", daemon=True)
        super().__init__(family.variants[0], engine, opened)
        self._thread.start()

    def submit(
        self, *args: Any, priority: int = 0, deadline_s: float | None = None, timeout_s: float | None = None, **kwargs: Any
    ) -> "Future[Any]":
        """Take in one request and return its future. Masks that are left out are filled in.

        Args:
            args: the model's positional arguments.
            priority: lower is sooner.
            deadline_s: seconds from now after which no stage begins the request any more.
            timeout_s: seconds to wait for room in the queue; None waits as long as it takes, 0 refuses at once.
            kwargs: the model's keyword arguments.
        Raises: UsageError: the arguments do not fit, a size is outside its range, or no variant takes it. RefusedError: there is
            no room, or the service is closed.
        """
        inputs, answer = self._inputs(args, kwargs), self.family.variants[0].unflatten_outputs
        return self._take_in(inputs, answer, priority=priority, deadline_s=deadline_s, timeout_s=timeout_s)

    async def run_tensors_async(
        self, inputs: Sequence[torch.Tensor], *, deadline_s: float | None = None, timeout_s: float | None = None
    ) -> Tensors:
        """Await one request: a tensor for each input of the graph, whose dtypes fit, to one for each output.

        Waiting for room does not hold up the event loop. Raises: as ``submit``.
        """
        submit = partial(self._take_in, inputs, tuple)
        answer: Tensors = await self._awaiting(
            submit, returns_immediately=self.pipeline.returns_immediately, timeout_s=timeout_s, deadline_s=deadline_s
        )
        return answer

    def _take_in(
        self,
        inputs: Sequence[torch.Tensor],
        answer: Callable[[Sequence[torch.Tensor]], Any],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> "Future[Any]":
        """As ``submit``, of a tensor for each input of the graph; ``answer`` makes the result of the future."""
        sizes = self.family.sizes_of(inputs)
        found = asked(self.grid, sizes)
        if found is None:
            raise UsageError(self._without_variant(sizes))
        deadline_ns = monotonic_deadline(deadline_s)
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiting) < self._capacity or not self._open, timeout_s):
                raise RefusedError(
                    f"the request was refused: {len(self._waiting)} requests are waiting (limit {self._capacity}) and "
                    f"{self._num_running} batches are running (limit {self._room}); submit later, or raise queue_capacity"
                )
            if not self._open:
                raise RefusedError("the request was refused: the service is closed")
            copies = [value.clone() for value in inputs]  # the caller may write to its tensors once submit returns
            request = _Waiting(copies, found, answer, priority, time.monotonic(), deadline_ns)
            self._waiting.append(request)
            self.seen[tuple(sizes.values())] += 1
            self._waiting.sort(key=lambda one: one.priority)
            self._changed.notify_all()
        return request.future

    def close(self) -> None:
        """Answer the requests taken so far, then end every worker and remove every file."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._changed.wait_for(lambda: self._num_running == 0)
        super().close()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _inputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, with its masks. Raises: UsageError: other arguments, dtypes or numbers of axes."""
        traced = self.family.variants[0]
        parameters = list(traced.signature.parameters) if traced.signature is not None else []
        absent = [name for name in self.family.masks if kwargs.get(name) is None and name not in parameters[: len(args)]]
        if absent:
            kwargs = {**kwargs, **dict.fromkeys(absent, torch.ones(()))}
        values, faults = traced.bound_inputs(*args, **kwargs)
        specs = [traced.specs[name] for name in traced.graph.inputs]
        given = dict(zip(traced.graph.inputs, values, strict=True))
        for name in absent:
            like = next(
                other for other, axes in self.family.dims.items() if axes == self.family.dims[name] and other not in absent
            )
            if isinstance(given[like], torch.Tensor):
                given[name] = torch.ones(given[like].shape, dtype=traced.specs[name].torch_dtype)
        for spec in specs:
            value, axes = given[spec.name], self.family.dims.get(spec.name, {})
            if not is_dense(value):
                faults.append(f"'{spec.name}' is {kind_of(value)}, and a dense tensor is expected")
                continue
            wanted = [axes.get(axis, size) for axis, size in enumerate(spec.shape)]
            fixed = [size == found for size, found in zip(wanted, value.shape, strict=False) if isinstance(size, int)]
            if value.dtype != spec.torch_dtype or value.dim() != len(wanted) or not all(fixed):
                kind = f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
                faults.append(f"'{spec.name}' is {kind}, and {spec.dtype} [{', '.join(map(str, wanted))}] is expected")
        raise_faults(UsageError, f"a request does not fit '{traced.graph.name}'", faults)
        return list(given.values())

    def _without_variant(self, sizes: At) -> str:
        """Why a request within the ranges has no variant that takes it."""
        exact = [dim for dim in sizes if dim in self.family.unpaddable]
        there = {dim: sorted({bucket.sizes[dim] for bucket in self.grid.buckets}) for dim in exact}
        told = "; ".join(f"'{dim}' is {sizes[dim]}, and the variants have {there[dim]}" for dim in exact)
        reason = next(iter(self.family.unpaddable.values()))
        return (
            f"no variant takes the request: {told}. It cannot be padded: {reason}. Search again with this size among the sizes."
        )

    def _send_all(self) -> None:
        """The thread: send batches while the stages have room, and let requests wait otherwise."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._waiting and self._num_running < self._room) or not self._open)
                if not self._waiting:
                    if not self._open:
                        return
                    continue
                self._changed.wait_for(lambda: self._num_running < self._room)
                self._drop_late()
                if not self._waiting:
                    continue
                bucket, taken = choose([one.asked for one in self._waiting], self.grid)
                batch = [self._waiting[position] for position in taken]
                left_s = self._patience_s(bucket, batch)
                if left_s > 0 and self._open:
                    self._changed.wait(left_s)
                    continue
                self._waiting = [one for one in self._waiting if one not in batch]
                self._num_running += 1
                self._changed.notify_all()
            self._send(bucket, batch)

    def _drop_late(self) -> None:
        """Fail the waiting requests whose deadline has passed, and leave out those that were cancelled (the lock is held)."""
        now_ns = time.monotonic_ns()
        late = [one for one in self._waiting if 0 < one.deadline_ns <= now_ns]
        self._waiting = [one for one in self._waiting if one not in late and not one.future.cancelled()]
        for one in late:
            _fail([one], DeadlineError("the request's deadline passed while it waited for a batch"))

    def _patience_s(self, bucket: Bucket, batch: Sequence[_Waiting]) -> float:
        """Seconds for which a batch that is not full may wait for more requests: at most half of the time to a deadline."""
        if self.grid.rows is None or not self._max_wait_s or self._num_running == self._room:
            return 0.0
        most = max(bucket.sizes[self.grid.rows] for bucket in self.grid.buckets)
        if sum(one.asked.sizes[self.grid.rows] for one in batch) >= most:
            return 0.0
        now_s = time.monotonic()
        until_s = min(one.since_s for one in batch) + self._max_wait_s
        due_s = [(one.since_s + one.deadline_ns / 1e9) / 2 for one in batch if one.deadline_ns]
        return min([until_s, *due_s]) - now_s

    def _send(self, bucket: Bucket, batch: Sequence[_Waiting]) -> None:
        """Send a batch; a failure is the answer of its requests."""
        batch = [one for one in batch if one.future.set_running_or_notify_cancel()]
        last_ns = 0 if any(not one.deadline_ns for one in batch) else max((one.deadline_ns for one in batch), default=0)
        try:
            if not batch:
                raise RefusedError("every request of the batch was cancelled")
            inputs = joined(self.family, bucket, [one.inputs for one in batch])
            future = self.pipeline.submit_unbounded(inputs, deadline_ns=last_ns)
        except Exception as failure:  # the thread goes on with other requests
            self._end(partial(_fail, batch, failure))
            return
        if self.grid.rows is not None:
            num_rows = sum(one.asked.sizes[self.grid.rows] for one in batch)
            self.pipeline.batches.add(num_rows, bucket.sizes[self.grid.rows] - num_rows)
        future.add_done_callback(lambda done: self._end(partial(self._resolve, batch, done)))

    def _end(self, answer: Callable[[], None]) -> None:
        """Count a batch as done, and give its answers."""
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()
        answer()

    def _resolve(self, batch: Sequence[_Waiting], done: "Future[Tensors]") -> None:
        failure = RefusedError("the request was cancelled") if done.cancelled() else done.exception()
        if failure is not None:
            _fail(batch, failure)
            return
        parts = separated(self.family, done.result(), [one.asked.sizes for one in batch], self.grid.rows)
        for one, values in zip(batch, parts, strict=True):
            if len(batch) > 1:  # else one caller would keep the answers of the others in memory, and write into their memory
                values = [value.clone() for value in values]
            with suppress(InvalidStateError):
                one.future.set_result(one.answer(values))


def _fail(batch: Sequence[_Waiting], failure: BaseException) -> None:
    for one in batch:
        with suppress(InvalidStateError):
            one.future.set_exception(failure)


def _mixing_rows(family: Family, engine: Engine) -> str:
    """Why requests cannot be joined; '' if the rows of a request depend neither on each other nor on their places."""
    [_, example] = distinct_inputs(family.variants[0].example_inputs, 2)
    try:
        require_independent_rows(engine.run, engine.wiring.outputs, example)
    except (UsageError, StageError) as failure:
        return str(failure)
    return ""


@checked
def observe(service: Service, path: str | Path) -> Traffic:
    """Write which sizes came to a service so far, and how often: a file for ``--traffic`` and ``read_traffic``.

    Raises: UsageError: the service takes requests of one size, or none came, or the file cannot be written.
    """
    if not isinstance(service, ShapedService):
        raise UsageError("the service takes requests of one size; open a plan of a model that was traced with sizes=")
    if not service.seen:
        raise UsageError("no request came to the service yet, so there is no traffic to write")
    found = Traffic(tuple(service.family.allowed), dict(service.seen))
    try:
        write_traffic(found, Path(path))
    except OSError as failure:
        raise UsageError(f"traffic file '{path}' cannot be written: {failure.strerror}; give another path") from None
    return found
