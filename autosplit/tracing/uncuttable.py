"""The reasons why an exported program cannot be cut into stages that run in several processes.

They are state that a call leaves behind, random numbers, numbers read out of tensors, sizes that depend on values, memory read by
its place, control flow, and tensors that are not dense.
"""

import operator
from collections.abc import Container
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from autosplit.compat.torchparts import FakeTensor, OpOverload, pytree, schema_of
from autosplit.tracing.programs import user_line
from autosplit.tracing.tensorspec import is_dense, kind_of

MASKED = {torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default}
"""Ops whose second argument alone determines the size of their result."""

MUTATIONS = {
    OutputKind.BUFFER_MUTATION: "buffer",
    OutputKind.PARAMETER_MUTATION: "parameter",
    OutputKind.USER_INPUT_MUTATION: "input",
}
OFF_SWITCHES = {"p": 0.0, "dropout": 0.0, "dropout_p": 0.0, "train": False, "training": False}


def reasons_not_to_cut(exported: ExportedProgram, live: Container[fx.Node]) -> list[str]:
    """Each reason once, with the line of the user's code where it is known.

    Args:
        exported: a functional export with static shapes.
        live: the nodes that the outputs depend on.
    """
    varying = _of_varying_size(exported)
    faults = _changed_state(exported) + [
        f"{reason} ({line})" if (line := user_line(node)) else reason
        for node in exported.graph.nodes
        if node.op == "call_function" and (reason := _refusal(node, node in live, node in varying))
    ]
    return list(dict.fromkeys(faults))


def _of_varying_size(exported: ExportedProgram) -> set[fx.Node]:
    """The first ops that give a tensor whose size depends on values of a request, and not only on values of weights."""
    fed: set[fx.Node] = set()
    found: set[fx.Node] = set()
    inputs = frozenset(exported.graph_signature.user_inputs)  # torch makes this list anew at each look
    for node in exported.graph.nodes:
        if node.name in inputs or not fed.isdisjoint(node.all_input_nodes):
            fed.add(node)
        if _is_unsized(node) and not any(map(_is_unsized, node.all_input_nodes)):
            masks = pytree.tree_leaves(node.args[1]) if node.target in MASKED else node.all_input_nodes
            if not fed.isdisjoint(masks):
                found.add(node)
    return found


def _changed_state(exported: ExportedProgram) -> list[str]:
    """A fault for each buffer, parameter or input that a call changes, or that other processes cannot receive."""
    makers = {node.name: node for node in exported.graph.nodes}
    buffers = exported.graph_signature.inputs_to_buffers
    stores = {**exported.state_dict, **exported.constants}
    faults = [
        f"its weight '{name}' is {kind_of(weight)}, and a stage's file holds dense ones; call its to_dense() first"
        for name, weight in stores.items()
        if isinstance(weight, torch.Tensor) and not isinstance(weight, FakeTensor) and not is_dense(weight)
    ]
    for spec in exported.graph_signature.output_specs:
        if spec.kind is OutputKind.BUFFER_MUTATION and buffers.get(spec.arg.name) == spec.target:
            continue  # assigned to itself, as by ``self.table = self.table.to(x.device)``
        if spec.kind in MUTATIONS:
            line = user_line(makers[spec.arg.name]) if spec.arg.name in makers else ""
            place = f" ({line})" if line else ""
            kept = spec.kind is not OutputKind.USER_INPUT_MUTATION
            way_out = (
                "return the new value as an output instead, or call eval() if a batch norm does it" if kept else "copy it first"
            )
            faults.append(
                f"each call changes {MUTATIONS[spec.kind]} '{spec.target}'{place}, which other processes do not see; {way_out}"
            )
        elif spec.kind is not OutputKind.USER_OUTPUT:
            faults.append(f"it is exported for training ({spec.kind.name.lower()}); export it for inference")
    for entry in exported.graph_signature.input_specs:
        if entry.kind is InputKind.USER_INPUT and not isinstance(entry.arg, TensorArgument | ConstantArgument):
            faults.append(f"its input '{entry.arg.name}' is neither a tensor nor a constant ({type(entry.arg).__name__})")
    return faults


def _refusal(node: fx.Node, is_live: bool, is_varying: bool) -> str:
    """The reason why an op cannot be in a graph that is cut, or ''."""
    target = node.target
    if target is operator.getitem:
        return ""
    if not isinstance(target, OpOverload):
        return (
            f"'{node.name}' is control flow or Python code in the graph ({target}); write it with tensor ops" if is_live else ""
        )
    if schema_of(target).is_mutable:
        return (
            f"'{node.name}' ({target}) writes into its input and could not be made functional; use the op without the underscore"
        )
    if not schema_of(target).returns:
        return (
            ""
            if schema_of(target).name.split("::")[-1].startswith(("_assert", "sym_constrain"))
            else (f"'{node.name}' ({target}) returns nothing, so it acts on something outside the graph; take it out")
        )
    if not is_live:
        return ""
    if schema_of(target).name.startswith("aten::as_strided"):
        return f"'{node.name}' ({target}) reads memory by its place, which is another one in each process; use slices or unfold"
    if not _all_tensors(node.meta.get("val")):
        return f"'{node.name}' ({target}) reads a number out of a tensor, which a fixed graph cannot follow; keep it a tensor"
    if is_varying:
        return f"'{node.name}' ({target}) gives a tensor whose size depends on values, and sizes are fixed; mask with torch.where"
    if any(item.layout is not torch.strided for item in _tensors(node)):
        return f"'{node.name}' ({target}) gives a tensor that is not dense, which stages cannot hand over; keep it dense"
    if torch.Tag.nondeterministic_seeded in target.tags and not _switched_off(node, schema_of(target)):
        return f"'{node.name}' ({target}) draws random numbers; call eval(), or make the noise an input"
    return ""


def _all_tensors(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(item is None or isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [item for item in pytree.tree_leaves(node.meta.get("val")) if isinstance(item, torch.Tensor)]


def _is_unsized(node: fx.Node) -> bool:
    return any(not isinstance(size, int) for tensor in _tensors(node) for size in tensor.shape)


def _switched_off(node: fx.Node, schema: torch.FunctionSchema) -> bool:
    """Whether an argument keeps an op from drawing random numbers."""
    given: dict[str, Any] = {
        argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()
    }
    given |= {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)
    return any(given.get(name, object()) == off for name, off in OFF_SWITCHES.items())
