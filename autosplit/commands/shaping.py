"""Search and run for requests of several sizes: the commands search, auto and run with a range, or with a plan of one."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.commands import options, runoptions
from autosplit.commands.console import err, log, require_equal, say, say_kept, show, trace, write_dot
from autosplit.commands.machines import opened_machine
from autosplit.commands.starting import start
from autosplit.progress import bars
from autosplit.values.shapes import Traffic, read_traffic

if TYPE_CHECKING:
    from autosplit.shapes.contest import ShapedReport

ONE_SIZE = ("cluster", "explain", "front", "peers", "pick", "picture", "report", "simulate", "arrival_rate", "trace", "watch")
"""Flags whose output is for plans of one size."""

WHY = "requests of several sizes have none of this"


def plan_shapes(given: options.Search, compare: bool) -> None:
    """Choose buckets, plan for the traffic, and with ``compare`` run the plan beside its baselines; the plan is written."""
    given.require_default([flag for flag in ONE_SIZE if hasattr(given, flag)], WHY)
    wanted, allowed = given.constraints(), given.sizes
    traffic = _traffic(given.traffic, tuple(allowed), allowed)
    start(lambda: given.backends)
    from autosplit.commands.report import plan_table
    from autosplit.families import auto_family
    from autosplit.values.planfile import write_plan

    with opened_machine(given) as (machine, hosts), bars(err) as progress:
        setup = given.setup(progress, log(given), hosts)
        family = trace(given, progress, given.model)
        budget = given.spending()
        result = auto_family(family, machine, wanted, traffic=traffic, setup=setup, budget=budget, compare=compare)
    for note in result.notes:
        if note not in family.notes:  # these were said when it was traced
            say(f"note: {note}")
    tables = [] if result.report is None else [_table(result.report)]
    try:
        show(given, {**result.to_dict(), "plan": str(given.output)}, plan_table(result.plan, given.verbose), *tables)
    finally:
        write_plan(result.plan, result.family.variants[0].graph, given.output)
        say(f"wrote {given.output}")
        write_dot(given.dot, result.family.variants[0].graph, result.plan)
    if result.report is not None:
        require_equal(result.report.best.fault)


def run_shapes(given: runoptions.Run, loaded: Any, machine: Any) -> None:
    """Run a plan of several sizes beside its baselines."""
    given.require_default([flag for flag in ONE_SIZE if hasattr(given, flag)], WHY)
    from autosplit.deploying.setup import Budget, Setup
    from autosplit.families import run_family

    family, plan = loaded.family, loaded.plan
    traffic = _traffic(given.traffic, tuple(family.allowed), family.allowed)
    if given.precision not in (None, plan.precision):
        plan = replace(plan, precision=given.precision or "f32").unpredicted()
    say_kept(given)
    with bars(err) as progress:
        setup, budget = Setup(store=given.store, progress=progress), Budget(num_rounds=given.rounds)
        report = run_family(family, plan, machine, traffic=traffic, baselines=given.baselines, setup=setup, budget=budget)
    show(given, {**report.to_dict(), "plan": str(given.plan)}, _table(report))
    require_equal(report.best.fault)


def _traffic(path: Path | None, dims: tuple[str, ...], allowed: Any) -> Traffic | None:
    """The traffic in a file, checked against the sizes before anything is traced."""
    return None if path is None else read_traffic(path, dims).verify(allowed)


def _table(report: "ShapedReport") -> Any:
    from autosplit.commands.report import left_out_lines, table

    below = "\n".join([f"* {report.sentence}", *left_out_lines(report.left_out)])
    return table(report.rows(), f"{report.model}: the plan beside its baselines, under the traffic", below)
