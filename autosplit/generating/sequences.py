"""A sequence, from its prompt to its last token, and the steps that compute it."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from autosplit.compat.futures import SafeFuture
from autosplit.errors import UsageError, raise_faults
from autosplit.generating.sampling import Sampling
from autosplit.running.request import MatchingTensors


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the caches of a model hold, and which ids it knows: from 0 to ``vocabulary`` - 1."""

    max_sequences: int
    max_length: int
    vocabulary: int


@dataclass(eq=False, slots=True)
class Generation:
    """One sequence.

    Attributes:
        tokens: the prompt, and the new tokens after it.
        num_prompt: tokens of the prompt.
        sampling: how it goes on, and when it ends.
        priority: lower is sooner.
        deadline_ns: monotonic nanoseconds after which it gets no further token; 0 for no deadline.
        on_token: called with each new token; it must return at once.
        future: gets the new tokens, or the reason why there are none.
        slot: its place in the caches; 0 while it waits for one.
        sent: tokens that stand in steps; ``done`` of them are in the caches for certain.
        num_under_way: steps that hold tokens of it.
        is_suspect: a step failed that held tokens of it and of others, so its next step holds no others.
        failure: why it ends before its last token.
        last_step: number of the last step that it stood in.
        came_ns, first_ns, last_ns: times of its arrival, first and last new token, in monotonic nanoseconds.
    """

    tokens: list[int]
    num_prompt: int
    sampling: Sampling
    priority: int = 0
    deadline_ns: int = 0
    on_token: Callable[[int], None] | None = None
    future: "Future[list[int]]" = field(default_factory=SafeFuture)
    slot: int = 0
    sent: int = 0
    done: int = 0
    num_under_way: int = 0
    is_suspect: bool = False
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
        """Whether the caches hold all of its tokens but the last: its next step takes one token."""
        return len(self.tokens) - self.done == 1

    @property
    def is_ready(self) -> bool:
        """Whether a step may take tokens of it."""
        return self.sent < len(self.tokens) and self.failure is None and not (self.is_suspect and self.num_under_way)

    @property
    def is_complete(self) -> bool:
        """Whether it has its last token."""
        num_new = len(self.tokens) - self.num_prompt
        return num_new > 0 and (num_new >= self.sampling.max_new_tokens or self.tokens[-1] in self.sampling.ends)

    def append(self, token: int) -> None:
        """Take a new token."""
        self.tokens.append(token)
        self.last_ns = time.monotonic_ns()
        self.first_ns = self.first_ns or self.last_ns
        if self.on_token is not None:
            self.on_token(token)


class Part(NamedTuple):
    """Tokens of a sequence in a step, from ``start`` to ``end``; with the last token of all the step gives the next one."""

    generation: Generation
    start: int
    end: int
    gives_next: bool


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """What runs at once: parts of sequences, in the variant of a number of tokens."""

    parts: tuple[Part, ...]
    variant: int
    num_tokens: int

    def inputs(self) -> MatchingTensors:
        """The tensors ``ids``, ``slots``, ``positions`` [num_tokens] and ``sampling`` [num_tokens, 5].

        The tokens that give a next one stand first, in the order of their parts. Zeros fill the rest: slot 0 has no owner.
        """
        giving = [(part, part.end - 1, part.end) for part in self.parts if part.gives_next]
        spans = [*giving, *((part, part.start, part.end - part.gives_next) for part in self.parts)]
        # torch takes four times as long
        rows, sampling = np.zeros((3, self.num_tokens), np.int64), np.zeros((self.num_tokens, 5))
        columns = [
            (part.generation.tokens[at], part.generation.slot, at) for part, start, end in spans for at in range(start, end)
        ]
        rows[:, : len(columns)] = np.array(columns).T
        if giving:
            sampling[: len(giving)] = [part.generation.sampling.row for part, _, _ in giving]
        return MatchingTensors(map(torch.from_numpy, (*rows, sampling)))


def num_giving(parts: Sequence[Part]) -> int:
    """The number of next tokens of a step."""
    return sum(part.gives_next for part in parts)


def token_ids(prompt: Sequence[int] | torch.Tensor, sampling: Sampling, capacity: Capacity) -> list[int]:
    """The ids of a prompt, a list, a tensor or an array. Raises: UsageError: with every fault."""
    if isinstance(prompt, torch.Tensor | np.ndarray):
        prompt = torch.as_tensor(prompt)
        if prompt.dim() != 1 or prompt.is_floating_point():
            raise UsageError(f"a prompt is ids [N], but is {prompt.dtype} {list(prompt.shape)}; give one prompt at a time")
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        raise UsageError(f"a prompt is ids, but is {prompt!r:.40}; give a list of integers, or a tensor of one dimension")
    limit, vocabulary = capacity.max_length, capacity.vocabulary
    strange = [token for token in prompt if not isinstance(token, int) or not 0 <= token < vocabulary]
    faults = []
    if not prompt:
        faults.append("it is empty; give at least one token, such as the one that begins a text")
    if len(prompt) > limit:
        faults.append(f"it has {len(prompt)} tokens, and the caches hold {limit}; open with max_length={len(prompt)} or more")
    elif len(prompt) + sampling.max_new_tokens - 1 > limit:
        faults.append(
            f"it has {len(prompt)} tokens, so max_length {limit} leaves room for {limit - len(prompt) + 1} new ones, and "
            f"max_new_tokens is {sampling.max_new_tokens}; ask for fewer, or open with a larger max_length"
        )
    if strange:
        faults.append(f"{strange[0]!r:.40} is no token id; ids are 0 to {vocabulary - 1} ({len(strange)} such tokens)")
    raise_faults(UsageError, "the prompt cannot be taken", faults)
    return list(prompt)
