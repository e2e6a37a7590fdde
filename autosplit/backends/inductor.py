"""TorchInductor ahead of time: a stage as a compiled library with its weights folded and packed (freezing).

The host compiles once a stage (10 s and more), workers load the library without the compiler. Without freezing the gain
over eager is small: it is what folds batch norms into convolutions and packs the weights.
"""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from autosplit.backends.base import Backend, Precision, Runnable, compile_apart, on_threads, require_precision
from autosplit.backends.eager import placed_module
from autosplit.backends.lowering import in_precision
from autosplit.backends.quiet import quiet
from autosplit.devices.accelerators import Accelerator, Queue
from autosplit.errors import BackendError
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import zeros

ACCELERATOR_MODE = "default"
"""Not ``reduce-overhead``: the whole stage with its copies is recorded as one graph anyway (``placing``)."""

LIBRARIES: dict[Precision, str] = {"f32": "inductor.so", "bf16": "inductor-bf16.so"}

OPTIONS = {
    "freezing": True,
    "cpp.dynamic_threads": True,
    # Kept ahead of time, headers take 100 MB of torch's cache for each version of the options, and save a second.
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
}


class InductorBackend:
    """One AOTInductor library a stage."""

    name = "inductor"
    exact = False
    native = True
    lacks: Mapping[Precision, str] = {}

    def missing(self) -> str | None:
        """The C++ compiler, if there is none."""
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is not None:
            return None
        return f"backend 'inductor' needs a C++ compiler, and '{compiler}' is not found: install g++, or set CXX"

    def refuses(self, program: StageProgram) -> dict[str, str]:
        """Nothing by op: what inductor cannot generate it hands back to the eager kernel."""
        return {}

    def prepare(self, program: StageProgram, folder: Path, precision: Precision = "f32") -> None:
        """Compile the stage into ``inductor.so`` (or ``inductor-bf16.so``) in its folder."""
        require_precision(self, precision)
        target = folder / LIBRARIES[precision]
        if target.exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".inductor-") as building:
            compile_library(in_precision(program, precision), Path(building)).replace(target)

    def load(self, folder: Path, threads: int, precision: Precision = "f32", shared: bool = True) -> Runnable:
        """The compiled library as a function."""
        require_precision(self, precision)
        library = folder / LIBRARIES[precision]
        if not library.exists():
            raise BackendError(f"stage folder '{folder}' is not prepared for inductor in {precision}: prepare the stage")
        return library_runnable(library, threads)

    def compile(self, program: StageProgram, threads: int, precision: Precision = "f32") -> Runnable:
        """Compile into a temporary folder and load from it."""
        return compile_apart(self, program, threads, precision)

    def refuses_kind(self, kind: str) -> str | None:
        """What Triton needs and is not here."""
        if importlib.util.find_spec("triton") is not None:
            return None
        return "its kernels there are written in Triton, which is not installed; install a torch built for CUDA, or use eager"

    def place(self, folder: Path, accelerator: Accelerator, queue: Queue, precision: Precision = "f32") -> tuple[Runnable, bool]:
        """Compiled in the worker at the first pass: a package made in the host would need the device there."""
        module = placed_module(folder, accelerator, precision)
        return torch.compile(module, fullgraph=True, dynamic=False, mode=ACCELERATOR_MODE), True


def compile_library(program: StageProgram, folder: Path) -> Path:
    """Write the compiled stage, and what comes up on the way, into ``folder``; the library's path.

    Torch's cache, where it would leave half a gigabyte for a stage, is only asked what the compiler can do here.
    Raises: BackendError: the compiler failed.
    """
    examples = tuple(map(zeros, program.inputs))
    there = {"aot_inductor.output_path": str(folder.resolve() / "stage.so")}
    try:
        with quiet(), torch.no_grad():
            exported = torch.export.export(program.module, examples, strict=False)
            made = torch._inductor.aot_compile(exported.module(), examples, options=OPTIONS | there)
    except Exception as failure:
        lines = [line.strip() for line in str(failure).splitlines() if line.strip()] or [type(failure).__name__]
        reason = next((line for line in lines if "error: " in line), lines[0])  # the compiler's own word
        raise BackendError(f"inductor cannot compile stage '{program.name}': {reason}") from failure
    return Path(str(made))


def library_runnable(path: Path, threads: int) -> Runnable:
    """The compiled stage as a function."""
    try:
        with quiet():
            # The file itself: ``aoti_load_package`` unpacks an archive that a worker, which ends at once, would leave behind.
            model = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
    except RuntimeError as failure:
        raise BackendError(f"inductor cannot load '{path}': {failure}") from failure
    return on_threads(lambda inputs: model.run(list(inputs)), threads)


BACKEND: Backend = InductorBackend()
