"""Filling a block item by item, its cost on each class of device kept up to date. Compiled; the dynamic programs share it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import Floats
from autosplit.planners.items import Ints, Items
from autosplit.planners.jit import inner

ROUNDING = 1e-9
"""``costs.cost.TOLERANCE`` for machine code, which is made anew where a module of this folder changes, and of no other one."""


class Costs(NamedTuple):
    """The arrays of Items, as compiled code takes them; nets and weights are listed by item."""

    compute: Floats
    fixed: Floats
    num_bytes: Floats
    caps: Floats
    overlap: bool
    net_start: Ints
    nets: Ints
    net_size: Ints
    producer: Ints
    send: Floats
    receive: Floats
    weight_start: Ints
    weights: Ints
    weight_bytes: Floats


class Filling(NamedTuple):
    """A block while it grows: its cost by class, and the pins of each net that are in it or stand before it.

    ``surely`` is the part of ``moved`` that no further item can take away, ``load`` what ``price`` says of it.
    """

    work: Floats
    moved: Floats
    surely: Floats
    memory: Floats
    inside: Ints
    made: NDArray[np.bool_]
    before: Ints
    held: Ints
    load: Floats


def costs_of(items: Items) -> Costs:
    """The arrays of the items."""
    nets = items.pins.transposed(items.num_items)
    weights = items.weights.transposed(items.num_items)
    return Costs(
        items.compute_s, items.fixed_s, items.num_bytes, items.memory_bytes, items.overlap, nets.start, nets.data,
        np.diff(items.pins.start), items.producer, items.send_s, items.receive_s, weights.start, weights.data, items.weight_bytes,
    )  # fmt: skip


def empty_filling(costs: Costs) -> Filling:
    """A block without items, with nothing before it."""
    classes, nets = costs.compute.shape[1], len(costs.net_size)
    return Filling(
        np.zeros(classes), np.zeros(classes), np.zeros(classes), np.zeros(1), np.zeros(nets, dtype=np.int64),
        np.zeros(nets, dtype=np.bool_), np.zeros(nets, dtype=np.int64), np.zeros(len(costs.weight_bytes), dtype=np.int64),
        np.zeros(classes),
    )  # fmt: skip


@inner
def reset(filling: Filling) -> None:
    """No cost yet; the nets' counts are the caller's to clear."""
    for k in range(len(filling.work)):
        filling.work[k] = filling.moved[k] = filling.surely[k] = 0.0
    filling.memory[0] = 0.0


@inner
def add(costs: Costs, filling: Filling, item: int) -> None:
    """Put an item into the block."""
    filling.memory[0] += costs.num_bytes[item]
    for slot in range(costs.weight_start[item], costs.weight_start[item + 1]):
        weight = costs.weights[slot]
        if filling.held[weight] == 0:
            filling.memory[0] += costs.weight_bytes[weight]
        filling.held[weight] += 1
    for k in range(len(filling.work)):
        filling.work[k] += costs.compute[item, k]
        filling.moved[k] += costs.fixed[item, k]
        filling.surely[k] += costs.fixed[item, k]
    for slot in range(costs.net_start[item], costs.net_start[item + 1]):
        net = costs.nets[slot]
        mine = costs.producer[net] == item
        full = filling.inside[net] + 1 == costs.net_size[net] and costs.producer[net] >= 0
        for k in range(len(filling.work)):
            if filling.made[net]:
                filling.moved[k] -= costs.send[net, k]
            elif filling.inside[net] > 0:
                filling.moved[k] -= costs.receive[net, k]
            if not full:
                filling.moved[k] += costs.send[net, k] if (filling.made[net] or mine) else costs.receive[net, k]
            if filling.before[net] > 0 and filling.inside[net] == 0:
                filling.surely[k] += min(costs.send[net, k], costs.receive[net, k])
        filling.inside[net] += 1
        filling.made[net] = filling.made[net] or mine


@inner
def remove(costs: Costs, filling: Filling, item: int) -> None:
    """Take an item out of the counts; the costs by class are the caller's to restore, so that rounding does not creep in."""
    for slot in range(costs.weight_start[item], costs.weight_start[item + 1]):
        filling.held[costs.weights[slot]] -= 1
    for slot in range(costs.net_start[item], costs.net_start[item + 1]):
        net = costs.nets[slot]
        filling.inside[net] -= 1
        if costs.producer[net] == item:
            filling.made[net] = False


@inner
def shift(costs: Costs, filling: Filling, item: int, change: int) -> None:
    """Count an item as standing before the block (change = 1), or no longer (-1)."""
    for slot in range(costs.net_start[item], costs.net_start[item + 1]):
        filling.before[costs.nets[slot]] += change


@inner
def price(costs: Costs, filling: Filling) -> float:
    """Fill in the load on a device of each class; returns the least load that any block that holds this one can have."""
    floor = np.inf
    load = filling.load
    for k in range(len(load)):
        work, moved, surely = filling.work[k], filling.moved[k], filling.surely[k]
        if filling.memory[0] > costs.caps[k] * (1 + 1e-12):
            load[k] = np.inf
        elif costs.overlap:
            load[k] = max(work, moved)
            floor = min(floor, max(work, surely))
        else:
            load[k] = work + moved
            floor = min(floor, work + surely)
    return floor


@inner
def widest_load(load: Floats, takes: Ints, move: int, width: Ints) -> float:
    """Seconds per sample of the block on the devices of a move: its slowest class, over the number of replicas."""
    top = 0.0
    for k in range(len(load)):
        if takes[move, k] > 0:
            top = max(top, load[k])
    return float(top / width[move])
