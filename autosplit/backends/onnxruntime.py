"""ONNX Runtime on CPU cores: one sequential session a stage, in f32.

The session reads inputs in place and writes outputs to new torch memory (IO binding by address), so nothing is copied if the
inputs have the strides of their specs. Small ones are copied to and from memory that stays bound, because binding takes longer.

Threads of a stage on several cores spin while they wait for each other, because waking a thread can take longer than an op.
They spin for 42 ms after a request too (ONNX Runtime's default), which makes single requests up to 1.2 times as fast. Stages
that share cores must not: two stages of MobileNetV2 took 1.6 times as long.

The host lets ONNX Runtime optimise the graph and pack the weights once for this machine. Workers map the packed weights, so
replicas share one copy in memory and load in a tenth of the time.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from autosplit.backends.aligning import align
from autosplit.backends.base import Backend, FileBackend, Precision, Runnable, require_precision
from autosplit.backends.onnxfile import (
    ELEMENT_TYPES,
    ONNX,
    OnnxStage,
    missing_packages,
    open_onnx,
    prepare_onnx,
    whole_folder,
)
from autosplit.backends.pieces import Linked, Memory, Step, in_pieces, piece_folders, write_pieces
from autosplit.backends.ports import BoundMemory, Port
from autosplit.backends.sharedweights import SHARED, share
from autosplit.compat.runtimes import Binding
from autosplit.devices.accelerators import Accelerator, Queue, provider
from autosplit.errors import BackendError
from autosplit.tracing.splitting import StageProgram, load_stage
from autosplit.versions import version_of

COPIED_BYTES = 64 << 10
"""Largest input or output that is copied to and from memory that stays bound: binding takes longer.

A keyword spotter of 81 us took 103 us when ONNX Runtime took and made arrays, and 87 us with copies.
"""

OPTIMISED = "onnxruntime"
MODEL = "model.onnx"
CPU_PROVIDER = "CPUExecutionProvider"


class OnnxRuntimeBackend(FileBackend):
    """One InferenceSession a stage, CPU provider."""

    name = "onnxruntime"
    lacks: Mapping[Precision, str] = {
        "bf16": "its CPU provider has no matrix products and convolutions in bfloat16",
        "f16": "autosplit exports its files in f32",
    }

    def missing(self) -> str | None:
        """Name the packages that are not installed."""
        return missing_packages(f"backend '{self.name}'", (*ONNX, "onnxruntime"), "autosplit[onnx]")

    def is_prepared(self, folder: Path, precision: Precision) -> bool:
        """Whether the optimised file exists."""
        return all((place / OPTIMISED).is_dir() for place in piece_folders(folder, precision))

    def write(self, program: StageProgram, folder: Path, precision: Precision) -> None:
        """Write the ONNX file and the optimised one of each piece."""
        for place, piece in write_pieces(program, folder, precision).items():
            stage = prepare_onnx(piece, place)
            if not (place / OPTIMISED).is_dir():
                with whole_folder(place / OPTIMISED) as building:
                    optimise(stage.path, building / MODEL)

    def prepare(self, program: StageProgram, folder: Path, precision: Precision = "f32", first: Path | None = None) -> None:
        """Write the files of a stage in a process apart, and let it use the packed weights of another variant of it."""
        super().prepare(program, folder, precision)
        if first is not None and not any(folder.rglob(f"*.{SHARED}")):
            share(*([place / OPTIMISED / MODEL for place in piece_folders(one, precision)] for one in (folder, first)))

    def open(self, folder: Path, threads: int, precision: Precision, shared: bool, trust: bool) -> Runnable:
        """Open a session on the optimised file of each piece."""

        def opened(place: Path) -> Runnable:
            return session_runnable(open_optimised(place), threads, shared)

        def linked(place: Path, inputs: Sequence[torch.Tensor], memory: Memory) -> Linked | None:
            return linked_session(open_optimised(place), threads, shared, inputs, memory)

        return in_pieces(folder, opened, threads, precision, trust, linked)

    def refuses_kind(self, kind: str) -> str | None:
        """Name the provider that this build of ONNX Runtime lacks."""
        import onnxruntime

        wanted, here = provider(kind).ONNX_PROVIDER, onnxruntime.get_available_providers()
        if wanted in here:
            return None
        if not wanted:
            return f"ONNX Runtime has no execution provider for {kind} devices; use eager there"
        return f"this build of ONNX Runtime has {', '.join(here)}, not {wanted}; install onnxruntime-gpu, or use eager there"

    def place(
        self, folder: Path, accelerator: Accelerator, queue: Queue, precision: Precision = "f32", trust: bool = False
    ) -> tuple[Runnable, bool]:
        """Open a session on the exported file; weights packed for the CPU are useless on an accelerator."""
        require_precision(self, precision)
        stage = prepare_onnx(load_stage(folder, trust=trust), folder)
        wanted = accelerator.ONNX_PROVIDER
        session = _open_session(stage.path, session_options(1), [(wanted, dict(accelerator.onnx_options(queue)))])
        if wanted not in session.get_providers():
            raise BackendError(f"ONNX Runtime could not start {wanted}: its libraries for CUDA or cuDNN are missing")
        return bound_runnable(session, stage, accelerator.device), False


def open_optimised(folder: Path) -> OnnxStage:
    """The prepared stage in ``folder`` with its optimised file. Raises: BackendError: the folder is not prepared."""
    return replace(open_onnx(folder), path=folder / OPTIMISED / MODEL)


def optimise(source: Path, target: Path) -> None:
    """Write the graph optimised for this processor to ``target``, and its packed weights to ``target`` + '.data'.

    If ``align`` cannot read the packed weights of this version of ONNX Runtime, they are left out, and each worker packs its own.
    Raises: BackendError: ONNX Runtime refuses the file. OSError: the disk is full.
    """
    for packed in ("1", "0"):
        options = _writing_options(target)
        options.add_session_config_entry("session.save_external_prepacked_constant_initializers", packed)
        _write_graph(source, target, options)
        with contextlib.suppress(ValueError):
            return align(target)
    raise BackendError(f"the file that ONNX Runtime {version_of('onnxruntime')} optimised from '{source}' cannot be read")


def fuse(source: Path, target: Path) -> None:
    """Write the graph with fused ops, for any processor, to ``target``, and its weights to ``target`` + '.data'.

    Weights are neither packed nor transposed: a tied weight stays one, and stays the model's own where no op was fused into it.
    Raises: BackendError: ONNX Runtime refuses the file. OSError: the disk is full.
    """
    import onnxruntime

    options = _writing_options(target)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    _write_graph(source, target, options, disabled=["ConstantFolding"])
    align(target)


def _writing_options(target: Path) -> Any:
    """Options of a session that writes its graph to ``target`` and large tensors beside it."""
    options = session_options(1)
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", f"{target.name}.data")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    return options


def _write_graph(source: Path, target: Path, options: Any, disabled: Sequence[str] | None = None) -> None:
    """Open a session that writes its graph.

    Raises: BackendError: as ``_open_session``. OSError: the disk is full, of which ONNX Runtime says only that writing failed.
    """
    try:
        _open_session(source, options, disabled=disabled)
    except BackendError:
        needed_bytes = sum(path.stat().st_size for path in source.parent.glob("*") if path.is_file())
        if shutil.disk_usage(target.parent).free < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        raise


def _open_session(
    path: Path, options: Any, providers: Sequence[tuple[str, dict[str, str]]] = (), disabled: Sequence[str] | None = None
) -> Any:
    """Open an InferenceSession without the ``disabled`` optimisers. Raises: BackendError: ONNX Runtime refuses the file."""
    import onnxruntime

    chosen = list(dict([*providers, (CPU_PROVIDER, {})]).items())
    try:
        return onnxruntime.InferenceSession(path, options, providers=chosen, disabled_optimizers=disabled)
    except Exception as failure:
        raise BackendError(f"ONNX Runtime refuses the stage: {_reason(str(failure), path)}") from failure


def _call(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call of ONNX Runtime. Raises: RuntimeError: it fails, in its own words."""
    try:
        return call(*arguments)
    except Exception as failure:
        raise RuntimeError(_reason(str(failure))) from None


def _reason(text: str, path: Path | None = None) -> str:
    """ONNX Runtime's own words, without its codes and the name of the file.

    >>> _reason("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find Det(22) for a", Path("/tmp/a.onnx"))
    'Could not find Det(22) for a'
    """
    told = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text.strip()).replace(f"Load model from {path} failed:", "")
    return " ".join((told.replace(str(path), "the stage") if path else told).split())[:300]


def session_options(threads: int, shared: bool = True) -> Any:
    """Options of a sequential session; its threads spin after a request too, unless their cores are ``shared``."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if threads > 1 else "0")
    options.add_session_config_entry("session.force_spinning_stop", "1" if shared else "0")
    options.log_severity_level = 4  # a failure is raised, and needs no line on stderr too
    return options


def session_runnable(stage: OnnxStage, threads: int, shared: bool, optimised: bool = True) -> Runnable:
    """Open a file as a function; one ``optimised`` for this processor is taken as it is. Raises: BackendError: it is refused."""
    session = _session(stage, threads, shared, optimised)
    return free_runnable(session, stage) if stage.free else bound_runnable(session, stage, torch.device("cpu"))


def linked_session(stage: OnnxStage, threads: int, shared: bool, inputs: Sequence[torch.Tensor], memory: Memory) -> Linked | None:
    """Open a file over the memory of its inputs; None if one of them must be copied. Raises: BackendError.

    Outputs with gaps, such as parts of a split, are copied to memory that stays.
    """
    dense = [port.dense(value) for port, value in zip(stage.inputs, inputs, strict=True)]
    stays = all(one.data_ptr() == value.data_ptr() for one, value in zip(dense, inputs, strict=True))
    if stage.free or not stays or any(0 in port.dense_shape for port in (*stage.inputs, *stage.outputs)):
        return None
    binding = Binding(_session(stage, threads, shared, True, in_one_arena=True), torch.device("cpu"))
    outputs = [memory.empty(port.dense_shape, port.dtype) for port in stage.outputs]
    for port, value in zip(stage.inputs, dense, strict=True):
        binding.input(port.name, _element_type(port), port.dense_shape, value.data_ptr())
    for port, value in zip(stage.outputs, outputs, strict=True):
        binding.output(port.name, _element_type(port), port.dense_shape, value.data_ptr())
    copies = [memory.empty(one.spec.shape, one.dtype, one.spec.stride) if one.copied else None for one in stage.outputs]
    made = list(zip(stage.outputs, outputs, copies, strict=True))
    copied = [one for one in made if one[0].copied]

    def run() -> None:
        _call(binding.run)
        for port, value, copy in copied:
            port.restore(value, copy)

    return Linked([port.restore(value, copy) for port, value, copy in made], [Step([], run)])


def _session(stage: OnnxStage, threads: int, shared: bool, optimised: bool, in_one_arena: bool = False) -> Any:
    """A session; several ``in_one_arena``, of which one runs at a time, take values from the same memory."""
    import onnxruntime

    options = session_options(threads, shared)
    if in_one_arena:
        _make_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
    if optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return _open_session(stage.path, options)


@cache
def _make_arena() -> None:
    """Give this process an arena for sessions that share one. With an arena each, 63 of them took 60 MB for values of 2 MB."""
    import onnxruntime

    kinds, place = onnxruntime.OrtAllocatorType, onnxruntime.OrtMemType.DEFAULT
    with contextlib.suppress(RuntimeError):  # the user has made one
        onnxruntime.create_and_register_allocator(onnxruntime.OrtMemoryInfo("Cpu", kinds.ORT_ARENA_ALLOCATOR, 0, place), None)


def free_runnable(session: Any, stage: OnnxStage) -> Runnable:
    """A session as a function of tensors of every size, by arrays of numpy. Raises: BackendError: numpy lacks a dtype."""
    for one in (*stage.inputs, *stage.outputs):
        if _element_type(one) and not one.spec.in_numpy:
            raise BackendError(f"ONNX Runtime cannot take '{one.name}' at every size: numpy has no {one.dtype}")
    outputs = [port.name for port in stage.outputs]

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return stage.restored(_call(session.run, outputs, stage.arrays(inputs)))

    return run


def bound_runnable(session: Any, stage: OnnxStage, device: torch.device) -> Runnable:
    """A session as a function that reads and writes tensors on ``device`` in place, but for small ones of the CPU."""
    binding = Binding(session, device)
    nowhere = torch.empty(1, device=device)  # an empty tensor has no address, and ONNX Runtime wants one

    def bound(bind: Callable[[str, int, Sequence[int], int], None], port: Port) -> BoundMemory:
        kind, shape = _element_type(port), list(port.dense_shape)

        def bind_address(value: torch.Tensor) -> None:
            bind(port.name, kind, shape, value.data_ptr() or nowhere.data_ptr())

        return BoundMemory(bind_address, torch.empty(shape, dtype=port.dtype, device=device), COPIED_BYTES)

    sources = [(port.dense, bound(binding.input, port)) for port in stage.inputs]
    targets = [bound(binding.output, port) for port in stage.outputs]
    restoring = any(port.copied or not port.natural for port in stage.outputs)

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        for (dense, source), value in zip(sources, inputs, strict=True):
            source.read(dense(value))
        for target in targets:
            target.renew()
        _call(binding.run)
        outputs = [target.own() for target in targets]
        return [port.restore(value) for port, value in zip(stage.outputs, outputs, strict=True)] if restoring else outputs

    return run


def _element_type(port: Port) -> int:
    """The ONNX element type of a port. Raises: BackendError: ONNX Runtime has no tensors of that dtype."""
    if port.dtype not in ELEMENT_TYPES:
        raise BackendError(f"ONNX Runtime cannot pass '{port.name}': it has no tensors of {port.dtype}")
    return ELEMENT_TYPES[port.dtype]


BACKEND: Backend = OnnxRuntimeBackend()
