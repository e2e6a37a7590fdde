"""An exported program that decomposes single ops, for a converter that lacks a few.

``ExportedProgram.run_decompositions`` traces the whole program again, through autograd and functionalization. A stage is flat and
functional already, so here only the ops in the table are traced, each alone.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from autosplit.compat.torchparts import OpOverload, detect_fake_mode, schema_of
from autosplit.errors import BackendError

Table = Mapping[Any, Callable[..., Any]]


class FlatProgram(ExportedProgram):
    """A functional program without control flow; ``run_decompositions`` changes it in place."""

    @staticmethod
    def export(
        module: torch.nn.Module, examples: Sequence[torch.Tensor], free: Sequence[Collection[int]] | None = None
    ) -> "FlatProgram":
        """Export a flat functional module for the shapes of its examples, or for any size along the axes in ``free``.

        Raises: BackendError: an axis that must be free got one size.
        """
        dims: Any = None if free is None else (tuple(dict.fromkeys(axes, Dim.AUTO) for axes in free),)
        found = torch.export.export(module, tuple(examples), dynamic_shapes=dims, strict=False)
        for node, axes in zip(found.graph.find_nodes(op="placeholder")[-len(examples) :], free or [], strict=False):
            for axis in axes:
                if isinstance(node.meta["val"].shape[axis], int):
                    raise BackendError(f"axis {axis} of '{node.name}' has one size in the exported program")
        return FlatProgram(
            found.graph_module,
            found.graph,
            found.graph_signature,
            found.state_dict,
            found.range_constraints,
            found.module_call_graph,
            found.example_inputs,
            found.constants,
            verifiers=found.verifiers,
        )

    def run_decompositions(
        self, decomp_table: dict[Any, Callable[..., Any]] | None = None, decompose_custom_triton_ops: bool = False
    ) -> ExportedProgram:
        """Decompose the ops of the table, by default torch's table."""
        table = decomp_table if decomp_table is not None else torch.export.default_decompositions()
        for node in list(self.graph.nodes):
            if node.target in table and not _decompose(node, table):
                whole: ExportedProgram = super().run_decompositions(decomp_table)
                return whole
        self.graph_module.recompile()
        return self


def _decompose(node: fx.Node, table: Table) -> bool:
    """Replace an op by its decomposition, unless that writes to a tensor or holds a constant; return whether it was replaced."""
    sources = node.all_input_nodes
    target: Callable[..., Any] = node.target  # type: ignore[assignment]

    def call(*values: Any) -> Any:
        by_node = dict(zip(sources, values, strict=True))
        return target(*fx.map_arg(node.args, by_node.get), **fx.map_arg(node.kwargs, by_node.get))

    # Tensors that a decomposition creates must be fake in the same mode as its inputs.
    with detect_fake_mode(node.meta["val"]) or nullcontext():
        traced = make_fx(call, decomposition_table=dict(table))(*[source.meta["val"] for source in sources]).graph
    calls = [inner for inner in traced.nodes if inner.op == "call_function"]
    written = any(schema_of(inner.target).is_mutable for inner in calls if isinstance(inner.target, OpOverload))
    if written or any(inner.op == "get_attr" for inner in traced.nodes):
        return False
    copies: dict[fx.Node, Any] = dict(zip(traced.find_nodes(op="placeholder"), sources, strict=True))
    with node.graph.inserting_before(node):
        for inner in calls:
            copies[inner] = copy = node.graph.node_copy(inner, copies.__getitem__)
            copy.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
        result: Any = fx.map_arg(traced.output_node().args[0], copies.__getitem__)
        if isinstance(result, fx.Node):
            _take_place(node, result)
            return True
        for pick in [user for user in node.users if user.target is operator.getitem]:
            _take_place(pick, result[pick.args[1]])
        node.graph.erase_node(node)
    return True


def _take_place(node: fx.Node, result: fx.Node) -> None:
    """Replace a node by another one and give that its name, because the outputs of a program are known by name."""
    if result in node.all_input_nodes or result.op == "placeholder":
        value = result.meta["val"]
        result = node.graph.call_function(torch.ops.aten.clone.default, (result,))
        result.meta |= {"val": value, "nn_module_stack": node.meta.get("nn_module_stack", {})}
    name = node.name
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    result.name = name
