"""A plan runs, beside the baselines, or is written for another runtime."""

from dataclasses import replace

from autosplit.commands import options
from autosplit.commands.console import err, json_safe, log, require_equal, say, say_reused, show, write_picture, write_trace
from autosplit.commands.watching import watched


def run(given: options.Run) -> None:
    """Run a plan, checked against the unsplit model, beside the baselines to run the same model."""
    from autosplit import api
    from autosplit.backends.base import get_backend
    from autosplit.commands.progress import bars
    from autosplit.commands.report import baselines_table, run_table
    from autosplit.devices.discovering import machine_for
    from autosplit.errors import each
    from autosplit.values.planfile import read_plan

    with bars(err) as start:
        start("load")
        file = read_plan(given.plan)
        each(f"plan '{given.plan}' cannot run here", get_backend, file.backends)  # tracing takes a while
        machine = machine_for(given.devices or (None if given.machine else ",".join(file.devices)), given.machine, given.memory)
        plan, traced, _ = api.load_plan(given.plan, given.model)
        if given.precision not in (None, plan.precision):
            plan = replace(plan, precision=given.precision or "f32").unpredicted()
    with watched(err, given.watch) as (progress, observe):
        report = api.run(
            traced,
            plan,
            machine,
            profiles=given.profiles,
            baselines=given.baselines,
            forced=True,
            num_requests=given.requests,
            num_rounds=given.rounds,
            progress=progress,
            observe=observe,
        )
    for note in (*traced.notes, *report.notes):
        say(f"note: {note}")
    data = {**report.to_dict(), "plan": str(given.plan)}
    try:
        show(given, json_safe(data), run_table(report), baselines_table(report))
    finally:
        write_trace(given.trace, traced, report)
        write_picture(given.picture, report)
    require_equal(report.best.fault)


def auto(given: options.Auto) -> None:
    """Do everything: trace, profile, search, run, compare; the best way is written as a plan."""
    from autosplit import api
    from autosplit.commands.progress import bars
    from autosplit.commands.report import baselines_table, plan_table, run_table
    from autosplit.devices.discovering import machine_for
    from autosplit.values.planfile import write_plan

    started = api.now()
    with bars(err) as start:
        start("trace")
        result = api.auto(
            given.model,
            machine_for(given.devices, given.machine, given.memory),
            given.batch,
            given.seq_len,
            backends=given.named_backends,
            constraints=given.constraints(),
            profiles=given.profiles,
            remeasure=given.remeasure,
            budget_s=options.seconds(given.budget),
            queue_depth=given.queue_depth,
            time_limit_s=options.seconds(given.time_limit),
            seed=given.seed,
            precision=given.precision,
            num_requests=given.requests,
            num_rounds=given.rounds,
            log=log(given),
            progress=start,
        )
    report = result.report
    say_reused(result.profile, given.profiles, started)
    notes = [*result.profile.notes, *report.notes]
    for note in notes:
        say(f"note: {note}")
    data = {**report.to_dict(), "plan": str(given.output), "notes": notes}
    try:
        show(given, json_safe(data), plan_table(result.plan), run_table(report), baselines_table(report))
    finally:
        write_plan(replace(result.plan, chosen=report.chosen), result.traced.graph, given.output)
        say(f"wrote {given.output}")
        write_trace(given.trace, result.traced, report)
        write_picture(given.picture, report)
    require_equal(report.best.fault)


def export(given: options.Export) -> None:
    """Write the stages of a plan for another runtime, with a manifest and a short loader."""
    from autosplit import api

    api.require_exportable(given.folder, given.to)
    plan, traced, _ = api.load_plan(given.plan, given.model)
    folder = api.export(traced, plan, given.folder, given.to)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    show(given, {"folder": str(folder), "files": files}, f"{folder}: {', '.join(files)}")
