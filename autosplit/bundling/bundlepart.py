"""BundlePart: a part of a bundle as a worker, or the caller's own process, loads it. It pickles as a plain value."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autosplit.bundling.manifest import BLOB, IR, LIBRARY, ONNX, PROGRAM, WEIGHTS, Part
from autosplit.devices.accelerators import open_accelerator
from autosplit.errors import BackendError, BundleError
from autosplit.running.modules import Module, failing_node
from autosplit.values.samples import Precision

if TYPE_CHECKING:
    from autosplit.backends.base import Runnable
    from autosplit.tracing.splitting import StageProgram


@dataclass(frozen=True, slots=True)
class BundlePart(Module):
    """A part in the folder of its bundle.

    Attributes:
        folder: the folder; its manifest was read, and its files were compared with it.
        weights_key, weights_bytes: key and size of the weights file.
        part: the row of the table, at the sizes of one variant; a part that ``is_free`` is whole.
        same_machine: whether processor and versions are equal to the maker's.
        trust: whether the user trusts the maker of the bundle, so that the part may call every operator.
    """

    folder: Path
    weights_key: str
    weights_bytes: int
    part: Part
    precision: Precision
    same_machine: bool
    trust: bool = False

    @property
    def kind(self) -> str:
        """The backend's name."""
        return self.part.backend

    @property
    def isolated(self) -> bool:
        """Whether an untrusted graph runs in torch."""
        return self.part.backend == "eager" and not self.trust

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self.part.weight_bytes

    def import_packages(self) -> None:
        """Import the backend and the user's operators."""
        from autosplit.backends.base import named_backend

        named_backend(self.part.backend)
        for package in self.part.operators:
            importlib.import_module(package)

    def load(self, threads: int, device: str, shared: bool, streams: int = 1) -> "Runnable":
        """Load the part. Raises: BackendError: its runtime refuses it, or it has no form for this device."""
        from autosplit.backends import inductor
        from autosplit.backends.eager import program_runnable

        part = self.part
        if accelerator := open_accelerator(device):
            return self._place(accelerator, device)
        if part.backend == "eager":
            return program_runnable(self.program(), threads)
        if part.backend == "inductor":
            return inductor.library_runnable(self.folder / part.files[LIBRARY], threads, self._weights())
        return self._session(threads, shared, streams)

    def _session(self, threads: int, shared: bool, streams: int) -> "Runnable":
        """The part on ONNX Runtime or OpenVINO."""
        from autosplit.backends import onnxruntime, openvino
        from autosplit.backends.onnxfile import OnnxStage
        from autosplit.backends.ports import port

        part = self.part
        inputs, outputs = (tuple(map(port, specs)) for specs in (part.inputs, part.outputs))
        if part.backend == "onnxruntime":
            stage = OnnxStage(self.folder / part.files[ONNX], inputs, outputs, free=part.is_free)
            return onnxruntime.session_runnable(stage, threads, shared, optimised=False)
        stage = OnnxStage(self.folder / part.files[IR], inputs, outputs, free=part.is_free)
        turned = [k for k, (one, order) in enumerate(zip(outputs, part.output_orders, strict=True)) if tuple(order) != one.order]
        blob = self.folder / part.files[BLOB] if self.same_machine and BLOB in part.files else None
        chosen = openvino.settings(threads, self.precision, streams)
        compiled = openvino.open_ir(stage, self.folder / WEIGHTS, chosen, blob)._replace(turned=turned)
        return openvino.OpenVinoStreams(compiled, streams) if streams > 1 else openvino.request_of(compiled)

    def _place(self, accelerator: Any, device: str) -> "Runnable":
        from autosplit.backends.placing import place_runnable
        from autosplit.tracing.splitting import place_stage

        if self.part.backend != "eager":
            raise BackendError(
                f"part '{self.part.name}' is ready-made for {self.part.backend} on CPU cores, and cannot run on '{device}'; load "
                "the bundle on CPU devices, or make it of a plan with backend eager there"
            )
        forward = place_stage(self.program(), accelerator.device).module.forward
        return place_runnable(
            accelerator, lambda *_: (lambda inputs: forward(*inputs), True), self.part.inputs, self.part.outputs
        )

    def program(self) -> "StageProgram":
        """The graph of an eager part with its weights mapped. Raises: BundleError: it is damaged, or lacks an operator."""
        from autosplit.files import read_data
        from autosplit.parsing import MALFORMED
        from autosplit.tracing import programs
        from autosplit.tracing.splitting import assemble

        path = self.folder / self.part.files[PROGRAM]
        data = read_data(path, "part", BundleError)
        try:
            graph, weights = programs.decode(data["nodes"], trust=self.trust), self._weights()
            missing = [name for name in programs.weight_names(graph) if name not in weights]
            if missing:
                raise BundleError(f"part file '{path}' names the weight '{missing[0]:.200}', which the manifest does not list")
            return assemble(self.part.name, graph, weights, data["requires_grad"], self.part.inputs, self.part.outputs)
        except (*MALFORMED, RuntimeError, SyntaxError) as failure:  # the last two are torch's, of a layout or a graph
            raise BundleError(f"part file '{path}' is damaged: {str(failure).partition(chr(10))[0]:.300}") from None

    def failing_op(self, inputs: Sequence[torch.Tensor]) -> str | None:
        """The op of an eager part that raises on these inputs; None for a part without its graph."""
        return failing_node(self.program().module, inputs) if self.part.backend == "eager" else None

    def _weights(self) -> dict[str, torch.Tensor]:
        """The weights of the part by name, mapped from the bundle's file."""
        from autosplit.tracing.weightsfile import map_weights

        stored = {weight.spec.name: weight.content for weight in self.part.weights}
        specs = [weight.spec for weight in self.part.weights]
        return map_weights(self.folder / WEIGHTS, self.weights_key, self.weights_bytes, specs, stored)
