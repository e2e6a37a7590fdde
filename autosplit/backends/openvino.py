"""OpenVINO on CPU cores: the stage's ONNX file, compiled for latency with one stream, or for several requests at once.

The precision is always stated, because OpenVINO's default is bfloat16 on processors that have it. Inputs and outputs share their
memory with torch. Every process packs the weights anew, from any kind of file; only the streams of one process share them.
"""

import contextlib
import io
import math
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, wraps
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from autosplit.backends.base import Backend, Done, FileBackend, Precision, Runnable, StreamingBackend, Streams, require_precision
from autosplit.backends.channels import first, last, slowly_turned, transposed, with_channels_last
from autosplit.backends.limiting import check_of
from autosplit.backends.onnxfile import ONNX, OnnxStage, missing_packages, open_onnx, prepare_onnx, require_shared
from autosplit.backends.pieces import in_pieces, piece_folders, write_pieces
from autosplit.backends.ports import BoundMemory
from autosplit.backends.quiet import quiet
from autosplit.compat.runtimes import fold_constants
from autosplit.errors import BackendError
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.valueranges import Assumed

T = TypeVar("T")

TRIED = "openvino-{}.tried"
"""The mark of a stage that the compiler took once, by precision."""

COPIED_BYTES = 1 << 20
"""Largest input or output that is copied to and from memory of an infer request.

After memory is bound, an inference takes 60 to 120 us longer: a keyword spotter of 102 us took 206 us with both bound for each
request, and 144 us with copies. For an input of 600 KB both took equally long.
"""

_FIRST = threading.Lock()
"""Held by the thread that makes the core: copies in one process are loaded by a thread each."""

WEIGHTLESS: Mapping[str, Any] = {"CACHE_MODE": "OPTIMIZE_SIZE"}
"""Settings of a compiled blob without weights."""


class OpenVinoBackend(FileBackend, StreamingBackend):
    """One compiled model and one infer request a stage, on the CPU plug-in."""

    name = "openvino"
    assumed: Assumed = "narrow"
    lacks: Mapping[Precision, str] = dict.fromkeys(("tf32", "f16"), "its plug-in for cores has f32 and bf16")

    def missing(self) -> str | None:
        """Name the packages that are not installed; those of ONNX are needed too, because the stage is an ONNX file."""
        return missing_packages(f"backend '{self.name}'", ("openvino", *ONNX), "autosplit[openvino]")

    def is_prepared(self, folder: Path, precision: Precision) -> bool:
        """Whether the ONNX file exists and was compiled once."""
        return (folder / TRIED.format(precision)).exists()

    def write(self, program: StageProgram, folder: Path, precision: Precision) -> None:
        """Write the ONNX file of each piece, and compile it once: a crash of the compiler must not be a worker's."""
        for place, piece in write_pieces(program, folder, precision).items():
            compiled_model(prepare_onnx(piece, place), settings(1, precision))
        (folder / TRIED.format(precision)).touch()

    def open(self, folder: Path, threads: int, precision: Precision, shared: bool, trust: bool) -> Runnable:
        """Compile the ONNX file of each piece."""

        def opened(place: Path) -> Runnable:
            return request_of(compiled_model(open_onnx(place), settings(threads, precision)))

        return in_pieces(folder, opened, threads, precision, trust)

    def load_streams(self, folder: Path, threads: int, streams: int, precision: Precision = "f32") -> Streams:
        """Compile the ONNX file for ``streams`` requests at once."""
        require_precision(self, precision)
        if piece_folders(folder, precision) != [folder]:
            raise BackendError("a stage with custom operators has no streams: torch runs these, one request at a time")
        stage = replace(open_onnx(folder), check=check_of(folder, self.assumed))
        return OpenVinoStreams(compiled_model(stage, settings(threads, precision, streams)), streams)

    def refuses_kind(self, kind: str) -> str | None:
        """Refuse every accelerator."""
        return "OpenVINO has no plug-in for it; use eager, inductor or onnxruntime there"


def settings(threads: int, precision: Precision, streams: int = 1) -> dict[str, Any]:
    """OpenVINO's settings for ``streams`` requests at once on ``threads`` threads in all, with this process's affinity."""
    return {
        "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
        "NUM_STREAMS": str(streams),
        "INFERENCE_NUM_THREADS": str(threads),
        "INFERENCE_PRECISION_HINT": precision,
        "ENABLE_CPU_PINNING": False,
    }


class Compiled(NamedTuple):
    """A stage and its compiled model; ``turned`` outputs, by number, come with channels last, and torch transposes them."""

    stage: OnnxStage
    model: Any
    turned: Collection[int] = ()


def _with_plain_errors(function: Callable[..., T]) -> Callable[..., T]:
    """The function, whose failures in OpenVINO are told without the places in its sources."""

    @wraps(function)
    def call(*arguments: Any) -> T:
        try:
            return function(*arguments)
        except RuntimeError as failure:
            raise RuntimeError(_reason(str(failure))) from None

    return call


class OpenVinoRequest(ABC):
    """An infer request of OpenVINO, for one request at a time."""

    _done: Done | None = None
    _calls_back = False

    @_with_plain_errors
    def __init__(self, compiled: Compiled) -> None:
        self.request, self._stage = compiled.model.create_infer_request(), compiled.stage

    @abstractmethod
    def bind(self, inputs: Sequence[torch.Tensor]) -> None:
        """Hand over the inputs."""

    @abstractmethod
    def outputs(self) -> Sequence[torch.Tensor]:
        """The outputs of the last request."""

    @_with_plain_errors
    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Compute one request."""
        self.bind(inputs)
        self.request.infer()
        return self.outputs()

    def start(self, inputs: Sequence[torch.Tensor], done: Done) -> None:
        """Bind and start a request. ``done`` runs in the callback thread of the compiled model, which computes nothing itself.

        OpenVINO calls nothing back for a request that fails: ``wait`` raises the failure.
        """
        self.bind(inputs)
        if not self._calls_back:
            self.request.set_callback(_call_back, weakref.ref(self))  # OpenVINO keeps it: a reference would be a cycle
            self._calls_back = True
        self._done = done
        self.request.start_async()

    @_with_plain_errors
    def wait(self, most_s: float = math.inf) -> bool:
        """Block until it is computed, or for ``most_s`` seconds (in whole milliseconds); return whether it is computed."""
        if most_s < math.inf:
            return bool(self.request.wait_for(math.ceil(most_s * 1000)))
        self.request.wait()
        return True


class BoundRequest(OpenVinoRequest):
    """A request for tensors of one size, with memory of its own for all but large ones: see ``COPIED_BYTES``."""

    @_with_plain_errors
    def __init__(self, compiled: Compiled) -> None:
        super().__init__(compiled)
        self._turned = compiled.turned
        stage = compiled.stage
        self._restores = bool(compiled.turned) or any(port.copied or not port.natural for port in stage.outputs)
        shapes = [last(port.dense_shape) if k in self._turned else port.dense_shape for k, port in enumerate(stage.outputs)]
        self._inputs = [_bound(self.request.set_input_tensor, k, p.dense_shape, p.dtype) for k, p in enumerate(stage.inputs)]
        pairs = enumerate(zip(shapes, stage.outputs, strict=True))
        self._outputs = [_bound(self.request.set_output_tensor, k, shape, port.dtype) for k, (shape, port) in pairs]

    @_with_plain_errors
    def bind(self, inputs: Sequence[torch.Tensor]) -> None:
        """Hand over the inputs, and memory for the outputs."""
        stage = self._stage
        if stage.check is not None:
            stage.check(inputs)
        for bound, port, value in zip(self._inputs, stage.inputs, inputs, strict=True):
            bound.read(port.dense(value))
        for bound in self._outputs:
            bound.renew()

    def outputs(self) -> Sequence[torch.Tensor]:
        """The outputs of the last request."""
        made = [bound.own() for bound in self._outputs]
        if not self._restores:
            return made
        made = [first(value) if k in self._turned else value for k, value in enumerate(made)]
        return [port.restore(value) for port, value in zip(self._stage.outputs, made, strict=True)]


class FreeRequest(OpenVinoRequest):
    """A request for tensors of every size: it reads inputs in place, and its outputs are copied."""

    _given: Sequence[torch.Tensor] = ()

    @_with_plain_errors
    def bind(self, inputs: Sequence[torch.Tensor]) -> None:
        """Hand over the inputs, which are kept until the next ones."""
        if self._stage.check is not None:
            self._stage.check(inputs)
        self._given = [port.dense(value) for port, value in zip(self._stage.inputs, inputs, strict=True)]
        for position, value in enumerate(self._given):
            self.request.set_input_tensor(position, _tensor(value))

    def outputs(self) -> Sequence[torch.Tensor]:
        """The outputs of the last request."""
        return self._stage.restored(self.request.get_output_tensor(k).data.copy() for k in range(len(self._stage.outputs)))


def request_of(compiled: Compiled) -> OpenVinoRequest:
    """A compiled stage as a function, which works on one request at a time."""
    return FreeRequest(compiled) if compiled.stage.free else BoundRequest(compiled)


def _bound(bind: Callable[[int, Any], None], position: int, shape: Sequence[int], dtype: torch.dtype) -> BoundMemory:
    """Memory of an input or output of an infer request."""
    return BoundMemory(lambda value: bind(position, _tensor(value)), torch.empty(tuple(shape), dtype=dtype), COPIED_BYTES)


def _tensor(value: torch.Tensor) -> Any:
    """OpenVINO's tensor over the memory of a dense tensor, which must outlive it. To numpy, one of bf16 is given as integers."""
    import openvino

    if value.dtype == torch.bfloat16:
        return openvino.Tensor(value.view(-1).view(torch.int16).numpy(), list(value.shape), openvino.Type.bf16)
    return openvino.Tensor(value.numpy(), shared_memory=True)


def _call_back(context: "weakref.ref[OpenVinoRequest]") -> None:
    """Report that the request of a context is computed."""
    found = context()
    if found is not None and found._done is not None:
        done, found._done = found._done, None
        done(None)


class OpenVinoStreams:
    """A stage that computes ``streams`` requests at once; one more is queued, so that no stream waits for the caller."""

    def __init__(self, compiled: Compiled, streams: int) -> None:
        self.contexts = [request_of(compiled) for _ in range(streams + 1)]
        self._turns = cycle(self.contexts)

    def begin(self, inputs: Sequence[torch.Tensor]) -> OpenVinoRequest:
        """Wait until the request that had this context is done, then start one."""
        context = next(self._turns)
        context.wait()
        context.bind(inputs)
        context.request.start_async()
        return context

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run one request to its end."""
        context = self.begin(inputs)
        context.wait()
        return context.outputs()


def compiled_model(stage: OnnxStage, chosen: Mapping[str, Any]) -> Compiled:
    """Compile the stage's file, and once more with channels last for outputs that OpenVINO would transpose slowly (``channels``).

    Raises: BackendError: OpenVINO refuses it.
    """
    require_shared(stage, "OpenVINO")

    def compiled(turned: Collection[int]) -> Compiled:
        model = with_channels_last(core().read_model(stage.path), turned)
        return Compiled(stage, core().compile_model(model, "CPU", dict(chosen)), turned)

    try:
        with quiet():
            found = compiled(())
            turned = [] if stage.free else slowly_turned(found.model)
            while turned:
                other = compiled(turned)
                kept = sorted(set(turned) - set(transposed(other.model)))
                if kept == turned:
                    return other
                turned = kept
            return found
    except RuntimeError as failure:
        raise BackendError(f"OpenVINO refuses the stage: {_reason(str(failure))}") from None


def write_ir(stage: OnnxStage, chosen: Mapping[str, Any], path: Path) -> Collection[int]:
    """Write the stage's file as OpenVINO's own, ``path`` (.xml) and its weights (.bin), in f32 and as it compiles best.

    Returns: the numbers of the outputs that come with channels last. Raises: BackendError: OpenVINO refuses the file.
    """
    turned = compiled_model(stage, chosen).turned
    model = with_channels_last(core().read_model(stage.path), turned)
    import openvino

    fold_constants(model)  # else the compiler folds batch norms, and its blob holds a second copy of weights
    openvino.save_model(model, path, compress_to_fp16=False)
    return turned


def export_blob(path: Path, weights: Path, chosen: Mapping[str, Any]) -> bytes:
    """Compile OpenVINO's own file with its weights; the blob holds none of them, since every worker that imports it maps them."""
    with quiet():
        model = core().compile_model(core().read_model(path, weights), "CPU", {**chosen, **WEIGHTLESS})
        blob: bytes = model.export_model().getvalue()
        return blob


def open_ir(stage: OnnxStage, weights: Path, chosen: Mapping[str, Any], blob: Path | None = None) -> Compiled:
    """Compile OpenVINO's own file, ``stage.path``, with its weights, or take the blob that was compiled of it.

    Raises: BackendError: OpenVINO refuses the file.
    """
    require_shared(stage, "OpenVINO")
    with quiet():
        if blob is not None:
            # OpenVINO refuses a blob whose header names another version of it or another instruction set, and a damaged one.
            with contextlib.suppress(RuntimeError):
                given = {**chosen, **WEIGHTLESS, "WEIGHTS_PATH": str(weights)}
                return Compiled(stage, core().import_model(io.BytesIO(blob.read_bytes()), "CPU", given))
        try:
            return Compiled(stage, core().compile_model(core().read_model(stage.path, weights), "CPU", dict(chosen)))
        except RuntimeError as failure:
            raise BackendError(f"OpenVINO refuses the stage: {_reason(str(failure))}") from None


def core() -> Any:
    """The process's only ``Core``: after models of two Cores are freed, Ctrl-C is a segmentation fault (in 2026.4)."""
    with _FIRST:
        return _core()


@cache
def _core() -> Any:
    """Make the core; not for several threads at once.

    OpenVINO reports its first import over the network, from a thread that stays. Without that package it does not.
    """
    held = sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    if held is None:
        del sys.modules["openvino_telemetry"]
    return openvino.Core()


def _reason(text: str) -> str:
    """OpenVINO's message without the places in its sources.

    >>> _reason("Exception from a.cpp:84:\\nCheck 'false' failed at b.cpp:1:\\nSummary:\\n-- No rule for: Det-20\\n")
    'No rule for: Det-20'
    """
    lines = [line.strip().removeprefix("-- ") for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Exception from", "Check '")) and not line.endswith((":", "."))]
    return " ".join((telling or lines)[:2])[:300]


BACKEND: Backend = OpenVinoBackend()
