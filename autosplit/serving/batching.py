"""Batcher: requests of any number of rows on a pipeline whose stages were planned for a fixed number.

::

    rows of a request      0 1 2 3 4 5 6        rows of three requests   a a b c
    pipeline for 4 rows   [0 1 2 3][4 5 6 .]    gathered in a window    [a a b c]

The last slice is padded with its own last row (zeros could turn into NaN) and its answer is cut back. Each row must be
computed independently of the others in its batch, as models in eval mode do.
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

from autosplit.errors import AutosplitError, RefusedError, UsageError, raise_faults
from autosplit.running.pipeline import Pipeline
from autosplit.running.request import Tensors
from autosplit.tracing.tensorspec import differences, is_dense, kind_of


@dataclass(eq=False)
class Whole:
    """A request on its way: the answers of its slices by position, and how many are missing."""

    missing: int
    parts: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    future: "Future[Tensors]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a request: at most as many rows as the pipeline takes."""

    whole: Whole
    position: int
    inputs: tuple[torch.Tensor, ...]
    num_rows: int


class Batcher:
    """Slices, pads and gathers requests for a pipeline.

    Args:
        pipeline: planned for a fixed number of rows on dimension 0 of its batched inputs.
        shared: names of inputs without rows, given alike to every slice; requests are gathered only if there are none.
        window_s: how long a slice that is not full may wait for rows of other requests; 0 pads at once.
    Raises: UsageError: an unknown name, no batched input, or batched inputs and outputs that differ in their rows.
    """

    def __init__(self, pipeline: Pipeline, *, shared: Sequence[str] = (), window_s: float = 0.0) -> None:
        if not window_s >= 0:
            raise UsageError(f"window_s must be at least 0 seconds, but is {window_s}")
        self._pipeline = pipeline
        self._window_s = 0.0 if shared else window_s
        self._batched = [name not in shared for name in pipeline.wiring.inputs]
        self.num_rows = _num_rows(pipeline, shared)
        self._gathered: list[Piece] = []
        self._flush_at = 0.0
        self._lock = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._flush_in_time, name="autosplit-batcher", daemon=True)
        if self._window_s:
            self._thread.start()

    def submit(self, inputs: Sequence[torch.Tensor], **settings: Any) -> "Future[Tensors]":
        """One request of any number of rows; ``settings`` as in ``Pipeline.submit``, and one with any is not gathered.

        A slice that fails or is refused fails the request, or all the requests that were gathered in it.

        Raises: UsageError: the inputs do not fit, or their rows differ. RefusedError: the batcher is closed.
        """
        pieces = self._slice(inputs, self._count_rows(inputs))
        for piece in pieces:
            if self._window_s and not settings and piece.num_rows < self.num_rows:
                self._gather(piece)
            else:
                self._send([piece], settings)
        return pieces[0].whole.future

    def run(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """One request, start to end."""
        return self.submit(inputs).result()

    def close(self) -> None:
        """Send what was gathered, and end; the pipeline stays open."""
        with self._lock:
            self._open = False
            self._lock.notify()
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

    def _slice(self, inputs: Sequence[torch.Tensor], num_rows: int) -> list[Piece]:
        starts = range(0, num_rows, self.num_rows)
        whole = Whole(missing=len(starts))
        pieces = []
        for position, start in enumerate(starts):
            count = min(self.num_rows, num_rows - start)
            cut = (
                value[start : start + count] if batched else value for value, batched in zip(inputs, self._batched, strict=True)
            )
            pieces.append(Piece(whole, position, tuple(cut), count))
        return pieces

    def _gather(self, piece: Piece) -> None:
        """Put the piece with those that wait; send them once they fill the batch, or before they would overfill it."""
        ready: list[list[Piece]] = []
        with self._lock:
            if not self._open:
                raise RefusedError("the request was refused: the batcher is closed")
            # The caller may write into its tensors once submit returns.
            piece = Piece(piece.whole, piece.position, tuple(value.clone() for value in piece.inputs), piece.num_rows)
            if sum(one.num_rows for one in self._gathered) + piece.num_rows > self.num_rows:
                ready.append(self._take())
            if not self._gathered:
                self._flush_at = time.monotonic() + self._window_s
                self._lock.notify()
            self._gathered.append(piece)
            if sum(one.num_rows for one in self._gathered) == self.num_rows:
                ready.append(self._take())
        for pieces in ready:
            self._send(pieces, {})

    def _take(self) -> list[Piece]:
        taken, self._gathered = self._gathered, []
        return taken

    def _flush_in_time(self) -> None:
        """The thread: send what was gathered once its window is over."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._gathered or not self._open)
                while self._gathered and self._open and self._flush_at > time.monotonic():
                    self._lock.wait(self._flush_at - time.monotonic())
                pieces = self._take()
                if not pieces and not self._open:
                    return
            if pieces:
                self._send(pieces, {})

    def _send(self, pieces: Sequence[Piece], settings: dict[str, Any]) -> None:
        """One batch: the rows of the pieces, padded with the last one; a refusal is the answer of its requests."""
        missing = self.num_rows - sum(piece.num_rows for piece in pieces)
        inputs = []
        for position, batched in enumerate(self._batched):
            parts = [piece.inputs[position] for piece in pieces]
            if batched and (missing or len(parts) > 1):
                parts += [parts[-1][-1:].expand(missing, *parts[-1].shape[1:])] if missing else []
                inputs.append(torch.cat(parts))
            else:
                inputs.append(parts[0])
        try:
            future = self._pipeline.submit(inputs, **settings)
        except AutosplitError as failure:
            _fail(pieces, failure)
            return
        self._pipeline.batches.add(self.num_rows - missing, missing)
        if len(pieces) == 1:  # nobody else waits for it
            running = weakref.ref(future)  # a circle would keep the answer in memory
            pieces[0].whole.future.add_done_callback(lambda whole: _cancel(whole, running))
        future.add_done_callback(lambda done: self._receive(pieces, done))

    def _receive(self, pieces: Sequence[Piece], done: "Future[Tensors]") -> None:
        """Cut an answer into those of its pieces; a request is answered with its last piece."""
        failure = RefusedError("the request was cancelled") if done.cancelled() else done.exception()
        if failure is not None:
            _fail(pieces, failure)
            return
        start = 0
        for piece in pieces:
            piece.whole.parts[piece.position] = [value[start : start + piece.num_rows] for value in done.result()]
            start += piece.num_rows
            with self._lock:
                piece.whole.missing -= 1
                complete = piece.whole.missing == 0
            if complete:
                ordered = [piece.whole.parts[position] for position in sorted(piece.whole.parts)]
                with contextlib.suppress(InvalidStateError):  # it was cancelled, or another slice of it failed
                    piece.whole.future.set_result(tuple(torch.cat(parts) for parts in zip(*ordered, strict=True)))


def _fail(pieces: Sequence[Piece], failure: BaseException) -> None:
    for piece in pieces:
        with contextlib.suppress(InvalidStateError):
            piece.whole.future.set_exception(failure)


def _cancel(whole: "Future[Tensors]", running: "weakref.ref[Future[Tensors]]") -> None:
    """Who cancels a request ends its slices at the next stage border."""
    future = running()
    if whole.cancelled() and future is not None:
        future.cancel()


def _num_rows(pipeline: Pipeline, shared: Sequence[str]) -> int:
    """The rows that the batched inputs and all outputs of the pipeline have."""
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
