"""Rounds: the interleaved rounds of a report, by successive halving (Karnin, Koren and Somekh, 2013)."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from autosplit.deploying.setup import ROUND_S
from autosplit.deploying.sidebyside import SideBySide
from autosplit.progress import Progress
from autosplit.reports.judging import leader, still_running
from autosplit.reports.outcomes import PLAN, Outcome

NUM_BESIDE = 3
"""Rounds for the figure that the objective does not ask for: latency where it is throughput, throughput where it is latency."""

ALONE_S = 0.2
"""Most seconds of a round of requests alone, where the objective is throughput."""

Run = Callable[[Sequence[str], int], None]


@dataclass(frozen=True)
class Rounds:
    """The rounds of a report. The figure that the objective asks for decides which plans run on; the other is taken of all plans.

    Attributes:
        keep: plans that run in all rounds however slow they are.
        barred: baselines that must not be chosen.
        decide: whether the fastest plans run more rounds, in the time of the plans that stopped early.
        round_s: seconds that the plan runs in a round, where no number of requests is asked for.
        until_s: the monotonic time after which two rounds are enough.
    """

    bench: SideBySide
    objective: str
    keep: Collection[str]
    barred: Collection[str]
    decide: bool
    progress: Progress
    round_s: float = ROUND_S
    until_s: float = math.inf

    def run(self, num_rounds: int, num_items: int | None) -> dict[str, Outcome]:
        """Full rounds first, then rounds of requests alone, so that the workers' times are from full rounds only.

        ``num_items``: items that the plan takes in all full rounds.
        """
        bench, few = self.bench, min(NUM_BESIDE, num_rounds)
        if self.objective == "latency":
            take_full, num_full, full_s = self._beside, few, self.round_s / 2
            take_alone, num_alone, alone_s = self.halve, num_rounds, self.round_s / 2
        else:
            take_full, num_full, full_s = self.halve, num_rounds, self.round_s
            take_alone, num_alone, alone_s = self._beside, few, min(ALONE_S, self.round_s / 2)
        items = round(full_s * bench.loaded[PLAN].pace_per_s) if num_items is None else num_items // num_full
        take_full(lambda running, number: bench.run_round(running, number, items), num_full)
        outcomes = {name: entry.outcome() for name, entry in bench.loaded.items()}
        take_alone(lambda running, number: bench.run_alone(running, number, alone_s), num_alone)
        told = bench.loaded
        return {name: replace(one, latency=told[name].latency, alone_s=told[name].alone_s) for name, one in outcomes.items()}

    def _beside(self, run: Run, num_rounds: int) -> None:
        """Run all plans in the rounds that the objective does not ask for."""
        share, kind = (0.0, "full") if self.objective == "latency" else (1.0, "one request at a time,")
        for number in range(num_rounds):
            if number > 0 and time.monotonic() > self.until_s:
                return
            self.progress("run", share, f"{kind} round {number + 1} of {num_rounds}")
            run(list(self.bench.loaded), number)

    def halve(self, run: Run, num_rounds: int) -> None:
        """Run all plans in rounds. Slow plans stop early, and the fastest ones get their time, to ``decide`` between them.

        This is successive halving (Karnin, Koren and Somekh, 2013). It ends as soon as one plan is ahead of all others by more
        than the spread of their ratios, or when the time is over. Plans that are still not separated count as tied. A plan with
        wrong numbers runs once.
        A ``barred`` baseline runs on while it is fast, and no other plan stops for being slower than it.
        """
        loaded = self.bench.loaded
        right = {name for name, entry in loaded.items() if name in self.keep or not entry.fault}
        running, turns = list(loaded), num_rounds * len(loaded)
        for number in range(2 * num_rounds if self.decide else num_rounds):
            if number >= num_rounds and (len(running) == 1 or turns < len(running)):
                return
            self.progress("run", min(number / num_rounds, 1.0), f"round {number + 1} of {max(num_rounds, number + 1)}")
            run(running, number)
            turns -= len(running)
            beside = self.keep if number + 1 < num_rounds else ()
            here = {name: loaded[name].rounds(self.objective) for name in running if name in right}
            over = number > 0 and time.monotonic() > self.until_s
            if over or (self.decide and leader({name: per_s for name, per_s in here.items() if name not in self.barred})):
                return
            fit = still_running({name: per_s for name, per_s in here.items() if name not in self.barred}, beside)
            fast = still_running(here, beside) if beside else []
            running = [name for name in here if name in fit or (name in self.barred and name in fast)]
