"""The hypergraph of a problem without order: items with one price for each net that crosses the border of a device.

If a transfer costs the same whichever device is at the other end, the load of a device is the compute of its items plus the
cost of every net with some but not all of its pins there. Then moving one item changes two loads only, and the load is
submodular. For every other problem there is such a hypergraph that costs no more, which gives a bound.

It is an ``Instance`` in which sending costs as much as receiving and all else is compute. Nets from the host have no
producer, so no device holds all of them. An assignment is the device of each item.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import HOST, Block, Floats, Problem
from autosplit.planners.clusters import gathered
from autosplit.planners.instance import Instance, contract
from autosplit.planners.loads import Ints, Table
from autosplit.values.constraints import Demands


def hypergraph_of(problem: Problem, instance: Instance | None = None) -> Instance:
    """The hypergraph of a problem; where it is not exact, its loads are at most those of the problem.

    A net whose sender and receiver pay differently is charged at the lower price. Transfers that run beside compute are left out.

    Args:
        problem: the problem.
        instance: of a chain, for a hypergraph that bounds chains; by default any op may go anywhere.
    """
    instance = instance or contract(problem, Demands(contiguous=False))
    outside = instance.producer == HOST
    price_s = np.where(outside[:, None], instance.receive_s, np.minimum(instance.send_s, instance.receive_s))
    paid = np.logical_and(price_s.any(axis=1), not instance.overlap)
    even = np.array_equal(instance.send_s[~outside], instance.receive_s[~outside])
    beside = instance.overlap and bool(instance.pins.num_rows or instance.fixed_s.any())
    caps = np.where(instance.memory_bytes >= instance.num_bytes.sum(), np.inf, instance.memory_bytes)
    exact = instance.exact and not instance.weights.num_rows and not beside and (instance.overlap or even)
    apart = replace(instance, compute_s=instance.work_s, memory_bytes=caps, overlap=False, send_s=price_s, exact=exact)
    return with_nets(apart, paid)


def with_nets(instance: Instance, kept: NDArray[np.bool_], group: Ints | None = None) -> Instance:
    """The items with some of their nets. Nets with the same items become one, and a net of one item becomes compute.

    Args:
        instance: the ops, devices and bytes, and nets that cost ``send_s`` if they cross a border.
        kept: whether a net is kept, shape (num_nets,).
        group: the item of each entry of the nets, where items were joined.
    """
    merged: dict[tuple[tuple[int, ...], bool], Floats] = {}
    pins = instance.pins if group is None else Table(instance.pins.start, group[instance.pins.data])
    compute_s = instance.compute_s.copy()
    for net in np.flatnonzero(kept).tolist():
        key = tuple(np.unique(pins.row(net)).tolist()), bool(instance.producer[net] == HOST)
        price_s = instance.send_s[net]
        if len(key[0]) == 1:
            compute_s[key[0][0]] += price_s * key[1]
        else:
            merged[key] = merged[key] + price_s if key in merged else price_s
    price_s = np.array(list(merged.values())).reshape(len(merged), compute_s.shape[1])
    return replace(
        instance,
        compute_s=compute_s,
        fixed_s=np.zeros_like(compute_s),
        pins=Table.of([row for row, _ in merged]),
        producer=np.array([HOST if outside else row[0] for row, outside in merged], dtype=np.int64),
        send_s=price_s,
        receive_s=price_s,
        weights=Table.of([]),
        weight_bytes=np.zeros(0),
    )


def loads_s(graph: Instance, home: Ints) -> Floats:
    """Load of each device under an assignment, shape (num_devices,)."""
    return np.array([load_s(graph, home == device, k) for device, k in enumerate(graph.class_of)])


def load_s(graph: Instance, members: NDArray[np.bool_], k: int) -> float:
    """Load of a device of a class that holds the given items, shape (num_items,)."""
    pins = graph.pins
    inside = np.add.reduceat(members[pins.data], pins.start[:-1]) if pins.num_rows else np.zeros(0)
    cut = (inside > 0) & ((inside < graph.costs.net_size) | (graph.producer == HOST))
    return float(graph.compute_s[members, k].sum() + graph.send_s[cut, k].sum())


def fits(graph: Instance, home: Ints) -> bool:
    """Whether every item may run where it is, and no device holds more than its cap."""
    able = np.isfinite(graph.compute_s[np.arange(graph.num_items), graph.class_of[home]])
    held = np.bincount(home, weights=graph.num_bytes, minlength=graph.num_devices)
    return bool(able.all() and (held <= graph.memory_bytes[graph.class_of]).all())


def blocks_at(graph: Instance, home: Ints) -> tuple[Block, ...]:
    """One block for each device that an assignment uses."""
    return tuple(Block(graph.expand(np.flatnonzero(home == device)), (int(device),)) for device in np.unique(home))


def home_of(graph: Instance, blocks: Sequence[Block]) -> Ints | None:
    """The assignment of blocks; None where an item, or a block, is on several devices."""
    place = np.full(len(graph.item_of), -1, dtype=np.int64)
    for block in blocks:
        if len(block.devices) > 1:
            return None
        place[list(block.ops)] = block.devices[0]
    found = gathered(place, graph.item_of)
    return found if np.array_equal(found[graph.item_of], place) else None
