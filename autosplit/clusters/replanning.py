"""Plan anew for the hosts that are left, from the profile that is there."""

from collections.abc import Sequence

from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import place
from autosplit.memory.account import Account
from autosplit.memory.stages import footprints_of
from autosplit.planning.caps import plan_within_caps
from autosplit.planning.predicting import measured_backends
from autosplit.planning.question import Question
from autosplit.running.stage import StagePlacement
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile

TIME_LIMIT_S = 1.0
"""Seconds for one question to the planner: requests wait for it."""


class Replanner:
    """Finds the best plan of a model on other devices than those of its plan.

    Args:
        traced: the model, traced for the plan's microbatch.
        plan: the plan that runs; its objective, microbatch, queue depth and precision stay.
        profile: seconds of the ops on all devices.
    """

    def __init__(self, traced: Traced, plan: Plan, profile: Profile) -> None:
        self._traced, self._plan, self._profile = traced, plan, profile
        self._workspace = Workspace()

    def __call__(self, machine: Machine) -> Sequence[StagePlacement]:
        """The stages of the best plan on a machine.

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
        plan = plan_within_caps(question, account)
        return place(self._traced, plan, machine, self._workspace)

    def close(self) -> None:
        """Remove the stage files."""
        self._workspace.close()
