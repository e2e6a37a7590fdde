"""Steps that compute the first rows alone where no op reads the others.

The head of a step reads a row for each sequence that it may hold, and they stand first (``generating.sequences``). So the last
layer needs keys and values of all tokens of a prompt, and all else of the first rows alone::

    hidden [1, 128, size] -- k, v --> attend -- [1, 16, ..] --> product, add, norm, products, add --> head [16, size]
        first 16 rows ----- q -----/

Going from the last op to the first, an op whose readers all take its first rows along one axis computes no others. Where the op
before it is read whole, its first rows become a slice.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from autosplit.compat.torchparts import OpOverload, schema_of
from autosplit.tracing.devicecopies import TO_COPY
from autosplit.tracing.flattening import is_op
from autosplit.tracing.programs import arguments_of, weight

aten = torch.ops.aten

Shapes = Mapping[str, Sequence[int]]
First = Callable[["fx.Node", "Rows", "fx.Node"], fx.Node]

ATTEND = "autosplit::attend"
"""The operator of attention, whose queries may be those of the first keys; it can rotate both itself."""

SLICE = aten.slice.Tensor
PRODUCTS: Mapping[Any, int] = {aten.linear.default: 0, aten.addmm.default: 1, aten.mm.default: 0}
"""Products of rows with a matrix, and the place of the rows among their arguments."""

OF_ELEMENTS = (aten.alias.default, aten.clone.default, TO_COPY)
"""Further ops whose elements follow from those at the same places, beside those that torch calls pointwise."""


class Rows(NamedTuple):
    """The first ``num_rows`` places along an axis of a value."""

    axis: int
    num_rows: int


def compute_first_rows(module: fx.GraphModule, shapes: Shapes, outputs: Collection[str]) -> bool:
    """Let the ops of a stage compute no rows that nobody reads; whether there were any.

    Args:
        module: the stage, which changes in place; its ops keep their names.
        shapes: of all values; an op that reads a value without a shape computes all rows.
        outputs: the values that others read whole.
    """
    constants = {node.name: weight(module, str(node.target)).shape for node in module.graph.find_nodes(op="get_attr")}
    shapes, needed = {**shapes, **constants}, dict[fx.Node, Rows]()
    for node in reversed(module.graph.nodes):
        wanted = {_wanted(reader, node, needed.get(reader), shapes) for reader in node.users}
        rows = wanted.pop() if len(wanted) == 1 and is_op(node) and node.name not in outputs else None
        if rows is not None and _axes(node, rows.axis, shapes) is not None:
            needed[node] = rows
    slices: dict[tuple[fx.Node, Rows], fx.Node] = {}

    def first(value: fx.Node, rows: Rows, reader: fx.Node) -> fx.Node:
        """The first rows of a value, for this op and those behind it."""
        if needed.get(value) == rows:
            return value
        if (value, rows) not in slices:
            with module.graph.inserting_before(reader):
                slices[value, rows] = module.graph.call_function(SLICE, (value, rows.axis, 0, rows.num_rows))
            slices[value, rows].meta = dict(value.meta)
        return slices[value, rows]

    for node, rows in reversed(needed.items()):
        _shorten(node, rows, _axes(node, rows.axis, shapes) or {}, first)
    for node in list(module.graph.nodes):
        source: Any = node.args[0] if node.target is SLICE else None
        if source in needed and _sliced(node, shapes) == needed[source]:
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
    return bool(needed)


def _wanted(reader: fx.Node, value: fx.Node, needed: Rows | None, shapes: Shapes) -> Rows | None:
    """The rows of a value that an op reads to compute those that are needed of it; None for all."""
    if reader.target is SLICE and (rows := _sliced(reader, shapes)) is not None:
        return rows
    axis = None if needed is None else (_axes(reader, needed.axis, shapes) or {}).get(value)
    return None if needed is None or axis is None else Rows(axis, needed.num_rows)


def _sliced(node: fx.Node, shapes: Shapes) -> Rows | None:
    """The first rows that a slice takes, if it leaves others out."""
    match node.args:
        case (fx.Node() as source, int() as axis, 0, int() as end) if source.name in shapes:
            shape = shapes[source.name]
            return Rows(axis % len(shape), end) if 0 < end < shape[axis] else None
    return None


def _shorten(node: fx.Node, rows: Rows, axes: Mapping[fx.Node, int], first: First) -> None:
    """Let an op compute its first rows of those of its operands."""

    def operand(value: fx.Node) -> fx.Node:
        return first(value, Rows(axes[value], rows.num_rows), node) if value in axes else value

    args: Any = fx.map_arg(node.args, operand)
    node.args, node.kwargs = args, fx.map_arg(node.kwargs, operand)
    if node.target is aten.view.default:
        sizes = list(args[1])
        sizes[rows.axis] = rows.num_rows
        node.args = (args[0], sizes)
    elif isinstance(node.target, OpOverload) and schema_of(node.target).name == ATTEND:
        own = [first(one, Rows(0, rows.num_rows), node) for one in args[5:7]]
        node.args = (*args[:5], *own, *args[7:])
        node.kwargs = {**node.kwargs, "kept_slots": args[5], "kept_positions": args[6]}


def _axes(node: fx.Node, axis: int, shapes: Shapes) -> dict[fx.Node, int] | None:  # noqa: C901 - a case for each op
    """The operands of which the first rows of an op along an axis need first rows only, and along which axis.

    None if the op mixes rows, or is not known to keep them apart.
    """
    if any(one.name not in shapes for one in (node, *node.all_input_nodes)):
        return None
    shape, args = shapes[node.name], cast("tuple[Any, ...]", node.args)
    match cast(Any, (node.target, *args)):
        case (target, *_) if target in PRODUCTS:
            last = len(shape) - 1
            rows, others = args[PRODUCTS[target]], [one for one in args if one is not args[PRODUCTS[target]]]
            has_row = target is not aten.addmm.default or len(shapes[args[0].name]) == 1  # for a bias
            return {rows: axis} if axis < last and has_row and len(others) == len(args) - 1 else None
        case (aten.layer_norm.default, fx.Node() as x, sizes, *_):
            return {x: axis} if axis < len(shape) - len(sizes) else None
        case (aten.mean.dim, fx.Node() as x, [-1], True):
            return {x: axis} if axis < len(shape) - 1 else None
        case (aten.view.default, fx.Node() as x, _):
            before, given = math.prod(shape[:axis]), shapes[x.name]
            same = [k for k, size in enumerate(given) if size == shape[axis] and math.prod(given[:k]) == before]
            return {x: same[0]} if same else None
        case (aten.transpose.int, fx.Node() as x, int() as one, int() as other):
            one, other = one % len(shape), other % len(shape)
            return {x: {one: other, other: one}.get(axis, axis)}
        case (aten.permute.default, fx.Node() as x, order):
            return {x: order[axis] % len(shape)}
        case (aten.unsqueeze.default, fx.Node() as x, int() as new):
            new %= len(shape)
            return None if axis == new else {x: axis - (axis > new)}
        case (aten.squeeze.dim, fx.Node() as x, int() as gone):
            gone %= len(shapes[x.name])
            return {x: axis + (axis >= gone)} if shapes[x.name][gone] == 1 else None
        case (aten.slice.Tensor, fx.Node() as x, int() as cut, *_):
            return {x: axis} if axis != cut % len(shape) else None
        case (aten.cat.default, [*parts], int() as joined):
            return dict.fromkeys(parts, axis) if axis != joined % len(shape) else None
    if not isinstance(node.target, OpOverload):
        return None
    if schema_of(node.target).name == ATTEND:
        has_own = arguments_of(node).get("kept_slots") is None
        return {args[0]: 2} if axis == 1 and has_own and args[0] not in args[1:3] else None
    if node.target in OF_ELEMENTS or torch.Tag.pointwise in node.target.tags:
        return _of_elements(node, axis, shapes)
    return None


def _of_elements(node: fx.Node, axis: int, shapes: Shapes) -> dict[fx.Node, int] | None:
    """As ``_axes`` of an op on elements, whose operands are broadcast."""
    own = {one: axis - (len(shapes[node.name]) - len(shapes[one.name])) for one in node.all_input_nodes}
    return {one: place for one, place in own.items() if place >= 0 and shapes[one.name][place] != 1}
