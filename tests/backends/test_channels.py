import pytest
import torch
from torch import nn

from autosplit.backends import openvino
from autosplit.backends.base import get_backend, require_streams
from autosplit.backends.channels import first, last, slowly_turned
from autosplit.backends.onnxfile import prepare_onnx
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import split


class Skips(nn.Module):
    """Three values that leave a convolution, as those of a U-Net's first half do; one of them is read inside, too."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = self.wide(image).relu()
        deep = self.deep(nn.functional.max_pool2d(wide, 2)).relu()
        return wide, deep, deep.mean((2, 3))


@pytest.fixture(scope="module")
def skips():
    torch.manual_seed(0)
    traced = trace(load_model(Skips().eval(), inputs=(torch.randn(2, 3, 64, 64),)))
    return split(traced, [[op.name for op in traced.graph.ops]])[0], traced.example_inputs


def test_no_output_is_turned_slowly_that_could_be_had_with_channels_last(skips, tmp_path):
    """Of those had so the graph still names a change of layout, which moves nothing."""
    compiled = openvino.compiled_model(prepare_onnx(skips[0], tmp_path), openvino.settings(1, "f32"))
    assert set(slowly_turned(compiled.model)) <= set(compiled.turned)


@pytest.mark.parametrize("wanted", [[0], [0, 1]])
def test_outputs_with_channels_last_inside_come_as_they_were_traced(skips, tmp_path, monkeypatch, wanted):
    """As on a processor where OpenVINO turns these slowly."""
    program, inputs = skips
    monkeypatch.setattr(openvino, "slowly_turned", lambda model: wanted)
    backend = require_streams(get_backend("openvino"))
    backend.prepare(program, tmp_path)
    for run in (backend.load(tmp_path, 1), backend.load_streams(tmp_path, 2, 2)):
        for found, spec, expected in zip(run(inputs), program.outputs, program.module(*inputs), strict=True):
            assert found.stride() == spec.stride
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_outputs_before_which_a_transpose_is_left_are_had_as_before(skips, tmp_path, monkeypatch):
    asked: list[list[int]] = []
    monkeypatch.setattr(openvino, "slowly_turned", lambda model: [0, 1])
    monkeypatch.setattr(openvino, "transposed", lambda model: asked.append([1] if not asked else []) or asked[-1])
    compiled = openvino.compiled_model(prepare_onnx(skips[0], tmp_path), openvino.settings(1, "f32"))
    assert compiled.turned == [0] and asked == [[1], []]
    assert [tuple(port.shape) for port in compiled.model.outputs] == [(2, 64, 64, 32), (2, 64, 32, 32), (2, 64)]


@pytest.mark.parametrize("shape", [(1, 32, 16, 16), (3, 5, 7, 2), (2, 1, 4, 4), (2, 3, 0, 4)])
def test_channels_go_to_the_end_and_back(shape):
    value = torch.randn(shape)
    turned = value.permute(0, 2, 3, 1).contiguous()
    assert turned.shape == last(shape)
    assert torch.equal(first(turned), value) and first(turned).is_contiguous()
