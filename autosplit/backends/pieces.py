"""A stage with custom operators on a runtime of ONNX files: torch runs these operators between files of the runtime.

The ops of a stage become pieces that alternate, as few as their order allows::

    ids -> [file 0] -> attend -> [file 2] -> attend -> [file 4] -> tokens

The files lie in folders of their own in the stage's folder, by the number of the piece. Torch runs its pieces from the stage
itself, so what an operator keeps between calls is the stage's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

from autosplit.backends.base import Runnable, on_threads
from autosplit.backends.eager import program_runnable
from autosplit.backends.onnxfile import open_onnx, whole_folder
from autosplit.backends.translating import GROUPED
from autosplit.compat.torchparts import OpOverload, schema_of
from autosplit.tracing.flattening import is_op, is_pick
from autosplit.tracing.operators import defined_in
from autosplit.tracing.programs import PREPARED, weight
from autosplit.tracing.splitting import StageProgram, load_stage, part_of, save_stage
from autosplit.tracing.tensorspec import TensorSpec, copy_into, empty_like_spec, fake_mode, spec_of

PIECES = "pieces"
"""Folder of the pieces, inside the stage's folder."""


class Piece(NamedTuple):
    """Ops that run together, in torch if they are ``custom``, and the names of the values that they read and make for others."""

    custom: bool
    nodes: tuple[fx.Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def pieces(graph: fx.Graph) -> list[Piece]:
    """The pieces of a flat graph, in an order in which each finds its inputs.

    The number of a piece is the number of changes between custom and other ops on the longest way to it: custom ops are in pieces
    with odd numbers.
    """
    numbers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if is_pick(node):
            numbers[node] = numbers[node.all_input_nodes[0]]
        elif is_op(node):
            before = max((numbers.get(source, 0) for source in node.all_input_nodes), default=0)
            numbers[node] = before + (before % 2 != _is_custom(node))
    members: dict[int, list[fx.Node]] = {}
    for node, number in numbers.items():
        members.setdefault(number, []).append(node)
    return [_piece(number % 2 == 1, members[number]) for number in sorted(members)]


def simplified(program: StageProgram) -> StageProgram:
    """The stage without repeated ops, and with ``x / sqrt(y)`` for ``x * rsqrt(y)``, which ONNX Runtime fuses to a norm.

    Layers repeat views of the same positions, which would be a value between pieces for each layer.
    """
    nodes = [node for node in program.module.graph.nodes if is_op(node) or is_pick(node)]
    inputs, outputs = ([spec.name for spec in specs] for specs in (program.inputs, program.outputs))
    module = part_of(program.module, nodes, inputs, outputs, "Stage")
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        roots = [source for source in node.all_input_nodes if source.target is torch.ops.aten.rsqrt.default]
        if roots and len(node.all_input_nodes) == 2:
            _divide(node, roots[0])
    first: dict[tuple[str, ...], fx.Node] = {}
    for node in list(module.graph.nodes):
        if not is_op(node) or _is_custom(node) or node.name in outputs:
            continue
        kept = first.setdefault((str(node.target), repr(node.args), repr(node.kwargs)), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return replace(program, module=module)


def _divide(node: fx.Node, root: fx.Node) -> None:
    """Make a product with a reciprocal root a division by the root."""
    [factor] = [source for source in node.all_input_nodes if source is not root]
    with node.graph.inserting_before(node):
        divisor = node.graph.call_function(torch.ops.aten.sqrt.default, root.args)
    divisor.meta = dict(root.meta)
    node.target, node.args = torch.ops.aten.div.Tensor, (factor, divisor)


def _piece(custom: bool, nodes: Sequence[fx.Node]) -> Piece:
    inside = set(nodes)
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source.op != "get_attr")
    outputs = [node.name for node in nodes if any(reader not in inside for reader in node.users)]
    return Piece(custom, tuple(nodes), tuple(node.name for node in read if node not in inside), tuple(outputs))


def _is_custom(node: fx.Node) -> bool:
    """Whether it is an operator of the user or of autosplit that torch.onnx has no translation of."""
    target = node.target
    return isinstance(target, OpOverload) and schema_of(target).name not in GROUPED and bool(defined_in(target))


def write_pieces(program: StageProgram, folder: Path) -> dict[Path, StageProgram]:
    """The programs that a runtime computes, by their folders, which are made: one of pieces, or the stage as it is in its own."""
    if not any(map(_is_custom, program.module.graph.nodes)):
        return {folder: program}
    program = simplified(program)
    found, specs = pieces(program.module.graph), _specs(program)
    programs = {}
    for number, piece in enumerate(found):
        if not piece.custom:
            inputs, outputs = (tuple(specs[name] for name in names) for names in (piece.inputs, piece.outputs))
            programs[str(number)] = StageProgram(f"{program.name}-{number}", _module(program, piece), inputs, outputs)
    if not (folder / PIECES).is_dir():
        with whole_folder(folder / PIECES) as building:
            for name, one in programs.items():
                save_stage(one, building / name, folder)
    return {folder / PIECES / name: one for name, one in programs.items()}


def piece_folders(folder: Path) -> list[Path]:
    """The folders of ``write_pieces``."""
    return sorted((folder / PIECES).iterdir(), key=lambda path: int(path.name)) if (folder / PIECES).is_dir() else [folder]


class Linked(NamedTuple):
    """A piece whose inputs and outputs stay where they are: ``run`` reads the former and writes the latter."""

    outputs: Sequence[torch.Tensor]
    run: Callable[[], object]


def in_pieces(
    folder: Path,
    load: Callable[[Path], Runnable],
    threads: int,
    trust: bool,
    link: Callable[[Path, Sequence[torch.Tensor]], Linked | None] = lambda place, inputs: None,
) -> Runnable:
    """The stage in ``folder`` as a function; ``load`` opens the files of a folder. Raises: as ``load`` and ``load_stage``.

    Pieces hand each other memory that stays for all calls, because binding and calls of torch take long where the processor's
    caches are full of weights: ``link`` opens the files of a folder over the memory of its inputs, or gives None where it cannot.
    """
    if not (folder / PIECES).is_dir():
        return load(folder)
    program = simplified(load_stage(folder, trust=trust))
    specs = _specs(program)
    sources = [empty_like_spec(spec) for spec in program.inputs]
    values = dict(zip((spec.name for spec in program.inputs), sources, strict=True))
    calls = list[Callable[[], object]]()
    for number, piece in enumerate(pieces(program.module.graph)):
        inputs, place = [values[name] for name in piece.inputs], folder / PIECES / str(number)
        linked = _prepared(program, piece, values) if piece.custom else link(place, inputs)
        if linked is None and piece.custom:
            module = program_runnable(StageProgram(place.name, _module(program, piece), (), ()), threads)
            linked = _copied(module, inputs, [specs[name] for name in piece.outputs])
        elif linked is None:
            linked = _copied(load(place), inputs, [port.spec for port in open_onnx(place).outputs])
        values |= zip(piece.outputs, linked.outputs, strict=True)
        calls.append(linked.run)
    wanted = [spec.name for spec in program.outputs]

    def run(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        for source, value in zip(sources, given, strict=True):
            source.copy_(value)
        for call in calls:
            call()
        return [values[name].clone() for name in wanted]  # `values` keeps the memory that sessions read by address

    return on_threads(run, threads)


def _prepared(program: StageProgram, piece: Piece, values: Mapping[str, torch.Tensor]) -> Linked | None:
    """A piece of one op that can be prepared."""
    [node, *others] = piece.nodes
    if others or node.target not in PREPARED:
        return None

    def tensor(source: fx.Node) -> torch.Tensor:
        return weight(program.module, str(source.target)) if source.op == "get_attr" else values[source.name]

    prepare: Any = PREPARED[node.target]
    found, run = prepare(*fx.map_arg(node.args, tensor), **fx.map_arg(node.kwargs, tensor))
    return Linked([found], run)


def _copied(call: Runnable, inputs: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> Linked:
    """A piece whose outputs are copied to memory that stays."""
    outputs = [empty_like_spec(spec) for spec in specs]

    def run() -> None:
        for output, made in zip(outputs, call(inputs), strict=True):
            copy_into(output, made)

    return Linked(outputs, run)


def _module(program: StageProgram, piece: Piece) -> fx.GraphModule:
    return part_of(program.module, piece.nodes, piece.inputs, piece.outputs, "Piece")


def _specs(program: StageProgram) -> Mapping[str, TensorSpec]:
    """The specs of all values of a stage, from its inputs' alone."""
    found = _Specs(program.module)
    with fake_mode([]), torch.no_grad():
        found.run(*(empty_like_spec(spec) for spec in program.inputs))
    return found.specs


class _Specs(fx.Interpreter):
    """Runs a graph and keeps the specs of its values."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.specs: dict[str, TensorSpec] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.specs[n.name] = spec_of(n.name, value)
        return value
