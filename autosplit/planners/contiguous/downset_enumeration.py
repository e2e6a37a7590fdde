"""Enumerate the down-sets that one block reaches from a down-set, each once, depth first. Compiled.

Sets are worked through by size. From a set D, items are added one by one while the block that they form stays below the limit;
every D + block is a superset that is entered into the table:

    D  ->  D + a  ->  D + a + b  ->  ...          each step takes a candidate, or leaves it out for good
           D + b  ->  D + b + c  ->  ...          a candidate that is left out never comes back below this step

Candidates are the items that are ready: the last set's, and those that the last item made ready.
"""

import numpy as np

from autosplit.jit import compiled, inner, whole
from autosplit.planners.contiguous.downset_table import BEST, NUM_SETS, SIZE
from autosplit.planners.contiguous.linear import alive_usages
from autosplit.planners.contiguous.pruning import (
    NUM_ALIVE,
    NUM_READY,
    NUM_TAKEN,
    Walk,
    fits,
    has_room,
    most_left,
    must_fill,
    must_take,
)
from autosplit.planners.loads import ROUNDING, add, entries, price, remove, reset, shift, widest_load

DONE, PAUSED, FULL, HOPELESS = range(4)


@compiled
def run(walk: Walk, num_steps: int, most_of_a_set: int) -> int:
    """Work through the sets by size until all are done, the steps are used up, or the table is full."""
    sets, steps, num_items = walk.sets, 0, len(walk.waiting)
    while sets.tally[SIZE] < num_items:
        number = sets.of_size[sets.tally[SIZE]]
        if number < 0:
            sets.tally[SIZE] += 1
            continue
        walk.state[NUM_ALIVE] = alive_usages(sets.value, number, walk.limit[0] * (1 - ROUNDING), walk.alive)
        if walk.state[NUM_ALIVE] > 0:
            _go_to(walk, number)
            taken = _extend(walk, number, most_of_a_set)
            if taken < 0:
                return FULL if taken == -1 else HOPELESS
            steps += taken
        sets.of_size[sets.tally[SIZE]] = sets.next_of_size[number]
        if walk.maximal and sets.tally[BEST] >= 0:
            return DONE
        if steps > num_steps:
            return PAUSED
    return DONE


@inner
def _go_to(walk: Walk, number: int) -> None:
    """Make a set the current one by flipping the items in which it differs; removals come first, from the last item on."""
    num_items = len(walk.waiting)
    for step in range(2 * num_items):
        adding = step >= num_items
        item = step - num_items if adding else num_items - 1 - step
        bit, one = np.uint64(item % 64), np.uint64(1)
        goal, here = (walk.sets.words[number, item // 64] >> bit) & one, (walk.bits[item // 64] >> bit) & one
        if goal != here and (goal > here) == adding:
            change = whole(1 if adding else -1)
            _flip(walk, item, change)
            shift(walk.costs, walk.block, item, change)


@inner
def _flip(walk: Walk, item: int, change: int) -> None:
    """Put an item into the current set (change = 1) or take it out (-1), and update the values and the ready items."""
    for p in range(len(walk.done_value)):
        walk.done_value[p] += change * walk.values[item, p]
    walk.bits[item // 64] ^= np.uint64(1) << np.uint64(item % 64)
    walk.hashed[0] ^= walk.hash_of[item]
    walk.state[NUM_TAKEN] += change
    if change > 0:
        _set_ready(walk, item, change)
    for goal in entries(walk.after, item):
        if change > 0:
            walk.waiting[goal] -= 1
        if walk.waiting[goal] == 0:
            _set_ready(walk, goal, -change)
        if change < 0:
            walk.waiting[goal] += 1
    if change < 0:
        _set_ready(walk, item, change)


@inner
def _set_ready(walk: Walk, item: int, change: int) -> None:
    """Add an item to the ready ones (change = -1), or remove it (1)."""
    if change < 0:
        walk.place[item] = walk.state[NUM_READY]
        walk.ready[walk.state[NUM_READY]] = item
        walk.state[NUM_READY] += 1
    else:
        walk.state[NUM_READY] -= 1
        last = walk.ready[walk.state[NUM_READY]]
        walk.ready[walk.place[item]] = last
        walk.place[last] = walk.place[item]
        walk.place[item] = -1


@inner
def _extend(walk: Walk, number: int, most: int) -> int:
    """Enter all supersets by one block. Returns: steps taken, -1 if the table is full, -2 if the set takes too many steps."""
    reset(walk.block)
    depth, one = whole(0), whole(1)
    walk.low[0], walk.cursor[0], walk.high[0] = 0, 0, walk.state[NUM_READY]
    for slot in range(walk.state[NUM_READY]):
        walk.candidates[slot] = walk.ready[slot]
    steps = 0
    status = 0
    most_left(walk)
    while depth >= 0:
        # 1. no candidate is left at this depth: go back, and stop there too if the item must not be left out
        if walk.cursor[depth] == walk.high[depth] or status < 0:
            depth -= 1
            if depth >= 0:
                item = int(walk.candidates[walk.cursor[depth]])
                _undo(walk, depth)
                if must_take(walk, item) or (walk.maximal and must_fill(walk, item)):
                    walk.cursor[depth] = walk.high[depth]
            continue
        # 2. take the candidate; enter the superset and go deeper, unless every block that contains this one is above the limit
        item = int(walk.candidates[walk.cursor[depth]])
        steps += 1
        for place in range(len(walk.sums)):  # as they are, so that taking the item back leaves no rounding error
            walk.saved[depth, place] = walk.sums[place]
        _flip(walk, item, one)
        add(walk.costs, walk.block, item)
        if price(walk.costs, walk.block) < walk.limit[0] * (1 - ROUNDING) * walk.widest:
            status = _reach(walk, number)
            room = len(walk.candidates) - len(walk.bits) * 64 - 64
            if steps > most or walk.high[depth] + walk.high[depth] - walk.low[depth] > room:
                status = -2
            _descend(walk, depth, item)
            depth += 1
        else:
            _undo(walk, depth)
            if must_take(walk, item):
                walk.cursor[depth] = walk.high[depth]
    return status if status < 0 else steps


@inner
def _descend(walk: Walk, depth: int, item: int) -> None:
    """Set the candidates of the next depth: those behind the item, and the items that it made ready."""
    low = end = walk.high[depth]
    for slot in range(walk.cursor[depth] + 1, walk.high[depth]):
        walk.candidates[end] = walk.candidates[slot]
        end += 1
    for goal in entries(walk.after, item):
        if walk.waiting[goal] == 0:
            walk.candidates[end] = goal
            end += 1
    walk.low[depth + 1], walk.cursor[depth + 1], walk.high[depth + 1] = low, low, end


@inner
def _undo(walk: Walk, depth: int) -> None:
    """Take back the item at the cursor of this depth, and move the cursor on."""
    item = int(walk.candidates[walk.cursor[depth]])
    remove(walk.costs, walk.block, item)
    _flip(walk, item, whole(-1))
    for place in range(len(walk.sums)):
        walk.sums[place] = walk.saved[depth, place]
    walk.cursor[depth] += 1


@inner
def _reach(walk: Walk, number: int) -> int:
    """Extend every prefix of the set by the block that ends at the current set. Returns: -1 where the table is full."""
    sets, goal_set = walk.sets, -1
    for move in range(len(walk.usage.width)):
        top = widest_load(walk.block, walk.usage, move)
        if not top < walk.limit[0] * (1 - ROUNDING) or top < walk.least * (1 - ROUNDING):
            continue
        full = not walk.maximal
        for slot in range(walk.state[NUM_ALIVE]):
            usage = walk.alive[slot]
            goal, value = walk.usage.after[usage, move], max(top, sets.value[number, usage])
            if goal >= 0 and value < walk.limit[0] * (1 - ROUNDING) and fits(walk, goal):
                if not full and has_room(walk, move):
                    break
                full = True
                if goal_set < 0:
                    if sets.tally[NUM_SETS] + 1 >= len(sets.words):
                        return -1
                    goal_set = _find(walk)
                if value < sets.value[goal_set, goal]:
                    origin, sets.value[goal_set, goal] = sets.origin[goal_set, goal], value
                    origin[0], origin[1], origin[2] = number, usage, move
                    if walk.state[NUM_TAKEN] == len(walk.waiting) and walk.usage.final[goal]:
                        walk.limit[0] = value  # a better chain of all items
                        sets.tally[BEST] = goal_set
    return 0


@inner
def _find(walk: Walk) -> int:
    """The number of the current set, which is added if it is new."""
    sets, size = walk.sets, len(walk.sets.table)
    slot = int(np.int64(walk.hashed[0] & np.uint64(size - 1)))
    while sets.table[slot] >= 0:
        number = sets.table[slot]
        if sets.key[number] == walk.hashed[0]:
            same = True
            for word in range(len(walk.bits)):
                same = same and sets.words[number, word] == walk.bits[word]
            if same:
                return int(number)
        slot = slot + 1 if slot + 1 < size else 0
    number = sets.tally[NUM_SETS]
    sets.tally[NUM_SETS] += 1
    sets.table[slot] = number
    sets.key[number] = walk.hashed[0]
    for word in range(len(walk.bits)):
        sets.words[number, word] = walk.bits[word]
    sets.next_of_size[number] = sets.of_size[walk.state[NUM_TAKEN]]
    sets.of_size[walk.state[NUM_TAKEN]] = number
    return int(number)
