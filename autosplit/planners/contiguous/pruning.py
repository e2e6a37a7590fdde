"""Pruning of a walk over down-sets, compiled.

A down-set is dropped if its remaining items do not fit on the remaining devices below the limit. A block is dropped if a ready
item still fits into it: it is enough to look at chains of maximal blocks.
"""

from typing import NamedTuple

import numpy as np

from autosplit.costs.problem import HOST, Floats
from autosplit.jit import inner
from autosplit.planners.contiguous.downset_table import DownSetTable, Words
from autosplit.planners.device_usage import Usage
from autosplit.planners.instance import Instance
from autosplit.planners.loads import ROUNDING, Costs, GrowingBlock, Ints, Table, bytes_with, load_of, load_with, opens

NUM_READY, NUM_TAKEN, NUM_ALIVE = range(3)
"""Places in ``state``: ready items, items in the down-set, and usages whose prefixes are extended."""


class Walk(NamedTuple):
    """One search: items, order and devices, the table of down-sets, the current one, and the enumeration of its supersets.

    ``values`` has a row for each item and a column for each kind of value. For the first kinds, ``room`` says how much fits on
    the devices that a usage leaves free:

        column     values                              room
        0          weighted compute                    weighted free devices; each holds the limit
        1          bytes                               memory of the free devices
        then K     the most that the item adds to a    none
                   block's load on each class

    Attributes:
        costs, after, usage: the items, those that must not stand before each of them, and the ways to take devices.
        widest, least: most devices of a block, and its least seconds.
        maximal: only maximal blocks are looked at.
        values, room, total_value, behind: see above; the sum of all values, and that of each item and all its successors.
        block: the block that the enumeration adds to its first set.
        sets: the down-sets that were reached.
        limit: only chains below it count, in seconds, shape (1,); better chains lower it.
        bits, hashed: the set as words, and its hash; ``hash_of`` is the hash of each item.
        waiting: predecessors of each item that are not in the set.
        ready, place: items with no such predecessor, and the place of each item among them (-1: not ready).
        state: counters, see above.
        candidates, low, high, cursor: for each depth, the range of candidates and the next one.
        sums, saved: all sums of the block and of the set, and the sums before the item of each depth was added.
        done_value: value of each kind of the set.
        alive: the usages of the first set whose values are below the limit.
        spare: the most value of each kind that may be left out for good.
    """

    costs: Costs
    after: Table
    usage: Usage
    widest: int
    least: float
    maximal: bool
    values: Floats
    room: Floats
    total_value: Floats
    behind: Floats
    block: GrowingBlock
    sets: DownSetTable
    limit: Floats
    bits: Words
    hash_of: Words
    waiting: Ints
    ready: Ints
    place: Ints
    state: Ints
    hashed: Words
    candidates: Ints
    low: Ints
    high: Ints
    cursor: Ints
    sums: Floats
    saved: Floats
    done_value: Floats
    alive: Ints
    spare: Floats


@inner
def most_left(walk: Walk) -> None:
    """Fill in the most room that any block from the first set leaves. Items that are left out for good have to fit into it."""
    for p in range(len(walk.spare)):
        walk.spare[p] = 0.0
        for slot in range(walk.state[NUM_ALIVE]):
            for move in range(len(walk.usage.width)):
                usage = walk.usage.after[walk.alive[slot], move]
                if usage >= 0:
                    walk.spare[p] = max(walk.spare[p], _room(walk, usage, p))


@inner
def _room(walk: Walk, usage: int, p: int) -> float:
    """The most value of one kind that the free devices of a usage hold, with a margin for rounding."""
    room = walk.room[usage, p] * walk.limit[0] if p == 0 else walk.room[usage, p]
    return float(room * (1 + ROUNDING) + ROUNDING * walk.total_value[p])


@inner
def must_take(walk: Walk, item: int) -> bool:
    """Whether an item and all its successors are too much for the free devices, so that the block has to take the item."""
    must = False
    for p in range(len(walk.spare)):
        must = must or walk.behind[item, p] > walk.spare[p]
    return must


@inner
def fits(walk: Walk, usage: int) -> bool:
    """Whether the remaining items may fit on the free devices, each below the limit."""
    within = True
    for p in range(walk.room.shape[1]):
        if walk.total_value[p] - walk.done_value[p] > _room(walk, usage, p):  # not with a NaN, for 0 times no limit
            within = False
    return within


MOST_READY = 64
"""Ready items that are tried. To try fewer costs time but never a plan."""


def most_added(instance: Instance) -> Floats:
    """The most that an item adds to the load of a block, in seconds, shape (num_items, K)."""
    added = np.where(np.isfinite(instance.compute_s), instance.compute_s, 0.0) + instance.fixed_s
    made = instance.producer != HOST
    np.add.at(added, instance.producer[made], instance.send_s[made])
    for net, producer in enumerate(instance.producer):
        pins = instance.pins.row(net)
        added[pins[pins != producer]] += instance.receive_s[net]
    return added


def maximal_blocks_suffice(instance: Instance) -> bool:
    """Whether maximal blocks suffice: if there is a chain below a limit, there is one of maximal blocks."""
    inside, demands = instance.producer != HOST, instance.demands
    even = np.array_equal(instance.send_s[inside], instance.receive_s[inside])
    return bool(even and demands.min_stage_s == 0 and demands.num_stages is None)


@inner
def has_room(walk: Walk, move: int) -> bool:
    """Whether a ready item fits into the block: the load stays below the limit, and the cut behind the block does not grow.

    Then no later block gets worse by moving the item here. Let D be the down-set at the end of this block, E = D + item, and B a
    later block. Nets cost the same on both sides and the cut is submodular: cut(B - E) <= cut(B) + cut(E) - cut(E - B), where
    E - B is E or D.
    """
    costs, block, usage = walk.costs, walk.block, walk.usage
    for place in range(min(walk.state[NUM_READY], MOST_READY)):
        item = walk.ready[place]
        room, num_bytes = not opens(costs, block, item), bytes_with(costs, block, item)
        for k in range(len(block.load)):
            if room and usage.takes[move, k] > 0:
                room = load_with(costs, block, item, k) < walk.limit[0] * (1 - ROUNDING) * usage.width[move]
                room = room and num_bytes <= costs.memory_bytes[k]
        if room:
            return True
    return False


@inner
def must_fill(walk: Walk, item: int) -> bool:
    """Whether every superset of the block without the item has room for it, so that none of them is maximal.

    While the block grows, the load and cut of the item only fall, and the block grows at most by all items that are not
    the item or its successors.
    """
    costs, block, limit = walk.costs, walk.block, walk.limit[0]
    if opens(costs, block, item):
        return False
    column = walk.room.shape[1]
    for k in range(costs.compute_s.shape[1]):
        if not load_of(costs, block.work[k], block.surely[k]) < limit * walk.widest:
            continue
        load = load_with(costs, block, item, k)
        more = walk.total_value[column + k] - walk.done_value[column + k] - walk.behind[item, column + k]
        if not load + more < limit * (1 - 2 * ROUNDING) - ROUNDING * walk.total_value[column + k]:
            return False
        num_bytes = walk.total_value[1] - walk.done_value[1] + block.memory[0]
        for weight in range(len(costs.weight_bytes)):
            num_bytes += costs.weight_bytes[weight]
        if num_bytes > costs.memory_bytes[k]:
            return False
    return True
