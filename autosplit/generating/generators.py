"""Generator: a running model that continues any number of sequences at once.

::

    submit -> Scheduler -> a step of tokens of several sequences -> pipeline -> their next tokens -> Scheduler -> future, stream

The thread of a pipeline that brings the answer of a step sends the next step, too. A thread for that alone would have to be woken
for each step, on a core where a stage computes.
"""

import atexit
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

import torch

from autosplit.arguments import checked
from autosplit.closing import Draining
from autosplit.compat.futures import SafeCondition
from autosplit.errors import AutosplitError, RefusedError, StageError, UsageError, WorkerError
from autosplit.generating.sampling import Sampling, sampling_of
from autosplit.generating.scheduler import Scheduler
from autosplit.generating.sequences import Capacity, Generation, Step, begun
from autosplit.generating.tallies import GenerationStats, Tally
from autosplit.generating.texts import Texts, required, until
from autosplit.running.request import MatchingTensors, monotonic_deadline
from autosplit.shapes.batching import Bucket
from autosplit.values.graph import Graph
from autosplit.values.plan import Plan


@runtime_checkable
class StepPipeline(Protocol):
    """The part of ``Engine`` that a generator uses."""

    def submit_unbounded(self, inputs: Sequence[torch.Tensor], *, variant: int = 0) -> "Future[Any]":
        """Take in the tensors of a step; the result is one tensor with its next tokens."""

    @property
    def failure(self) -> AutosplitError | None:
        """Why no step runs any more."""


@checked
class Generator(Draining):
    """A model that generates; open until ``close``, best in a ``with`` block. Calls may come from any thread.

    ::

        with autosplit.generator(model, devices="cpu:0,cpu:1") as generator:
            for token in generator.stream(prompt_ids, max_new_tokens=20):
                ...
            answers = generator.generate([prompt_ids, other_ids], temperature=0.8, seed=7)

    Args:
        pipeline: runs steps: ``(ids, slots, positions, sampling) -> tokens``.
        buckets: its variants, by their number of tokens.
        capacity: the sizes of its caches.
        num_stages: steps under way in a pipeline at most.
        beside: further pipelines with the same weights and caches of their own, and the variants of each. A sequence goes to the
            one with the most free slots, and stays there.
        queue_capacity: sequences that may wait for a slot before ``submit`` blocks or refuses.
        plan: the stages of the pipeline, and the sequences for which it was made, whose limit on the time per token counts.
        graph: the graph that the plan divides; ``write_plan(generator.plan, generator.graph, path)`` keeps both.
        texts: the tokenizer of the model; None if there is none at hand.
        opened: closes the pipelines and their resources; None if others close them.
    """

    notes: tuple[str, ...] = ()
    """Sentences on the model that the user should read, such as which weights it has."""

    def __init__(
        self,
        pipeline: StepPipeline,
        buckets: Sequence[Bucket],
        capacity: Capacity,
        num_stages: int,
        *,
        beside: Sequence[tuple[StepPipeline, Sequence[Bucket]]] = (),
        queue_capacity: int = 256,
        plan: Plan | None = None,
        graph: Graph | None = None,
        texts: Texts | None = None,
        opened: ExitStack | None = None,
    ) -> None:
        if queue_capacity < 1:
            raise UsageError(f"queue_capacity must be at least 1 sequence, but is {queue_capacity}")
        self.pipelines = (pipeline, *(one for one, _ in beside))
        self.capacity = replace(capacity, max_sequences=len(self.pipelines) * capacity.max_sequences)
        self.plan, self.graph, self.texts = plan, graph, texts
        self._queue_capacity, self._opened = queue_capacity, opened or ExitStack()
        sequences = None if plan is None else plan.sequences
        per_token_s = None if sequences is None else sequences.per_token_s
        self._schedulers = [
            Scheduler(variants, capacity.max_sequences, num_stages, per_token_s, capacity.source)
            for variants in (buckets, *(variants for _, variants in beside))
        ]
        self._waiting: list[tuple[int, int, Generation]] = []
        self._arrivals = itertools.count()
        self._answers = deque[tuple[int, Step, "Future[Any]"]]()
        self._tally = Tally([one.counts for one in self._schedulers])
        self._is_open = True
        self._failure: BaseException | None = None
        self._changed = SafeCondition()
        self._turner: int | None = None
        """The thread that takes a turn; 0 after an error in one, as no thread takes another one."""
        self._calls = SimpleQueue[bool]()
        """Of the thread: a turn for each True, the end with False."""
        self._thread = threading.Thread(target=self._run, name="autosplit-generator", daemon=True)
        self._thread.start()
        if opened is not None:
            atexit.register(self.close, drain=False)

    @checked
    def submit(
        self,
        prompt: "Sequence[int] | torch.Tensor",  # a text takes any type: ``begun`` says what a prompt is
        *,
        start: "Sequence[int] | None" = None,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        on_token: Callable[[int], object] | None = None,
        **sampling: Any,
    ) -> "Future[list[int]]":
        """Take in one sequence and return the future of its new tokens. Cancelling the future ends it after its present step.

        Args:
            prompt: at least one token id; for Whisper a sound [samples], 16,000 a second, or its features [bins, frames].
            start: ids with which the answer of a model with an encoder begins, before the new ones; None for those of the model.
            priority: lower gets a slot sooner; then arrival counts.
            deadline_s: seconds from now after which the sequence fails.
            timeout_s: seconds to wait for room in the queue; None waits as long as it takes, 0 refuses at once.
            on_token: called with each new token in the thread that brings the answer of a step; it must return at once. True ends
                the sequence.
            sampling: the fields of ``Sampling``: max_new_tokens, eos, temperature, top_p, top_k, seed, repetition_penalty.
        Raises: UsageError: with every fault of the prompt; a setting is not understood. RefusedError: there is no room, or the
            generator is closed. WorkerError: the pipeline has given up.
            In the future: DeadlineError. StageError: the logits are not finite, or a stage failed on this sequence alone.
            WorkerError: workers died again and again at a step of this sequence alone.
        """
        settings, deadline_ns = sampling_of(sampling), monotonic_deadline(deadline_s)
        generation = begun(prompt, start, settings, self.capacity, on_token, priority, deadline_ns)
        self.submit_all([generation], timeout_s)
        return generation.future

    def submit_all(self, generations: Sequence[Generation], timeout_s: float | None = None) -> None:
        """Take in sequences of ``begun`` at once: the first step may hold tokens of all for which the queue has room.

        ``timeout_s`` counts for each of them. After an error, those before it run until their futures are cancelled.
        Raises: RefusedError, WorkerError: as ``submit``.
        """
        here = threading.get_ident() == self._turner  # a callback, for which no place becomes free while it waits
        with self._changed:
            for generation in generations:
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
                        f"{self.num_running} have a place in the caches (limit {self.capacity.max_sequences}); "
                        "submit later"
                    )
                heapq.heappush(self._waiting, (generation.priority, next(self._arrivals), generation))
                self._calls.put(True)

    def generate(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor],
        *,
        start: Sequence[int] | None = None,
        on_token: Callable[[int, int], object] | None = None,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> list[list[int]]:
        """The new tokens of each prompt, in their order. The prompts run side by side, and may have any lengths.

        They come at once: the first step may hold tokens of all of them.

        Args:
            prompts: as for ``submit``. Equal ones get different draws: the seed of each follows from its place.
            start: as for ``submit``, of all answers.
            on_token: as for ``submit``; it gets the place of the prompt, too, before the token.
            stop: texts that end an answer, by the tokenizer of the checkpoint. The tokens in which one ends are the last.
            sampling: as for ``submit``.
        Raises: UsageError, RefusedError, WorkerError: as ``submit``. StageError: of the first sequence that failed, after all.
        """
        settings, generations = sampling_of(sampling), list[Generation]()
        for number, prompt in enumerate(prompts):
            note = until(self.texts, stop, on_token and partial(on_token, number))
            generations.append(begun(prompt, start, settings.of(number), self.capacity, note))
        try:
            self.submit_all(generations)
            for one in generations:
                one.future.exception()
        except BaseException:  # Ctrl-C, or the generator was closed
            for one in generations:
                one.future.cancel()
            raise
        return [one.future.result() for one in generations]

    def stream(self, prompt: Sequence[int] | torch.Tensor, *, stop: Sequence[str] = (), **options: Any) -> Iterator[int]:
        """The new tokens of a prompt, each as soon as it is there; ``stop`` as for ``generate``, all else as for ``submit``.

        The sequence runs at its own pace, read or not: unread tokens wait in a queue. Closing the iterator ends it.
        """
        tokens = SimpleQueue[int | None]()
        future = self.submit(prompt, on_token=until(self.texts, stop, tokens.put), **options)
        future.add_done_callback(lambda _: tokens.put(None))
        found = _stream(tokens, future)
        next(found)
        return found

    def stream_text(self, prompt: str, *, stop: Sequence[str] = (), **options: Any) -> Iterator[str]:
        """The text after a prompt, as it comes, by the tokenizer of the checkpoint, up to a token that ends its texts.

        Args:
            prompt: a text.
            stop: texts that end the answer; none of them stands in it.
            options: as for ``stream``.
        Raises: UsageError: there is no tokenizer at hand; others as ``stream``.
        """
        texts = required(self.texts)
        eos = (*texts.ends, *Sampling(eos=options.pop("eos", ())).ends)
        return texts.reader(stop).read(self.stream(texts.ids(prompt), stop=stop, eos=eos, **options))

    @property
    def pipeline(self) -> StepPipeline:
        """The first pipeline."""
        return self.pipelines[0]

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return sum(one.num_running for one in self._schedulers)

    def stats(self, *, clear: bool = False) -> GenerationStats:
        """Times and tokens of the sequences that ended since the start, or since the last call with ``clear``."""
        with self._changed:
            return self._tally.stats(clear=clear)

    def close(self, *, drain: bool = True) -> None:
        """Finish the sequences that were taken in (``drain``) or fail them, then end every worker.

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
        atexit.unregister(self.close)
        self._opened.close()

    def __repr__(self) -> str:
        sizes = f"{self.capacity.max_sequences} sequences of {self.capacity.max_length} tokens"
        return f"Generator({sizes}, {self.num_running} running, {self.num_waiting} waiting)"

    def _has_room(self) -> bool:
        return not self._is_open or not self._thread.is_alive() or self.num_waiting < self._queue_capacity

    def _fail(self, schedulers: Sequence[Scheduler], failure: BaseException, *, at_once: bool = False) -> None:
        """End the sequences of some pipelines as ``fail_all`` does, and in the next turn those that wait (the lock is held)."""
        for _, _, generation in self._waiting:
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
        ended = [entry for entry in self._waiting if entry[2].has_failed(now_ns)]
        if ended:
            self._waiting = sorted(set(self._waiting) - set(ended))  # a sorted list is a heap
        while self._waiting and (scheduler := max(self._schedulers, key=attrgetter("num_free"))).num_free:
            scheduler.add(heapq.heappop(self._waiting)[2])
        return [generation for _, _, generation in ended]

    def _send(self, number: int, step: Step) -> None:
        """Hand a step to a pipeline."""
        inputs, table = step.inputs(), self.capacity.table
        if table is not None:
            inputs = MatchingTensors((*inputs, table.index_select(0, inputs[0])))
        try:
            future = self.pipelines[number].submit_unbounded(inputs, variant=step.variant)
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
            if not isinstance(failure, StageError | WorkerError) or self.pipelines[number].failure is not None:
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


def _stream(tokens: "SimpleQueue[int | None]", future: "Future[list[int]]") -> Iterator[int]:
    """0 at once, then the tokens from a queue, up to None; then the error of the sequence, if it has one."""
    try:
        yield 0  # from here on the end of the iterator cancels the sequence, also before its first token
        while (token := tokens.get()) is not None:
            yield token
    finally:
        future.cancel()
    future.result()
