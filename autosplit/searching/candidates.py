"""Job: the question of a search, as the planner takes it. Trial: one candidate plan with its measurements."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autosplit.deploying.footprints import Footprints
from autosplit.memory.account import Account
from autosplit.memory.stages import footprints_of
from autosplit.planning.caps import plan_within_caps
from autosplit.planning.explaining import explain
from autosplit.planning.plans import Log, Query, least_s
from autosplit.reports.outcomes import Outcome
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.plan import QUEUE_DEPTH, Plan, Source
from autosplit.values.profile import Profile

EXPLAIN_S = 1.0
"""Most seconds for explaining a plan for throughput. Some hundred ops take a third of them; a plan for latency takes far more."""

Subject = tuple[Traced, Profile]
"""The model traced for one microbatch, and its profile."""


@dataclass(frozen=True)
class Job:
    """The question of a search.

    Attributes:
        subject_for: gives the traced model and its profile for a microbatch, or raises an AutosplitError if requests cannot be
            cut into such microbatches; None keeps whole requests.
        explain_s: seconds for finding out why the plan is not faster; 0 skips that. None is ``EXPLAIN_S`` if throughput is the
            objective, else 0.
        hurried: gives the planner one second if nothing is run, and its whole limit only if it finds no plan within the second.
        footprints: measures the memory of stages if a device has a cap; None counts the bytes of values and weights.
    """

    machine: Machine
    source: Source
    constraints: Constraints
    backends: tuple[str, ...]
    queue_depth: int = QUEUE_DEPTH
    time_limit_s: float = 10.0
    seed: int = 0
    log: Log | None = None
    subject_for: Callable[[int], Subject] | None = None
    explain_s: float | None = None
    hurried: bool = False
    footprints: Footprints | None = None

    def plan(self, subject: Subject, asked: Mapping[str, Any]) -> Plan:
        """The planner's best answer within the caps; ``asked`` overrides constraints, backends, queue depth and microbatch."""
        traced, profile = subject
        known = Account(traced.graph, known=footprints_of(profile))
        account = known if self.footprints is None else self.footprints.account(traced, profile)
        return plan_within_caps(self._query(subject, asked), self.machine, self._backends(asked), account)

    def least_s(self, subject: Subject, asked: Mapping[str, Any]) -> float:
        """A bound in seconds on all answers of ``plan``, without a search."""
        return least_s(self._query(subject, asked), self.machine, self._backends(asked))

    def _query(self, subject: Subject, asked: Mapping[str, Any]) -> Query:
        changes = {key: asked[key] for key in ("num_stages", "max_replicas") if key in asked}
        traced, profile = subject
        return Query(
            traced.graph,
            profile,
            self.source,
            replace(self.constraints, **changes),
            queue_depth=asked.get("queue_depth", self.queue_depth),
            microbatch=asked.get("microbatch"),
            max_threads=asked.get("threads"),
            time_limit_s=self.time_limit_s,
            seed=self.seed,
            log=self.log,
        )

    def _backends(self, asked: Mapping[str, Any]) -> list[str]:
        return [asked["backend"]] if "backend" in asked else list(self.backends)

    def explained(self, plan: Plan, subject: Subject) -> Plan:
        """The plan with the reasons why it is not faster."""
        limit_s = self.explain_s
        if limit_s is None:
            limit_s = EXPLAIN_S if self.constraints.objective == "throughput" else 0.0
        if limit_s <= 0:
            return plan
        traced, profile = subject
        return replace(plan, why=explain(traced.graph, plan, self.machine, profile, self.constraints, time_limit_s=limit_s))


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
