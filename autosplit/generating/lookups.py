"""Look up the rows of tokens at the host, where the head of a model multiplies by the table of its embeddings.

Such a table is read at both ends of the model, so that the first and the last stage would hold it, and a runtime that packs it
for the product would hold it twice in one stage. The host has the model, and takes a row for each token of a step::

    ids [N]  -- host: table[ids] -->  embedded [N, size]  -->  first stage
"""

from dataclasses import replace

import torch
from torch import fx

from autosplit.compat.torchparts import pytree
from autosplit.tracing.capturing import Traced, graph_of
from autosplit.tracing.flattening import is_op
from autosplit.tracing.programs import observed, weight

aten = torch.ops.aten

EMBEDDED = "embedded"
"""The input of a step that holds a row for each token."""


def table_of(traced: Traced) -> torch.Tensor | None:
    """The table in which a step looks up its ids, where another op reads it, too; None if there is none."""
    found = _lookup(traced)
    return None if found is None else weight(traced.program, str(found.all_input_nodes[0].target)).detach()


def without_lookup(traced: Traced) -> Traced:
    """The step with a further input ``EMBEDDED``; it stays as it is if ``table_of`` finds nothing.

    The op keeps its name, so that maps of modules hold, and gives the rows in the shape that it had.
    """
    lookup, table = _lookup(traced), table_of(traced)
    if lookup is None or table is None:
        return traced
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in traced.program.graph.nodes:
        if node is not lookup:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.name == traced.graph.inputs[-1]:
                embedded = graph.placeholder(EMBEDDED)
            continue
        shape = list(traced.specs[node.name].shape)
        copies[node] = graph.create_node("call_function", aten.view.default, (embedded, shape), name=node.name)
        copies[node].meta = {**node.meta}
    graph.eliminate_dead_code()  # views of ids
    program = fx.GraphModule(traced.program, graph, class_name=type(traced.program).__name__)
    given = (*traced.example_inputs, table.index_select(0, traced.example_inputs[0]))
    _, specs = observed(program, given, computed=False)
    return replace(
        traced,
        graph=graph_of(traced.graph.name, program, specs),
        program=program,
        in_spec=pytree.tree_flatten((given, {}))[1],
        example_inputs=given,
        specs=specs,
        in_leaves=(*traced.in_leaves, EMBEDDED),
        signature=None,
    )


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
