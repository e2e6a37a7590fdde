"""Operators on a few rows, compiled: ``few_rows`` multiplies them with a weight as it is stored, ``on_rows`` is all between.

Memory bounds such a product, because it computes little for each weight. One core of an AMD EPYC that ten processes shared read
the weights of Llamas of 25 and 100 M parameters so fast (GB/s of processor time, weights of 1.5 to 49 MB):

====  ============  ==============
rows  here          ONNX Runtime
====  ============  ==============
1     29 to 31      16 to 20
2     29 to 31      15 to 18
4     20 to 28      14 to 16
8     9 to 16       12 to 13
====  ============  ==============
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from autosplit.backends.instructions import Instruction, each, product
from autosplit.tracing.programs import PREPARED

Empty = Callable[..., torch.Tensor]

_library: Any = torch.library  # its functions have no types
_operators = _library.Library("autosplit", "FRAGMENT")
_operators.define("few_rows(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
_operators.define("on_rows(str function, Tensor x, Tensor? y=None, float? number=None) -> Tensor")
FEW_ROWS, ON_ROWS = torch.ops.autosplit.few_rows.default, torch.ops.autosplit.on_rows.default


def prepare_few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, empty: Empty = torch.empty
) -> tuple[torch.Tensor, Instruction]:
    """The memory of the answer, and a function that computes it from the contents of the arguments at its call."""
    found = empty((*x.shape[:-1], len(weight)), dtype=x.dtype)
    return found, product(x, weight.detach(), None if bias is None else bias.detach(), found)


def prepare_on_rows(
    function: str, x: torch.Tensor, y: torch.Tensor | None = None, number: float | None = None, empty: Empty = torch.empty
) -> tuple[torch.Tensor, Instruction]:
    """The memory of the answer, and a function that computes it from the contents of the arguments at its call."""
    other = y if number is None else torch.tensor([number], dtype=x.dtype)
    found = empty(_shape(function, x, y), dtype=x.dtype)
    return found, each(function, x.detach(), None if other is None else other.detach(), found)


def few_rows(*arguments: Any) -> torch.Tensor:
    """The operator ``autosplit::few_rows``: ``aten.linear`` of dense float32."""
    found, run = prepare_few_rows(*arguments)
    run()
    return found


def on_rows(*arguments: Any) -> torch.Tensor:
    """The operator ``autosplit::on_rows``: a function of the elements of x, and of y or a number (``rowloops.FUNCTIONS``)."""
    found, run = prepare_on_rows(*arguments)
    run()
    return found


def _shape(function: str, x: torch.Tensor, y: torch.Tensor | None) -> tuple[int, ...]:
    if function == "mean":
        return (*x.shape[:-1], 1)
    return tuple(x.shape if y is None else np.broadcast_shapes(x.shape, y.shape))


def _shaped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """An empty answer of ``few_rows``."""
    return x.new_empty(*x.shape[:-1], len(weight))


def _shaped_on(function: str, x: torch.Tensor, y: torch.Tensor | None = None, number: float | None = None) -> torch.Tensor:
    """An empty answer of ``on_rows``."""
    return x.new_empty(_shape(function, x, y))


for _name, _call, _fake in (("few_rows", few_rows, _shaped), ("on_rows", on_rows, _shaped_on)):
    _operators.impl(_name, _call, "CPU")
    _library.register_fake(f"autosplit::{_name}", _fake, lib=_operators)
PREPARED[FEW_ROWS], PREPARED[ON_ROWS] = prepare_few_rows, prepare_on_rows
