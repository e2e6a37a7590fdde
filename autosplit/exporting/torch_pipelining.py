"""Export for torch.distributed.pipelining: a program for each rank, and a script that runs them under torchrun."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autosplit.backends.base import convert
from autosplit.backends.quiet import quiet
from autosplit.errors import PlanError, raise_faults
from autosplit.exporting.base import Job, Target, write_json
from autosplit.tracing.freesizes import any_strides
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import TensorSpec, row_major, zeros
from autosplit.values.machine import parse_device

SCRIPT, RANKS, INPUTS = "run.py", "ranks.json", "inputs.pt"


def write(job: Job, folder: Path) -> list[str]:
    """Export each rank; values that later ranks need pass through those between. Raises: PlanError: a value is a scalar."""
    graph, specs = job.traced.graph, job.traced.specs
    faults = [
        f"{kind} '{name}' is a scalar, and torch cuts requests along the first dimension"
        for kind, names in (("input", graph.inputs), ("output", graph.outputs))
        for name in names
        if not specs[name].shape
    ]
    raise_faults(PlanError, "torch.distributed.pipelining cannot express these values", faults)
    borders = crossing(job.programs, graph.inputs, graph.outputs)
    ranks: list[dict[str, Any]] = []
    for number, (program, stage) in enumerate(zip(job.programs, job.plan.stages, strict=True)):
        receives, sends = number > 0, number + 1 < len(job.programs)
        inputs = [_dense(specs[name]) if receives else specs[name] for name in borders[number]]
        outputs = [_dense(specs[name]) if sends else specs[name] for name in borders[number + 1]]
        path = (folder / f"rank{number}.pt2").absolute()
        doing = f"while stage '{program.name}' was exported for rank {number}"
        convert(export_rank, program, inputs, borders[number + 1], sends, path, doing=doing)
        device = parse_device(stage.devices[0])
        ranks.append(
            {
                "file": f"rank{number}.pt2",
                "device": "cpu" if device.kind == "cpu" else device.name,
                "cores": list(device.cores),
                "threads": stage.threads,
                "inputs": [asdict(spec) for spec in inputs],
                "outputs": [asdict(spec) for spec in outputs],
            }
        )
    write_json(folder / RANKS, {"schema": 1, "ranks": ranks})
    torch.save(dict(zip(graph.inputs, job.traced.example_inputs, strict=True)), folder / INPUTS)
    shutil.copyfile(Path(__file__).with_name("torch_pipelining_script.py"), folder / SCRIPT)
    return [f"run it: torchrun --nproc-per-node {len(ranks)} {SCRIPT} --inputs {INPUTS} --outputs outputs.pt"]


class Carrying(nn.Module):
    """A stage that also passes on the values that later ranks need: a rank receives from the rank before it only.

    ``torch.distributed`` sends row-major tensors only, so ``sends`` packs the outputs, and the stage takes inputs of any strides.
    """

    def __init__(self, program: StageProgram, reads: Sequence[str], makes: Sequence[str], sends: bool) -> None:
        super().__init__()
        self.stage, self.reads, self.makes, self.sends = any_strides(program.module), tuple(reads), tuple(makes), sends
        self.inputs, self.outputs = ([spec.name for spec in specs] for specs in (program.inputs, program.outputs))

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The values after this stage, from the values before it."""
        named = dict(zip(self.reads, values, strict=True))
        named |= zip(self.outputs, self.stage(*(named[name] for name in self.inputs)), strict=True)
        made = (named[name] for name in self.makes)
        return tuple(value.contiguous() for value in made) if self.sends else tuple(made)


def export_rank(program: StageProgram, inputs: Sequence[TensorSpec], makes: Sequence[str], sends: bool, path: Path) -> None:
    """Export the program of a rank to ``path``, from the values that it gets to those that it hands on."""
    carrying = Carrying(program, [spec.name for spec in inputs], makes, sends)
    with quiet(), torch.no_grad():
        exported = torch.export.export(carrying, tuple(map(zeros, inputs)), strict=False)
    torch.export.save(exported, path)


def _dense(spec: TensorSpec) -> TensorSpec:
    """The spec of a row-major tensor with this shape."""
    return replace(spec, stride=row_major(spec.shape), offset_bytes=0)


def crossing(programs: Sequence[StageProgram], inputs: Sequence[str], outputs: Sequence[str]) -> list[tuple[str, ...]]:
    """The values on each border of the ranks: the model's inputs first, its outputs last.

    A border between two ranks carries every value that a later rank reads and an earlier one makes or receives.
    """
    borders = [tuple(inputs)]
    there = list(inputs)
    for number, program in enumerate(programs[:-1]):
        there += [spec.name for spec in program.outputs]
        later = {spec.name for other in programs[number + 1 :] for spec in other.inputs} | set(outputs)
        borders.append(tuple(name for name in there if name in later))
    return [*borders, tuple(outputs)]


TARGET = Target(
    name="torch-pipelining",
    writes=(
        f"rank0.pt2, rank1.pt2, ..., {RANKS}, {INPUTS} and {SCRIPT}: PipelineStage and a forward-only schedule under torchrun"
    ),
    lacks="replicas, streams, bf16, inputs and outputs without a dimension to cut into microbatches",
    checked="three ranks over gloo, started with what torchrun sets, and several microbatches, equal outputs",
    write=write,
)
