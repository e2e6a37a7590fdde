"""A candidate of a search: the question that a trial asks, the planner's answer, its measurements, and its explanation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autosplit.deploying.footprints import Footprints
from autosplit.errors import InfeasibleError
from autosplit.memory.account import Account
from autosplit.memory.stages import footprints_of
from autosplit.planning.caps import plan_within_caps
from autosplit.planning.explaining import explain
from autosplit.planning.plans import least_s
from autosplit.planning.predicting import bounded, predict
from autosplit.planning.question import Question
from autosplit.reports.outcomes import Outcome
from autosplit.tracing.capturing import Traced
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile

EXPLAIN_S = 1.0
"""Most seconds for explaining a plan for throughput. Some hundred ops take a third of them; a plan for latency takes far more."""

Subject = tuple[Traced, Profile]
"""The model traced for one microbatch, and its profile."""


def asking(question: Question, subject: Subject, asked: Mapping[str, Any]) -> Question:
    """The question about a subject; ``asked`` overrides demands, backends, threads, queue depth and microbatch."""
    traced, profile = subject
    return replace(
        question.demanding(**{key: asked[key] for key in ("num_stages", "max_replicas") if key in asked}),
        graph=traced.graph,
        profile=profile,
        backends=(asked["backend"],) if "backend" in asked else question.backends,
        queue_depth=asked.get("queue_depth", question.queue_depth),
        microbatch=asked.get("microbatch", question.microbatch),
        max_threads=asked.get("threads", question.max_threads),
    )


def answer(question: Question, traced: Traced, footprints: Footprints | None) -> Plan:
    """The planner's best plan within the caps. Without footprints, the bytes of values and weights count as memory."""
    known = Account(question.graph, known=footprints_of(question.profile))
    return plan_within_caps(question, known if footprints is None else footprints.account(traced, question.profile))


def first_answer(question: Question, limited: Question, traced: Traced, footprints: Footprints | None) -> Plan:
    """The planner's answer within its share of the budget, or within its whole time limit if it finds none in that share."""
    try:
        return answer(limited, traced, footprints)
    except InfeasibleError as failure:
        if failure.conflict:
            raise
        return answer(question, traced, footprints)


def ran_before(plan: Plan, profile: Profile) -> bool:
    """Whether every stage of the plan ran in a search whose measurements the profile holds."""
    known = {(stage.setting, stage.ops) for stage in profile.stages}
    return all((setting, frozenset(stage.ops)) in known for stage, setting in plan.workers)


def with_bound(question: Question, traced: Traced, best: Plan, footprints: Footprints | None) -> Plan:
    """The plan that measured best, with the bound for all plans that the user's demands allow.

    Demands that only its trial had are left out, because a bound for them does not hold for other plans. If the plan beats the
    bound with the threads of its trial, the bound covers plans with as many threads, too.
    """
    question = replace(question, queue_depth=best.queue_depth)  # no bound depends on the depth
    try:
        proved = answer(question, traced, footprints)
    except InfeasibleError as failure:
        if failure.conflict:
            raise
        bound_s = least_s(question)  # no plan was found in time
    else:
        bound_s = proved.prediction.bound_s
        if proved.hash == best.hash:
            return proved
    threads = max(stage.threads for stage in best.stages)
    found = predict(best, question.graph, question.machine, question.profile, bound_s)
    if found.prediction.bound_s > 0:
        return found
    return bounded(found, min(bound_s, least_s(replace(question, max_threads=threads))))


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
        times_first: how many times as good as the first plan it was; None if it did not run.
        note: why it did not run, or what is wrong with its numbers.
        outcome: all measurements.
    """

    asked: Mapping[str, Any]
    plan: Plan
    measured_per_s: float | None = None
    times_first: float | None = None
    note: str = ""
    outcome: Outcome | None = None

    def row(self) -> dict[str, Any]:
        """One row of the table of trials."""
        return {
            "changed_settings": ", ".join(f"{key}={value}" for key, value in self.asked.items()) or "the planner's choice",
            "stages": " | ".join(f"{len(s.ops)} on {'+'.join(s.devices)} ({s.backend})" for s in self.plan.stages),
            "predicted_per_s": self.plan.prediction.throughput_per_s,
            "measured_per_s": float("nan") if self.measured_per_s is None else self.measured_per_s,
            "speed_against_first": float("nan") if self.times_first is None else self.times_first,
            "note": self.note,
        }
