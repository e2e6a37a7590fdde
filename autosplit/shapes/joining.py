"""JoiningTransport: requests of any size over an engine of variants, several of them in one batch.

::

    Admission -> requests that fit a variant together -> the thread: padded -> Engine -> cut back -> Admission -> Answers

While the stages have enough to do, requests wait in the admission queue, and waiting requests are joined (``batching.choose``).
So batches grow with the load, and a single request is sent at once. No batch size is asked of the user.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import inf

from autosplit.errors import AutosplitError, RefusedError, StageError
from autosplit.running.admission import Admission
from autosplit.running.engine import Engine
from autosplit.running.inflight import Pace
from autosplit.running.monitor import BatchCounts
from autosplit.running.request import Request, Tensors
from autosplit.running.wiring import Wiring
from autosplit.shapes.batching import MOST_LOOKED, Asked, Bucket, Grid, choose, joined, separated
from autosplit.tracing.family import Family


@dataclass(eq=False, slots=True, kw_only=True)
class SizedRequest(Request):
    """A request of any size."""

    asked: Asked


_Batch = tuple[Bucket, Sequence[SizedRequest]]
"""Requests that run together in a variant."""


class JoiningTransport:
    """Joins requests, and runs them as batches of an engine, which others close.

    Args:
        engine: runs the variants of the family; one that has given up is opened again.
        family: the variants.
        grid: the same with their seconds, and the dimension along which requests are joined.
        max_wait_s: seconds that a request may wait for others though the engine has room for a batch.
    Raises: as ``Engine.reopen``.
    """

    admission_class = Admission

    def __init__(self, engine: Engine, family: Family, grid: Grid, max_wait_s: float) -> None:
        if engine.failure is not None:
            engine.reopen()
        self._engine, self._family, self._grid = engine, family, grid
        self.health, self.reports = engine.health, engine.reports  # its workers see batches
        self._max_wait_s = 0.0 if grid.rows is None else max_wait_s
        self._most_rows = 1 if grid.rows is None else max(bucket.sizes[grid.rows] for bucket in grid.buckets)
        self._room = 1 + sum(len(stage.devices) * stage.streams for stage in engine.wiring.stages)
        """Batches under way at most: as many as are computed at once, and one that is ready."""
        self.pace = Pace(self._room * self._most_rows)
        self._ready: _Batch | None = None
        """The batch that the thread will hand to the engine."""
        self._num_running = 0
        """Batches without an answer, this one included."""
        self._asks, self._is_over = False, False
        self._restarts_before = engine.restarts
        self._thread = threading.Thread(target=self._run, name="autosplit-joining", daemon=True)

    @property
    def wiring(self) -> Wiring:
        """The stages."""
        return self._engine.wiring

    @property
    def restarts(self) -> int:
        """Workers that were started anew since this transport was made; the engine counts those before it, too."""
        return self._engine.restarts - self._restarts_before

    @property
    def replanned(self) -> Sequence[str]:
        """A sentence for each device or host that was lost and replaced."""
        return self._engine.replanned

    @property
    def batches(self) -> BatchCounts:
        """Batches of joined requests, which the engine counts."""
        return self._engine.batches

    def start(self, admission: Admission) -> None:
        """Take requests."""
        self._admission = admission
        self._thread.start()

    def has_room(self) -> bool:
        """Whether the thread asks for a batch: until then more requests come, which it may hold, too."""
        return self._asks and self._num_running < self._room and (not self._max_wait_s or self._patience_s() <= 0)

    def hold(self, request: Request, *, is_soonest: bool) -> None:
        """Copy the inputs of a request that waits, unless its caller keeps them; wake the thread."""
        if not request.caller_keeps_inputs:
            request.inputs = [value.clone() for value in request.inputs]
        self._admission.changed.notify_all()

    def send(self, request: Request) -> None:
        """Make a batch of a request and of those waiting ones that are best joined with it."""
        admission = self._admission
        requests = _sized([request, *(one for one in admission.queue.soonest(MOST_LOOKED) if not one.expired())])
        bucket, taken = choose([one.asked for one in requests], self._grid)
        batch = [requests[place] for place in taken]
        for one in admission.queue.remove(batch[1:]):
            admission.number(one)
        self._ready, self._asks = (bucket, batch), False
        self._num_running += 1

    def cancel(self, request: Request) -> None:
        """Nothing: its batch has other requests, too."""

    def close(self, *, patiently: bool) -> None:
        """Fail waiting requests, wait for the batches under way, and end the thread; the engine stays open."""
        admission = self._admission
        admission.fail(RefusedError("the pipeline was closed before the request was done"))
        with admission.changed:
            admission.wait_until(lambda: self._num_running == 0)
            self._is_over = True
            admission.changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _patience_s(self) -> float:
        """Seconds for which waiting requests may wait for others to fill their batch (the lock is held).

        That is at most half of the time to a deadline; infinity if none waits.
        """
        requests = _sized(self._admission.queue.soonest(MOST_LOOKED))
        if not (requests and self._admission.is_open):
            return 0.0 if requests else inf
        _, taken = choose([one.asked for one in requests], self._grid)
        batch = [requests[place] for place in taken]
        if self._grid.rows is None or sum(one.asked.sizes[self._grid.rows] for one in batch) >= self._most_rows:
            return 0.0
        until_s = min(one.submitted_ns for one in batch) / 1e9 + self._max_wait_s
        due_s = [(one.submitted_ns + one.deadline_ns) / 2e9 for one in batch if one.deadline_ns]
        return min([until_s, *due_s]) - time.monotonic()

    def _run(self) -> None:
        """The thread: hand batches to the engine, and send requests that have waited long enough for others."""
        admission = self._admission
        while True:
            with admission.changed:
                self._asks = True
                late = admission.settle([])
                self._asks = False
                if not (self._ready or late or self._is_over):
                    left_s = self._patience_s() if self._max_wait_s and self._num_running < self._room else inf
                    if left_s > 0:
                        admission.changed.wait(None if left_s == inf else left_s)
                    continue
                batch, self._ready, is_over = self._ready, None, self._is_over
            admission.answers.deliver_here(late)
            if batch is not None:
                self._compute(*batch)
            elif is_over:
                return

    def _compute(self, bucket: Bucket, requests: Sequence[SizedRequest]) -> None:
        """Pad and join the requests of a batch, and hand it to the engine; it may compute it in this thread."""
        rows = self._grid.rows
        deadlines_ns = [one.deadline_ns for one in requests]
        future: Future[Tensors]
        try:
            inputs = joined(self._family, bucket, [one.inputs for one in requests])
            future = self._engine.submit_unbounded(inputs, deadline_ns=max(deadlines_ns) if all(deadlines_ns) else 0)
        except Exception as failure:  # the thread goes on with other batches
            future = Future()
            future.set_exception(failure)
        else:
            if rows is not None:
                num_rows = sum(one.asked.sizes[rows] for one in requests)
                self.batches.add(num_rows, bucket.sizes[rows] - num_rows)
        for one in requests:
            one.inputs = ()
        future.add_done_callback(partial(self._finish, requests))

    def _finish(self, requests: Sequence[SizedRequest], done: "Future[Tensors]") -> None:
        """In any thread: let the next batch follow, and give each request its part of the outputs, or the failure."""
        due = self._admission.settle([*requests], self._release)
        try:
            parts = separated(self._family, done.result(), [one.asked.sizes for one in requests], self._grid.rows)
            for one, values in zip(requests, parts, strict=True):
                if len(requests) > 1:  # else one caller would keep the answers of others in memory, and write into their memory
                    values = [value.clone() for value in values]
                one.values = dict(zip(self.wiring.outputs, values, strict=True))
        except Exception as failure:
            known = failure if isinstance(failure, AutosplitError) else StageError(f"a batch of requests failed: {failure!r}")
            for one in requests:
                one.error = copy(known)
        self._admission.answers.deliver_here(due)
        if self._engine.failure is not None:
            self._admission.fail(self._engine.failure)

    def _release(self, done: list[Request]) -> list[Request]:
        """Free the place of a batch, whose requests are done (the lock is held)."""
        self._num_running -= 1
        if self._admission.queue or self._admission.failure is not None:  # waiting requests may go now, or the end waits
            self._admission.changed.notify_all()
        return done


def _sized(requests: Sequence[Request]) -> list[SizedRequest]:
    return [one for one in requests if isinstance(one, SizedRequest)]
