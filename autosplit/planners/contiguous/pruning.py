"""Pruning: a down-set is dropped if its remaining items do not fit on the remaining devices below the limit. Compiled."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import Floats
from autosplit.planners.contiguous.downset_table import DownSetTable, Words
from autosplit.planners.jit import inner
from autosplit.planners.loads import ROUNDING, Ints

NUM_READY, NUM_TAKEN = range(2)
"""Places in ``state``: ready items, and items in the down-set."""


class Enumeration(NamedTuple):
    """The current down-set, and the stack of the depth-first enumeration of its supersets.

    Attributes:
        bits, hashed: the set as words, and its hash; ``hash_of`` is the hash of each item.
        waiting: predecessors of each item that are not in the set.
        ready, place: items with no such predecessor, and the place of each item among them (-1: not ready).
        state: counters, see above.
        candidates, low, high, cursor: for each depth, the range of candidates and the next one.
        sums, saved: all sums of the block and of the set, and the sums before the item of each depth was added.
        done_value: value of each kind of the set.
        spare: the most value of each kind that may be left out for good.
    """

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
    spare: Floats


class Rules(NamedTuple):
    """Order, devices and pruning data.

    ``values`` has a row for each item and a column for each kind of value. For the first kinds, ``room`` says how much fits on
    the devices that a usage leaves free:

        column     values                              room
        0          weighted compute                    weighted free devices; each holds the limit
        1          bytes                               what the free devices hold
        then K     the most that the item adds to a    none
                   block's load on each class

    ``behind`` is the value of an item and all its successors. With ``maximal`` only maximal blocks are looked at.
    """

    after_start: Ints
    after: Ints
    moves: Ints
    takes: Ints
    width: Ints
    room: Floats
    final: NDArray[np.bool_]
    values: Floats
    total_value: Floats
    behind: Floats
    widest: int
    least: float
    maximal: bool


@inner
def most_left(rules: Rules, sets: DownSetTable, walk: Enumeration, number: int, limit: float) -> None:
    """Fill in the most room that any block from this set leaves. Items that are left out for good have to fit into it."""
    for p in range(rules.room.shape[1]):
        most = 0.0
        entry = sets.head[number]
        while entry >= 0:
            for move in range(len(rules.takes)):
                usage = rules.moves[sets.entry_usage[entry], move]
                if usage >= 0:
                    most = max(most, _room(rules, usage, p, limit))
            entry = sets.entry_next[entry]
        walk.spare[p] = most


@inner
def _room(rules: Rules, usage: int, p: int, limit: float) -> float:
    """The most value of one kind that the free devices of a usage hold, with a margin for rounding."""
    return float(
        (rules.room[usage, p] * limit if p == 0 else rules.room[usage, p]) * (1 + ROUNDING) + ROUNDING * rules.total_value[p]
    )


@inner
def must_take(rules: Rules, walk: Enumeration, item: int) -> bool:
    """Whether an item and all its successors are too much for the free devices, so that the block has to take the item."""
    must = False
    for p in range(rules.room.shape[1]):
        must = must or rules.behind[item, p] > walk.spare[p]
    return must


@inner
def fits(rules: Rules, walk: Enumeration, usage: int, limit: float) -> bool:
    """Whether the remaining items may fit on the free devices, each below the limit."""
    within = True
    for p in range(rules.room.shape[1]):
        if rules.total_value[p] - walk.done_value[p] > _room(rules, usage, p, limit):  # not with a NaN, for 0 times no limit
            within = False
    return within
