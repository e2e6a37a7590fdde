"""bfloat16 for torch's own backends: ops that multiply matrices compute in bf16 (and accumulate in f32), all others in f32.

The stage's graph is rewritten, so that its weights are converted once. OpenVINO lowers by itself.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autosplit.tracing.programs import Observer
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
"""Operators that compute in bf16, as graphs name them."""


def in_precision(program: StageProgram, precision: Precision) -> StageProgram:
    """The stage as torch's own backends compute it in ``precision``."""
    return lower_to_bf16(program) if precision == "bf16" else program


def lower_to_bf16(program: StageProgram) -> StageProgram:
    """Compute matrix products, convolutions and attention of a stage in bf16; inputs and outputs keep their dtypes.

    Ops keep their names. The ``meta["op"]`` of a cast names the first op that needs it.
    """
    source = program.module
    weights: dict[str, torch.Tensor] = {}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    halves: dict[fx.Node, fx.Node] = {}
    owner = next(iter(source.graph.nodes))

    def half(node: fx.Node) -> fx.Node:
        """The node in bf16."""
        if node not in halves:
            weight = node.op == "get_attr"
            halves[node] = (
                _half_weight(graph, node, weights, program) if weight else _cast(graph, copies[node], torch.bfloat16, owner)
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


def _half_weight(graph: fx.Graph, node: fx.Node, weights: dict[str, torch.Tensor], program: StageProgram) -> fx.Node:
    name = f"{node.target}_bf16"
    weights[name] = program.weights[str(node.target)].detach().to(torch.bfloat16)
    return graph.get_attr(name)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, owner: fx.Node) -> fx.Node:
    cast = graph.create_node(
        "call_function", torch.ops.aten._to_copy.default, (node,), {"dtype": dtype}, name=f"{owner.name}_cast"
    )
    cast.meta["op"] = owner.name
    return cast


def _float_nodes(program: StageProgram) -> set[fx.Node]:
    """The nodes whose value is an f32 tensor, found by a pass on zeros."""
    found: set[fx.Node] = set()

    def see(node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            found.add(node)

    with torch.inference_mode():
        Observer(program.module, see).run(*map(zeros, program.inputs))
    return found
