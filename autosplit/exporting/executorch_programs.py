"""Export for ExecuTorch: a ``.pte`` program for each stage on CPU cores, and the stage of each op as a delegation tag."""

from pathlib import Path

import torch

from autosplit.backends.base import convert
from autosplit.backends.onnxfile import missing_packages
from autosplit.backends.quiet import quiet
from autosplit.errors import BackendError
from autosplit.exporting.base import Job, Target, port_names, write_json
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import zeros

TAGS = "delegation_tags.json"


def write(job: Job, folder: Path) -> list[str]:
    """Lower each stage. Raises: BackendError: ExecuTorch refuses an op."""
    rows = []
    for program in job.programs:
        path = folder / f"{program.name}.pte"
        convert(lower, program, path.absolute(), doing=f"while ExecuTorch lowered stage '{program.name}'")
        rows.append({"file": path.name, **port_names(program)})
    tags = {op: stage.name for stage in job.plan.stages for op in stage.ops}
    graph = job.traced.graph
    write_json(folder / TAGS, {"inputs": graph.inputs, "outputs": graph.outputs, "programs": rows, "tags": tags})
    return []


def lower(program: StageProgram, path: Path) -> None:
    """Write the program of a stage. Raises: BackendError: ExecuTorch refuses an op."""
    from executorch.exir import to_edge_transform_and_lower

    try:
        with quiet(), torch.no_grad():
            exported = torch.export.export(program.module, tuple(map(zeros, program.inputs)), strict=False)
            path.write_bytes(to_edge_transform_and_lower(exported).to_executorch().buffer)
    except Exception as failure:
        raise BackendError(f"ExecuTorch refuses stage '{program.name}': {str(failure).strip()[:300]}") from failure


TARGET = Target(
    name="executorch",
    writes=(
        f"stage0.pte, stage1.pte, ... with portable kernels; {TAGS}: op to the tag for a PartitionResult, each stage's values"
    ),
    lacks="devices other than CPU cores (their backends bring partitioners of their own), replicas, streams, bf16",
    checked="ExecuTorch's runtime runs the programs one after the other where it is installed, with equal outputs",
    write=write,
    missing=lambda: missing_packages("export to executorch", ("executorch",), "executorch"),
    kinds=("cpu",),
)
