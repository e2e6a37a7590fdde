"""Operators on rows, compiled: ``product`` multiplies them with a weight as it is stored, ``on_rows`` is all between.

One core of an Intel Xeon (Cascade Lake, AVX-512), on which others worked, too, computed products so fast. Memory bounds few rows:
weights of 1.6 to 98 MB, GB/s of processor time, best of six passes over 40 to 98 MB. The processor bounds many rows: weights of 1
to 25 MB, GFLOP/s, best of six passes over 40 MB; ONNX Runtime has a packed copy of the weights.

====  ====  ============  ============  ============
rows  unit  here          ONNX Runtime  OpenVINO
====  ====  ============  ============  ============
1     GB/s  11.7 to 12.6  9.2 to 11.3   7.6 to 11.2
2     GB/s  11.3 to 12.6  8.8 to 11.2   7.2 to 10.7
4     GB/s  10.6 to 12.1  8.3 to 10.6   6.8 to 9.9
8     GB/s  8.5 to 11.4   7.0 to 8.2    5.8 to 7.8
16    GF/s  52 to 62      51 to 61      -
32    GF/s  68 to 77      72 to 84      -
128   GF/s  104 to 118    93 to 113     -
====  ====  ============  ============  ============

With eight rows those of 1,024 or 2,048 elements are the slowest: lines of all rows share a place in the nearest cache.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from autosplit.backends.instructions import Empty, Instruction, each, lookup, norm, product
from autosplit.compat.torchparts import schema_of
from autosplit.tracing.programs import PREPARED

_library: Any = torch.library  # its functions have no types
_operators = _library.Library("autosplit", "FRAGMENT")
# aten.linear of dense float32
_operators.define("product(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
# aten.layer_norm over the last axis
_operators.define("norm_rows(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor")
# aten.embedding of int64 ids; an id outside the table raises IndexError
_operators.define("look_up(Tensor table, Tensor ids) -> Tensor")
# a function of the elements or rows of x, and of y or a number (``rowfunctions.Function``)
_operators.define("on_rows(str function, Tensor x, Tensor? y=None, float? number=None) -> Tensor")
PRODUCT, ON_ROWS = torch.ops.autosplit.product.default, torch.ops.autosplit.on_rows.default
NORM_ROWS, LOOK_UP = torch.ops.autosplit.norm_rows.default, torch.ops.autosplit.look_up.default


def prepare_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, empty: Empty = torch.empty
) -> tuple[torch.Tensor, Instruction]:
    """The memory of the answer, and a function that computes it from the contents of the arguments at its call."""
    found = empty((*x.shape[:-1], len(weight)), dtype=x.dtype)
    return found, product(x, weight.detach(), None if bias is None else bias.detach(), found)


def prepare_norm_rows(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, empty: Empty = torch.empty
) -> tuple[torch.Tensor, Instruction]:
    """The memory of the answer, and a function that computes it from the contents of the arguments at its call."""
    found = empty(x.shape, dtype=x.dtype)
    scale, shift = (None if one is None else one.detach() for one in (weight, bias))
    return found, norm(x, scale, shift, eps, found)


def prepare_look_up(table: torch.Tensor, ids: torch.Tensor, empty: Empty = torch.empty) -> tuple[torch.Tensor, Instruction]:
    """The memory of the answer, and a function that computes it from the contents of the arguments at its call."""
    found = empty((*ids.shape, table.shape[1]), dtype=table.dtype)
    return found, lookup(table.detach(), ids, found)


def prepare_on_rows(
    function: str, x: torch.Tensor, y: torch.Tensor | None = None, number: float | None = None, empty: Empty = torch.empty
) -> tuple[torch.Tensor, Instruction]:
    """The memory of the answer, and a function that computes it from the contents of the arguments at its call."""
    other = y if number is None else torch.tensor([number], dtype=x.dtype)
    found = empty(_shape(function, x, y), dtype=_dtype(function, x))
    return found, each(function, x.detach(), None if other is None else other.detach(), found)


def _shape(function: str, x: torch.Tensor, y: torch.Tensor | None) -> tuple[int, ...]:
    if function in ("mean", "cat"):
        return (*x.shape[:-1], 1 if y is None else x.shape[-1] + y.shape[-1])
    return tuple(x.shape if y is None else np.broadcast_shapes(x.shape, y.shape))


def _dtype(function: str, x: torch.Tensor) -> torch.dtype:
    return torch.float32 if function == "float" else x.dtype


def _shaped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """An empty answer of ``product``."""
    return x.new_empty(*x.shape[:-1], len(weight))


def _shaped_on(function: str, x: torch.Tensor, y: torch.Tensor | None = None, number: float | None = None) -> torch.Tensor:
    """An empty answer of ``on_rows``."""
    return x.new_empty(_shape(function, x, y), dtype=_dtype(function, x))


def _shaped_norm(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """An empty answer of ``norm_rows``."""
    return x.new_empty(x.shape)


def _shaped_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """An empty answer of ``look_up``."""
    return table.new_empty(*ids.shape, table.shape[1])


def _at_once(prepare: Callable[..., tuple[torch.Tensor, Instruction]]) -> Callable[..., torch.Tensor]:
    """The operator that is prepared and computed in one call."""

    def call(*arguments: Any) -> torch.Tensor:
        found, run = prepare(*arguments)
        run()
        return found

    return call


for _operator, _prepare, _fake in (
    (PRODUCT, prepare_product, _shaped),
    (ON_ROWS, prepare_on_rows, _shaped_on),
    (NORM_ROWS, prepare_norm_rows, _shaped_norm),
    (LOOK_UP, prepare_look_up, _shaped_rows),
):
    _name = schema_of(_operator).name
    _operators.impl(_name, _at_once(_prepare), "CPU")
    _library.register_fake(_name, _fake, lib=_operators)
    PREPARED[_operator] = _prepare
