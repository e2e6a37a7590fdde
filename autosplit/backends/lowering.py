"""Half precision for torch's own backends: ops that multiply matrices compute in bf16 or f16 (and accumulate in f32), all others
in f32.

The stage's graph is rewritten, so that its weights are converted once. OpenVINO lowers by itself.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from autosplit.tracing.programs import observed
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import zeros
from autosplit.values.samples import Precision

LOWERED = frozenset(
    f"aten.{name}"
    for name in (
        "linear.default",
        "matmul.default",
        "mm.default",
        "bmm.default",
        "addmm.default",
        "baddbmm.default",
        "conv1d.default",
        "conv2d.default",
        "conv2d.padding",
        "conv3d.default",
        "conv_transpose2d.input",
        "convolution.default",
        "scaled_dot_product_attention.default",
    )
)
"""Operators that compute in half precision, as graphs name them."""

HALVES: Mapping[Precision, torch.dtype] = {"bf16": torch.bfloat16, "f16": torch.float16}
"""The precisions that rewrite the graph, with their dtypes."""


def in_precision(program: StageProgram, precision: Precision) -> StageProgram:
    """The stage as torch's own backends compute it in ``precision``."""
    return lowered(program, precision) if precision in HALVES else program


def beside(program: StageProgram, precision: Precision) -> StageProgram:
    """The stage as torch computes it on a core in a precision, for the error that is natural. For tf32 that is f16, which has as
    many bits of mantissa."""
    return lowered(program, "f16" if precision == "tf32" else precision)


def lowered(program: StageProgram, precision: Precision) -> StageProgram:
    """Compute matrix products, convolutions and attention of a stage in bf16 or f16; inputs and outputs keep their dtypes.

    Ops keep their names. The ``meta["op"]`` of a cast names the first op that needs it.
    """
    source, dtype = program.module, HALVES[precision]
    weights: dict[str, torch.Tensor] = {}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    halves: dict[fx.Node, fx.Node] = {}
    owner = next(iter(source.graph.nodes))

    def half(node: fx.Node) -> fx.Node:
        """The node in half precision."""
        if node not in halves:
            weight = node.op == "get_attr"
            halves[node] = (
                _half_weight(graph, node, weights, program, precision) if weight else _cast(graph, copies[node], dtype, owner)
            )
        return halves[node]

    is_float = _float_nodes(program)
    for node in source.graph.nodes:
        if str(node.target) in LOWERED and node in is_float:
            owner = node
            called = graph.node_copy(node, lambda argument: half(argument) if argument in is_float else copies[argument])
            copies[node] = _cast(graph, called, torch.float32, owner)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                weights[str(node.target)] = program.weights[str(node.target)]
    graph.eliminate_dead_code()
    kept = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    module = fx.GraphModule({name: weight for name, weight in weights.items() if name in kept}, graph, class_name="Lowered")
    return replace(program, module=module)


def _half_weight(
    graph: fx.Graph, node: fx.Node, weights: dict[str, torch.Tensor], program: StageProgram, precision: Precision
) -> fx.Node:
    name = f"{node.target}_{precision}"
    weights[name] = program.weights[str(node.target)].detach().to(HALVES[precision])
    return graph.get_attr(name)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, owner: fx.Node) -> fx.Node:
    cast = graph.create_node(
        "call_function", torch.ops.aten._to_copy.default, (node,), {"dtype": dtype}, name=f"{owner.name}_cast"
    )
    cast.meta["op"] = owner.name
    return cast


def _float_nodes(program: StageProgram) -> set[fx.Node]:
    """The nodes whose value is an f32 tensor."""
    _, specs = observed(program.module, list(map(zeros, program.inputs)), computed=False)
    dtypes = {name: spec.torch_dtype for name, spec in specs.items()}
    nodes = program.module.graph.nodes
    dtypes |= {node.name: program.weights[str(node.target)].dtype for node in nodes if node.op == "get_attr"}
    return {node for node in nodes if dtypes.get(node.name) == torch.float32}
