"""A model in the parts that a backend takes, where it refuses some ops: they are timed one by one and added up."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autosplit.deploying.workspace import Workspace
from autosplit.measuring.worker import INPUTS
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import split
from autosplit.values.graph import Graph
from autosplit.values.samples import Measured, Precision, Samples


@dataclass(frozen=True, slots=True)
class Part:
    """Ops that a backend is timed on together, and the folder that they are saved in with their inputs."""

    ops: tuple[str, ...]
    folder: Path


def save_parts(traced: Traced, refused: Collection[str], backend: str, precision: Precision, workspace: Workspace) -> list[Part]:
    """The model without the refused ops in as few parts as can be, each prepared for the backend.

    Raises: BackendError: the backend refuses a part all the same.
    """
    label = {op.name: "refused" if op.name in refused else "accepted" for op in traced.graph.ops}
    stages = traced.graph.runs(label, label)
    programs = split(traced, stages)
    values = _values(traced, {spec.name for program in programs for spec in program.inputs})
    parts = []
    for number, program in enumerate(programs):
        if label[stages[number][0]] == "accepted":
            part = Part(stages[number], workspace.add(program, stages[number], backend, precision).folder)
            torch.save([values[spec.name] for spec in program.inputs], part.folder / INPUTS)
            parts.append(part)
    return parts


def graph_of(graph: Graph, part: Part) -> Graph:
    """The graph with the ops of the part alone; the values of the others come from nowhere."""
    kept = set(part.ops)
    return replace(graph, ops=tuple(op for op in graph.ops if op.name in kept))


def joined(parts: Sequence[Measured], refused: Mapping[str, str]) -> Measured:
    """What was measured of the parts, as of all ops that are not refused."""
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
    """Pass by pass the sum of the parts, as many passes as the part with the fewest has."""
    known = [part.samples_s for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    count = min(map(len, known))
    passes = zip(*(samples[-count:] for samples in known), strict=True)
    return Samples(tuple(float(f"{sum(one):.5g}") for one in passes))


def _values(traced: Traced, names: Collection[str]) -> dict[str, torch.Tensor]:
    """These values of one run of the model."""
    runner = _Keeping(traced.program, names)
    with torch.inference_mode():
        runner.run(*traced.example_inputs)
    return runner.kept


class _Keeping(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, names: Collection[str]) -> None:
        super().__init__(module)
        self.kept: dict[str, torch.Tensor] = {}
        self._names = names

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self._names:
            self.kept[n.name] = value
        return value
