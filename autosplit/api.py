"""The public calls: ``auto`` does the whole job; ``trace``, ``measure``, ``search``, ``run`` and ``export`` are its steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from autosplit.arguments import checked
from autosplit.backends.base import absent_runtimes
from autosplit.backends.warming import begin_loading
from autosplit.deploying.bench import Bench
from autosplit.deploying.comparing import Subject, expectation, run_beside
from autosplit.deploying.footprints import Footprints, footprints_for
from autosplit.deploying.networks import machine_of_plan
from autosplit.deploying.service import Service
from autosplit.deploying.setup import BUDGET, SETUP, Budget, Hosts, Setup, as_budget
from autosplit.devices.discovering import Devices, as_machine
from autosplit.devices.processes import prepare_to_spawn
from autosplit.errors import UsageError, names
from autosplit.exporting import base as targets
from autosplit.generating.choosing import best_plan
from autosplit.generating.phases import PhaseProfile, demands_of, measure_phases, stored_phases
from autosplit.generating.steps import StepFamily
from autosplit.generating.trials import compare_generators
from autosplit.keeping import keep_footprints, keep_runs, keep_search, stored_profile
from autosplit.microbatches import cut, may_cut
from autosplit.modeltrace import Model as Model
from autosplit.modeltrace import trace as trace
from autosplit.placing.rules import broken_by
from autosplit.planning.estimating import with_estimates
from autosplit.planning.predicting import measured_backends
from autosplit.planning.predicting import predict as predict_plan
from autosplit.planning.question import TIME_LIMIT_S, Question, verify_early
from autosplit.preloading import load
from autosplit.profiling import profiles_of
from autosplit.progress import announce, progress_shown
from autosplit.reports.runreport import RunReport
from autosplit.shapes.contest import compare_sizes
from autosplit.shapes.pipelines import open_pipeline
from autosplit.shapes.profiles import measure_sizes, shapes_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import Family
from autosplit.tracing.loading import Inputs
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.shapes import Traffic
from autosplit.versions import makers

if TYPE_CHECKING:
    from autosplit.searching.candidates import SearchResult


@checked
def measure(
    traced: Traced | Family,
    devices: Devices | None = None,
    *,
    traffic: Traffic | None = None,
    setup: Setup = SETUP,
    then_search: Constraints | None = None,
) -> Profile:
    """Seconds of every op on every device and backend; unchanged ones come from the store.

    For a model of several sizes the seconds are means under the traffic, measured at a few sizes; buckets are chosen from them.
    For a model that generates they are means of steps that decode and of steps with prompts.
    A device that is not here gets the speed that the machine states, or a stored profile of another machine, as an estimate. A
    backend that cannot compute in the setup's precision, refuses the model, or gives wrong numbers is left out, with a note.

    Args:
        traced: the model.
        devices: the devices, or their names, as a list or with commas between; by default all of this machine.
        traffic: how often each size comes, for a model of several; by default all sizes are alike.
        setup: backends, precision, store, and the progress function.
        then_search: the demands of a search that follows; the planner is loaded while files are prepared.
    Raises: InfeasibleError: weights alone break the caps. UsageError: demands with faults. Others as ``measuring.measure``.
    """
    machine = _machine(devices, setup)
    verify_early(then_search or Constraints(), traced.graph, machine)
    if isinstance(traced, StepFamily):
        return measure_phases(traced, traffic, machine, setup, profiles_of)
    if isinstance(traced, Family):
        return measure_sizes(traced, traffic, machine, setup, measure)
    return profiles_of([traced], machine, setup, then_search)[0]


@checked
def search(
    traced: Traced | Family,
    profile: Profile,
    devices: Devices | None = None,
    constraints: Constraints | None = None,
    *,
    setup: Setup = SETUP,
    budget: Budget | float = BUDGET,
) -> "SearchResult":
    """The plan that measures best within the budget.

    A request of several items may be cut into microbatches if the model is a spec, which can be traced again. The plan of a
    model of several sizes is the planner's answer; ``run`` compares it with others.

    Args:
        traced: the model, traced for whole requests.
        profile: its measured ops; the plan computes in the precision of the profile.
        devices: the devices, or their names, as a list or with commas between; by default all of this machine.
        constraints: demands on the plan; none by default.
        setup: backends (by default all of the profile), queue depth, seed, journal; ``max_error`` for lower precisions of stages.
        budget: seconds for running candidates, for the planner, and for the explanation; a number is those for candidates.
    Raises: InfeasibleError: no plan meets the constraints. ProfileError: a measurement is missing.
    """
    footprints = footprints_for(traced, profile, _machine(devices, setup), setup.workspace)
    if not isinstance(traced, Family):
        return _search(traced, profile, footprints, constraints, setup, as_budget(budget))
    setup.require_one_precision()
    if profile.shapes is None:
        raise UsageError("the profile is of requests of one size; measure the model that was traced with sizes=")
    # An explanation would be that of the largest size alone; ``phase_rows`` explains the phases of a generator.
    setup, budget = replace(setup, keep=None), replace(as_budget(budget), search_s=0.0, explain_s=0.0)
    ask = partial(_search, traced.variants[0], profile, footprints, setup=setup, budget=budget)
    if isinstance(traced, StepFamily) and isinstance(profile, PhaseProfile):
        first = ask(demands_of(constraints))
        return replace(first, plan=best_plan(traced, profile, footprints, constraints, first.plan, lambda one: ask(one).plan))
    found = ask(constraints)
    shapes = shapes_of(traced, found.plan, profile.shapes)
    if shapes.dynamic != profile.shapes.dynamic:  # a program for each variant takes more memory
        return search(traced, replace(profile, shapes=shapes), devices, constraints, setup=setup, budget=budget)
    return replace(found, plan=replace(found.plan, shapes=shapes))


def _search(
    traced: Traced, profile: Profile, footprints: Footprints, constraints: Constraints | None, setup: Setup, budget: Budget
) -> "SearchResult":
    """``search`` for requests of one size, on the machine of ``footprints``."""
    load("autosplit.searching.loop")
    from autosplit.searching import loop

    machine = footprints.machine
    measure_part = partial(measure, devices=machine, setup=replace(setup, progress=False, remeasure=False))
    question = question_of(traced, profile, machine, setup, TIME_LIMIT_S if budget.planner_s is None else budget.planner_s)
    question = replace(question, constraints=constraints or Constraints())
    with progress_shown(setup.progress) as progress:
        result = loop.search(
            question.verify(),
            traced,
            budget=budget,
            setup=setup,
            subject_for=partial(cut, traced, measure_part) if may_cut(traced, profile, budget) else None,
            footprints=footprints,
            progress=progress,
            keep=lambda found: _keep(_with_versions(found), setup),
        )
    result = _with_versions(result)
    return replace(result, plan=with_estimates(result.plan, result.profile))


def question_of(traced: Traced, profile: Profile, machine: Machine, setup: Setup, time_limit_s: float) -> Question:
    """The question of a model to the planner, with the backends, the queue depth, the seed and the log of the setup."""
    measured = measured_backends(profile, profile.usable(machine))
    backends = tuple(name for name in measured if setup.backends is None or name in setup.backends) or tuple(setup.backends or ())
    about = traced.graph, profile, traced.source, machine, backends
    return Question(*about, queue_depth=setup.queue_depth, time_limit_s=time_limit_s, seed=setup.seed, log=setup.log)


def _with_versions(found: "SearchResult") -> "SearchResult":
    return replace(found, plan=replace(found.plan, versions=makers()))


def _keep(found: "SearchResult", setup: Setup) -> None:
    """Keep the plans and measurements of a call that was stopped."""
    keep_search(found, setup)
    if setup.keep is not None:
        setup.keep(found)


def _machine(devices: Devices | None, setup: Setup) -> Machine:
    """The devices that a call names, on this machine or on the hosts of the setup."""
    if setup.hosts is None or isinstance(devices, Machine):
        return as_machine(devices)
    return setup.hosts.machine if devices is None else setup.hosts.machine.only(names("devices", devices))


@checked
def run(
    traced: Traced | Family,
    plan: Plan,
    devices: Devices | None = None,
    constraints: Constraints | None = None,
    *,
    traffic: Traffic | None = None,
    profile: Profile | None = None,
    baselines: bool = True,
    setup: Setup = SETUP,
    budget: Budget | float = BUDGET,
) -> RunReport:
    """Run a plan, checked against the unsplit model, beside its baselines: the usual ways to run the same model.

    Args:
        traced: the model, traced for the plan's microbatch.
        plan: the plan; one without a prediction gets it from the profile.
        devices: the devices, or their names, as a list or with commas between; by default those of the plan.
        constraints: demands that a faster baseline must meet to become the plan; None keeps the plan in any case.
        traffic: how often each size comes, for a model of several; by default all sizes are alike.
        profile: predicts the plan and its baselines; by default the profile in the setup's store.
        baselines: whether the baselines run too.
        setup: the store, which keeps predicted beside measured (``autosplit profile --accuracy``), and the progress function.
        budget: rounds, requests, and seconds for compiling.
    Raises: PlanError, BackendError, WorkerError, StageError: the plan does not fit, or cannot be run.
    """
    machine = machine_of_plan(plan, devices) if setup.hosts is None else _machine(devices, setup)
    machine = machine if profile is None else profile.usable(machine, plan.devices)
    if isinstance(traced, StepFamily):
        if not isinstance(profile, PhaseProfile):
            profile = stored_phases(traced, machine, lambda one: stored_profile(one, plan, machine, setup))
        beside = partial(compare_generators, profile=profile, baselines=baselines, setup=setup, budget=as_budget(budget))
        report, footprints = beside(traced, plan, machine, constraints)
        return replace(report, notes=(*report.notes, *keep_footprints(traced, profile, footprints, setup)))
    if isinstance(traced, Family):
        asked = (traced, plan, machine, constraints, traffic)
        return compare_sizes(*asked, profile=profile, baselines=baselines, setup=setup, budget=as_budget(budget))
    subjects = {plan.microbatch: (traced, profile or stored_profile(traced, plan, machine, setup))}
    return run_subjects(subjects, plan, machine, constraints, setup=setup, budget=as_budget(budget), baselines=baselines)


def run_subjects(
    subjects: Mapping[int, Subject],
    plan: Plan,
    machine: Machine,
    constraints: Constraints | None,
    *,
    setup: Setup,
    budget: Budget,
    baselines: bool = True,
) -> RunReport:
    """``run`` with the model traced for several microbatches. If the plan cuts requests, baselines also take whole requests."""
    with progress_shown(setup.progress) as progress:
        report = run_beside(subjects, plan, machine, constraints, baselines, setup=setup, budget=budget, progress=progress)
    return replace(report, notes=(*report.notes, *keep_runs(report, setup)))


@checked
def predict(plan: Plan, profile: Profile, graph: Graph | Traced | None = None, devices: Devices | None = None) -> Plan:
    """The plan with the loads, throughput and latency that a profile predicts.

    Args:
        plan: any plan, such as one that was edited.
        profile: the measured ops.
        graph: the model; by default the plan's own, traced again, which needs a model that a spec names.
        devices: the devices, or their names, as a list or with commas between, here or not; by default those of the plan.
    Raises: PlanError: the plan does not fit the graph. ProfileError: the profile lacks a measurement that the plan needs.
    """
    if graph is None:
        if not plan.source.spec:
            raise UsageError("the plan was made for a Python object, which cannot be traced again; give its graph or trace")
        graph = trace(plan.source.spec, batch=plan.microbatch, seq_len=plan.source.seq_len, weights=False)
    graph = graph.graph if isinstance(graph, Traced) else graph
    machine = Machine.of(map(parse_device, plan.devices)) if devices is None else as_machine(devices, here=False)
    return with_estimates(predict_plan(plan.verify(graph, machine), graph, machine, profile), profile)


@dataclass(frozen=True)
class AutoResult:
    """The result of ``auto``: the devices, the profile, the search, the report, and the traced model of the plan to use.
    ``family`` is the model at several sizes; None for one size."""

    machine: Machine
    profile: Profile
    search: "SearchResult"
    report: RunReport
    traced: Traced
    hosts: Hosts | None = None
    family: Family | None = None

    @property
    def plan(self) -> Plan:
        """The plan to use: the searched one, or the baseline that measured better."""
        return self.report.best_plan

    def open(self) -> Service:
        """The plan to use as a running service, which goes on without a device that is lost."""
        return open_pipeline(self.family or self.traced, self.plan, self.machine, hosts=self.hosts, profile=self.profile)

    def __repr__(self) -> str:
        return f"AutoResult({self.report!r})"

    def _repr_html_(self) -> str:
        from autosplit.figures import plot_run  # matplotlib takes 0.5 s to load, and only notebooks need it here

        return self.report._repr_html_() + self.plan._repr_html_() + plot_run(self.report, self.traced.graph).html()


@checked
def auto(
    model: Model | Traced | Family,
    devices: Devices | None = None,
    constraints: Constraints | None = None,
    *,
    inputs: Inputs | None = None,
    traffic: Traffic | None = None,
    setup: Setup = SETUP,
    budget: Budget | float = BUDGET,
) -> AutoResult:
    """Trace, measure, search and run a model on devices, and say which plan to use.

    ::

        result = autosplit.auto(module, devices="cpu:0,cpu:1", inputs=(x,))
        with result.open() as model:
            y = model(x)

    Args:
        model: a spec, a module, an ``ExportedProgram``, or the value of ``trace`` for one (for other sizes).
        devices: the devices, or their names, as a list or with commas between; by default all of this machine.
        constraints: demands on the plan; none by default.
        inputs: example inputs; a module needs them.
        traffic: how often each size comes, for a model of several; by default all sizes are alike.
        setup: backends, precision, store, and the progress function.
        budget: limits of time, or seconds for the search alone; tracing, measuring and comparing come on top.
    Raises: the errors of the calls that it makes.
    """
    wanted, machine, budget = constraints or Constraints(), _machine(devices, setup), as_budget(budget)
    wanted.require_consistent(machine)
    prepare_to_spawn()
    begin_loading(setup.considered)
    with progress_shown(setup.progress) as progress, Bench(machine, setup, budget) as bench:
        asked, setup = setup.progress, replace(setup, progress=progress, workspace=bench.workspace, bench=bench)
        if isinstance(model, Traced | Family):
            traced: Traced | Family = model
        else:
            progress("trace", 0.0, "loading the model and capturing its graph")
            traced = trace(model, inputs=inputs)
            progress("trace", 1.0, "done")
        wanted = verify_early(wanted, traced.graph, machine)
        announce(asked, expectation(machine, setup, budget))
        profile = measure(traced, machine, traffic=traffic, setup=setup, then_search=wanted)
        found = search(traced, profile, machine, wanted, setup=setup, budget=budget)
        machine = found.profile.usable(machine)
        try:
            if isinstance(traced, Family):
                report = run(traced, found.plan, machine, wanted, traffic=traffic, profile=profile, setup=setup, budget=budget)
            else:
                subjects = {traced.source.batch: (traced, profile), found.plan.microbatch: (found.traced, found.profile)}
                report = run_subjects(subjects, found.plan, machine, wanted, setup=setup, budget=budget)
        except BaseException:
            _keep(found, setup)
            raise
    absent = absent_runtimes() if setup.backends is None else ()
    told = (*absent, *traced.notes, *wanted.notes(traced.graph), *broken_by(found.plan, found.traced.graph, machine))
    report = replace(report, notes=(*told, *report.notes, *keep_search(found, setup)))
    if isinstance(traced, Family):
        return AutoResult(machine, profile, found, report, traced.variants[0], setup.hosts, traced)
    used = found.traced if report.best.plan.microbatch == found.plan.microbatch else traced
    return AutoResult(machine, found.profile, found, report, used, setup.hosts)


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of ``export``: the folder, and notes such as the cost of the target's rules."""

    folder: Path
    notes: tuple[str, ...]


@checked
def export(
    traced: Traced | Family, plan: Plan, folder: str | Path, to: str = "onnxruntime", *, profile: Profile | None = None
) -> Exported:
    """Write the plan for another runtime.

    Args:
        traced: the model, at several sizes for a plan of such requests.
        plan: its plan.
        folder: a new or empty folder, which appears whole or not at all.
        to: the runtime; ``autosplit export --to list`` names them.
        profile: measured ops; gives the cost of a runtime's rules, such as cuts between modules only.
    Raises: UsageError: unknown runtime, a plan that it cannot express, or a folder that holds something or cannot be written.
        MissingExtraError: a package is not installed. PlanError, BackendError: connections or an op cannot be expressed.
    """
    largest, family = (traced.variants[0], traced) if isinstance(traced, Family) else (traced, None)
    job = targets.Job(largest, plan, profile, family)
    return Exported(Path(folder), tuple(targets.write_export(to, job, Path(folder))))
