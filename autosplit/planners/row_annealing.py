"""Annealing of a row of blocks by the true evaluator (Kirkpatrick et al., 1983): ops, whole blocks and their borders move.

It knows every rule of a problem and every demand but a limit on latency, so it is for what the compiled searches do not know:
links by pair, transfers beside compute, shared weights, pools, and numbers of stages. Each try evaluates the whole row, so it is
for small problems and last steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from math import exp, inf
from random import Random

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.cost import TOLERANCE, block_of, evaluate, memory_bytes, pool_bytes
from autosplit.costs.judge import judge
from autosplit.costs.problem import HOST, Block, Problem
from autosplit.planners.clock import now
from autosplit.planners.clusters import forced_clusters
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.items import kept_together
from autosplit.values.constraints import Demands

NUM_WALKS = 3
"""Walks, unless they end with the time."""

STEPS_PER_ATOM = 250
"""Moves of one walk for each group of ops that stays together."""

HOT = 0.03
"""Temperature at the start of a walk, as a share of the cost of its start; it ends at a thousandth of it."""

Row = tuple[Block, ...]


def anneal_rows(
    incumbent: Incumbent,
    deadline: float,
    starts: Sequence[Row] = (),
    endless: bool = False,
    halt: Callable[[], bool] = lambda: False,
) -> None:
    """Offer better rows from walks that begin in turn at the best plan and at the starts.

    Args:
        incumbent: the best plan, kept up to date.
        deadline: second of ``now()`` after which the walks end.
        starts: other rows of blocks to begin at; they may break limits on memory.
        endless: the walks end with the time, not with their number.
        halt: asked often; the walks end when it returns True.
    """
    contiguous = incumbent.demands.contiguous
    clusters = forced_clusters(incumbent.problem, contiguous)
    moves = _Moves(clusters.problem, incumbent.demands, Random(incumbent.seed))
    steps = STEPS_PER_ATOM * len(moves.atoms)
    for number in count() if endless else range(NUM_WALKS):
        begins = [blocks for blocks in (incumbent.blocks, *starts) if blocks]
        row = clusters.shrink(begins[number % len(begins)]) if begins else None
        if row is None:
            return
        scale_s = judge(clusters.problem, incumbent.demands, row).objective_s
        value_s = moves.cost_s(row, scale_s)
        for step in range(steps):
            if now() > deadline or incumbent.closed or halt():
                return
            moved = moves.draw(row)
            if moved is None or (contiguous and not is_chain(clusters.problem, moves.order, moved)):
                continue
            new_s = moves.cost_s(moved, scale_s)
            heat_s = scale_s * HOT * 1e-3 ** (step / steps)
            if new_s > value_s and (heat_s <= 0 or moves.random.random() >= exp((value_s - new_s) / heat_s)):
                continue
            row, value_s = moved, new_s
            if value_s < incumbent.objective_s * (1 - TOLERANCE):
                incumbent.offer(clusters.expand(row), "annealing")


def is_chain(problem: Problem, order: NDArray[np.int64], row: Row) -> bool:
    """Whether the blocks stand in an order of ops, given as pairs of shape (num_pairs, 2)."""
    home = block_of(problem, row)
    return bool((home[order[:, 0]] <= home[order[:, 1]]).all())


class _Moves:
    """Random neighbours of a row of blocks, and what a row costs."""

    def __init__(self, problem: Problem, demands: Demands, random: Random) -> None:
        self.problem, self.demands, self.random = problem, demands, random
        self.atoms = kept_together(problem, contiguous=False)
        self._atom_of = {op: atom for atom, ops in enumerate(self.atoms) for op in ops}
        self._allowed = [np.asarray(np.isfinite(problem.compute_s[list(ops)]).all(axis=0)) for ops in self.atoms]
        self._tight = bool(problem.pools) or problem.total_bytes > float(problem.memory_bytes.min())
        self.order = np.array(problem.order, dtype=np.int64).reshape(-1, 2)
        self._pins = [sorted({self._atom_of[op] for op in (net.producer, *net.consumers) if op != HOST}) for net in problem.nets]
        self._nets: list[list[int]] = [[] for _ in self.atoms]
        for net, pins in enumerate(self._pins):
            for atom in pins if len(pins) > 1 else ():
                self._nets[atom].append(net)

    def cost_s(self, row: Row, fine_s: float) -> float:
        """The objective of a row, and a fine for each limit on memory, stages or their times that it breaks."""
        return judge(self.problem, self.demands, row).objective_s + fine_s * self._num_broken(row)

    def _num_broken(self, row: Row) -> int:
        """How many limits are broken that moves may break; this is quicker than a list of all faults."""
        demands, problem = self.demands, self.problem
        broken = int(demands.num_stages not in (None, len(row))) + int(len(row) > (demands.max_stages or inf))
        if self._tight:
            broken += int((memory_bytes(problem, row) > problem.memory_bytes * (1 + TOLERANCE)).sum())
            pools = zip(problem.pools, pool_bytes(problem, row), strict=True)
            broken += sum(held > pool.num_bytes * (1 + TOLERANCE) for pool, held in pools)
        if demands.min_stage_s > 0:
            broken += int((evaluate(problem, row).stage_s < demands.min_stage_s * (1 - TOLERANCE)).sum())
        return broken

    def draw(self, row: Row) -> Row | None:
        """A random neighbour of the row, or None where the move drawn is not possible."""
        moves = (self._move_near, self._move_atom, self._move_device, self._join_two, self._split_one, self._move_block)
        return self.random.choice(moves)(row)

    def _free_devices(self, row: Sequence[Block]) -> list[int]:
        used = set() if self.demands.reuse else {device for block in row for device in block.devices}
        return [device for device in range(self.problem.num_devices) if device not in used]

    def _put(self, row: Row, atoms: Sequence[int], goal: int) -> Row:
        """The row with some groups of ops in one of its blocks; blocks that are empty then are left out."""
        ops = {op for atom in atoms for op in self.atoms[atom]}
        rest = [Block(tuple(op for op in block.ops if op not in ops), block.devices) for block in row]
        rest[goal] = Block(tuple(sorted((*rest[goal].ops, *ops))), rest[goal].devices)
        return tuple(block for block in rest if block.ops)

    def _move_near(self, row: Row) -> Row | None:
        """Move an op, or all ops of its block that share a value with it, to a block in which that value is made or read."""
        atom = self.random.randrange(len(self.atoms))
        if not self._nets[atom]:
            return None
        pins = self._pins[self.random.choice(self._nets[atom])]
        home = block_of(self.problem, row)
        here, goal = (int(home[self.atoms[pin][0]]) for pin in (atom, self.random.choice(pins)))
        if here == goal:
            return None
        both = self.random.random() < 0.3
        moved = [pin for pin in pins if home[self.atoms[pin][0]] == here] if both else [atom]
        return self._put(row, moved, goal)

    def _move_atom(self, row: Row) -> Row | None:
        """Move an op, with its group, to another block or to a new one."""
        atom = self.random.randrange(len(self.atoms))
        first, last = self._window(row, atom)
        if first <= last and self.random.random() < 0.8:
            return self._put(row, [atom], self.random.randint(first, last))
        ops = set(self.atoms[atom])
        rest = [Block(tuple(op for op in block.ops if op not in ops), block.devices) for block in row]
        free = [device for device in self._free_devices([b for b in rest if b.ops]) if self._allowed[atom][device]]
        if not free:
            return None
        rest.insert(self.random.randint(*sorted((first, last + 1))), Block(self.atoms[atom], (self.random.choice(free),)))
        return tuple(block for block in rest if block.ops)

    def _window(self, row: Row, atom: int) -> tuple[int, int]:
        """The first and the last block that an op may join in a chain; the last may be just before the first."""
        if not self.demands.contiguous:
            return 0, len(row) - 1
        home = block_of(self.problem, row)
        before, after = self._neighbours[atom]
        return int(home[before].max(initial=0)), int(home[after].min(initial=len(row) - 1))

    @cached_property
    def _neighbours(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """For each group of ops, those that may not stand after it, and those that may not stand before it."""
        sources, targets = self.order[:, 0], self.order[:, 1]
        found = []
        for ops in self.atoms:
            inside = np.zeros(self.problem.num_ops, dtype=bool)
            inside[list(ops)] = True
            found.append((sources[inside[targets] & ~inside[sources]], targets[inside[sources] & ~inside[targets]]))
        return found

    def _move_device(self, row: Row) -> Row | None:
        """Move a block to another device, or exchange the devices of two blocks."""
        chosen = self.random.randrange(len(row))
        changed = list(row)
        if len(row) > 1 and self.random.random() < 0.4:
            other = self.random.randrange(len(row))
            changed[chosen] = replace(row[chosen], devices=row[other].devices)
            changed[other] = replace(row[other], devices=row[chosen].devices)
            return tuple(changed)
        free = self._free_devices([block for number, block in enumerate(row) if number != chosen])
        if not free:
            return None
        changed[chosen] = replace(row[chosen], devices=(self.random.choice(free),))
        return tuple(changed)

    def _join_two(self, row: Row) -> Row | None:
        if len(row) < 2:
            return None
        one, other = sorted(self.random.sample(range(len(row)), 2))
        stay, gone = (one, other) if self.random.random() < 0.5 else (other, one)
        devices = row[self.random.choice((one, other))].devices
        both = Block(tuple(sorted((*row[one].ops, *row[other].ops))), devices)
        return tuple(both if number == stay else block for number, block in enumerate(row) if number != gone)

    def _split_one(self, row: Row) -> Row | None:
        """Split a block in two, and move one part to another device."""
        chosen = self.random.randrange(len(row))
        atoms = sorted({self._atom_of[op] for op in row[chosen].ops})
        free = self._free_devices(row)
        if len(atoms) < 2 or not free:
            return None
        cut = self.random.randrange(1, len(atoms))
        parts = [tuple(sorted(op for atom in side for op in self.atoms[atom])) for side in (atoms[:cut], atoms[cut:])]
        devices = [row[chosen].devices, (self.random.choice(free),)]
        self.random.shuffle(devices)
        halves = [Block(ops, where) for ops, where in zip(parts, devices, strict=True)]
        return (*row[:chosen], *halves, *row[chosen + 1 :])

    def _move_block(self, row: Row) -> Row | None:
        if len(row) < 2:
            return None
        changed = list(row)
        changed.insert(self.random.randrange(len(row)), changed.pop(self.random.randrange(len(row))))
        return tuple(changed)
