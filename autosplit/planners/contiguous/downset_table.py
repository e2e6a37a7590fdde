"""Sets: the down-sets that a walk has reached, as rows of bits in a hash table, and the best values at each."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import Floats
from autosplit.planners.items import Ints
from autosplit.planners.jit import compiled

Words = NDArray[np.uint64]


class Sets(NamedTuple):
    """The down-sets reached, in a hash table, and their entries: (usage, value, where from), as linked lists."""

    words: Words
    first_word: Ints
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


def new_sets(num_sets: int, num_entries: int, num_words: int, num_items: int) -> Sets:
    """Room for so many sets and entries, with nothing in it."""
    return Sets(
        words=np.zeros((num_sets, num_words), dtype=np.uint64),
        first_word=np.zeros(num_sets, dtype=np.int64),
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
        tally=np.array([0, 0, 0, -1, 0], dtype=np.int64),
    )


def begin(sets: Sets) -> None:
    """The empty set with nothing used; tally = (sets, entries, size at work, best entry, sets too wide to keep)."""
    sets.head[0] = 0
    sets.of_size[0] = 0
    sets.table[0] = 0
    sets.tally[:2] = 1


def grown(sets: Sets) -> Sets:
    """Twice the room; the hash table is made anew."""
    num_sets = 2 * len(sets.words) if sets.tally[0] + 1 >= len(sets.words) else len(sets.words)
    num_entries = 2 * len(sets.entry_value) if sets.tally[1] + 1 >= len(sets.entry_value) else len(sets.entry_value)
    new = new_sets(num_sets, num_entries, sets.words.shape[1], len(sets.of_size) - 1)
    for name in Sets._fields:
        if name != "table":
            old = getattr(sets, name)
            getattr(new, name)[: len(old)] = old
    _rehash(new)
    return new


def members_of(sets: Sets, number: int, num_items: int) -> NDArray[np.bool_]:
    """The items of a down-set, shape (num_items,)."""
    words = np.zeros((num_items + 63) // 64 + sets.words.shape[1], dtype=np.uint64)
    first = int(sets.first_word[number])
    words[:first] = ~np.uint64(0)
    words[first : first + sets.words.shape[1]] = sets.words[number]
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:num_items].astype(bool)


@compiled
def _rehash(sets: Sets) -> None:
    size = len(sets.table)
    for number in range(sets.tally[0]):
        slot = int(np.int64(sets.key[number] & np.uint64(size - 1)))
        while sets.table[slot] >= 0:
            slot = slot + 1 if slot + 1 < size else 0
        sets.table[slot] = number
