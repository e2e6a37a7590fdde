"""Run a plan beside its baselines, or write it for another runtime."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autosplit.commands.console import (
    err,
    keep_plan,
    load_plan,
    log,
    require_equal,
    say,
    say_kept,
    say_notes,
    say_reused,
    show,
    trace,
    write,
    write_dot,
    write_plan,
    write_trace,
)
from autosplit.commands.machines import opened_machine
from autosplit.commands.options import GENERATE_HELP, Devices, Dot, Output, PlansModel, Profiles, Search
from autosplit.commands.report import baselines_table, peers_table, plan_table, run_table, table
from autosplit.commands.shaping import sequences_of, traffic_of
from autosplit.commands.starting import start
from autosplit.commands.watching import watched
from autosplit.errors import UsageError
from autosplit.progress import StepTimes, bars, step_times_text
from autosplit.values.graph import Graph
from autosplit.values.plan import Plan
from autosplit.values.planfile import read_plan
from autosplit.values.samples import Precision
from autosplit.values.sequences import Sequences, parse_sequences

if TYPE_CHECKING:
    from autosplit.deploying.setup import Budget
    from autosplit.reports.runreport import RunReport


@dataclass(frozen=True, kw_only=True)
class Running:
    """Run and report."""

    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of the plan in all rounds; baselines get as long. Default: 2 s a round."),
    ] = None
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds of the plan and the baselines.")] = 5
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the run, predicted beside measured.")] = None
    peers: Annotated[
        bool, typer.Option("--peers", help="Show how vLLM, accelerate, exo and ollama would split the model, as predicted.")
    ] = False
    picture: Annotated[Path | None, typer.Option(help="Draw the plan and its baselines as an SVG file.")] = None
    report: Annotated[
        Path | None,
        typer.Option(help="Write the report as a page (.html), or as a run file for 'autosplit report' (.json)."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Auto(Running, Search):
    """Everything: measure, search, run."""

    def spending(self) -> "Budget":
        """Limits for the search and the report."""
        return replace(super().spending(), num_rounds=self.rounds, num_requests=self.requests)


@dataclass(frozen=True, kw_only=True)
class Run(Running, Devices):
    """Plan to run."""

    plan: Annotated[Path, typer.Argument(help="A plan.yaml.")] = Path("plan.yaml")
    model: PlansModel = None
    generate: Annotated[str | None, typer.Option(help=GENERATE_HELP)] = None
    traffic: Annotated[Path | None, typer.Option(help="For a plan of several sizes: file of the sizes that come.")] = None
    dot: Dot = None
    baselines: Annotated[bool, typer.Option(help="Run the baselines beside the plan.")] = True
    watch: Annotated[bool, typer.Option(help="Show on stderr the state of every stage while it runs.")] = False
    precision: Annotated[Precision | None, typer.Option(help="f32, tf32, bf16 or f16; default: that of the plan.")] = None
    profiles: Profiles = None


def run(given: Run) -> None:
    """Run a plan, checked against the unsplit model, beside its baselines: the usual ways to run the same model."""
    file = read_plan(given.plan)
    sequences = _planned_sequences(given, file.sequences)
    start(lambda: file.backends)
    from autosplit import api
    from autosplit.backends.base import get_backend
    from autosplit.deploying.setup import Budget, Setup
    from autosplit.errors import each

    each(f"plan '{given.plan}' cannot run here", get_backend, file.backends)  # tracing takes a while
    with opened_machine(given, ",".join(file.devices)) as (machine, hosts):
        with bars(err) as progress:
            loaded = load_plan(given.plan, given.model, progress, devices=machine)
        plan, traced = loaded.plan, loaded.traced
        traffic = traffic_of(given, loaded.family.allowed if loaded.family is not None else {}, sequences)
        subject = replace(loaded.family, sequences=sequences) if sequences is not None else loaded.family or traced
        if given.precision not in (None, plan.precision):
            plan = replace(plan, precision=given.precision or "f32").unpredicted()
        say_kept(given)
        with watched(err, given.watch) as (progress, observe):
            setup = Setup(store=given.store, progress=progress, observe=observe, hosts=hosts)
            budget = Budget(num_rounds=given.rounds, num_requests=given.requests)
            report = api.run(subject, plan, machine, traffic=traffic, baselines=given.baselines, setup=setup, budget=budget)
    say_notes((*traced.notes, *report.notes))
    data = {**report.to_dict(), "plan": str(given.plan)}
    try:
        peers = [peers_table(report)] if given.peers else []
        show(given, data, run_table(report, given.verbose), baselines_table(report, given.verbose), *peers)
    finally:
        _write(given, report, traced.graph, plan)
        if given.report is not None:
            from autosplit.pages.writing import write_run

            say(f"wrote {write_run(report, traced, machine, given.report, given.store)}")
    require_equal(report.best.fault)


def _planned_sequences(given: Run, planned: Sequences | None) -> Sequences | None:
    """The sequences of a plan, with the prompt and the answer of ``--generate``; None for a plan of other requests.

    Raises: UsageError: the plan is not of a generator, or its caches hold other sequences; others as ``parse_sequences``.
    """
    if given.generate is None:
        return planned
    if planned is None:
        raise UsageError(f"plan '{given.plan}' is not of a generator; search one with --generate, or leave out --generate here")
    found = parse_sequences(given.generate, planned)
    if (found.max_sequences, found.max_length) != (planned.max_sequences, planned.max_length):
        raise UsageError(f"the caches of plan '{given.plan}' hold {planned}; search again for '{given.generate}'")
    return found


def auto(given: Auto) -> None:
    """Find the best way to run a model: trace, profile, search, run, compare; the best plan is written."""
    wanted, sequences = given.constraints(), sequences_of(given)
    traffic = traffic_of(given, given.sizes, sequences)
    start_s = start(lambda: given.backends)
    from autosplit import api, keeping
    from autosplit.deploying.comparing import expectation
    from autosplit.planning.question import verify_early

    started, budget = keeping.now(), given.spending()
    with opened_machine(given) as (machine, hosts), bars(err) as drawn:
        progress = StepTimes(drawn, start_s)
        setup = replace(given.setup(progress, log(given), hosts), keep=keep_plan(given.output))
        wanted.require_consistent(machine)
        traced = trace(given, progress, given.model, generate=sequences)
        verify_early(wanted, traced.graph, machine)
        say(expectation(machine, setup, budget))
        result = api.auto(traced, machine, wanted, traffic=traffic, setup=setup, budget=budget)
    report = result.report
    say(step_times_text(progress.seconds if given.verbose else progress.steps_s))
    say_reused(result.profile, given.store, started)
    notes = [*result.profile.notes, *report.notes]
    say_notes(note for note in notes if note not in traced.notes)  # these were said when it was traced
    data = {**report.to_dict(), "plan": str(given.output), "notes": notes, "step_seconds": progress.steps_s}
    try:
        peers = [peers_table(report)] if given.peers else []
        plan = plan_table(result.plan, given.verbose)
        show(given, data, plan, run_table(report), baselines_table(report, given.verbose), *peers)
    finally:
        write_plan(replace(result.plan, chosen=report.chosen), result.traced.graph, given.output)
        _write(given, report, result.traced.graph, result.plan)
        if given.report is not None:
            from autosplit.pages.writing import write_report

            say(f"wrote {write_report(result, given.report, constraints=wanted, store=given.store)}")
    require_equal(report.best.fault)


def _write(given: Run | Auto, report: "RunReport", graph: Graph, plan: Plan) -> None:
    """Write the files of a run that the flags name, but for its page."""
    from autosplit.reports.runreport import run_trace

    write_trace(given.trace, lambda: run_trace(report, graph))
    write_dot(given.dot, graph, plan)
    if given.picture is not None:
        from autosplit.figures import plot_baselines

        write(given.picture, plot_baselines(report).svg)


@dataclass(frozen=True, kw_only=True)
class Report(Output):
    """What to draw a page of."""

    run: Annotated[Path, typer.Argument(help="A run file, written with --report RUN.json.")]
    page: Annotated[Path, typer.Argument(help="The HTML file to write.")] = Path("report.html")


def report(given: Report) -> None:
    """Draw the page of a run that 'auto' or 'run' wrote with --report RUN.json: one HTML file that loads nothing."""
    from autosplit.pages.writing import draw_run

    page = draw_run(given.run, given.page)
    show(given, {"page": str(page)}, f"wrote {page}")


@dataclass(frozen=True, kw_only=True)
class Export(Output):
    """Export."""

    plan: Annotated[Path | None, typer.Argument(help="A plan.yaml.")] = None
    folder: Annotated[Path | None, typer.Argument(help="The folder to make.")] = None
    to: Annotated[str, typer.Option(help="The runtime; 'list' shows all, with their files and their limits.")] = "onnxruntime"
    model: PlansModel = None
    profiles: Profiles = None


def export(given: Export) -> None:
    """Write a plan for another runtime, or list the runtimes with --to list."""
    from autosplit import api, keeping
    from autosplit.deploying.setup import Setup
    from autosplit.exporting.base import TARGETS, get_target, require_exportable

    if given.to == "list":
        found = [get_target(name) for name in TARGETS]
        rows = [{"target": t.name, "writes": t.writes, "cannot express": t.lacks, "checked by": t.checked} for t in found]
        missing = {target.name: target.missing() for target in found}
        show(given, {"targets": [{**row, "missing": missing[row["target"]]} for row in rows]}, table(rows, "export targets"))
        return
    if given.plan is None or given.folder is None:
        raise UsageError("name the plan and the folder to make: autosplit export plan.yaml FOLDER --to RUNTIME")
    require_exportable(given.to, given.folder)
    with bars(err) as progress:
        loaded = load_plan(given.plan, given.model, progress, weights=get_target(given.to).needs_weights)
        progress("export", 0.0, f"writing '{given.folder}' for {given.to}")
        profile = keeping.stored_profile(loaded.traced, loaded.plan, loaded.machine, Setup(store=given.store))
        exported = api.export(loaded.family or loaded.traced, loaded.plan, given.folder, given.to, profile=profile)
    say_notes(exported.notes)
    files = sorted(str(path.relative_to(given.folder)) for path in given.folder.rglob("*") if path.is_file())
    data = {"folder": str(given.folder), "files": files, "notes": exported.notes}
    show(given, data, f"{given.folder}: {', '.join(files)}")
