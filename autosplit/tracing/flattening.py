"""Turn an exported program into one flat fx graph of functional ATen ops.

Assertions, unused ops and clones that change nothing (dropout in eval mode) are dropped. An input or a weight that the model
returns passes through a clone, so that an op makes every output. One error lists all reasons, with the user's lines, why a
graph cannot be cut: state that a call leaves behind, random numbers, numbers read out of tensors, sizes that depend on values,
control flow, weights that are not dense. Explicit copies to devices are dropped, and recorded (``devicecopies``).
"""

import copy
import itertools
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from autosplit.errors import TraceError, raise_faults
from autosplit.tracing.devicecopies import chain_of, chains_into, copied_to, in_host_memory
from autosplit.tracing.tensorspec import is_dense, kind_of, laid_out, spec_of

CLONE = torch.ops.aten.clone.default
SORT = torch.ops.aten.sort.default
FRAME = re.compile(r'File "(?P<file>[^"<]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')
MASKED = {torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default}
"""Ops whose second argument alone determines the size of their result."""

MUTATIONS = {
    OutputKind.BUFFER_MUTATION: "buffer",
    OutputKind.PARAMETER_MUTATION: "parameter",
    OutputKind.USER_INPUT_MUTATION: "input",
}
OFF_SWITCHES = {"p": 0.0, "dropout": 0.0, "dropout_p": 0.0, "train": False, "training": False}


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
    live, varying = _live(exported.graph), _of_varying_size(exported)
    faults = _changed_state(exported) + [
        f"{reason} ({line})" if (line := user_line(node)) else reason
        for node in exported.graph.nodes
        if node.op == "call_function" and (reason := _refusal(node, node in live, node in varying))
    ]
    raise_faults(TraceError, f"model '{name}' cannot be traced to a graph that may be cut", list(dict.fromkeys(faults)))
    return _Flattener(exported, live, stable_sort).flat(name)


def sorts_integers(node: fx.Node) -> bool:
    """Whether an op sorts integers, and may put equal ones in any order."""
    return node.target is SORT and not node.all_input_nodes[0].meta["val"].is_floating_point()


def move_reserved(exported: ExportedProgram) -> ExportedProgram:
    """Rename weights that have the name of an attribute of GraphModules, because torch makes a GraphModule to decompose them."""
    specs = exported.graph_signature.input_specs
    paths = _free_paths({spec.target: spec.target for spec in specs if spec.target is not None})
    moved = copy.copy(exported)  # the user's program keeps its names
    moved._graph_signature = replace(
        exported.graph_signature, input_specs=[replace(spec, target=paths.get(spec.target or "")) for spec in specs]
    )
    stores = exported.state_dict, exported.constants
    moved._state_dict, moved._constants = ({paths.get(name, name): item for name, item in store.items()} for store in stores)
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


def user_line(node: fx.Node) -> str:
    """The line of the user's code that made this op, as 'file:line: code', or ''."""
    frames = [frame for frame in FRAME.finditer(node.meta.get("stack_trace") or "") if "/torch/" not in frame["file"]]
    return f"{frames[-1]['file']}:{frames[-1]['line']}: {frames[-1]['code'].strip()}" if frames else ""


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


def _live(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the outputs depend on."""
    live: set[fx.Node] = set()
    waiting = [node for node in graph.nodes if node.op == "output"]
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting += node.all_input_nodes
    return live


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
        if isinstance(weight, torch.Tensor) and not is_dense(weight)
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
    if not isinstance(target, torch._ops.OpOverload):
        return (
            f"'{node.name}' is control flow or Python code in the graph ({target}); write it with tensor ops" if is_live else ""
        )
    if target._schema.is_mutable:
        return (
            f"'{node.name}' ({target}) writes into its input and could not be made functional; use the op without the underscore"
        )
    if not target._schema.returns:
        return (
            ""
            if target._schema.name.split("::")[-1].startswith(("_assert", "sym_constrain"))
            else (f"'{node.name}' ({target}) returns nothing, so it acts on something outside the graph; take it out")
        )
    if not is_live:
        return ""
    if target._schema.name.startswith("aten::as_strided"):
        return f"'{node.name}' ({target}) reads memory by its place, which is another one in each process; use slices or unfold"
    if not _all_tensors(node.meta.get("val")):
        return f"'{node.name}' ({target}) reads a number out of a tensor, which a fixed graph cannot follow; keep it a tensor"
    if is_varying:
        return f"'{node.name}' ({target}) gives a tensor whose size depends on values, and sizes are fixed; mask with torch.where"
    if any(item.layout is not torch.strided for item in _tensors(node)):
        return f"'{node.name}' ({target}) gives a tensor that is not dense, which stages cannot hand over; keep it dense"
    if torch.Tag.nondeterministic_seeded in target.tags and not _switched_off(node, target._schema):
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
            place = tensor.data_ptr() if tensor.numel() else spec.target
            key = (place, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
            found[spec.arg.name] = (first.setdefault(key, spec.target), tensor)
    return found


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
