"""annotate(): every op of a model on a device, by patterns, by explicit copies in the model, and by cost."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite

from autosplit import api
from autosplit.arguments import checked
from autosplit.deploying.footprints import footprints_for
from autosplit.deploying.setup import BUDGET, SETUP, Budget, Setup, as_budget
from autosplit.devices.discovering import Devices, as_machine
from autosplit.errors import PlanError, ProfileError, UsageError, raise_faults
from autosplit.generating.steps import StepFamily
from autosplit.placing.moves import homes_of
from autosplit.placing.patterns import by_explicit_copies, by_pattern
from autosplit.placing.placed import Placed
from autosplit.placing.precisions import require_error
from autosplit.placing.refusals import fall_back
from autosplit.placing.rules import broken_rules, choices_of, every_placement, keep_rules, parts_on
from autosplit.placing.sites import AUTO, Choice, Site, SiteText, backends_named, parse_site, usual_backend
from autosplit.planning.caps import plan_within_caps
from autosplit.planning.predicting import bounded
from autosplit.planning.question import TIME_LIMIT_S, Question
from autosplit.shapes.profiles import shapes_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import Family
from autosplit.values.constraints import Constraints, Objective
from autosplit.values.graph import check_graph
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile


@checked
def annotate(
    model: Traced | Family | Placed,
    patterns: Mapping[str, SiteText] | Plan | None = None,
    default: SiteText | None = None,
    fallback: SiteText | None = None,
    machine: Devices | None = None,
    *,
    priority: Sequence[str] = (),
    profile: Profile | None = None,
    objective: Objective = "throughput",
    setup: Setup = SETUP,
    budget: Budget | float = BUDGET,
    max_error: float | None = None,
) -> Placed:
    """Give every op of a model one device and one backend, and put copies where values change devices.

    ::

        placed = autosplit.annotate(traced, {"encoder.*": "cpu:1", "aten.softmax*": ("cpu:0", "openvino")}, default="cpu:0")
        placed.why("softmax_3")

    Args:
        model: a traced model, or a placed graph, which is returned as it is if the map places every op where it is. Of a model at
            several sizes, ``Placed.plan`` has the buckets of the profile; without one, the sizes of the model's variants.
        patterns: op name, module path or operator (with ``*`` and ``?``) to a device, or to a device with a backend, or with a
            backend and a precision. Or a plan, whose stages say where ops are.
        default: the place of ops that neither a pattern nor an explicit copy places; ``auto`` lets the planner choose. By
            default the first device.
        fallback: the place of ops that their own device cannot run.
        machine: the devices, or their names, as a list or with commas between; by default all of this machine.
        priority: patterns that win if several match an op, the strongest first.
        profile: seconds of the ops for ``auto`` and for ``why``; ``auto`` measures them if they are not given.
        objective: the objective of the planner, ``throughput`` or ``latency``.
        setup: how ``auto`` measures.
        budget: seconds of the planner.
        max_error: largest error against f32 that is allowed, relative to the largest value; None for any.
    Raises:
        UsageError: every fault of the map, and every op that its device cannot run if there is no fallback. The model generates.
        PlanError: the plan was made for another model.
        BackendError: a backend refuses its part, or the error is above ``max_error``.
        InfeasibleError: the planner finds no place for the ops that are left to it.
    """
    if isinstance(model, StepFamily):
        raise UsageError("a model that generates is planned, not placed; pin its ops by Constraints(pins=...)")
    budget = as_budget(budget)
    if isinstance(model, Placed) and patterns is None:
        return model
    known = model.machine if isinstance(model, Placed) and machine is None else as_machine(machine)
    if default == AUTO and profile is None and not isinstance(model, Placed):
        named = backends_named(patterns) if isinstance(patterns, Mapping) else ()
        usual = dict.fromkeys(backend for device in known.devices for backend in device.backends or ("eager",))
        backends = tuple(dict.fromkeys((*usual, *named))) if setup.backends is None else tuple(setup.backends)
        profile = api.measure(model, known, setup=replace(setup, backends=backends))
    family, plain = (model, model.variants[0]) if isinstance(model, Family) else (None, model)
    traced, timed = (plain.traced, profile or plain.profile) if isinstance(plain, Placed) else (plain, profile)
    if isinstance(patterns, Plan):
        placed = _by_plan(traced, patterns, known, timed)
    else:
        default = default or known.devices[0].name
        choices, removed, spare = _by_hand(traced, patterns or {}, default, fallback, known, priority)
        planned = None
        if default == AUTO:
            if timed is None:
                raise UsageError("default='auto' needs the seconds of the ops; give a profile")
            pins = {op: choice.site.device for op, choice in choices.items()}
            wanted, there = Constraints(objective=objective, pins=pins, max_replicas=1), timed.on(known)
            backends = tuple(dict.fromkeys(setting.backend for setting in there.measured))
            account = footprints_for(family or traced, timed, known, setup.workspace).account(traced, timed)
            about = traced.graph, there, traced.source, known, backends, wanted
            limit_s = TIME_LIMIT_S if budget.planner_s is None else budget.planner_s
            planned = plan_within_caps(Question(*about, time_limit_s=limit_s, account=account).verify())
            planned, choices = _by_rules(traced, planned, {**choices_of(planned), **choices}, known, timed)
            free = next((one.name for one in known.devices if one.max_subgraphs is None and one.min_ops == 1), None)
            spare = spare or (None if free is None else parse_site(free, known))
        choices, wrong = keep_rules(traced.graph, {op.name: choices[op.name] for op in traced.graph.ops}, spare, known)
        raise_faults(UsageError, f"'{traced.graph.name}' cannot be placed", wrong)
        homes = homes_of(traced.graph, choices)
        removed += [
            f"the explicit copy of '{value}' to {chain[-1]}: it is there"
            for (_, value), chain in traced.copied.items()
            if value in homes and homes[value] == chain[-1]
        ]
        placed = Placed(traced, known, choices, tuple(dict.fromkeys(removed)), timed, planned)
        placed = placed if max_error is None else require_error(placed, max_error)
    if isinstance(plain, Placed) and placed.same_as(plain):
        placed = plain
    if isinstance(patterns, Plan):
        shapes = patterns.shapes
    elif family is not None:
        shapes = shapes_of(family, placed.plan(), None if profile is None else profile.shapes)
    else:
        shapes = plain.shapes if isinstance(plain, Placed) else None
    return placed if placed.shapes == shapes else replace(placed, shapes=shapes)


def _by_hand(
    traced: Traced,
    patterns: Mapping[str, SiteText],
    default: SiteText,
    fallback: SiteText | None,
    machine: Machine,
    priority: Sequence[str],
) -> tuple[dict[str, Choice], list[str], Site | None]:
    """The choices by patterns, explicit copies, default and fallback; the copies that change nothing; and the fallback.

    Raises: UsageError: with every fault.
    """
    sites, faults = _named_sites({"default": None if default == AUTO else default, "fallback": fallback}, machine)
    choices, wrong = by_pattern(traced, patterns, machine, priority)
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
    return choices, removed, sites.get("fallback")


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


def _by_rules(
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


def _by_plan(traced: Traced, plan: Plan, machine: Machine, profile: Profile | None) -> Placed:
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
