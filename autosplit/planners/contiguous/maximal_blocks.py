"""Maximal blocks: no ready item fits into them. It is enough to look at chains of such blocks. Compiled."""

import numpy as np

from autosplit.costs.problem import HOST, Floats
from autosplit.planners.contiguous.pruning import NUM_READY, Enumeration, Rules
from autosplit.planners.items import Items
from autosplit.planners.jit import inner
from autosplit.planners.loads import ROUNDING, Costs, GrowingBlock

MOST_READY = 64
"""Ready items that are tried. To try fewer costs time but never a plan."""


def most_added(items: Items) -> Floats:
    """The most that an item adds to the load of a block, in seconds, shape (num_items, K)."""
    added = np.where(np.isfinite(items.costs.compute_s), items.costs.compute_s, 0.0) + items.costs.fixed_s
    made = items.costs.producer != HOST
    np.add.at(added, items.costs.producer[made], items.costs.send_s[made])
    for net, producer in enumerate(items.costs.producer):
        pins = items.pins[net]
        added[pins[pins != producer]] += items.costs.receive_s[net]
    return added


def maximal_blocks_suffice(items: Items) -> bool:
    """Whether maximal blocks suffice: if there is a chain below a limit, there is one of maximal blocks."""
    inside, demands = items.costs.producer != HOST, items.demands
    even = np.array_equal(items.costs.send_s[inside], items.costs.receive_s[inside])
    return bool(even and demands.min_stage_s == 0 and demands.num_stages is None)


@inner
def has_room(costs: Costs, block: GrowingBlock, rules: Rules, walk: Enumeration, move: int, limit: float) -> bool:
    """Whether a ready item fits into the block: the load stays below the limit, and the cut behind the block does not grow.

    Then no later block gets worse by moving the item here. Let D be the down-set at the end of this block, E = D + item, and B a
    later block. Nets cost the same on both sides and the cut is submodular: cut(B - E) <= cut(B) + cut(E) - cut(E - B), where
    E - B is E or D.
    """
    for place in range(min(walk.state[NUM_READY], MOST_READY)):
        item = walk.ready[place]
        room = not _opens(costs, block, item)
        for k in range(rules.takes.shape[1]):
            if room and rules.takes[move, k] > 0:
                room = _load_with(costs, block, item, k) < limit * (1 - ROUNDING) * rules.width[move]
        if room and _fits_in(costs, block, rules, item, move):
            return True
    return False


@inner
def _opens(costs: Costs, block: GrowingBlock, item: int) -> bool:
    """Whether the item makes the cut behind the block dearer, on any class."""
    for k in range(costs.compute_s.shape[1]):
        opened = 0.0
        for slot in range(costs.net_start[item], costs.net_start[item + 1]):
            net = costs.nets[slot]
            pins = block.before[net] + block.inside[net]
            if pins == 0:
                opened += costs.receive_s[net, k]
            elif pins + 1 == costs.net_size[net] and costs.producer[net] >= 0:
                opened -= costs.receive_s[net, k]
        if opened > 0:
            return True
    return False


@inner
def _load_with(costs: Costs, block: GrowingBlock, item: int, k: int) -> float:
    """The load on a class with one more item, in seconds, where nets cost the same on both sides."""
    work, moved = block.work[k] + costs.compute_s[item, k], block.moved[k] + costs.fixed_s[item, k]
    for slot in range(costs.net_start[item], costs.net_start[item + 1]):
        net = costs.nets[slot]
        inside = block.inside[net]
        if inside > 0:
            moved -= costs.receive_s[net, k]
        if inside + 1 < costs.net_size[net] or costs.producer[net] < 0:
            moved += costs.receive_s[net, k]
    return float(max(work, moved) if costs.overlap else work + moved)


@inner
def must_fill(costs: Costs, block: GrowingBlock, rules: Rules, walk: Enumeration, item: int, limit: float) -> bool:
    """Whether every superset of the block without the item has room for it, so that none of them is maximal.

    While the block grows, what the item adds to load and cut only falls, and the block grows at most by all items that are not
    the item or its successors.
    """
    if _opens(costs, block, item):
        return False
    classes = costs.compute_s.shape[1]
    column = rules.room.shape[1]
    for k in range(classes):
        work, surely = block.work[k], block.surely[k]
        if not (max(work, surely) if costs.overlap else work + surely) < limit * rules.widest:
            continue
        load = _load_with(costs, block, item, k)
        more = rules.total_value[column + k] - walk.done_value[column + k] - rules.behind[item, column + k]
        if not load + more < limit * (1 - 2 * ROUNDING) - ROUNDING * rules.total_value[column + k]:
            return False
        num_bytes = rules.total_value[1] - walk.done_value[1] + block.memory[0]
        for weight in range(len(costs.weight_bytes)):
            num_bytes += costs.weight_bytes[weight]
        if num_bytes > costs.memory_bytes[k]:
            return False
    return True


@inner
def _fits_in(costs: Costs, block: GrowingBlock, rules: Rules, item: int, move: int) -> bool:
    """Whether the block with one more item is within the memory caps of the devices of a move."""
    num_bytes = block.memory[0] + costs.num_bytes[item]
    for slot in range(costs.weight_start[item], costs.weight_start[item + 1]):
        weight = costs.weights[slot]
        if block.held[weight] == 0:
            num_bytes += costs.weight_bytes[weight]
    within = True
    for k in range(rules.takes.shape[1]):
        within = within and (rules.takes[move, k] == 0 or num_bytes <= costs.memory_bytes[k])
    return within
