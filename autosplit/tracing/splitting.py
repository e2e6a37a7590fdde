"""split() makes a program of each stage's ops, with its own weights, that runs in any process.

A stage is any set of ops such that no value flows to an earlier stage; ops of one module may be in several stages. A stage's
program takes the values of earlier stages (or the graph's inputs) that it reads, and returns those that later stages (or the
graph's outputs) need. A weight that two stages read is in both.

A stage folder holds ``stage.json`` (names, layouts, and the nodes as JSON: see ``programs``) and ``weights.safetensors``, which
processes map (see ``weightsfile``), so that replicas share its pages. Reading a folder runs no code from it.

A state (``programs.state_names``) is a weight that is not in the file. It is zeros in memory of the process that loads the stage,
or in memory that ``states_in`` names, which outlives the process.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autosplit.compat.torchparts import OpOverload, schema_of
from autosplit.errors import PlanError, raise_faults
from autosplit.files import content_hash, drafted, read_mapping
from autosplit.parsing import MALFORMED
from autosplit.tables import bytes_text
from autosplit.tracing import programs
from autosplit.tracing.capturing import Traced
from autosplit.tracing.flattening import is_op, is_pick
from autosplit.tracing.indexlimits import Limits
from autosplit.tracing.tensorspec import TensorSpec, spec_from_dict, spec_of, storage_bytes, view_storage
from autosplit.tracing.valueranges import Assumed, assumed_limits
from autosplit.tracing.weightsfile import map_weights, write_weights
from autosplit.values.placement import placement_faults

SCHEMA = 6
MOST_LINE = 300
"""Most characters of the line of code of an op."""

WEIGHTS = "weights.safetensors"
DESCRIBED = ("name", "ops", "inputs", "outputs", "limits", "weights", "requires_grad", "nodes")
FREE = "free"
"""The field of a stage that runs at every size."""


@dataclass(frozen=True, eq=False)
class StageProgram:
    """One stage, ready to run: ``module(*inputs)`` returns the tuple of its outputs.

    ``module`` is a flat fx graph of ATen ops: positional placeholders in the order of ``inputs``, weights by get_attr. ``limits``
    holds the integers that inputs are assumed to be, by assumption and name (``valueranges.assumed_limits``). ``free`` holds the
    axes of inputs that may have any size of a dimension (``freesizes``), such as ``{"x": {1: "seq"}}``; ``inputs`` and
    ``outputs`` are then at the largest.
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    limits: Mapping[str, Mapping[str, Limits]] = field(default_factory=dict)
    free: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """The names of its ops in the order of execution."""
        return tuple(node.name for node in self.module.graph.nodes if is_op(node))

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """Its weights by name."""
        return {name: programs.weight(self.module, name) for name in programs.weight_names(self.module.graph)}

    @cached_property
    def states(self) -> tuple[str, ...]:
        """The names of those of its weights that are states."""
        return tuple(programs.state_names(self.module.graph))

    @cached_property
    def packages(self) -> tuple[str, ...]:
        """The modules with its custom operators, for workers to import. Raises: PlanError: one cannot be imported."""
        return programs.packages(self.module.graph)

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for tensor in self.weights.values())

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(spec.name for spec in specs) for specs in (self.inputs, self.outputs))
        weights = bytes_text(self.weight_bytes)
        return f"StageProgram({self.name!r}, {len(self.ops)} ops, {weights} of weights, ({inputs}) -> ({outputs}))"


def split(traced: Traced, stages: Sequence[Sequence[str]]) -> list[StageProgram]:
    """Make one program for each stage; in sequence they equal ``traced.program`` bit for bit.

    ``stages`` are the names of the ops of each, in any order within one; a stage reads values of earlier stages only.
    Returns: programs named 'stage0', 'stage1', ... that share the weights of ``traced``.
    Raises: PlanError: ops are unknown, missing or placed twice, a stage is empty, or a value flows backwards.
    """
    graph = traced.graph
    faults = placement_faults([(str(number), ops) for number, ops in enumerate(stages)], graph)
    raise_faults(PlanError, f"stages do not fit graph '{graph.name}'", faults)
    stage_of = {op: number for number, ops in enumerate(stages) for op in ops}
    needed_by: dict[str, set[int]] = {value: set() for value in graph.values}
    for op in graph.ops:
        for value in op.inputs:
            needed_by[value].add(stage_of[op.name])
    for value in graph.outputs:
        needed_by[value].add(len(stages))
    made_in = {value: stage_of[op.name] for op in graph.ops for value in op.outputs}
    found = []
    for stage in range(len(stages)):
        inputs = [value for value, readers in needed_by.items() if stage in readers and made_in.get(value) != stage]
        outputs = [value for value, readers in needed_by.items() if made_in.get(value) == stage and readers - {stage}]
        found.append(_program(traced, f"stage{stage}", stage_of, stage, inputs, outputs))
    return found


def unsplit(traced: Traced) -> StageProgram:
    """The whole model as one stage."""
    return split(traced, [[op.name for op in traced.graph.ops]])[0]


def _program(
    traced: Traced, name: str, stage_of: Mapping[str, int], stage: int, inputs: Sequence[str], outputs: Sequence[str]
) -> StageProgram:
    def is_inside(node: fx.Node) -> bool:
        return stage_of.get((node.all_input_nodes[0] if is_pick(node) else node).name) == stage

    module = part_of(traced.program, filter(is_inside, traced.program.graph.nodes), inputs, outputs, name.capitalize())
    limits = assumed_limits(traced.program, inputs) if traced.source.values == "finite" else {}
    specs = traced.specs.__getitem__
    return StageProgram(name, module, tuple(map(specs, inputs)), tuple(map(specs, outputs)), limits)


def part_of(
    program: fx.GraphModule, nodes: Iterable[fx.Node], inputs: Sequence[str], outputs: Sequence[str], name: str
) -> fx.GraphModule:
    """Copy some nodes of a flat program to one of its own, a class ``name``; weights are read before their first use."""
    graph = fx.Graph()
    copies: dict[str, fx.Node] = {}
    for value in inputs:
        copies[value] = graph.create_node("placeholder", value, name=value)

    def copy_of(node: fx.Node) -> fx.Node:
        if node.name not in copies:
            copies[node.name] = graph.node_copy(node, copy_of)
        return copies[node.name]

    for node in nodes:
        copy_of(node)
    graph.output(tuple(copies[value] for value in outputs))
    weights = {weight: programs.weight(program, weight) for weight in programs.weight_names(graph)}
    return fx.GraphModule(weights, graph, class_name=name)


def save_stage(program: StageProgram, folder: Path, weights_of: Path | None = None) -> None:
    """Write the stage to ``folder``, which is replaced if it exists; the last of several writers wins.

    ``weights_of`` is the folder, on the same disk, of a saved stage with the same weights: then their file is shared by a hard
    link, and processes map one copy for both.

    The folder never holds a part of a stage, but it is absent for a moment while it is replaced. ``load_stage`` refuses to read
    it during that moment, or one file before and the other one after it.
    Raises: PlanError: an op has an argument with no JSON form. OSError: the disk is full or the folder cannot be written; the old
        stage stays.
    """
    specs = [replace(spec_of(name, tensor), offset_bytes=0) for name, tensor in program.weights.items()]
    description = {
        "name": program.name,
        "ops": list(program.ops),
        "inputs": [asdict(spec) for spec in program.inputs],
        "outputs": [asdict(spec) for spec in program.outputs],
        "limits": {kind: {name: list(one) for name, one in held.items()} for kind, held in program.limits.items()},
        "weights": [asdict(spec) for spec in specs],
        "requires_grad": [name for name, tensor in program.weights.items() if tensor.requires_grad],
        "nodes": programs.encode(program.module.graph),
        **({FREE: {name: list(axes.items()) for name, axes in program.free.items()}} if program.free else {}),
    }
    key = content_hash(description)
    folder = Path(folder)
    with drafted(folder) as draft:
        file = {"weights_key": key, "weights_file_bytes": 0}
        if weights_of is None:
            kept = [spec for spec in specs if spec.name not in program.states]
            file["weights_file_bytes"] = write_weights(draft / WEIGHTS, key, program.weights, kept)
        else:
            file = {field: _description(weights_of)[field] for field in file}
            os.link(weights_of / WEIGHTS, draft / WEIGHTS)
        lines = {node.name: programs.user_line(node) for node in program.module.graph.nodes if is_op(node)}
        text = json.dumps({"schema": SCHEMA, "key": key, **file, **description, "lines": lines}, indent=1)
        (draft / "stage.json").write_text(text, encoding="utf-8")
        _replace(folder, draft)


def _replace(folder: Path, draft: Path) -> None:
    """Move ``draft`` to ``folder``, even while other writers do so. Raises: OSError: the old folder stays."""
    aside = draft.with_name(f"{draft.name}.old")
    try:
        while True:
            try:
                draft.rename(folder)
                break
            except OSError as failure:
                if failure.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            shutil.rmtree(aside, ignore_errors=True)
            # Another writer may have moved it away already.
            with contextlib.suppress(FileNotFoundError):
                folder.rename(aside)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.rename(folder)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load_stage(folder: Path, *, trust: bool = False) -> StageProgram:
    """Load the stage in ``folder``; its weights are mapped, and read on first use.

    With ``trust`` it may call operators that are not known to be safe in a stranger's graph (see ``operators``).
    Raises: PlanError: the folder is missing, truncated, of another version, not a stage, its files are of different stages, or it
        calls an operator that is not allowed.
    """
    folder = Path(folder)
    data = _description(folder)
    try:
        specs = {kind: tuple(spec_from_dict(spec) for spec in data[kind]) for kind in ("inputs", "outputs", "weights")}
        graph = programs.decode(data["nodes"], trust=trust)
        states = programs.state_names(graph)
        kept = [spec for spec in specs["weights"] if spec.name not in states]
        weights = map_weights(folder / WEIGHTS, data["weights_key"], data["weights_file_bytes"], kept)
        weights |= {spec.name: _state(spec) for spec in specs["weights"] if spec.name in states}
        faults = [f"'{name}' is not among its weights" for name in programs.weight_names(graph) if name not in weights]
        raise_faults(PlanError, f"stage folder '{folder}' does not fit together", faults)
        found = assemble(str(data["name"]), graph, weights, data["requires_grad"], specs["inputs"], specs["outputs"])
        for node in filter(is_op, found.module.graph.nodes):
            node.meta[programs.LINE] = f"{data['lines'][node.name]:.{MOST_LINE}}"
        free = {str(name): {int(axis): str(dim) for axis, dim in axes} for name, axes in data.get(FREE, {}).items()}
        return replace(found, limits=_limits(data), free=free)
    except (*MALFORMED, RuntimeError, SyntaxError) as failure:  # the last two are torch's, of a layout or a graph
        raise _incomplete(folder, failure) from None


States = MutableMapping[str, torch.Tensor]
"""The memory of states by name, as bytes."""

_states: ContextVar[States] = ContextVar("memory of the states of stages that are loaded")


@contextlib.contextmanager
def states_in(memory: States) -> Iterator[None]:
    """Let stages that are loaded in the meantime have their states in this memory; missing states are added as zeros.

    The variants of a stage share their states in this way.
    """
    before = _states.set(memory)
    try:
        yield
    finally:
        _states.reset(before)


def _state(spec: TensorSpec) -> torch.Tensor:
    """The memory of a state."""
    memory = _states.get({})
    if spec.name not in memory:
        memory[spec.name] = torch.zeros(storage_bytes(spec), dtype=torch.uint8)
    return view_storage(memory[spec.name], spec)


def saved_states(folder: Path) -> list[TensorSpec]:
    """The states of the stage in ``folder``, none if none is saved there; its operators are registered in this process.

    Raises: PlanError: the stage is incomplete.
    """
    if not is_saved(folder):
        return []
    data = _description(folder)
    try:
        if not any(str(node["target"]).startswith("autosplit.") for node in data["nodes"]):
            return []
        names = programs.state_names(programs.decode(data["nodes"], trust=True))
        return [spec for spec in map(spec_from_dict, data["weights"]) if spec.name in names]
    except MALFORMED as failure:
        raise _incomplete(folder, failure) from None


def assemble(
    name: str,
    graph: fx.Graph,
    weights: dict[str, torch.Tensor],
    requires_grad: Sequence[str],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
) -> StageProgram:
    """A stage of a graph that was read and its weights; those of ``requires_grad`` are made to ask for gradients."""
    for weight in requires_grad:
        weights[weight] = weights[weight].detach().requires_grad_()  # without detach, views take the flag of the mapped tensor
    return StageProgram(name, fx.GraphModule(weights, graph, class_name="Stage"), inputs, outputs)


def saved_limits(folder: Path, assumed: Assumed) -> list[tuple[int, str, int, int]]:
    """Place, name, least and largest integer of each input that an assumption limits; none if no stage is in ``folder``."""
    if not is_saved(folder):
        return []
    data = _description(folder)
    limits, names = _limits(data).get(assumed, {}), [spec["name"] for spec in data["inputs"]]
    return [(place, name, *limits[name]) for place, name in enumerate(names) if name in limits]


def _limits(data: Mapping[str, Any]) -> dict[str, dict[str, Limits]]:
    return {
        str(kind): {str(name): (int(low), int(high)) for name, (low, high) in held.items()}
        for kind, held in data["limits"].items()
    }


def is_saved(folder: Path) -> bool:
    """Whether a stage is saved in ``folder``."""
    return (folder / "stage.json").is_file()


def saved_weight_bytes(folder: Path) -> int:
    """Bytes of the weights of the stage in ``folder``, without the header and the gaps of its file. Raises: PlanError."""
    try:
        return sum(spec_from_dict(spec).num_bytes for spec in _description(folder)["weights"])
    except MALFORMED as failure:
        raise _incomplete(folder, failure) from None


def saved_weight(folder: Path, name: str) -> torch.Tensor | None:
    """One weight of the stage in ``folder``, mapped from its file; None if the stage has no such weight. Raises: PlanError."""
    data = _description(folder)
    specs = [spec for spec in map(spec_from_dict, data["weights"]) if spec.name == name]
    return map_weights(folder / WEIGHTS, data["weights_key"], data["weights_file_bytes"], specs)[name] if specs else None


def _description(folder: Path) -> dict[str, Any]:
    """The content of ``stage.json``. Raises: PlanError: it is missing, of another version, incomplete or changed."""
    data = read_mapping(folder / "stage.json", "stage", SCHEMA, PlanError)
    try:
        described = {field: data[field] for field in (*DESCRIBED, *([FREE] if FREE in data else []))}
        same = content_hash(described) == data["key"] and int(data["weights_file_bytes"]) >= 0
    except MALFORMED as failure:
        raise _incomplete(folder, failure) from None
    if not same:
        raise PlanError(f"stage file '{folder / 'stage.json'}' was changed after it was saved. Save the stage again.")
    return data


def _incomplete(folder: Path, failure: Exception) -> PlanError:
    reason = str(failure).partition("\n")[0]  # torch appends its call stack
    return PlanError(f"stage file '{folder / 'stage.json'}' is incomplete: {reason}. Save the stage again.")


def place_stage(program: StageProgram, device: torch.device | str) -> StageProgram:
    """Move a stage to another device: its weights, and the tensors that its ops create."""
    target, graph = torch.device(device), deepcopy(program.module.graph)
    for node in graph.nodes:
        places = [name for name, value in node.kwargs.items() if isinstance(value, torch.device)]
        node.kwargs = {**node.kwargs, **dict.fromkeys(["device"] if _creates(node) else places, target)}
    weights = {name: tensor.detach().to(target).requires_grad_(tensor.requires_grad) for name, tensor in program.weights.items()}
    return replace(program, module=fx.GraphModule(weights, graph, class_name=type(program.module).__name__))


def _creates(node: fx.Node) -> bool:
    """Whether an op creates a tensor without inputs; without a device argument it is in host memory."""
    if node.all_input_nodes or not isinstance(node.target, OpOverload):
        return False
    return any(argument.name == "device" for argument in schema_of(node.target).arguments)
