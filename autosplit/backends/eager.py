"""Torch eager: it runs the traced ATen graph itself and takes every op; other backends are checked against its results."""

from functools import partial
from pathlib import Path

from torch import nn

from autosplit.backends.base import Backend, Precision, Runnable, on_threads, require_precision
from autosplit.backends.lowering import HALVES, in_precision, lowered
from autosplit.devices.accelerators import Accelerator, Queue
from autosplit.errors import BackendError
from autosplit.tracing.splitting import StageProgram, load_stage, place_stage, save_stage


class EagerBackend(Backend):
    """Runs the generated forward of the stage's graph, which frees each value after its last use."""

    name = "eager"
    exact = True

    def prepare(self, program: StageProgram, folder: Path, precision: Precision = "f32", first: Path | None = None) -> None:
        """Write the lowered stage, so that replicas share its weights; in f32 and tf32 the saved stage is enough."""
        require_precision(self, precision)
        if precision in HALVES and not (folder / precision).is_dir():
            save_stage(lowered(program, precision), folder / precision, first and first / precision)

    def load(
        self, folder: Path, threads: int, precision: Precision = "f32", shared: bool = True, trust: bool = False
    ) -> Runnable:
        """Load the stage with its weights mapped from the file."""
        require_precision(self, precision)
        if precision not in HALVES:
            return program_runnable(load_stage(folder, trust=trust), threads)
        if not (folder / precision).is_dir():
            raise BackendError(f"stage folder '{folder}' is not prepared for eager in {precision}: prepare the stage")
        return program_runnable(load_stage(folder / precision, trust=trust), threads)

    def compile(self, program: StageProgram, threads: int, precision: Precision = "f32") -> Runnable:
        """Return the stage's forward."""
        require_precision(self, precision)
        return program_runnable(in_precision(program, precision), threads)

    def place(
        self, folder: Path, accelerator: Accelerator, queue: Queue, precision: Precision = "f32", trust: bool = False
    ) -> tuple[Runnable, bool]:
        """Load the stage with its weights on the accelerator."""
        return placed_module(folder, accelerator, precision, trust), True


def program_runnable(program: StageProgram, threads: int) -> Runnable:
    """The stage's forward on ``threads`` threads. It keeps the weights, and not the graph that its code was made of."""
    bare = nn.Module()
    bare.__dict__.update((name, value) for name, value in program.module.__dict__.items() if name != "_graph")
    forward = partial(type(program.module).forward, bare)
    return on_threads(lambda inputs: forward(*inputs), threads)


def placed_module(folder: Path, accelerator: Accelerator, precision: Precision, trust: bool) -> Runnable:
    """Load a saved stage with its weights on the accelerator, and return its forward."""
    forward = place_stage(in_precision(load_stage(folder, trust=trust), precision), accelerator.device).module.forward
    return lambda inputs: forward(*inputs)


BACKEND: Backend = EagerBackend()
