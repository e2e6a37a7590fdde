"""annotate(): a map of patterns, explicit copies, a default and a fallback become a placed graph."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite

from autosplit.errors import PlanError, ProfileError, UsageError, raise_faults
from autosplit.memory.account import Account
from autosplit.memory.stages import footprints_of
from autosplit.placing.moves import homes_of
from autosplit.placing.patterns import by_explicit_copies, by_pattern
from autosplit.placing.placed import Placed
from autosplit.placing.precisions import require_error
from autosplit.placing.refusals import fall_back
from autosplit.placing.rules import broken_rules, choices_of, every_placement, keep_rules, parts_on
from autosplit.placing.sites import AUTO, Choice, Site, SiteText, parse_site, usual_backend
from autosplit.planning.caps import plan_within_caps
from autosplit.planning.predicting import bounded
from autosplit.planning.question import Question
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints, Objective
from autosplit.values.graph import check_graph
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile

Map = Mapping[str, SiteText] | Plan | None
"""Op pattern to site, or a plan whose stages say where ops are."""


def annotate(
    traced: Traced,
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
    account: Account | None = None,
) -> Placed:
    """Place every op of a model; see ``autosplit.annotate``.

    If a device has a memory cap, ``account`` gives the planner's plans their memory; without one, nothing is measured for it.

    Raises:
        UsageError: every fault of the map, and every op that its device cannot run if there is no fallback.
        PlanError: the plan was made for another model.
        BackendError: the error against f32 is above ``max_error``.
        InfeasibleError: the planner finds no place for the ops that it was left.
    """
    if isinstance(patterns, Plan):
        return placed_by_plan(traced, patterns, machine, profile)
    sites, faults = _named_sites({"default": None if default == AUTO else default, "fallback": fallback}, machine)
    choices, wrong = by_pattern(traced, patterns or {}, machine, priority)
    copied, wrong_copies, removed = by_explicit_copies(traced, choices, machine)
    choices |= copied
    if "default" in sites:
        usual = Choice(sites["default"], "default", f"the default, {sites['default']}")
        choices = {op.name: choices.get(op.name, usual) for op in traced.graph.ops}
    faults += [*wrong, *wrong_copies]
    if fallback is None or "fallback" in sites:
        choices, wrong = fall_back(traced, choices, sites.get("fallback"), machine)
        faults += wrong
    raise_faults(UsageError, f"'{traced.graph.name}' cannot be placed", faults)
    planned = None
    if default == AUTO:
        if profile is None:
            raise UsageError("default='auto' needs the seconds of the ops; give a profile, or call autosplit.annotate")
        planned = by_planner(traced, choices, machine, profile, objective, planner_s, account)
        choices = {**choices_of(planned), **choices}
    elsewhere = next((device.name for device in machine.devices if device.max_subgraphs is None and device.min_ops == 1), None)
    spare = sites.get("fallback") or (parse_site(elsewhere, machine) if default == AUTO and elsewhere else None)
    if planned is not None and profile is not None:
        planned, choices = by_rules(traced, planned, choices, machine, profile)
    choices, wrong = keep_rules(traced.graph, {op.name: choices[op.name] for op in traced.graph.ops}, spare, machine)
    raise_faults(UsageError, f"'{traced.graph.name}' cannot be placed", wrong)
    ordered = {op.name: choices[op.name] for op in traced.graph.ops}
    homes = homes_of(traced.graph, ordered)
    removed += [
        f"the explicit copy of '{value}' to {chain[-1]}: it is there"
        for (_, value), chain in traced.copied.items()
        if value in homes and homes[value] == chain[-1]
    ]
    placed = Placed(traced, machine, ordered, tuple(dict.fromkeys(removed)), profile, planned)
    return placed if max_error is None else require_error(placed, max_error)


def _named_sites(texts: Mapping[str, SiteText | None], machine: Machine) -> tuple[dict[str, Site], list[str]]:
    """The sites of the arguments that are given, by the argument's name, and the faults of the others."""
    sites: dict[str, Site] = {}
    faults = []
    for name, text in texts.items():
        try:
            sites |= {} if text is None else {name: parse_site(text, machine)}
        except UsageError as failure:
            faults.append(f"{name}: {failure}")
    return sites, faults


def by_planner(
    traced: Traced,
    choices: Mapping[str, Choice],
    machine: Machine,
    profile: Profile,
    objective: Objective,
    planner_s: float,
    account: Account | None = None,
) -> Plan:
    """The planner's plan within the caps, with the given choices as pins.

    The bound of the plan holds for every placement that keeps the pins. Raises: InfeasibleError, ProfileError: as ``plan_model``.
    """
    pins = {op: choice.site.device for op, choice in choices.items()}
    known, wanted = profile.on(machine), Constraints(objective=objective, pins=pins, max_replicas=1)
    backends = tuple(dict.fromkeys(setting.backend for setting in known.measured))
    account = account or Account(traced.graph, values_of(traced), footprints_of(known))
    about = traced.graph, known, traced.source, machine, backends, wanted
    return plan_within_caps(Question(*about, time_limit_s=planner_s, account=account).verify())


def by_rules(
    traced: Traced, planned: Plan, choices: Mapping[str, Choice], machine: Machine, profile: Profile
) -> tuple[Plan, dict[str, Choice]]:
    """The plan and the choices where accelerators have rules on subgraphs, which the planner does not know.

    If its answer breaks a rule and there are few ops, every placement within the rules is tried. Else the answer stays, and
    ops fall back afterwards. The planner's bound holds in both cases, because rules only leave placements out.
    """
    found = dict(choices)
    if not any(broken_rules(device, parts_on(traced.graph, found, device)) for device in machine.devices):
        return planned, found
    used = {stage.devices[0]: stage.backend for stage in planned.stages}
    sites = [Site(one.name, used.get(one.name, usual_backend(machine, one.name))) for one in machine.devices]
    options = {op: sites if choice.kind == "planner" else [choice.site] for op, choice in found.items()}
    best: tuple[float, Plan, dict[str, Choice]] | None = None
    for placement in every_placement(traced.graph, found, options, machine):
        try:
            plan = Placed(traced, machine, placement, (), profile, planned).plan()
        except (PlanError, ProfileError):  # an op has no time on its device, or a cap is exceeded
            continue
        seconds = plan.prediction.latency_s if planned.objective == "latency" else plan.prediction.bottleneck_s
        if isfinite(seconds) and (best is None or 0 < seconds < best[0]):
            best = seconds, plan, placement
    if best is None:
        return planned, found
    seconds, plan, placement = best
    return bounded(replace(plan, method=f"{planned.method}, every placement within the rules"), seconds), placement


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
    choices = dict[str, Choice]()
    for stage, precision in zip(plan.stages, plan.precisions, strict=True):
        site = Site(stage.devices[0], stage.backend, precision)
        choices |= dict.fromkeys(stage.ops, Choice(site, "plan", f"stage '{stage.name}' of the plan"))
    ordered = {op.name: choices[op.name] for op in traced.graph.ops}
    return Placed(traced, machine, ordered, (), profile)
