"""Outcome: how one plan ran; Ratio: how many times as good as another one, with its interval. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb, nan
from statistics import median

from autosplit.reports.results import LatencyStats, RunStats
from autosplit.values.plan import Plan
from autosplit.values.timeline import Action

PLAN = "plan"
"""The name of the plan among its baselines."""

CONFIDENCE = 0.9
"""Least probability with which the interval of a ratio holds the true median, if there are rounds enough for it."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as good one plan is as another: the median over rounds, and an interval that holds it.

    The interval holds the true median with a probability of at least 75 % from 3 rounds on, 93 % from 5 on. It is made of
    order statistics, which assume nothing about the noise (the interval of the sign test).
    """

    median: float
    low: float
    high: float
    num_rounds: int

    @staticmethod
    def of(ratios: Sequence[float]) -> "Ratio":
        """The median and its interval.

        >>> Ratio.of([1.2, 1.1, 1.3])
        Ratio(median=1.2, low=1.1, high=1.3, num_rounds=3)
        """
        ordered = sorted(ratios)
        outside = 0  # how many ratios may lie outside the interval at each end
        while 1 - 2 * _tail(outside + 1, len(ordered)) >= CONFIDENCE:
            outside += 1
        return Ratio(median(ordered), ordered[outside], ordered[-1 - outside], len(ordered))

    @property
    def ahead(self) -> bool:
        """Whether the first plan is better beyond the noise; False after a single round."""
        return self.num_rounds > 1 and self.low > 1

    @property
    def clear(self) -> bool:
        """Whether the first plan is ahead by more than the spread of the ratios, in at least three rounds."""
        return self.num_rounds > 2 and self.low > 1 and self.median - 1 > self.high - self.low

    def __str__(self) -> str:
        rounds = "1 round" if self.num_rounds == 1 else f"{self.num_rounds} rounds"
        return f"{self.low:.2f} to {self.high:.2f} in {rounds}" if self.num_rounds > 1 else rounds


def _tail(count: int, num_rounds: int) -> float:
    """The probability that at most ``count`` of the rounds are below the median."""
    return float(sum(comb(num_rounds, k) for k in range(count + 1)) / 2**num_rounds)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests per second, and their latency, with so many requests in flight."""

    in_flight: int
    per_s: float
    latency: LatencyStats


def mean_times_s(times_s: Sequence[Sequence[float]]) -> list[float]:
    """The mean seconds from one new token of each sequence to its next one, where it has several.

    >>> mean_times_s([[1.0, 2.0, 4.0], [3.0]])
    [1.5]
    """
    return [(times[-1] - times[0]) / (len(times) - 1) for times in times_s if len(times) > 1]


@dataclass(frozen=True, slots=True)
class TokenRates:
    """Token rates of a generator with sequences that come at once.

    Attributes:
        tokens_per_s: new tokens of all sequences together.
        first_token_s: median seconds to the first new token of a sequence, others before it included.
        per_token_s: median seconds from one new token of a sequence to its next one: the mean of each sequence.
    """

    tokens_per_s: float
    first_token_s: float
    per_token_s: float

    @staticmethod
    def of(times_s: Sequence[Sequence[float]], elapsed_s: float) -> "TokenRates":
        """The rates from the seconds at which each sequence got each new token, counted from the arrival of all sequences.

        >>> TokenRates.of([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]], 4.0)
        TokenRates(tokens_per_s=1.5, first_token_s=1.5, per_token_s=1.0)
        """
        each = mean_times_s(times_s)
        first_s = median(times[0] for times in times_s)
        return TokenRates(sum(map(len, times_s)) / elapsed_s, first_s, median(each) if each else nan)

    @staticmethod
    def middle(rounds: "Sequence[TokenRates]") -> "TokenRates":
        """The median of each figure over rounds."""
        return TokenRates(*(median(getattr(one, name) for one in rounds) for name in TokenRates.__slots__))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one plan ran.

    Attributes:
        rounds_per_s: items per second in each round, all requests in flight that the rings hold; a plan that is far behind
            stops after a few rounds, and the fastest one and its rivals may run some more.
        alone_s: median seconds of a request alone in the pipeline, in rounds of their own that interleave likewise. Of a
            generator: median seconds from one token of a sequence to its next one, in the same rounds.
        latency: seconds of all requests that ran alone; of a generator, those from one token to the next.
        loaded_latency: seconds of a request in the full pipeline, from its first stage to its answer.
        outputs_equal: equal bit for bit if every stage is exact, else within the tolerance of its backends.
        max_abs_error: largest difference from the unsplit model: its bits if every stage is exact, else its values in f32.
        max_relative_error: the largest difference divided by the largest value of its output.
        stats: each worker's times in the rounds.
        actions: the work on each request in the last round.
        fault: which numbers are wrong, and in which backend; empty if the outputs are equal.
        in_flight: requests in flight in the full rounds, from one thread; 0 where it is not known.
        loads: the curve of throughput and latency, for requests of several sizes.
        token_rates: of a generator, whose items are tokens; ``predicted_token_rates``: the forecast of them.
    """

    plan: Plan
    rounds_per_s: tuple[float, ...]
    alone_s: tuple[float, ...]
    latency: LatencyStats
    loaded_latency: LatencyStats
    outputs_equal: bool
    max_abs_error: float
    max_relative_error: float
    stats: RunStats
    actions: tuple[Action, ...] = field(default=(), repr=False)
    fault: str = ""
    in_flight: int = 0
    loads: tuple[Load, ...] = ()
    token_rates: TokenRates | None = None
    predicted_token_rates: TokenRates | None = None

    @property
    def throughput_per_s(self) -> float:
        """Median over the rounds, in items per second."""
        return median(self.rounds_per_s)

    @property
    def spread(self) -> float:
        """Largest less smallest round over the median."""
        return _spread(self.rounds_per_s)

    def figures(self, objective: str) -> dict[str, float]:
        """Measured beside predicted, for a table; the figure that the objective asks for comes first."""
        if self.token_rates is not None:
            return self._token_figures(self.token_rates, objective)
        predicted = self.plan.prediction
        rate = {"items_per_s": self.throughput_per_s}
        alone = {"latency_s": self.latency.p50_s}
        if objective == "latency":
            return {**alone, "spread": _shown_spread(self.alone_s), "predicted_s": predicted.latency_s or nan, **rate}
        return {**rate, "spread": _shown_spread(self.rounds_per_s), "predicted_per_s": predicted.throughput_per_s or nan, **alone}

    def _token_figures(self, rates: TokenRates, objective: str) -> dict[str, float]:
        """Measured beside predicted, of a generator."""
        told = self.predicted_token_rates or TokenRates(nan, nan, nan)
        rate = {"tokens_per_s": self.throughput_per_s, "predicted_tokens_per_s": told.tokens_per_s}
        first = {"first_token_s": rates.first_token_s, "predicted_first_token_s": told.first_token_s}
        each = {"per_token_s": rates.per_token_s, "predicted_per_token_s": told.per_token_s}
        if objective == "latency":
            return {**each, "spread": _shown_spread(self.alone_s), **rate, **first}
        return {**rate, **first, **each, "spread": _shown_spread(self.rounds_per_s)}

    def against(self, other: "Outcome", objective: str) -> "Ratio":
        """How many times as good this plan is as the other one, round by round, so that drift of the machine cancels.

        Only rounds that both ran count.
        """
        mine, theirs = (other.alone_s, self.alone_s) if objective == "latency" else (self.rounds_per_s, other.rounds_per_s)
        return Ratio.of([a / b for a, b in zip(mine, theirs, strict=False)])


def _spread(rounds: Sequence[float]) -> float:
    return (max(rounds) - min(rounds)) / median(rounds)


def _shown_spread(rounds: Sequence[float]) -> float:
    """One round tells nothing about the spread: a plan that stopped after it must not look like the steadiest one."""
    return _spread(rounds) if len(rounds) > 1 else nan
