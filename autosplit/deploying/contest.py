"""The contest of a plan and its baselines: successive halving (Karnin, Koren and Somekh, 2013) on a bench.

Each baseline is loaded in the order of its promise. Where there are many, a short run after loading decides which
``MOST_BESIDE`` stay. The others run beside the plan in rounds; those that fall behind stop, and their time goes to the fastest.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autosplit.deploying.bench import Bench
from autosplit.errors import AutosplitError
from autosplit.planning.baselines import UNCERTAIN, Baselines, uncertainty
from autosplit.progress import Progress, quiet
from autosplit.reports.judging import leader, still_running
from autosplit.reports.outcomes import PLAN, Outcome
from autosplit.tracing.capturing import Traced
from autosplit.values.plan import Plan

MOST_BESIDE = 4
"""Most baselines that run in the rounds, beside the plan and the baseline to keep. Where there are more, short runs decide.

Where a round is as short as a short run, the budget is small. No short runs are made then, no more than these are loaded, and
none that is predicted far behind: the first round decides.
"""

SCREEN_S = 0.2
"""Seconds of a short run."""

LOADING_TIME = 0.5
"""Share of ``Budget.compare_s`` after which no baseline is loaded that is predicted further behind than predictions err."""

NO_TIME = "the time went to others that promised more, and a larger budget runs more"
"""Why a baseline is left out that a larger budget would run."""

QUICK_S = 5e-3
"""Below this many seconds a request, baselines in the caller's process are the first ones to be tried."""

NUM_BESIDE = 3
"""Rounds for the figure that the objective does not ask for: latency where it is throughput, throughput where it is latency."""

ALONE_S = 0.2
"""Most seconds of a round of requests alone, where the objective is throughput."""

Run = Callable[[Sequence[str], int], None]
"""One round of the named plans, by its number."""


@dataclass(frozen=True)
class Contest:
    """A plan and its baselines on a bench.

    Attributes:
        bench: where they are loaded.
        objective: the figure that decides, ``throughput`` or ``latency``.
        keep: the baseline that runs in all rounds however slow it is; '' for none.
        round_s: seconds that the plan runs in a round, where no number of requests is asked for.
        progress: called with the share done of the step ``run``.
        barred: baselines that must not be chosen. One runs on while it is fast, and no plan stops for being slower than it.
        decide: whether the fastest ones run up to twice as many rounds.
        until_s: the monotonic time after which two rounds are enough.
    """

    bench: Bench
    objective: str
    keep: str
    round_s: float
    progress: Progress = quiet
    barred: Collection[str] = ()
    decide: bool = True
    until_s: float = math.inf
    times_plan: dict[str, float] = field(default_factory=dict)
    """Baseline to how many times as good as the plan it was in its short run."""

    def load(self, plans: Mapping[str, Plan], traced: Mapping[int, Traced], late_s: float) -> dict[str, str]:
        """Load the plan and its baselines that the bench has not loaded yet, and say why others are left out.

        Args:
            plans: the plan first, then its baselines in the order in which to load them.
            traced: microbatch to the model traced for it.
            late_s: the monotonic time after which, as in a small budget from the beginning, only those are loaded that may win:
                the profile does not know them, or predicts them no further behind the plan than predictions err.
        Raises: AutosplitError, OSError: the plan cannot be loaded.
        """
        reasons = dict[str, str]()
        for number, (name, candidate) in enumerate(plans.items()):
            adopted = name in self.bench.loaded
            if not adopted and name not in (PLAN, self.keep) and (why := self._no_time(candidate, plans[PLAN], late_s)):
                reasons[name] = why
                continue
            self.progress("run", number / len(plans), f"loading '{name}'")
            try:
                if not adopted:
                    self.bench.load(name, candidate, traced[candidate.microbatch])
            except (AutosplitError, OSError) as failure:  # descriptors may be short, or room for its files
                if name == PLAN:
                    raise
                reasons[name] = str(failure)
            else:
                if name != PLAN and len(plans) - 1 > MOST_BESIDE and not self._is_small:
                    reasons |= self.screen(name)
        return reasons

    @property
    def _is_small(self) -> bool:
        """Whether a round is as short as a short run."""
        return self.round_s <= SCREEN_S

    def _no_time(self, candidate: Plan, plan: Plan, late_s: float) -> str:
        """Why there is no time for a baseline; '' if there is."""
        share = _predicted_share(candidate, plan)
        if 0 < share * uncertainty(plan.prediction.latency_s) < 1 and (self._is_small or time.monotonic() > late_s):
            return f"{NO_TIME} ({share:.2f} times as good as the plan, as predicted)"
        num_rivals = len(self.bench.loaded.keys() - {PLAN, self.keep})
        return NO_TIME if self._is_small and num_rivals >= MOST_BESIDE else ""

    def screen(self, name: str) -> dict[str, str]:
        """Run a loaded baseline and the plan for a short time. If there are too many, unload the worst and say why."""
        plan, entry = self.bench.loaded[PLAN], self.bench.loaded[name]
        if self.objective == "latency":
            self.bench.run_alone([PLAN, name], 0, SCREEN_S)
            self.times_plan[name] = entry.rounds("latency")[-1] / plan.rounds("latency")[-1]
        else:
            if not plan.slow:  # else the requests alone have taken long enough to decide
                num_items = round(min(1e6, SCREEN_S * plan.plan.microbatch / plan.latency.p50_s))
                self.bench.run_round([PLAN, name], 0, num_items)
            self.times_plan[name] = entry.pace_per_s / plan.pace_per_s
        rivals = [other for other in self.times_plan if other != self.keep]
        if len(rivals) <= MOST_BESIDE:
            return {}
        worst = min(rivals, key=self.times_plan.__getitem__)
        self.bench.unload(worst)
        times = self.times_plan.pop(worst)
        return {worst: f"in short runs {MOST_BESIDE} others were better ({times:.2f} times as good as the plan there)"}

    def run(self, num_rounds: int, num_items: int | None) -> dict[str, Outcome]:
        """Full rounds first, then rounds of requests alone, so that the workers' times are from full rounds only.

        The figure that the objective does not ask for is taken of all plans, in ``NUM_BESIDE`` rounds. In a small budget the
        throughput is taken in one, and the latency is that of the requests after loading.
        ``num_items``: items of the plan in all full rounds, None for as many as ``round_s`` holds.
        """
        by_latency = self.objective == "latency"
        few = int(by_latency) if self._is_small else min(NUM_BESIDE, num_rounds)
        bench = self.bench
        num_full, full_s = (few, self.round_s / 2) if by_latency else (num_rounds, self.round_s)
        alone_s = self.round_s / 2 if by_latency else min(ALONE_S, self.round_s / 2)
        items = round(full_s * bench.loaded[PLAN].pace_per_s) if num_items is None else num_items // num_full

        def full(running: Sequence[str], number: int) -> None:
            bench.run_round(running, number, items)

        def alone(running: Sequence[str], number: int) -> None:
            bench.run_alone(running, number, alone_s)

        def beside(run: Run, share: float, text: str) -> None:
            for number in range(few):
                if number == 0 or time.monotonic() <= self.until_s:
                    self.progress("run", share, f"{text} round {number + 1} of {few}")
                    run(list(bench.loaded), number)

        beside(full, 0.0, "full") if by_latency else self.halve(full, num_rounds)
        outcomes = {name: entry.outcome() for name, entry in bench.loaded.items()}
        self.halve(alone, num_rounds) if by_latency else beside(alone, 1.0, "one request at a time,")
        told = bench.loaded
        return {name: replace(one, latency=told[name].latency, alone_s=told[name].alone_s) for name, one in outcomes.items()}

    def halve(self, run: Run, num_rounds: int) -> None:
        """Run all plans in rounds. The time of plans that stop early goes to the fastest ones, if ``decide`` is set.

        The rounds end as soon as one plan is ahead of all others by more than the spread of their ratios, or when the time is
        over, and progress says which; plans that are still not separated count as tied. A plan with wrong numbers runs once. The
        plan runs in all ``num_rounds``, and so does the baseline to keep, unless requests are slow or the budget is small.
        """
        loaded = self.bench.loaded
        keep = {PLAN} if loaded[PLAN].slow or self._is_small else {PLAN, self.keep}
        right = {name for name, entry in loaded.items() if name in keep or not entry.fault}
        running, turns = list(loaded), num_rounds * len(loaded)
        for number in range(2 * num_rounds if self.decide else num_rounds):
            if number >= num_rounds and (len(running) == 1 or turns < len(running)):
                return
            self.progress("run", min(number / num_rounds, 1.0), f"round {number + 1} of {max(num_rounds, number + 1)}")
            run(running, number)
            turns -= len(running)
            beside = keep if number + 1 < num_rounds else ()
            per_s = {name: loaded[name].rounds(self.objective) for name in running if name in right}
            allowed = {name: rounds for name, rounds in per_s.items() if name not in self.barred}
            over = time.monotonic() > self.until_s
            first = leader(allowed) if self.decide else ""
            if first or (over and number > 0):
                why = f"no other way can be better than '{first}'" if first else "the time is over"
                self.progress("run", 1.0, f"{why} after {number + 1} rounds")
                return
            fit = still_running(allowed, beside, over)
            fast = still_running(per_s, beside, over) if beside else []
            running = [name for name in per_s if name in fit or (name in self.barred and name in fast)]


def by_promise(baselines: Baselines, keep: str) -> list[str]:
    """The baselines in the order in which to load them: the one to ``keep``, the best one of each backend, the next one of each.

    The profile says which is the best one. A baseline without a prediction comes just behind the best predicted one of its
    backend, and a backend without a prediction promises as much as the best one. Backends that are predicted far behind come
    last. Where requests are quick, baselines in the caller's process come first.
    """
    plans, by_backend = baselines.plans, dict[str, list[str]]()
    for name, plan in plans.items():
        if name != keep:
            by_backend.setdefault(plan.stages[0].backend, []).append(name)
    predicted = {backend: max(plans[one].prediction.throughput_per_s for one in names) for backend, names in by_backend.items()}
    most_per_s = max(predicted.values(), default=0.0)
    places: dict[str, tuple[bool, int, float]] = {keep: (False, -1, 0.0)} if keep else {}
    for backend, names in by_backend.items():
        best_per_s = predicted[backend] or most_per_s
        quick = 0 < min((plans[name].prediction.latency_s or math.inf) for name in names) < QUICK_S

        def rank(name: str, best_per_s: float = best_per_s, quick: bool = quick) -> tuple[bool, float]:
            in_caller = quick and plans[name].process == "caller"
            return not in_caller, -(plans[name].prediction.throughput_per_s or (best_per_s if in_caller else 0.99 * best_per_s))

        late = UNCERTAIN * best_per_s < most_per_s
        places |= {name: (late, number, -best_per_s) for number, name in enumerate(sorted(names, key=rank))}
    return sorted(places, key=places.__getitem__)


def _predicted_share(baseline: Plan, plan: Plan) -> float:
    """How good a baseline is predicted to be for the objective of the plan, as a share of the plan; 0 if it is not predicted."""
    here, there = baseline.prediction, plan.prediction
    if plan.objective == "latency":
        return there.latency_s / here.latency_s if here.latency_s else 0.0
    return here.throughput_per_s / there.throughput_per_s if there.throughput_per_s else 0.0
