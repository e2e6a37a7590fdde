"""Iterated local search on coarse and fine graphs (Lourenço, Martin and Stützle, 2003): two devices after another are resplit.

Devices above the target are resplit with others, and in between any two devices. A coarse graph has an item for each run of items
along an order in which few nets are open; an assignment of the runs costs the same as that of their items. It is the first half
of multilevel partitioning (Karypis, Aggarwal, Kumar and Shekhar, 1999).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from math import inf

import numpy as np

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.problem import rows_of
from autosplit.planners.clock import now
from autosplit.planners.clusters import gathered
from autosplit.planners.instance import Instance
from autosplit.planners.loads import Ints
from autosplit.planners.noncontiguous.hypergraph import fits, loads_s, with_nets
from autosplit.planners.noncontiguous.resplitting import resplit
from autosplit.planners.noncontiguous.sweeps import narrow_order


def coarsened(graph: Instance, num_items: int, *, seed: int, home: Ints | None = None) -> tuple[Instance, Ints]:
    """A graph with about ``num_items`` items, and the new item of each old one; the graph itself if it has no more items.

    Each stretch of the order with an equal share of the work is cut once, where the nets that are open cost little.

    Args:
        graph: items, nets and devices.
        num_items: how many stretches.
        seed: of the order, of the stretches and of factors that make each coarse graph different.
        home: only items of one device are joined, so that the assignment is one of the coarse graph too.
    """
    if num_items >= graph.num_items:
        return graph, np.arange(graph.num_items)
    rng, open_s = np.random.default_rng(seed), np.zeros(graph.num_items)
    order = narrow_order(graph, np.ones(graph.num_items, dtype=np.bool_), seed=seed)
    home = np.zeros(graph.num_items, dtype=np.int64) if home is None else home
    order = order[np.argsort(home[order], kind="stable")]
    place = np.argsort(order)[graph.pins.data]
    for end, sign in ((np.minimum, 1.0), (np.maximum, -1.0)) if graph.pins.num_rows else ():
        np.add.at(open_s, end.reduceat(place, graph.pins.start[:-1]), sign * graph.send_s.max(axis=1))
    work_s = graph.compute_s.min(axis=1)[order]
    done = np.cumsum(work_s + (work_s.mean() or 1.0))
    stretch = (done / done[-1] * (num_items - 1) + rng.random()).astype(np.int64)
    cheapest = np.lexsort((np.cumsum(open_s) * rng.uniform(0.5, 1.0, graph.num_items), stretch))
    cut = np.zeros(graph.num_items, dtype=np.bool_)
    cut[cheapest[np.flatnonzero(np.diff(stretch[cheapest], prepend=-1))]] = True
    unlike = np.column_stack([home, np.isfinite(graph.compute_s)])[order]
    cut[:-1] |= (unlike[1:] != unlike[:-1]).any(axis=1)
    group = np.empty(graph.num_items, dtype=np.int64)
    group[order] = np.cumsum(np.append(0, cut[:-1]))
    return contracted(graph, group), group


def contracted(graph: Instance, group: Ints) -> Instance:
    """The hypergraph of groups. Nets within a group vanish, and nets with the same groups become one."""
    members = rows_of(zip(group.tolist(), range(graph.num_items), strict=True), int(group.max()) + 1)
    compute_s, num_bytes = np.zeros((len(members), len(graph.classes))), np.zeros(len(members))
    np.add.at(compute_s, group, graph.compute_s)
    np.add.at(num_bytes, group, graph.num_bytes)
    coarse = replace(graph, ops=tuple(map(graph.expand, members)), compute_s=compute_s, num_bytes=num_bytes)
    return with_nets(coarse, np.ones(graph.pins.num_rows, dtype=np.bool_), group)


STEPS = (0.01, 0.003, 0.001, 0.0003, 0.0001)
"""Shares of the best load by which the target is below it; one is drawn for each try."""

PATIENCE = 6
"""Resplits without improvement, per device pair, before a descent stops."""

ITEMS_A_DEVICE = 5
"""Items for each device of the coarsest graph."""

MOST_MOVED = 3
"""Most groups that are moved before a walk from the best assignment."""


def descend(graph: Instance, home: Ints, *, seed: int, patience: int, halt: Callable[[], bool]) -> tuple[float, Ints]:
    """The best load and assignment on a walk by resplits from ``home``.

    Args:
        graph: items, nets and devices.
        home: device of each item, within the memory caps.
        seed: of the walk.
        patience: the walk ends after this many resplits without a better load.
        halt: asked before each resplit.
    """
    rng = np.random.default_rng(seed)
    loads = loads_s(graph, home)
    best_s, best, failures = float(loads.max()), home, 0
    while failures < patience and not halt() and graph.num_devices > 1:
        target_s = best_s * (1.0 - STEPS[int(rng.integers(len(STEPS)))])
        above = np.flatnonzero(loads > target_s)
        one = int(rng.choice(above)) if len(above) and rng.random() < 0.6 else int(rng.integers(graph.num_devices))
        other = int(rng.integers(graph.num_devices - 1))
        other += other >= one
        highest_s = max(loads[one], loads[other])
        limit_s = max(highest_s, target_s) * (1.0 + 1e-12)
        failures += 1
        found = resplit(graph, home, one, other, limit_s=limit_s, seed=int(rng.integers(1 << 30)))
        if found is None:
            continue
        home, loads[one], loads[other] = found
        if loads.max() < best_s * (1.0 - TOLERANCE):
            best_s, best, failures = float(loads.max()), home, 0
    return best_s, best


def descents(
    graph: Instance, starts: list[Ints], *, seed: int, halt: Callable[[], bool], endless: bool = True
) -> Iterator[tuple[float, Ints]]:
    """Better and better assignments: from the starts, then in turn from random ones and from the best with some items moved.

    Each round walks on a coarse graph and carries the assignment to finer ones (a V-cycle, Karypis et al., 1999). Each size of
    graph gets about the same time.

    Args:
        graph: items, nets and devices.
        starts: assignments to begin with.
        seed: of everything random.
        halt: asked often; the iteration ends when it returns True.
        endless: the iteration does not end with the starts.
    """
    rng, sizes = np.random.default_rng(seed), _sizes(graph)
    spent_s = np.zeros(len(sizes))
    best_s, best = inf, None
    for number in count() if endless else range(len(starts)):
        if halt():
            return
        fresh_seed = int(rng.integers(1 << 30))
        level = int(spent_s.argmin())
        home = starts[number] if number < len(starts) else start_from(graph, best if number % 2 else None, sizes[0], fresh_seed)
        while True:
            began = now()
            coarse, group = coarsened(graph, sizes[level], seed=fresh_seed, home=home)
            home = gathered(home, group)
            if not fits(coarse, home):
                spent_s[level] += now() - began
                break
            pairs = graph.num_devices * (graph.num_devices - 1) // 2
            value_s, home = descend(coarse, home, seed=fresh_seed, patience=PATIENCE * max(1, pairs), halt=halt)
            spent_s[level] += now() - began
            home = home[group]
            if value_s < best_s * (1.0 - TOLERANCE):
                best_s, best = value_s, home
                yield value_s, home
            level += 1
            if level == len(sizes) or halt():
                break


def _sizes(graph: Instance) -> list[int]:
    """Numbers of items of the graphs, from the coarsest to the graph itself."""
    size, sizes = ITEMS_A_DEVICE * max(2, graph.num_devices), []
    while size < 0.7 * graph.num_items:
        sizes.append(size)
        size *= 2
    return [*sizes, graph.num_items]


def start_from(graph: Instance, home: Ints | None, size: int, seed: int) -> Ints:
    """A random assignment, or ``home`` with up to ``MOST_MOVED`` groups of a graph of about ``size`` items elsewhere.

    A memory cap is broken only in a random assignment, where no device has room for a group.
    """
    rng = np.random.default_rng(seed)
    coarse, group = coarsened(graph, size, seed=seed, home=home)
    place = np.full(coarse.num_items, -1, dtype=np.int64) if home is None else gathered(home, group)
    able, num_bytes = np.isfinite(coarse.compute_s[:, coarse.class_of]), coarse.num_bytes
    left_bytes = coarse.memory_bytes[coarse.class_of]
    np.subtract.at(left_bytes, place[place >= 0], num_bytes[place >= 0])
    for item in rng.permutation(coarse.num_items)[: None if home is None else rng.integers(1, MOST_MOVED + 1)]:
        roomy = able[item] & (num_bytes[item] <= left_bytes)
        if home is not None and roomy.any():
            left_bytes[place[item]] += num_bytes[item]
        if home is None or roomy.any():
            place[item] = rng.choice(np.flatnonzero(roomy if roomy.any() else able[item]))
            left_bytes[place[item]] -= num_bytes[item]
    return place[group]
