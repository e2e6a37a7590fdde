"""Generator: a running model that continues any number of sequences at once, as futures, lists, streams of tokens, or texts."""

import atexit
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from autosplit.arguments import checked
from autosplit.closing import Draining
from autosplit.errors import UsageError
from autosplit.generating.sampling import Sampling, sampling_of
from autosplit.generating.scheduler import Scheduler
from autosplit.generating.sequences import Capacity, Generation, new_generation
from autosplit.generating.tallies import GenerationStats
from autosplit.generating.texts import Texts, required, with_stops
from autosplit.generating.turns import StepPipeline, Turns
from autosplit.running.request import monotonic_deadline
from autosplit.shapes.batching import Bucket
from autosplit.values.graph import Graph
from autosplit.values.plan import Plan


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
        self.plan, self.graph, self.texts, self._opened = plan, graph, texts, opened or ExitStack()
        sequences = None if plan is None else plan.sequences
        per_token_s = None if sequences is None else sequences.per_token_s
        schedulers = [
            Scheduler(variants, capacity.max_sequences, num_stages, per_token_s, capacity.source)
            for variants in (buckets, *(variants for _, variants in beside))
        ]
        self._turns = Turns(self.pipelines, schedulers, self.capacity, queue_capacity)
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
            priority: lower gets a slot sooner; of equal ones callers take turns (see ``submit_all``).
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
        generation = new_generation(prompt, start, settings, self.capacity, on_token, priority, deadline_ns)
        self.submit_all([generation], timeout_s)
        return generation.future

    def submit_all(self, generations: Sequence[Generation], timeout_s: float | None = None) -> None:
        """Take in sequences of ``new_generation`` at once: the first step may hold tokens of all for which the queue has room.

        Calls share the slots: the second sequence of this one gets a slot after the first one of a call that comes now.
        ``timeout_s`` counts for each of them. After an error, those before it run until their futures are cancelled.
        Raises: RefusedError, WorkerError: as ``submit``.
        """
        self._turns.put(generations, timeout_s)

    @checked
    def generate(
        self,
        prompts: Iterable[Sequence[int] | torch.Tensor],
        *,
        start: "Sequence[int] | None" = None,
        on_token: Callable[[int, int], object] | None = None,
        stop: str | Sequence[str] = (),
        **sampling: Any,
    ) -> list[list[int]]:
        """The new tokens of each prompt, in their order. The prompts run side by side, and may have any lengths.

        They come at once: the first step may hold tokens of all of them.

        Args:
            prompts: as for ``submit``. Equal ones get different draws: the seed of each follows from its place.
            start: as for ``submit``, of all answers.
            on_token: as for ``submit``; it gets the place of the prompt, too, before the token.
            stop: texts that end an answer, or one, by the tokenizer of the checkpoint. The tokens in which one ends are the last.
            sampling: as for ``submit``.
        Raises: UsageError, RefusedError, WorkerError: as ``submit``. StageError: of the first sequence that failed, after all.
        """
        settings, generations = sampling_of(sampling), list[Generation]()
        for number, prompt in enumerate(prompts):
            note = with_stops(self.texts, stop, on_token and partial(on_token, number))
            generations.append(new_generation(prompt, start, settings.of(number), self.capacity, note))
        try:
            self.submit_all(generations)
            for one in generations:
                one.future.exception()
        except BaseException:  # Ctrl-C, or the generator was closed
            for one in generations:
                one.future.cancel()
            raise
        return [one.future.result() for one in generations]

    @checked
    def stream(self, prompt: "Sequence[int] | torch.Tensor", *, stop: str | Sequence[str] = (), **options: Any) -> Iterator[int]:
        """The new tokens of a prompt, each as soon as it is there; ``stop`` as for ``generate``, all else as for ``submit``.

        The sequence runs at its own pace, read or not: unread tokens wait in a queue. Closing the iterator ends it.
        """
        tokens = SimpleQueue[int | None]()
        return self._stream(prompt, with_stops(self.texts, stop, tokens.put), tokens, options)

    @checked
    def stream_text(self, prompt: str, *, stop: str | Sequence[str] = (), **options: Any) -> Iterator[str]:
        """The text after a prompt, as it comes, by the tokenizer of the checkpoint, up to a token that ends its texts.

        Args:
            prompt: a text.
            stop: texts that end the answer; none of them stands in it.
            options: as for ``stream``.
        Raises: UsageError: there is no tokenizer at hand; others as ``stream``.
        """
        texts = required(self.texts)
        eos = (*texts.ends, *Sampling(eos=options.pop("eos", ())).ends)
        reader, pieces = texts.reader(stop), SimpleQueue[str | None]()

        def noted(token: int) -> bool:
            pieces.put(reader.add(token))
            return reader.is_stopped

        return reader.whole(self._stream(texts.ids(prompt), noted, pieces, {**options, "eos": eos}))

    def _stream(
        self,
        prompt: Sequence[int] | torch.Tensor,
        on_token: Callable[[int], object] | None,
        queue: SimpleQueue[Any],
        options: dict[str, Any],
    ) -> Iterator[Any]:
        """What ``on_token`` puts into the queue, until the sequence ends."""
        if "on_token" in options:
            raise UsageError("a stream gives its tokens one by one; leave out on_token, or call submit")
        future = self.submit(prompt, on_token=on_token, **options)
        future.add_done_callback(lambda _: queue.put(None))
        found = _read(queue, future)
        next(found)
        return found

    @property
    def pipeline(self) -> StepPipeline:
        """The first pipeline."""
        return self.pipelines[0]

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return self._turns.num_waiting

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return self._turns.num_running

    def stats(self, *, clear: bool = False) -> GenerationStats:
        """Times and tokens of the sequences that ended since the start, or since the last call with ``clear``."""
        return self._turns.stats(clear=clear)

    def close(self, *, drain: bool = True) -> None:
        """Finish the sequences that were taken in (``drain``) or fail them, then end every worker.

        Raises: UsageError: called in a callback of a future or of a token.
        """
        self._turns.close(drain=drain)
        atexit.unregister(self.close)
        self._opened.close()

    def __repr__(self) -> str:
        sizes = f"{self.capacity.max_sequences} sequences of {self.capacity.max_length} tokens"
        return f"Generator({sizes}, {self.num_running} running, {self.num_waiting} waiting)"


def _read(queue: SimpleQueue[Any], future: "Future[list[int]]") -> Iterator[Any]:
    """0 at once, then what is in the queue, up to None; then the error of the sequence, if it has one."""
    try:
        yield 0  # from here on the end of the iterator cancels the sequence, also before its first token
        while (one := queue.get()) is not None:
            yield one
    finally:
        future.cancel()
    future.result()
