"""Plan anew for the devices that are left, from a profile measured before."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import place
from autosplit.errors import AutosplitError, BackendError, TraceError
from autosplit.memory.account import Account
from autosplit.memory.stages import footprints_of
from autosplit.planning.predicting import measured_backends
from autosplit.planning.question import Question
from autosplit.running.pipeline import Replan
from autosplit.running.stage import StagePlacement
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import Family, as_family
from autosplit.values.constraints import Constraints, Objective
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile

TIME_LIMIT_S = 1.0
"""Seconds for one question to the planner: requests wait for it."""


class Replanner:
    """Finds the best plan of a model on other devices than those of its plan.

    Args:
        model: traced for the plan's microbatch, or at each size of a plan for several.
        plan: the plan that runs; its objective, microbatch, queue depth, precision and sizes stay.
        profile: seconds of the ops on all devices.
        constraints: demands on the plan; by default only its objective.
    """

    def __init__(
        self,
        model: Traced | Family,
        plan: Plan,
        profile: Profile,
        constraints: Constraints | None = None,
    ) -> None:
        self._family = as_family(model)
        self._traced = self._family.variants[0]
        self._plan, self._profile = plan, profile
        objective: Objective = "latency" if plan.objective == "latency" else "throughput"
        self._constraints = constraints or Constraints(objective=objective)
        self._workspace = Workspace()

    def __call__(self, machine: Machine) -> Sequence[StagePlacement]:
        """The stages of the best plan on a machine, at all sizes.

        Raises: InfeasibleError: its devices cannot hold the model. ProfileError: they were not measured. BackendError: a
            backend refuses a stage.
        """
        try:
            return place(self._family, self.plan_on(machine), machine, self._workspace)
        except TraceError:  # a stage of the new cut cannot take all sizes in one program, as the whole model does
            return place(self._family, self.plan_on(machine, num_stages=1), machine, self._workspace)

    def plan_on(self, machine: Machine, num_stages: int | None = None) -> Plan:
        """The best plan on a machine. Raises: InfeasibleError, ProfileError: as the call."""
        from autosplit.planning.caps import plan_within_caps  # solvers take a second to load, and few devices are lost

        profile = replace(self._profile, shapes=self._plan.shapes).on(machine)
        question = Question(
            self._traced.graph,
            profile,
            self._plan.source,
            machine,
            measured_backends(profile, machine),
            self._constraints if num_stages is None else replace(self._constraints, num_stages=num_stages),
            queue_depth=self._plan.queue_depth,
            microbatch=self._plan.microbatch,
            time_limit_s=TIME_LIMIT_S,
            shares_time=True,
            account=Account(self._traced.graph, values_of(self._traced), footprints_of(profile)),
        )
        return replace(plan_within_caps(question), shapes=self._plan.shapes)

    def close(self) -> None:
        """Remove the stage files."""
        self._workspace.close()


def plan_without(
    failure: BackendError, traced: Traced, plan: Plan, machine: Machine, profile: Profile, constraints: Constraints | None = None
) -> tuple[Plan, Machine]:
    """The machine without the device that a failure names, and the plan, or the best plan there if it used the device.

    Raises: BackendError: no plan fits the devices that are left; the message has both reasons.
    """
    try:
        left = machine.without(failure.device)
        if all(failure.device not in stage.devices for stage in plan.stages):
            return plan, left
        with closing(Replanner(traced, plan, profile, constraints)) as replanner:
            return replanner.plan_on(left), left
    except AutosplitError as reason:
        text = f"{failure}. The devices that are left cannot take its stages: {reason}"
        raise BackendError(text, backend=failure.backend, device=failure.device) from None


@contextmanager
def devices_left(model: Traced | Family, plan: Plan, profile: Profile, machine: Machine) -> Iterator[Replan]:
    """A function that a pipeline calls when it loses a device: it gives the stages of the best plan on the other devices.

    Arguments as for ``Replanner``; ``machine`` has the devices that the user named.
    """
    left = machine

    def stages_without(lost: str) -> Sequence[StagePlacement]:
        """The stages without one more device. Raises: DeviceError: none is left; as ``Replanner``."""
        nonlocal left
        left = left.without(lost)
        return replanner(left)

    with closing(Replanner(model, plan, profile)) as replanner:
        yield stages_without
