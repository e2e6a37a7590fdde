"""Plan anew for the hosts that are left, from the profile that is there."""

from collections.abc import Sequence
from dataclasses import replace

from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import place
from autosplit.errors import TraceError
from autosplit.memory.account import Account
from autosplit.memory.stages import footprints_of
from autosplit.planning.caps import plan_within_caps
from autosplit.planning.predicting import measured_backends
from autosplit.planning.question import Question
from autosplit.running.stage import StagePlacement
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.resizing import Resizable
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile

TIME_LIMIT_S = 1.0
"""Seconds for one question to the planner: requests wait for it."""


class Replanner:
    """Finds the best plan of a model on other devices than those of its plan.

    Args:
        variants: the model, traced for the plan's microbatch, or at each size of a plan for several, the largest first.
        plan: the plan that runs; its objective, microbatch, queue depth, precision and sizes stay.
        profile: seconds of the ops on all devices.
        symbolic: as for ``place``.
    """

    def __init__(self, variants: Sequence[Traced], plan: Plan, profile: Profile, symbolic: Resizable | None = None) -> None:
        self._traced, *self._others = variants
        self._plan, self._profile, self._symbolic = plan, profile, symbolic
        self._workspace = Workspace()

    def __call__(self, machine: Machine) -> Sequence[StagePlacement]:
        """The stages of the best plan on a machine, at all sizes.

        Raises: InfeasibleError: its devices cannot hold the model. ProfileError: they were not measured. BackendError: a
            backend refuses a stage.
        """
        profile = self._profile.on(machine)
        question = Question(
            self._traced.graph,
            profile,
            self._plan.source,
            machine,
            measured_backends(profile, machine),
            Constraints(objective="latency" if self._plan.objective == "latency" else "throughput"),
            queue_depth=self._plan.queue_depth,
            microbatch=self._plan.microbatch,
            time_limit_s=TIME_LIMIT_S,
            shares_time=True,
        )
        account = Account(self._traced.graph, values_of(self._traced), footprints_of(profile))
        plan = replace(plan_within_caps(question, account), shapes=self._plan.shapes)
        try:
            return self._placed(plan, machine)
        except TraceError:  # a stage of the new cut cannot take all sizes in one program
            if plan.shapes is None:
                raise
            return self._placed(replace(plan, shapes=replace(plan.shapes, dynamic=())), machine)

    def _placed(self, plan: Plan, machine: Machine) -> Sequence[StagePlacement]:
        return place(self._traced, plan, machine, self._workspace, variants=self._others, symbolic=self._symbolic)

    def close(self) -> None:
        """Remove the stage files."""
        self._workspace.close()
