"""Times of the sequences of a generator: to their first and further tokens, and tokens per second."""

import time
from collections import Counter, deque
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
        counts: the counters of the scheduler; cleared with the rest.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self._counts, self._first_s, self._per_token_s = counts, deque[float](maxlen=NUM_TIMES), deque[float](maxlen=NUM_TIMES)
        self._clear()

    def add(self, generation: Generation) -> None:
        """Count a sequence that has ended."""
        num_new = len(generation.new_tokens)
        self._counts.update(ended=1, failed=generation.failure is not None, tokens=num_new)
        if num_new:
            self._first_s.append((generation.first_ns - generation.came_ns) / 1e9)
        if num_new > 1:
            self._per_token_s.append((generation.last_ns - generation.first_ns) / 1e9 / (num_new - 1))

    def stats(self, *others: "Tally", clear: bool) -> GenerationStats:
        """The counts of this tally and others since the start, or since the last call with ``clear``."""
        tallies, counts = (self, *others), Counter[str]()
        for tally in tallies:
            counts.update(tally._counts)
        found = GenerationStats(
            counts["ended"] - counts["failed"],
            counts["failed"],
            counts["tokens"],
            time.monotonic() - self._since_s,
            LatencyStats.of([seconds for tally in tallies for seconds in tally._first_s]),
            LatencyStats.of([seconds for tally in tallies for seconds in tally._per_token_s]),
            counts["steps"],
            counts["prompt"] + counts["new"],
            counts["padding"],
        )
        for tally in tallies if clear else ():
            tally._clear()
        return found

    def _clear(self) -> None:
        for kept in (self._counts, self._first_s, self._per_token_s):
            kept.clear()
        self._since_s = time.monotonic()
