"""MemoryPlan: an offset in an arena for each storage, with the bound that no plan of the same storages beats."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autosplit import tables
from autosplit.errors import PlanError, raise_faults
from autosplit.memory.lives import ALIGNMENT, Life


@dataclass(frozen=True, slots=True)
class Storage(Life):
    """The bytes of an arena from ``offset`` on during a life."""

    number: int
    offset: int


@dataclass(frozen=True)
class MemoryPlan(tables.Tabular):
    """The offsets of the storages of an arena.

    Attributes:
        storages: in the order in which they become live.
        bound_bytes: the largest sum of live bytes at any step; no plan has a smaller peak.
        method: name of the algorithm that found the offsets.
        proved: whether no plan of these storages has a smaller peak, by the bound or by the solver.
    """

    INDEX = "storage"
    storages: tuple[Storage, ...]
    bound_bytes: int
    method: str
    proved: bool

    @property
    def peak_bytes(self) -> int:
        """Bytes of the arena."""
        return max((storage.offset + storage.num_bytes for storage in self.storages), default=0)

    @property
    def sum_bytes(self) -> int:
        """Bytes of all storages without reuse."""
        return sum(storage.num_bytes for storage in self.storages)

    @property
    def gap(self) -> float:
        """Share by which the peak is above the bound."""
        return self.peak_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0

    @cached_property
    def storage_of(self) -> dict[str, Storage]:
        """Value name to its storage."""
        return {value: storage for storage in self.storages for value in storage.values}

    def verify(self) -> "MemoryPlan":
        """Return the plan, or raise PlanError: storages that are live at once overlap, or an offset is not aligned."""
        faults = [
            f"storage {one.number} begins at {one.offset} B, which is not a multiple of {ALIGNMENT} B"
            for one in self.storages
            if one.offset % ALIGNMENT or one.offset < 0
        ]
        ends: list[Storage] = []
        for one in sorted(self.storages, key=lambda storage: storage.first):
            ends = [other for other in ends if other.last >= one.first]
            faults += [
                f"storages {other.number} and {one.number} overlap at {max(one.offset, other.offset)} B while both are live"
                for other in ends
                if one.offset < other.offset + other.num_bytes and other.offset < one.offset + one.num_bytes
            ]
            ends.append(one)
        if self.peak_bytes < self.bound_bytes:
            faults.append(f"its peak of {self.peak_bytes} B is below the bound of {self.bound_bytes} B")
        raise_faults(PlanError, "the memory plan does not verify", faults)
        return self

    def rows(self) -> list[dict[str, Any]]:
        """One row a storage: its number, offset, bytes, first and last step, values."""
        return [
            {
                "storage": one.number,
                "offset": one.offset,
                "storage_bytes": one.num_bytes,
                "first": one.first,
                "last": one.last,
                "values": " ".join(one.values),
            }
            for one in self.storages
        ]

    def summary(self) -> str:
        """One sentence: the peak, the bound, the bytes without reuse."""
        proof = "proved smallest" if self.proved else f"{self.gap:.1%} above the bound"
        return (
            f"{tables.bytes_text(self.peak_bytes)} for {len(self.storages)} storages ({proof}; "
            f"{tables.bytes_text(self.sum_bytes)} without reuse)"
        )

    def __repr__(self) -> str:
        return f"MemoryPlan({self.summary()})"

    def _repr_html_(self) -> str:
        return tables.html(self.rows(), self.summary())


def bound_of(lives: Sequence[Life]) -> int:
    """The largest sum of live bytes at any step.

    >>> bound_of([Life(("a",), 64, 0, 1), Life(("b",), 128, 1, 2)])
    192
    """
    if not lives:
        return 0
    change = np.zeros(max(life.last for life in lives) + 2, dtype=np.int64)
    np.add.at(change, [life.first for life in lives], [life.num_bytes for life in lives])
    np.add.at(change, [life.last + 1 for life in lives], [-life.num_bytes for life in lives])
    return int(change.cumsum().max())


def plan_of(lives: Sequence[Life], offsets: Sequence[int], method: str, proved: bool = False) -> MemoryPlan:
    """The verified plan with these offsets."""
    storages = tuple(
        Storage(life.values, life.num_bytes, life.first, life.last, number, offset)
        for number, (life, offset) in enumerate(zip(lives, offsets, strict=True))
    )
    plan = MemoryPlan(storages, bound_of(lives), method, proved)
    return replace(plan, proved=proved or plan.peak_bytes == plan.bound_bytes).verify()
