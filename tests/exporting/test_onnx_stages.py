"""ONNX stages are read back as the split that made them, also where a tool renamed and turned the weights."""

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from autosplit.backends.onnxfile import write_onnx
from autosplit.errors import UsageError
from autosplit.exporting.onnx_stages import from_onnx_stages, onnx_files
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import split
from autosplit.values.machine import Machine, parse_device

TWO = Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])


@pytest.fixture(scope="module")
def traced() -> Traced:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    return trace(load_model(net.eval(), inputs=(torch.randn(1, 8),)))


def test_weights_say_which_ops_a_file_holds(traced: Traced, tmp_path: Path) -> None:
    ops = [op.name for op in traced.graph.ops]
    stages = (tuple(ops[:2]), tuple(ops[2:]))
    for number, program in enumerate(split(traced, stages)):
        write_onnx(program, tmp_path / f"part{number}.onnx", dense=False)
    found = from_onnx_stages(onnx_files(str(tmp_path)), traced, TWO)
    assert (found.stages, found.devices) == (stages, ("cpu:0", "cpu:1"))
    renamed = onnx.load(tmp_path / "part1.onnx")
    for number, tensor in enumerate(renamed.graph.initializer):
        array = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array.T.copy(), f"onnx::MatMul_{number}"))
    onnx.save(renamed, tmp_path / "other.onnx")
    files = f"{tmp_path / 'part0.onnx'},{tmp_path / 'other.onnx'}"
    assert from_onnx_stages(onnx_files(files), traced, TWO).stages == stages


def test_files_of_another_model_are_refused_with_every_fault(traced: Traced, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"\xff\xff")
    empty = onnx.helper.make_model(onnx.helper.make_graph([], "empty", [], []))
    onnx.save(empty, tmp_path / "empty.onnx")
    onnx.save(empty, tmp_path / "third.onnx")
    with pytest.raises(UsageError, match=r"\(4 faults\)") as failure:
        from_onnx_stages(onnx_files(str(tmp_path)), traced, TWO)
    assert "cannot be read as ONNX" in str(failure.value) and "holds no weight of 'Sequential'" in str(failure.value)
