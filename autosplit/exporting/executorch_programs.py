"""Export for ExecuTorch: a ``.pte`` program for each stage on CPU cores, and the stage of each op as a delegation tag."""

from pathlib import Path

import torch

from autosplit.backends.onnxfile import missing_packages
from autosplit.backends.quiet import quiet
from autosplit.errors import BackendError
from autosplit.exporting.base import Job, Target, port_names, write_json
from autosplit.tracing.tensorspec import zeros

TAGS = "delegation_tags.json"


def write(job: Job, folder: Path) -> list[str]:
    """Lower each stage. Raises: BackendError: ExecuTorch refuses an op."""
    from executorch.exir import to_edge_transform_and_lower

    rows = []
    for program in job.programs:
        try:
            with quiet(), torch.no_grad():
                exported = torch.export.export(program.module, tuple(map(zeros, program.inputs)), strict=False)
                lowered = to_edge_transform_and_lower(exported).to_executorch()
        except Exception as failure:
            raise BackendError(f"ExecuTorch refuses stage '{program.name}': {str(failure).strip()[:300]}") from failure
        (folder / f"{program.name}.pte").write_bytes(lowered.buffer)
        rows.append({"file": f"{program.name}.pte", **port_names(program)})
    tags = {op: stage.name for stage in job.plan.stages for op in stage.ops}
    graph = job.traced.graph
    write_json(folder / TAGS, {"inputs": graph.inputs, "outputs": graph.outputs, "programs": rows, "tags": tags})
    return []


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
