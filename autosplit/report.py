"""Report: plans, runs, devices and graphs as rich tables for the terminal. They read values and change none."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from autosplit import tables
from autosplit.plan import Plan
from autosplit.results import RunStats
from autosplit.runreport import RunReport

ERRORS = ("error", "stage_error", "median_error", "worst_error", "median_stage_error", "worst_stage_error")
SHARES = ("spread", "gap", "busy", "bubble", *ERRORS)
"""Columns that hold a share of 1, shown in percent."""


def table(rows: Sequence[Mapping[str, Any]], title: str = "", below: str = "", hide: Sequence[str] = ()) -> Group:
    """Any rows as a table: a column's name says its unit, and numbers stand at the right.

    Args:
        rows: mappings with the same keys.
        title: what the table is about, a line above it.
        below: what is to be said after it.
        hide: columns to leave out.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [name for name in (rows[0] if rows else ()) if name not in hide]
    for name in columns:
        numeric = all(isinstance(row[name], int | float | None) for row in rows)
        made.add_column(heading(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell(name, row[name])) for name in columns))
    return Group(*([Text(title, style="bold")] if title else []), *([made] if rows else []), *([Text(below)] if below else []))


def heading(column: str) -> str:
    """A column's name as a person reads it.

    >>> heading("load_s"), heading("items_per_s"), heading("stage_bytes"), heading("of_plan")
    ('load', 'items/s', 'stage memory', 'of plan')
    """
    if column.endswith("_per_s"):
        return column.removesuffix("_per_s").replace("_", " ") + "/s"
    if column.endswith("_bytes"):
        return column.removesuffix("_bytes").replace("_", " ") + " memory"
    return column.removesuffix("_s").replace("_", " ")


def cell(column: str, value: Any) -> str:
    """A value in the unit that its column's name tells; a dash where there is none.

    >>> cell("load_s", 0.0021), cell("stage_bytes", 2**21), cell("gap", 0.014), cell("items_per_s", 141.27), cell("load_s", None)
    ('2.10 ms', '2.0 MiB', '1.4 %', '141.3', '-')
    """
    if value is None or value != value:
        return "-"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if column.endswith("_bytes"):
        return tables.bytes_text(value)
    if column in SHARES:
        return f"{value * 100:.1f} %"
    if column.endswith("_s") and not column.endswith("_per_s"):
        return tables.seconds_text(value)
    return tables.cell(value)


def plan_table(plan: Plan) -> Group:
    """The stages of a plan, with its prediction as the title."""
    return table(plan.rows(), plan.summary())


def run_table(report: RunReport) -> Group:
    """The workers of the plan to use: where their time goes, predicted beside measured."""
    title = f"{report.model}: '{report.chosen}', {report.batch} items a request"
    return table(report.stage_rows(), title)


def stats_table(stats: RunStats) -> Group:
    """The workers of one run."""
    return table(stats.rows(), f"{stats.num_requests} requests, {stats.restarts} restarts")


def baselines_table(report: RunReport) -> Group:
    """The plan beside the simple ways, fastest first, and why the chosen one was chosen."""
    left_out = [f"'{way}' was left out: {why}" for way, why in report.left_out.items()]
    return table(report.rows(), f"{report.model}: the plan beside the simple ways", "\n".join([report.sentence, *left_out]))


def devices_table(rows: Sequence[Mapping[str, Any]]) -> Group:
    """The devices of a machine, a row each."""
    return table(rows, f"{len(rows)} device{'s' * (len(rows) != 1)}")
