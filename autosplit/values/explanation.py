"""Explanation: why a plan is no faster, as a value that a plan carries and a file holds. ``explaining`` makes it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from autosplit import tables

MOST_SHOWN = 8
"""Borders in the text, those with the cheapest cuts; the value has all."""

Reason = Literal["compute", "transfer", "memory", "constraint", "indivisible"]


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """What one device bears, in seconds for a sample and in bytes; no ``cap_bytes`` means no cap."""

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
    """The best plan with another cut at a border: its objective, how much slower, and which ops are moved, and how many.

    ``tried`` other cuts were looked at there; ``objective_s`` is None where none of them is legal.
    """

    border: str
    objective_s: float | None
    slower: float | None
    moved: str
    ops: int
    tried: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """The best plan with one thing changed: its objective, how many times as fast, what is proved of it."""

    change: str
    objective_s: float
    times: float
    bound_s: float
    proved: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a plan is no faster.

    Attributes:
        objective: ``throughput`` or ``latency``.
        objective_s: the plan's.
        bound_s: proved: no plan under the same demands is better, in the same cost model.
        bottleneck: the device with the largest load.
        bound_by: ``compute`` or ``transfer``, whichever is more of that load; ``memory``, if lifting the caps helps;
            ``constraint``, if dropping one helps; ``indivisible``, if an op or a group takes as long on every device.
        because: that in a sentence.
        devices: a row for each device that is used.
        cuts: a row for each border that there was time for.
        changes: a row for each change.
        left_out: changes that there was no time for.
        unit: of the times: ``s``, or nothing where a workload file does not say.
        plan: hash of the plan that is explained; nothing for blocks of a problem.
    """

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
        """One row a device; without units in the names where none is known."""
        rows = [asdict(row) for row in self.devices]
        return rows if self.unit == "s" else [{key.removesuffix("_s"): value for key, value in row.items()} for row in rows]

    def frame(self) -> Any:
        """The rows as a pandas DataFrame indexed by device."""
        return tables.frame(self.rows(), index="device")

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, and as text."""
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
            parts += [tables.html([asdict(row) for row in rows], title)] if rows else []
        return "".join(parts)


def time_text(value: float, unit: str) -> str:
    """A time in its unit: seconds as a person reads them, others as they are."""
    return tables.seconds_text(value) if unit == "s" else f"{value:.6g}"
