"""Search and run plans for requests of several sizes: buckets, one plan for all of them, and a contest under the traffic."""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil

from autosplit import api
from autosplit.arguments import checked
from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import deploy, machine_of_plan
from autosplit.deploying.setup import BUDGET, SETUP, Budget, Setup, as_budget
from autosplit.devices.discovering import Devices, as_machine
from autosplit.devices.processes import prepare_to_spawn
from autosplit.errors import ProfileError, UsageError
from autosplit.memory.stages import count
from autosplit.planning.baselines import baseline_plan, baselines_of
from autosplit.planning.predicting import predict
from autosplit.progress import progress_shown
from autosplit.reports.outcomes import PLAN
from autosplit.running.pipeline import Pipeline
from autosplit.serving.hostmanager import HostManager
from autosplit.shapes.buckets import MOST_VARIANTS, Buckets, Times, choose_buckets, fit_times
from autosplit.shapes.contest import LONGEST, ShapedReport, contest
from autosplit.shapes.mixing import fastest_s, mixed, weights_of
from autosplit.shapes.service import ShapedService
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.family import At, Family
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.shapes import Shapes, Traffic, even_traffic, sizes_text

HOPELESS = 3.0
"""A backend that takes this many times as long as the fastest one at the largest sizes is not measured at others."""

ERROR = 0.15
"""A size whose seconds the fit misses by more than this share is added to it, and the buckets are chosen anew."""

MOST_REFINED, MOST_BASELINES = 2, 3
"""Most sizes that are measured to check the fit, and most baselines beside the plan."""

MEMORY_SHARE = 0.5
"""Share of the free memory, where no device has a cap, that the variants of all stages may take beside the weights."""


@dataclass(frozen=True)
class FamilyResult:
    """The result of ``auto_family``.

    Attributes:
        family: the model at the sizes of the buckets.
        plan: the plan to use, with its ``shapes``.
        machine: the devices.
        profile: mean seconds of each op under the traffic.
        buckets: the buckets, and what they cost.
        times: seconds of a request as a function of its sizes.
        report: the plan beside its baselines; None if nothing ran.
        notes: sentences that the user should read.
    """

    family: Family
    plan: Plan
    machine: Machine
    profile: Profile
    buckets: Buckets
    times: Times
    report: ShapedReport | None
    notes: tuple[str, ...]

    def open(self, max_wait_s: float = 0.0) -> ShapedService:
        """The plan as a running service for requests of any size."""
        return open_family(self.family, self.plan, self.machine, max_wait_s=max_wait_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        shapes: Mapping[str, Any] = {
            "buckets": {dim: list(found) for dim, found in self.buckets.grid.items()},
            "waste": self.buckets.waste,
            "next_gain": self.buckets.next_gain,
            "fit_error": self.times.error,
        }
        report = self.report.to_dict() if self.report is not None else {}
        return {**report, "shapes": shapes, "notes": list(self.notes)}

    def __repr__(self) -> str:
        return f"FamilyResult({self.plan!r}, {self.buckets.sentence})"


@checked
def open_family(family: Family, plan: Plan, devices: Devices | None = None, *, max_wait_s: float = 0.0) -> ShapedService:
    """A plan with ``shapes`` as a running service for requests of any size within its ranges.

    Args:
        family: the model; the variants of the plan are made of it.
        plan: its plan.
        devices: the devices, or their names; by default those of the plan.
        max_wait_s: seconds for which a request may wait for others, to be computed together.
    Raises: UsageError: the plan has no shapes. PlanError, BackendError, WorkerError: as ``deploy``.
    """
    if plan.shapes is None:
        raise UsageError("the plan is for requests of one size; use autosplit.open_pipeline(traced, plan)")
    machine = machine_of_plan(plan, devices)
    family = family.only(plan.shapes.variants)
    with ExitStack() as opened:
        workspace = opened.enter_context(Workspace())
        host = opened.enter_context(HostManager(engine_factory=Pipeline))
        largest = family.variants[0]
        engine = deploy(host, largest.graph.name, largest, plan, machine, workspace, family.variants[1:])
        kept = ExitStack()
        service = ShapedService(family, engine, max_wait_s=max_wait_s, opened=kept)
        kept.push(opened.pop_all())  # not before: a service that cannot be made leaves its engine to this block
        return service


@checked
def auto_family(
    family: Family,
    devices: Devices | None = None,
    constraints: Constraints | None = None,
    *,
    traffic: Traffic | None = None,
    setup: Setup = SETUP,
    budget: Budget | float = BUDGET,
    compare: bool = True,
) -> FamilyResult:
    """Choose buckets, plan for the traffic, and run the plan beside its baselines.

    Args:
        family: what ``trace`` made of a model with ``sizes``.
        devices: the devices, or their names, as a list or with commas between; by default all of this machine.
        constraints: demands on the plan; none by default.
        traffic: how often each size comes; by default all sizes are alike.
        setup: backends, precision, store, and the progress function.
        budget: limits of time; no candidates but the plan and its baselines run.
        compare: whether they run; without it the plan is the planner's answer.
    Raises: UsageError: sizes of the traffic that are not allowed, or too many that may not be padded. The errors of ``api.auto``.
    """
    wanted, machine, budget = constraints or Constraints(), as_machine(devices), as_budget(budget)
    wanted.require_consistent(machine)
    if setup.hosts is not None:
        raise UsageError("requests of several sizes run on one machine; leave out the hosts, or give one size")
    flow = (traffic or even_traffic(family.allowed)).verify(family.allowed)
    prepare_to_spawn()
    with progress_shown(setup.progress) as progress, Workspace() as own:
        setup = replace(setup, progress=progress, workspace=setup.workspace or own)
        profiles, times, buckets, notes = _bucketed(family, flow, machine, wanted, setup)
        family = family.only(buckets.variants)
        largest = family.variants[0]
        points = list(times.measured)
        weights = weights_of(buckets, times, flow, points)
        num_bytes = [sum(value.num_bytes for value in family.at(_named(family, at)).graph.values.values()) for at in points]
        profile = mixed([profiles[at] for at in points], weights, num_bytes)
        found = api.search(largest, profile, machine, wanted, setup=setup, budget=replace(budget, search_s=0.0))
        plan = replace(found.plan, shapes=_section(family, buckets))
        report = None
        if compare:
            report = _compared(family, plan, flow, machine, profile, profiles[points[0]], not wanted.forced, setup, budget)
            if report.chosen == LONGEST:
                one = {dim: (sizes[-1],) for dim, sizes in family.allowed.items()}
                buckets = replace(buckets, grid=one, expected_s=buckets.longest_s)
            plan = replace(report.best.plan, shapes=_section(family, buckets), chosen=report.chosen)
    return FamilyResult(family, plan, machine, profile, buckets, times, report, (*family.notes, *notes))


@checked
def run_family(
    family: Family,
    plan: Plan,
    devices: Devices | None = None,
    *,
    traffic: Traffic | None = None,
    baselines: bool = True,
    setup: Setup = SETUP,
    budget: Budget | float = BUDGET,
) -> ShapedReport:
    """Run a plan with ``shapes`` under the traffic, beside its baselines.

    Args:
        family: the model at the sizes of the plan's buckets.
        plan: the plan.
        devices: the devices, or their names; by default those of the plan.
        traffic: how often each size comes; by default all sizes are alike.
        baselines: whether the baselines run too.
        setup: the progress function.
        budget: rounds, and their seconds.
    Raises: UsageError, PlanError, BackendError, WorkerError: sizes that are not allowed; the plan cannot be run.
    """
    machine, budget = machine_of_plan(plan, devices), as_budget(budget)
    flow = (traffic or even_traffic(family.allowed)).verify(family.allowed)
    prepare_to_spawn()
    with progress_shown(setup.progress) as progress, Workspace() as own:
        setup = replace(setup, progress=progress, workspace=setup.workspace or own)
        return _compared(family, plan, flow, machine, None, None, baselines, setup, budget)


def _named(family: Family, sizes: tuple[int, ...]) -> At:
    return dict(zip(family.allowed, sizes, strict=True))


def _bucketed(
    family: Family, traffic: Traffic, machine: Machine, wanted: Constraints, setup: Setup
) -> tuple[dict[tuple[int, ...], Profile], Times, Buckets, list[str]]:
    """Measure few sizes, fit, choose buckets; then check the fit at the bucket that counts most, and refine it."""
    largest = tuple(family.largest.values())
    wanted.verify(family.variants[0].graph, machine)
    profiles = {largest: api.measure(family.variants[0], machine, setup=setup)}
    best_s = fastest_s(profiles[largest])
    kept = {setting.backend for setting in profiles[largest].measured if profiles[largest].whole_s(*setting) < HOPELESS * best_s}
    setup = replace(setup, backends=sorted(kept))
    most, limit = _most_variants(family, machine)

    def profiled(sizes: tuple[int, ...]) -> float:
        if sizes not in profiles:
            profiles[sizes] = api.measure(family.at(_named(family, sizes)), machine, setup=setup)
        return fastest_s(profiles[sizes])

    measured = {largest: best_s}
    for sizes in _first_sizes(family, traffic):
        measured[sizes] = profiled(sizes)
    exact = family.unpaddable
    times = fit_times(measured)
    buckets = choose_buckets(times, traffic, family.allowed, exact=exact, most=most)
    for _ in range(MOST_REFINED):
        homes = _seconds_by_home(buckets, times, traffic)
        unknown = [home for home in sorted(homes, key=lambda home: -homes[home]) if home not in measured]
        if not unknown:
            break
        told_s, measured[unknown[0]] = times.seconds(unknown[0]), profiled(unknown[0])
        times = fit_times(measured)
        if abs(told_s / measured[unknown[0]] - 1) <= ERROR:
            break
        buckets = choose_buckets(times, traffic, family.allowed, exact=exact, most=most)
    notes = [buckets.sentence]
    if most < MOST_VARIANTS:
        notes.append(f"{limit}, so that at most {most} variants are made")
    return profiles, times, buckets, notes


def _first_sizes(family: Family, traffic: Traffic) -> list[tuple[int, ...]]:
    """Sizes to measure beside the largest ones: the smallest that come, and the geometric mean of both in each dimension."""
    low = [next(iter(traffic.along(dim))) for dim in family.allowed]
    middle = []
    for least, sizes in zip(low, family.allowed.values(), strict=True):
        between = [size for size in sizes if size >= (least * sizes[-1]) ** 0.5]
        middle.append(between[0])
    largest = tuple(family.largest.values())
    return [sizes for sizes in dict.fromkeys([tuple(low), tuple(middle)]) if sizes != largest]


def _seconds_by_home(buckets: Buckets, times: Times, traffic: Traffic) -> dict[tuple[int, ...], float]:
    """The share of the expected seconds that each bucket takes."""
    found: dict[tuple[int, ...], float] = {}
    for sizes, share in traffic.shares.items():
        home = buckets.home(sizes)
        found[home] = found.get(home, 0.0) + share * times.seconds(home)
    return found


def _most_variants(family: Family, machine: Machine) -> tuple[int, str]:
    """How many variants memory allows, counted as if each took what the largest one takes beside the weights; and the limit."""
    largest = family.variants[0]
    ops = tuple(op.name for op in largest.graph.ops)
    whole = baseline_plan(largest.graph, largest.source, "whole", "eager", [(ops, machine.devices[:1])])
    memory = count(largest.graph, whole, values_of(largest)).stages[0].memory
    assert memory is not None
    capped = [device for device in machine.devices if device.memory_bytes is not None]
    free = min((device.memory_bytes or 0 for device in capped), default=0) * len(capped)
    if not capped:
        free = round(MEMORY_SHARE * psutil.virtual_memory().available)
    most = (free - memory.weight_bytes) // max(memory.arena_bytes + memory.ring_bytes, 1)
    return max(1, min(MOST_VARIANTS, most)), f"a variant takes {(memory.arena_bytes + memory.ring_bytes) / 1e6:.0f} MB"


def _section(family: Family, buckets: Buckets) -> Shapes:
    return Shapes(
        {name: dict(axes) for name, axes in family.shapes.items()},
        {dim: sizes_text(sizes) for dim, sizes in family.allowed.items()},
        dict(buckets.grid),
        buckets.expected_s,
        buckets.exact_s,
        buckets.longest_s,
        dict(family.unpaddable),
    )


def _compared(
    family: Family,
    plan: Plan,
    traffic: Traffic,
    machine: Machine,
    profile: Profile | None,
    of_longest: Profile | None,
    with_baselines: bool,
    setup: Setup,
    budget: Budget,
) -> ShapedReport:
    """The plan beside the usual ways to run the model with the same buckets, and beside itself padded to the longest."""
    graph = family.variants[0].graph
    beside = baselines_of(graph, plan, machine, profile, isolate=setup.isolate)
    ranked = sorted(beside.plans, key=lambda name: -beside.plans[name].prediction.throughput_per_s)
    fit = [name for name in ranked if beside.plans[name].hash != replace(plan, shapes=None).hash]
    contenders: dict[str, tuple[Plan, Family]] = {PLAN: (plan, family)}
    if not family.unpaddable:
        contenders[LONGEST] = (replace(plan, shapes=None), family.only([]))
    contenders |= {name: (beside.plans[name], family) for name in (fit[:MOST_BASELINES] if with_baselines else [])}
    predicted = {name: _per_s(found) for name, (found, _) in contenders.items()}
    predicted[LONGEST] = 0.0
    if of_longest is not None:
        with suppress(ProfileError):  # a backend that was not measured at the largest sizes
            predicted[LONGEST] = _per_s(predict(plan, graph, machine, of_longest))
    assert setup.workspace is not None
    with progress_shown(setup.progress) as progress:
        return contest(
            contenders,
            traffic,
            machine,
            setup.workspace,
            num_rounds=budget.num_rounds,
            round_s=budget.round_s,
            predicted=predicted,
            progress=progress,
        )


def _per_s(plan: Plan) -> float:
    """Predicted requests per second."""
    return 1 / plan.prediction.bottleneck_s if plan.prediction.bottleneck_s > 0 else 0.0
