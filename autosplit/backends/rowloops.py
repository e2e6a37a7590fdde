"""The loop that computes ``instructions``, compiled.

Threads compute a tape together. A word of memory says which instruction is open, and how many of its parts nobody has taken yet.
A thread takes a part by an atomic change of this word. The one that ends the last part opens the next instruction::

    word                  the caller        a thread of its team
    (line 7, 2 parts)     takes a part
    (line 7, 1 part)      computes          takes a part
    (line 7, 0 parts)     ends, spins       ends last: computes lines 8 and 9, of one part each, and opens line 10
    (line 10, 2 parts)    takes a part      takes a part

So nobody waits for a thread that sleeps: one that comes late, because another process has its core, finds parts or none, and the
caller computes what nobody takes. Lines are counted on over all tapes, so a thread that comes after the end touches nothing.
"""

from autosplit.backends.atomics import (
    atomic_add,
    atomic_load,
    atomic_store,
    atomic_swap,
    pause,
    read_bytes,
    sleep,
    write_bytes,
    yield_core,
)
from autosplit.backends.rowfunctions import Function, look_up, normalise, of_one, of_two
from autosplit.backends.rowpanels import COLUMNS
from autosplit.backends.rowproducts import multiply
from autosplit.jit import inner, ints_at, summing

NUM_WORDS, PARTS = 11, 10
"""Int64 of an instruction, and which of them is the number of its parts."""

LINE_BYTES = 8 * NUM_WORDS
PART_BITS, MOST_PARTS = 16, (1 << 16) - 1

APART = 128
"""Bytes between words of a team that are written by turns, so that they share no line of a cache."""

OPEN, ENDED, FAILED, TAPE, ONE, TEAM_BYTES = 0, APART, 2 * APART, 3 * APART, 4 * APART, 5 * APART
"""Where a team has its words: the open line and its free parts; parts that ended; the line that failed; the tape: its address,
lines and number of its first line, -1 while they change; and a one to call a thread with."""

DISMISSED = -2
"""The number of the first line that ends the threads."""

PAUSES, YIELDS, SLEEP_US, PAUSES_AFTER_TAPE = 400, 100, 50, 2000
"""How a thread waits: it spins for some 20 us, yields its core, and then sleeps. After a tape it spins for some 100 us."""


@inner
def edge(count: int, part: int, parts: int, step: int) -> int:
    """The first of ``count`` numbers that belongs to a part; parts begin at multiples of ``step``."""
    return min((count + step - 1) // step * part // parts * step, count)


@summing("b1(i8, i8, i8)")
def compute(address: int, part: int, parts: int) -> bool:
    """Compute a part of an instruction: columns of a product or of a single row, or rows; whether its ids are in the table."""
    words = ints_at(address)
    code, x, y, found = words[0], words[1], words[2], words[3]
    if code == Function.PRODUCT:
        rows, size, features = words[5], words[6], words[7]
        start, end = edge(features, part, parts, COLUMNS), edge(features, part + 1, parts, COLUMNS)
        multiply(x, y, words[4], found, rows, size, features, start, end)
        return True
    if code == Function.NORM:
        rows, cols = words[5], words[6]
        start, end = edge(rows, part, parts, 1), edge(rows, part + 1, parts, 1)
        normalise(x + 4 * start * cols, y, found + 4 * start * cols, words[4], end - start, cols, words[7])
        return True
    rows, cols, y_cols = words[4], words[5], words[6]
    if code == Function.LOOKUP:
        start, end = edge(rows, part, parts, 1), edge(rows, part + 1, parts, 1)
        return look_up(x, y + 8 * start, found + 4 * start * cols, end - start, cols, y_cols)
    if rows == 1 and code != Function.MEAN and code != Function.CAT:
        x_bytes = 8 if code == Function.ADD_INTS or code == Function.FLOAT else 4
        found_bytes = 8 if code == Function.ADD_INTS else 4
        start, end = edge(cols, part, parts, 16), edge(cols, part + 1, parts, 16)
        x, found = x + start * x_bytes, found + start * found_bytes
        if code > Function.CAT:
            of_one(code, x, found, end - start)
        elif y_cols == cols:
            of_two(code, x, y + start * x_bytes, found, end - start, end - start)
        else:
            of_two(code, x, y, found, end - start, y_cols)
        return True
    x_step, y_step, found_step = words[7], words[8], words[9]
    for row in range(edge(rows, part, parts, 1), edge(rows, part + 1, parts, 1)):
        if code <= Function.CAT:
            of_two(code, x + row * x_step, y + row * y_step, found + row * found_step, cols, y_cols)
        else:
            of_one(code, x + row * x_step, found + row * found_step, cols)
    return True


@summing("void(i8, i8, i8, i8, i8)")
def proceed(tape: int, lines: int, team: int, first: int, line: int) -> None:
    """Compute instructions of one part from ``line`` on, and open the next one of several, or none at the end of the tape."""
    while line < lines and ints_at(tape + line * LINE_BYTES)[PARTS] == 1:
        if not compute(tape + line * LINE_BYTES, 0, 1):
            ints_at(team + FAILED)[0] = line
        line += 1
    parts = ints_at(tape + line * LINE_BYTES)[PARTS] if line < lines else 0
    atomic_store(team + OPEN, ((first + line) << PART_BITS) + parts)


@inner
def wait(turns: int) -> None:
    """Wait for a change by another thread, which may need this core, or have lost its own to another process."""
    if turns < PAUSES:
        pause()
    elif turns < PAUSES + YIELDS:
        yield_core()
    else:
        sleep(SLEEP_US)


@summing("void(i8, i8, i8, i8)")
def take_part(tape: int, lines: int, team: int, first: int) -> None:
    """Compute parts of a tape until all are ended. Only one who has a part reads it, for else its caller may have freed it."""
    turns = 0
    while True:
        word = atomic_load(team + OPEN)
        line, left = (word >> PART_BITS) - first, word & MOST_PARTS
        if line >= lines:
            return
        if left == 0 or not atomic_swap(team + OPEN, word, word - 1):
            turns += 1
            wait(turns)
            continue
        turns, address = 0, tape + line * LINE_BYTES
        parts = ints_at(address)[PARTS]
        if not compute(address, parts - left, parts):
            ints_at(team + FAILED)[0] = line
        if atomic_add(team + ENDED, 1) + 1 == parts:
            atomic_store(team + ENDED, 0)
            proceed(tape, lines, team, first, line + 1)


@summing("i8(i8, i8, i8, i8, i8)")
def play(tape: int, lines: int, team: int, channel: int, others: int) -> int:
    """Compute instructions, with other threads of the team if there are any.

    Args:
        tape: address of int64 ``[lines, NUM_WORDS]``, each the code of a ``Function``, addresses, sizes, bytes from a row to the
            next, and parts: see ``instructions``.
        team: address of its words.
        channel: the eventfd by which its threads are called.
        others: how many of them.
    Returns: the number of an instruction that was given an id outside its table; -1 if none was. A single thread ends there.
    """
    if others == 0:
        for line in range(lines):
            if not compute(tape + line * LINE_BYTES, 0, 1):
                return line
        return -1
    first, place = atomic_load(team + OPEN) >> PART_BITS, team + TAPE
    atomic_store(place + 16, -1)
    atomic_store(place, tape)
    atomic_store(place + 8, lines)
    atomic_store(place + 16, first)
    ints_at(team + FAILED)[0] = -1
    for _ in range(others):
        write_bytes(channel, team + ONE, 8)
    proceed(tape, lines, team, first, 0)
    take_part(tape, lines, team, first)
    return atomic_load(team + FAILED)  # type: ignore[no-any-return]


@summing("void(i8, i8, i8)")
def answer_calls(team: int, channel: int, count: int) -> None:
    """Take part in tapes until the team is dismissed. ``count``: the address of an int64 of the thread's own."""
    place = team + TAPE
    while read_bytes(channel, count, 8) == 8:
        first, tape, lines = atomic_load(place + 16), atomic_load(place), atomic_load(place + 8)
        if first == DISMISSED:
            return
        if first >= 0 and atomic_load(place + 16) == first:  # else the caller is at the next tape
            take_part(tape, lines, team, first)
            turns, end = 0, first + lines
            while turns < PAUSES_AFTER_TAPE and atomic_load(team + OPEN) >> PART_BITS == end:
                turns += 1
                pause()
