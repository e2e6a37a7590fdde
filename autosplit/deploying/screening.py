"""Screening: which baselines are loaded beside a plan, in which order, and which stay for the rounds of the report."""

import math
import time
from collections.abc import Mapping

from autosplit.deploying.sidebyside import SideBySide
from autosplit.errors import AutosplitError
from autosplit.planning.baselines import UNCERTAIN, Baselines
from autosplit.progress import Progress
from autosplit.reports.outcomes import PLAN
from autosplit.tracing.capturing import Traced
from autosplit.values.plan import Plan

MOST_BESIDE = 4
"""Most baselines that run in the rounds, beside the plan and the baseline to keep. Where there are more, short runs decide.

Where a round is as short as a short run, the budget is small. No short runs are made then: the first round decides. At most
twice as many are loaded then, and once loading is late, no more than this.
"""

SCREEN_S = 0.2
"""Seconds of a short run."""

LOADING_TIME, BEHIND = 0.5, 1 / UNCERTAIN
"""Share of ``Budget.compare_s`` after which no baseline is loaded that is predicted below ``BEHIND`` times the plan."""

NO_TIME = "the time went to others that promised more, and a larger budget runs more"
"""Why a baseline is left out that a larger budget would run."""

QUICK_S = 5e-3
"""Below this many seconds a request, ways in the caller's process are the first ones to be tried."""


class Contest:
    """Decide which baselines are loaded beside the plan: where they are many, the ``MOST_BESIDE`` best ones in short runs.

    Args:
        bench: where they are loaded.
        num_ways: how many baselines there are.
        objective: ``throughput`` or ``latency``.
        keep: the baseline that stays in any case; '' for none.
        round_s: seconds of a round.
    """

    def __init__(self, bench: SideBySide, num_ways: int, objective: str, keep: str, round_s: float) -> None:
        self._bench = bench
        self._small = round_s <= SCREEN_S
        self._screens = num_ways > MOST_BESIDE and not self._small
        self._objective = objective
        self._keep = keep
        self._times_plan: dict[str, float] = {}

    def load(self, plans: Mapping[str, Plan], traced: Mapping[int, Traced], late_s: float, progress: Progress) -> dict[str, str]:
        """Load the plan and its baselines, and say why others are left out.

        Args:
            plans: the plan first, then its baselines in the order in which to load them.
            traced: microbatch to the model traced for it.
            late_s: the monotonic time after which a baseline is loaded only if it may win: the profile does not know it, or
                predicts it no further behind the plan than predictions err.
            progress: called with the share done of the step ``run``.
        Raises: AutosplitError, OSError: the plan cannot be loaded.
        """
        reasons = dict[str, str]()
        for number, (name, candidate) in enumerate(plans.items()):
            if name not in (PLAN, self._keep) and (why := self._no_time(candidate, plans[PLAN], time.monotonic() > late_s)):
                reasons[name] = why
                continue
            progress("run", number / len(plans), f"loading '{name}'")
            try:
                self._bench.load(name, candidate, traced[candidate.microbatch])
            except (AutosplitError, OSError) as failure:  # descriptors may be short, or room for its files
                if name == PLAN:
                    raise
                reasons[name] = str(failure)
                continue
            if name != PLAN:
                reasons |= self.admit(name)
        return reasons

    def _no_time(self, candidate: Plan, plan: Plan, late: bool) -> str:
        """Why there is no time for a baseline; '' if there is."""
        share = _predicted_share(candidate, plan)
        if late and 0 < share < BEHIND:
            return f"{NO_TIME} ({share:.2f} times as good as the plan, as predicted)"
        num_rivals = len(self._bench.loaded.keys() - {PLAN, self._keep})
        enough = self._small and num_rivals >= (MOST_BESIDE if late else 2 * MOST_BESIDE)
        return NO_TIME if enough else ""

    def admit(self, name: str) -> dict[str, str]:
        """Run a baseline that was loaded beside the plan. If there are too many, unload the worst and say why."""
        if not self._screens:
            return {}
        plan, entry = self._bench.loaded[PLAN], self._bench.loaded[name]
        if self._objective == "latency":
            self._bench.run_alone([PLAN, name], 0, SCREEN_S)
            self._times_plan[name] = entry.rounds("latency")[-1] / plan.rounds("latency")[-1]
        else:
            if not plan.slow:  # else the requests alone have taken long enough to tell
                num_items = round(min(1e6, SCREEN_S * plan.plan.microbatch / plan.latency.p50_s))
                self._bench.run_round([PLAN, name], 0, num_items)
            self._times_plan[name] = entry.pace_per_s / plan.pace_per_s
        rivals = [other for other in self._times_plan if other != self._keep]
        if len(rivals) <= MOST_BESIDE:
            return {}
        worst = min(rivals, key=self._times_plan.__getitem__)
        self._bench.unload(worst)
        times = self._times_plan.pop(worst)
        return {worst: f"in short runs {MOST_BESIDE} others were better ({times:.2f} times as good as the plan there)"}


def by_promise(baselines: Baselines, keep: str) -> list[str]:
    """The baselines in the order in which to load them: the one to ``keep``, the best one of each backend, the next one of each.

    The profile says which is the best one. What it does not predict comes just behind the best predicted way of its backend, and
    a backend that it does not know promises as much as the best one. Backends that it predicts far behind come last. Where
    requests are quick, ways in the caller's process come first.
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
