"""Plan a planner's workload file, which needs no model."""

import json
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from autosplit.commands import options
from autosplit.commands.console import add_explanation, add_simulation, err, log, show, write, write_simulation
from autosplit.commands.report import table
from autosplit.errors import InfeasibleError, UsageError
from autosplit.parsing import json_safe
from autosplit.progress import bars

FOR_MODELS = (
    "devices", "machine", "memory", "pin", "forbid", "allow", "together", "front", "pick", "backend", "precision", "max_error",
    "batch", "seq_len", "trust", "profiles", "remeasure", "budget", "queue_depth", "dot",
)  # fmt: skip
"""Flags for a model or its machine."""

PLAN_SHARE = 2 / 3
"""Share of the time limit for finding a plan that is to be explained. The explanation has the rest."""


def search_workload(given: options.Plans) -> None:
    """Plan a workload file and show the loads of its devices."""
    from autosplit.planners.pareto import pareto, values_of
    from autosplit.planners.portfolio import solve
    from autosplit.planning.explaining import explain_blocks

    demands = replace(given.constraints(), max_replicas=given.max_replicas or 1)
    given.require_default(FOR_MODELS, "a workload file names its own devices and ops, and nothing is measured or written")
    problem = read_problem(Path(given.model), given, "model, ")
    limit_s = options.seconds(given.time_limit)
    plan_s = limit_s * (PLAN_SHARE if given.explain else 1.0)
    calls: dict[str, Any] = {"time_limit_s": plan_s, "seed": given.seed, "log": log(given)}
    started = monotonic()
    try:
        with bars(err) as progress:
            progress("search", 0.0, f"planning, with a limit of {limit_s:g} s")
            front = tuple(pareto(problem, demands, **calls)) if given.objective == "pareto" else ()
            solution = front[0] if front else solve(problem, demands, **calls)
    except InfeasibleError as failure:
        if given.json:
            show(given, _refusal(problem, failure, monotonic() - started))
        raise
    loads = dict(zip(problem.devices, solution.judged.loads.device_s.tolist(), strict=True))
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
        f"{problem.name}: {solution.status}, {solution.objective_s:.6g}, bound {solution.bound_s:.6g}, gap {solution.gap:.3%} "
        f"({solution.method})"
    )
    views = [table([{"device": name, "load": load} for name, load in loads.items()], title)]
    if front:
        rows = [dict(zip(("objective", "latency", "peak_bytes"), values_of(each.judged), strict=True)) for each in front]
        data["front"] = [row | _placed(problem, each) for row, each in zip(rows, front, strict=True)]
        views.append(table([row | {"stages": len(each.blocks)} for row, each in zip(rows, front, strict=True)], "front"))
    if given.explain:
        left_s = max(0.0, limit_s - (monotonic() - started))
        with bars(err) as progress:
            progress("explain", 0.0, "finding out why it is not better")
            found = explain_blocks(problem, solution.blocks, demands, time_limit_s=left_s, unit="", bound_s=solution.bound_s)
        add_explanation(found, data, views)
    simulated = add_simulation(given, simulation_of_blocks(problem, solution.blocks), data, views)
    try:
        show(given, data, *views)
    finally:
        write(given.output if given.output != options.PLAN_FILE else None, lambda: json.dumps(json_safe(data), indent=1))
        write_simulation(given.trace, simulated)


def read_problem(path: Path, given: Any, others: str = "") -> Any:
    """The problem in a workload file. Raises: UsageError: an unknown format, or every fault of the file."""
    from autosplit.costs.workloads import read_workload

    if given.format == "pipedream":
        return read_workload(path, "pipedream", num_devices=given.num_devices, bytes_per_s=given.bandwidth, overlap=given.overlap)
    if given.format != "dnn-partitioning":
        raise UsageError(f"format '{given.format}' is not known; valid: {others}dnn-partitioning, pipedream")
    given.require_default(options.flags_of(options.Assumed), "a dnn-partitioning file names its own devices")
    return read_workload(path)


def simulation_of_blocks(problem: Any, blocks: Any) -> Any:
    """A function that simulates the blocks for a number of requests and their arrivals."""
    from autosplit.costs.planschedule import schedule_blocks

    return lambda count, arrivals_s: schedule_blocks(problem, blocks, count, arrivals_s=arrivals_s)


def _refusal(problem: Any, failure: InfeasibleError, solve_s: float) -> dict[str, Any]:
    """The answer if there is no plan: empty fields, and the demands that cannot hold together."""
    nothing = dict.fromkeys(("objective", "bound", "gap", "method"))
    proved = "infeasible" if failure.conflict else None
    data = {"workload": problem.name, **nothing, "status": proved, "solve_s": solve_s, "assignment": {}, "loads": {}}
    return data | {"conflict": list(failure.conflict), "message": str(failure)}


def _placed(problem: Any, solution: Any) -> dict[str, Any]:
    """Op to its device or devices (replicas); and the stages in order, several of which may share a device."""
    stages = [
        {"devices": [problem.devices[d] for d in block.devices], "ops": [problem.ops[op] for op in block.ops]}
        for block in solution.blocks
    ]
    homes = {op: stage["devices"] for stage in stages for op in stage["ops"]}
    return {"assignment": {op: names[0] if len(names) == 1 else names for op, names in homes.items()}, "stages": stages}
