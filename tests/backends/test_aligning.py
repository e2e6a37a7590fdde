"""A tensor of an odd size put packed weights off their boundary, and ONNX Runtime 1.31 ended the process (Swin, 2026)."""

from functools import partial

import numpy as np
import onnx
import pytest
import torch
from onnxruntime import InferenceSession
from torch import nn

from autosplit.backends import onnxruntime
from autosplit.backends.aligning import align
from autosplit.backends.base import get_backend
from autosplit.backends.checking import check
from autosplit.backends.onnxruntime import OPTIMISED
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model


class OddSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(7, 7, 147))
        self.first, self.second = nn.Linear(147, 64), nn.Linear(64, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x + self.bias).relu())


def entries(path):
    return [{e.key: e.value for e in t.external_data} for t in onnx.load(str(path), load_external_data=False).graph.initializer]


def test_packed_weights_lie_on_boundaries_after_a_tensor_of_an_odd_size(whole, tmp_path):
    traced = trace(load_model(OddSize().eval(), inputs=(torch.randn(7, 7, 147),)))
    program = whole(traced)
    backend = get_backend("onnxruntime")
    backend.prepare(program, tmp_path)
    packed = [e["prepacked_0"].split("|")[1:] for e in entries(tmp_path / OPTIMISED / "model.onnx") if "prepacked_0" in e]
    offsets = [int(buffer.split(";")[0]) for buffers in packed for buffer in buffers]
    assert offsets
    assert all(offset % 64 == 0 for offset in offsets)
    assert check(backend, program, traced.example_inputs, runnable=backend.load(tmp_path, 1)).relative < 1e-5


def test_a_long_shape_is_inside_the_file(tmp_path):
    """The sizes of a split are read while the graph is built, when its data file is not; here they are 1040 bytes."""
    value = partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT)
    parts = [f"part{number}" for number in range(130)]
    sizes = onnx.helper.make_tensor("sizes", onnx.TensorProto.INT64, [130], [1] * 130)
    nodes = [onnx.helper.make_node("Split", ["x", "sizes"], parts, axis=1), onnx.helper.make_node("Sum", parts, ["y"])]
    inputs, outputs = [value("x", shape=[3, 130])], [value("y", shape=[3, 1])]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "parts", inputs, outputs, initializer=[sizes]),
        opset_imports=[onnx.helper.make_opsetid("", 18)],
        ir_version=10,
    )
    onnx.save(model, tmp_path / "parts.onnx")
    onnxruntime.optimise(tmp_path / "parts.onnx", tmp_path / "model.onnx")
    assert any(tensor.dims == [130] for tensor in onnx.load(str(tmp_path / "model.onnx")).graph.initializer)
    x = torch.randn(3, 130).numpy()
    [found] = InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(found, x.sum(1, keepdims=True), rtol=1e-4, atol=1e-4)


def external_model(folder, packed=""):
    """Two tensors back to back in one data file, the first 5 bytes long, and a packed buffer after them."""
    data = bytes(range(5)) + bytes(range(100, 110)) + b"packed"
    (folder / "m.onnx.data").write_bytes(data)
    tensors = []
    for name, offset, length in (("a", 0, 5), ("b", 5, 10)):
        tensor = onnx.TensorProto(name=name, dims=[length], data_type=onnx.TensorProto.UINT8, data_location=1)
        for key, value in (("location", "m.onnx.data"), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        tensors.append(tensor)
    if packed:
        tensors[1].external_data.add(key="prepacked_0", value=packed)
    graph = onnx.helper.make_graph([], "g", [], [], initializer=tensors)
    (folder / "m.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    return folder / "m.onnx"


def test_data_between_boundaries_moves_with_its_entries_and_the_rest_stays(tmp_path):
    path = external_model(tmp_path, packed="MatMul+1|15;6;0")
    before = (tmp_path / "m.onnx.data").read_bytes()
    align(path)
    first, second = entries(path)
    assert (first["offset"], second["offset"], second["prepacked_0"]) == ("0", "64", "MatMul+1|128;6;0")
    data = (tmp_path / "m.onnx.data").read_bytes()
    assert (data[: len(before)], data[64:74], data[128:]) == (before, bytes(range(100, 110)), b"packed")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]


def test_what_lies_on_boundaries_already_is_not_written_again(tmp_path):
    path = external_model(tmp_path, packed="MatMul+1|15;6;0")
    align(path)
    files = [path, tmp_path / "m.onnx.data"]
    before = [(file.stat().st_ino, file.stat().st_mtime_ns) for file in files]
    align(path)
    assert [(file.stat().st_ino, file.stat().st_mtime_ns) for file in files] == before


def test_an_entry_of_another_form_is_not_guessed(tmp_path):
    with pytest.raises(ValueError):
        align(external_model(tmp_path, packed="MatMul+1|fifteen"))


def test_a_model_without_outside_data_stays_as_it_is(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [])).SerializeToString())
    before = path.read_bytes()
    align(path)
    assert path.read_bytes() == before


def test_packed_weights_in_a_form_that_is_not_known_are_done_without(mlp, whole, tmp_path, monkeypatch):
    def refuse_packed(path):
        if any("prepacked_0" in fields for fields in entries(path)):
            raise ValueError("another form")

    monkeypatch.setattr(onnxruntime, "align", refuse_packed)
    program, backend = whole(mlp), get_backend("onnxruntime")
    backend.write(program, tmp_path, "f32")
    assert not any("prepacked_0" in fields for fields in entries(tmp_path / OPTIMISED / "model.onnx"))
    assert check(backend, program, mlp.example_inputs, runnable=backend.load(tmp_path, 1)).relative < 1e-5
