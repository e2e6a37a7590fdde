"""The model as files that workers load: whole, or in subgraphs where a backend refuses ops or an accelerator has no room for
all weights, and stages around a typical cut."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from autosplit.backends import conformance
from autosplit.backends.base import get_backend
from autosplit.backends.profiling import onnx_names
from autosplit.backends.workspace import Workspace
from autosplit.errors import BackendError, refusals
from autosplit.measuring.attribution import value_names
from autosplit.measuring.cut_cost import Cut, loses_at_cuts, save_cut
from autosplit.measuring.stage_timer import INPUTS
from autosplit.tracing.capturing import Traced
from autosplit.tracing.programs import computed_values
from autosplit.tracing.splitting import StageProgram, split, unsplit
from autosplit.tracing.verifying import own_storage
from autosplit.values.graph import Graph
from autosplit.values.machine import Device
from autosplit.values.samples import FROM_ONNX, Measured, Precision, Samples


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Ops that a backend is timed on together, the folder in which they are saved with their inputs, and their names there."""

    graph: Graph
    folder: Path
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BackendFiles:
    """The files that one backend is timed on.

    Attributes:
        subgraphs: the whole model, or all of it but the refused ops.
        refused: op name to the reason, for each op that the backend refuses.
        cut: folders of the stages before and behind the typical cut and of both as one; None if the cut is not timed.
    """

    subgraphs: Sequence[Subgraph]
    refused: Mapping[str, str] = field(default_factory=dict)
    cut: tuple[Path, Path, Path] | None = None


@dataclass(frozen=True)
class ModelFiles:
    """A model saved in a workspace, for backends that compute in one precision; ``cut`` is None if none is timed."""

    traced: Traced
    program: StageProgram
    folder: Path
    cut: Cut | None
    precision: Precision
    workspace: Workspace

    @staticmethod
    def save(traced: Traced, cut: Cut | None, precision: Precision, workspace: Workspace) -> "ModelFiles":
        """Save the model and its example inputs."""
        program = unsplit(traced)
        folder = workspace.save(program)
        examples = dict(zip(traced.graph.inputs, traced.example_inputs, strict=True))  # the stage takes those that an op reads
        torch.save([examples[spec.name] for spec in program.inputs], folder / INPUTS)
        return ModelFiles(traced, program, folder, cut, precision, workspace)

    def prepare(self, backend: str) -> BackendFiles:
        """Write the files that a backend loads. Raises: BackendError: it refuses every op."""
        try:
            if refused := conformance.refused(self.traced, backend):
                raise BackendError(f"{backend} refuses {refusals(refused)}", refused)
            get_backend(backend).prepare(self.program, self.folder, self.precision)
        except BackendError as failure:
            return self.divide(backend, failure)
        cut = None
        if self.cut is not None and loses_at_cuts(backend):
            with contextlib.suppress(BackendError):
                cut = save_cut(self.traced, self.cut, backend, self.precision, self.workspace)
        names = _names(backend, self.folder, self.traced.graph)
        return BackendFiles([Subgraph(self.traced.graph, self.folder, names)], cut=cut)

    def divide(self, backend: str, failure: BackendError) -> BackendFiles:
        """Prepare the subgraphs of ops that a backend accepts, after it failed on the whole model.

        Raises: failure: it refuses no op or every op. BackendError: it refuses a subgraph.
        """
        refused = failure.refused
        while refused and len(refused) < len(self.program.ops):
            try:
                return self._accepted(backend, refused)
            except BackendError as another:
                if another.refused.keys() <= refused.keys():
                    raise
                refused = {**refused, **another.refused}
        raise failure

    def _accepted(self, backend: str, refused: Mapping[str, str]) -> BackendFiles:
        """Prepare the subgraphs without the refused ops. Raises: BackendError: the backend refuses one."""
        label = {op.name: "refused" if op.name in refused else "accepted" for op in self.traced.graph.ops}
        stages = self.traced.graph.runs(label, label)
        return BackendFiles(self._subgraphs(backend, stages, lambda ops: label[ops[0]] == "accepted"), refused)

    def in_pieces(self, backend: str, device: Device, most_bytes: int) -> BackendFiles:
        """Save the model in ``pieces_of`` it, for an accelerator without room for all weights."""
        return BackendFiles(self._subgraphs(backend, pieces_of(self.traced.graph, most_bytes), devices=[device]))

    def _subgraphs(
        self,
        backend: str,
        stages: Sequence[Sequence[str]],
        is_wanted: Callable[[Sequence[str]], bool] = lambda ops: True,
        devices: Sequence[Device] = (),
    ) -> list[Subgraph]:
        """Save the wanted ones of these stages with their inputs, and prepare them for the devices."""
        graph, programs = self.traced.graph, split(self.traced, stages)
        read = {spec.name for program in programs for spec in program.inputs}
        values = computed_values(self.traced.program, self.traced.example_inputs, read)
        subgraphs = []
        for ops, program in zip(stages, programs, strict=True):
            if is_wanted(ops):
                folder = self.workspace.add(program, backend, self.precision, devices)
                torch.save(own_storage([values[spec.name] for spec in program.inputs]), folder / INPUTS)
                part = replace(graph, ops=tuple(op for op in graph.ops if op.name in set(ops)))
                subgraphs.append(Subgraph(part, folder, _names(backend, folder, part)))
        return subgraphs


def pieces_of(graph: Graph, most_bytes: int) -> list[tuple[str, ...]]:
    """Consecutive ops whose weights take at most so many bytes together, or those of a single op.

    An op that brings no further weights stays with those before it.
    """
    pieces, held = list[list[str]](), set[str]()
    for op in graph.ops:
        further = set(op.weights) - held
        if not pieces or (further and sum(graph.weights[name].num_bytes for name in held | further) > most_bytes):
            pieces.append([])
            held = set()
        pieces[-1].append(op.name)
        held |= set(op.weights)
    return [tuple(piece) for piece in pieces]


def _names(backend: str, folder: Path, graph: Graph) -> dict[str, str]:
    """The names by which a backend may know each op: of the graph, and of nodes and values in its ONNX file."""
    names = value_names(graph)
    kept = onnx_names(folder) if backend in FROM_ONNX else {}
    return {**names, **{name: names[source] for name, source in kept.items() if source in names}}


def merged(parts: Sequence[Measured], refused: Mapping[str, str]) -> Measured:
    """Measurements of subgraphs as one of all ops that are not refused: ops side by side, passes added up."""
    if len(parts) == 1 and not refused:
        return parts[0]
    return replace(
        parts[0],
        ops={op: samples for part in parts for op, samples in part.ops.items()},
        source=" and ".join(sorted({part.source for part in parts})),
        whole=_added([part.whole for part in parts]),
        alone=_added([part.alone for part in parts]),
        error=max((part.error for part in parts if part.error is not None), default=None),
        refused=refused,
    )


def _added(parts: Sequence[Samples | None]) -> Samples | None:
    """The sum over the parts, pass by pass, for the last passes that all parts have."""
    known = [part.samples_s for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    count = min(map(len, known))
    passes = zip(*(samples[-count:] for samples in known), strict=True)
    return Samples(tuple(float(f"{sum(one):.5g}") for one in passes))
