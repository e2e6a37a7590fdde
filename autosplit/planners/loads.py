"""The loads of a block that grows item by item, on each class of device. Compiled; all planners of chains share it."""

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
def moved_with(costs: Costs, block: GrowingBlock, item: int, k: int) -> float:
    """Seconds of transfers on a class if the block had one more item: each net of the item changes its price for the block."""
    moved = block.moved[k] + costs.fixed_s[item, k]
    for slot in range(costs.net_start[item], costs.net_start[item + 1]):
        net = costs.nets[slot]
        made = block.made[net]
        if made or block.inside[net] > 0:
            moved -= costs.send_s[net, k] if made else costs.receive_s[net, k]
        if block.inside[net] + 1 < costs.net_size[net] or costs.producer[net] < 0:
            moved += costs.send_s[net, k] if made or costs.producer[net] == item else costs.receive_s[net, k]
    return float(moved)


@inner
def load_with(costs: Costs, block: GrowingBlock, item: int, k: int) -> float:
    """The load on a class if the block had one more item, in seconds; memory does not count."""
    return load_of(costs, block.work[k] + costs.compute_s[item, k], moved_with(costs, block, item, k))


@inner
def bytes_with(costs: Costs, block: GrowingBlock, item: int) -> float:
    """The bytes of the block with one more item."""
    num_bytes = block.memory[0] + costs.num_bytes[item]
    for slot in range(costs.weight_start[item], costs.weight_start[item + 1]):
        if block.held[costs.weights[slot]] == 0:
            num_bytes += costs.weight_bytes[costs.weights[slot]]
    return float(num_bytes)


@inner
def add(costs: Costs, block: GrowingBlock, item: int) -> None:
    """Put an item into the block."""
    block.memory[0] = bytes_with(costs, block, item)
    for slot in range(costs.weight_start[item], costs.weight_start[item + 1]):
        block.held[costs.weights[slot]] += 1
    for k in range(len(block.work)):
        block.work[k] += costs.compute_s[item, k]
        block.moved[k] = moved_with(costs, block, item, k)
        block.surely[k] += costs.fixed_s[item, k]
    for slot in range(costs.net_start[item], costs.net_start[item + 1]):
        net = costs.nets[slot]
        if block.before[net] > 0 and block.inside[net] == 0:
            for k in range(len(block.work)):
                block.surely[k] += min(costs.send_s[net, k], costs.receive_s[net, k])
        block.inside[net] += 1
        block.made[net] = block.made[net] or costs.producer[net] == item


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
    for k in range(len(block.load)):
        block.load[k] = np.inf
        if block.memory[0] <= costs.memory_bytes[k] * (1 + 1e-12):
            block.load[k] = load_of(costs, block.work[k], block.moved[k])
            floor = min(floor, load_of(costs, block.work[k], block.surely[k]))
    return floor


@inner
def load_of(costs: Costs, work: float, moved: float) -> float:
    """Seconds that a device is busy with so many seconds of compute and of transfers."""
    return float(max(work, moved) if costs.overlap else work + moved)


@inner
def widest_load(block: GrowingBlock, takes: Ints, move: int, width: Ints) -> float:
    """Seconds per sample on the devices of a move: the load on the slowest class over the number of replicas."""
    top = 0.0
    for k in range(len(block.load)):
        if takes[move, k] > 0:
            top = max(top, block.load[k])
    return float(top / width[move])
