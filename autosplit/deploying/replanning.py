"""Plan anew for the devices that are left, from a profile measured before."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import further_sizes, place
from autosplit.deploying.setup import Hosts
from autosplit.errors import AutosplitError, BackendError, TraceError
from autosplit.memory.account import Account
from autosplit.memory.stages import footprints_of
from autosplit.planning.predicting import measured_backends
from autosplit.planning.question import Question
from autosplit.running.stage import StagePlacement
from autosplit.running.wiring import Replan
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import Family, as_family
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile

TIME_LIMIT_S = 1.0
"""Seconds for one question to the planner: requests wait for it."""


def plan_on(
    machine: Machine,
    model: Traced | Family,
    plan: Plan,
    profile: Profile,
    constraints: Constraints | None = None,
    num_stages: int | None = None,
) -> Plan:
    """The best plan of a model on other devices; objective, microbatch, queue depth, precision and sizes of its plan stay.

    Args:
        model: traced for the plan's microbatch, or at each size of a plan for several.
        plan: the plan that runs.
        profile: seconds of the ops on all devices.
        constraints: demands on the plan; by default only its objective.
        num_stages: replaces that of the constraints.
    Raises: InfeasibleError: the devices cannot hold the model. ProfileError: they were not measured.
    """
    from autosplit.planning.caps import plan_within_caps  # solvers take a second to load, and few devices are lost

    demands = constraints or Constraints(objective="latency" if plan.objective == "latency" else "throughput")
    profile, family = replace(profile, shapes=plan.shapes).on(machine), as_family(model)
    traced, backends = family.variants[0], measured_backends(profile, machine)
    question = Question(
        traced.graph,
        profile,
        plan.source,
        machine,
        backends,
        demands if num_stages is None else replace(demands, num_stages=num_stages),
        queue_depth=plan.queue_depth,
        microbatch=plan.microbatch,
        time_limit_s=TIME_LIMIT_S,
        shares_time=True,
        account=Account(traced.graph, values_of(traced, further_sizes(family, plan.shapes, backends)), footprints_of(profile)),
    )
    return replace(plan_within_caps(question), shapes=plan.shapes)


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
        return plan_on(left, traced, plan, profile, constraints), left
    except AutosplitError as reason:
        text = f"{failure}. The devices that are left cannot take its stages: {reason}"
        raise BackendError(text, backend=failure.backend, device=failure.device) from None


@contextmanager
def devices_left(
    model: Traced | Family, plan: Plan, profile: Profile, machine: Machine, hosts: Hosts | None = None
) -> Iterator[Replan]:
    """A function that a pipeline calls when it loses a device or a host: it gives the stages of the best plan on the others.

    Args:
        model: traced for the plan's microbatch, or at each size of a plan for several.
        plan: the plan that runs.
        profile: seconds of the ops on all devices.
        machine: the devices that the user named.
        hosts: the hosts of the plan, whose machine is without those that were lost; None for a plan on this machine.
    """
    family, left = as_family(model), machine

    def stages_without(lost: str) -> Sequence[StagePlacement]:
        """The stages without one more device or host.

        Raises: DeviceError: none is left. InfeasibleError, ProfileError: as ``plan_on``. BackendError: a backend refuses a stage.
        """
        nonlocal left
        left = left.without(lost) if hosts is None else hosts.machine
        asked = left, family, plan, profile
        try:
            return place(family, plan_on(*asked), left, workspace)
        except TraceError:  # a stage of the new cut cannot take all sizes in one program, as the whole model does
            return place(family, plan_on(*asked, num_stages=1), left, workspace)

    with Workspace() as workspace:
        yield stages_without
