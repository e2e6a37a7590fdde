"""What a search is about, and what it looked at: the demands as a planner takes them, and one candidate."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autosplit.planning.explaining import explain
from autosplit.planning.plans import Log, plan_model
from autosplit.reports.outcomes import Outcome
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan, Source
from autosplit.values.profile import Profile

EXPLAIN_S = 1.0
"""Most seconds for explaining a plan for throughput: some hundred ops take a third of it. One for latency takes many."""

Subject = tuple[Traced, Profile]
"""The model traced for one microbatch, and its profile."""


@dataclass(frozen=True)
class Job:
    """What a search is about.

    ``subject_for`` gives the traced model and its profile for a microbatch, or raises an AutosplitError where requests are not
    cut so; without it the microbatch is the whole request.
    ``explain_s`` are the seconds for saying why the plan is no faster, 0 to say nothing; by default it is said of plans for
    throughput only, where it takes less than a second. ``hurried`` gives the planner one second where nothing is run, and all its
    time only if it finds no plan in that.
    """

    machine: Machine
    source: Source
    constraints: Constraints
    backends: tuple[str, ...]
    queue_depth: int = 4
    time_limit_s: float = 10.0
    seed: int = 0
    log: Log | None = None
    subject_for: Callable[[int], Subject] | None = None
    explain_s: float | None = None
    hurried: bool = False

    def plan(self, subject: Subject, asked: Mapping[str, Any]) -> Plan:
        """The planner's best answer; ``asked`` stands in for constraints, backends, queue depth and microbatch."""
        changes = {key: asked[key] for key in ("num_stages", "max_replicas") if key in asked}
        traced, profile = subject
        return plan_model(
            traced.graph,
            self.machine,
            profile,
            self.source,
            replace(self.constraints, **changes),
            [asked["backend"]] if "backend" in asked else self.backends,
            queue_depth=asked.get("queue_depth", self.queue_depth),
            microbatch=asked.get("microbatch"),
            max_threads=asked.get("threads"),
            time_limit_s=self.time_limit_s,
            seed=self.seed,
            log=self.log,
        )

    def explained(self, plan: Plan, subject: Subject) -> Plan:
        """The plan with the reasons why it is no faster."""
        limit_s = self.explain_s
        if limit_s is None:
            limit_s = EXPLAIN_S if self.constraints.objective == "throughput" else 0.0
        if limit_s <= 0:
            return plan
        traced, profile = subject
        return replace(plan, why=explain(traced.graph, plan, self.machine, profile, self.constraints, time_limit_s=limit_s))


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate: what was asked of the planner, its plan, and what was measured beside the first plan.

    ``times_first`` is how many times as good as the first plan it was; None if it did not run, and ``note`` says why.
    ``plan`` has the prediction from before the run, ``outcome`` all that was measured.
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
            "asked": ", ".join(f"{key}={value}" for key, value in self.asked.items()) or "the planner's choice",
            "stages": " | ".join(f"{len(s.ops)} on {'+'.join(s.devices)} ({s.backend})" for s in self.plan.stages),
            "predicted_per_s": self.plan.prediction.throughput_per_s,
            "measured_per_s": float("nan") if self.measured_per_s is None else self.measured_per_s,
            "times_first": float("nan") if self.times_first is None else self.times_first,
            "note": self.note,
        }
