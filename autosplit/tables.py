"""Format rows as a pandas DataFrame or an HTML table, and numbers, bytes and seconds as text."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]


def frame(rows: Sequence[Row], index: str | None = None) -> "pd.DataFrame":
    """The rows as a DataFrame, indexed by the column ``index`` if given."""
    import pandas as pd

    table = pd.DataFrame([dict(row) for row in rows])
    return table.set_index(index) if index and len(table) else table


def html(rows: Sequence[Row], caption: str, limit: int = 60) -> str:
    """The rows as an HTML table with a caption. After ``limit`` rows only the number of the others is shown."""
    columns = list(rows[0]) if rows else []
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell(row[name]))}</td>" for name in columns) + "</tr>" for row in rows[:limit])
    more = f"<tr><td colspan={len(columns)}>… {len(rows) - limit} more rows</td></tr>" if len(rows) > limit else ""
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}{more}</tbody></table>"


def cell(value: Any) -> str:
    """The text of one value: a float has four significant digits, or is rounded to an integer from 10000 on.

    >>> cell(0.123456), cell(10664.2), cell(2.5e16), cell("eager")
    ('0.1235', '10664', '2.5e+16', 'eager')
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
