"""TorchInductor ahead of time: the host compiles a stage to a library (10 s and more), which workers load without a compiler.

Freezing folds batch norms into convolutions and packs the weights; without it the gain over eager is small.
"""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autosplit.backends.base import Backend, FileBackend, Precision, Runnable, on_threads
from autosplit.backends.eager import placed_module
from autosplit.backends.lowering import in_precision
from autosplit.backends.quiet import quiet
from autosplit.compat.runtimes import aot_compile, open_library
from autosplit.devices.accelerators import Accelerator, Queue
from autosplit.errors import BackendError
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import zeros

ACCELERATOR_MODE = "default"
"""Not ``reduce-overhead``: ``placing`` records the whole stage with its copies as one graph anyway."""

LIBRARIES: dict[Precision, str] = {"f32": "inductor.so", "bf16": "inductor-bf16.so"}

OPTIONS: Mapping[str, Any] = {
    "freezing": True,
    "cpp.dynamic_threads": True,
    # Precompiled headers take 100 MB of torch's cache for each set of options, and save a second.
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
}

WITHOUT_WEIGHTS: Mapping[str, Any] = {
    **OPTIONS,
    "freezing": False,
    "aot_inductor.package_constants_in_so": False,
}
"""Options of a library that takes its weights from outside. Freezing would pack them into a form that only one process has."""


class InductorBackend(FileBackend):
    """One AOTInductor library a stage."""

    name = "inductor"
    native = True
    lacks: Mapping[Precision, str] = dict.fromkeys(("tf32", "f16"), "autosplit compiles it in f32 and bf16")

    def missing(self) -> str | None:
        """Name the C++ compiler if it is not installed."""
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is not None:
            return None
        return f"backend 'inductor' needs a C++ compiler, and '{compiler}' is not found: install g++, or set CXX"

    def is_prepared(self, folder: Path, precision: Precision) -> bool:
        """Whether the library exists."""
        return (folder / LIBRARIES[precision]).exists()

    def write(self, program: StageProgram, folder: Path, precision: Precision) -> None:
        """Compile the stage to ``inductor.so`` (or ``inductor-bf16.so``) in its folder, unless it exists."""
        if self.is_prepared(folder, precision):
            return
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".inductor-") as building:
            compile_library(in_precision(program, precision), Path(building)).replace(folder / LIBRARIES[precision])

    def open(self, folder: Path, threads: int, precision: Precision, shared: bool, trust: bool) -> Runnable:
        """Load the compiled library."""
        if not self.is_prepared(folder, precision):
            raise BackendError(f"stage folder '{folder}' is not prepared for inductor in {precision}: prepare the stage")
        return library_runnable(folder / LIBRARIES[precision], threads)

    def refuses_kind(self, kind: str) -> str | None:
        """Name Triton if it is not installed."""
        if importlib.util.find_spec("triton") is not None:
            return None
        return "its kernels there are written in Triton, which is not installed; install a torch built for CUDA, or use eager"

    def place(
        self, folder: Path, accelerator: Accelerator, queue: Queue, precision: Precision = "f32", trust: bool = False
    ) -> tuple[Runnable, bool]:
        """Compile in the worker at the first pass: to compile in the host would need the device there."""
        module = placed_module(folder, accelerator, precision, trust)
        return torch.compile(module, fullgraph=True, dynamic=False, mode=ACCELERATOR_MODE), True


def compile_library(program: StageProgram, folder: Path, options: Mapping[str, Any] = OPTIONS) -> Path:
    """Compile the stage to a library in ``folder``, and return its path.

    All files of the compilation are in ``folder`` too: torch's cache would keep half a gigabyte a stage.
    Raises: BackendError: the compiler failed.
    """
    return Path(str(compiled(program, {**options, "aot_inductor.output_path": str(folder.resolve() / "stage.so")})))


def compiled(program: StageProgram, options: Mapping[str, Any]) -> Any:
    """Compile the stage. Returns: the path of the library, or with ``aot_inductor.package`` the files of a package.

    Raises: BackendError: the compiler failed.
    """
    examples = tuple(map(zeros, program.inputs))
    try:
        with quiet(), torch.no_grad():
            exported = torch.export.export(program.module, examples, strict=False)
            return aot_compile(exported.module(), examples, options)
    except Exception as failure:
        lines = [line.strip() for line in str(failure).splitlines() if line.strip()] or [type(failure).__name__]
        reason = next((line for line in lines if "error: " in line), lines[0])  # the compiler's own word
        raise BackendError(f"inductor cannot compile stage '{program.name}': {reason}") from failure


def library_runnable(path: Path, threads: int, weights: Mapping[str, torch.Tensor] | None = None) -> Runnable:
    """Load the compiled library as a function. One that was compiled ``WITHOUT_WEIGHTS`` reads ``weights`` where they lie.

    Raises: BackendError: inductor refuses it, or a weight is missing.
    """
    try:
        with quiet():
            model = open_library(path)
            if weights is not None:
                names = model.get_constant_names_to_original_fqns()
                model.update_constant_buffer({name: weights[weight] for name, weight in names.items()}, False, True, True)
    except (RuntimeError, KeyError) as failure:
        raise BackendError(f"inductor cannot load '{path}': {failure}") from failure
    held = weights  # the library does not own them
    return on_threads(lambda inputs: (held, model.run(list(inputs)))[1], threads)


BACKEND: Backend = InductorBackend()
