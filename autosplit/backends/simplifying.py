"""Simplify a stage with custom operators before it is cut into pieces, as no runtime sees more of it than one piece.

Repeated ops are merged: layers repeat views of the same positions, which would be a value between pieces for each layer.
Norms get the form that ONNX Runtime fuses. Rotations of queries and keys become a part of ``autosplit::attend``. Products become
``autosplit::product``, which reads weights as they are stored, ops between them ``autosplit::on_rows``, and the head of a step
with prompts ``autosplit::read_rows``. No op computes rows that nobody reads (``firstrows``). Parts of a split and the first rows
become views, which cost nothing beside such operators.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from autosplit.backends.firstrows import ATTEND, compute_first_rows
from autosplit.backends.instructions import layout
from autosplit.backends.readrows import READ_ROWS
from autosplit.backends.rowops import LOOK_UP, NORM_ROWS, ON_ROWS, PRODUCT
from autosplit.backends.translating import GROUPED
from autosplit.compat.torchparts import OpOverload, schema_of
from autosplit.tracing.devicecopies import TO_COPY
from autosplit.tracing.flattening import is_op, is_pick
from autosplit.tracing.operators import defined_in
from autosplit.tracing.programs import Observer, arguments_of, weight
from autosplit.tracing.splitting import StageProgram, part_of
from autosplit.tracing.tensorspec import TensorSpec, empty_like_spec, fake_mode, spec_of

SAMPLE = "autosplit::sample"
"""The operator that reads the logits of the first tokens of a step, and their slots."""

aten = torch.ops.aten

VIEWS = (
    aten.view.default,
    aten.transpose.int,
    aten.permute.default,
    aten.slice.Tensor,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.alias.default,
)
"""Ops that give another view of the same memory."""


OF_TWO = {aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.mul.Tensor: "mul", aten.div.Tensor: "div"}
OF_ONE = {
    aten.neg.default: "neg",
    aten.relu.default: "relu",
    aten.sqrt.default: "sqrt",
    aten.rsqrt.default: "rsqrt",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
    aten.tanh.default: "tanh",
    aten.gelu.default: "gelu_erf",
    aten.cos.default: "cos",
    aten.sin.default: "sin",
}
"""Ops that ``on_rows`` computes, and its names for them."""


class Rotation(NamedTuple):
    """A value before its rotation, the tables of cosines and sines, and how many of its first elements are rotated."""

    source: fx.Node
    cos: fx.Node
    sin: fx.Node
    size: int


def simplified(program: StageProgram, as_stored: bool = True) -> StageProgram:
    """The stage with fewer ops and the same values. Products read weights ``as_stored``, unless the stage takes every size."""
    nodes = [node for node in program.module.graph.nodes if is_op(node) or is_pick(node)]
    inputs, outputs = ([spec.name for spec in specs] for specs in (program.inputs, program.outputs))
    module = part_of(program.module, nodes, inputs, outputs, "Stage")
    for node in module.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        roots = [source for source in node.all_input_nodes if source.target is aten.rsqrt.default]
        if roots and len(node.all_input_nodes) == 2:
            _divide(node, roots[0])
    specs = specs_of(replace(program, module=module))
    for node in list(module.graph.nodes):
        _see_as_view(node, specs, outputs)
    first: dict[tuple[str, ...], fx.Node] = {}
    for node in list(module.graph.nodes):
        if not is_op(node) or is_custom(node) or node.name in outputs:
            continue
        kept = first.setdefault((str(node.target), repr(node.args), repr(node.kwargs)), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            module.graph.erase_node(node)
    shapes = {name: spec.shape for name, spec in specs.items()}
    for node in module.graph.nodes:
        if is_op(node) and schema_of(node.target).name == ATTEND:
            _rotate_inside(node, shapes)
    module.graph.eliminate_dead_code()
    if not program.free and compute_first_rows(module, shapes, outputs):
        module.recompile()
        specs = specs_of(replace(program, module=module))
        shapes = {name: spec.shape for name, spec in specs.items()}
    if as_stored and not program.free:
        _multiply_read_rows(module, shapes)
        if _multiply_as_stored(module, specs):
            _work_on_rows(module, specs)
    module.recompile()
    return replace(program, module=module)


def is_custom(node: fx.Node) -> bool:
    """Whether it is an operator of the user or of autosplit that torch.onnx has no translation of."""
    target = node.target
    return isinstance(target, OpOverload) and schema_of(target).name not in GROUPED and bool(defined_in(target))


def specs_of(program: StageProgram) -> Mapping[str, TensorSpec]:
    """The specs of all values of a stage, from its inputs' alone."""
    found: dict[str, TensorSpec] = {}

    def see(node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[node.name] = spec_of(node.name, value)

    with fake_mode([]), torch.no_grad():
        Observer(program.module, see).run(*map(empty_like_spec, program.inputs))
    return found


def _see_as_view(node: fx.Node, specs: Mapping[str, TensorSpec], outputs: Collection[str]) -> None:
    """Make a part of a split and the first rows slices, and leave out a conversion to the same type."""
    match node:
        case fx.Node(
            args=(fx.Node(target=aten.split.Tensor, args=(fx.Node() as source, int() as size, *rest)), int() as number)
        ) if is_pick(node):
            axis: Any = rest[0] if rest else 0
            start = number * size
            node.target = aten.slice.Tensor
            node.args = (source, axis, start, min(start + size, specs[source.name].shape[axis]))
        case fx.Node(
            target=aten.index_select.default, args=(fx.Node() as source, 0, fx.Node(target=aten.arange.default, args=(count,)))
        ) if empty_like_spec(specs[source.name]).is_contiguous():
            node.target, node.args = aten.slice.Tensor, (source, 0, 0, count)
        case fx.Node(target=aten.type_as.default, args=(fx.Node() as source, _)) if (
            node.name not in outputs and source.op != "get_attr" and specs[source.name].dtype == specs[node.name].dtype
        ):
            node.replace_all_uses_with(source)


def _divide(node: fx.Node, root: fx.Node) -> None:
    """Make a product with a reciprocal root, ``x * rsqrt(y)``, a division by the root, ``x / sqrt(y)``."""
    [factor] = [source for source in node.all_input_nodes if source is not root]
    with node.graph.inserting_before(node):
        divisor = node.graph.call_function(aten.sqrt.default, root.args)
    divisor.meta = dict(root.meta)
    node.target, node.args = aten.div.Tensor, (factor, divisor)


def _multiply_as_stored(module: fx.GraphModule, specs: Mapping[str, TensorSpec]) -> bool:
    """Let ``product`` compute products of dense rows of float32 with a weight as it is stored; whether there are any."""
    found = False
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        rows, *weights = (one for one in node.args if isinstance(one, fx.Node))
        if rows.op == "get_attr" or any(one.op != "get_attr" for one in weights):
            continue
        spec = specs[rows.name]
        is_dense = all(one.is_contiguous() for one in (empty_like_spec(spec), *(weight(module, str(w.target)) for w in weights)))
        if is_dense and spec.dtype == "float32" and 0 not in spec.shape:
            node.target, found = PRODUCT, True
    return found


def _work_on_rows(module: fx.GraphModule, specs: Mapping[str, TensorSpec]) -> None:
    """Let ``on_rows`` compute the functions that it can."""
    for node in module.graph.nodes:
        spec = specs.get(node.name)
        if not is_op(node) or spec is None or not _in_rows(spec):
            continue
        if _norm_or_lookup(module, node, specs):
            continue
        for function, *values in _on_rows(node, spec):
            like = [_like(module, one, specs) for one in values[:2] if isinstance(one, fx.Node)]
            wanted = torch.int64 if function in ("add_ints", "float") else torch.float32
            if {one.dtype for one in like} == {wanted} and layout(function, like[0], [*like, None][1], spec.shape):
                node.target, node.args, node.kwargs = ON_ROWS, (function, *values), {}
                break


def _norm_or_lookup(module: fx.GraphModule, node: fx.Node, specs: Mapping[str, TensorSpec]) -> bool:
    """Make an op a norm or a lookup of rows, if it is one; whether it became that."""
    given = arguments_of(node)
    values = [one for one in given.values() if isinstance(one, fx.Node)]
    like = [_like(module, one, specs) for one in values]
    if not all(one.is_contiguous() for one in like):
        return False
    if node.target is aten.embedding.default and [one.dtype for one in like] == [torch.float32, torch.int64]:
        node.target, node.args, node.kwargs = LOOK_UP, tuple(values), {}
        return True
    if (
        node.target is aten.layer_norm.default
        and len(given["normalized_shape"]) == 1
        and {one.dtype for one in like} == {torch.float32}
    ):
        node.args = (given["input"], given.get("weight"), given.get("bias"), float(given.get("eps", 1e-5)))
        node.target, node.kwargs = NORM_ROWS, {}
        return True
    return False


def _in_rows(spec: TensorSpec) -> bool:
    """Whether a value is dense float32 or int64 in rows."""
    has_rows = spec.dtype in ("float32", "int64") and len(spec.shape) > 0 and 0 not in spec.shape
    return has_rows and empty_like_spec(spec).is_contiguous()


def _like(module: fx.GraphModule, node: fx.Node, specs: Mapping[str, TensorSpec]) -> torch.Tensor:
    """A tensor without contents that lies as the value of a node."""
    if node.op == "get_attr":
        return weight(module, str(node.target))
    spec = specs[node.name]
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.torch_dtype, device="meta")


def _on_rows(node: fx.Node, spec: TensorSpec) -> list[tuple[Any, ...]]:
    """The arguments of ``on_rows`` that give the value of an op: a function, one or two values, or one and a number."""
    last = -1, len(spec.shape) - 1
    match node:
        case fx.Node(target=aten.add.Tensor, args=(fx.Node() as x, int() as number), kwargs={**rest}) if (
            spec.dtype == "int64" and not rest and _is_given(x)
        ):
            return [("add_ints", x, None, float(number))]
        case fx.Node(target=target, args=(fx.Node() as x, fx.Node() as y), kwargs={**rest}) if target in OF_TWO and not rest:
            swapped = [(OF_TWO[target], y, x)] if target in (aten.add.Tensor, aten.mul.Tensor) else []
            return [(OF_TWO[target], x, y), *swapped]
        case fx.Node(target=target, args=(fx.Node() as x, int() | float() as number), kwargs={**rest}) if (
            target in OF_TWO and not rest
        ):
            return [(OF_TWO[target], x, None, float(number))]
        case fx.Node(target=target, args=(fx.Node() as x,), kwargs={**rest}) if target in OF_ONE and not rest:
            return [(OF_ONE[target], x)]
        case fx.Node(target=aten.gelu.default, args=(fx.Node() as x,), kwargs={"approximate": "tanh"}):
            return [("gelu", x)]
        case fx.Node(target=aten.pow.Tensor_Scalar, args=(fx.Node() as x, 2 | 3 as power)):
            return [("mul", x, x) if power == 2 else ("cube", x)]
        case fx.Node(target=aten.mean.dim, args=(fx.Node() as x, [-1], True)):
            return [("mean", x)]
        case fx.Node(target=aten.cat.default, args=([fx.Node() as x, fx.Node() as y], int() as axis)) if axis in last:
            return [("cat", x, y)]
        case fx.Node(args=(fx.Node() as x,), kwargs={"dtype": torch.float32}) if node.target is TO_COPY and _is_given(x):
            return [("float", x)]
    return []


def _is_given(node: fx.Node) -> bool:
    """Whether a value is an input of the stage, or a view of one: other integers are made by a file, and read by the next one."""
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _multiply_read_rows(module: fx.GraphModule, shapes: Mapping[str, Sequence[int]]) -> None:
    """Let the head of a step with more tokens than rows of logits multiply only the rows whose next tokens are read."""
    for node in module.graph.nodes:
        if not is_op(node) or schema_of(node.target).name != SAMPLE:
            continue
        head, slots = node.args[0], node.args[3]
        is_alone = head.target is aten.linear.default and len(head.users) == 1 and len(shapes[head.name]) == 2
        if is_alone and shapes[head.name][0] < shapes[slots.name][0]:
            head.target, head.args = READ_ROWS, (*head.args[:2], slots, *head.args[2:])


def _rotate_inside(attend: fx.Node, shapes: Mapping[str, Sequence[int]]) -> None:
    """Let an attention rotate its queries and keys itself, if both are rotated by the same tables of a row for each token."""
    q, k = (_rotation(source, shapes) for source in attend.args[:2])
    if q is None or k is None or q[1:] != k[1:]:
        return
    table = (shapes[q.source.name][2], q.size)
    if all(
        tuple(shape[-2:]) == table and math.prod(shape) == math.prod(table) for shape in (shapes[q.cos.name], shapes[q.sin.name])
    ):
        attend.args = (q.source, k.source, *attend.args[2:])
        attend.kwargs = {**attend.kwargs, "cos": q.cos, "sin": q.sin}


def _rotation(node: Any, shapes: Mapping[str, Sequence[int]]) -> Rotation | None:
    """The operand of a rotation: ``x * cos + cat(-x2, x1) * sin`` with the halves of x (Su et al., RoFormer, 2021).

    Elements behind those that are rotated may stay as they are: ``cat(rotated, rest)``.
    """
    match node:
        case fx.Node(target=aten.cat.default, args=([fx.Node() as part, fx.Node() as rest], -1 | 3)):
            found = _rotation(part, shapes)
            whole = found and _whole(found.source, rest, shapes)
            return found._replace(source=whole) if found and whole else None
        case fx.Node(
            target=aten.add.Tensor,
            args=(
                fx.Node(target=aten.mul.Tensor, args=(fx.Node() as x, fx.Node() as cos)),
                fx.Node(target=aten.mul.Tensor, args=(fx.Node() as swapped, fx.Node() as sin)),
            ),
        ):
            return Rotation(x, cos, sin, shapes[x.name][-1]) if _swapped(swapped, shapes) is x else None
    return None


def _swapped(node: fx.Node, shapes: Mapping[str, Sequence[int]]) -> fx.Node | None:
    """The value x of ``cat(-x2, x1)``."""
    match node:
        case fx.Node(
            target=aten.cat.default,
            args=([fx.Node(target=aten.neg.default, args=(fx.Node() as second,)), fx.Node() as first], -1 | 3),
        ):
            return _whole(first, second, shapes) if shapes[first.name] == shapes[second.name] else None
    return None


def _whole(first: fx.Node, second: fx.Node, shapes: Mapping[str, Sequence[int]]) -> fx.Node | None:
    """The value whose last axis two values divide: its first elements, and all others."""
    match first, second:
        case (
            fx.Node(target=aten.slice.Tensor, args=(fx.Node() as x, -1 | 3, 0, _)),
            fx.Node(target=aten.slice.Tensor, args=(y, -1 | 3, start, _)),
        ):
            sizes = [shapes[node.name][-1] for node in (first, second, x)]
            return x if x is y and start == sizes[0] and sizes[0] + sizes[1] == sizes[2] else None
    return None
