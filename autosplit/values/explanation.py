"""Explanation: why a plan is not faster. ``planning.explaining`` makes it, and plan.yaml holds it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autosplit import tables

MOST_SHOWN = 8
"""Largest number of borders in the text, which names those with the cheapest cuts."""

Reason = Literal["compute", "transfer", "memory", "constraint", "indivisible"]


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """The load of one device in seconds per sample, and the bytes that it holds; ``cap_bytes`` is None without a limit."""

    device: str
    load_s: float
    compute_s: float
    transfer_s: float
    compute_share: float
    transfer_share: float
    held_bytes: float
    cap_bytes: float | None


@dataclass(frozen=True, slots=True)
class Cut:
    """The best plan with another cut at a border: its objective, its slowdown as a share, and the ops that it moves.

    ``tried`` is the number of cuts that were evaluated at the border; ``objective_s`` is None if none of them is legal.
    """

    border: str
    objective_s: float | None
    slower: float | None
    moved: str
    ops: int
    tried: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """The best plan after one change: its objective, its speedup, its bound, and whether it is proved to be optimal."""

    change: str
    objective_s: float
    times: float
    bound_s: float
    proved: bool


@dataclass(frozen=True, slots=True)
class Explanation(tables.Tabular):
    """Why a plan is not faster.

    Attributes:
        objective: ``throughput`` or ``latency``.
        objective_s: value of the objective for the plan, in seconds.
        bound_s: proved lower bound for all plans under the same demands, in the same cost model.
        bottleneck: the device with the largest load.
        bound_by: ``compute`` or ``transfer``, the larger part of that load; ``memory``, if removing the caps helps;
            ``constraint``, if dropping a constraint helps; ``indivisible``, if an op or a group takes as long on every device.
        cuts: a row for each border that was evaluated.
        changes: a row for each change that was evaluated.
        left_out: changes that there was no time to evaluate.
        unit: unit of the times: ``s``, or '' if a workload file does not give one.
        plan: hash of the explained plan; '' for blocks of a problem.
    """

    INDEX = "device"
    objective: str
    objective_s: float
    bound_s: float
    bottleneck: str
    bound_by: Reason
    because: str
    devices: tuple[DeviceLoad, ...]
    cuts: tuple[Cut, ...]
    changes: tuple[Change, ...]
    unit: str = "s"
    plan: str = ""
    left_out: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """One row a device; names have no unit where the unit is not known."""
        return self._rows(self.devices)

    def _rows(self, values: Sequence[DeviceLoad | Cut | Change]) -> list[dict[str, Any]]:
        rows = [asdict(row) for row in values]
        return rows if self.unit == "s" else [{key.removesuffix("_s"): value for key, value in row.items()} for row in rows]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the text."""
        return asdict(self) | {"text": self.text}

    @property
    def text(self) -> str:
        """The explanation in sentences, one a line."""
        lines = [self.because]
        cheapest = sorted(self.cuts, key=lambda cut: (cut.objective_s is None, cut.objective_s or 0.0))[:MOST_SHOWN]
        for cut in (cut for cut in self.cuts if cut in cheapest):
            if cut.objective_s is None:
                lines.append(f"Between {cut.border} no other cut is legal.")
            else:
                slower = "" if cut.slower is None else f" ({cut.slower:+.1%})"
                cost = f"{time_text(cut.objective_s, self.unit)}{slower}"
                lines.append(f"Between {cut.border} the next best cut costs {cost}, of {cut.tried} tried: {cut.moved}.")
        if len(self.cuts) > len(cheapest):
            lines.append(f"At {len(self.cuts) - len(cheapest)} more borders the next best cut costs as much or more.")
        for row in self.changes:
            proof = "optimal" if row.proved else f"found in time; at best {time_text(row.bound_s, self.unit)}"
            lines.append(f"With {row.change}: {time_text(row.objective_s, self.unit)}, {row.times:.2f} times as fast ({proof}).")
        if self.left_out:
            lines.append(f"There was no time left to look at: {'; '.join(self.left_out)}.")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        parts = [tables.html(self.rows(), self.because)]
        for rows, title in ((self.cuts, "other cuts"), (self.changes, "changes")):
            parts += [tables.html(self._rows(rows), title)] if rows else []
        parts += [tables.html([{"change": change} for change in self.left_out], "no time left for")] if self.left_out else []
        return "".join(parts)


def time_text(value: float, unit: str) -> str:
    """The text of a time: seconds in the unit that fits, other units as plain numbers."""
    return tables.seconds_text(value) if unit == "s" else f"{value:.6g}"
