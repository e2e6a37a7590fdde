"""Coarsening: a hypergraph with fewer items, each a run of items along an order in which few nets are open.

It is the first half of multilevel partitioning (Karypis, Aggarwal, Kumar and Shekhar, "Multilevel hypergraph partitioning",
1999). An assignment of the groups costs the same as that of their items. Moves of a group are moves of all its items, and
resplits are quick.
"""

from dataclasses import replace

import numpy as np

from autosplit.costs.problem import HOST, rows_of
from autosplit.planners.items import Items
from autosplit.planners.loads import Ints
from autosplit.planners.noncontiguous.hypergraph import with_nets
from autosplit.planners.noncontiguous.narrow_orders import narrow_order

HEAVIEST = 0.4
"""Largest group, as a share of the smallest memory cap."""


def coarsened(graph: Items, num_items: int, *, seed: int, home: Ints | None = None) -> tuple[Items, Ints]:
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
    c, rng, open_s = graph.costs, np.random.default_rng(seed), np.zeros(graph.num_items)
    order = narrow_order(graph, np.ones(graph.num_items, dtype=np.bool_), seed=seed)
    home = np.zeros(graph.num_items, dtype=np.int64) if home is None else home
    order = order[np.argsort(home[order], kind="stable")]
    place = np.argsort(order)[graph.pins.data]
    for end, sign in ((np.minimum, 1.0), (np.maximum, -1.0)) if len(graph.pins) else ():
        np.add.at(open_s, end.reduceat(place, graph.pins.start[:-1]), sign * c.send_s.max(axis=1))
    work_s = c.compute_s.min(axis=1)[order]
    done = np.cumsum(work_s + (work_s.mean() or 1.0))
    stretch = (done / done[-1] * (num_items - 1) + rng.random()).astype(np.int64)
    cheapest = np.lexsort((np.cumsum(open_s) * rng.uniform(0.5, 1.0, graph.num_items), stretch))
    cut = np.zeros(graph.num_items, dtype=np.bool_)
    cut[cheapest[np.flatnonzero(np.diff(stretch[cheapest], prepend=-1))]] = True
    filled = np.floor(np.cumsum(c.num_bytes[order]) / max(HEAVIEST * c.memory_bytes.min(), 1e-300))
    unlike = np.column_stack([home, filled[np.argsort(order)], np.isfinite(c.compute_s)])[order]
    cut[:-1] |= (unlike[1:] != unlike[:-1]).any(axis=1)
    group = np.empty(graph.num_items, dtype=np.int64)
    group[order] = np.cumsum(np.append(0, cut[:-1]))
    return contracted(graph, group), group


def contracted(graph: Items, group: Ints) -> Items:
    """The hypergraph of groups. Nets within a group vanish, and nets with the same groups become one."""
    c, members = graph.costs, rows_of(zip(group.tolist(), range(graph.num_items), strict=True), int(group.max()) + 1)
    compute_s, num_bytes = np.zeros((len(members), len(graph.classes))), np.zeros(len(members))
    np.add.at(compute_s, group, c.compute_s)
    np.add.at(num_bytes, group, c.num_bytes)
    nets = ((group[graph.pins[net]], bool(c.producer[net] == HOST), c.send_s[net]) for net in range(len(graph.pins)))
    coarse = replace(graph, ops=tuple(map(graph.expand, members)), costs=c._replace(num_bytes=num_bytes))
    return with_nets(coarse, nets, compute_s)
