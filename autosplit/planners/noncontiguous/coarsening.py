"""Coarsening: a hypergraph with fewer items, each a group of items that share dear nets.

It is the first half of multilevel partitioning (Karypis, Aggarwal, Kumar and Shekhar, "Multilevel hypergraph partitioning",
1999). An assignment of the groups costs the same as that of their items. Moves of a group are moves of all its items, and
resplits are quick.
"""

from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np

from autosplit.costs.problem import HOST, rows_of
from autosplit.planners.items import Items
from autosplit.planners.loads import Ints
from autosplit.planners.noncontiguous.hypergraph import with_nets

MOST_PINS = 8
"""Nets of more items do not count: they say little about which items belong together."""

HEAVIEST = 0.4
"""Largest group, as a share of the compute of a device under an even load, and of the smallest memory cap."""


def coarsened(graph: Items, num_items: int, *, seed: int, home: Ints | None = None) -> tuple[Items, Ints]:
    """A graph with about ``num_items`` items, and the new item of each old one; the graph itself if it has no more items.

    Args:
        graph: items, nets and devices.
        num_items: joining ends here, or earlier where no more items may be joined.
        seed: of the random factors that make each coarse graph different.
        home: only items of one device are joined, so that the assignment is one of the coarse graph too.
    """
    if num_items >= graph.num_items:
        return graph, np.arange(graph.num_items)
    one_device = np.zeros(graph.num_items, dtype=np.int64)
    group = _groups(graph, num_items, np.random.default_rng(seed), one_device if home is None else home)
    return contracted(graph, group), group


def _groups(graph: Items, num_items: int, rng: np.random.Generator, home: Ints) -> Ints:
    """The new item of each old one. Pairs with the dearest shared nets for their size are joined first."""
    near = _affinities(graph, home)
    c = graph.costs
    work, size, allowed = c.compute_s.min(axis=1), c.num_bytes.copy(), np.isfinite(c.compute_s)
    floor = float(work.sum()) / graph.num_items or 1.0
    most_work, most_bytes = HEAVIEST * work.sum() / graph.num_devices, HEAVIEST * c.memory_bytes.min()
    target, left = list(range(graph.num_items)), graph.num_items

    def rated(first: int, second: int) -> tuple[float, int, int]:
        share = near[first][second] * rng.uniform(0.5, 1.0)
        return -share / ((work[first] + floor) * (work[second] + floor)) ** 0.5, first, second

    def fits(first: int, second: int) -> bool:
        light = work[first] + work[second] <= most_work and size[first] + size[second] <= most_bytes
        return bool(light and (allowed[first] == allowed[second]).all())

    queue = [rated(first, second) for first in range(graph.num_items) for second in near[first] if first < second]
    heapify(queue)
    while queue and left > num_items:
        _, first, second = heappop(queue)
        if second not in near[first] or not fits(first, second):  # an item that was joined to another has no neighbours
            continue
        target[second] = first
        left -= 1
        work[first] += work[second]
        size[first] += size[second]
        for other, cost in near[second].items():
            near[other].pop(second)
            if other != first:
                near[first][other] = near[other][first] = near[first].get(other, 0.0) + cost
        near[second] = {}
        for other in near[first]:
            heappush(queue, rated(first, other))
    return np.unique(roots(target), return_inverse=True)[1].astype(np.int64)


def _affinities(graph: Items, home: Ints) -> list[dict[int, float]]:
    """For each item, the items of its device that it shares nets with, and the cost of these nets divided by their other pins."""
    near: list[dict[int, float]] = [{} for _ in range(graph.num_items)]
    for net in range(len(graph.pins)):
        pins, cost = graph.pins[net].tolist(), float(graph.costs.send_s[net].max())
        for first in pins if len(pins) <= MOST_PINS else []:
            for second in pins:
                if second != first and home[first] == home[second]:
                    near[first][second] = near[first].get(second, 0.0) + cost / (len(pins) - 1)
    return near


def contracted(graph: Items, group: Ints) -> Items:
    """The hypergraph of groups. Nets within a group vanish, and nets with the same groups become one."""
    c, members = graph.costs, rows_of(zip(group.tolist(), range(graph.num_items), strict=True), int(group.max()) + 1)
    compute_s, num_bytes = np.zeros((len(members), len(graph.classes))), np.zeros(len(members))
    np.add.at(compute_s, group, c.compute_s)
    np.add.at(num_bytes, group, c.num_bytes)
    nets = ((group[graph.pins[net]], bool(c.producer[net] == HOST), c.send_s[net]) for net in range(len(graph.pins)))
    coarse = replace(graph, ops=tuple(map(graph.expand, members)), costs=c._replace(num_bytes=num_bytes))
    return with_nets(coarse, nets, compute_s)


def roots(joined: list[int]) -> list[int]:
    """The root of each entry, where an entry names another one or itself; in place."""
    for entry in range(len(joined)):
        while joined[entry] != joined[joined[entry]]:
            joined[entry] = joined[joined[entry]]
    return joined
