"""A stage with custom operators on a runtime of ONNX files: torch runs these operators between files of the runtime.

The ops of a stage become pieces that alternate, as few as their order allows::

    ids -> [file 0] -> attend -> [file 2] -> attend -> [file 4] -> tokens

The files lie in folders of their own in the stage's folder, by the number of the piece. Torch runs its pieces from the stage
itself, so what an operator keeps between calls is the stage's.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

from autosplit.backends.base import Runnable
from autosplit.backends.eager import program_runnable
from autosplit.backends.onnxfile import open_onnx, whole_folder
from autosplit.backends.translating import GROUPED
from autosplit.compat.torchparts import OpOverload, schema_of
from autosplit.tracing.flattening import is_op, is_pick
from autosplit.tracing.operators import defined_in
from autosplit.tracing.splitting import StageProgram, load_stage, part_of, save_stage
from autosplit.tracing.tensorspec import TensorSpec, empty_like_spec, fake_mode, laid_out, spec_of

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
    found = pieces(program.module.graph)
    if not any(piece.custom for piece in found):
        return {folder: program}
    specs = _specs(program)
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


def in_pieces(folder: Path, load: Callable[[Path], Runnable], threads: int, trust: bool) -> Runnable:
    """The stage in ``folder`` as a function; ``load`` opens the files of a folder. Raises: as ``load`` and ``load_stage``."""
    if not (folder / PIECES).is_dir():
        return load(folder)
    program = load_stage(folder, trust=trust)
    calls: list[tuple[Piece, Runnable]] = []
    for number, piece in enumerate(pieces(program.module.graph)):
        if piece.custom:
            part = StageProgram(f"{program.name}-{number}", _module(program, piece), (), ())
            calls.append((piece, program_runnable(part, threads)))
        else:
            place = folder / PIECES / str(number)
            ports = tuple(port.spec for port in open_onnx(place).inputs)
            calls.append((piece, partial(_call, load(place), ports)))
    names = [spec.name for spec in program.inputs]
    last = {name: place for place, (piece, _) in enumerate(calls) for name in piece.inputs}
    freed = [[name for name in piece.inputs if last[name] == place] for place, (piece, _) in enumerate(calls)]
    wanted = [spec.name for spec in program.outputs]

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        values = dict(zip(names, inputs, strict=True))
        for (piece, call), done in zip(calls, freed, strict=True):
            made = call([values[name] for name in piece.inputs])
            values.update(zip(piece.outputs, made, strict=True))
            for name in done:
                if name not in wanted:
                    del values[name]
        return [values[name] for name in wanted]

    return run


def _call(run: Runnable, specs: Sequence[TensorSpec], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Call a file with inputs laid out as it needs: a custom operator may give other strides than its shape rule."""
    return run([laid_out(value, spec, anywhere=True) for value, spec in zip(inputs, specs, strict=True)])


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
