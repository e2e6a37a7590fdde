"""Starts of descents: random assignments of the items of a hypergraph, and known ones in which a few patches of items move.

A patch is a set of items that share nets. A device takes as much of a patch as it has room for.
"""

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import Floats
from autosplit.planners.items import Items
from autosplit.planners.loads import Ints

SLOW = 3.0
"""A random assignment gives an item to a device on which it takes at most this many times its least time."""

PATCHES_A_DEVICE = 3
"""Patches of a random assignment for each device."""

MOST_MOVED, MOST_ITEMS = 3, 24
"""Most patches of a known assignment that move, and most items of each."""


def random_home(graph: Items, seed: int) -> Ints:
    """A random device for each item, shape (num_items,). A memory cap is broken only where no device has room for an item."""
    rng = np.random.default_rng(seed)
    home = np.full(graph.num_items, -1, dtype=np.int64)
    work_s, item_bytes = graph.costs.compute_s[:, graph.class_of], graph.costs.num_bytes
    fast = np.isfinite(work_s) & (work_s <= SLOW * work_s.min(axis=1, keepdims=True))
    left_bytes, size = graph.costs.memory_bytes[graph.class_of], max(1, graph.num_items // (PATCHES_A_DEVICE * graph.num_devices))
    for root in rng.permutation(graph.num_items).tolist():
        if home[root] < 0:
            roomy = fast[root] & (item_bytes[root] <= left_bytes)
            device = int(rng.choice(np.flatnonzero(roomy if roomy.any() else np.isfinite(work_s[root]))))
            home[root], left_bytes[device] = device, left_bytes[device] - item_bytes[root]
            near = [item for item in _near(graph, root) if home[item] < 0]
            _give(graph, home, near, device, size - 1, left_bytes, fast[:, device], rng)
    return home


def moved_home(graph: Items, home: Ints, seed: int) -> Ints:
    """The assignment with up to ``MOST_MOVED`` patches on other devices; memory caps that it keeps are kept."""
    rng = np.random.default_rng(seed)
    c, home = graph.costs, home.copy()
    allowed = np.isfinite(c.compute_s[:, graph.class_of])
    left_bytes = c.memory_bytes[graph.class_of] - np.bincount(home, weights=c.num_bytes, minlength=graph.num_devices)
    for _ in range(int(rng.integers(1, MOST_MOVED + 1))):
        root, device = int(rng.integers(graph.num_items)), int(rng.integers(graph.num_devices))
        if device != home[root]:
            _give(graph, home, [root], device, int(rng.integers(1, MOST_ITEMS + 1)), left_bytes, allowed[:, device], rng)
    return home


def _give(
    graph: Items, home: Ints, waiting: list[int], device: int, most: int, left_bytes: Floats, able: NDArray[np.bool_],
    rng: np.random.Generator,
) -> None:  # fmt: skip
    """Give a device up to ``most`` items, in place: those that wait, all on one other device or on none, and those near them."""
    source = home[waiting[0]] if waiting else -1
    while waiting and most > 0:
        item = waiting.pop(int(rng.integers(len(waiting))))
        if home[item] != source or not able[item] or graph.costs.num_bytes[item] > left_bytes[device]:
            continue
        home[item], most = device, most - 1
        left_bytes[device] -= graph.costs.num_bytes[item]
        if source >= 0:
            left_bytes[source] += graph.costs.num_bytes[item]
        waiting += [other for other in _near(graph, item) if home[other] == source]


def _near(graph: Items, item: int) -> list[int]:
    """The items of all nets of an item."""
    c = graph.costs
    return [other for net in c.nets[c.net_start[item] : c.net_start[item + 1]] for other in graph.pins[net].tolist()]
