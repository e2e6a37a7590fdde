"""Products of the rows of a step whose next tokens are read: the operator ``autosplit::read_rows``.

The head of a step with a prompt gets a row for each sequence that it may hold, and mostly one of them gives a next token. The
first ones do, each of another slot::

    slots        3  1  3  3  3  3  1  1       rows of slots 3 and 1 are read; a third row would be of slot 3 again
    rows         a  b  c  d                   product of a and b; c and d get that of b
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autosplit.backends.instructions import Empty, product
from autosplit.tracing.programs import PREPARED

_library: Any = torch.library  # its functions have no types
_operators = _library.Library("autosplit", "FRAGMENT")
_operators.define("read_rows(Tensor x, Tensor weight, Tensor slots, Tensor? bias=None) -> Tensor")
READ_ROWS = torch.ops.autosplit.read_rows.default


def num_read(slots: Sequence[int]) -> int:
    """How many of the first tokens of a step may give a next one: those before a slot that stands there again, or slot 0.

    It is at least 1.

    >>> num_read([3, 1, 3, 3]), num_read([2, 0, 1]), num_read([0, 0]), num_read([2])
    (2, 1, 1, 1)
    """
    known: set[int] = set()
    for row, slot in enumerate(slots):
        if row and (slot == 0 or slot in known):
            return row
        known.add(slot)
    return len(slots)


def prepare_read_rows(
    x: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None = None, empty: Empty = torch.empty
) -> tuple[torch.Tensor, Callable[[], None]]:
    """The memory of ``aten.linear`` of x ``[R, size]``, and a function that computes the rows that are read.

    The others get the answer of the last of them.
    """
    found = empty((len(x), len(weight)), dtype=x.dtype)
    products = [product(x[:count], weight.detach(), bias, found[:count]) for count in range(1, len(x) + 1)]

    def run() -> None:
        count = num_read(slots[: len(x)].tolist())
        products[count - 1]()
        found[count:] = found[count - 1]

    return found, run


def _read_rows(x: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    found, run = prepare_read_rows(x, weight, slots, bias)
    run()
    return found


def _shaped(x: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """An empty answer of the operator."""
    return x.new_empty(len(x), len(weight))


_operators.impl("read_rows", _read_rows, "CPU")
_library.register_fake("autosplit::read_rows", _shaped, lib=_operators)
PREPARED[READ_ROWS] = prepare_read_rows
