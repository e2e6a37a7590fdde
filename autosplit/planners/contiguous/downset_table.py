"""The table of down-sets: those that were reached, as rows of bits in a hash table, with the best values at each."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import Floats
from autosplit.planners.jit import compiled
from autosplit.planners.loads import Ints

Words = NDArray[np.uint64]

NUM_SETS, NUM_ENTRIES, SIZE, BEST = range(4)
"""Places in ``tally``: sets and entries in use, the size of set at work, the best entry of all items."""


class DownSetTable(NamedTuple):
    """The down-sets that were reached, and the entries of each: the best value for each usage of devices.

    Entries form linked lists:

        table[hash] -> set -> head[set] -> entry -> entry_next[entry] -> ... -> -1
                                           entry_usage, entry_value, entry_from, entry_move

    Attributes:
        words: bits of each set.
        key, table: hash of each set, and the hash table of set numbers (-1 where empty).
        head: first entry of each set.
        of_size, next_of_size: the first set of each size, and the next set of the same size.
        entry_usage, entry_value: devices in use, and the largest load so far in seconds.
        entry_from, entry_move, entry_set: the entry before the last block, that block's devices, and the entry's set.
        tally: counters, see above.
    """

    words: Words
    key: Words
    table: Ints
    head: Ints
    next_of_size: Ints
    of_size: Ints
    entry_usage: Ints
    entry_value: Floats
    entry_from: Ints
    entry_move: Ints
    entry_set: Ints
    entry_next: Ints
    tally: Ints


def new_sets(num_sets: int, num_entries: int, num_items: int) -> DownSetTable:
    """A table with room for so many sets and entries, which holds the empty set with an entry that uses no devices."""
    sets = DownSetTable(
        words=np.zeros((num_sets, (num_items + 63) // 64), dtype=np.uint64),
        key=np.zeros(num_sets, dtype=np.uint64),
        table=np.full(4 * num_sets, -1, dtype=np.int64),
        head=np.full(num_sets, -1, dtype=np.int64),
        next_of_size=np.full(num_sets, -1, dtype=np.int64),
        of_size=np.full(num_items + 1, -1, dtype=np.int64),
        entry_usage=np.zeros(num_entries, dtype=np.int64),
        entry_value=np.zeros(num_entries),
        entry_from=np.full(num_entries, -1, dtype=np.int64),
        entry_move=np.full(num_entries, -1, dtype=np.int64),
        entry_set=np.zeros(num_entries, dtype=np.int64),
        entry_next=np.full(num_entries, -1, dtype=np.int64),
        tally=np.array([1, 1, 0, -1], dtype=np.int64),
    )
    sets.head[0] = sets.of_size[0] = sets.table[0] = 0
    return sets


def grown(sets: DownSetTable) -> DownSetTable:
    """The table with twice the room in the arrays that are full."""
    num_sets = 2 * len(sets.words) if sets.tally[NUM_SETS] + 1 >= len(sets.words) else len(sets.words)
    num_entries = 2 * len(sets.entry_value) if sets.tally[NUM_ENTRIES] + 1 >= len(sets.entry_value) else len(sets.entry_value)
    new = new_sets(num_sets, num_entries, len(sets.of_size) - 1)
    for name in DownSetTable._fields:
        if name != "table":
            old = getattr(sets, name)
            getattr(new, name)[: len(old)] = old
    _rehash(new)
    return new


def members_of(sets: DownSetTable, number: int, num_items: int) -> NDArray[np.bool_]:
    """Which items a down-set contains, shape (num_items,)."""
    return np.unpackbits(sets.words[number].view(np.uint8), bitorder="little")[:num_items].astype(bool)


@compiled
def _rehash(sets: DownSetTable) -> None:
    """Enter all sets into the hash table, where the empty one has the first place."""
    size = len(sets.table)
    for number in range(1, sets.tally[NUM_SETS]):
        slot = int(np.int64(sets.key[number] & np.uint64(size - 1)))
        while sets.table[slot] >= 0:
            slot = slot + 1 if slot + 1 < size else 0
        sets.table[slot] = number
