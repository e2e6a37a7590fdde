"""Export for AOTInductor: one package with a compiled model for each stage, which C++ and Python load without a compiler."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from autosplit.backends.base import get_backend
from autosplit.backends.inductor import BACKEND, OPTIONS
from autosplit.backends.quiet import quiet
from autosplit.errors import BackendError
from autosplit.exporting.base import Job, Target, refusals_of, write_json
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import zeros
from autosplit.values.plan import Plan

PACKAGE, TABLE = "model.pt2", "stages.json"


class AotInductorTarget:
    """``model.pt2`` and ``stages.json``."""

    name = "aotinductor"
    writes = (
        f"{PACKAGE}: one package with a model for each stage, for load_pt2; {TABLE}: the inputs and outputs of each, in order"
    )
    lacks = "replicas and streams (load the package several times), bf16; it holds native code for this processor"
    checked = "torch's load_pt2 runs the stages one after the other, with equal outputs"

    def missing(self) -> str | None:
        """Name the C++ compiler if it is not installed."""
        return BACKEND.missing()

    def accepts(self, plan: Plan) -> list[str]:
        """Refuse replicas, streams and bf16."""
        return refusals_of(plan, self.name)

    def write(self, job: Job, folder: Path) -> list[str]:
        """Compile each stage, for 10 s and more. Raises: BackendError: the compiler failed."""
        from torch.export.pt2_archive._package import package_pt2

        get_backend("inductor")
        with tempfile.TemporaryDirectory(prefix="autosplit-") as name:
            files: dict[str, Any] = {program.name: compiled_files(program, Path(name) / program.name) for program in job.programs}
            package_pt2(str(folder / PACKAGE), aoti_files=files)
        rows = [
            {
                "model": program.name,
                "inputs": [spec.name for spec in program.inputs],
                "outputs": [spec.name for spec in program.outputs],
            }
            for program in job.programs
        ]
        graph = job.traced.graph
        write_json(folder / TABLE, {"inputs": list(graph.inputs), "outputs": list(graph.outputs), "stages": rows})
        return ["the package holds native code: load it only where you trust its maker"]


def compiled_files(program: StageProgram, folder: Path) -> list[str]:
    """The files that AOTInductor makes of a stage, all in ``folder``. Raises: BackendError: the compiler failed."""
    examples = tuple(map(zeros, program.inputs))
    folder.mkdir()
    options = {**OPTIONS, "aot_inductor.package": True, "aot_inductor.output_path": str(folder)}
    try:
        with quiet(), torch.no_grad():
            exported = torch.export.export(program.module, examples, strict=False)
            made: Any = torch._inductor.aot_compile(exported.module(), examples, options=options)
    except Exception as failure:
        raise BackendError(f"inductor cannot compile stage '{program.name}': {str(failure).strip()[:300]}") from failure
    return [str(path) for path in made]


TARGET: Target = AotInductorTarget()
