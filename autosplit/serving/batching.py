"""Batcher: requests with any number of rows on a pipeline that was planned for a fixed number of rows.

::

    rows of a request      0 1 2 3 4 5 6        rows of three requests   a a b c
    pipeline for 4 rows   [0 1 2 3][4 5 6 .]    gathered in a window    [a a b c]

The last slice is padded with its own last row (zeros could turn into NaN), and the padding is cut off the answer. The rows of
a request must not depend on each other, which ``rowcheck`` tries on the pipeline first.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch

from autosplit.arguments import checked
from autosplit.compat.futures import SafeCondition, SafeFuture
from autosplit.devices.limits import refusals_named
from autosplit.errors import AutosplitError, RefusedError, UsageError, raise_faults
from autosplit.running.engine import Engine
from autosplit.running.request import AnswerFuture, Tensors
from autosplit.serving.rowcheck import require_independent_rows
from autosplit.tracing.tensorspec import differences, is_dense, kind_of


@dataclass(eq=False)
class SlicedRequest:
    """A request whose slices are under way: their answers by position, and the number of missing ones."""

    missing: int
    answers: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    future: "Future[Tensors]" = field(default_factory=SafeFuture)


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows of one request, at most the number of rows that the pipeline takes."""

    request: SlicedRequest
    position: int
    inputs: tuple[torch.Tensor, ...]
    num_rows: int


@checked
class Batcher:
    """Slices, pads and gathers requests for a pipeline.

    Args:
        pipeline: planned for a fixed number of rows on dimension 0 of its batched inputs.
        shared: names of inputs without rows, given to every slice; requests are gathered only if there are none.
        window_s: seconds for which a slice that is not full may wait for rows of other requests; 0 pads at once.
        example: inputs of one request with different rows, for a pipeline that fails on the values ``rowcheck`` draws.
    Raises: UsageError: an unknown name, no batched input, batched inputs and outputs that differ in their rows, or rows that
        depend on each other.
    """

    def __init__(
        self,
        pipeline: Engine,
        *,
        shared: Sequence[str] = (),
        window_s: float = 0.0,
        example: Sequence[torch.Tensor] | None = None,
    ) -> None:
        if not window_s >= 0:
            raise UsageError(f"window_s must be at least 0 seconds, but is {window_s}")
        self._pipeline = pipeline
        self._window_s = 0.0 if shared else window_s
        self._batched = [name not in shared for name in pipeline.wiring.inputs]
        self.num_rows = _num_rows(pipeline, shared)
        require_independent_rows(pipeline, self._batched, self.num_rows, example)
        self._gathered: list[RowSlice] = []
        self._flush_at = 0.0
        self._changed = SafeCondition()
        self._open = True
        self._thread = threading.Thread(target=self._flush_in_time, name="autosplit-batcher", daemon=True)
        if self._window_s:
            with refusals_named():
                self._thread.start()

    def submit(self, inputs: Sequence[torch.Tensor], **settings: Any) -> "Future[Tensors]":
        """Submit a request with any number of rows; with ``settings`` (see ``Pipeline.submit``) it is not gathered.

        A slice that fails or is refused fails its request, or all requests that were gathered in it.

        Raises: UsageError: the inputs do not fit, or their rows differ. RefusedError: the batcher is closed.
        """
        slices = self._slice(inputs, self._count_rows(inputs))
        for part in slices:
            if self._window_s and not settings and part.num_rows < self.num_rows:
                self._gather(part)
            else:
                self._send([part], settings)
        return slices[0].request.future

    def run(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """Submit one request and wait for its answer."""
        return self.submit(inputs).result()

    def close(self) -> None:
        """Send the gathered rows, and end; the pipeline stays open."""
        with self._changed:
            self._open = False
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> "Batcher":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _count_rows(self, inputs: Sequence[torch.Tensor]) -> int:
        names = self._pipeline.wiring.inputs
        if len(inputs) != len(names):
            raise UsageError(f"{len(inputs)} inputs were given, and the pipeline takes {len(names)}: {', '.join(names)}")
        for name, value in zip(names, inputs, strict=True):
            if not is_dense(value):
                raise UsageError(f"input '{name}' is {kind_of(value)}, and a dense tensor is expected")
        rows = {len(value) for value, batched in zip(inputs, self._batched, strict=True) if batched and value.ndim}
        if len(rows) != 1 or rows == {0}:
            raise UsageError(f"the batched inputs must have one number of rows, at least 1, but have {sorted(rows)}")
        [count] = rows
        specs = self._pipeline.wiring.input_specs
        wanted, given = [], []
        for name, value, batched in zip(names, inputs, self._batched, strict=True):
            if name in specs:
                wanted.append(replace(specs[name], shape=(count, *specs[name].shape[1:])) if batched else specs[name])
                given.append(value)
        raise_faults(UsageError, "the inputs do not fit the pipeline", differences(wanted, given))
        return count

    def _slice(self, inputs: Sequence[torch.Tensor], num_rows: int) -> list[RowSlice]:
        starts = range(0, num_rows, self.num_rows)
        request = SlicedRequest(missing=len(starts))
        slices = []
        for position, start in enumerate(starts):
            count = min(self.num_rows, num_rows - start)
            cut = (
                value[start : start + count] if batched else value for value, batched in zip(inputs, self._batched, strict=True)
            )
            slices.append(RowSlice(request, position, tuple(cut), count))
        return slices

    def _gather(self, part: RowSlice) -> None:
        """Let a slice wait with others; send them once they fill the batch, or before they would overfill it."""
        ready: list[list[RowSlice]] = []
        with self._changed:
            if not self._open:
                raise RefusedError("the request was refused: the batcher is closed")
            # The caller may write into its tensors once submit returns.
            part = replace(part, inputs=tuple(value.clone() for value in part.inputs))
            if sum(one.num_rows for one in self._gathered) + part.num_rows > self.num_rows:
                ready.append(self._take())
            if not self._gathered:
                self._flush_at = time.monotonic() + self._window_s
                self._changed.notify()
            self._gathered.append(part)
            if sum(one.num_rows for one in self._gathered) == self.num_rows:
                ready.append(self._take())
        for slices in ready:
            self._send(slices, {})

    def _take(self) -> list[RowSlice]:
        taken, self._gathered = self._gathered, []
        return taken

    def _flush_in_time(self) -> None:
        """The thread: send the gathered rows once their window is over."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._gathered or not self._open)
                while self._gathered and self._open and self._flush_at > time.monotonic():
                    self._changed.wait(self._flush_at - time.monotonic())
                slices = self._take()
                if not slices and not self._open:
                    return
            if slices:
                self._send(slices, {})

    def _send(self, slices: Sequence[RowSlice], settings: dict[str, Any]) -> None:
        """Send one batch: the rows of the slices, padded with the last one. A refusal is the answer of its requests."""
        missing = self.num_rows - sum(part.num_rows for part in slices)
        inputs = []
        for position, batched in enumerate(self._batched):
            parts = [part.inputs[position] for part in slices]
            if batched and (missing or len(parts) > 1):
                parts += [parts[-1][-1:].expand(missing, *parts[-1].shape[1:])] if missing else []
                inputs.append(torch.cat(parts))
            else:
                inputs.append(parts[0])
        try:
            future = self._pipeline.submit(inputs, **settings)
        except AutosplitError as failure:
            _fail(slices, failure)
            return
        self._pipeline.batches.add(self.num_rows - missing, missing)
        if len(slices) == 1:  # otherwise other requests wait for it too
            running = weakref.ref(future)  # a reference cycle would keep the answer in memory
            slices[0].request.future.add_done_callback(lambda whole: _cancel(whole, running))
        future.add_done_callback(lambda done: self._receive(slices, done))

    def _receive(self, slices: Sequence[RowSlice], done: "Future[Tensors]") -> None:
        """Cut an answer into those of its slices; the last slice of a request completes its answer."""
        failure = RefusedError("the request was cancelled") if done.cancelled() else done.exception()
        if failure is not None:
            _fail(slices, failure)
            return
        start = 0
        for part in slices:
            part.request.answers[part.position] = [value[start : start + part.num_rows] for value in done.result()]
            start += part.num_rows
            with self._changed:
                part.request.missing -= 1
                complete = part.request.missing == 0
            if complete:
                ordered = [part.request.answers[position] for position in sorted(part.request.answers)]
                with contextlib.suppress(InvalidStateError):  # it was cancelled, or another slice of it failed
                    part.request.future.set_result(tuple(torch.cat(parts) for parts in zip(*ordered, strict=True)))


def _fail(slices: Sequence[RowSlice], failure: BaseException) -> None:
    for part in slices:
        with contextlib.suppress(InvalidStateError):
            part.request.future.set_exception(failure)


def _cancel(whole: "Future[Tensors]", running: "weakref.ref[AnswerFuture]") -> None:
    """End the slice of a cancelled request at the next stage border."""
    future = running()
    if whole.cancelled() and future is not None:
        future.cancel()


def _num_rows(pipeline: Engine, shared: Sequence[str]) -> int:
    """The number of rows of the batched inputs and of all outputs of the pipeline."""
    wiring = pipeline.wiring
    unknown = [name for name in shared if name not in wiring.inputs]
    if unknown:
        raise UsageError(f"there is no input '{unknown[0]}'; the inputs are: {', '.join(wiring.inputs)}")
    specs = {spec.name: spec for stage in wiring.stages for spec in (*stage.inputs, *stage.outputs)}
    names = [name for name in (*wiring.inputs, *wiring.outputs) if name not in shared and name in specs]
    rows = {name: specs[name].shape[0] if specs[name].shape else 0 for name in names}
    if len(set(rows.values())) != 1 or not set(wiring.inputs) - set(shared):
        listed = ", ".join(f"'{name}' {count}" for name, count in rows.items()) or "none"
        raise UsageError(
            f"batching needs one number of rows in all batched inputs and outputs, and they have: {listed}. Name inputs without "
            "rows in shared=."
        )
    return next(iter(rows.values()))
