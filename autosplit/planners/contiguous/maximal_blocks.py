"""Fullness: that no later item fits into a block as it stands. Chains of such blocks are enough to look at. Compiled."""

import numpy as np

from autosplit.costs.problem import HOST, Floats
from autosplit.planners.contiguous.growing_block import ROUNDING, Costs, Filling
from autosplit.planners.contiguous.pruning import Rules, Walk
from autosplit.planners.items import Items
from autosplit.planners.jit import inner
from autosplit.values.constraints import Demands

MOST_READY = 64
"""Items tried for whether they fit into a block: to leave one out costs time, not truth."""


def most_added(items: Items) -> Floats:
    """The most that an item adds to the load of a block, values that were open before it aside; shape (num_items, K)."""
    added = np.where(np.isfinite(items.compute_s), items.compute_s, 0.0) + items.fixed_s
    made = items.producer != HOST
    np.add.at(added, items.producer[made], items.send_s[made])
    for net in np.flatnonzero(~made):
        added[items.pins[int(net)]] += items.receive_s[net]
    return added


def full_blocks_suffice(items: Items, demands: Demands) -> bool:
    """Whether a chain below a limit can be had of blocks that none of the items ready next fits into."""
    inside = items.producer != HOST
    even = np.array_equal(items.send_s[inside], items.receive_s[inside])
    return bool(even and demands.min_stage_s == 0 and demands.num_stages is None)


@inner
def has_room(costs: Costs, filling: Filling, rules: Rules, walk: Walk, move: int, limit: float) -> bool:
    """Whether the block stays below the limit with one more item, and what is open behind it does not grow.

    Then the item is better here than later: for all later blocks B and the down-sets D and E = D + item at the end of this one,
    cut(B - E) <= cut(B) + cut(E) - cut(E - B), as nets cost the same on both sides, and E - B is E or D.
    """
    for place in range(min(walk.state[0], MOST_READY)):
        item = walk.ready[place]
        room = not _opens(costs, filling, item)
        for k in range(rules.takes.shape[1]):
            if room and rules.takes[move, k] > 0:
                room = _load_with(costs, filling, item, k) < limit * (1 - ROUNDING) * rules.width[move]
        if room and _fits_in(costs, filling, rules, item, move):
            return True
    return False


@inner
def _opens(costs: Costs, filling: Filling, item: int) -> bool:
    """Whether with the item more is open behind the block than without it, on devices of any class."""
    for k in range(costs.compute.shape[1]):
        opened = 0.0
        for slot in range(costs.net_start[item], costs.net_start[item + 1]):
            net = costs.nets[slot]
            pins = filling.before[net] + filling.inside[net]
            if pins == 0:
                opened += costs.receive[net, k]
            elif pins + 1 == costs.net_size[net] and costs.producer[net] >= 0:
                opened -= costs.receive[net, k]
        if opened > 0:
            return True
    return False


@inner
def _load_with(costs: Costs, filling: Filling, item: int, k: int) -> float:
    """The load on a device of a class with one more item, where nets cost the same on both sides."""
    work, moved = filling.work[k] + costs.compute[item, k], filling.moved[k] + costs.fixed[item, k]
    for slot in range(costs.net_start[item], costs.net_start[item + 1]):
        net = costs.nets[slot]
        inside = filling.inside[net]
        if inside > 0:
            moved -= costs.receive[net, k]
        if inside + 1 < costs.net_size[net] or costs.producer[net] < 0:
            moved += costs.receive[net, k]
    return float(max(work, moved) if costs.overlap else work + moved)


@inner
def must_fill(costs: Costs, filling: Filling, rules: Rules, walk: Walk, item: int, limit: float) -> bool:
    """Whether every block that leaves an item out for good still has room for it.

    What the item opens and what it adds to the load only fall while the block grows, and the block grows at most by all that does
    not come after the item.
    """
    if _opens(costs, filling, item):
        return False
    classes = costs.compute.shape[1]
    column = rules.room.shape[1]
    for k in range(classes):
        work, surely = filling.work[k], filling.surely[k]
        if not (max(work, surely) if costs.overlap else work + surely) < limit * rules.widest:
            continue
        load = _load_with(costs, filling, item, k) + walk.opened[k]
        more = rules.total_value[column + k] - walk.done_value[column + k] - rules.behind[item, column + k]
        if not load + more < limit * (1 - 2 * ROUNDING) - ROUNDING * rules.total_value[column + k]:
            return False
        num_bytes = rules.total_value[column + classes] - walk.done_value[column + classes] + filling.memory[0]
        for weight in range(len(costs.weight_bytes)):
            num_bytes += costs.weight_bytes[weight]
        if num_bytes > costs.caps[k]:
            return False
    return True


@inner
def _fits_in(costs: Costs, filling: Filling, rules: Rules, item: int, move: int) -> bool:
    """Whether the bytes of the block with one more item are within the caps of the devices of a move."""
    num_bytes = filling.memory[0] + costs.num_bytes[item]
    for slot in range(costs.weight_start[item], costs.weight_start[item + 1]):
        weight = costs.weights[slot]
        if filling.held[weight] == 0:
            num_bytes += costs.weight_bytes[weight]
    within = True
    for k in range(rules.takes.shape[1]):
        within = within and (rules.takes[move, k] == 0 or num_bytes <= costs.caps[k])
    return within
