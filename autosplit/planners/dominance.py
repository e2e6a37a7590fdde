"""Dominance: merge items that some best contiguous plan keeps together, so that fewer are left to decide.

An item u with a single neighbour v in the order, on either side, may move to the block of v if no device pays more for it then.
Nets of u and v alone save what they cost on both sides. Other nets of both cost no more than before: the block of v paid already,
and so did the producer's. Only where u is the producer do a sender and a receiver change roles. Nets of u without v may cost in
full, and so may the compute of u on its new device. If devices compute and transfer at the same time, saved transfers do not
make up for compute, so that only items without compute move.
"""

from collections.abc import Iterable
from math import inf

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import HOST, Floats

Nets = dict[tuple[int, frozenset[int]], tuple[Floats, Floats]]


def merge_dominated(
    compute: Floats,
    fixed: Floats,
    num_bytes: Floats,
    nets: Nets,
    edges: Iterable[tuple[int, int]],
    tied: set[int],
    tight: bool,
    overlap: bool,
) -> NDArray[np.int64]:
    """For each item, the item that it is merged into, or itself.

    Args:
        compute: seconds, shape (num_items, num_classes).
        fixed: transfers paid anywhere, same shape.
        num_bytes: memory of each item.
        nets: costs by (producer, items touched).
        edges: the order.
        tied: items that share weights with others.
        tight: memory caps may bind, so items with memory stay where they are.
        overlap: devices compute and transfer at the same time.
    """
    work = _Merging(compute, nets, edges)
    movable = (fixed == 0).all(axis=1)
    if overlap:
        movable &= (compute == 0).all(axis=1)
    if tight:
        movable &= num_bytes == 0
        movable[list(tied)] = False
    queue = [int(item) for item in np.flatnonzero(movable)]
    while queue:
        item = queue.pop()
        if not movable[item] or work.target[item] != item:
            continue
        goal = work.home_for(item)
        if goal >= 0:
            queue += [item for item in work.merge(item, goal) if movable[item]]
    return np.array(roots(work.target), dtype=np.int64)


def roots(joined: list[int]) -> list[int]:
    """The root of each entry, where an entry names another one or itself; in place."""
    for entry in range(len(joined)):
        while joined[entry] != joined[joined[entry]]:
            joined[entry] = joined[joined[entry]]
    return joined


class _Merging:
    """Neighbours and nets of the items while they are merged."""

    def __init__(self, compute: Floats, nets: Nets, edges: Iterable[tuple[int, int]]) -> None:
        count = len(compute)
        self.compute: list[list[float]] = compute.tolist()
        self.target = list(range(count))
        self.after: list[set[int]] = [set() for _ in range(count)]
        self.before: list[set[int]] = [set() for _ in range(count)]
        for source, goal in edges:
            self.after[source].add(goal)
            self.before[goal].add(source)
        self.producer = [producer for producer, _ in nets]
        self.pins = [set(touched) for _, touched in nets]
        self.send: list[list[float]] = [costs[0].tolist() for costs in nets.values()]
        self.receive: list[list[float]] = [costs[1].tolist() for costs in nets.values()]
        self.touching: list[set[int]] = [set() for _ in range(count)]
        for number, pins in enumerate(self.pins):
            for item in pins:
                self.touching[item].add(number)

    def home_for(self, item: int) -> int:
        """The neighbour that the item may join at no cost, or -1."""
        for near in (self.after[item], self.before[item]):
            if len(near) == 1:
                goal = next(iter(near))
                if self._dominated(item, goal):
                    return goal
        return -1

    def _dominated(self, item: int, goal: int) -> bool:
        """Whether no class of device pays more, neither the one that the item leaves nor that of the goal."""
        classes = range(len(self.compute[item]))
        work, goal_work = self.compute[item], self.compute[goal]
        cost, saved = [0.0 for _ in classes], [0.0 for _ in classes]
        for net in self.touching[item]:
            send, receive = self.send[net], self.receive[net]
            if goal not in self.pins[net]:
                cost = [cost[k] + max(send[k], receive[k]) for k in classes]
            elif len(self.pins[net]) == 2 and self.producer[net] in (item, goal):
                saved = [saved[k] + min(send[k], receive[k]) for k in classes]
            elif self.producer[net] == item:
                cost = [cost[k] + abs(send[k] - receive[k]) for k in classes]
        leaves = all(cost[k] <= saved[k] + work[k] for k in classes)
        return leaves and all(cost[k] + work[k] <= saved[k] for k in classes if goal_work[k] < inf)

    def merge(self, item: int, goal: int) -> set[int]:
        """Join the item to the goal. Returns: the items to check again."""
        self.target[item] = goal
        self.compute[goal] = [a + b for a, b in zip(self.compute[goal], self.compute[item], strict=True)]
        for net in self.touching[item]:
            self.pins[net].discard(item)
            self.pins[net].add(goal)
            if self.producer[net] == item:
                self.producer[net] = goal
            self.touching[goal].add(net)
            if len(self.pins[net]) == 1 and self.producer[net] != HOST:
                self.touching[goal].discard(net)
        for mine, theirs in ((self.after, self.before), (self.before, self.after)):
            for near in mine[item]:
                theirs[near].discard(item)
                if near != goal:
                    theirs[near].add(goal)
                    mine[goal].add(near)
        self.after[goal].discard(goal)
        self.before[goal].discard(goal)
        return {goal, *self.after[goal], *self.before[goal]}
