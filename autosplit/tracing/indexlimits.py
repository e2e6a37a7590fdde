"""Integer arguments that torch refuses: indices beyond a table, divisors of 0."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autosplit.compat.torchparts import OpOverload, schema_of

Limits = tuple[int, int]
"""The least and the largest value."""

DIVIDING = ("div", "floor_divide", "remainder", "fmod")

Shape = Callable[[fx.Node], Sequence[int]]


def base_name(node: fx.Node) -> str:
    """The operator of a node without namespace and overload, '' for other nodes.

    >>> graph = fx.Graph()
    >>> base_name(graph.call_function(torch.ops.aten.add.Tensor, (1, 2)))
    'add'
    """
    return schema_of(node.target).name.rpartition("::")[2] if isinstance(node.target, OpOverload) else ""


def index_limits(node: fx.Node, shape: Shape) -> dict[fx.Node, Limits]:
    """The integer arguments of an op that torch checks, with the values that it takes."""
    args: Any = node.args
    match base_name(node):
        case "embedding" | "embedding_bag" | "_embedding_bag":
            return {args[1]: (0, shape(args[0])[0] - 1)}
        case "index_select" | "gather":
            return {args[2]: (0, _size(shape(args[0]), args[1]) - 1)}
        case "scatter" | "scatter_add" | "scatter_reduce" | "index_add" | "index_copy" | "index_fill":
            return {args[2]: (0, _size(shape(args[0]), args[1]) - 1)}
        case "take":
            size = torch.Size(shape(args[0])).numel()
            return {args[1]: (-size, size - 1)}
        case "index" | "index_put" | "_unsafe_index":
            sizes = shape(args[0])
            return {index: (-sizes[k], sizes[k] - 1) for k, index in enumerate(args[1]) if isinstance(index, fx.Node)}
        case "one_hot":
            return {args[0]: (0, args[1] - 1)} if len(args) > 1 and args[1] > 0 else {}
    return {}


def divisor(node: fx.Node) -> fx.Node | None:
    """The tensor that an op divides by; if it holds integers, torch refuses 0 in it."""
    found = node.args[1] if base_name(node) in DIVIDING and len(node.args) > 1 else None
    return found if isinstance(found, fx.Node) else None


def _size(shape: Sequence[int], dim: int) -> int:
    return shape[dim] if shape else 1
