"""Iterated local search on coarse and fine graphs (Lourenço, Martin and Stützle, 2003): two devices after another are resplit.

Devices above the target are resplit with others. In between, any two devices are resplit so that one of them becomes as light as
the other allows, which carries slack to where it is needed.
"""

from collections.abc import Callable, Iterator
from itertools import count
from math import inf

import numpy as np

from autosplit.costs.cost import TOLERANCE
from autosplit.planners.clock import now
from autosplit.planners.items import Items
from autosplit.planners.loads import Ints
from autosplit.planners.noncontiguous.coarsening import coarsened
from autosplit.planners.noncontiguous.hypergraph import fits, loads_s
from autosplit.planners.noncontiguous.resplitting import resplit

STEPS = (0.01, 0.003, 0.001, 0.0003, 0.0001)
"""Shares of the best load by which the target is below it; one is drawn for each try."""

PATIENCE = 6
"""Resplits without improvement, per device pair, before a descent stops."""

ITEMS_A_DEVICE = 5
"""Items for each device of the coarsest graph."""

SLOW, MOST_MOVED = 3.0, 3
"""A group of items starts on a device on which it takes at most ``SLOW`` times its least time; most groups that are moved."""

NEAR = 0.01
"""Share by which a load may exceed the best one, for each finer graph still to come."""


def descend(graph: Items, home: Ints, *, seed: int, patience: int, halt: Callable[[], bool]) -> tuple[float, Ints]:
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
        lean = 0.5 if highest_s > target_s else float(rng.integers(2))
        limit_s = max(highest_s, target_s) * (1.0 + 1e-12)
        failures += 1
        found = resplit(graph, home, one, other, limit_s=limit_s, lean=lean, seed=int(rng.integers(1 << 30)))
        if found is None:
            continue
        home, loads[one], loads[other] = found
        if loads.max() < best_s * (1.0 - TOLERANCE):
            best_s, best, failures = float(loads.max()), home, 0
    return best_s, best


def descents(graph: Items, starts: list[Ints], *, seed: int, halt: Callable[[], bool]) -> Iterator[tuple[float, Ints]]:
    """Better and better assignments: from the starts, then in turn from random ones and from the best with some items moved.

    Each round walks on a coarse graph and carries the assignment to finer ones (a V-cycle, Karypis et al., 1999), as long as it
    is about as good as the best one. Each size of graph gets about the same time.

    Args:
        graph: items, nets and devices.
        starts: assignments to begin with.
        seed: of everything random.
        halt: asked often; the iteration ends when it returns True.
    """
    rng, sizes = np.random.default_rng(seed), _sizes(graph)
    spent_s = np.zeros(len(sizes))
    best_s, best = inf, None
    for number in count():
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
            if level == len(sizes) or value_s > best_s * (1.0 + NEAR * (len(sizes) - level)) or halt():
                break


def _sizes(graph: Items) -> list[int]:
    """Numbers of items of the graphs, from the coarsest to the graph itself."""
    size, sizes = ITEMS_A_DEVICE * max(2, graph.num_devices), []
    while size < 0.7 * graph.num_items:
        sizes.append(size)
        size *= 2
    return [*sizes, graph.num_items]


def start_from(graph: Items, home: Ints | None, size: int, seed: int) -> Ints:
    """A random assignment, or ``home`` with up to ``MOST_MOVED`` groups of a graph of about ``size`` items elsewhere.

    A memory cap is broken only in a random assignment, where no device has room for a group.
    """
    rng = np.random.default_rng(seed)
    coarse, group = coarsened(graph, size, seed=seed, home=home)
    place = np.full(coarse.num_items, -1, dtype=np.int64) if home is None else gathered(home, group)
    work_s, num_bytes = coarse.costs.compute_s[:, coarse.class_of], coarse.costs.num_bytes
    able = work_s <= np.minimum(SLOW * work_s.min(axis=1, keepdims=True), np.finfo(np.float64).max)
    left_bytes = coarse.costs.memory_bytes[coarse.class_of]
    np.subtract.at(left_bytes, place[place >= 0], num_bytes[place >= 0])
    for item in rng.permutation(coarse.num_items)[: None if home is None else rng.integers(1, MOST_MOVED + 1)]:
        roomy = able[item] & (num_bytes[item] <= left_bytes)
        if home is not None and roomy.any():
            left_bytes[place[item]] += num_bytes[item]
        if home is None or roomy.any():
            place[item] = rng.choice(np.flatnonzero(roomy if roomy.any() else able[item]))
            left_bytes[place[item]] -= num_bytes[item]
    return place[group]


def gathered(home: Ints, group: Ints) -> Ints:
    """The device of each group, whose items are on one device."""
    found = np.zeros(int(group.max()) + 1, dtype=np.int64)
    found[group] = home
    return found
