"""Leaving: what the devices that are left can still hold, so that a walk over down-sets gives up early. Compiled."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import Floats
from autosplit.planners.contiguous.downset_table import Sets, Words
from autosplit.planners.contiguous.growing_block import ROUNDING
from autosplit.planners.items import Ints
from autosplit.planners.jit import inner


class Walk(NamedTuple):
    """The down-set at hand as bits, with the items that may come next, and the stack of the depth-first walk."""

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
    saved: Floats
    done_work: Floats
    done_value: Floats
    spare: Floats
    open_cut: Floats
    opened: Floats


class Rules(NamedTuple):
    """Order, devices and pruning data.

    Column 0 of values and room is weighted compute and the weighted devices that a usage leaves, each good for the limit; the
    next columns are prices, and the most of each that the devices left can hold. The last columns of values are not in room: for
    each class the most that an item adds to the load of a block, and then its bytes. ``full``: only full blocks are looked at.
    """

    after_start: Ints
    after: Ints
    moves: Ints
    takes: Ints
    width: Ints
    room: Floats
    free: Ints
    final: NDArray[np.bool_]
    values: Floats
    total_value: Floats
    total: Floats
    compute: Floats
    behind: Floats
    widest: int
    overlap: bool
    least: float
    full: bool


@inner
def most_left(rules: Rules, sets: Sets, walk: Walk, number: int, limit: float) -> None:
    """The largest room that a block from this set can leave: what a walk leaves out for good must fit there."""
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
    """The most value of one kind that the devices left can hold, and a little more for rounding."""
    return float(
        (rules.room[usage, p] * limit if p == 0 else rules.room[usage, p]) * (1 + ROUNDING) + ROUNDING * rules.total_value[p]
    )


@inner
def must_take(rules: Rules, walk: Walk, item: int) -> bool:
    """Whether an item and all that follows it is too much for the devices that are left."""
    must = False
    for p in range(rules.room.shape[1]):
        must = must or rules.behind[item, p] > walk.spare[p]
    return must


@inner
def fits(rules: Rules, walk: Walk, usage: int, limit: float) -> bool:
    """Whether what is left of the items may fit the devices that are left, each below the limit."""
    for p in range(rules.room.shape[1]):
        if rules.total_value[p] - walk.done_value[p] > _room(rules, usage, p, limit):
            return False
    only = -1
    for k in range(rules.free.shape[1]):
        if rules.free[usage, k] > 0:
            if only >= 0:
                return True
            only = k
    if only < 0:
        return bool(walk.state[1] == len(walk.waiting))
    left, cut = rules.total[only] - walk.done_work[only], walk.open_cut[only]
    left = max(left, cut) if rules.overlap else left + cut
    return bool(left <= rules.free[usage, only] * limit * (1 + ROUNDING) + ROUNDING * rules.total[only])
