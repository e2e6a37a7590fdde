"""ONNX Runtime on CPU cores: a stage as an ONNX file, run by one sequential session in f32.

Inputs are read where they lie and outputs are written into fresh torch memory (IO binding by address), so nothing is
copied as long as the inputs have the strides of their specs. A stage on several cores lets its threads spin while they wait
for each other: an op may take less time than waking a thread. They go on for 42 ms after a request (ONNX Runtime's default):
requests one at a time are up to 1.2 times as fast. Not where stages share cores: two of MobileNetV2 took 1.6 times as long.

The host lets ONNX Runtime optimise the graph and pack the weights once for this machine, and saves that: workers map the
packed weights instead of making private copies, so replicas share one copy in memory and load in a tenth of the time.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from autosplit.backends.aligning import align
from autosplit.backends.base import Backend, Precision, Runnable, compile_apart, require_precision
from autosplit.backends.layout import Port
from autosplit.backends.onnxfile import (
    ELEMENT_TYPES,
    OnnxStage,
    missing_packages,
    open_onnx,
    prepare_onnx,
    refused_by_onnx,
    whole_folder,
)
from autosplit.devices.accelerators import Accelerator, Queue, provider
from autosplit.errors import BackendError
from autosplit.tracing.splitting import StageProgram, load_stage

OPTIMISED = "onnxruntime"
MODEL = "model.onnx"
CPU_PROVIDER = "CPUExecutionProvider"


class OnnxRuntimeBackend:
    """One InferenceSession a stage, CPU provider."""

    name = "onnxruntime"
    exact = False
    native = False
    lacks: Mapping[Precision, str] = {"bf16": "its CPU provider has no matrix products and convolutions in bfloat16"}

    def missing(self) -> str | None:
        """The packages that are not installed."""
        return missing_packages(self.name, ("onnx", "onnxscript", "onnxruntime"), "onnx")

    def refuses(self, program: StageProgram) -> dict[str, str]:
        """The ops that the ONNX exporter or ONNX Runtime refuses; costs an export."""
        return refused_by_onnx(program, lambda path: _open_session(path, session_options(1)))

    def prepare(self, program: StageProgram, folder: Path, precision: Precision = "f32") -> None:
        """Write the ONNX file and the optimised one into the stage's folder."""
        require_precision(self, precision)
        stage = prepare_onnx(program, folder)
        if not (folder / OPTIMISED).is_dir():
            try:
                with whole_folder(folder / OPTIMISED) as building:
                    optimise(stage.path, building / MODEL)
            except BackendError as failure:
                raise BackendError(str(failure), self.refuses(program)) from failure

    def load(self, folder: Path, threads: int, precision: Precision = "f32", shared: bool = True) -> Runnable:
        """A session on the optimised file."""
        require_precision(self, precision)
        return session_runnable(open_optimised(folder), threads, shared)

    def compile(self, program: StageProgram, threads: int, precision: Precision = "f32") -> Runnable:
        """Export into a temporary folder and load from it."""
        return compile_apart(self, program, threads, precision)

    def refuses_kind(self, kind: str) -> str | None:
        """What this build of ONNX Runtime lacks."""
        import onnxruntime

        wanted, here = provider(kind).ONNX_PROVIDER, onnxruntime.get_available_providers()
        if wanted in here:
            return None
        return f"this build of ONNX Runtime has {', '.join(here)}, not {wanted}; install onnxruntime-gpu, or use eager there"

    def place(self, folder: Path, accelerator: Accelerator, queue: Queue, precision: Precision = "f32") -> tuple[Runnable, bool]:
        """A session on the file as it was exported: what was packed for the CPU is of no use there."""
        require_precision(self, precision)
        stage = prepare_onnx(load_stage(folder), folder)
        wanted = accelerator.ONNX_PROVIDER
        session = _open_session(stage.path, session_options(1), [(wanted, dict(accelerator.onnx_options(queue)))])
        if wanted not in session.get_providers():
            raise BackendError(f"ONNX Runtime could not start {wanted}: its libraries for CUDA or cuDNN are missing")
        return bound_runnable(session, stage, accelerator.device), False


def open_optimised(folder: Path) -> OnnxStage:
    """The prepared stage in ``folder`` as it is run on CPU cores. Raises: BackendError: the folder is not prepared."""
    return replace(open_onnx(folder), path=folder / OPTIMISED / MODEL)


def optimise(source: Path, target: Path) -> None:
    """Write the graph as ONNX Runtime optimises it for this processor, its weights packed in ``target`` + '.data'.

    A version that notes packed weights in another form gets the same file without them: each worker then packs its own.

    Raises: BackendError: ONNX Runtime does not take the file. OSError: the disk is full.
    """
    for packed in ("1", "0"):
        options = session_options(1)
        options.optimized_model_filepath = str(target)
        entries = {
            "session.optimized_model_external_initializers_file_name": f"{target.name}.data",
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
            "session.save_external_prepacked_constant_initializers": packed,
        }
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        try:
            _open_session(source, options)
        except BackendError as failure:
            require_room(target, source)
            raise failure
        with contextlib.suppress(ValueError):
            return align(target)
    raise BackendError(f"the file that ONNX Runtime {version('onnxruntime')} optimised from '{source}' cannot be read")


def require_room(target: Path, source: Path) -> None:
    """Raise OSError if what is left of the disk cannot hold a copy of the files beside ``source``.

    ONNX Runtime says of a full disk only that it failed to write.
    """
    needed_bytes = sum(path.stat().st_size for path in source.parent.glob("*") if path.is_file())
    if shutil.disk_usage(target.parent).free < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _open_session(path: Path, options: Any, providers: Sequence[tuple[str, dict[str, str]]] = ()) -> Any:
    """An InferenceSession. Raises: BackendError: ONNX Runtime does not take the file."""
    import onnxruntime

    try:
        return onnxruntime.InferenceSession(path, options, providers=list(dict([*providers, (CPU_PROVIDER, {})]).items()))
    except Exception as failure:
        raise BackendError(f"ONNX Runtime refuses '{path}': {failure}") from failure


def session_options(threads: int, shared: bool = True) -> Any:
    """One sequential session; its threads spin, after a request too unless their cores are shared; affinity is left alone."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if threads > 1 else "0")
    options.add_session_config_entry("session.force_spinning_stop", "1" if shared else "0")
    options.log_severity_level = 3
    return options


def session_runnable(stage: OnnxStage, threads: int, shared: bool) -> Runnable:
    """The stage as a function, from its optimised file. Raises: BackendError: ONNX Runtime does not take the file."""
    import onnxruntime

    options = session_options(threads, shared)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return bound_runnable(_open_session(stage.path, options), stage, torch.device("cpu"))


def bound_runnable(session: Any, stage: OnnxStage, device: torch.device) -> Runnable:
    """A session as a function of tensors on ``device``, read and written where they lie."""
    binding = session.io_binding()
    where = device.type, device.index or 0
    nowhere = torch.empty(1, device=device)  # a tensor without elements has no address, and ONNX Runtime wants one
    sources = [(port, _element_type(port)) for port in stage.inputs]
    targets = [(port, _element_type(port)) for port in stage.outputs]

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        dense = [port.dense(value) for (port, _), value in zip(sources, inputs, strict=True)]
        for (port, kind), value in zip(sources, dense, strict=True):
            binding.bind_input(port.name, *where, kind, port.dense_shape, value.data_ptr() or nowhere.data_ptr())
        outputs = [torch.empty(port.dense_shape, dtype=port.dtype, device=device) for port, _ in targets]
        for (port, kind), value in zip(targets, outputs, strict=True):
            binding.bind_output(port.name, *where, kind, port.dense_shape, value.data_ptr() or nowhere.data_ptr())
        session.run_with_iobinding(binding)
        return [port.restore(value) for (port, _), value in zip(targets, outputs, strict=True)]

    return run


def _element_type(port: Port) -> int:
    """The ONNX element type of a port. Raises: BackendError: ONNX Runtime has no tensors of that dtype."""
    if port.dtype not in ELEMENT_TYPES:
        raise BackendError(f"ONNX Runtime cannot pass '{port.name}': it has no tensors of {port.dtype}")
    return ELEMENT_TYPES[port.dtype]


BACKEND: Backend = OnnxRuntimeBackend()
