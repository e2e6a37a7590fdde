"""Times of the sequences of a generator: to their first and further tokens, and tokens per second."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autosplit.generating.sequences import Generation
from autosplit.reports.results import LatencyStats
from autosplit.running.request import NUM_TIMES
from autosplit.tables import seconds_text


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Sequences since the start, or since ``stats(clear=True)``.

    Attributes:
        num_sequences: sequences that ended with their last token; ``num_failed`` ended otherwise.
        num_tokens: new tokens of both.
        elapsed_s: seconds that this took, idle ones included.
        first_token: seconds from ``submit`` to the first new token.
        per_token: seconds from one new token of a sequence to its next one: the mean of each sequence with at least two.
        num_steps: steps that ran; ``num_step_tokens`` tokens stood in them, and ``num_padding`` zeros.
    """

    num_sequences: int
    num_failed: int
    num_tokens: int
    elapsed_s: float
    first_token: LatencyStats
    per_token: LatencyStats
    num_steps: int
    num_step_tokens: int
    num_padding: int

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of all sequences together."""
        return self.num_tokens / self.elapsed_s if self.elapsed_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s}

    def summary(self) -> str:
        """Tokens, their rate, and both latencies, in words."""
        first, each = seconds_text(self.first_token.p50_s), seconds_text(self.per_token.p50_s)
        rate = f"{self.num_tokens} tokens at {self.tokens_per_s:.1f}/s"
        return f"{self.num_sequences} sequences, {rate}; median to the first token {first}, to each further one {each}"


class Tally:
    """Counts sequences that have ended. Not for several threads at once.

    Args:
        counts: the counters of the schedulers; cleared with the rest.
    """

    def __init__(self, counts: Sequence[Counter[str]]) -> None:
        self._ended = Counter[str]()
        self._counts = (self._ended, *counts)
        self._first_s, self._per_token_s = deque[float](maxlen=NUM_TIMES), deque[float](maxlen=NUM_TIMES)
        self._since_s = time.monotonic()

    def add(self, generation: Generation) -> None:
        """Count a sequence that has ended."""
        num_new = len(generation.new_tokens)
        self._ended.update(ended=1, failed=generation.failure is not None, tokens=num_new)
        if num_new:
            self._first_s.append((generation.first_ns - generation.came_ns) / 1e9)
        if num_new > 1:
            self._per_token_s.append((generation.last_ns - generation.first_ns) / 1e9 / (num_new - 1))

    def stats(self, *, clear: bool) -> GenerationStats:
        """The counts since the start, or since the last call with ``clear``."""
        counts = sum(self._counts, Counter[str]())
        found = GenerationStats(
            counts["ended"] - counts["failed"],
            counts["failed"],
            counts["tokens"],
            time.monotonic() - self._since_s,
            LatencyStats.of(list(self._first_s)),
            LatencyStats.of(list(self._per_token_s)),
            counts["steps"],
            counts["prompt"] + counts["new"],
            counts["padding"],
        )
        if clear:
            for counted in self._counts:
                counted.clear()
            self._first_s.clear()
            self._per_token_s.clear()
            self._since_s = time.monotonic()
        return found
