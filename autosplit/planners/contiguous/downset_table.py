"""The table of down-sets: those that were reached, as rows of bits in a hash table, with the best values at each."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import Floats
from autosplit.jit import compiled
from autosplit.planners.loads import Ints

Words = NDArray[np.uint64]

NUM_SETS, SIZE, BEST = range(3)
"""Places in ``tally``: sets in use, the size of set at work, the set of all items once a chain ends there."""


class DownSetTable(NamedTuple):
    """The down-sets that were reached, with the best prefix of a chain for each usage of devices.

        table[hash] -> set        value[set, usage]        origin[set, usage] -> set, usage, move

    Attributes:
        words: bits of each set.
        key, table: hash of each set, and the hash table of set numbers (-1 where empty).
        of_size, next_of_size: the first set of each size, and the next set of the same size.
        value: the largest load so far in seconds, infinite where no prefix is known, shape (sets, usages).
        origin: set and usage before the last block, and the move of the block, shape (sets, usages, 3).
        tally: counters, see above.
    """

    words: Words
    key: Words
    table: Ints
    next_of_size: Ints
    of_size: Ints
    value: Floats
    origin: NDArray[np.int32]
    tally: Ints


def new_sets(num_sets: int, num_items: int, num_usages: int) -> DownSetTable:
    """A table with room for so many sets, a power of two. It holds the empty set, which uses no devices."""
    sets = DownSetTable(
        words=np.zeros((num_sets, (num_items + 63) // 64), dtype=np.uint64),
        key=np.zeros(num_sets, dtype=np.uint64),
        table=np.full(4 * num_sets, -1, dtype=np.int64),
        next_of_size=np.full(num_sets, -1, dtype=np.int64),
        of_size=np.full(num_items + 1, -1, dtype=np.int64),
        value=np.full((num_sets, num_usages), np.inf),
        origin=np.zeros((num_sets, num_usages, 3), dtype=np.int32),
        tally=np.array([1, 0, -1], dtype=np.int64),
    )
    sets.of_size[0] = sets.table[0] = 0
    sets.value[0, 0] = 0.0
    return sets


def grown(sets: DownSetTable) -> DownSetTable:
    """The table with room for twice as many sets."""
    new = new_sets(2 * len(sets.words), len(sets.of_size) - 1, sets.value.shape[1])
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
