"""Make a stage that runs at every size out of one that was traced at the largest: it reads sizes from its inputs.

A static program holds numbers in views and ranges. Here each number that depends on the sizes is computed anew for each request,
from the shapes of the inputs, by the expressions of the symbolic export (``resizing``).
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import fx

from autosplit.compat.torchparts import expression_of
from autosplit.errors import TraceError
from autosplit.tracing.resizing import OPERATIONS, Resizable, fill
from autosplit.tracing.splitting import StageProgram


def any_strides(module: fx.GraphModule) -> fx.GraphModule:
    """The module with ``reshape`` in place of ``view``, which needs the strides of the trace."""
    graph = deepcopy(module.graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    return fx.GraphModule(module, graph, class_name=type(module).__name__)


def freed(program: StageProgram, symbolic: Resizable) -> StageProgram:
    """The stage at every size; its specs stay those of the largest.

    Raises: TraceError: a number is no sum, product or quotient of sizes, or no input of the stage has an axis of such a size.
    """
    values = symbolic.values()
    graph = fx.Graph()
    inputs = {node: graph.node_copy(node) for node in program.module.graph.find_nodes(op="placeholder")}
    free = {node.name: _free_axes(values[node.name], symbolic.symbols) for node in inputs}
    sizes = _Sizes(program.name, graph)
    for node, copy in inputs.items():
        for axis in free[node.name]:
            sizes.read(copy, axis, expression_of(values[node.name].shape[axis]))
    copies = dict(inputs)
    for node in program.module.graph.nodes:
        if node.op == "placeholder":
            continue
        copies[node] = copy = graph.node_copy(node, copies.__getitem__)
        if node.name in symbolic.arguments:
            args, kwargs = symbolic.arguments[node.name]
            with graph.inserting_before(copy):
                fill(copy, args, kwargs, lambda size: sizes.number(size.expression))
    return replace(program, module=any_strides(fx.GraphModule(program.module, graph, class_name="Free")), free=free)


def at_sizes(program: StageProgram, symbolic: Resizable, each: Sequence[Mapping[str, int]]) -> tuple[StageProgram, ...]:
    """A stage of every size with the values that it reads and makes at each of several sizes, the largest first.

    Raises: TraceError: a value of the stage has another shape in the symbolic export.
    """
    names, num_inputs = (*program.inputs, *program.outputs), len(program.inputs)
    first, *others = symbolic.layouts(names, each)
    for own, derived in zip(names, first, strict=True):
        if own.shape != derived.shape:
            raise TraceError(f"'{own.name}' has shape {own.shape}, and {derived.shape} in the export with symbolic sizes")
    return program, *(replace(program, inputs=specs[:num_inputs], outputs=specs[num_inputs:]) for specs in others)


def _free_axes(value: torch.Tensor, symbols: Mapping[str, Any]) -> dict[int, str]:
    """The axes of a value whose size is symbolic, with its expression by the names of dimensions."""
    sizes: list[tuple[int, Any]] = [(axis, size) for axis, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
    names = {str(symbol): dim for dim, symbol in symbols.items()}
    return {axis: re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(expression_of(size))) for axis, size in sizes}


class _Sizes:
    """The numbers of a graph that follow from the sizes of its inputs, each computed once."""

    def __init__(self, name: str, graph: fx.Graph) -> None:
        self._name, self._graph = name, graph
        self._known: dict[Any, Any] = {}

    def read(self, value: fx.Node, axis: int, expression: Any) -> None:
        """Read a size from an axis of an input, unless it is no symbol or known."""
        if expression.is_Symbol and expression not in self._known:
            self._known[expression] = self._graph.call_function(torch.ops.aten.sym_size.int, (value, axis))

    def number(self, expression: Any) -> Any:
        """The node that computes an expression, or a plain number."""
        if expression.is_Integer:
            return int(expression)
        if expression not in self._known:
            kind = OPERATIONS.get(type(expression).__name__)
            if kind is None:
                raise TraceError(f"stage '{self._name}' needs the size {expression}, which does not follow from its inputs")
            parts = map(self.number, expression.args)
            self._known[expression] = reduce(lambda *pair: self._graph.call_function(kind, pair), parts)
        return self._known[expression]
