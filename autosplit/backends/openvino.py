"""OpenVINO on CPU cores: the stage's ONNX file, compiled for latency with one stream, or for several requests at once.

OpenVINO's own default on processors with bfloat16 is to compute in bfloat16; here the precision is stated always. Inputs
and outputs share their memory with torch. Every process packs the weights anew, whatever file they come from (ONNX, OpenVINO's
own, its model cache): only the streams of one process share them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autosplit.backends.base import Backend, Precision, Runnable, Streams, compile_apart, require_precision
from autosplit.backends.channels import first, last, slowly_turned, transposed, with_channels_last
from autosplit.backends.onnxfile import ELEMENT_TYPES, OnnxStage, missing_packages, open_onnx, prepare_onnx, refused_by_onnx
from autosplit.backends.quiet import quiet
from autosplit.devices.accelerators import Accelerator, Queue
from autosplit.errors import BackendError
from autosplit.tracing.splitting import StageProgram


class OpenVinoBackend:
    """One compiled model and one infer request a stage, CPU plug-in."""

    name = "openvino"
    exact = False
    native = False
    lacks: Mapping[Precision, str] = {}

    def missing(self) -> str | None:
        """The packages that are not installed: the stage comes as an ONNX file."""
        return missing_packages(self.name, ("openvino", "onnx", "onnxscript"), "openvino")

    def refuses(self, program: StageProgram) -> dict[str, str]:
        """The ops that the ONNX exporter or OpenVINO refuses; costs an export. What OpenVINO refuses itself shows in ``load``."""
        return refused_by_onnx(program, lambda path: _compile(path, settings(1, "f32")))

    def prepare(self, program: StageProgram, folder: Path, precision: Precision = "f32") -> None:
        """Write the ONNX file into the stage's folder; it serves both precisions."""
        require_precision(self, precision)
        prepare_onnx(program, folder)

    def load(self, folder: Path, threads: int, precision: Precision = "f32", shared: bool = True) -> Runnable:
        """The prepared ONNX file, compiled."""
        require_precision(self, precision)
        return compiled_runnable(open_onnx(folder), threads, precision)

    def load_streams(self, folder: Path, threads: int, streams: int, precision: Precision = "f32") -> Streams:
        """The prepared ONNX file, compiled for ``streams`` requests at once."""
        require_precision(self, precision)
        return OpenVinoStreams(open_onnx(folder), threads, streams, precision)

    def compile(self, program: StageProgram, threads: int, precision: Precision = "f32") -> Runnable:
        """Export into a temporary folder and load from it."""
        return compile_apart(self, program, threads, precision)

    def refuses_kind(self, kind: str) -> str | None:
        """Always: of NVIDIA's devices it knows none."""
        return "OpenVINO has no plug-in for it; use eager, inductor or onnxruntime there"

    def place(self, folder: Path, accelerator: Accelerator, queue: Queue, precision: Precision = "f32") -> tuple[Runnable, bool]:
        """Never. Raises: BackendError: with the reason."""
        raise BackendError(f"OpenVINO does not run on {accelerator.device}")


def settings(threads: int, precision: Precision, streams: int = 1) -> dict[str, Any]:
    """``streams`` requests at once, on ``threads`` threads together that keep the affinity of this process."""
    return {
        "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
        "NUM_STREAMS": str(streams),
        "INFERENCE_NUM_THREADS": str(threads),
        "INFERENCE_PRECISION_HINT": precision,
        "ENABLE_CPU_PINNING": False,
    }


class Compiled(NamedTuple):
    """A model as OpenVINO runs it, and which of its outputs come with channels last, to be turned by torch."""

    model: Any
    turned: Collection[int] = ()


class Context:
    """An infer request of OpenVINO; it reads and writes torch's memory."""

    def __init__(self, stage: OnnxStage, compiled: Compiled) -> None:
        self.request = compiled.model.create_infer_request()
        self._turned = compiled.turned
        self._stage = stage
        self._held: list[torch.Tensor] = []
        self._made: list[torch.Tensor] = []

    def bind(self, inputs: Sequence[torch.Tensor]) -> None:
        """Read these inputs from now on, and write into new memory."""
        import openvino

        stage = self._stage
        self._held = [port.dense(value) for port, value in zip(stage.inputs, inputs, strict=True)]
        shapes = [last(port.dense_shape) if k in self._turned else port.dense_shape for k, port in enumerate(stage.outputs)]
        self._made = [torch.empty(shape, dtype=port.dtype) for shape, port in zip(shapes, stage.outputs, strict=True)]
        for position, value in enumerate(self._held):
            self.request.set_input_tensor(position, openvino.Tensor(value.numpy(), shared_memory=True))
        for position, value in enumerate(self._made):
            self.request.set_output_tensor(position, openvino.Tensor(value.numpy(), shared_memory=True))

    def wait(self, most_s: float = math.inf) -> bool:
        """Until it is computed, or for so many seconds, in whole milliseconds; whether it is."""
        if most_s < math.inf:
            return bool(self.request.wait_for(math.ceil(most_s * 1000)))
        self.request.wait()
        return True

    def outputs(self) -> Sequence[torch.Tensor]:
        """What was made."""
        made = [first(value) if k in self._turned else value for k, value in enumerate(self._made)]
        return [port.restore(value) for port, value in zip(self._stage.outputs, made, strict=True)]


class OpenVinoStreams:
    """A stage that works on ``streams`` requests at once; one more lies ready, so that no stream waits for the caller."""

    def __init__(self, stage: OnnxStage, threads: int, streams: int, precision: Precision) -> None:
        compiled = compiled_model(stage, settings(threads, precision, streams))
        self.num_contexts = streams + 1
        self._turns = cycle([Context(stage, compiled) for _ in range(self.num_contexts)])

    def begin(self, inputs: Sequence[torch.Tensor]) -> Context:
        """Start a request, once the one that had its context is done."""
        context = next(self._turns)
        context.wait()
        context.bind(inputs)
        context.request.start_async()
        return context

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """A whole request."""
        context = self.begin(inputs)
        context.wait()
        return context.outputs()


def compiled_model(stage: OnnxStage, chosen: Mapping[str, Any]) -> Compiled:
    """The stage's file, compiled. Raises: BackendError: OpenVINO does not take it."""
    for port in (*stage.inputs, *stage.outputs):
        if port.dtype not in ELEMENT_TYPES or port.dtype == torch.bfloat16:
            raise BackendError(f"OpenVINO cannot share '{port.name}' with torch: numpy has no {port.dtype}")
    return _compile(stage.path, chosen)


@cache
def core() -> Any:
    """The one ``Core`` of this process: once models of two of them are gone, Ctrl-C is a segmentation fault (in 2026.4)."""
    import openvino

    return openvino.Core()


def _compile(path: Path, chosen: Mapping[str, Any]) -> Compiled:
    """The file, compiled; once more if outputs that it turns slowly can be had as they are inside (``channels``)."""

    def compiled(turned: Collection[int]) -> Compiled:
        model = with_channels_last(core().read_model(path), turned)
        return Compiled(core().compile_model(model, "CPU", dict(chosen)), turned)

    try:
        with quiet():
            found = compiled(())
            turned = slowly_turned(found.model)
            while turned:
                other = compiled(turned)
                kept = sorted(set(turned) - set(transposed(other.model)))
                if kept == turned:
                    return other
                turned = kept
            return found
    except RuntimeError as failure:
        raise BackendError(f"OpenVINO refuses '{path.name}': {_reason(str(failure))}") from None


def _reason(text: str) -> str:
    """What OpenVINO says, without where in its sources it says so.

    >>> _reason("Exception from a.cpp:84:\\nCheck 'false' failed at b.cpp:1:\\nSummary:\\n-- No rule for: Det-20\\n")
    'No rule for: Det-20'
    """
    lines = [line.strip().removeprefix("-- ") for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Exception from", "Check '")) and not line.endswith((":", "."))]
    return " ".join((telling or lines)[:2])[:300]


def compiled_runnable(stage: OnnxStage, threads: int, precision: Precision) -> Runnable:
    """The stage as a function. Raises: BackendError: OpenVINO does not take the file."""
    context = Context(stage, compiled_model(stage, settings(threads, precision)))

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        context.bind(inputs)
        context.request.infer()
        return context.outputs()

    return run


BACKEND: Backend = OpenVinoBackend()
