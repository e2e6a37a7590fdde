"""Several plans in interleaved rounds, so that drift of the machine cancels, and which of them to use."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from autosplit.backends.base import has_streams, installed
from autosplit.deploying.compiling import compile_baselines
from autosplit.deploying.setup import BUDGET, ROUND_S, SETUP, Budget, Setup
from autosplit.deploying.sidebyside import FIRST_S, SideBySide
from autosplit.deploying.workspace import Workspace
from autosplit.errors import AutosplitError, ProfileError
from autosplit.memory.stages import count
from autosplit.planning.baselines import UNCERTAIN, Baselines, baselines_of, unmet_demands, with_whole_requests, without_autosplit
from autosplit.planning.peers import predicted_peers
from autosplit.planning.predicting import predict
from autosplit.progress import Progress, between, quiet
from autosplit.reports.judging import judge, leader, still_running
from autosplit.reports.outcomes import PLAN, Outcome
from autosplit.reports.runreport import RunReport
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile

MOST_BESIDE = 4
"""Most baselines that run in the rounds, beside the plan and the baseline to keep. Where there are more, short runs decide."""

SCREEN_S = 0.2

MEASURING_S = 15.0
"""Seconds that measuring a backend usually takes, for the line that says what ``auto`` will take."""

NUM_BESIDE = 3
"""Rounds for the figure that the objective does not ask for: latency where it is throughput, throughput where it is latency."""

COMPILING_SHARE, LOADING_SHARE = 0.2, 0.4
"""Shares of the step: compiling baselines, and then of the rest loading the plan and its baselines."""

LOADING_TIME, BEHIND = 0.5, 0.9
"""Share of ``Budget.compare_s`` after which no baseline is loaded that is predicted below ``BEHIND`` times the plan."""

QUICK_S = 5e-3
"""Below this many seconds a request, ways in the caller's process are the first ones to be tried."""

Subject = tuple[Traced, Profile | None]
"""The model traced for one microbatch, and its profile where there is one."""

Run = Callable[[Sequence[str], int], None]


class _Contest:
    """Decide which baselines stay loaded beside the plan: the ``MOST_BESIDE`` best ones in short runs."""

    def __init__(self, bench: SideBySide, num_ways: int, objective: str, keep: str) -> None:
        self._bench = bench
        self._num_ways = num_ways
        self._objective = objective
        self._keep = keep
        self._times_plan: dict[str, float] = {}

    def admit(self, name: str) -> dict[str, str]:
        """Run a baseline that was loaded beside the plan. If there are too many, unload the worst and say why."""
        plan, entry = self._bench.loaded[PLAN], self._bench.loaded[name]
        if self._num_ways <= MOST_BESIDE:
            return {}
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
        return {worst: f"in short runs {MOST_BESIDE} others were better; it was {times:.2f} times as good as the plan there"}


def expectation(machine: Machine, setup: Setup, budget: Budget) -> str:
    """One line on what ``auto`` will take, with the sum."""
    measuring_s = MEASURING_S * len(setup.considered)
    compare_s = min(budget.compare_s, (2 + MOST_BESIDE) * budget.num_rounds * budget.round_s)
    kept = f" (less where '{setup.store}' holds it)" if setup.store is not None else ""
    backends, devices = ", ".join(setup.considered), ", ".join(device.name for device in machine.devices)
    return (
        f"this takes about {measuring_s + budget.search_s + compare_s:.0f} s, longer for large models: measure {backends} on "
        f"{devices} {measuring_s:.0f} s{kept}, run candidate plans {budget.search_s:g} s (the budget), compare the best plan "
        f"with its baselines {compare_s:.0f} s"
    )


def run_beside(
    subjects: Mapping[int, Subject],
    plan: Plan,
    machine: Machine,
    constraints: Constraints | None,
    with_baselines: bool,
    *,
    setup: Setup,
    budget: Budget,
    progress: Progress = quiet,
) -> RunReport:
    """Make the baselines of a plan, run it beside them, and say which one to use; arguments as for ``compare``.

    A plan without a prediction gets it from the profile. Where neither the setup nor the constraints say which backends, the
    baselines of backends that compile for long run too.
    """
    traced, profile = subjects[plan.microbatch]
    notes: list[str] = []
    if profile is not None and not plan.prediction.throughput_per_s:
        try:
            plan = predict(plan, traced.graph, machine, profile)
        except ProfileError as failure:
            notes.append(f"the plan has no prediction: {failure}")
    with ExitStack() as stack:
        setup = replace(setup, workspace=setup.workspace or stack.enter_context(Workspace()))
        beside = Baselines()
        if with_baselines:
            beside = _baselines(subjects, plan, machine, constraints, setup, budget, between(progress, 0.0, COMPILING_SHARE))
            progress = between(progress, COMPILING_SHARE, 1.0)
        report = compare(subjects, plan, beside, machine, constraints, setup=setup, budget=budget, progress=progress)
    peers = Baselines() if profile is None else predicted_peers(traced.graph, plan, machine, profile)
    return replace(report, notes=tuple(notes), peers=peers)


def _baselines(
    subjects: Mapping[int, Subject],
    plan: Plan,
    machine: Machine,
    constraints: Constraints | None,
    setup: Setup,
    budget: Budget,
    progress: Progress,
) -> Baselines:
    """The baselines of a plan, those of whole requests too where it cuts them, compiled where that takes long."""
    subject = traced, profile = subjects[plan.microbatch]
    free = setup.backends is None and constraints is not None and not constraints.forced
    others = [name for name in installed() if name not in setup.considered] if free else []
    assert setup.workspace is not None
    compiled, failed = compile_baselines(others, subject, plan, machine, setup.workspace, budget.compiling_s, progress)
    streaming = [name for name in installed() if has_streams(name)]
    isolate = setup.isolate or setup.hosts is not None  # the caller is on one host
    found = baselines_of(traced.graph, plan, machine, profile, compiled=compiled, streaming=streaming, isolate=isolate)
    if plan.microbatch < plan.source.batch and plan.source.batch in subjects:
        whole, whole_profile = subjects[plan.source.batch]
        found = with_whole_requests(found, whole.graph, plan, machine, whole_profile, streaming, isolate)
    return Baselines(found.plans, {**found.left_out, **failed})


def compare(
    subjects: Mapping[int, Subject],
    plan: Plan,
    baselines: Baselines,
    machine: Machine,
    constraints: Constraints | None = None,
    *,
    setup: Setup = SETUP,
    budget: Budget = BUDGET,
    progress: Progress = quiet,
) -> RunReport:
    """Run the plan and its baselines in the same rounds, and say which one to use.

    Args:
        subjects: microbatch to the model traced for it; the plan's own, and that of whole requests where baselines take them.
        plan: the plan; its objective decides between it and the baselines.
        baselines: what runs beside it; the report names those that cannot be loaded or give wrong numbers, with the reason.
        machine: the devices.
        constraints: demands that a baseline must meet to become the plan; None keeps the plan in any case.
        setup: ``backends`` that a baseline must run on to become the plan; ``workspace`` and ``observe``.
        budget: rounds and requests. The fastest contenders may run up to twice as many rounds, in the time that others leave.
        progress: called with the share of the step ``run``.
    Raises: PlanError, BackendError, WorkerError: the plan itself cannot be run; StageError: a request failed.
    """

    def unfit(other: Plan, latency_s: float) -> list[str]:
        demands = constraints or Constraints()
        return unmet_demands(other, latency_s, subjects[other.microbatch][0].graph, machine, demands, setup.backends)

    reasons = dict(baselines.left_out)
    keep, forced = without_autosplit(baselines.plans), constraints is None
    begun_s, first_s = time.monotonic(), min(FIRST_S, budget.round_s)
    with SideBySide(machine, setup.workspace, setup.hosts, first_s) as bench:
        if setup.observe is not None:
            setup.observe(bench.host)
        contest = _Contest(bench, len(baselines.plans), plan.objective, keep)
        plans = {PLAN: plan} | {name: baselines.plans[name] for name in _by_promise(baselines, keep)}
        distinct, same_as = _distinct(_counted(plans, subjects, machine))
        late_s, told = begun_s + LOADING_TIME * budget.compare_s, between(progress, 0.0, LOADING_SHARE)
        reasons |= _load(bench, contest, distinct, subjects, keep, late_s, told)
        for entry in bench.loaded.values():
            entry.restart()
        kept = {PLAN} if bench.loaded[PLAN].slow else {PLAN, keep}
        barred = {name for name, e in bench.loaded.items() if name != PLAN and unfit(e.plan, e.latency.p50_s)}
        told, until_s = between(progress, LOADING_SHARE, 1.0), begun_s + budget.compare_s
        rounds = _Rounds(bench, plan.objective, kept, barred, not forced, told, budget.round_s, until_s)
        outcomes = rounds.run(budget.num_rounds, budget.num_requests and plan.source.batch * budget.num_requests)
    outcomes |= {name: outcomes[twin] for name, twin in same_as.items() if twin in outcomes}
    reasons |= {name: reasons[twin] for name, twin in same_as.items() if twin in reasons}
    reasons |= {name: outcome.fault for name, outcome in outcomes.items() if outcome.fault}
    verdict = judge(outcomes, plan.objective, forced, unfit)
    if restarts := sum(outcome.stats.restarts for outcome in outcomes.values()):
        again = f" Workers died and were started again {restarts} times; their requests ran again."
        verdict = replace(verdict, sentence=verdict.sentence + again)
    if outcomes[verdict.chosen].plan.process == "caller":
        price = " It runs in the process that calls it, so a crash of the model ends that process; --isolate rules it out."
        verdict = replace(verdict, sentence=verdict.sentence + price)
    progress("run", 1.0, "done")
    traced = subjects[plan.microbatch][0]
    error = traced.module_error.relative if traced.module_error is not None else None
    return RunReport(traced.graph.name, plan.source.batch, outcomes, verdict, reasons, trace_error=error)


def _load(
    bench: SideBySide,
    contest: _Contest,
    plans: Mapping[str, Plan],
    subjects: Mapping[int, Subject],
    keep: str,
    late_s: float,
    progress: Progress,
) -> dict[str, str]:
    """Load the plan and its baselines for the rounds, and say why others are left out.

    Args:
        bench: where they are loaded.
        contest: decides which stay, where they are many.
        plans: the plan first, then its baselines in the order in which to load them.
        subjects: microbatch to the model traced for it.
        keep: the baseline that is loaded in any case.
        late_s: the monotonic time after which only those are loaded that may win: the profile does not know them, or predicts
            them no further behind the plan than predictions err.
        progress: called with the share done of the step ``run``.
    Raises: AutosplitError, OSError: the plan cannot be loaded.
    """
    reasons = dict[str, str]()
    for number, (name, candidate) in enumerate(plans.items()):
        share = _predicted_share(candidate, plans[PLAN])
        if 0 < share < BEHIND and name != keep and time.monotonic() > late_s:
            reasons[name] = f"it is predicted at {share:.2f} of the plan, and others took the time; a larger budget runs it too"
            continue
        progress("run", number / len(plans), f"loading '{name}'")
        try:
            bench.load(name, candidate, subjects[candidate.microbatch][0])
        except (AutosplitError, OSError) as failure:  # descriptors may be short, or room for its files
            if name == PLAN:
                raise
            reasons[name] = str(failure)
            continue
        if name != PLAN:
            reasons |= contest.admit(name)
    return reasons


def _distinct(plans: Mapping[str, Plan]) -> tuple[dict[str, Plan], dict[str, str]]:
    """The plans without those that are equal to an earlier one, and the names of these with the name of the earlier one."""
    distinct, same_as = dict[str, Plan](), dict[str, str]()
    for name, candidate in plans.items():
        twin = next((other for other, known in distinct.items() if known.hash == candidate.hash), None)
        if twin is None:
            distinct[name] = candidate
        else:
            same_as[name] = twin
    return distinct, same_as


def _predicted_share(baseline: Plan, plan: Plan) -> float:
    """How good a baseline is predicted to be for the objective of the plan, as a share of the plan; 0 if it is not predicted."""
    here, there = baseline.prediction, plan.prediction
    if plan.objective == "latency":
        return there.latency_s / here.latency_s if here.latency_s else 0.0
    return here.throughput_per_s / there.throughput_per_s if there.throughput_per_s else 0.0


def _by_promise(baselines: Baselines, keep: str) -> list[str]:
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


def _counted(plans: Mapping[str, Plan], subjects: Mapping[int, Subject], machine: Machine) -> dict[str, Plan]:
    """The plans with their memory where devices have caps, so that those beyond a cap are left out."""
    found = dict(plans)
    if any(device.memory_bytes is not None for device in machine.devices):
        for name, plan in plans.items():
            traced, profile = subjects[plan.microbatch]
            if any(stage.memory is None for stage in plan.stages):
                found[name] = count(traced.graph, plan, values_of(traced), profile)
    return found


@dataclass(frozen=True)
class _Rounds:
    """The rounds of a report. The figure that the objective asks for decides which plans run on; the other is taken of all plans.

    Attributes:
        keep: plans that run in all rounds however slow they are.
        barred: baselines that must not be chosen.
        decide: whether the fastest ones run more rounds, in the time of those that stopped early.
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

        ``num_items`` are those of the plan in all full rounds.
        """
        bench, few = self.bench, min(NUM_BESIDE, num_rounds)
        if self.objective == "latency":
            take_full, num_full, full_s = self._beside, few, self.round_s / 2
            take_alone, num_alone, alone_s = self.halve, num_rounds, self.round_s / 2
        else:
            take_full, num_full, full_s = self.halve, num_rounds, self.round_s
            take_alone, num_alone, alone_s = self._beside, few, min(SCREEN_S, self.round_s / 2)
        items = round(full_s * bench.loaded[PLAN].pace_per_s) if num_items is None else num_items // num_full
        take_full(lambda running, number: bench.run_round(running, number, items), num_full)
        outcomes = {name: entry.outcome() for name, entry in bench.loaded.items()}
        take_alone(lambda running, number: bench.run_alone(running, number, alone_s), num_alone)
        told = {name: entry.outcome() for name, entry in bench.loaded.items()}
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
        """Run all plans in rounds. The time of those that stop early goes to the fastest ones, to ``decide`` between them.

        This is successive halving (Karnin, Koren and Somekh, 2013). It ends as soon as one plan is ahead of all others by more
        than the spread of their ratios, or when the time is over; what is not told apart then is level. A plan with wrong
        numbers runs once.
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
