"""Products of the rows of a step whose next tokens are read: the operator ``autosplit::read_rows``.

The head of a step with a prompt gets a row for each sequence that it may hold, and mostly one of them gives a next token. The
first ones do, each of another slot::

    slots        3  1  3  3  3  3  1  1       rows of slots 3 and 1 are read; a third row would be of slot 3 again
    rows         a  b  c  d                   product of a and b; c and d get that of b
"""

from collections.abc import Sequence
from typing import Any

import torch

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


def read_rows(x: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The operator: ``aten.linear`` of the rows ``[R, size]`` that are read; the others get the answer of the last of them."""
    count = num_read(slots[: len(x)].tolist())
    return torch.nn.functional.linear(x[:count], weight, bias)[torch.arange(len(x)).clamp(max=count - 1)]


def to_onnx(x: Any, weight: Any, slots: Any, bias: Any = None) -> Any:
    """The operator in ONNX. ``ArgMax`` gives the first of several places."""
    from onnxscript import opset18 as op

    number = x.shape[0]
    start, one, most = (op.Constant(value_ints=[value]) for value in (0, 1, number))
    first = op.Slice(slots, start, most, start)
    order = op.Range(op.Constant(value_int=0), op.Constant(value_int=number), op.Constant(value_int=1))
    is_earlier = op.Less(op.Unsqueeze(order, start), op.Unsqueeze(order, one))
    is_same = op.And(is_earlier, op.Equal(op.Unsqueeze(first, start), op.Unsqueeze(first, one)))
    again = op.ReduceMax(op.Cast(is_same, to=6), one, keepdims=0)
    ends = op.Max(again, op.Cast(op.Equal(first, start), to=6))
    ends = op.Concat(op.Slice(ends, one, most, start), op.Cast(one, to=6), axis=0)
    count = op.Add(op.ArgMax(ends, axis=0, keepdims=1), one)
    rows = op.Slice(x, start, count, start)
    made = op.Gemm(rows, weight, transB=1) if bias is None else op.Gemm(rows, weight, bias, transB=1)
    return op.Gather(made, op.Min(order, op.Sub(count, one)), axis=0)


def _shaped(x: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """An empty answer of the operator."""
    return x.new_empty(len(x), len(weight))


_operators.impl("read_rows", read_rows, "CPU")
_library.register_fake("autosplit::read_rows", _shaped, lib=_operators)
