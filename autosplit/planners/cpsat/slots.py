"""Slots: the Booleans of a CP-SAT model for the items and the devices of each block.

In a chain, an item has a staircase of Booleans "in this slot or an earlier one"; otherwise it has one Boolean for each slot.
Memory caps, pools and forbidden devices are constraints on these Booleans alone.
"""

from collections.abc import Sequence
from itertools import pairwise, product
from math import floor, isfinite
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.problem import Block, Problem
from autosplit.planners.cpsat.solver import MOST_STEPS
from autosplit.planners.instance import Instance

MEMORY_STEPS = 1e6
"""Steps in a memory cap, if bytes are not whole or are too many."""


class Slots:
    """The slots of a model: blocks in a row, with their items and devices.

    Attributes:
        model: the CP-SAT model.
        item_of: the item of each op.
        types: the devices of each choice of a slot: a class, or one device where slots share devices.
        type_class: the class of each type.
        pairs: (type, other type, two devices of them) for each pair of types that two blocks may have.
        inside: ``inside[item][slot]`` is 1 where the item is in the slot.
        used: whether a slot holds anything.
        chosen: ``chosen[slot][type]``, whether the slot runs on the type.
        takes: how many devices of the type it takes.
        wide: ``wide[slot][r]``, whether the slot runs on r + 1 devices.
        fixed: the type of each slot where it is given, otherwise empty.
    """

    def __init__(self, problem: Problem, instance: Instance, num_slots: int) -> None:
        self.problem, self.instance, self.demands, self.num_slots = problem, instance, instance.demands, num_slots
        demands = instance.demands
        self.model = cp_model.CpModel()
        self.types = [(device,) for device in range(problem.num_devices)] if demands.reuse else list(instance.classes)
        self.item_of = instance.item_of.tolist()
        self.type_class = [int(instance.class_of[group[0]]) for group in self.types]
        cases = product(*(enumerate(self.types) for _ in range(2)))
        found = [(k, j, [(d, e) for d in group for e in other if d != e or demands.reuse]) for (k, group), (j, other) in cases]
        self.pairs = [(k, j, ends[0]) for k, j, ends in found if ends]
        plain = demands.max_replicas == 1 and not demands.reuse and demands.num_stages is None and demands.max_stages is None
        self.fixed = [] if demands.contiguous or not plain else [k for k, group in enumerate(self.types) for _ in group]
        self.inside: list[list[Any]] = []
        self.stairs: list[list[Any]] = []
        self._place_items()
        self._place_slots()
        self._memory()

    def _place_items(self) -> None:
        slots = range(self.num_slots)
        for _ in range(self.instance.num_items):
            if self.demands.contiguous:
                stair = [self.model.NewBoolVar("") for _ in range(self.num_slots - 1)]
                for low, high in pairwise(stair):
                    self.model.AddImplication(low, high)
                self.stairs.append(stair)
                edges = [0, *stair, 1]
                self.inside.append([edges[s + 1] - edges[s] for s in slots])
            else:
                row = [self.model.NewBoolVar("") for _ in slots]
                self.model.AddExactlyOne(row)
                self.inside.append(row)
        if self.demands.contiguous:
            for item in range(self.instance.num_items):
                for goal in self.instance.after.row(item):
                    for s in range(self.num_slots - 1):
                        self.model.AddImplication(self.stairs[goal][s], self.stairs[item][s])

    def _place_slots(self) -> None:
        """Devices of each slot: ``takes`` counts by type, ``chosen`` whether any, ``wide[s][r]`` whether r in all."""
        counts = [len(group) for group in self.types]
        widest = min(self.demands.max_replicas, sum(counts))
        self.chosen = [[self.model.NewBoolVar("") for _ in counts] for _ in range(self.num_slots)]
        self.used = [self.model.NewBoolVar("") for _ in range(self.num_slots)]
        self.wide: list[list[Any]] = []
        takes_of: list[list[Any]] = []
        for s in range(self.num_slots):
            takes = self.chosen[s]
            if widest > 1:
                takes = [self.model.NewIntVar(0, min(count, widest), "") for count in counts]
                for number, flag in zip(takes, self.chosen[s], strict=True):
                    self.model.Add(number >= 1).OnlyEnforceIf(flag)
                    self.model.Add(number == 0).OnlyEnforceIf(flag.Not())
            self.wide.append([self.model.NewBoolVar("") for _ in range(widest)])
            self.model.Add(sum(self.wide[s]) == self.used[s])
            self.model.Add(sum(takes) == sum((r + 1) * flag for r, flag in enumerate(self.wide[s])))
            takes_of.append(takes)
            total = sum(self.inside[item][s] for item in range(self.instance.num_items))
            self.model.Add(total >= 1).OnlyEnforceIf(self.used[s])
            self.model.Add(total == 0).OnlyEnforceIf(self.used[s].Not())
            if self.fixed:
                self.model.Add(self.chosen[s][self.fixed[s]] == self.used[s])
            elif s and (self.demands.contiguous or len(self.types) > 1):
                self.model.AddImplication(self.used[s], self.used[s - 1])
            if self.demands.num_stages is not None:
                self.model.Add(self.used[s] == 1)
        if not self.demands.reuse:
            for k, count in enumerate(counts):
                self.model.Add(sum(takes[k] for takes in takes_of) <= count)
        self.takes = takes_of
        self._forbid()

    def _forbid(self) -> None:
        compute = self.instance.compute_s[:, self.type_class]
        for item, k in zip(*np.nonzero(np.isinf(compute)), strict=True):
            for s in range(self.num_slots):
                self.model.Add(self.inside[item][s] == 0).OnlyEnforceIf(self.chosen[s][k])

    def _memory(self) -> None:
        """Memory caps: of each slot; of a pool, or a device that slots share, where an item or weight counts once."""
        memory = self.problem.memory_bytes
        for s in range(self.num_slots) if not self.demands.reuse and np.isfinite(memory).any() else ():
            total, sizes, step = self._total(self._held([(s, None)]), float(memory.min()))
            caps = [_room(float(memory[group[0]]), sizes, step) for group in self.types]
            if self.demands.max_replicas == 1:
                self.model.Add(total <= sum(cap * flag for cap, flag in zip(caps, self.chosen[s], strict=True)))
                continue
            for cap, flag in zip(caps, self.chosen[s], strict=True):
                self.model.Add(total <= cap).OnlyEnforceIf(flag)
        shared = [(group, float(memory[group[0]])) for group in self.types if self.demands.reuse]
        for devices, num_bytes in (*shared, *((pool.devices, pool.num_bytes) for pool in self.problem.pools)):
            if isfinite(num_bytes):
                types = [k for k, group in enumerate(self.types) if group[0] in devices]
                total, sizes, step = self._total(self._held(self._there(types)), num_bytes)
                self.model.Add(total <= _room(num_bytes, sizes, step))

    def _there(self, types: Sequence[int]) -> list[tuple[int, Any]]:
        """Each slot, and a Boolean that is 1 where it runs on one of these types."""
        found = [(s, self.model.NewBoolVar("")) for s in range(self.num_slots)]
        for s, flag in found:
            for k in types:
                self.model.AddImplication(self.chosen[s][k], flag)
        return found

    def _held(self, slots: Sequence[tuple[int, Any]]) -> list[tuple[Any, float]]:
        """(Boolean, bytes) of each item and weight in those of the slots whose Boolean is 1; None stands for 1."""
        parts = []
        groups = [((item,), size) for item, size in enumerate(self.instance.num_bytes)]
        groups += [(tuple(self.instance.weights.row(w)), size) for w, size in enumerate(self.instance.weight_bytes)]
        for members, size in groups:
            uses = [self.inside[i][s] if there is None else self.inside[i][s] + there - 1 for i in members for s, there in slots]
            if size and slots[0][1] is None and len(uses) == 1:
                parts.append((uses[0], float(size)))
            elif size:
                parts.append((self.model.NewBoolVar(""), float(size)))
                for use in uses:
                    self.model.Add(parts[-1][0] >= use)
        return parts

    def _step(self, cap: float) -> float:
        """The bytes of a step: one where all sizes are whole and not too large, so that nothing is rounded."""
        sizes = np.append(self.instance.num_bytes, self.instance.weight_bytes)
        total = float(sizes.sum())
        if total <= MOST_STEPS and (sizes == np.floor(sizes)).all():
            return 1.0
        return max(min(cap, total) / MEMORY_STEPS, total / MOST_STEPS)

    def _total(self, parts: Sequence[tuple[Any, float]], cap: float) -> tuple[Any, list[int], float]:
        """The steps of all parts, those of each, and the bytes of a step. They are rounded down: every plan is verified."""
        step = self._step(cap)
        sizes = [floor(size / step) for _, size in parts]
        return sum(held * size for (held, _), size in zip(parts, sizes, strict=True)), sizes, step

    def hint(self, blocks: Sequence[Block]) -> None:
        """Start from a known plan."""
        rows: list[Block | None] = list(blocks)
        if self.fixed:
            rows, free = [None] * self.num_slots, list(enumerate(self.fixed))
            for block in blocks:
                slot, kind = next((s, k) for s, k in free if block.devices[0] in self.types[k])
                free.remove((slot, kind))
                rows[slot] = block
        place = {op: s for s, row in enumerate(rows) if row for op in row.ops}
        for item, ops in enumerate(self.instance.ops):
            if self.demands.contiguous:
                for s in range(self.num_slots - 1):
                    self.model.AddHint(self.stairs[item][s], int(place[ops[0]] <= s))
            else:
                for s in range(self.num_slots):
                    self.model.AddHint(self.inside[item][s], int(place[ops[0]] == s))
        for s in range(self.num_slots):
            row = rows[s] if s < len(rows) else None
            for k, group in enumerate(self.types):
                self.model.AddHint(self.chosen[s][k], int(row is not None and any(device in group for device in row.devices)))
            self.model.AddHint(self.used[s], int(row is not None))

    def exclude(self, solver: cp_model.CpSolver) -> None:
        """Exclude the plan of the solver: these items in these slots, on these numbers of devices of each type."""
        flags = [flag for row in (self.stairs if self.demands.contiguous else self.inside) for flag in row]
        flags += [flag for row in self.chosen for flag in row] + [flag for row in self.wide for flag in row]
        changes = [flag.Not() if solver.Value(flag) else flag for flag in flags]
        for row in self.takes if self.demands.max_replicas > 1 else []:
            for number in row:
                changes.append(self.model.NewBoolVar(""))
                self.model.Add(number != solver.Value(number)).OnlyEnforceIf(changes[-1])
        self.model.AddBoolOr(changes)

    def blocks(self, solver: cp_model.CpSolver) -> tuple[Block, ...]:
        """The plan of the solver."""
        free = [list(group) for group in self.types]
        found = []
        for s in range(self.num_slots):
            members = [item for item in range(self.instance.num_items) if solver.Value(self.inside[item][s])]
            if not members:
                continue
            devices = []
            for k in range(len(self.types)):
                for _ in range(solver.Value(self.takes[s][k])):
                    devices.append(free[k][0] if self.demands.reuse else free[k].pop(0))
            found.append(Block(self.instance.expand(members), tuple(sorted(devices))))
        return tuple(found)


def _room(cap: float, sizes: Sequence[int], step: float) -> int:
    """Steps in a memory cap, at most those that all sizes together need."""
    return floor(min(cap * (1 + TOLERANCE) / step, sum(sizes)))
