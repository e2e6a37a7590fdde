"""ONNX stages are read back as the split that made them, also where a tool renamed and turned the weights."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.fixture
def halves(traced: Traced, tmp_path: Path) -> list[Path]:
    """Two halves that each count their layers from 0: both have weights named ``f.0.weight`` and ``f.0.bias``."""
    files = [tmp_path / "front.onnx", tmp_path / "rear.onnx"]
    ops = [op.name for op in traced.graph.ops]
    for path, program, first in zip(files, split(traced, (ops[:2], ops[2:])), (0, 2), strict=True):

        def count_from_0(tensor: onnx.TensorProto, first: int = first) -> None:
            layer, kind = tensor.name.split(".")
            tensor.name = f"f.{(int(layer) - first) // 2}.{kind}"

        write_onnx(program, path, dense=False)
        edit(path, count_from_0)
    return files


def edit(path: Path, change: Callable[[onnx.TensorProto], None]) -> None:
    """Change every initializer of a file."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        change(tensor)
    onnx.save(model, path)


def test_halves_that_both_count_from_0_are_told_apart_by_their_contents(traced: Traced, halves: list[Path]) -> None:
    ops = tuple(op.name for op in traced.graph.ops)
    assert {tensor.name for path in halves for tensor in onnx.load(path).graph.initializer} == {
        "f.0.weight", "f.0.bias", "f.1.weight", "f.1.bias",
    }  # fmt: skip
    assert from_onnx_stages(halves, traced, TWO).stages == (ops[:2], ops[2:])


def test_halves_in_the_wrong_order_are_refused(traced: Traced, halves: list[Path]) -> None:
    with pytest.raises(UsageError, match=r"its weights in '.*rear.onnx', and reads a value from .*in the order of the graph"):
        from_onnx_stages(halves[::-1], traced, TWO)


def test_other_numbers_are_known_by_their_names_unless_two_files_differ(traced: Traced, tmp_path: Path) -> None:
    ops = tuple(op.name for op in traced.graph.ops)
    files = [tmp_path / "front.onnx", tmp_path / "rear.onnx"]

    def add_one(tensor: onnx.TensorProto) -> None:
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) + 1, tensor.name))

    for path, program in zip(files, split(traced, (ops[:2], ops[2:])), strict=True):
        write_onnx(program, path, dense=False)
        edit(path, add_one)
    assert from_onnx_stages(files, traced, TWO).stages == (ops[:2], ops[2:])
    shutil.copyfile(files[0], files[1])
    edit(files[1], add_one)
    with pytest.raises(UsageError, match=r"front.onnx' and '.*rear.onnx' hold different numbers for weight '0.weight'"):
        from_onnx_stages(files, traced, TWO)


@pytest.mark.parametrize(
    ("field", "value"),
    [("raw_data", b"\0" * 3), ("data_type", 99), ("data_type", onnx.TensorProto.STRING), ("dims", [2**62, 4]), ("dims", [-1, 3])],
)
def test_an_initializer_that_does_not_fit_is_named(traced: Traced, halves: list[Path], field: str, value: Any) -> None:
    model = onnx.load(halves[1])
    [tensor] = [tensor for tensor in model.graph.initializer if tensor.name == "f.0.weight"]
    tensor.ClearField(field)
    getattr(tensor, field).extend(value) if field == "dims" else setattr(tensor, field, value)
    onnx.save(model, halves[1])
    with pytest.raises(UsageError, match=r"initializer 'f.0.weight' of '.*rear.onnx' cannot be read: \w+"):
        from_onnx_stages(halves, traced, TWO)


def test_files_of_another_model_are_refused_with_every_fault(traced: Traced, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"\xff\xff")
    empty = onnx.helper.make_model(onnx.helper.make_graph([], "empty", [], []))
    onnx.save(empty, tmp_path / "empty.onnx")
    onnx.save(empty, tmp_path / "third.onnx")
    with pytest.raises(UsageError, match=r"\(4 faults\)") as failure:
        from_onnx_stages(onnx_files(str(tmp_path)), traced, TWO)
    assert "cannot be read as ONNX" in str(failure.value) and "holds no weight of 'Sequential'" in str(failure.value)
