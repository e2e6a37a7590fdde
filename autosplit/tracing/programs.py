"""Write flat fx graphs as JSON that runs no code when it is read, and read their weights.

``torch.export.save`` would need a second export of each stage; JSON takes milliseconds instead of tenths of a second, and a
person can read it. A file can name operators of ``torch.ops`` only, and without trust in its maker only those that ``operators``
allows.
"""

import math
import operator
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autosplit.compat.torchparts import FakeTensor, OpOverload, schema_of
from autosplit.errors import PlanError
from autosplit.memory.lives import ALIGNMENT
from autosplit.tracing.operators import allowed_graph, defined_in
from autosplit.tracing.tensorspec import TensorSpec, fake_mode, spec_of

KINDS: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
PYTHON: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "add": operator.add,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
}
"""Functions of Python by their names in a file: the pick of one tensor out of several, and sums of sizes."""
LINE = "line"
"""The key under which a node of a saved stage holds its ``user_line`` in ``meta``."""

FRAME = re.compile(r'File "(?P<file>[^"<]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')
WEIGHT_NAME = re.compile(r"[\w.\-]+")


def user_line(node: fx.Node) -> str:
    """The line of the model's code that made an op, as 'file:line: code', or ''."""
    frames = [frame for frame in FRAME.finditer(node.meta.get("stack_trace") or "") if "/torch/" not in frame["file"]]
    own = f"{frames[-1]['file']}:{frames[-1]['line']}: {frames[-1]['code'].strip()}" if frames else ""
    return str(node.meta.get(LINE, own))


class Observer(fx.Interpreter):
    """Runs a program and calls ``see(node, value)`` for each node."""

    def __init__(self, program: fx.GraphModule, see: Callable[[fx.Node, Any], None]) -> None:
        super().__init__(program)
        self._see = see

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and show its value."""
        value = super().run_node(n)
        self._see(n, value)
        return value


def observed(
    program: fx.GraphModule, inputs: Sequence[torch.Tensor], *, computed: bool
) -> tuple[Sequence[torch.Tensor], dict[str, TensorSpec]]:
    """The outputs of a program, and the layout of every value: computed, or those of fake tensors, which take no time."""
    specs: dict[str, TensorSpec] = {}

    def see(node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor) and node.op != "get_attr":
            spec = spec_of(node.name, value)
            if isinstance(value, FakeTensor) and value.numel():  # it has no address; torch's memory begins on a boundary
                spec = replace(spec, offset_bytes=int(value.storage_offset()) * value.element_size() % ALIGNMENT)
            specs[node.name] = spec

    if computed:
        with torch.inference_mode():
            return Observer(program, see).run(*inputs), specs
    with fake_mode(inputs) as mode, torch.no_grad():
        fakes = [value if isinstance(value, FakeTensor) else mode.from_tensor(value) for value in inputs]
        return Observer(program, see).run(*fakes), specs


def computed_values(
    program: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    names: Collection[str] | None = None,
    observer: type[Observer] = Observer,
) -> dict[str, torch.Tensor]:
    """Every value of a pass of this observer, or those of these names."""
    found: dict[str, torch.Tensor] = {}

    def see(node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor) and node.op != "get_attr" and (names is None or node.name in names):
            found[node.name] = value

    with torch.inference_mode():
        observer(program, see).run(*inputs)
    return found


def weight_names(graph: fx.Graph) -> list[str]:
    """The names of the weights that a graph reads, each once, in the order of their first use."""
    return list(dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr"))


def state_names(graph: fx.Graph) -> list[str]:
    """The names of the weights that are states: memory that an operator writes, and that outlives the call."""
    return list(dict.fromkeys(name for node in graph.nodes for name in states_of(node)))


def states_of(node: fx.Node) -> list[str]:
    """The states of an op, by its schema: an operator of the namespace ``autosplit`` names such an argument ``state...``."""
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).name.startswith("autosplit::"):
        return []
    return [str(value.target) for name, value in arguments_of(node).items() if name.startswith("state")]


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments that an op is given, by their names in the schema of its operator; those by name alone without a schema."""
    schema = schema_of(node.target) if isinstance(node.target, OpOverload) else None
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


PREPARED: dict[OpOverload, Callable[..., tuple[torch.Tensor, Callable[[], object]]]] = {}
"""Operators that can be prepared for calls over the same memory: from their arguments to the answer's memory, and the call.

They take memory by ``empty(shape, dtype=...)``, where it is given.
"""

CHOOSES: set[OpOverload] = set()
"""Operators that give the place of the largest score in each row of their first argument, [rows, scores]."""


def weight(program: torch.nn.Module, name: str) -> torch.Tensor:
    """The weight of this name."""
    *path, last = name.split(".")
    tensor: torch.Tensor = getattr(program.get_submodule(".".join(path)), last)
    return tensor


def packages(graph: fx.Graph) -> tuple[str, ...]:
    """The modules with custom operators, which a process must import before it can ``decode`` the graph.

    The file with the function of a custom operator (``torch.library.custom_op``) or with its shape rule (``register_fake``),
    without which it cannot be traced, tells the module.
    Raises: PlanError: the file cannot be imported as a module, because it is the main program or a notebook.
    """
    found: dict[str, None] = {}
    for operator_ in dict.fromkeys(node.target for node in graph.nodes if isinstance(node.target, OpOverload)):
        file = defined_in(operator_)
        if file:
            homes = [module for module in [*sys.modules.values()] if getattr(module, "__file__", None) == file]
            names = [module.__spec__.name for module in homes if module.__spec__ is not None]  # a script has none
            if not names:
                raise PlanError(
                    f"operator '{operator_}' is defined in '{file}', which workers cannot import; define it in a module of its "
                    "own and import that"
                )
            found[names[0]] = None
    return tuple(found)


def encode(graph: fx.Graph) -> list[dict[str, Any]]:
    """The nodes of a flat graph as JSON data. Raises: PlanError: an argument has no JSON form."""
    return [_encode_node(node) for node in graph.nodes]


def decode(nodes: Sequence[Mapping[str, Any]], *, trust: bool = False) -> fx.Graph:
    """The inverse of ``encode``; with ``trust`` in the maker of the data, the graph may call every operator.

    Raises: PlanError: a node is malformed, or its operator is not registered in this process or not allowed.
    """
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for data in nodes:
        try:
            kind, name = data["op"], data["name"]
            target = _decode_target(kind, data["target"])
            args = tuple(_decode(value, made) for value in data["args"])
            if kind == "output":
                args = (tuple(args[0]),)
            kwargs = {_identifier(key): _decode(value, made) for key, value in data["kwargs"].items()}
            made[name] = graph.create_node(kind, target, args, kwargs, name=_identifier(name))
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as failure:
            raise PlanError(f"node {data!r:.200} cannot be read: {type(failure).__name__}: {failure!s:.200}") from None
        if made[name].name != name:
            raise PlanError(f"node '{name}' stands twice, or has a name that Python keeps for itself")
    graph.lint()
    return graph if trust else allowed_graph(graph)


def _encode_node(node: fx.Node) -> dict[str, Any]:
    target = next((name for name, function in PYTHON.items() if node.target is function), str(node.target))
    try:
        return {
            "op": node.op,
            "name": node.name,
            "target": target,
            "args": [_encode(value) for value in node.args],
            "kwargs": {name: _encode(value) for name, value in node.kwargs.items()},
        }
    except TypeError as failure:
        raise PlanError(f"op '{node.name}' ({target}) cannot be saved: {failure}") from None


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"number": str(value)}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for name, kind in KINDS.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    raise TypeError(f"an argument is {type(value).__name__}, which has no JSON form")


def _decode(value: Any, made: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(item, made) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    if kind == "node":
        return made[text]
    if kind == "number":
        return NUMBERS[text]
    if kind == "device":
        return torch.device(text)
    if kind == "complex":
        return complex(*text)
    found = getattr(torch, text)
    if not isinstance(found, KINDS[kind]):
        raise TypeError(f"'{text}' is not a {kind}")
    return found


def _decode_target(kind: str, target: str) -> Any:
    """The name of a placeholder or a weight, or the registered operator of a call."""
    if kind == "placeholder":
        return _identifier(target)
    if kind == "get_attr":
        if not WEIGHT_NAME.fullmatch(target):
            raise PlanError(f"weight name {target!r:.200} holds characters other than letters, digits, '.', '_' and '-'")
        return target
    if kind == "output":
        return "output"
    if kind != "call_function":
        raise PlanError(f"a stage's graph holds no nodes of kind {kind!r:.200}")
    if target in PYTHON:
        return PYTHON[target]
    parts = target.split(".")
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    if len(parts) != 3 or not isinstance(found, OpOverload):
        raise PlanError(f"operator '{target:.200}' is not registered in this process; import the module that defines it first")
    return found


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise PlanError(f"{name!r:.200} is not the name of a value")
    return name
