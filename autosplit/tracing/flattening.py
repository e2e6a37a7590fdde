"""Turn an exported program into one flat fx graph of functional ATen ops.

Assertions, unused ops and clones that change nothing (dropout in eval mode) are dropped. An input or a weight that the model
returns passes through a clone, so that an op makes every output. One error lists all reasons why a graph cannot be cut
(``uncuttable``). Explicit copies to devices are dropped, and recorded (``devicecopies``).
"""

import copy
import itertools
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from autosplit.compat.torchparts import FakeTensor, renamed
from autosplit.errors import TraceError, raise_faults
from autosplit.tracing.devicecopies import chain_of, chains_into, copied_to, in_host_memory
from autosplit.tracing.tensorspec import laid_out, spec_of
from autosplit.tracing.uncuttable import reasons_not_to_cut

CLONE = torch.ops.aten.clone.default
SORT = torch.ops.aten.sort.default


@dataclass(frozen=True)
class Fixed:
    """A leaf of the inputs or outputs that is not a tensor and always has this value."""

    value: Any


@dataclass(frozen=True, eq=False)
class Flat:
    """The flat program and, for each leaf of the model's inputs and outputs, the name of its value or its constant.

    ``copied`` maps (op, value that it reads) to the devices that the explicit copies between them lead to, in order.
    """

    program: fx.GraphModule
    in_leaves: tuple[str | Fixed, ...]
    out_leaves: tuple[str | Fixed, ...]
    copied: Mapping[tuple[str, str], tuple[str, ...]]


def flatten(name: str, exported: ExportedProgram, *, stable_sort: bool = False) -> Flat:
    """Flatten a functional export with static shapes; ``name`` is the model's, for messages.

    With ``stable_sort`` equal integers keep their order in sorts, so that all backends order them in the same way.
    Raises: TraceError: it lists every reason why stages in several processes would compute something else than this program.
    """
    live = ancestors(exported.graph.find_nodes(op="output"))
    raise_faults(TraceError, f"model '{name}' cannot be traced to a graph that may be cut", reasons_not_to_cut(exported, live))
    return _Flattener(exported, live, stable_sort).flat(name)


def sorts_integers(node: fx.Node) -> bool:
    """Whether an op sorts integers, and may put equal ones in any order."""
    return node.target is SORT and not node.all_input_nodes[0].meta["val"].is_floating_point()


def move_reserved(exported: ExportedProgram) -> ExportedProgram:
    """Rename weights that have the name of an attribute of GraphModules, because torch makes a GraphModule to decompose them."""
    specs = exported.graph_signature.input_specs
    paths = _free_paths({spec.target: spec.target for spec in specs if spec.target is not None})
    moved = copy.copy(exported)  # the user's program keeps its names
    renamed(moved, paths)
    return moved


def is_op(node: fx.Node) -> bool:
    """Whether a node is an op: a call other than the pick of one tensor out of an op's tuple."""
    return node.op == "call_function" and not is_pick(node)


def is_pick(node: fx.Node) -> bool:
    """Whether a node picks one tensor out of an op's tuple."""
    return node.op == "call_function" and node.target is operator.getitem


def pick_index(node: fx.Node) -> int:
    """The position of the picked tensor in the tuple."""
    index: Any = node.args[1]
    return int(index)


class _Flattener:
    """Copies the live nodes of an export into a new graph."""

    def __init__(self, exported: ExportedProgram, live: set[fx.Node], stable_sort: bool) -> None:
        self.exported = exported
        self.stable_sort = stable_sort
        self.live = live
        self.moves = any(map(chains_into, live))
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, Any] = {}
        self.weight_names = _weight_names(exported)
        self.attributes = _free_paths({target: re.sub(r"[^\w.\-]", "_", target) for target, _ in self.weight_names.values()})
        self.weights: dict[str, torch.Tensor] = {}
        self.readers: dict[str, fx.Node] = {}
        self.picks: dict[tuple[fx.Node, int], fx.Node] = {}
        self.handed_on: dict[fx.Node, fx.Node] = {}
        self.copied: dict[tuple[str, str], tuple[str, ...]] = {}

    def flat(self, name: str) -> Flat:
        in_leaves = self._copy_inputs()
        outputs: list[str | Fixed] = []
        for node in self.exported.graph.nodes:
            if node.op == "call_function" and node in self.live:
                self.copies[node] = self._copy_op(node)
            elif node.op == "output":
                specs = zip(node.args[0], self.exported.graph_signature.output_specs, strict=True)
                outputs = [self._copy_output(result) for result, spec in specs if spec.kind is OutputKind.USER_OUTPUT]
        results = {node.name: node for node in self.graph.nodes}
        self.graph.output(tuple(results[leaf] for leaf in dict.fromkeys(outputs) if isinstance(leaf, str)))
        self.graph.lint()
        program = fx.GraphModule(self.weights, self.graph, class_name=re.sub(r"\W", "_", name) or "Model")
        return Flat(program, tuple(in_leaves), tuple(outputs), self.copied)

    def _copy_inputs(self) -> list[str | Fixed]:
        leaves: list[str | Fixed] = []
        nodes = {node.name: node for node in self.exported.graph.nodes if node.op == "placeholder"}
        for spec in self.exported.graph_signature.input_specs:
            if spec.kind is not InputKind.USER_INPUT:
                continue
            if isinstance(spec.arg, ConstantArgument):
                leaves.append(Fixed(spec.arg.value))
                continue
            source = nodes[spec.arg.name]
            copy = self.graph.create_node("placeholder", source.name, name=source.name)
            copy.target = copy.name
            copy.meta = dict(source.meta)
            self.copies[source] = copy
            leaves.append(copy.name)
        return leaves

    def _copy_op(self, node: fx.Node) -> Any:
        if node.target is CLONE and _changes_nothing(node):
            return self._value(node.all_input_nodes[0])
        if copied_to(node):
            return self._value(chain_of(node)[0])
        if is_pick(node):
            key = self._value(node.args[0]), pick_index(node)
            if key not in self.picks:
                self.picks[key] = self._create(node, key, {})
            return self.picks[key]
        copy = self._create(node, fx.map_arg(node.args, self._value), fx.map_arg(node.kwargs, self._value))
        chains = chains_into(node)
        self.copied |= {(copy.name, self._value(value).name): devices for value, devices in chains.items()}
        copy.kwargs = in_host_memory(copy.kwargs) if self.moves else copy.kwargs
        if self.stable_sort and sorts_integers(node):
            options = dict(zip(("dim", "descending"), copy.args[1:], strict=False))
            copy.target, copy.args = torch.ops.aten.sort.stable, copy.args[:1]
            copy.kwargs = {"stable": True, **options, **copy.kwargs}
        return copy

    def _create(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        copy = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        copy.meta = dict(node.meta)
        return copy

    def _copy_output(self, result: Any) -> str | Fixed:
        """The name of the value or the constant that the model returns; an input or a weight passes through a clone."""
        if not isinstance(result, fx.Node):
            return Fixed(result)
        copy = self._value(result)
        if not isinstance(copy, fx.Node):
            return Fixed(copy)
        if copy.op == "call_function":
            return copy.name
        if copy not in self.handed_on:
            clone = self.graph.create_node("call_function", CLONE, (copy,), name=f"{copy.name}_returned")
            clone.meta = {"val": copy.meta.get("val")}
            self.handed_on[copy] = clone
        return self.handed_on[copy].name

    def _value(self, node: Any) -> Any:
        """The copy of a node; a weight is read before its first use."""
        if node in self.copies:
            return self.copies[node]
        target, weight = self.weight_names[node.name]
        if target not in self.readers:
            name = self.attributes[target]
            self.weights[name] = _at_rest(weight)
            self.readers[target] = self.graph.create_node("get_attr", name, name=node.name)
            self.readers[target].meta = {"val": node.meta.get("val")}
        self.copies[node] = self.readers[target]
        return self.readers[target]


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes, and all that they depend on."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _changes_nothing(node: fx.Node) -> bool:
    """Whether a clone keeps the strides of another op's result: a functional graph can use the result itself."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.op != "call_function":
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.stride() == after.stride()


def _weight_names(exported: ExportedProgram) -> dict[str, tuple[str, torch.Tensor]]:
    """For each placeholder of a weight its name and its tensor; tied weights share the first of their names."""
    stores: list[Mapping[str, Any]] = [exported.state_dict, exported.constants]
    first: dict[tuple[Any, ...], str] = {}
    found = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT or spec.target is None:
            continue
        tensor = next(store[spec.target] for store in stores if spec.target in store)
        if isinstance(tensor, torch.Tensor):
            place = _place(tensor) if tensor.numel() else spec.target
            key = (place, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
            found[spec.arg.name] = (first.setdefault(key, spec.target), tensor)
    return found


def _place(tensor: torch.Tensor) -> Any:
    """The address of a weight; a fake one has a storage, and no address."""
    if isinstance(tensor, FakeTensor):
        return id(tensor.untyped_storage()), tensor.storage_offset()
    return tensor.data_ptr()


def _free_paths(wanted: Mapping[str, str]) -> dict[str, str]:
    """Each weight's attribute path in a GraphModule: the wanted name, or a path inside a submodule if the name is taken.

    A name is taken by an attribute of GraphModules, or by a weight with that path, a prefix of it or an extension of it.
    Weights that can keep their names are placed first.
    """
    own = fx.GraphModule(torch.nn.Module(), fx.Graph())  # only instances have some attributes, such as ``meta``
    chosen: dict[str, str] = {}
    inner: set[str] = set()
    leaves: set[str] = set()

    def free(path: str) -> bool:
        return not (hasattr(own, path.split(".")[0]) or path in inner or not leaves.isdisjoint([path, *_around(path)]))

    for target, name in sorted(wanted.items(), key=lambda item: item[0] != item[1] or not free(item[1])):
        moved = (f"model{number or ''}.{name}" for number in itertools.count())
        chosen[target] = next(filter(free, itertools.chain([name], moved)))
        leaves.add(chosen[target])
        inner.update(_around(chosen[target]))
    return chosen


def _around(path: str) -> list[str]:
    """The paths of the submodules around a path."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _at_rest(tensor: torch.Tensor) -> torch.Tensor:
    """The weight without a pending conjugation, on a 64-byte boundary as in a stage's file.

    It keeps ``requires_grad``: with it ``matmul`` folds other shapes into one product, and its sums end in other bits.
    """
    at_rest = tensor.detach().resolve_conj().resolve_neg()
    return laid_out(at_rest, replace(spec_of("", at_rest), offset_bytes=0)).detach().requires_grad_(tensor.requires_grad)
