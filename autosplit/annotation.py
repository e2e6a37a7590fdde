"""annotate(): every op of a model on a device, by patterns, by explicit copies in the model, and by cost."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autosplit import api
from autosplit.arguments import checked
from autosplit.deploying.footprints import footprints_for
from autosplit.deploying.setup import BUDGET, SETUP, Budget, Setup, as_budget
from autosplit.devices.discovering import Devices, as_machine
from autosplit.errors import UsageError
from autosplit.generating.steps import StepFamily
from autosplit.placing import annotating
from autosplit.placing.placed import Placed
from autosplit.placing.sites import AUTO, SiteText, backends_named
from autosplit.shapes.profiles import shapes_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import Family
from autosplit.values.constraints import Objective
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
    placed = annotating.annotate(
        traced,
        patterns,
        default=default or known.devices[0].name,
        fallback=fallback,
        machine=known,
        priority=priority,
        profile=timed,
        objective=objective,
        planner_s=10.0 if budget.planner_s is None else budget.planner_s,
        max_error=max_error,
        account=footprints_for(family or traced, timed, known, setup.workspace).account(traced, timed),
    )
    if isinstance(plain, Placed) and placed.same_as(plain):
        placed = plain
    if isinstance(patterns, Plan):
        shapes = patterns.shapes
    elif family is not None:
        shapes = shapes_of(family, placed.plan(), None if profile is None else profile.shapes)
    else:
        shapes = plain.shapes if isinstance(plain, Placed) else None
    return placed if placed.shapes == shapes else replace(placed, shapes=shapes)
