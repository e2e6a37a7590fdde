"""A candidate of a search: the question that a trial asks, the planner's answer, its measurements, and its explanation."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from autosplit import tables
from autosplit.deploying.footprints import Footprints
from autosplit.errors import InfeasibleError, ProfileError
from autosplit.planning.baselines import UNCERTAIN, baselines_with, machine_of, unmet_demands
from autosplit.planning.caps import front_within_caps, plan_within_caps, with_fitting_slots
from autosplit.planning.explaining import explain
from autosplit.planning.plans import least_s, plan_key
from autosplit.planning.predicting import bounded, measured_backends, predict
from autosplit.planning.question import Question
from autosplit.reports.judging import is_simpler
from autosplit.reports.outcomes import Outcome, Ratio
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan, cap_faults
from autosplit.values.profile import Profile

EXPLAIN_S = 1.0
"""Most seconds for explaining a plan for throughput. Some hundred ops take a third of them; a plan for latency takes far more."""

PREDICTION_ERROR = 0.04
"""Median error of predictions before anything runs: 3.6 % for 72 plans (``benchmarks/accuracy.md``, AMD EPYC), rounded up."""

Subject = tuple[Traced, Profile]
"""The model traced for one microbatch, and its profile."""


def asking(question: Question, subject: Subject, asked: Mapping[str, Any], footprints: Footprints | None = None) -> Question:
    """The question about a subject; ``asked`` overrides demands, backends, threads, queue depth and microbatch.

    Without footprints, the bytes of values and weights count as memory.
    """
    traced, profile = subject
    return replace(
        question.demanding(**{key: asked[key] for key in ("num_stages", "max_replicas") if key in asked}),
        graph=traced.graph,
        profile=profile,
        backends=(asked["backend"],) if "backend" in asked else question.backends,
        queue_depth=asked.get("queue_depth", question.queue_depth),
        microbatch=asked.get("microbatch", question.microbatch),
        max_threads=asked.get("threads", question.max_threads),
        account=None if footprints is None else footprints.account(traced, profile),
    )


def usual_plans(question: Question) -> list[Plan]:
    """One device, all cores, replicas and the even split of each backend, predicted, where they meet the demands and the caps."""
    graph, profile, account = question.graph, question.profile, question.memory
    found, machine = list[Plan](), question.machine.layouts[0]
    for backend in question.backends:
        here = {setting.device for setting in profile.measured if setting.backend == backend}
        fastest = min((d.name for d in machine.devices if d.name in here), key=lambda d: profile.whole_s(d, backend), default="")
        for name, plan in baselines_with(graph, machine, question.source, backend, fastest).items():
            usual = replace(plan, objective=question.constraints.objective, precision=profile.precision, chosen="")
            usual = replace(usual, profile_hash=profile.hash, queue_depth=question.queue_depth, status="feasible", method=name)
            with suppress(ProfileError):  # a backend was not measured on a device, or refuses an op
                usual = with_fitting_slots(predict(usual, graph, machine_of([usual], machine), profile), machine, account)
                value_s = usual.prediction.latency_s
                faults = unmet_demands(usual, value_s, graph, question.machine, question.constraints, question.backends)
                found += [usual] if value_s < inf and not faults else []
    return found


def run_order(question: Question, planned: Plan, usual: Sequence[Plan]) -> list[Plan]:
    """The plans that are worth a run: the best usual one of each backend, then the others, the best prediction first.

    Usual plans come first, so that they run in a small budget too: each stage of a mixture is compiled, which takes a while.
    A backend whose best usual plan is predicted more than ``UNCERTAIN`` times behind has no place among them.
    A plan with more stages or backends than another one is left out unless it is predicted to be ahead by more than
    ``PREDICTION_ERROR``.
    """
    key, known = plan_key(question.constraints), {plan.hash for plan in usual}
    others = [plan for plan in usual if plan.hash != planned.hash]
    kept = [plan for plan in (planned, *others) if all(is_worth(question, plan, other) for other in (planned, *others))]
    ranked = sorted(kept, key=key)
    leaders = {plan.stages[0].way: plan for plan in reversed(ranked) if plan.hash in known}
    most_s = UNCERTAIN * min(map(key, leaders.values()), default=0.0)
    early = [plan for plan in ranked if leaders.get(plan.stages[0].way) is plan and key(plan) <= most_s]
    return [*early, *(plan for plan in ranked if plan not in early)]


def is_worth(question: Question, plan: Plan, other: Plan, error: float = PREDICTION_ERROR) -> bool:
    """Whether a plan is not less simple than another one, or is predicted to be better by more than predictions err."""
    key = plan_key(question.constraints)
    return not is_simpler(other, plan) or key(plan) * (1 + error) < key(other)


def first_answer(question: Question, limited: Question) -> Plan:
    """The planner's answer within its share of the budget, or within its whole time limit if it finds none in that share."""
    try:
        return plan_within_caps(limited)
    except InfeasibleError as failure:
        if failure.conflict:
            raise
        return plan_within_caps(question)


def ran_before(plan: Plan, profile: Profile) -> bool:
    """Whether every stage of the plan ran in a search whose measurements the profile holds."""
    known = {(stage.setting, stage.ops) for stage in profile.stages}
    return all((setting, frozenset(stage.ops)) in known for stage, setting in plan.workers)


def with_bound(question: Question, best: Plan) -> Plan:
    """The plan that measured best, with the bound for all plans that the user's demands allow.

    A plan that its run measured to break a cap gives way to the planner's answer, which now knows the measured memory. Demands
    that only its trial had are left out, because a bound for them does not hold for other plans. If the plan beats the bound with
    the threads of its trial, the bound covers plans with as many threads, too.
    """
    question = replace(question, queue_depth=best.queue_depth)  # no bound depends on the depth
    try:
        proved = plan_within_caps(question)
    except InfeasibleError as failure:
        if failure.conflict:
            raise
        bound_s = least_s(question)  # no plan was found in time
    else:
        bound_s = proved.prediction.bound_s
        if proved.hash == best.hash or breaks_caps(question, best):
            return proved
    threads = max(stage.threads for stage in best.stages)
    found = predict(best, question.graph, question.machine, question.profile, bound_s)
    if found.prediction.bound_s > 0:
        return found
    return bounded(found, min(bound_s, least_s(replace(question, max_threads=threads))))


def breaks_caps(question: Question, plan: Plan) -> bool:
    """Whether the stages of a plan hold more on a device than its cap, as far as their memory is known."""
    return bool(cap_faults(question.memory.counted(plan).stages, question.machine.devices, question.graph))


def explained(question: Question, plan: Plan, limit_s: float) -> Plan:
    """The plan with the reasons why it is not faster, if there are seconds to find them."""
    if limit_s <= 0:
        return plan
    why = explain(question.graph, plan, question.machine, question.profile, question.constraints, time_limit_s=limit_s)
    return replace(plan, why=why)


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate plan.

    Attributes:
        asked: the demands of this trial.
        plan: the planner's answer, with the prediction from before the run.
        measured_per_s: items per second; None if it did not run.
        interval: how many times as good as the first plan it was, round by round; None if it did not run.
        note: why it did not run, or the fault of its numbers.
        outcome: all measurements.
    """

    asked: Mapping[str, Any]
    plan: Plan
    measured_per_s: float | None = None
    interval: Ratio | None = None
    note: str = ""
    outcome: Outcome | None = None

    @property
    def times_first(self) -> float | None:
        """How many times as good as the first plan it was; None if it did not run."""
        return None if self.interval is None else self.interval.median

    def level_with(self, other: "Trial") -> bool:
        """Whether rounds do not show that another candidate is better; both ran."""
        return self.interval is not None and other.interval is not None and self.interval.high >= other.interval.low

    def row(self) -> dict[str, Any]:
        """One row of the table of trials."""
        return {
            "changed_settings": ", ".join(f"{key}={value}" for key, value in self.asked.items()) or f"none ({self.plan.method})",
            "stages": self.plan.cell,
            "predicted_per_s": self.plan.prediction.throughput_per_s,
            "measured_per_s": float("nan") if self.measured_per_s is None else self.measured_per_s,
            "speed_against_first": float("nan") if self.times_first is None else self.times_first,
            "note": self.note,
        }


@dataclass(frozen=True)
class SearchResult(tables.Tabular):
    """The plan to use, the model and profile that it was made from, and every candidate."""

    plan: Plan
    traced: Traced
    profile: Profile
    trials: tuple[Trial, ...] = ()

    def front(self, machine: Machine, constraints: Constraints, **limits: Any) -> list[tuple[Plan, int]]:
        """The planner's front under the demands, each plan with the bytes of its fullest device; nothing runs for it.

        ``limits`` are further fields of the ``Question``.
        """
        machine = self.profile.usable(machine)
        about = self.traced.graph, self.profile, self.plan.source, machine, measured_backends(self.profile, machine), constraints
        return front_within_caps(Question(*about, microbatch=self.plan.microbatch, **limits).verify())

    def rows(self) -> list[dict[str, Any]]:
        """One row a candidate."""
        return [trial.row() for trial in self.trials]

    def __repr__(self) -> str:
        return f"SearchResult({self.plan!r}, {len(self.trials)} candidates)"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_() + tables.html(self.rows(), "candidates")


def is_hopeful(question: Question, plan: Plan, best: Trial) -> bool:
    """Whether a plan is predicted to reach the best candidate, if its prediction errs by a factor of ``UNCERTAIN``."""
    if question.constraints.objective == "throughput":
        return UNCERTAIN * plan.prediction.throughput_per_s > (best.measured_per_s or 0.0)
    return plan.prediction.latency_s < UNCERTAIN * best.plan.prediction.latency_s
