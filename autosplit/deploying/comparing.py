"""A plan and its baselines in interleaved rounds, so that drift of the machine cancels, and which of them to use."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from autosplit.backends.base import has_streams, installed
from autosplit.backends.workspace import Workspace
from autosplit.deploying.bench import Bench, bench_of
from autosplit.deploying.compiling import LEAST_COMPILE_S, compile_baselines
from autosplit.deploying.contest import LOADING_TIME, MOST_BESIDE, Contest, by_promise
from autosplit.deploying.footprints import Footprints
from autosplit.deploying.replanning import plan_without
from autosplit.deploying.setup import BUDGET, SETUP, Budget, Setup
from autosplit.errors import BackendError, ProfileError
from autosplit.measuring.rounds import ALONE_S, CUT_S, ROUND_S
from autosplit.memory.stages import count, footprints_of
from autosplit.planning.baselines import Baselines, baselines_of, unmet_demands, with_cut_requests, without_autosplit
from autosplit.planning.peers import predicted_peers
from autosplit.planning.predicting import measured_backends, predict
from autosplit.planning.question import Question
from autosplit.progress import Progress, between, quiet
from autosplit.reports.judging import Verdict, decide
from autosplit.reports.outcomes import PLAN, Outcome
from autosplit.reports.runreport import RunReport
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile

STARTING_S, COMPILING_S, LOADING_S = 2.0, 20.0, 8.0
"""Seconds that starting workers, compiling for a backend, and loading all baselines usually take, for ``expectation``."""

COMPILING_SHARE, LOADING_SHARE = 0.2, 0.4
"""Shares of the step: compiling baselines, and then of the rest loading the plan and its baselines."""

Subject = tuple[Traced, Profile | None]
"""The model traced for one microbatch, and its profile where there is one."""


def expectation(machine: Machine, setup: Setup, budget: Budget) -> str:
    """A line with the seconds that ``auto`` will take after tracing, in all and for each step.

    The profiler times a backend in two rounds, the second of half the length. Comparing ends at its limit, loading included.
    """
    measuring_s = round(STARTING_S + (1.5 * ROUND_S + ALONE_S + CUT_S) * len(setup.considered))
    compiled = _compiled_late(setup) if budget.compiling_s >= LEAST_COMPILE_S else []
    compiling_s = round(min(COMPILING_S, budget.compiling_s)) * len(compiled)
    compare_s = round(min(budget.compare_s, LOADING_S + (2 + MOST_BESIDE) * budget.num_rounds * budget.round_s))
    kept = f" (less where '{setup.store}' holds it)" if setup.store is not None else ""
    backends, devices = ", ".join(setup.considered), ", ".join(device.name for device in machine.devices)
    compiling = f"compile for {', '.join(compiled)} {compiling_s:.0f} s, " if compiled else ""
    return (
        f"this takes about {measuring_s + budget.search_s + compiling_s + compare_s:.0f} s, longer for large models: measure "
        f"{backends} on {devices} {measuring_s:.0f} s{kept}, run candidate plans {budget.search_s:g} s (the budget), {compiling}"
        f"compare the best plan with its baselines {compare_s:.0f} s"
    )


def _compiled_late(setup: Setup) -> list[str]:
    """The installed backends that no search considers because they compile for long, unless the user named some."""
    return [name for name in installed() if name not in setup.considered] if setup.backends is None else []


def run_beside(
    subjects: Mapping[int, Subject],
    plan: Plan,
    machine: Machine,
    constraints: Constraints | None,
    with_baselines: bool,
    *,
    setup: Setup,
    budget: Budget,
    progress: Progress = quiet,
) -> RunReport:
    """Make the baselines of a plan, run it beside them, and say which one to use; arguments as for ``compare``.

    A plan without a prediction gets it from the profile. If neither the setup nor the constraints name backends, the
    baselines of backends that compile for long run too. If a device is lost, everything runs again without it, by a plan from
    the same profile, and a note gives the reason.
    """
    traced, profile = subjects[plan.microbatch]
    notes: list[str] = []
    if profile is not None and not plan.prediction.throughput_per_s:
        try:
            plan = predict(plan, traced.graph, machine, profile)
        except ProfileError as failure:
            notes.append(f"the plan has no prediction: {failure}")
    try:
        with ExitStack() as stack:
            here = replace(setup, workspace=setup.workspace or stack.enter_context(Workspace()))
            beside, left = Baselines(), progress
            if with_baselines:
                beside = _baselines(subjects, plan, machine, constraints, here, budget, between(progress, 0.0, COMPILING_SHARE))
                left = between(progress, COMPILING_SHARE, 1.0)
            report = compare(subjects, plan, beside, machine, constraints, setup=here, budget=budget, progress=left)
    except BackendError as failure:
        if not failure.device or profile is None or setup.hosts is not None:
            raise
        lost = f"device '{failure.device}' was lost, and all ran anew without it: {failure}"
        plan, machine = plan_without(failure, traced, plan, machine, profile, constraints)
        asked = subjects, plan, machine, constraints, with_baselines
        report = run_beside(*asked, setup=replace(setup, bench=None), budget=budget, progress=progress)
        return replace(report, notes=(lost, *report.notes))
    peers = Baselines() if profile is None else predicted_peers(traced.graph, plan, machine, profile)
    return replace(report, notes=tuple(notes), peers=peers)


def _baselines(
    subjects: Mapping[int, Subject],
    plan: Plan,
    machine: Machine,
    constraints: Constraints | None,
    setup: Setup,
    budget: Budget,
    progress: Progress,
) -> Baselines:
    """The baselines of a plan, compiled where that takes long. A plan that cuts requests gets baselines of whole requests too."""
    subject = traced, profile = subjects[plan.microbatch]
    others = _compiled_late(setup) if constraints is not None and not constraints.forced else []
    assert setup.workspace is not None
    compiled, failed = compile_baselines(others, subject, plan, machine, setup.workspace, budget.compiling_s, progress)
    streaming = [name for name in installed() if has_streams(name)]
    isolate = setup.isolate or setup.hosts is not None  # the caller is on one host
    baselines = partial(baselines_of, machine=machine, streaming=streaming, isolate=isolate)
    found = baselines(traced.graph, plan, profile=profile, compiled=compiled)
    if plan.microbatch < plan.source.batch and plan.source.batch in subjects:
        whole, whole_profile = subjects[plan.source.batch]
        bound_s = 0.0
        if plan.prediction.bound_s > 0 and whole_profile is not None:
            from autosplit.planning.plans import least_s  # solvers take a second to load, and most plans need none here

            demands = Constraints(objective="latency" if plan.objective == "latency" else "throughput")
            backends = measured_backends(whole_profile, machine)
            bound_s = least_s(Question(whole.graph, whole_profile, plan.source, machine, backends, demands))
        uncut = replace(plan, microbatch=plan.source.batch, prediction=replace(plan.prediction, bound_s=bound_s))
        found = with_cut_requests(baselines(whole.graph, uncut, profile=whole_profile), found, plan.microbatch)
    return Baselines(found.plans, {**found.left_out, **failed})


def compare(
    subjects: Mapping[int, Subject],
    plan: Plan,
    baselines: Baselines,
    machine: Machine,
    constraints: Constraints | None = None,
    *,
    setup: Setup = SETUP,
    budget: Budget = BUDGET,
    progress: Progress = quiet,
) -> RunReport:
    """Run the plan and its baselines in the same rounds, and say which one to use.

    Args:
        subjects: microbatch to the model traced for it; the plan's own, and that of whole requests where baselines take them.
        plan: the plan; its objective decides between it and the baselines.
        baselines: run beside it; the report says why a baseline cannot be loaded, or that its numbers are wrong.
        constraints: demands that a baseline must meet to become the plan; None keeps the plan in any case.
        setup: ``backends`` that a baseline must run on to become the plan; ``workspace`` and ``observe``; ``bench``, where a
            search may have left some of the plans loaded.
        budget: rounds and requests. The fastest contenders may run up to twice as many rounds, in the time that others leave.
        progress: called with the share of the step ``run``.
    Raises: PlanError, BackendError, WorkerError: the plan itself cannot be run; StageError: a request failed.
    """

    def unfit(other: Plan, latency_s: float) -> list[str]:
        demands = constraints or Constraints()
        return unmet_demands(other, latency_s, subjects[other.microbatch][0].graph, machine, demands, setup.backends)

    reasons = dict(baselines.left_out)
    keep, forced = without_autosplit(baselines.plans), constraints is None
    begun_s = time.monotonic()
    with bench_of(machine, setup, budget) as bench:
        if setup.observe is not None:
            setup.observe(bench.host)
        contest = Contest(bench, plan.objective, keep, budget.round_s, between(progress, 0.0, LOADING_SHARE))
        plans = {PLAN: plan} | {name: baselines.plans[name] for name in by_promise(baselines, keep)}
        distinct, same_as = _distinct(_counted(plans, subjects, machine))
        bench.adopt(distinct)
        late_s = begun_s + LOADING_TIME * budget.compare_s
        reasons |= contest.load(distinct, {size: traced for size, (traced, _) in subjects.items()}, late_s)
        bench.loaded = {name: bench.loaded[name] for name in distinct if name in bench.loaded}  # the plan first
        _note_footprints(bench, subjects, Footprints(machine, setup.workspace))
        barred = {name for name, e in bench.loaded.items() if name != PLAN and unfit(e.plan, e.latency.p50_s)}
        told, until_s = between(progress, LOADING_SHARE, 1.0), begun_s + budget.compare_s
        contest = replace(contest, progress=told, barred=barred, decide=not forced, until_s=until_s)
        outcomes = contest.run(budget.num_rounds, budget.num_requests and plan.source.batch * budget.num_requests)
    outcomes |= {name: outcomes[twin] for name, twin in same_as.items() if twin in outcomes}
    reasons |= {name: reasons[twin] for name, twin in same_as.items() if twin in reasons}
    reasons |= {name: outcome.fault for name, outcome in outcomes.items() if outcome.fault}
    verdict = with_risks(decide(outcomes, plan.objective, forced, unfit), outcomes)
    progress("run", 1.0, "done")
    traced = subjects[plan.microbatch][0]
    error = traced.module_error.relative if traced.module_error is not None else None
    return RunReport(traced.graph.name, plan.source.batch, outcomes, verdict, reasons, trace_error=error)


def _note_footprints(bench: Bench, subjects: Mapping[int, Subject], footprints: Footprints) -> None:
    """Give the baselines the memory that their workers hold (the plan's was measured before), and begin all counters anew."""
    for name, entry in bench.loaded.items():
        workers = entry.restart()
        if name != PLAN:
            subject = subjects[entry.plan.microbatch]
            footprints.note(subject[0], entry.plan, workers)
            entry.plan = footprints.account(*subject).counted(entry.plan)


def with_risks(verdict: Verdict, outcomes: Mapping[str, Outcome]) -> Verdict:
    """The verdict with a sentence on workers that died, and one on a plan that runs in the caller's process."""
    sentence = verdict.sentence
    if restarts := sum(outcome.stats.restarts for outcome in outcomes.values()):
        sentence += f" Workers died and were started again {restarts} times; their requests ran again."
    if outcomes[verdict.chosen].plan.process == "caller":
        sentence += " It runs in the process that calls it, so a crash of the model ends that process; --isolate rules it out."
    return replace(verdict, sentence=sentence)


def _distinct(plans: Mapping[str, Plan]) -> tuple[dict[str, Plan], dict[str, str]]:
    """Each plan once, under its first name; and every later name of an equal plan with that first name."""
    distinct, same_as = dict[str, Plan](), dict[str, str]()
    for name, candidate in plans.items():
        twin = next((other for other, known in distinct.items() if known.hash == candidate.hash), None)
        if twin is None:
            distinct[name] = candidate
        else:
            same_as[name] = twin
    return distinct, same_as


def _counted(plans: Mapping[str, Plan], subjects: Mapping[int, Subject], machine: Machine) -> dict[str, Plan]:
    """The plans with their memory where devices have caps, so that a plan beyond a cap is left out."""
    found = dict(plans)
    if any(device.memory_bytes is not None for device in machine.devices):
        for name, plan in plans.items():
            traced, profile = subjects[plan.microbatch]
            if any(stage.memory is None for stage in plan.stages):
                found[name] = count(traced.graph, plan, values_of(traced), footprints_of(profile))
    return found
