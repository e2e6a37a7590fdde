"""The variant of a step without a source: what is computed of sources alone becomes zeros, so that no encoder runs in it.

Ops keep their names, and in the graph the values and weights that they read, so that a plan of one variant fits all of them. The
program reads neither.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autosplit.tracing.capturing import Traced, graph_of
from autosplit.tracing.flattening import is_op, is_pick
from autosplit.tracing.programs import observed

ZEROS = torch.ops.aten.full.default


def without_source(traced: Traced, inputs: Collection[str]) -> Traced:
    """The trace with zeros in place of what is computed of these inputs and weights alone; ops of several outputs stay.

    Args:
        traced: a step with a source of one row, which belongs to no sequence.
        inputs: the inputs of the source.
    """
    graph, copies, silent = fx.Graph(), dict[fx.Node, fx.Node](), _silent(traced.program.graph, inputs)
    for node in traced.program.graph.nodes:
        if node not in silent:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        spec = traced.specs[node.name]
        options: dict[str, Any] = {"dtype": spec.torch_dtype}
        copies[node] = graph.create_node("call_function", ZEROS, (list(spec.shape), 0), options, name=node.name)
        copies[node].meta = {**node.meta}
    program = fx.GraphModule(traced.program, graph, class_name=type(traced.program).__name__)
    _, specs = observed(program, traced.example_inputs, computed=False)
    found = graph_of(traced.graph.name, program, specs)
    ops = tuple(replace(op, inputs=was.inputs, weights=was.weights) for op, was in zip(found.ops, traced.graph.ops, strict=True))
    return replace(traced, program=program, specs=specs, graph=replace(found, ops=ops, weights=traced.graph.weights).verify())


def _silent(graph: fx.Graph, inputs: Collection[str]) -> set[fx.Node]:
    """The ops that read these inputs and no others, and those of weights that they alone read."""
    found, reads = set[fx.Node](), dict[fx.Node, set[bool]]()
    for node in graph.nodes:
        read = {kind for one in node.all_input_nodes for kind in reads[one]}
        reads[node] = {node.name in inputs} if node.op == "placeholder" else read
    for node in reversed(graph.nodes):
        alone = reads[node] == {True} or (not reads[node] and all(one in found for one in node.users))
        if alone and is_op(node) and not any(map(is_pick, node.users)):
            found.add(node)
    return found
