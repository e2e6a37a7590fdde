"""A stage with custom operators on a runtime of ONNX files: torch runs these operators between files of the runtime.

The ops of a stage become pieces that alternate, as few as their order allows::

    ids -> [file 0] -> attend -> [file 2] -> attend -> [file 4] -> tokens

The files lie in folders of their own in the stage's folder, by the precision and the number of the piece. Torch runs its pieces
from the stage itself, so memory that an operator keeps between calls belongs to the stage.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from autosplit.backends.base import Runnable, on_threads
from autosplit.backends.eager import program_runnable
from autosplit.backends.instructions import together
from autosplit.backends.onnxfile import open_onnx, whole_folder
from autosplit.backends.simplifying import VIEWS, is_custom, simplified, specs_of
from autosplit.backends.staticio import StaticIO
from autosplit.tracing.flattening import is_op, is_pick
from autosplit.tracing.programs import PREPARED, weight
from autosplit.tracing.splitting import StageProgram, load_stage, part_of, save_stage
from autosplit.tracing.tensorspec import TensorSpec, copy_into, empty_like_spec
from autosplit.values.samples import Precision

Call = Callable[[], object]

PIECES, SIMPLIFIED = "pieces-{}", "simplified"
"""Folder of the pieces in a precision, inside the stage's folder, and in it the simplified stage: to simplify one, torch loads
800 modules."""


class Piece(NamedTuple):
    """Ops that run together, in torch if they are ``custom``, and the names of the values that they read and make for others."""

    custom: bool
    nodes: tuple[fx.Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def pieces(graph: fx.Graph) -> list[Piece]:
    """The pieces of a flat graph, in an order in which each finds its inputs.

    The number of a piece is the number of changes between custom and other ops on the longest way to it: custom ops are in pieces
    with odd numbers. Views of the outputs of custom ops are with them, and views and constants that they alone read.
    """
    in_torch, numbers = _in_torch(graph), dict[fx.Node, int]()
    for node in graph.nodes:
        if is_pick(node):
            numbers[node] = numbers[node.all_input_nodes[0]]
        elif is_op(node):
            before = max((numbers.get(source, 0) for source in node.all_input_nodes), default=0)
            numbers[node] = before + (before % 2 != (node in in_torch))
    members: dict[int, list[fx.Node]] = {}
    for node, number in numbers.items():
        members.setdefault(number, []).append(node)
    return [_piece(number % 2 == 1, members[number]) for number in sorted(members)]


def _in_torch(graph: fx.Graph) -> set[fx.Node]:
    """The custom ops, constants and views that only they read, and views of their outputs; views of kept memory are free."""
    found = {node for node in graph.nodes if is_custom(node)}
    for node in reversed(graph.nodes):
        if (node.target in VIEWS or _is_constant(node)) and node.users and all(reader in found for reader in node.users):
            found.add(node)
    for node in graph.nodes:
        if node.target in VIEWS and node.all_input_nodes[0] in found:
            found.add(node)
    return found


def _is_constant(node: fx.Node) -> bool:
    """Whether an op reads nothing."""
    return is_op(node) and not node.all_input_nodes


def _piece(custom: bool, nodes: Sequence[fx.Node]) -> Piece:
    inside = set(nodes)
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source.op != "get_attr")
    outputs = [node.name for node in nodes if any(reader not in inside for reader in node.users)]
    return Piece(custom, tuple(nodes), tuple(node.name for node in read if node not in inside), tuple(outputs))


def write_pieces(program: StageProgram, folder: Path, precision: Precision) -> dict[Path, StageProgram]:
    """The programs that a runtime computes, by their folders, which are made: one of pieces, or the stage as it is in its own."""
    if not any(map(is_custom, program.module.graph.nodes)):
        return {folder: program}
    program, place = simplified(program, as_stored=precision == "f32"), folder / PIECES.format(precision)
    found, specs = pieces(program.module.graph), specs_of(program)
    programs = {}
    for number, piece in enumerate(found):
        if not piece.custom:
            inputs, outputs = (tuple(specs[name] for name in names) for names in (piece.inputs, piece.outputs))
            programs[str(number)] = StageProgram(f"{program.name}-{number}", _module(program, piece), inputs, outputs)
    if not place.is_dir():
        with whole_folder(place) as building:
            for name, one in {SIMPLIFIED: program, **programs}.items():
                save_stage(one, building / name, folder)
    return {place / name: one for name, one in programs.items()}


def piece_folders(folder: Path, precision: Precision) -> list[Path]:
    """The folders of ``write_pieces``."""
    if not (place := folder / PIECES.format(precision)).is_dir():
        return [folder]
    return sorted((path for path in place.iterdir() if path.name != SIMPLIFIED), key=lambda path: int(path.name))


class Memory:
    """Memory of the values between pieces: it stays for all calls, and later pieces use it again after its last reader."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._taken: list[tuple[tuple[Any, ...], torch.Tensor]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor whose memory no value needs that is needed now; dense by default."""
        key = tuple(shape), dtype, None if stride is None else tuple(stride)
        if not (known := self._free.get(key)):
            known = [torch.empty(shape, dtype=dtype) if stride is None else torch.empty_strided(shape, stride, dtype=dtype)]
        self._taken.append((key, known.pop()))
        return self._taken[-1][1]

    def free(self, needed: Iterable[torch.Tensor]) -> None:
        """Let all memory be used again but that of the values that are still needed."""
        places = {value.untyped_storage().data_ptr() for value in needed}
        taken, self._taken = self._taken, []
        for key, value in taken:
            if value.untyped_storage().data_ptr() in places:
                self._taken.append((key, value))
            else:
                self._free.setdefault(key, []).append(value)


class Step(NamedTuple):
    """A call, and the names of the ops that it computes; none for a file."""

    ops: Sequence[str]
    call: Call


class Linked(NamedTuple):
    """A piece whose inputs and outputs stay where they are: its steps read the former and write the latter."""

    outputs: Sequence[torch.Tensor]
    steps: Sequence[Step]


def in_pieces(
    folder: Path,
    load: Callable[[Path], Runnable],
    threads: int,
    precision: Precision,
    trust: bool,
    link: Callable[[Path, Sequence[torch.Tensor], Memory], Linked | None] = lambda place, inputs, memory: None,
    watch: Callable[[Sequence[str], Call], Call] | None = None,
) -> Runnable:
    """The stage in ``folder`` as a function; ``load`` opens the files of a folder. Raises: as ``load`` and ``load_stage``.

    Pieces hand each other memory that stays for all calls, because binding and calls of torch take long where the processor's
    caches are full of weights: ``link`` opens the files of a folder over the memory of its inputs, with outputs in a ``Memory``,
    or gives None where it cannot. ``watch`` gives the function to call in place of ops that no file holds. Files are opened, and
    such ops watched, in the order of calls.
    """
    if not (places := folder / PIECES.format(precision)).is_dir():
        return load(folder)
    program = load_stage(places / SIMPLIFIED, trust=trust)
    sources = [empty_like_spec(spec) for spec in program.inputs]
    values = dict(zip((spec.name for spec in program.inputs), sources, strict=True))
    steps, memory, wanted = list[Step](), Memory(), [spec.name for spec in program.outputs]
    found = pieces(program.module.graph)
    last = {name: number for number, piece in enumerate(found) for name in piece.inputs} | dict.fromkeys(wanted, len(found))
    for number, piece in enumerate(found):
        inputs, place = [values[name] for name in piece.inputs], places / str(number)
        needed = {name: value for name, value in values.items() if last.get(name, -1) >= number}
        linked = _prepared(program, piece, needed, memory) if piece.custom else link(place, inputs, memory)
        if linked is None and piece.custom:
            module = program_runnable(StageProgram(place.name, _module(program, piece), (), ()), threads)
            specs = specs_of(program)
            linked = _copied(module, piece, inputs, [specs[name] for name in piece.outputs], memory)
        elif linked is None:
            linked = _copied(load(place), piece, inputs, [port.spec for port in open_onnx(place).outputs], memory)
        values |= zip(piece.outputs, linked.outputs, strict=True)
        if watch and piece.custom:  # an instruction that is called alone is written down anew each time
            steps += [step._replace(call=watch(step.ops, *together([step.call], threads))) for step in linked.steps]
        else:
            steps += linked.steps
        memory.free(values[name] for name in values if last.get(name, -1) > number)
    calls = [step.call for step in steps] if watch else together((step.call for step in steps), threads)

    def compute() -> None:
        for call in calls:
            call()

    return StaticIO(sources, [values[name] for name in wanted], on_threads(compute, threads), held=values)


def _prepared(program: StageProgram, piece: Piece, values: Mapping[str, torch.Tensor], memory: Memory) -> Linked | None:
    """A piece of ops that can be prepared, of views, and of constants."""
    known, steps, names = dict(values), list[Step](), list[str]()
    last = {source.name: number for number, node in enumerate(piece.nodes) for source in node.all_input_nodes}

    def tensor(source: fx.Node) -> torch.Tensor:
        return weight(program.module, str(source.target)) if source.op == "get_attr" else known[source.name]

    for number, node in enumerate(piece.nodes):
        args, kwargs = fx.map_arg(node.args, tensor), fx.map_arg(node.kwargs, tensor)
        target = cast(Callable[..., Any], node.target)
        names.append(node.name)
        if target in PREPARED:
            known[node.name], call = PREPARED[target](*args, empty=memory.empty, **kwargs)
            steps.append(Step(names, call))
            names = []
        elif target in VIEWS or _is_constant(node):
            known[node.name] = target(*args, **kwargs)
        else:
            return None
        needed = {*values, *piece.outputs, *(name for name, reader in last.items() if reader > number)}
        memory.free(value for name, value in known.items() if name in needed)
    return Linked([known[name] for name in piece.outputs], steps)


def _copied(call: Runnable, piece: Piece, inputs: Sequence[torch.Tensor], specs: Sequence[TensorSpec], memory: Memory) -> Linked:
    """A piece whose outputs are copied to memory that stays."""
    outputs = [memory.empty(spec.shape, spec.torch_dtype, spec.stride) for spec in specs]

    def run() -> None:
        for output, made in zip(outputs, call(inputs), strict=True):
            copy_into(output, made)

    return Linked(outputs, [Step([node.name for node in piece.nodes], run)])


def _module(program: StageProgram, piece: Piece) -> fx.GraphModule:
    return part_of(program.module, piece.nodes, piece.inputs, piece.outputs, "Piece")
