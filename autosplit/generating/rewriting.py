"""Steps with some ops replaced: rows that the host looks up, and zeros where no encoder runs.

The head of many models multiplies by the table of its embeddings. Such a table is read at both ends of the model, so that the
first and the last stage would hold it, and a runtime that packs it for the product would hold it twice in one stage. The host has
the model, and takes a row for each token of a step::

    ids [N]  -- host: table[ids] -->  embedded [N, size]  -->  first stage

In a step without a source, values computed from sources alone become zeros. Ops keep their names, so that a plan of one variant
fits all of them, and maps of modules hold.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autosplit.compat.torchparts import pytree
from autosplit.tracing.capturing import Traced, graph_of
from autosplit.tracing.flattening import is_op, is_pick
from autosplit.tracing.programs import observed, weight

aten = torch.ops.aten

EMBEDDED = "embedded"
"""The input of a step that holds a row for each token."""


def table_of(traced: Traced) -> str:
    """The name of the table in which a step looks up its ids, where another op reads it, too; '' if there is none."""
    found = _lookup(traced)
    return "" if found is None else str(found.all_input_nodes[0].target)


def without_lookup(traced: Traced) -> Traced:
    """The step with a further input ``EMBEDDED``, whose rows it views; it stays as it is if ``table_of`` finds nothing."""
    lookup = _lookup(traced)
    if lookup is None:
        return traced
    table = weight(traced.program, table_of(traced)).detach()
    nodes, node = {lookup}, lookup.all_input_nodes[1]
    while is_op(node) and nodes.issuperset(node.users):  # views of ids that nobody else reads
        nodes.add(node)
        node = node.all_input_nodes[0]

    def view(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
        if node is not lookup:
            return None
        last = next(one for one in reversed(graph.nodes) if one.op == "placeholder")
        with graph.inserting_after(last):
            embedded = graph.placeholder(EMBEDDED)
        shape = list(traced.specs[node.name].shape)
        return graph.create_node("call_function", aten.view.default, (embedded, shape), name=node.name)

    given = (*traced.example_inputs, table.index_select(0, traced.example_inputs[0]))
    found = _with_others(replace(traced, example_inputs=given), nodes, view)
    places = (*traced.in_leaves, EMBEDDED)
    return replace(found, in_spec=pytree.tree_flatten((given, {}))[1], in_leaves=places, signature=None)


def without_source(traced: Traced, inputs: Collection[str]) -> Traced:
    """The trace with zeros in place of values computed from these inputs and weights alone; ops of several outputs stay.

    In the graph, ops keep the values and weights that they read. The program reads neither.

    Args:
        traced: a step with a source of one row, which belongs to no sequence.
        inputs: the inputs of the source.
    """

    def zeros(graph: fx.Graph, node: fx.Node) -> fx.Node:
        spec = traced.specs[node.name]
        options: dict[str, Any] = {"dtype": spec.torch_dtype}
        return graph.create_node("call_function", aten.full.default, (list(spec.shape), 0), options, name=node.name)

    found = _with_others(traced, _silent(traced.program.graph, inputs), zeros)
    pairs = zip(found.graph.ops, traced.graph.ops, strict=True)
    ops = tuple(replace(op, inputs=was.inputs, weights=was.weights) for op, was in pairs)
    return replace(found, graph=replace(found.graph, ops=ops, weights=traced.graph.weights).verify())


def _with_others(traced: Traced, nodes: Collection[fx.Node], make: Callable[[fx.Graph, fx.Node], fx.Node | None]) -> Traced:
    """The trace with the nodes that ``make`` adds in place of each of these nodes; None leaves one out."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in traced.program.graph.nodes:
        if node not in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        elif (made := make(graph, node)) is not None:
            copies[node] = made
            made.meta = {**node.meta}
    program = fx.GraphModule(traced.program, graph, class_name=type(traced.program).__name__)
    _, specs = observed(program, traced.example_inputs, computed=False)
    return replace(traced, graph=graph_of(traced.graph.name, program, specs), program=program, specs=specs)


def _lookup(traced: Traced) -> fx.Node | None:
    """The one op that looks up the ids of a step in a table that another op reads, too."""
    nodes, [ids, *_] = list(filter(is_op, traced.program.graph.nodes)), traced.graph.inputs
    readers = [(node, source.target) for node in nodes for source in node.all_input_nodes if source.op == "get_attr"]
    found = [one for one in nodes if one.target is aten.embedding.default and _viewed(one.all_input_nodes[1]).name == ids]
    tied = [node for node in found if any(one is not node and name == node.all_input_nodes[0].target for one, name in readers)]
    return tied[0] if len(tied) == len(found) == 1 else None


def _viewed(node: fx.Node) -> fx.Node:
    """The value of which views are taken."""
    while node.target in (aten.unsqueeze.default, aten.view.default):
        node = node.all_input_nodes[0]
    return node


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
