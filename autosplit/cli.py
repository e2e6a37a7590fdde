"""The command line: parses, calls, prints. stdout carries the result, stderr the log and the progress."""

import functools
import json
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from autosplit import options
from autosplit.errors import AutosplitError, StageError, UsageError

WIDTH = 140
"""Columns where the output is no terminal."""

out = Console(width=None if sys.stdout.isatty() else WIDTH)
err = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Split a PyTorch model over the devices of a machine, prove the plan, run it, and show measured beside predicted.",
)


def _show(given: options.Output, data: Any, *views: Any) -> None:
    """The result on stdout: the data as JSON, or the views for people."""
    if given.json:
        sys.stdout.write(json.dumps(data, indent=1, allow_nan=False, default=str) + "\n")
    else:
        for view in views:
            out.print(view)


def _write_trace(path: Path | None, traced: Any, report: Any, machine: Any) -> None:
    from autosplit.api import run_trace
    from autosplit.files import write_atomic

    if path is not None:
        write_atomic(path, json.dumps(run_trace(traced, report, machine)))
        err.print(f"wrote {path}; open it in https://ui.perfetto.dev", highlight=False)


def _log(given: options.Output) -> Any:
    return (lambda line: err.print(f"  solver: {line}", highlight=False)) if given.verbose else None


def _json_safe(value: Any) -> Any:
    """The same data with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return None if isinstance(value, float) and not float("-inf") < value < float("inf") else value


def devices(given: options.Output) -> None:
    """List the devices of this machine, its limits, and the backends that are installed."""
    from autosplit.discovering import describe
    from autosplit.report import table

    found = describe()
    facts = [{"fact": key.replace("_", " "), "value": value} for key, value in found.facts.items()]
    views = table(facts, "machine"), table(found.devices, "devices"), table(found.backends, "backends")
    _show(given, found.to_dict(), *views)


def profile(given: options.Profile) -> None:
    """Measure every op of a model on every device and backend, and the links between them."""
    from autosplit import api
    from autosplit.discovering import machine_for
    from autosplit.progress import bars
    from autosplit.report import table

    machine = machine_for(given.devices, given.machine, given.memory)
    with bars(err) as start:
        start("trace")
        traced = api.trace(given.model, given.batch, given.seq_len)
        measured = api.measure(
            traced,
            machine,
            given.backends,
            profiles=given.profiles,
            remeasure=given.remeasure,
            progress=start("profile"),
        )
    for note in measured.notes:
        err.print(f"note: {note}", highlight=False)
    data = {"model": traced.graph.name, "graph": traced.graph.hash, "profile": measured.hash, "ops": len(traced.graph.ops)}
    rows = measured.summary()
    data |= {"settings": rows, "links": [asdict(link) for link in measured.links], "notes": list(measured.notes)}
    _show(given, _json_safe(data), table(rows, f"{traced.graph.name}: {len(traced.graph.ops)} ops"))


def search(given: options.Plans) -> None:
    """Find the best plan for a model, or for a planner's workload file, and write it."""
    if given.format != "model":
        _search_workload(given)
        return
    from autosplit import api
    from autosplit.discovering import machine_for
    from autosplit.planfile import write_plan
    from autosplit.progress import bars
    from autosplit.report import plan_table, table

    machine = machine_for(given.devices, given.machine, given.memory)
    with bars(err) as start:
        start("trace")
        traced = api.trace(given.model, given.batch, given.seq_len)
        measured = api.measure(
            traced, machine, given.backends, profiles=given.profiles, remeasure=given.remeasure, progress=start("profile")
        )
        found = api.search(
            traced,
            measured,
            machine,
            given.constraints(),
            budget_s=options.seconds(given.budget),
            queue_depth=given.queue_depth,
            time_limit_s=options.seconds(given.time_limit),
            seed=given.seed,
            log=_log(given),
            progress=start("search"),
        )
    api.keep_stages(found.traced, found.profile, given.profiles)
    write_plan(found.plan, found.traced.graph, given.output)
    err.print(f"wrote {given.output}", highlight=False)
    data = {"plan": str(given.output), "summary": found.plan.summary(), **asdict(found.plan.prediction)}
    data |= {"method": found.plan.method, "status": found.plan.status, "loads_s": dict(found.plan.loads_s)}
    data |= {"stages": found.plan.rows(), "candidates": found.rows()}
    views = [plan_table(found.plan)] + ([table(found.rows(), "candidates")] if found.trials else [])
    if given.objective == "pareto":
        data["front"] = _front_of_model(given, found, machine)
        views.append(table([{k: v for k, v in row.items() if k != "assignment"} for row in data["front"]], "front"))
    if given.explain:
        _explain(found.explain(options.seconds(given.time_limit)), data, views)
    _show(given, _json_safe(data), *views)


def _front_of_model(given: options.Plans, found: Any, machine: Any) -> list[dict[str, Any]]:
    """The rows of the front; its plan files where they are asked for."""
    from autosplit.planfile import write_plan
    from autosplit.planning import plan_front

    graph = found.traced.graph
    plans = plan_front(
        graph,
        machine,
        found.profile,
        found.plan.source,
        given.constraints(),
        given.backends,
        queue_depth=given.queue_depth,
        microbatch=found.plan.microbatch,
        time_limit_s=options.seconds(given.time_limit),
        seed=given.seed,
        log=_log(given),
    )
    rows = []
    for number, (plan, peak_bytes) in enumerate(plans):
        stages = " | ".join(f"{len(stage.ops)} on {'+'.join(stage.devices)} ({stage.backend})" for stage in plan.stages)
        row: dict[str, Any] = {
            "items_per_s": plan.prediction.throughput_per_s,
            "latency_s": plan.prediction.latency_s,
            "peak_bytes": peak_bytes,
        }
        row |= {"stages": stages, "assignment": {op: list(stage.devices) for stage in plan.stages for op in stage.ops}}
        if given.front is not None:
            given.front.mkdir(parents=True, exist_ok=True)
            row["plan"] = str(given.front / f"front-{number}.yaml")
            write_plan(replace(plan, versions=found.plan.versions), graph, Path(row["plan"]))
        rows.append(row)
    return rows


def _explain(explanation: Any, data: dict[str, Any], views: list[Any]) -> None:
    """The explanation beside what else is shown."""
    from autosplit.report import table

    data["explanation"] = explanation.to_dict()
    views.append(table(explanation.rows(), "why", explanation.text))


def _search_workload(given: options.Plans) -> None:
    from autosplit.explaining import explain_blocks
    from autosplit.planners.pareto import pareto, point_of
    from autosplit.planners.portfolio import solve
    from autosplit.report import table
    from autosplit.workloads import read_workload

    if given.format not in ("dnn-partitioning", "pipedream"):
        raise UsageError(f"format '{given.format}' is not known; valid: model, dnn-partitioning, pipedream")
    wanted = given.constraints()
    problem = read_workload(Path(given.model), "pipedream" if given.format == "pipedream" else "dnn-partitioning")
    limits: dict[str, Any] = {
        "contiguous": given.contiguous,
        "num_stages": wanted.num_stages,
        "max_replicas": wanted.max_replicas,
        "min_stage_s": wanted.min_stage_s,
        "max_latency_s": wanted.max_latency_s,
    }
    calls: dict[str, Any] = {"time_limit_s": options.seconds(given.time_limit), "seed": given.seed, "log": _log(given)}
    front: tuple[Any, ...] = ()
    if given.objective == "pareto":
        front = pareto(problem, **limits, **calls)
        solution = front[0]
    else:
        solution = solve(problem, objective=wanted.objective, **limits, **calls)
    loads = dict(zip(problem.devices, solution.loads_s, strict=True))
    data = {
        "workload": problem.name,
        "objective": solution.objective_s,
        "bound": solution.bound_s,
        "gap": solution.gap,
        "status": solution.status,
        "method": solution.method,
        "solve_s": solution.solve_s,
        **_placed(problem, solution),
        "loads": loads,
    }
    title = (
        f"{problem.name}: {solution.objective_s:.6g}, bound {solution.bound_s:.6g}, gap {solution.gap:.3%} ({solution.method})"
    )
    views = [table([{"device": name, "load": load} for name, load in loads.items()], title)]
    if front:
        points = [point_of(problem, each) for each in front]
        rows = [{"objective": point.bottleneck_s, "latency": point.latency_s, "peak_bytes": point.peak_bytes} for point in points]
        data["front"] = [row | _placed(problem, each) for row, each in zip(rows, front, strict=True)]
        views.append(table([row | {"stages": len(each.blocks)} for row, each in zip(rows, front, strict=True)], "front"))
    if given.explain:
        asked = {"objective": wanted.objective, **limits}
        limit_s = options.seconds(given.time_limit)
        _explain(explain_blocks(problem, solution.blocks, options=asked, time_limit_s=limit_s, unit=""), data, views)
    _show(given, _json_safe(data), *views)


def _placed(problem: Any, solution: Any) -> dict[str, Any]:
    """Op to the device that runs it, or to all replicas; and the stages in order, of which several may share a device."""
    stages = [
        {"devices": [problem.devices[d] for d in block.devices], "ops": [problem.ops[op] for op in block.ops]}
        for block in solution.blocks
    ]
    homes = {op: stage["devices"] for stage in stages for op in stage["ops"]}
    return {"assignment": {op: names[0] if len(names) == 1 else names for op, names in homes.items()}, "stages": stages}


def evaluate(given: options.Evaluate) -> None:
    """Give the load of any split of a planner's workload file: SPLIT is JSON, node id to device name."""
    from autosplit.cost import evaluate as compute_loads
    from autosplit.report import table
    from autosplit.workloads import read_split, read_workload

    try:
        split = json.loads(given.split.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise UsageError(f"split file '{given.split}' cannot be read as JSON: {failure}") from None
    problem = read_workload(given.workload, "pipedream" if given.format == "pipedream" else "dnn-partitioning")
    blocks = read_split(problem, split.get("assignment", split) if isinstance(split, dict) else split)
    seconds = compute_loads(problem, blocks).device_s.tolist()
    loads = dict(zip(problem.devices, seconds, strict=True))
    data = {"workload": problem.name, "objective": max(loads.values()), "loads": loads}
    _show(given, data, table([{"device": name, "load": load} for name, load in loads.items()], f"{max(loads.values()):.6g}"))


def run(given: options.Run) -> None:
    """Run a plan, checked against the unsplit model, beside the simple ways to run the same model."""
    from autosplit import api
    from autosplit.discovering import check_here, machine_for
    from autosplit.progress import bars
    from autosplit.report import baselines_table, run_table

    with bars(err) as start:
        start("load")
        plan, traced, machine = api.load_plan(given.plan, given.model)
        if given.devices or given.machine or given.memory:
            machine = machine_for(given.devices, given.machine, given.memory)
        check_here(machine)
        report = api.run(
            traced,
            plan,
            machine,
            baselines=given.baselines,
            forced=True,
            num_requests=given.requests,
            num_rounds=given.rounds,
            progress=start("run"),
        )
    _write_trace(given.trace, traced, report, machine)
    data = {**report.to_dict(), "plan": str(given.plan)}
    _show(given, _json_safe(data), run_table(report), baselines_table(report))
    _require_equal(report.best.outputs_equal, report.best.max_abs_error)


def auto(given: options.Auto) -> None:
    """Do everything: trace, profile, search, run, compare; the best way is written as a plan."""
    from autosplit import api
    from autosplit.discovering import machine_for
    from autosplit.planfile import write_plan
    from autosplit.progress import bars
    from autosplit.report import baselines_table, plan_table, run_table

    with bars(err) as start:
        start("trace")
        result = api.auto(
            given.model,
            machine_for(given.devices, given.machine, given.memory),
            given.batch,
            given.seq_len,
            backends=given.backends,
            constraints=given.constraints(),
            profiles=given.profiles,
            remeasure=given.remeasure,
            budget_s=options.seconds(given.budget),
            queue_depth=given.queue_depth,
            time_limit_s=options.seconds(given.time_limit),
            seed=given.seed,
            num_requests=given.requests,
            num_rounds=given.rounds,
            log=_log(given),
            progress=start,
        )
    for note in result.profile.notes:
        err.print(f"note: {note}", highlight=False)
    report = result.report
    write_plan(replace(result.plan, chosen=report.chosen), result.search.traced.graph, given.output)
    err.print(f"wrote {given.output}", highlight=False)
    _write_trace(given.trace, result.search.traced, report, result.machine)
    data = {**report.to_dict(), "plan": str(given.output)}
    _show(given, _json_safe(data), plan_table(result.plan), run_table(report), baselines_table(report))
    _require_equal(report.best.outputs_equal, report.best.max_abs_error)


def export(given: options.Export) -> None:
    """Write the stages of a plan for another runtime, with a manifest and a short loader."""
    from autosplit import api

    plan, traced, _ = api.load_plan(given.plan, given.model)
    folder = api.export(traced, plan, given.folder, given.to)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    _show(given, {"folder": str(folder), "files": files}, f"{folder}: {', '.join(files)}")


def _require_equal(equal: bool, error: float) -> None:
    if not equal:
        raise StageError(
            f"the outputs differ from the unsplit model's: the largest difference is {error:.3g}. Do not use this plan."
        )


def _guarded(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """The command with its errors as one message on stderr: exit code 1, or 130 after Ctrl-C."""

    @functools.wraps(function)
    def guarded(given: Any) -> None:
        try:
            function(given)
        except AutosplitError as failure:
            if given.verbose:
                traceback.print_exc()
            _complain(failure)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            err.print("autosplit: stopped; what was measured is kept, and no worker is left", highlight=False)
            raise typer.Exit(130) from None

    return guarded


def _complain(failure: AutosplitError) -> None:
    err.print(f"autosplit: {failure}", highlight=False, markup=False, soft_wrap=True)


for command in (devices, profile, search, evaluate, run, auto, export):
    app.command(command.__name__)(options.command(_guarded(command)))


def _stop(number: int, frame: Any) -> None:
    """A polite request to end unwinds as Ctrl-C does, so that workers and files go too."""
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: exit code 0 only when all went well and the outputs matched."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        app()
    except AutosplitError as failure:
        _complain(failure)
        sys.exit(1)


if __name__ == "__main__":
    main()
