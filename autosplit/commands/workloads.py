"""A planner's workload file, planned or judged without a model."""

import json
from pathlib import Path
from typing import Any

from autosplit import options
from autosplit.commands.console import add_explanation, add_simulation, json_safe, log, show
from autosplit.errors import UsageError


def search_workload(given: options.Plans) -> None:
    """Plan a workload file and show the loads of its devices."""
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
    calls: dict[str, Any] = {"time_limit_s": options.seconds(given.time_limit), "seed": given.seed, "log": log(given)}
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
        add_explanation(explain_blocks(problem, solution.blocks, options=asked, time_limit_s=limit_s, unit=""), data, views)
    add_simulation(given, _simulation(problem, solution.blocks), data, views)
    show(given, json_safe(data), *views)


def _simulation(problem: Any, blocks: Any) -> Any:
    """The simulation of blocks, once it is known of how many requests and when they come."""
    from autosplit.schedule import schedule_blocks

    return lambda count, arrivals_s: schedule_blocks(problem, blocks, count, arrivals_s=arrivals_s)


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
    views = [table([{"device": name, "load": load} for name, load in loads.items()], f"{max(loads.values()):.6g}")]
    add_simulation(given, _simulation(problem, blocks), data, views)
    show(given, json_safe(data), *views)
