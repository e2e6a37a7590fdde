"""Device usage: the devices that a prefix of a chain has taken, as a number, and the devices that the next block may take.

Devices of one class are counted: six equal accelerators and a CPU make 7 x 2 states instead of 2^7. If there are too many
counts, devices are taken in one given sequence, and any of them may be left out.
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosplit.values.constraints import Demands

MAX_STATES, MAX_MOVES = 4096, 512
"""Most states and moves: a prefix of a chain has a value for each state, and a block is tried with each move."""


class Usage(NamedTuple):
    """States and moves; a move is one block on a number of devices of each class.

    Attributes:
        after: the state after a move, or -1 where it is not possible, shape (num_states, num_moves).
        takes: devices of each class that a move takes, shape (num_moves, K).
        width: devices that a move takes, shape (num_moves,).
        free: devices of each class that are left, shape (num_states, K).
        final: whether a chain may end in the state.
        complete: whether all ways to take devices are there, so that a bound holds for the problem.
    """

    after: NDArray[np.int64]
    takes: NDArray[np.int64]
    width: NDArray[np.int64]
    free: NDArray[np.int64]
    final: NDArray[np.bool_]
    complete: bool


def usage_of(counts: Sequence[int], demands: Demands) -> Usage | None:
    """All states for so many devices of each class, or None where there are more than ``MAX_STATES``."""
    total = sum(counts)
    limit = min(demands.num_stages or total, demands.max_stages or total, total)
    counted = demands.max_replicas > 1 and (demands.num_stages is not None or demands.max_stages is not None)
    sizes = [count + 1 for count in counts] + ([limit + 1] if counted else [])
    if prod(sizes) > MAX_STATES:
        return None
    moves = _moves(counts, min(demands.max_replicas, total))
    complete = len(moves) <= MAX_MOVES
    if not complete:
        moves = [move for move in moves if np.count_nonzero(move) == 1]
    states = np.array(list(product(*(range(size) for size in sizes))), dtype=np.int64)
    strides = np.array([prod(sizes[place + 1 :]) for place in range(len(sizes))], dtype=np.int64)
    takes = np.array(moves, dtype=np.int64).reshape(len(moves), len(counts))
    steps = np.hstack([takes, np.ones((len(moves), 1), dtype=np.int64)]) if counted else takes
    reached = states[:, None, :] + steps[None, :, :]
    allowed = (reached < np.array(sizes)).all(axis=2)
    used = states[:, -1] if counted else states.sum(axis=1)
    allowed &= (used < limit)[:, None]
    return Usage(
        after=np.where(allowed, (reached * strides).sum(axis=2), -1),
        takes=takes,
        width=takes.sum(axis=1),
        free=np.array(counts, dtype=np.int64) - states[:, : len(counts)],
        final=(used == demands.num_stages) if demands.num_stages is not None else np.ones(len(states), dtype=bool),
        complete=complete,
    )


def _moves(counts: Sequence[int], most: int) -> list[tuple[int, ...]]:
    if most == 1:
        return [tuple(int(place == chosen) for place in range(len(counts))) for chosen in range(len(counts))]
    ranges = (range(min(count, most) + 1) for count in counts)
    return [move for move in product(*ranges) if 1 <= sum(move) <= most]


def sequence_usage(num_classes: int, demands: Demands, sequence: Sequence[int]) -> Usage:
    """States for devices that are taken in one sequence of classes, with repeats; any of them may be left out.

    A state is (devices passed in the sequence, blocks so far); the blocks are counted only where their number is limited.
    """
    length = len(sequence)
    limit = min(demands.num_stages or length, demands.max_stages or length, length)
    counted = demands.num_stages is not None or demands.max_stages is not None
    depth = limit + 1 if counted else 1
    passed, blocks = np.divmod(np.arange(depth * (length + 1)), depth)
    move, takes = np.arange(length), np.eye(num_classes, dtype=np.int64)[list(sequence)]
    allowed = (move >= passed[:, None]) & (blocks < limit)[:, None]
    return Usage(
        after=np.where(allowed, (move + 1) * depth + blocks[:, None] + counted, -1),
        takes=takes,
        width=np.ones(length, dtype=np.int64),
        free=np.vstack([takes[::-1].cumsum(axis=0)[::-1], np.zeros((1, num_classes), dtype=np.int64)])[passed],
        final=np.full(len(blocks), True) if demands.num_stages is None else blocks == demands.num_stages,
        complete=False,
    )
