"""Search the best plan for a model, with its explanation and the Pareto front, or plans for several models on one host."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autosplit.commands import options
from autosplit.commands.console import (
    add_explanation,
    add_forecast,
    add_simulation,
    err,
    keep_plan,
    log,
    say_notes,
    say_reused,
    show,
    simulation_of,
    trace,
    write_dot,
    write_plan,
    write_simulation,
)
from autosplit.commands.machines import opened_machine
from autosplit.commands.report import plan_table, table
from autosplit.commands.shaping import sequences_of, traffic_of
from autosplit.commands.sharing import is_for_several, search_several
from autosplit.commands.starting import start
from autosplit.commands.workloadfiles import search_workload
from autosplit.errors import UsageError
from autosplit.planning.estimating import sources
from autosplit.progress import bars


def search(given: options.Plans) -> None:
    """Find the best plan for a model, for several models on one host, or for a planner's workload file, and write it."""
    if is_for_several(given):
        search_several(given)
        return
    if given.format != "model":
        search_workload(given)
        return
    given.require_for_models()
    wanted, sequences = given.constraints(), sequences_of(given)
    traffic = traffic_of(given, given.sizes, sequences)
    start(lambda: given.backends)
    from autosplit import api, keeping
    from autosplit.deploying.footprints import footprints_for
    from autosplit.placing.rules import broken_by

    started, budget = keeping.now(), given.spending()
    with opened_machine(given, here=budget.search_s > 0) as (machine, hosts), bars(err) as progress:
        setup = replace(given.setup(progress, log(given), hosts), keep=keep_plan(given.output))
        wanted.require_consistent(machine)
        traced = trace(given, progress, given.model, weights=bool(sources(machine)), generate=sequences)
        measured = api.measure(traced, machine, traffic=traffic, setup=setup, then_search=wanted)
        found = api.search(traced, measured, machine, wanted, setup=setup, budget=budget)
    broken = broken_by(found.plan, found.traced.graph, machine)
    notes = [*wanted.notes(traced.graph), *measured.notes, *broken, *keeping.keep_search(found, setup)]
    say_reused(measured, given.store, started)
    say_notes(notes)
    data = {"plan": str(given.output), "summary": found.plan.summary(), **asdict(found.plan.prediction)}
    data |= {"method": found.plan.method, "status": found.plan.status, "loads_s": dict(found.plan.loads_s)}
    data |= {"stages": found.plan.rows(), "candidates": found.rows(), "notes": [*traced.notes, *notes]}
    views = [plan_table(found.plan, given.verbose)] + ([table(found.rows(), "candidates")] if found.trials else [])
    front: dict[Path, Any] = {}
    if given.objective == "pareto":
        account = footprints_for(traced, found.profile, machine).account(found.traced, found.profile)
        with bars(err) as progress:
            progress("front", 0.0, "planning for several limits")
            data["front"], front = _front_of_model(given, found, machine, account)
        title = "front: no plan is better than another in throughput, latency and memory together"
        views.append(table(data["front"], title, hide=("assignment", "plan")))
    if sequences is not None:
        add_forecast(given, found.plan, traced, measured, machine, data, views)
    if given.explain and sequences is None:
        add_explanation(found.plan.explain(), data, views)
    simulation = simulation_of(found.plan, found.traced.graph, found.profile, machine)
    simulated = add_simulation(given, simulation, data, views, in_seconds=True)
    try:
        show(given, data, *views)
    finally:
        picked = dict(enumerate(front.values())).get(-1 if given.pick is None else given.pick, found.plan)
        for path, plan in {given.output: picked, **front}.items():
            write_plan(plan, found.traced.graph, path)
        write_dot(given.dot, found.traced.graph, picked)
        write_simulation(given.trace, simulated)
    if given.pick is not None and given.pick >= len(front):
        raise UsageError(
            f"--pick {given.pick}: the front has plans 0 to {len(front) - 1}; the plan file has the one that runs best"
        )


def _front_of_model(given: options.Plans, found: Any, machine: Any, account: Any) -> tuple[list[Any], dict[Path, Any]]:
    """The rows of the front, and its plans by the files to which they are written."""
    from autosplit.planning.caps import front_rows

    limits = {"time_limit_s": options.seconds(given.time_limit), "seed": given.seed, "log": log(given)}
    plans = found.front(machine, given.constraints(), account=account, queue_depth=given.queue_depth, **limits)
    rows, files = front_rows(plans), {}
    for (plan, _), row in zip(plans, rows, strict=True):
        path = given.front_folder / f"front-{row['number']}.yaml"
        files[path] = replace(plan, versions=found.plan.versions)
        row |= {"assignment": {op: list(stage.devices) for stage in plan.stages for op in stage.ops}, "plan": str(path)}
    return rows, files
