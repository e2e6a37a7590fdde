"""A sequence, from its prompt to its last token, and the steps that compute it."""

import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from autosplit.compat.futures import SafeFuture
from autosplit.errors import DeadlineError, RefusedError, UsageError, raise_faults
from autosplit.generating.sampling import Sampling
from autosplit.generating.sources import Array, Source, id_faults, ids_of
from autosplit.running.request import MatchingTensors


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes of the caches of a model, and the ids that it knows: from 0 to ``vocabulary`` - 1.

    ``source`` is the kind of prompts of a model with an encoder. ``table`` has the rows of the ids, where steps take them.
    """

    max_sequences: int
    max_length: int
    vocabulary: int
    source: Source | None = None
    table: torch.Tensor | None = field(default=None, repr=False, compare=False)

    def num_before(self, num_prompt: int) -> int:
        """The tokens of a sequence before its new ones: its prompt, or the start of the answer if an encoder reads the prompt."""
        return num_prompt if self.source is None else self.source.num_start


@dataclass(eq=False, slots=True)
class Generation:
    """One sequence.

    Attributes:
        tokens: the prompt, or the start of the answer where the prompt is a source, and the new tokens after it.
        num_prompt: the first of them, which are not new.
        sampling: how its next tokens are chosen, and when it ends.
        priority: lower is sooner.
        deadline_ns: monotonic nanoseconds after which it gets no further token; 0 for no deadline.
        on_token: called with each new token; it must return at once, and returns True to end the sequence.
        source: the prompt of the encoder, for the sequence's first step; None without an encoder.
        forced: tokens that follow the first one that is computed, a language, before the new ones; empty where none is detected.
        future: gets the new tokens, or the reason why there are none.
        slot: its place in the caches; 0 while it waits for one.
        sent: tokens that stand in steps; ``done`` of them are in the caches for certain.
        num_under_way: steps that hold tokens of it.
        is_suspect: a step with tokens of it failed, so its next step holds no others.
        is_ended: ``on_token`` ended it.
        failure: why it ends before its last token.
        last_step: number of the last step that it stood in.
        came_ns, first_ns, last_ns: times of its arrival, first and last new token, in monotonic nanoseconds.
    """

    tokens: list[int]
    num_prompt: int
    sampling: Sampling
    priority: int = 0
    deadline_ns: int = 0
    on_token: Callable[[int], object] | None = None
    source: Array | None = None
    forced: tuple[int, ...] = ()
    future: "Future[list[int]]" = field(default_factory=SafeFuture)
    slot: int = 0
    sent: int = 0
    done: int = 0
    num_under_way: int = 0
    is_suspect: bool = False
    is_ended: bool = False
    failure: BaseException | None = None
    last_step: int = 0
    came_ns: int = field(default_factory=time.monotonic_ns)
    first_ns: int = 0
    last_ns: int = 0

    @property
    def new_tokens(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.num_prompt :]

    @property
    def is_decoding(self) -> bool:
        """Whether the caches hold all of its tokens but the last, and its source: its next step takes one token."""
        return len(self.tokens) - self.done == 1 and (self.source is None or self.done > 0)

    @property
    def is_ready(self) -> bool:
        """Whether a step may take tokens of it."""
        return self.sent < len(self.tokens) and self.failure is None and not (self.is_suspect and self.num_under_way)

    @property
    def is_complete(self) -> bool:
        """Whether it has its last token."""
        num_new = len(self.tokens) - self.num_prompt
        return num_new > 0 and (self.is_ended or num_new >= self.sampling.max_new_tokens or self.tokens[-1] in self.sampling.ends)

    def has_failed(self, now_ns: int) -> bool:
        """Whether it ends before its last token, also because it was cancelled or its deadline has passed."""
        if self.future.cancelled():
            self.failure = self.failure or RefusedError("the sequence was cancelled")
        elif 0 < self.deadline_ns <= now_ns:
            late = DeadlineError(f"the sequence's deadline passed after {len(self.new_tokens)} new tokens")
            self.failure = self.failure or late
        return self.failure is not None

    def append(self, token: int) -> None:
        """Take a new token, or the language."""
        self.tokens.append(token)
        if self.forced:
            self.tokens += self.forced
            self.num_prompt, self.forced = len(self.tokens), ()
            return
        self.last_ns = time.monotonic_ns()
        self.first_ns = self.first_ns or self.last_ns
        if self.on_token is not None:
            self.is_ended = self.on_token(token) is True

    def resolve(self) -> None:
        """Give the future its result, once the sequence has ended."""
        with suppress(InvalidStateError):  # it was cancelled
            if self.failure is None:
                self.future.set_result(self.new_tokens)
            else:
                self.future.set_exception(self.failure)


class Part(NamedTuple):
    """Tokens of a sequence in a step, from ``start`` to ``end``; with the last token of all the step gives the next one."""

    generation: Generation
    start: int
    end: int
    gives_next: bool

    @property
    def num_rows(self) -> int:
        """The rows of its source, which stands beside the first token of the sequence."""
        return len(self.generation.source) if self.generation.source is not None and self.start == 0 else 0


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One step: parts of sequences, in the variant of a number of tokens, of which ``num_rows`` are rows of sources.

    ``is_retry``: its one sequence is a suspect, which ends if this step fails too.
    """

    parts: tuple[Part, ...]
    variant: int
    num_tokens: int
    source: Source | None = None
    num_rows: int = 0
    is_retry: bool = False

    def inputs(self, table: torch.Tensor | None = None) -> MatchingTensors:
        """The tensors ``ids``, ``slots``, ``positions`` [N] and ``sampling`` [N, 5]; further ones of a model with an encoder.

        The tokens that give a next one stand first, in the order of their parts. Zeros fill the rest: slot 0 has no owner.
        ``table``: that of the capacity, whose rows of the ids come last.
        """
        count, sampling = self.num_tokens - self.num_rows, _zeros(self.num_tokens - self.num_rows)
        giving = [(one, end - 1) for one, _, end, gives_next in self.parts if gives_next]
        rows = [(one.tokens[at], one.slot, at) for one, at in giving]
        for one, start, end, gives_next in self.parts:
            if end - start > gives_next:
                rows += [(one.tokens[at], one.slot, at) for at in range(start, end - gives_next)]
        padding = [0] * (count - len(rows))
        columns = [array("q", [*column, *padding]) for column in zip(*rows, strict=True)]
        if not all(one.forced or one.sampling.takes_largest for one, _ in giving):
            sampling = sampling.clone()
            chosen = [[0.0] * 5 if one.forced else one.sampling.row for one, _ in giving]
            sampling[: len(giving)] = torch.tensor(chosen, dtype=torch.float64)
        sources = () if self.source is None else map(torch.from_numpy, self._sources(self.source, columns[1]))
        # beside stages whose data fill the caches, numpy takes twice as long for a few numbers, and torch.tensor longer still
        ids, *others = [torch.frombuffer(column, dtype=torch.int64) for column in columns]
        embedded = () if table is None else (table.index_select(0, ids),)
        return MatchingTensors((ids, *others, sampling, *sources, *embedded))

    def _sources(self, source: Source, slots: Sequence[int]) -> tuple[Array, ...]:
        """The inputs ``seen`` [N], ``source``, ``source_slots``, ``source_positions`` (see ``encoders``); or a row of slot 0."""
        owners = [(part.generation.slot, part.generation.source) for part in self.parts]
        num_seen = {slot: len(rows) for slot, rows in owners if rows is not None}
        values, places = source.empty(self.num_rows or 1), np.zeros((2, self.num_rows or 1), np.int64)
        at = 0
        for part in self.parts:
            if part.num_rows and part.generation.source is not None:
                end = at + part.num_rows
                values[at:end] = part.generation.source
                places[0, at:end], places[1, at:end] = part.generation.slot, np.arange(part.num_rows)
                at = end
        return np.array([num_seen.get(slot, 1) for slot in slots]), values, *places


@cache
def _zeros(count: int) -> torch.Tensor:
    """The input ``sampling`` [count, 5] of tokens with the largest logits, which nobody writes to."""
    return torch.zeros(count, 5, dtype=torch.float64)


def new_generation(
    prompt: Sequence[int] | torch.Tensor,
    start: Sequence[int] | None,
    sampling: Sampling,
    capacity: Capacity,
    on_token: Callable[[int], object] | None = None,
    priority: int = 0,
    deadline_ns: int = 0,
) -> Generation:
    """A sequence before its first step; for a model with an encoder with the rows of its source.

    Args:
        prompt: ids of the first tokens, or a source (see ``Source.rows``).
        start: ids with which an answer to a source begins; None for those of the model.
        sampling: of the sequence.
        capacity: of the caches.
        on_token: as for ``Generation``.
        priority: lower is sooner.
        deadline_ns: monotonic nanoseconds after which it gets no further token; 0 for no deadline.
    Raises: UsageError: with every fault.
    """
    source = capacity.source
    if source is None:
        if start is not None:
            raise UsageError("the model has no encoder, so its answers begin with the prompt; leave out start")
        ids = _first_ids(ids_of(prompt), sampling, capacity)
        return Generation(ids, len(ids), sampling, priority, deadline_ns, on_token)
    wanted = source.start if start is None else ids_of(start)
    if len(wanted) != source.num_start and (start is None or not source.is_text):
        raise UsageError(
            f"an answer of the model begins with {source.num_start} tokens, and {len(wanted)} are given; give start=[...]: of a "
            "sound its beginning, the language and the task where the model has these, and the token for no timestamps"
        )
    rows, ids = source.rows(prompt), [0 if token is None else token for token in wanted]
    num_known = next((place for place, token in enumerate(wanted) if token is None), len(ids))
    first, forced = _first_ids(ids, sampling, capacity)[:num_known], tuple(ids[num_known + 1 :])
    return Generation(first, len(first), sampling, priority, deadline_ns, on_token, rows, forced)


def _first_ids(ids: list[int], sampling: Sampling, capacity: Capacity) -> list[int]:
    """The ids. Raises: UsageError: with every fault."""
    limit, faults = capacity.max_length, id_faults(ids, capacity.vocabulary)
    if len(ids) > limit:
        faults.append(
            f"it has {len(ids)} tokens, and the caches hold {limit}; open with max_length={len(ids)} or more (--generate "
            f"max_length={len(ids)})"
        )
    elif ids and len(ids) + sampling.max_new_tokens - 1 > limit:
        faults.append(
            f"it has {len(ids)} tokens, so max_length {limit} leaves room for {limit - len(ids) + 1} new ones, and "
            f"max_new_tokens is {sampling.max_new_tokens}; ask for fewer, or open with a larger max_length"
        )
    what = "prompt" if capacity.source is None else "start of the answer"
    raise_faults(UsageError, f"the {what} cannot be taken", faults)
    return ids
