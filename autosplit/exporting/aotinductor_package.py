"""Export for AOTInductor: one package with a compiled model for each stage, which C++ and Python load without a compiler."""

from pathlib import Path

from autosplit.backends.base import convert
from autosplit.backends.inductor import BACKEND, OPTIONS, compiled
from autosplit.compat.runtimes import write_package
from autosplit.exporting.base import Job, Target, port_names, write_json
from autosplit.scratch import scratch_folder
from autosplit.tracing.splitting import StageProgram

PACKAGE, TABLE = "model.pt2", "stages.json"


def write(job: Job, folder: Path) -> list[str]:
    """Compile each stage, for 10 s and more. Raises: BackendError: the compiler failed."""
    with scratch_folder() as scratch:
        write_package(
            folder / PACKAGE, {program.name: compiled_files(program, scratch / program.name) for program in job.programs}
        )
    rows = [{"model": program.name, **port_names(program)} for program in job.programs]
    graph = job.traced.graph
    write_json(folder / TABLE, {"inputs": list(graph.inputs), "outputs": list(graph.outputs), "stages": rows})
    return ["the package holds native code: load it only where you trust its maker"]


def compiled_files(program: StageProgram, folder: Path) -> list[str]:
    """The files that AOTInductor makes of a stage, all in ``folder``. Raises: BackendError: the compiler failed."""
    folder.mkdir()
    return convert(_compile, program, folder, doing=f"while inductor compiled stage '{program.name}' for a package")


def _compile(program: StageProgram, folder: Path) -> list[str]:
    options = {**OPTIONS, "aot_inductor.package": True, "aot_inductor.output_path": str(folder)}
    return [str(path) for path in compiled(program, options)]


TARGET = Target(
    name="aotinductor",
    writes=(
        f"{PACKAGE}: one package with a model for each stage, for load_pt2; {TABLE}: the inputs and outputs of each, in order"
    ),
    lacks="replicas and streams (load the package several times), bf16; it holds native code for this processor",
    checked="torch's load_pt2 runs the stages one after the other, with equal outputs",
    write=write,
    missing=BACKEND.missing,
)
