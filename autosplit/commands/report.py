"""Tables for the terminal: plans, runs and any rows, drawn with rich."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from autosplit import tables
from autosplit.terminal import visible
from autosplit.values.plan import Plan

if TYPE_CHECKING:
    from autosplit.reports.runreport import RunReport

WRAP_AT = 20
"""Text is not wrapped in columns narrower than this."""

FIGURE = re.compile(r"(.*\()([\d.]+)( [^()]*\))")
"""A reason that ends with a figure in brackets: the text before the figure, the figure, and the text after it."""


def table(rows: Sequence[Mapping[str, Any]], title: str = "", below: str = "", hide: Sequence[str] = ()) -> Group:
    """Rows with the same keys as a table. The name of a column says its unit, and numbers stand at the right."""
    columns = tuple(_column(name, [row[name] for row in rows]) for name in (rows[0] if rows else ()) if name not in hide)
    made = [Columns(columns)] if columns else []
    # rich leaves some control characters of a Text out, so they are escaped before
    return Group(*([Text(visible(title), style="bold")] if title else []), *made, *([Text(visible(below))] if below else []))


@dataclass(frozen=True, slots=True)
class Column:
    """A column as text, the heading first; numbers are never wrapped, and words never broken."""

    texts: tuple[str, ...]
    numeric: bool

    @property
    def widest(self) -> int:
        """The width without any wrapping."""
        return max(map(cell_len, self.texts))

    @property
    def narrowest(self) -> int:
        """The width with all wrapping that is allowed."""
        head, *cells = self.texts
        words = head.split() + (cells if self.numeric else [word for text in cells for word in text.split()])
        return max(map(cell_len, words))

    @property
    def readable(self) -> int:
        """The width below which the column would be wrapped too much to read."""
        return self.narrowest if self.numeric else max(self.narrowest, min(self.widest, WRAP_AT))


@dataclass(frozen=True, slots=True)
class Columns:
    """A table as wide as the console. Columns that do not fit go into tables below, beside those that tell the rows apart."""

    columns: tuple[Column, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A drawable of rich: one table, or several."""
        keys = self._keys(options.max_width // 2)
        part = list(keys)
        for column in self.columns[len(keys) :]:
            if len(part) > len(keys) and _total([one.readable for one in (*part, column)]) > options.max_width:
                yield _drawn(part, options.max_width)
                part = list(keys)
            part.append(column)
        yield _drawn(part, options.max_width)

    def _keys(self, width: int) -> tuple[Column, ...]:
        """The fewest first columns that tell the rows apart: at most three, and at most ``width`` wide."""
        keys = self.columns[:1]
        for column in self.columns[1:3]:
            rows = list(zip(*(key.texts for key in keys), strict=True))
            if len(set(rows)) == len(rows) or _total([key.readable for key in (*keys, column)]) > width:
                break
            keys += (column,)
        return keys


def _column(name: str, values: Sequence[Any]) -> Column:
    numeric = all(isinstance(value, int | float | None) for value in values)
    return Column(tuple(map(visible, (tables.heading(name), *(tables.cell(name, value) for value in values)))), numeric)


def _total(widths: Sequence[int]) -> int:
    """The width of a table with columns of these widths: a blank at both ends, two of them in between."""
    return sum(widths) + 2 * len(widths)


def _drawn(columns: Sequence[Column], width: int) -> Table:
    """A table of these columns, the widest wrapped until it fits."""
    widths = [column.widest for column in columns]
    spare = [have - column.narrowest for have, column in zip(widths, columns, strict=True)]
    while _total(widths) > width and any(spare):
        _, at = max((widths[at], at) for at, left in enumerate(spare) if left)
        widths[at] -= 1
        spare[at] -= 1
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column, room in zip(columns, widths, strict=True):
        made.add_column(column.texts[0], justify="right" if column.numeric else "left", overflow="fold", width=room)
    for texts in zip(*(column.texts[1:] for column in columns), strict=True):
        made.add_row(*map(Text, texts))
    return made


def plan_table(plan: Plan, verbose: bool = False) -> Group:
    """The stages of a plan, with its prediction as the title."""
    return table(plan.rows(), plan.predicted(verbose), hide=() if verbose else ("first", "last"))


def run_table(report: "RunReport", verbose: bool = False) -> Group:
    """The workers of the plan to use: their seconds by use, predicted beside measured."""
    title = f"{report.model}: '{report.chosen}', {report.request}"
    memory = ("resident_bytes", "proportional_bytes", "predicted_bytes", "held_bytes")
    hide = () if verbose else ("ops", *memory)  # the plan's table has the ops
    return table(report.stage_rows(), title, hide=hide)


def peers_table(report: "RunReport") -> Group:
    """The splits of other tools, predicted, the fastest one first; and why other splits are left out."""
    left_out = "\n".join(left_out_lines(report.peers.left_out))
    nothing = "" if report.peers.plans or left_out else "No measurement of this model is stored here, so nothing is predicted."
    return table(report.peer_rows(), f"{report.model}: the rules of other tools, predicted", left_out or nothing)


def baselines_table(report: "RunReport", verbose: bool = False) -> Group:
    """The plan beside its baselines, the best one first with the chosen one marked, and why that one was chosen."""
    hide = () if verbose else ("stages", "backend", "rounds", "max_error")
    below = "\n".join([f"* {report.sentence}", report.call, report.errors, *left_out_lines(report.left_out)])
    return table(report.rows(), f"{report.model}: the plan beside its baselines", below, hide=hide)


def left_out_lines(left_out: Mapping[str, str]) -> Iterator[str]:
    """A line for each reason to leave out plans; reasons that differ only in the figure at their end share a line.

    >>> list(left_out_lines({"a": "4 were better (0.7 of the plan)", "b": "4 were better (0.5 of the plan)", "c": "it failed"}))
    ["'a', 'b' were left out: 4 were better (0.7, 0.5 of the plan)", "'c' was left out: it failed"]
    """
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name, why in left_out.items():
        found = FIGURE.fullmatch(why)
        before, figure, after = found.groups() if found else (why, "", "")
        groups.setdefault((before, after), {})[f"'{name}'"] = figure
    for (before, after), figures in groups.items():
        verb = "was" if len(figures) == 1 else "were"
        yield f"{', '.join(figures)} {verb} left out: {before}{', '.join(filter(None, figures.values()))}{after}"
