"""How the next token of a sequence is chosen: settings for each sequence, and the operator that ends a step.

The last stage samples, so that token ids travel back to the host and logits do not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import torch

from autosplit.arguments import checked
from autosplit.backends.readrows import num_read
from autosplit.errors import BRIEF, UsageError, raise_faults
from autosplit.tracing.programs import CHOOSES, PREPARED

MAX_SEED = 2**53
"""Seeds travel as float64, which holds every whole number below this one."""


@checked
@dataclass(frozen=True)
class Sampling:
    """How the next tokens of a sequence are chosen, and when it ends.

    Attributes:
        max_new_tokens: tokens after which it ends.
        eos: id of the token that ends it, or several; such a token is the last of the answer.
        temperature: logits are divided by it before a draw; 0 takes the token with the largest logit.
        top_p: draw from the fewest tokens whose probabilities sum to this; 1 keeps all.
        top_k: draw from this many tokens with the largest logits; 0 keeps all.
        seed: with the position it decides each draw, independent of the sequences beside it.
        repetition_penalty: logits of tokens in the sequence are divided by it if positive, else multiplied (Keskar et al., CTRL,
            2019); 1 changes nothing.

    >>> Sampling(top_p=0.0, max_new_tokens=0)
    Traceback (most recent call last):
        ...
    autosplit.errors.UsageError: the sampling is not understood (2 faults):
      * max_new_tokens must be at least 1, but is 0
      * top_p must be above 0 and at most 1, but is 0.0
    """

    max_new_tokens: int = 64
    eos: int | Sequence[int] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        within = [
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("eos", all(isinstance(token, Integral) and token >= 0 for token in self.ends), "token ids"),
            ("temperature", 0 <= self.temperature < math.inf, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("seed", 0 <= self.seed < MAX_SEED, f"at least 0 and below {MAX_SEED}"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
        ]
        faults = [f"{name} must be {limit}, but is {BRIEF.repr(getattr(self, name))}" for name, fits, limit in within if not fits]
        raise_faults(UsageError, "the sampling is not understood", faults)

    def of(self, number: int) -> "Sampling":
        """The sampling of a sequence of a call with several: equal prompts get different draws."""
        return replace(self, seed=self.seed if number == 0 else _hash(self.seed, -number) % MAX_SEED)

    @cached_property
    def ends(self) -> Sequence[int]:
        """``eos`` as a sequence."""
        return self.eos if isinstance(self.eos, Sequence) else (self.eos,)

    @cached_property
    def takes_largest(self) -> bool:
        """Whether the next token is the one with the largest logit, as the operator takes it for a row of zeros, too."""
        return self.temperature == 0 and self.repetition_penalty == 1

    @cached_property
    def row(self) -> list[float]:
        """The five numbers that the operator reads for a token of the sequence."""
        return [self.temperature, self.top_p, float(self.top_k), float(self.seed), self.repetition_penalty]


def sampling_of(options: dict[str, Any]) -> Sampling:
    """The sampling of a call. Raises: UsageError: an option is unknown, or its value is not understood."""
    known = Sampling.__dataclass_fields__
    faults = [f"there is no option '{name}'; there are {', '.join(known)}" for name in options if name not in known]
    raise_faults(UsageError, "the sampling is not understood", faults)
    return Sampling(**options)


def _prepared(
    logits: torch.Tensor,
    state_history: torch.Tensor,
    ids: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sampling: torch.Tensor,
    empty: Callable[..., torch.Tensor] = torch.empty,
) -> tuple[torch.Tensor, Callable[[], object]]:
    """The memory of the next tokens of the first rows of a step, and a function that chooses them.

    The operator writes to its state, which no other operator reads, and a repeated call writes the same values. So its schema
    declares no mutation, which torch would turn into copies of the whole state.

    Args:
        logits: of the first R of N tokens, [R, vocabulary].
        state_history: int64 [slots, max_length], the ids at each position; those of this step are written first.
        ids: int64 [N].
        slots: int64 [N].
        positions: int64 [N]; a token at ``max_length`` or beyond is not written.
        sampling: float64 [N, 5], ``Sampling.row`` of each token; zeros, as in padding, take the largest logit.
        empty: makes the memory.
    Returns: int64 [R]; -1 in a row with a logit that is not a number, with infinity, or without any finite logit. Rows from
        ``num_read`` on give no next token, and get 0.
    """
    found, is_bf16 = empty((len(logits),), dtype=torch.int64), logits.dtype == torch.bfloat16
    # numpy takes a tenth of the time of torch for the largest of a row, and lists are faster still for a few numbers
    history, id_of, slot_of, place_of, settings, tokens = (
        one.numpy() for one in (state_history, ids, slots, positions, sampling, found)
    )
    scores = None if is_bf16 else logits.detach().numpy()

    def run() -> None:
        its_slots, places = slot_of.tolist(), place_of.tolist()
        for token, slot, place in zip(id_of.tolist(), its_slots, places, strict=True):
            if place < history.shape[1]:
                history[slot, place] = token
        count = num_read(its_slots[: len(tokens)])
        wide = logits[:count].detach().float().numpy() if scores is None else scores[:count]
        best = wide.argmax(1).tolist()  # of a row with NaN its place
        tokens[:count] = [token if math.isfinite(wide[row, token]) else -1 for row, token in enumerate(best)]
        tokens[count:] = 0
        if settings[:count].any():
            _choose(logits, state_history, its_slots, places, settings[:count].tolist(), tokens)

    return found, run


def _choose(
    logits: torch.Tensor,
    history: torch.Tensor,
    slots: Sequence[int],
    positions: Sequence[int],
    settings: Sequence[Sequence[float]],
    tokens: "np.ndarray[Any, Any]",
) -> None:
    """Choose the tokens of rows that do not take the largest logit; rows that are not finite keep -1."""
    for row, (temperature, top_p, top_k, seed, penalty) in enumerate(settings):
        if tokens[row] < 0 or (temperature == 0 and penalty in (0, 1)):
            continue
        scores = logits[row].double()
        if penalty != 1:
            past = history[slots[row], : positions[row] + 1]
            known = scores[past]
            scores[past] = torch.where(known < 0, known * penalty, known / penalty)
        if temperature == 0:
            tokens[row] = scores.argmax()
        else:
            scores = (scores - scores.max()) / temperature  # which is finite for the largest one at any temperature
            tokens[row] = _drawn(scores, top_p, int(top_k), _uniform(int(seed), positions[row]))


def _sample(logits: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The operator."""
    found, run = PREPARED[SAMPLE](logits, *others)
    run()
    return found


def _shaped(logits: torch.Tensor, state_history: torch.Tensor, ids: torch.Tensor, *_: Any) -> torch.Tensor:
    """An empty answer of the operator."""
    return ids.new_empty(logits.shape[0])


_library: Any = torch.library  # its functions have no types
_operators = _library.Library("autosplit", "FRAGMENT")
_operators.define(
    "sample(Tensor logits, Tensor state_history, Tensor ids, Tensor slots, Tensor positions, Tensor sampling) -> Tensor"
)
_operators.impl("sample", _sample, "CPU")
_library.register_fake("autosplit::sample", _shaped, lib=_operators)
SAMPLE = torch.ops.autosplit.sample.default
PREPARED[SAMPLE] = _prepared
CHOOSES.add(SAMPLE)


def _drawn(scores: torch.Tensor, top_p: float, top_k: int, uniform: float) -> torch.Tensor:
    """A token of one row of logits, by a number from 0 to 1.

    Probabilities are summed in the order of the ids: in the order of their sizes, two that differ by a rounding error alone would
    change places with the shape of a step, and the draw would find the other one.
    """
    if 0 < top_k < len(scores):
        least = scores.topk(top_k).values[-1]
        scores = scores.masked_fill(scores < least, -math.inf)
    chances = scores.softmax(0)
    if top_p < 1:
        ordered, order = chances.sort(descending=True, stable=True)
        chances[order[ordered.cumsum(0) - ordered >= top_p]] = 0
    sums = chances.cumsum(0)
    return torch.searchsorted(sums, sums[-1:] * uniform, right=True).clamp_(max=int(chances.nonzero()[-1]))


def _hash(seed: int, counter: int) -> int:
    """64 bits of two whole numbers (splitmix64: Steele, Lea, Flood, OOPSLA 2014)."""
    bits = seed
    for number in (0, counter):
        bits = (bits + number + 0x9E3779B97F4A7C15) % 2**64
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        bits ^= bits >> 31
    return bits


def _uniform(seed: int, position: int) -> float:
    """A number from 0 to 1, without 1, for the draw after a position."""
    return (_hash(seed, position) >> 11) * 2.0**-53
