"""Ops on rows as instructions of one compiled loop.

A call of a runtime or of torch from Python takes longer than a norm of a few rows does.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from autosplit.backends.rowteams import team_of

Empty = Callable[..., torch.Tensor]
"""Makes the memory of an answer from its shape."""

SHARE = 1 << 13
"""Fewest numbers that a thread takes: a core reads as many weights in 3 us, and two threads take 0.3 us to divide them."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """Numbers and addresses of ``rowloops.play``, and the tensors whose memory these name.

    ``num_shares``: threads that it pays to divide it among.
    """

    words: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    num_shares: int = 1

    def __call__(self) -> None:
        """Compute it alone, on as many threads as torch has."""
        together([self], torch.get_num_threads())[0]()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, found: torch.Tensor) -> Instruction:
    """``found = x @ weight.T + bias`` of dense float32: ``[rows, size]``, ``[features, size]``, ``[features]``."""
    rows, size = x.view(-1, x.shape[-1]).shape
    features = len(weight)
    tensors = [one for one in (x, weight, found, bias) if one is not None]
    words = _code("product"), *map(_place, (x, weight, found, bias)), rows, size, features, 0, 0
    return Instruction(words, tuple(tensors), _shares(weight.numel() * max(1, rows // 8)))


def norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, found: torch.Tensor) -> Instruction:
    """Layer norm of dense float32 rows."""
    rows, cols = x.view(-1, x.shape[-1]).shape
    tensors = tuple(one for one in (x, weight, found, bias) if one is not None)
    eps_bits = int(np.float32(eps).view(np.int32))
    return Instruction(
        (_code("norm"), *map(_place, (x, weight, found, bias)), rows, cols, eps_bits, 0, 0), tensors, _shares(x.numel())
    )


def lookup(table: torch.Tensor, ids: torch.Tensor, found: torch.Tensor) -> Instruction:
    """The rows of int64 ids of a dense float32 table."""
    rows, cols = table.shape
    return Instruction(
        (_code("lookup"), *map(_place, (table, ids, found)), ids.numel(), cols, rows, 0, 0, 0),
        (table, ids, found),
        _shares(found.numel()),
    )


def _place(value: torch.Tensor | None) -> int:
    return 0 if value is None else value.data_ptr()


def each(function: str, x: torch.Tensor, y: torch.Tensor | None, found: torch.Tensor) -> Instruction:
    """A function of the elements or rows of x and y, which lie as ``layout`` wants; ``found`` is dense."""
    second, sizes = x if y is None else y, layout(function, x, y, found.shape)
    assert sizes is not None
    steps = [step * one.element_size() for step, one in zip(sizes[3:], (x, second, found), strict=True)]
    words = (_code(function), *map(_place, (x, second, found)), *sizes[:3], *steps)
    return Instruction(words, (x, second, found), _shares(max(x.numel(), found.numel())))


def _shares(numbers: int) -> int:
    return max(1, numbers // SHARE)


def layout(function: str, x: torch.Tensor, y: torch.Tensor | None, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Rows, columns of x and of y, and elements from a row to the next in x, y and the answer; None if ``play`` cannot read them.

    Args:
        function: what is computed of x and y; the answer has this ``shape``.
    """
    second, whole_rows = x if y is None else y, function in ("mean", "cat")
    x_shape, y_shape = x.shape if whole_rows else shape, second.shape if whole_rows else shape
    one, other = strides(x, x_shape), strides(second, y_shape)
    if one is None or other is None or one[1] == 0 or (whole_rows and other[1] == 0):
        return None
    rows, cols, y_cols = math.prod(x_shape[:-1]), x_shape[-1], y_shape[-1] if other[1] else 1
    if one == (cols, 1) and other in (one, (0, 0)) and not whole_rows:
        rows, cols, y_cols = 1, rows * cols, rows * y_cols if other[1] else 1
    return rows, cols, y_cols, one[0], other[0], shape[-1]


def strides(value: torch.Tensor, shape: Sequence[int]) -> tuple[int, int] | None:
    """The strides of rows and columns in a value of a broadcast shape, if it has them: the last axis is that of columns.

    >>> strides(torch.empty(3), (2, 2, 3)), strides(torch.empty(2, 4, 3)[:, :2], (2, 2, 3))
    ((0, 1), None)
    """
    axes = [(size, stride) for size, stride in zip(shape, value.expand(*shape).stride(), strict=True) if size != 1]
    *leading, (_, col) = axes if shape[-1] != 1 else [*axes, (1, 1)]
    for (_, outer), (size, inner) in pairwise(leading):
        if outer != size * inner:
            return None
    return (leading[-1][1] if leading else shape[-1] * col, col) if col in (0, 1) else None


def _code(function: str) -> int:
    from autosplit.backends.rowfunctions import Function  # loads numba

    return int(Function[function.upper()])


def together(calls: Iterable[Callable[[], object]], threads: int) -> list[Callable[[], object]]:
    """The calls, in which instructions in a row are one call, of as many threads as it pays to divide them among."""
    found, waiting = list[Callable[[], object]](), list[Instruction]()
    for call in (*calls, None):
        if isinstance(call, Instruction):
            waiting.append(call)
            continue
        if waiting:
            found.append(_tape(waiting, threads))
            waiting = []
        if call is not None:
            found.append(call)
    return found


def _tape(instructions: Sequence[Instruction], threads: int) -> Callable[[], object]:
    from autosplit.backends.rowloops import play  # loads numba

    held = [one.tensors for one in instructions]
    tape = np.array([(*one.words, min(threads, one.num_shares)) for one in instructions], np.int64)
    place, lines, others = tape.ctypes.data, len(tape), int(tape[:, -1].max()) - 1

    def run(_: object = tape) -> None:  # which keeps the tape, as it keeps the tensors, as long as this call lives
        failed = play(place, lines, *(team_of(others) if others else (0, 0)), others)
        if failed >= 0:
            table, ids, _ = held[failed]
            raise IndexError(f"ids {ids.flatten().tolist()} are not all rows of a table of {len(table)}; give ids below that")

    return run
