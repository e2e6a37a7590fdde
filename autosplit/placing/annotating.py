"""annotate(): a map of patterns, explicit copies, a default and a fallback become a placed graph."""

from collections.abc import Mapping, Sequence

from autosplit.errors import InfeasibleError, PlanError, UsageError, raise_faults
from autosplit.memory.stages import held_by_device, stage_memories
from autosplit.placing.moves import homes_of
from autosplit.placing.patterns import by_explicit_copies, by_pattern
from autosplit.placing.placed import Placed
from autosplit.placing.precisions import require_error
from autosplit.placing.refusals import fall_back
from autosplit.placing.rules import keep_rules
from autosplit.placing.sites import AUTO, Choice, Site, SiteText, parse_site
from autosplit.planning.plans import plan_model
from autosplit.tables import bytes_text
from autosplit.tracing.aliasing import aliases_of
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints, Objective
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan, check_graph
from autosplit.values.profile import Profile

MAX_CORRECTIONS = 4
"""Most questions to the planner until its plan keeps the caps with values and rings counted."""

Map = Mapping[str, SiteText] | Plan | None
"""Op pattern to site, or a plan whose stages say where ops are."""


def annotate(
    model: Traced | Placed,
    patterns: Map = None,
    *,
    default: SiteText,
    fallback: SiteText | None = None,
    machine: Machine,
    priority: Sequence[str] = (),
    profile: Profile | None = None,
    objective: Objective = "throughput",
    planner_s: float = 10.0,
    max_error: float | None = None,
) -> Placed:
    """Place every op of a model; see ``autosplit.annotate``.

    Raises:
        UsageError: every fault of the map, and every op that its device cannot run where there is no fallback.
        PlanError: a plan of another model.
        BackendError: the error against f32 is above ``max_error``.
        InfeasibleError: the planner finds no place for the ops that it was left.
    """
    if isinstance(model, Placed):
        if patterns is None:
            return model
        again = annotate(
            model.traced, patterns, default=default, fallback=fallback, machine=machine, priority=priority,
            profile=profile or model.profile, objective=objective, planner_s=planner_s, max_error=max_error,
        )  # fmt: skip
        return model if again.same_as(model) else again
    if isinstance(patterns, Plan):
        return placed_by_plan(model, patterns, machine, profile)
    faults = []
    sites: dict[str, Site] = {}
    for name, text in (("default", default), ("fallback", fallback)):
        if text is None or (name == "default" and text == AUTO):
            continue
        try:
            sites[name] = parse_site(text, machine)
        except UsageError as failure:
            faults.append(f"{name}: {failure}")
    choices, wrong = by_pattern(model, patterns or {}, machine, priority)
    copied, wrong_copies, removed = by_explicit_copies(model, choices, machine)
    choices |= copied
    raise_faults(UsageError, f"'{model.graph.name}' cannot be placed", [*faults, *wrong, *wrong_copies])
    if default != AUTO:
        usual = Choice(sites["default"], "default", f"the default, {sites['default']}")
        choices = {op.name: choices.get(op.name, usual) for op in model.graph.ops}
    choices, wrong = fall_back(model, choices, sites.get("fallback"), machine)
    raise_faults(UsageError, f"'{model.graph.name}' cannot be placed", wrong)
    planned = None
    if default == AUTO:
        if profile is None:
            raise UsageError("default='auto' needs the seconds of the ops; give a profile, or call autosplit.annotate")
        planned, choices = within_caps(model, choices, machine, profile, objective, planner_s)
    elsewhere = next((device.name for device in machine.devices if device.max_subgraphs is None and device.min_ops == 1), None)
    spare = sites.get("fallback") or (parse_site(elsewhere, machine) if default == AUTO and elsewhere else None)
    choices, wrong = keep_rules(model.graph, {op.name: choices[op.name] for op in model.graph.ops}, spare, machine)
    raise_faults(UsageError, f"'{model.graph.name}' cannot be placed", wrong)
    ordered = {op.name: choices[op.name] for op in model.graph.ops}
    homes = homes_of(model.graph, ordered)
    removed += [
        f"the explicit copy of '{value}' to {chain[-1]}: it is there"
        for (_, value), chain in model.copied.items()
        if value in homes and homes[value] == chain[-1]
    ]
    placed = Placed(model, machine, ordered, tuple(dict.fromkeys(removed)), profile, planned)
    return placed if max_error is None else require_error(placed, max_error)


def within_caps(
    traced: Traced, choices: Mapping[str, Choice], machine: Machine, profile: Profile, objective: Objective, planner_s: float
) -> tuple[Plan, dict[str, Choice]]:
    """``by_planner`` with caps that count weights, the values at their peak and the slots of rings.

    The planner counts weights, because a peak is not a sum over ops. Where its plan holds more than a cap, the planner is asked
    again with the cap less what the device holds beside weights, so the bound holds for plans within that smaller cap.

    Raises: InfeasibleError: no plan within the caps is found; the bytes of the last one are named.
    """
    aliases, tight, over = aliases_of(traced), machine, list[str]()
    for _ in range(MAX_CORRECTIONS if any(device.memory_bytes for device in machine.devices) else 1):
        plan, found = by_planner(traced, choices, tight, profile, objective, planner_s)
        held = held_by_device(stage_memories(traced.graph, plan, aliases.num_bytes, aliases.views))
        caps, over = dict[str, int](), []
        for device in machine.devices:
            cap, (weights, beside) = device.memory_bytes, held.get(device.name, (0, 0))
            if cap is not None and weights + beside > cap:
                caps[device.name] = max(1, cap - beside)
                over.append(
                    f"{device.name} would hold {bytes_text(weights)} of weights and {bytes_text(beside)} of values and ring "
                    f"slots, and its cap is {bytes_text(cap)}"
                )
        if not over:
            return plan, found
        tight = tight.with_memory(caps)
    raise InfeasibleError(f"no plan within the caps was found: {'; '.join(over)}. Raise a cap, or add a device.")


def by_planner(
    traced: Traced, choices: Mapping[str, Choice], machine: Machine, profile: Profile, objective: Objective, planner_s: float
) -> tuple[Plan, dict[str, Choice]]:
    """The planner's plan with the given choices as pins, and the choices of all ops.

    The bound of the plan holds for every placement that keeps the pins. Raises: InfeasibleError, ProfileError: as ``plan_model``.
    """
    pins = {op: choice.site.device for op, choice in choices.items()}
    known = profile.on(machine)
    backends = list(dict.fromkeys(setting.backend for setting in known.measured))
    plan = plan_model(
        traced.graph,
        machine,
        known,
        traced.source,
        Constraints(objective=objective, pins=pins, max_replicas=1),
        backends,
        time_limit_s=planner_s,
    )
    reason = f"the planner ({plan.status}, gap {plan.prediction.gap:.1%})"
    found = {op: Choice(Site(stage.devices[0], stage.backend), "planner", reason) for stage in plan.stages for op in stage.ops}
    return plan, {**found, **choices}


def placed_by_plan(traced: Traced, plan: Plan, machine: Machine, profile: Profile | None = None) -> Placed:
    """The placed graph of a plan. Raises: PlanError: a plan of another model, or a stage with replicas."""
    check_graph(plan.graph_hash, traced.graph)
    faults = [
        f"stage '{stage.name}' has {len(stage.devices)} replicas, and an op of a placed graph has one device"
        for stage in plan.stages
        if len(stage.devices) > 1
    ]
    raise_faults(PlanError, "the plan cannot become a placed graph", faults)
    plan.verify(traced.graph, machine)
    choices = {
        op: Choice(Site(stage.devices[0], stage.backend, plan.precision), "plan", f"stage '{stage.name}' of the plan")
        for stage in plan.stages
        for op in stage.ops
    }
    ordered = {op.name: choices[op.name] for op in traced.graph.ops}
    return Placed(traced, machine, ordered, (), profile)
