"""Turns: sequences become steps of pipelines, and the answers of steps their next tokens.

::

    put -> Scheduler -> a step of tokens of several sequences -> pipeline -> their next tokens -> Scheduler -> future

One thread at a time takes a turn. The thread of a pipeline that brings the answer of a step sends the next step, too: a thread
for that alone would have to be woken for each step, on a core where a stage computes.
"""

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

import torch

from autosplit.compat.futures import SafeCondition
from autosplit.errors import AutosplitError, RefusedError, StageError, UsageError, WorkerError
from autosplit.generating.scheduler import Scheduler
from autosplit.generating.sequences import Capacity, Generation, Step
from autosplit.generating.tallies import GenerationStats, Tally


@runtime_checkable
class StepPipeline(Protocol):
    """The part of ``Engine`` that a generator uses."""

    def submit_unbounded(self, inputs: Sequence[torch.Tensor], *, variant: int = 0) -> "Future[Any]":
        """Take in the tensors of a step; the result is one tensor with its next tokens."""

    @property
    def failure(self) -> AutosplitError | None:
        """Why no step runs any more."""


class Turns:
    """The sequences of a generator, until ``close``. Calls may come from any thread.

    Args:
        pipelines: run steps.
        schedulers: one for each pipeline. A sequence goes to the one with the most free slots, and stays there.
        capacity: the sizes of the caches of all pipelines.
        queue_capacity: sequences that may wait for a slot.
    """

    def __init__(
        self, pipelines: Sequence[StepPipeline], schedulers: Sequence[Scheduler], capacity: Capacity, queue_capacity: int
    ) -> None:
        self._pipelines, self._schedulers, self._capacity = pipelines, schedulers, capacity
        self._queue_capacity = queue_capacity
        self._waiting: list[tuple[int, int, int, Generation]] = []
        """Heap of priorities, turns, arrivals and sequences."""
        self._arrivals = itertools.count()
        self._num_admitted = 0
        self._answers = deque[tuple[int, Step, "Future[Any]"]]()
        self._tally = Tally([one.counts for one in schedulers])
        self._is_open = True
        self._failure: BaseException | None = None
        self._changed = SafeCondition()
        self._turner: int | None = None
        """The thread that takes a turn; 0 after an error in one, as no thread takes another one."""
        self._calls = SimpleQueue[bool]()
        """Of the thread: a turn for each True, the end with False."""
        self._thread = threading.Thread(target=self._run, name="autosplit-generator", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return sum(one.num_running for one in self._schedulers)

    def stats(self, *, clear: bool) -> GenerationStats:
        """Times and tokens of the sequences that ended since the start, or since the last call with ``clear``."""
        with self._changed:
            return self._tally.stats(clear=clear)

    def put(self, generations: Sequence[Generation], timeout_s: float | None) -> None:
        """Take in sequences, as ``Generator.submit_all``.

        The n-th of them waits for n others that get a slot from now on, as does the n-th of any other call: callers share the
        slots (start-time fair queuing: Goyal, Vin, Cheng, SIGCOMM 1996), and nobody waits behind all sequences of another one.
        """
        here = threading.get_ident() == self._turner  # a callback, for which no place becomes free while it waits
        with self._changed:
            for turn, generation in enumerate(generations, self._num_admitted):
                room = self._changed.wait_for(self._has_room, 0 if here else timeout_s)
                if self._failure is not None:
                    raise self._failure
                if not self._is_open or not self._thread.is_alive():
                    raise RefusedError(
                        "the sequence was refused: the generator is closed, or was opened in the parent of this process"
                    )
                if not room:
                    raise RefusedError(
                        f"the sequence was refused: {self.num_waiting} sequences are waiting (limit {self._queue_capacity}) and "
                        f"{self.num_running} have a place in the caches (limit {self._capacity.max_sequences}); "
                        "submit later"
                    )
                heapq.heappush(self._waiting, (generation.priority, turn, next(self._arrivals), generation))
                self._calls.put(True)

    def close(self, *, drain: bool) -> None:
        """Finish the sequences that were taken in (``drain``) or fail them.

        Raises: UsageError: called in a callback of a future or of a token.
        """
        if threading.get_ident() == self._turner:
            raise UsageError("a callback of a sequence cannot close its generator; close it in another thread")
        with self._changed:
            self._is_open = False
            if not drain:
                self._fail(self._schedulers, RefusedError("the generator was closed"))
            self._calls.put(True)
        self._thread.join()

    def _has_room(self) -> bool:
        return not self._is_open or not self._thread.is_alive() or self.num_waiting < self._queue_capacity

    def _fail(self, schedulers: Sequence[Scheduler], failure: BaseException, *, at_once: bool = False) -> None:
        """End the sequences of some pipelines as ``fail_all`` does, and in the next turn those that wait (the lock is held)."""
        for *_, generation in self._waiting:
            generation.failure = generation.failure or failure
        for scheduler in schedulers:
            scheduler.fail_all(failure, at_once=at_once)

    def _run(self) -> None:
        """The thread: take turns for sequences that come; their further tokens come in turns of other threads."""
        while self._calls.get():
            self._take_turns()

    def _take_turns(self) -> None:
        """Take turns while there is anything to do. One thread at a time does; it looks for new answers before it ends."""
        with self._changed:
            if self._turner is not None:
                return
            self._turner = threading.get_ident()
        try:
            while self._turn():
                pass
        except BaseException as failure:
            self._give_up(failure)
            raise

    def _turn(self) -> bool:
        """Take answers of steps, send the next ones, resolve futures; False if there was nothing to do."""
        steps: list[tuple[int, Step]] = []
        with self._changed:
            while self._answers:
                self._take(*self._answers.popleft())
            ended = self._admit()
            for number, scheduler in enumerate(self._schedulers):
                if (step := scheduler.next_step()) is not None:
                    steps.append((number, step))
                ended += scheduler.ended
                scheduler.ended.clear()
            for generation in ended:
                self._tally.add(generation)
            goes_on = bool(steps or ended)
            if not goes_on:
                self._turner = None
                if not (self._is_open or self._waiting or self.num_running or any(one.num_under_way for one in self._schedulers)):
                    self._calls.put(False)
            self._changed.notify_all()
        try:
            for number, step in steps:
                self._send(number, step)
        finally:
            for generation in ended:
                generation.resolve()
        return goes_on

    def _admit(self) -> list[Generation]:
        """Give free slots to sequences that wait; return those that ended before (the lock is held)."""
        if not self._waiting:
            return []
        now_ns = time.monotonic_ns()
        ended = [entry for entry in self._waiting if entry[-1].has_failed(now_ns)]
        if ended:
            self._waiting = sorted(set(self._waiting) - set(ended))  # a sorted list is a heap
        while self._waiting and (scheduler := max(self._schedulers, key=attrgetter("num_free"))).num_free:
            scheduler.add(heapq.heappop(self._waiting)[-1])
            self._num_admitted += 1
        return [generation for *_, generation in ended]

    def _send(self, number: int, step: Step) -> None:
        """Hand a step to a pipeline."""
        try:
            future = self._pipelines[number].submit_unbounded(step.inputs(self._capacity.table), variant=step.variant)
        except AutosplitError as failure:
            future = Future()
            future.set_exception(failure)
        future.add_done_callback(partial(self._arrive, number, step))

    def _arrive(self, number: int, step: Step, future: "Future[Any]") -> None:
        """In any thread: take the answer of a step, and go on with its sequences."""
        self._answers.append((number, step, future))
        self._take_turns()

    def _take(self, number: int, step: Step, future: "Future[Any]") -> None:
        scheduler = self._schedulers[number]
        try:
            [found] = future.result()
        except Exception as failure:
            scheduler.finish(step, failure=failure)
            if not isinstance(failure, StageError | WorkerError) or self._pipelines[number].failure is not None:
                self._is_open, self._failure = False, failure
                self._fail([scheduler], failure)
        else:
            scheduler.finish(step, found.tolist())

    def _give_up(self, failure: BaseException) -> None:
        """Fail every sequence after an error in a turn."""
        with self._changed:
            self._is_open, self._failure, self._turner = False, failure, 0
            self._fail(self._schedulers, failure, at_once=True)
            ended = [*self._admit(), *(one for scheduler in self._schedulers for one in scheduler.ended)]
            self._calls.put(False)
            self._changed.notify_all()
        for generation in ended:
            generation.resolve()
