"""The runtime of MLServer for ``benchmarks.serving_peers``: ONNX Runtime on one core of each worker."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from serving_peers import session_of


class OnnxModel(MLModel):
    """An ONNX file; inputs and outputs are taken in the order of a request."""

    async def load(self) -> bool:
        """Open the file."""
        self.session = session_of(self.settings.parameters.uri)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run one request."""
        known = [one.name for one in self.session.get_inputs()]
        arrays = [NumpyCodec.decode_input(one) for one in payload.inputs]
        outputs = self.session.run(None, dict(zip(known, arrays, strict=True)))
        names = [one.name for one in self.session.get_outputs()]
        encoded = [NumpyCodec.encode_output(name, value) for name, value in zip(names, outputs, strict=True)]
        return InferenceResponse(model_name=self.name, outputs=encoded)
