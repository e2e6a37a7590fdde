"""Annealing over rows of blocks by the true evaluator (Kirkpatrick et al., 1983): ops, whole blocks and their borders move.

The cost is the latency of one sample; or the largest load, plus the seconds by which the latency exceeds its limit. A device may
run several blocks where the demands allow that.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import exp, inf
from random import Random
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.cost import CLOSED, TOLERANCE, block_of, evaluate, memory_bytes, pool_bytes
from autosplit.costs.problem import Block, Floats
from autosplit.planners.clusters import Clusters, forced_clusters
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.items import kept_together
from autosplit.planners.latency.evaluation import LatencyEvaluator
from autosplit.planners.objective import demand_faults
from autosplit.values.constraints import Demands

JOIN_S = 0.1
"""Time for joining blocks of the best plan, even where none is left, and where there are more than ``MOST_JOINED``."""

MOST_JOINED = 40
"""Blocks of a row up to which joining them is tried before the end: each pair is evaluated."""

NUM_STEPS = 500
"""Moves of one run, and more moves for each cluster."""

STEPS_PER_CLUSTER = 200
NUM_RUNS = 3
INITIAL_TEMPERATURE = 0.05
"""A move that makes the cost worse by this share is accepted with probability 1/e at the start of a run."""

Row = tuple[Block, ...]


def anneal_rows(incumbent: Incumbent, deadline: float) -> None:
    """Move single ops and borders from the best plan: where latency is limited, chains along single orders are not all."""
    clusters = forced_clusters(incumbent.problem, incumbent.demands.contiguous)
    search = RowAnnealing(clusters, incumbent.demands, Random(incumbent.seed), deadline)
    search.offer(incumbent.blocks, "start")
    search.anneal(deadline, incumbent.bound_s)
    search.report(incumbent)


class RowAnnealing:
    """The best row of blocks so far, and annealing from it; the blocks are of clusters."""

    def __init__(self, clusters: Clusters, demands: Demands, random: Random, deadline: float) -> None:
        self.clusters, self.demands, self.random, self.deadline = clusters, demands, random, deadline
        self.problem = clusters.problem
        self.row: Row | None = None
        self.value_s = inf
        self.method = ""
        self._evaluator = LatencyEvaluator(self.problem)
        self._atoms = kept_together(self.problem, contiguous=False)
        self._atom_of = {op: atom for atom, ops in enumerate(self._atoms) for op in ops}
        self._tight = bool(self.problem.pools) or self.problem.total_bytes > float(self.problem.memory_bytes.min())
        self._order = np.array(self.problem.order, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def _neighbours(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        return [self._around(ops) for ops in self._atoms]

    @cached_property
    def _allowed(self) -> list[NDArray[np.bool_]]:
        return [np.asarray(np.isfinite(self.problem.compute_s[list(ops)]).all(axis=0)) for ops in self._atoms]

    def _around(self, ops: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ops that may not stand after these ops, and those that may not stand before them."""
        sources, targets = self._order[:, 0], self._order[:, 1]
        inside = np.zeros(self.problem.num_ops, dtype=bool)
        inside[list(ops)] = True
        return sources[inside[targets] & ~inside[sources]], targets[inside[sources] & ~inside[targets]]

    def _cost_s(self, row: Row) -> float:
        """The cost of a row in seconds; where it meets the demands, its objective."""
        if self.demands.objective == "latency":
            return self._evaluator.latency_s(row)
        load_s = evaluate(self.problem, row).bottleneck_s
        if self.demands.max_latency_s == inf or load_s == inf:
            return load_s
        return load_s + max(0.0, self._evaluator.latency_s(row) - self.demands.max_latency_s)

    def offer(self, blocks: Sequence[Block], method: str) -> None:
        """Keep blocks of ops if they are the best so far."""
        row = self.clusters.shrink(blocks)
        if row is not None:
            self.offer_joined(row, method)

    def offer_joined(self, row: Row, method: str) -> None:
        """Keep blocks of clusters if they are the best so far; few blocks also with some joined where that costs nothing."""
        self._offer_row(row, method)
        if len(row) <= MOST_JOINED:
            self._offer_row(self._joined(row, self.deadline), method)

    def _offer_row(self, row: Row, method: str) -> None:
        """Keep blocks of clusters if they meet the demands and are better than the best by more than rounding."""
        cost_s = self._cost_s(row)
        if cost_s < self.value_s * (1 - TOLERANCE) and not demand_faults(self.problem, self.demands, row):
            self.row, self.value_s, self.method = row, cost_s, method

    def report(self, incumbent: Incumbent) -> None:
        """Offer the best row, with blocks joined where that costs nothing; many blocks get little time for it."""
        if self.row is not None:
            until = monotonic() + JOIN_S
            row = self._joined(self.row, max(self.deadline, until) if len(self.row) <= MOST_JOINED else until)
            if row is not self.row and not demand_faults(self.problem, self.demands, row):
                self.row, self.value_s = row, min(self.value_s, self._cost_s(row))
            incumbent.offer(self.clusters.expand(self.row), self.method)

    def _joined(self, row: Row, deadline: float) -> Row:
        """The row with blocks of one device joined as long as the cost does not rise."""
        value_s = self._cost_s(row)
        position = 0
        while position < len(row) and monotonic() < deadline:
            block = row[position]
            for later in range(position + 1, len(row)):
                if row[later].devices == block.devices:
                    break
            else:
                position += 1
                continue
            both = Block(tuple(sorted((*block.ops, *row[later].ops))), block.devices)
            first = (*row[:position], both, *row[position + 1 : later], *row[later + 1 :])
            second = (*row[:position], *row[position + 1 : later], both, *row[later + 1 :])
            found = next((r for r in (first, second) if self._legal(r) and self._cost_s(r) <= value_s * (1 + 1e-12)), None)
            if found is None:
                position += 1
            else:
                row, value_s = found, self._cost_s(found)
        return row

    def _legal(self, row: Sequence[Block]) -> bool:
        """Whether the blocks stand in an order that the demands allow."""
        if not self.demands.contiguous or not len(self._order):
            return True
        home = block_of(self.problem, row)
        return bool((home[self._order[:, 0]] <= home[self._order[:, 1]]).all())

    def _fits(self, row: Row) -> bool:
        """Whether a row meets the demands that moves may break; this is quicker than listing all faults."""
        demands, problem = self.demands, self.problem
        if demands.num_stages not in (None, len(row)) or len(row) > (demands.max_stages or inf):
            return False
        if self._tight and (self._memory_bytes(row) > problem.memory_bytes * (1 + TOLERANCE)).any():
            return False
        if problem.pools and any(
            held > pool.num_bytes * (1 + TOLERANCE) for pool, held in zip(problem.pools, pool_bytes(problem, row), strict=True)
        ):
            return False
        least_s = demands.min_stage_s * (1 - TOLERANCE)
        return least_s <= 0 or bool((evaluate(problem, row).stage_s >= least_s).all())

    def _memory_bytes(self, row: Row) -> Floats:
        if self.problem.weights or any(len(block.devices) > 1 for block in row):
            return memory_bytes(self.problem, row)
        devices = np.array([block.devices[0] for block in row])[block_of(self.problem, row)]
        return np.bincount(devices, self.problem.op_bytes, self.problem.num_devices).astype(np.float64)

    def anneal(self, deadline: float, bound_s: float) -> None:
        """Several runs from the best row; a better row that meets the demands is kept at once."""
        if self.row is None:
            return
        steps = NUM_STEPS + STEPS_PER_CLUSTER * len(self._atoms)
        for _ in range(NUM_RUNS):
            row, value_s = self.row, self.value_s
            for step in range(steps):
                if step % 16 == 0 and (monotonic() > deadline or self.value_s - bound_s <= CLOSED * self.value_s):
                    return
                moved = self._move(row)
                if moved is None or not self._legal(moved):
                    continue
                new_s = self._cost_s(moved)
                temperature = INITIAL_TEMPERATURE * self.value_s * (1 - step / steps)
                worse = new_s - value_s
                if worse > 0 and (temperature <= 0 or self.random.random() >= exp(-worse / temperature)):
                    continue
                if not self._fits(moved):
                    continue
                row, value_s = moved, new_s
                self._offer_row(row, "annealing")

    def _move(self, row: Row) -> Row | None:
        """A random neighbour of the row, or None where the move drawn is not possible."""
        kind = self.random.random()
        if kind < 0.45:
            return self._move_atom(row)
        if kind < 0.6:
            return self._move_device(row)
        if kind < 0.75:
            return self._join_two(row)
        if kind < 0.9:
            return self._split_one(row)
        return self._move_block(row)

    def _free_devices(self, row: Sequence[Block]) -> list[int]:
        used = set() if self.demands.reuse else {device for block in row for device in block.devices}
        return [device for device in range(self.problem.num_devices) if device not in used]

    def _move_atom(self, row: Row) -> Row | None:
        """Move an op, with its group, to another block or to a new one."""
        atom = self.random.randrange(len(self._atoms))
        ops = set(self._atoms[atom])
        rest = [Block(tuple(op for op in block.ops if op not in ops), block.devices) for block in row]
        first, last = self._window(row, atom)
        if first <= last and self.random.random() < 0.8:
            target = self.random.randint(first, last)
            rest[target] = Block(tuple(sorted((*rest[target].ops, *ops))), rest[target].devices)
            return tuple(block for block in rest if block.ops)
        free = [device for device in self._free_devices([b for b in rest if b.ops]) if self._allowed[atom][device]]
        if not free:
            return None
        rest.insert(self.random.randint(*sorted((first, last + 1))), Block(self._atoms[atom], (self.random.choice(free),)))
        return tuple(block for block in rest if block.ops)

    def _window(self, row: Row, atom: int) -> tuple[int, int]:
        """The first and the last block that an op may join in a chain; the last may be just before the first."""
        if not self.demands.contiguous:
            return 0, len(row) - 1
        home = block_of(self.problem, row)
        before, after = self._neighbours[atom]
        return int(home[before].max(initial=0)), int(home[after].min(initial=len(row) - 1))

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
        parts = [tuple(sorted(op for atom in side for op in self._atoms[atom])) for side in (atoms[:cut], atoms[cut:])]
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
