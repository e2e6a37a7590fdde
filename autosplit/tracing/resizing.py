"""Make the static program of a model at any sizes out of one export with symbolic sizes.

A static program holds sizes as plain numbers: arguments of views, slices and ranges. The symbolic export says which number is
which expression of the sizes, so that a program at other sizes is a copy with other numbers over the same weights. That takes
milliseconds, where an export takes seconds.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from autosplit.compat.torchparts import FakeTensor, FakeTensorMode, expression_of, pytree, with_graph
from autosplit.errors import TraceError
from autosplit.tracing.flattening import Flat
from autosplit.tracing.loading import dense_inputs
from autosplit.tracing.programs import user_line
from autosplit.tracing.tensorspec import TensorSpec

OPERATIONS: Mapping[str, Callable[..., Any]] = {"Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv}
"""Python's operation by the name of the class of an expression."""


@dataclass(frozen=True)
class Size:
    """A number in a program that depends on the sizes of the inputs; ``expression`` is sympy's."""

    expression: Any

    def at(self, values: Mapping[Any, int]) -> int | float | bool:
        """The number, from the value of each symbol."""
        if (whole := _whole(self.expression, values)) is not None:
            return whole
        found = self.expression.subs(values)
        if getattr(found, "is_integer", False):
            return int(found)
        return float(found) if getattr(found, "is_number", False) else bool(found)


@dataclass(frozen=True, eq=False)
class Resizable:
    """A decomposed export with symbolic sizes.

    Attributes:
        symbols: dimension to its symbol.
        arguments: op name to its arguments with a ``Size`` in place of each number that depends on sizes; other ops are left out.
        renamed: input of the flat program to its name in the export.
    """

    exported: ExportedProgram
    symbols: Mapping[str, Any]
    arguments: Mapping[str, tuple[Any, Any]]
    renamed: Mapping[str, str] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Name in the flat program to the symbolic value."""
        found = {node.name: node.meta.get("val") for node in self.exported.graph.nodes}
        return found | {name: found[own] for name, own in self.renamed.items()}

    def static(self, sizes: Mapping[str, int]) -> ExportedProgram:
        """The export with plain numbers in place of symbols, for ``flatten``."""
        values = self._values(sizes)
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {}
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        for node in self.exported.graph.nodes:
            if (size := _size_of(node)) is not None:
                copies[node] = size.at(values)
                continue
            if node.op == "output":
                made = graph.output(fx.map_arg(node.args[0], copies.__getitem__))
            else:
                made = graph.node_copy(node, copies.__getitem__)
                made.name = node.name
            made.meta = {**node.meta, "val": pytree.tree_map(lambda value: _fixed(value, values, mode), node.meta.get("val"))}
            copies[node] = made
        return with_graph(self.exported, graph)

    def at(self, flat: Flat, sizes: Mapping[str, int]) -> Flat:
        """The flat program of one ``static`` at other sizes: the same ops over the same weights, with other numbers."""
        values = self._values(sizes)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in flat.program.graph.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.name in self.arguments:
                fill(copies[node], *self.arguments[node.name], lambda size: size.at(values))
        program = fx.GraphModule(flat.program, graph, class_name=type(flat.program).__name__)
        return Flat(program, flat.in_leaves, flat.out_leaves, flat.copied)

    def layouts(self, specs: Sequence[TensorSpec], each: Sequence[Mapping[str, int]]) -> list[tuple[TensorSpec, ...]]:
        """The layouts of values of the flat program at each of several sizes, without a pass of it.

        Raises: TraceError: a value is none of the export.
        """
        known, sides = self.values(), list[tuple[TensorSpec, list[int | Size], list[int | Size]]]()
        for spec in specs:
            value = known.get(spec.name)
            if not isinstance(value, torch.Tensor):
                raise TraceError(f"'{spec.name}' is no value of the export with symbolic sizes")
            sides.append((spec, list(map(_as_size, value.shape)), list(map(_as_size, value.stride()))))
        found = list[tuple[TensorSpec, ...]]()
        for values in map(self._values, each):
            shapes = [(spec, _numbers(shape, values), _numbers(stride, values)) for spec, shape, stride in sides]
            found.append(tuple(TensorSpec(spec.name, shape, stride, spec.dtype) for spec, shape, stride in shapes))
        return found

    def _values(self, sizes: Mapping[str, int]) -> dict[Any, int]:
        return {symbol: sizes[dim] for dim, symbol in self.symbols.items()}


def resizable(exported: ExportedProgram, dims: Mapping[str, Mapping[int, str]]) -> Resizable:
    """The symbolic export with the dimension of each of its symbols.

    Args:
        exported: decomposed.
        dims: input of the export to axis to dimension.
    Raises: TraceError: a dimension became a number, or sizes depend on more than these dimensions.
    """
    symbols: dict[str, Any] = {}
    for name, value in dense_inputs(exported).items():
        for axis, size in enumerate(value.shape):
            dim = dims.get(name, {}).get(axis)
            if dim is None and isinstance(size, int):
                continue
            expression = None if isinstance(size, int) else expression_of(size)
            if dim is None or not getattr(expression, "is_Symbol", False) or symbols.setdefault(dim, expression) != expression:
                raise TraceError(f"axis {axis} of '{name}' became {size} in the export with symbolic sizes")
    if len(set(symbols.values())) < len(symbols):
        raise TraceError(f"dimensions {', '.join(symbols)} are one in the export with symbolic sizes")
    known, arguments = set(symbols.values()), {}
    for node in exported.graph.nodes:
        found = _size_of(node)
        if found is not None and not found.expression.free_symbols <= known:
            raise TraceError(f"'{node.name}' is a size that depends on values ({user_line(node)})")
        if any(_size_of(source) is not None for source in node.all_input_nodes) and node.op == "call_function":
            arguments[node.name] = _pattern(node.args), {name: _pattern(given) for name, given in node.kwargs.items()}
    return Resizable(exported, symbols, arguments)


def _as_size(size: int | torch.SymInt) -> int | Size:
    return size if isinstance(size, int) else Size(expression_of(size))


def _numbers(sizes: Iterable[int | Size], values: Mapping[Any, int]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else int(size.at(values)) for size in sizes)


def _whole(expression: Any, values: Mapping[Any, int]) -> int | None:
    """The number, if it is made of sizes by ``OPERATIONS`` alone: a hundredth of the time of sympy's own way. None otherwise."""
    if expression.is_Symbol:
        return values.get(expression)
    if expression.is_Integer:
        return int(expression)
    parts = [_whole(part, values) for part in expression.args]
    operation = OPERATIONS.get(type(expression).__name__)
    return None if operation is None or None in parts else reduce(operation, parts)


def _pattern(argument: Any) -> Any:
    """An argument with a ``Size`` in place of each symbolic number, and None in place of tensors."""
    if isinstance(argument, list | tuple):
        return [_pattern(item) for item in argument]
    return _size_of(argument) if isinstance(argument, fx.Node) else argument


def _size_of(node: fx.Node) -> Size | None:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return Size(expression_of(value))
    return None


def _fixed(value: Any, values: Mapping[Any, int], mode: FakeTensorMode) -> Any:
    """A fake tensor with numbers in place of symbols."""
    if not isinstance(value, FakeTensor):
        return value
    shape, stride = (_numbers(map(_as_size, sizes), values) for sizes in (value.shape, value.stride()))
    with mode:
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


def fill(node: fx.Node, args: Any, kwargs: Any, number: Callable[[Size], Any]) -> None:
    """Give a node a number in place of each ``Size`` of the patterns of its arguments."""

    def filled(given: Any, pattern: Any) -> Any:
        if isinstance(pattern, Size):
            return number(pattern)
        if isinstance(pattern, list) and isinstance(given, list | tuple) and len(given) == len(pattern):
            return type(given)(filled(*pair) for pair in zip(given, pattern, strict=True))
        return given

    node.args = tuple(filled(*pair) for pair in zip(node.args, args, strict=False))
    node.kwargs = {name: filled(given, kwargs.get(name)) for name, given in node.kwargs.items()}
