"""Format rows as a pandas DataFrame or an HTML table, and their values as text in the unit at the end of a column's name."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]

ERRORS = ("error", "stage_error", "median_error", "worst_error", "median_stage_error", "worst_stage_error")
SHARES = ("spread", "gap", "busy", "bubble", "slower", "compute_share", "transfer_share", *ERRORS)
"""Columns that hold a share of 1, shown in percent."""

BARS = ("busy", "compute_share", "transfer_share", "of_plan")
"""Columns that an HTML table draws as bars too."""

PADDING = "padding:2px 10px 2px 4px"
"""Room around the text of a cell, because not every notebook styles tables."""


def frame(rows: Sequence[Row], index: str | None = None) -> "pd.DataFrame":
    """The rows as a DataFrame, indexed by the column ``index`` if given."""
    import pandas as pd

    table = pd.DataFrame([dict(row) for row in rows])
    return table.set_index(index) if index and len(table) else table


class Tabular:
    """A value with rows. ``INDEX`` is the column that names a row, if there is one."""

    __slots__ = ()
    INDEX: ClassVar[str | None] = None

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the table."""
        raise NotImplementedError

    def frame(self) -> Any:
        """The rows as a pandas DataFrame, indexed by their names if they have some."""
        return frame(self.rows(), self.INDEX)


def html(rows: Sequence[Row], caption: str, limit: int = 60) -> str:
    """The rows as an HTML table with a caption: values with units, bars for shares of a whole.

    After ``limit`` rows only the number of the others is shown.
    """
    columns = list(rows[0]) if rows else []
    sides = {name: "right" if all(isinstance(row[name], int | float | None) for row in rows) else "left" for name in columns}
    head = "".join(f'<th style="text-align:{sides[name]};{PADDING}">{escape(heading(name))}</th>' for name in columns)
    longest = {name: max(1.0, *(row[name] or 0.0 for row in rows)) for name in columns if name in BARS}
    body = "".join(
        "<tr>" + "".join(_td(name, row[name], sides[name], longest) for name in columns) + "</tr>" for row in rows[:limit]
    )
    more = f"<tr><td colspan={len(columns)}>… {len(rows) - limit} more rows</td></tr>" if len(rows) > limit else ""
    title = f'<caption style="text-align:left;font-weight:bold;padding:12px 4px 2px">{escape(caption)}</caption>'
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}{more}</tbody></table>"


def _td(column: str, value: Any, side: str, longest: Mapping[str, float]) -> str:
    style = f"text-align:{side};{PADDING}{';white-space:nowrap' if side == 'right' else ''}"
    if column in longest:
        style += f";background:linear-gradient(90deg,#bcd9ee {100 * (value or 0.0) / longest[column]:.0f}%,transparent 0)"
    return f'<td style="{style}">{escape(cell(column, value))}</td>'


def heading(column: str) -> str:
    """A column's name as a person reads it.

    >>> heading("load_s"), heading("items_per_s"), heading("stage_bytes"), heading("of_plan"), heading("chosen")
    ('load', 'items/s', 'stage memory', 'of plan', '')
    """
    if column == "chosen":  # a mark needs no words
        return ""
    if column.endswith("_per_s"):
        return column.removesuffix("_per_s").replace("_", " ") + "/s"
    if column.endswith("_bytes"):
        return column.removesuffix("_bytes").replace("_", " ") + " memory"
    return column.removesuffix("_s").replace("_", " ")


def cell(column: str, value: Any) -> str:
    """A value in the unit at the end of its column's name; a dash for None and NaN.

    >>> cell("load_s", 0.0021), cell("stage_bytes", 2**21), cell("gap", 0.014), cell("items_per_s", 141.27), cell("load_s", None)
    ('2.10 ms', '2.0 MiB', '1.4 %', '141.3', '-')
    """
    if value is None or value != value:
        return "-"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if column.endswith("_bytes"):
        return bytes_text(value)
    if column == "of_plan":
        return f"{value:.2f}"
    if column in SHARES:
        return f"{value * 100:.1f} %"
    if column.endswith("_s") and not column.endswith("_per_s"):
        return seconds_text(value)
    return number_text(value)


def number_text(value: float) -> str:
    """A number with four significant digits, or rounded to an integer from 10000 on.

    >>> number_text(0.123456), number_text(10664.2), number_text(2.5e16), number_text(3)
    ('0.1235', '10664', '2.5e+16', '3')
    """
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 9999.5 <= abs(value) < 1e15 else f"{value:.4g}"


def bytes_text(num_bytes: float) -> str:
    """Bytes in the unit that fits.

    >>> bytes_text(512), bytes_text(-9 * 2**20), bytes_text(1.5 * 2**30)
    ('512 B', '-9.0 MiB', '1.5 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """Seconds in the unit that fits.

    >>> seconds_text(2.5), seconds_text(0.0125), seconds_text(3.5e-05)
    ('2.50 s', '12.50 ms', '35.0 us')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
