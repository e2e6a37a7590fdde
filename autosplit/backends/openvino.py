"""OpenVINO on CPU cores: the stage's ONNX file, compiled for latency with one stream.

OpenVINO's own default on processors with bfloat16 is to compute in bfloat16; here the precision is stated always. Inputs
and outputs share their memory with torch.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autosplit.accelerators import Accelerator, Queue
from autosplit.backends.base import Backend, Precision, Runnable, require_precision
from autosplit.backends.onnxfile import ELEMENT_TYPES, OnnxStage, missing_packages, open_onnx, prepare_onnx, refused_by_onnx
from autosplit.backends.quiet import quiet
from autosplit.errors import BackendError
from autosplit.splitting import StageProgram


class OpenVinoBackend:
    """One compiled model and one infer request a stage, CPU plug-in."""

    name = "openvino"
    exact = False
    lacks: Mapping[Precision, str] = {}

    def missing(self) -> str | None:
        """The packages that are not installed: the stage comes as an ONNX file."""
        return missing_packages(self.name, ("openvino",), "openvino") or missing_packages(
            self.name, ("onnx", "onnxscript"), "onnx"
        )

    def refuses(self, program: StageProgram) -> dict[str, str]:
        """The ops that the ONNX exporter refuses; costs an export. What OpenVINO refuses itself shows in ``load``."""
        return refused_by_onnx(program)

    def prepare(self, program: StageProgram, folder: Path, precision: Precision = "f32") -> None:
        """Write the ONNX file into the stage's folder; it serves both precisions."""
        require_precision(self, precision)
        prepare_onnx(program, folder)

    def load(self, folder: Path, threads: int, precision: Precision = "f32") -> Runnable:
        """The prepared ONNX file, compiled."""
        require_precision(self, precision)
        return compiled_runnable(open_onnx(folder), threads, precision)

    def compile(self, program: StageProgram, threads: int, precision: Precision = "f32") -> Runnable:
        """Export into a temporary folder and load from it."""
        with tempfile.TemporaryDirectory(prefix="autosplit-") as name:
            self.prepare(program, Path(name), precision)
            return self.load(Path(name), threads, precision)

    def refuses_kind(self, kind: str) -> str | None:
        """Always: of NVIDIA's devices it knows none."""
        return "OpenVINO has no plug-in for it; use eager, inductor or onnxruntime there"

    def place(self, folder: Path, accelerator: Accelerator, queue: Queue, precision: Precision = "f32") -> tuple[Runnable, bool]:
        """Never. Raises: BackendError: with the reason."""
        raise BackendError(f"OpenVINO does not run on {accelerator.device}")


def settings(threads: int, precision: Precision) -> dict[str, Any]:
    """Latency, one stream, ``threads`` threads that keep the affinity of this process."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(threads),
        "INFERENCE_PRECISION_HINT": precision,
        "ENABLE_CPU_PINNING": False,
    }


def compiled_runnable(stage: OnnxStage, threads: int, precision: Precision) -> Runnable:
    """The stage as a function. Raises: BackendError: OpenVINO does not take the file."""
    import openvino

    for port in (*stage.inputs, *stage.outputs):
        if port.dtype not in ELEMENT_TYPES or port.dtype == torch.bfloat16:
            raise BackendError(f"OpenVINO cannot share '{port.name}' with torch: numpy has no {port.dtype}")
    try:
        with quiet():
            core = openvino.Core()
            compiled = core.compile_model(core.read_model(stage.path), "CPU", settings(threads, precision))
            request = compiled.create_infer_request()
    except RuntimeError as failure:
        raise BackendError(f"OpenVINO refuses '{stage.path}': {failure}") from failure

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        dense = [port.dense(value) for port, value in zip(stage.inputs, inputs, strict=True)]
        outputs = [torch.empty(port.dense_shape, dtype=port.dtype) for port in stage.outputs]
        for position, value in enumerate(dense):
            request.set_input_tensor(position, openvino.Tensor(value.numpy(), shared_memory=True))
        for position, value in enumerate(outputs):
            request.set_output_tensor(position, openvino.Tensor(value.numpy(), shared_memory=True))
        request.infer()
        return [port.restore(value) for port, value in zip(stage.outputs, outputs, strict=True)]

    return run


BACKEND: Backend = OpenVinoBackend()
