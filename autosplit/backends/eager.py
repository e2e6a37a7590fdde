"""Torch eager: the traced ATen graph as it is, in f32 bit-equal to the model it came from. It takes every op."""

from collections.abc import Mapping
from pathlib import Path

from autosplit.backends.base import Backend, Precision, Runnable, on_threads, require_precision
from autosplit.backends.lowering import in_precision, lower_to_bf16
from autosplit.devices.accelerators import Accelerator, Queue
from autosplit.errors import BackendError
from autosplit.tracing.splitting import StageProgram, load_stage, place_stage, save_stage

LOWERED = "bf16"
"""Folder of the stage in bf16, inside the stage's own."""


class EagerBackend:
    """Runs the generated forward of the stage's fx graph, which frees each intermediate after its last use."""

    name = "eager"
    exact = True
    native = False
    lacks: Mapping[Precision, str] = {}

    def missing(self) -> str | None:
        """None: torch is always there."""
        return None

    def refuses(self, program: StageProgram) -> dict[str, str]:
        """Nothing: the stage is already torch."""
        return {}

    def prepare(self, program: StageProgram, folder: Path, precision: Precision = "f32") -> None:
        """Nothing to write in f32, the saved stage is enough; in bf16 the lowered stage, so that replicas share its weights."""
        require_precision(self, precision)
        if precision == "bf16" and not (folder / LOWERED).is_dir():
            save_stage(lower_to_bf16(program), folder / LOWERED)

    def load(self, folder: Path, threads: int, precision: Precision = "f32", shared: bool = True) -> Runnable:
        """The stage in ``folder``, its weights mapped from the file."""
        require_precision(self, precision)
        if precision == "f32":
            return _runnable(load_stage(folder), threads)
        if not (folder / LOWERED).is_dir():
            raise BackendError(f"stage folder '{folder}' is not prepared for eager in bf16: prepare the stage")
        return _runnable(load_stage(folder / LOWERED), threads)

    def compile(self, program: StageProgram, threads: int, precision: Precision = "f32") -> Runnable:
        """The stage in memory as a function."""
        require_precision(self, precision)
        return _runnable(in_precision(program, precision), threads)

    def refuses_kind(self, kind: str) -> str | None:
        """None: torch runs everywhere."""
        return None

    def place(self, folder: Path, accelerator: Accelerator, queue: Queue, precision: Precision = "f32") -> tuple[Runnable, bool]:
        """The same graph with its weights on the accelerator."""
        return placed_module(folder, accelerator, precision), True


def _runnable(program: StageProgram, threads: int) -> Runnable:
    forward = program.module.forward
    return on_threads(lambda inputs: forward(*inputs), threads)


def placed_module(folder: Path, accelerator: Accelerator, precision: Precision) -> Runnable:
    """The forward of a saved stage, its weights on the accelerator."""
    forward = place_stage(in_precision(load_stage(folder), precision), accelerator.device).module.forward
    return lambda inputs: forward(*inputs)


BACKEND: Backend = EagerBackend()
