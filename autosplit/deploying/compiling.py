"""A model prepared for a backend that compiles for long, in a process of its own: a time limit holds, and so does Ctrl-C."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from autosplit.backends.base import get_backend
from autosplit.deploying.workspace import Workspace
from autosplit.devices.processes import WorkerProcess, receive, spawn_worker
from autosplit.errors import AutosplitError, BackendError
from autosplit.running.modules import StageFolder
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import load_stage, unsplit
from autosplit.values.samples import Precision

LOOK_S = 0.25


def compile_whole(
    traced: Traced, backend: str, precision: Precision, workspace: Workspace, limit_s: float, tell: Callable[[float], None]
) -> None:
    """Prepare the unsplit model for a backend in the workspace, where plans of one stage find it.

    Args:
        traced: the model.
        backend: what to prepare it for.
        precision: what it computes in.
        workspace: where it is saved.
        limit_s: seconds that it may take.
        tell: called with the share of them that has passed.
    Raises: BackendError: the backend refuses the model, or takes longer. WorkerError: the process died.
    """
    program = unsplit(traced)
    folder = workspace.save(program, program.ops)
    worker = spawn_worker("autosplit.deploying.compiling:serve", name=f"compiling for {backend}")
    begun_s = time.monotonic()
    try:
        with contextlib.suppress(ConnectionError):  # of one that died already there is an end to read, and its cause
            worker.connection.send(StageFolder(folder, backend, precision, program.packages))
        while not worker.connection.poll(LOOK_S):
            taken_s = time.monotonic() - begun_s
            if taken_s > limit_s:
                raise BackendError(f"{backend} had not compiled the model after {limit_s:.0f} s; allow more with a larger budget")
            tell(taken_s / limit_s)
        fault = receive(worker, LOOK_S, f"compiling for {backend}")
    finally:
        _end(worker)
    if fault:
        raise BackendError(fault)


def serve(connection: Connection) -> None:
    """The process: compile what it is sent, and answer with what went wrong, or nothing."""
    stage: StageFolder = connection.recv()
    try:
        stage.import_packages()
        get_backend(stage.backend).prepare(load_stage(stage.folder), stage.folder, stage.precision)
    except AutosplitError as failure:
        connection.send(str(failure))
    except Exception as failure:
        connection.send(f"{stage.backend} could not compile the model: {type(failure).__name__}: {failure}")
    else:
        connection.send("")


def _end(worker: WorkerProcess) -> None:
    """End the process with the compilers that it called: a worker has a process group of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.close()
