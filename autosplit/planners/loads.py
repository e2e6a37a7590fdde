"""The loads of a block that grows item by item, on each class of device. Compiled; the dynamic programs share it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import Floats
from autosplit.planners.jit import inner

Ints = NDArray[np.int64]

ROUNDING = 1e-9
"""``costs.cost.TOLERANCE``, written again because machine code is compiled anew only where a module of the planners changes."""


class Costs(NamedTuple):
    """The costs of items on K classes of devices.

    Attributes:
        compute_s: seconds of each item, shape (num_items, K), infinite where not allowed.
        fixed_s: transfers that an item pays wherever it stands (outputs to the host), shape (num_items, K).
        num_bytes: memory of each item, shape (num_items,).
        memory_bytes: cap of a device of each class, shape (K,).
        overlap: a device computes and transfers at the same time.
        net_start, nets: the nets of each item.
        net_size: items of each net.
        producer: the item that makes each net, -1 for inputs from the host.
        send_s, receive_s: seconds of a crossing net, shape (num_nets, K).
        weight_start, weights, weight_bytes: the shared weights of each item, and bytes of each weight.
    """

    compute_s: Floats
    fixed_s: Floats
    num_bytes: Floats
    memory_bytes: Floats
    overlap: bool
    net_start: Ints
    nets: Ints
    net_size: Ints
    producer: Ints
    send_s: Floats
    receive_s: Floats
    weight_start: Ints
    weights: Ints
    weight_bytes: Floats


class GrowingBlock(NamedTuple):
    """A block with its cost on each class of device, and the pins of each net.

    Attributes:
        work: seconds of compute, shape (K,).
        moved: seconds of transfers, shape (K,).
        surely: the part of ``moved`` that no further item can remove, shape (K,).
        memory: bytes of the block, shape (1,).
        inside: pins of each net in the block.
        made: whether the block makes the net.
        before: pins of each net in earlier blocks.
        held: items of the block that use each shared weight.
        load: seconds per sample as of the last call of ``price``, shape (K,); infinite above the memory cap.
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


def empty_block(costs: Costs, sums: Floats | None = None) -> GrowingBlock:
    """A block without items, with no items before it. Its seconds and bytes are the first 3 K + 1 of ``sums``."""
    classes, nets = costs.compute_s.shape[1], len(costs.net_size)
    sums = np.zeros(3 * classes + 1) if sums is None else sums
    return GrowingBlock(
        sums[:classes], sums[classes : 2 * classes], sums[2 * classes : 3 * classes], sums[3 * classes : 3 * classes + 1],
        np.zeros(nets, dtype=np.int64), np.zeros(nets, dtype=np.bool_), np.zeros(nets, dtype=np.int64),
        np.zeros(len(costs.weight_bytes), dtype=np.int64), np.zeros(classes),
    )  # fmt: skip


@inner
def reset(block: GrowingBlock) -> None:
    """Set the costs to zero. The caller clears the counts of the nets."""
    for k in range(len(block.work)):
        block.work[k] = block.moved[k] = block.surely[k] = 0.0
    block.memory[0] = 0.0


@inner
def add(costs: Costs, block: GrowingBlock, item: int) -> None:
    """Put an item into the block."""
    block.memory[0] += costs.num_bytes[item]
    for slot in range(costs.weight_start[item], costs.weight_start[item + 1]):
        weight = costs.weights[slot]
        if block.held[weight] == 0:
            block.memory[0] += costs.weight_bytes[weight]
        block.held[weight] += 1
    for k in range(len(block.work)):
        block.work[k] += costs.compute_s[item, k]
        block.moved[k] += costs.fixed_s[item, k]
        block.surely[k] += costs.fixed_s[item, k]
    # each net of the item: subtract its old cost for the block, then add its cost with the item
    for slot in range(costs.net_start[item], costs.net_start[item + 1]):
        net = costs.nets[slot]
        mine = costs.producer[net] == item
        full = block.inside[net] + 1 == costs.net_size[net] and costs.producer[net] >= 0
        for k in range(len(block.work)):
            if block.made[net]:
                block.moved[k] -= costs.send_s[net, k]
            elif block.inside[net] > 0:
                block.moved[k] -= costs.receive_s[net, k]
            if not full:
                block.moved[k] += costs.send_s[net, k] if (block.made[net] or mine) else costs.receive_s[net, k]
            if block.before[net] > 0 and block.inside[net] == 0:
                block.surely[k] += min(costs.send_s[net, k], costs.receive_s[net, k])
        block.inside[net] += 1
        block.made[net] = block.made[net] or mine


@inner
def remove(costs: Costs, block: GrowingBlock, item: int) -> None:
    """Take an item out of the counts. The caller restores the costs from a copy, so that rounding errors do not add up."""
    for slot in range(costs.weight_start[item], costs.weight_start[item + 1]):
        block.held[costs.weights[slot]] -= 1
    for slot in range(costs.net_start[item], costs.net_start[item + 1]):
        net = costs.nets[slot]
        block.inside[net] -= 1
        if costs.producer[net] == item:
            block.made[net] = False


@inner
def shift(costs: Costs, block: GrowingBlock, item: int, change: int) -> None:
    """Add an item to those before the block (change = 1), or take it away (-1)."""
    for slot in range(costs.net_start[item], costs.net_start[item + 1]):
        block.before[costs.nets[slot]] += change


@inner
def price(costs: Costs, block: GrowingBlock) -> float:
    """Fill in the load on each class of device. Returns a lower bound on the load of every block that contains this one."""
    floor = np.inf
    load = block.load
    for k in range(len(load)):
        work, moved, surely = block.work[k], block.moved[k], block.surely[k]
        if block.memory[0] > costs.memory_bytes[k] * (1 + 1e-12):
            load[k] = np.inf
        elif costs.overlap:
            load[k] = max(work, moved)
            floor = min(floor, max(work, surely))
        else:
            load[k] = work + moved
            floor = min(floor, work + surely)
    return floor


@inner
def widest_load(costs: Costs, block: GrowingBlock, takes: Ints, move: int, width: Ints) -> float:
    """Seconds per sample on the devices of a move: the load on the slowest class over the number of replicas."""
    top = 0.0
    for k in range(len(block.load)):
        if takes[move, k] > 0:
            top = max(top, max(block.load[k], block.moved[k]) if costs.overlap else block.load[k])
    return float(top / width[move])
