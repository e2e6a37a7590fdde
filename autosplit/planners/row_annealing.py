"""Annealing of a row of blocks by the true evaluator (Kirkpatrick et al., 1983): ops, whole blocks and their borders move.

It knows every rule of a problem and every demand but a limit on latency, so it serves where the compiled searches lack a rule:
links by pair, transfers beside compute, shared weights, pools, and numbers of stages. Each try evaluates the whole row, so it is
for small problems and last steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import exp
from random import Random

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.cost import TOLERANCE, block_of
from autosplit.costs.judge import judge
from autosplit.costs.problem import HOST, Block, Problem
from autosplit.planners.clock import now
from autosplit.planners.clusters import kept_together, row_of
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.loads import Ints
from autosplit.values.constraints import Demands

NUM_WALKS = 3
"""Walks, unless they end with the time."""

STEPS_PER_ATOM = 250
"""Moves of one walk for each group of ops that stays together."""

HOT = 0.03
"""Temperature at the start of a walk, as a share of the cost of its start; it ends at a thousandth of it."""


@dataclass(frozen=True)
class _Row:
    """The block of each op, shape (num_ops,), and the devices of each block."""

    home: Ints
    devices: tuple[tuple[int, ...], ...]

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks in order."""
        return tuple(Block(tuple(np.flatnonzero(self.home == k).tolist()), each) for k, each in enumerate(self.devices))


def anneal_rows(
    incumbent: Incumbent,
    deadline: float,
    starts: Sequence[tuple[Block, ...]] = (),
    endless: bool = False,
) -> None:
    """Offer better rows from walks that begin in turn at the best plan and at the starts.

    Args:
        incumbent: the best plan, kept up to date.
        deadline: second of ``now()`` after which the walks end.
        starts: other rows of blocks to begin at; they may break limits on memory.
        endless: the walks end with the time, not with their number.
    """
    problem, demands = incumbent.problem, incumbent.demands
    moves = _Moves(problem, demands, Random(incumbent.seed))
    steps = STEPS_PER_ATOM * moves.num_atoms
    for number in count() if endless else range(NUM_WALKS):
        begins = [blocks for blocks in (incumbent.blocks, *starts) if blocks]
        if not begins:
            return
        blocks = begins[number % len(begins)]
        row = _Row(block_of(problem, blocks), tuple(block.devices for block in blocks))
        scale_s = judge(problem, demands, blocks).objective_s
        value_s = moves.cost_s(row, scale_s)
        for step in range(steps):
            if now() > deadline or incumbent.closed:
                return
            moved = moves.draw(row)
            if moved is None or not moves.is_in_order(moved):
                continue
            new_s = moves.cost_s(moved, scale_s)
            heat_s = scale_s * HOT * 1e-3 ** (step / steps)
            if new_s > value_s and (heat_s <= 0 or moves.random.random() >= exp((value_s - new_s) / heat_s)):
                continue
            row, value_s = moved, new_s
            if value_s < incumbent.objective_s * (1 - TOLERANCE):
                incumbent.offer(row.blocks, "annealing")


class _Moves:
    """Random neighbours of a row, and the cost of a row."""

    def __init__(self, problem: Problem, demands: Demands, random: Random) -> None:
        self.problem, self.demands, self.random = problem, demands, random
        self._atom_of = row_of(kept_together(problem, demands.contiguous))
        self.num_atoms = int(self._atom_of.max()) + 1
        order = np.array(problem.order if demands.contiguous else (), dtype=np.int64).reshape(-1, 2)
        self._sources, self._targets = order[:, 0], order[:, 1]
        pins = [np.array([op for op in {net.producer, *net.consumers} if op != HOST]) for net in problem.nets]
        self._pins = [ops for ops in pins if len(ops) > 1]

    def is_in_order(self, row: _Row) -> bool:
        """Whether no op stands in a block after that of an op that must not stand before it."""
        return bool((row.home[self._sources] <= row.home[self._targets]).all())

    def cost_s(self, row: _Row, fine_s: float) -> float:
        """The objective of a row, and a fine for each limit that it breaks."""
        judged = judge(self.problem, self.demands, row.blocks)
        return judged.objective_s + fine_s * len(judged.faults)

    def draw(self, row: _Row) -> _Row | None:
        """A random neighbour of the row, or None where the move drawn is not possible."""
        chance = self.random.random()
        if chance < 0.2:
            return self._other_devices(row)
        if chance < 0.3:
            places = list(range(len(row.devices)))
            places.insert(self.random.randrange(len(places)), places.pop(self.random.randrange(len(places))))
            return _Row(np.argsort(places)[row.home], tuple(row.devices[place] for place in places))
        if chance < 0.5 and self._pins:
            return self._to_a_neighbour(row)
        return self._elsewhere(row, self._some_ops(row))

    def _some_ops(self, row: _Row) -> NDArray[np.bool_]:
        """A group of ops that stay together or, less often, the first or the last ops of a block, or all of them."""
        atom = self.random.randrange(self.num_atoms)
        mine = np.asarray(self._atom_of == atom)
        if self.random.random() < 0.6:
            return mine
        inside = row.home == row.home[mine.argmax()]
        return self.random.choice((inside & (self._atom_of >= atom), inside & (self._atom_of <= atom), inside))

    def _to_a_neighbour(self, row: _Row) -> _Row | None:
        """Move an op, or all ops of its block that share a value with it, to a block in which that value is made or read."""
        pins = self.random.choice(self._pins)
        op, goal = self.random.choice(pins), row.home[self.random.choice(pins)]
        alone = self.random.random() < 0.7
        atoms = self._atom_of[[op] if alone else pins[row.home[pins] == row.home[op]]]
        return _moved(row, np.isin(self._atom_of, atoms), goal) if goal != row.home[op] else None

    def _elsewhere(self, row: _Row, chosen: NDArray[np.bool_]) -> _Row | None:
        """Move some ops to another block that the order allows, or to a new one."""
        home, leaving, coming = row.home, chosen[self._sources], chosen[self._targets]
        first = int(home[self._sources[coming & ~leaving]].max(initial=0))
        last = int(home[self._targets[leaving & ~coming]].min(initial=len(row.devices) - 1))
        if first <= last and self.random.random() < 0.7:
            return _moved(row, chosen, self.random.randint(first, last))
        allowed = np.asarray(np.isfinite(self.problem.compute_s[chosen]).all(axis=0))
        free = [device for device in self._free([row.devices[k] for k in np.unique(home[~chosen])]) if allowed[device]]
        if not free:
            return None
        place = self.random.randint(*sorted((first, last + 1)))
        devices = (*row.devices[:place], (self.random.choice(free),), *row.devices[place:])
        return _moved(_Row(home + (home >= place), devices), chosen, place)

    def _free(self, taken: Sequence[tuple[int, ...]]) -> list[int]:
        """The devices that another block may take."""
        used = set() if self.demands.reuse else {device for devices in taken for device in devices}
        return [device for device in range(self.problem.num_devices) if device not in used]

    def _other_devices(self, row: _Row) -> _Row | None:
        """Move a block to another device, or exchange the devices of two blocks."""
        devices = list(row.devices)
        chosen, other = (self.random.randrange(len(devices)) for _ in range(2))
        if chosen != other and self.random.random() < 0.4:
            devices[chosen], devices[other] = devices[other], devices[chosen]
        elif free := self._free([*devices[:chosen], *devices[chosen + 1 :]]):
            devices[chosen] = (self.random.choice(free),)
        else:
            return None
        return _Row(row.home, tuple(devices))


def _moved(row: _Row, chosen: NDArray[np.bool_], goal: int) -> _Row:
    """The row with some ops in one of its blocks; blocks that are empty then are left out."""
    used, home = np.unique(np.where(chosen, goal, row.home), return_inverse=True)
    return _Row(home, tuple(row.devices[k] for k in used))
