import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosplit.backends import exportcache, onnxfile
from autosplit.backends.base import get_backend
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import StageProgram, save_stage, split


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("AUTOSPLIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "onnx"


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were exported."""
    found: list[str] = []
    export = onnxfile.write_onnx

    def noted(program: StageProgram, path: Path, **options: object) -> None:
        found.append(path.name)
        export(program, path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(onnxfile, "write_onnx", noted)
    return found


@pytest.fixture
def prepared(whole: Callable[[Traced], StageProgram], tmp_path: Path) -> Callable[[str, Traced], Path]:
    def one(name: str, traced: Traced) -> Path:
        save_stage(whole(traced), tmp_path / name)
        onnxfile.prepare_onnx(whole(traced), tmp_path / name)
        return tmp_path / name

    return one


@pytest.mark.parametrize(("has_bias", "num_exports"), [(False, 1), (True, 3)])
def test_layers_of_one_shape_have_one_export_whatever_the_values_of_their_large_weights(
    cache: Path, exports: list[str], tmp_path: Path, has_bias: bool, num_exports: int
) -> None:
    """A bias of 128 bytes is in the file, so that its values count."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=has_bias) for _ in range(3))).eval()
    traced = trace(load_model(layers, inputs=(torch.randn(4, 32),)))
    for program in split(traced, [[op.name] for op in traced.graph.ops]):
        save_stage(program, folder := tmp_path / program.name)
        for name in ("onnxruntime", "openvino"):
            get_backend(name).write(program, folder, "f32")  # type: ignore[attr-defined]
            found = get_backend(name).load(folder, 1)(traced.example_inputs)
            torch.testing.assert_close(tuple(found), program.module(*traced.example_inputs), rtol=1e-4, atol=1e-5)
    assert len(exports) == len(list(cache.iterdir())) == num_exports


def test_no_file_that_is_kept_holds_a_large_weight(mlp: Traced, whole, tmp_path: Path) -> None:
    onnxfile.write_onnx(whole(mlp), tmp_path / "stage.onnx", starts={})
    assert 2 * (tmp_path / "stage.onnx.data").stat().st_size > whole(mlp).weight_bytes > (tmp_path / "stage.onnx").stat().st_size


def test_what_is_computed_of_a_large_weight_stays_in_the_file(cache: Path, exports: list[str], tmp_path: Path) -> None:
    """Folded values of one layer would be those of all."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.randn(512))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.scale + 1).exp()

    for number in range(2):
        traced = trace(load_model(Scaled().eval(), inputs=(torch.randn(4, 512),)))
        [program] = split(traced, [[op.name for op in traced.graph.ops]])
        save_stage(program, tmp_path / str(number))
        get_backend("onnxruntime").write(program, tmp_path / str(number), "f32")  # type: ignore[attr-defined]
        found = get_backend("onnxruntime").load(tmp_path / str(number), 1)(traced.example_inputs)
        torch.testing.assert_close(tuple(found), program.module(*traced.example_inputs), rtol=1e-4, atol=1e-5)
    assert len(exports) == 1


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, path.stat().st_size // 2), lambda path: path.write_bytes(b"")])
def test_a_damaged_export_is_made_again(
    mlp: Traced, prepared, cache: Path, exports: list[str], damage: Callable[[Path], object]
) -> None:
    prepared("first", mlp)
    [kept] = cache.iterdir()
    damage(kept)
    for name in ("second", "third"):
        assert not [path for path in prepared(name, mlp).iterdir() if path.name.startswith(".")]
    assert len(exports) == 2


@given(data=st.data())
def test_no_damaged_export_is_taken(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("exports")
    (folder / "model.onnx").write_bytes(bytes(range(100)))
    exportcache.keep(folder / "kept.export", folder / "model.onnx")
    content = bytearray((folder / "kept.export").read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    (folder / "kept.export").write_bytes(content[: data.draw(st.integers(place + 1, len(content)))])
    assert not exportcache.take(folder / "kept.export", folder / "taken.onnx")
    assert not (folder / "taken.onnx").exists()


def test_where_nothing_can_be_kept_stages_are_exported_all_the_same(
    mlp: Traced, prepared, exports: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOSPLIT_CACHE", str(tmp_path / "file"))
    assert (prepared("first", mlp) / onnxfile.PORTS).is_file() and (prepared("second", mlp) / onnxfile.PORTS).is_file()
    assert len(exports) == 2


def test_exports_that_were_not_used_for_long_make_room_and_large_ones_are_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(exportcache, "MOST_BYTES", 4000)
    monkeypatch.setattr(exportcache, "LARGEST_BYTES", 2000)
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(bytes(1000))
    large.write_bytes(bytes(2500))
    for number in range(4):
        exportcache.keep(cache / f"{number}.export", small)
        os.utime(cache / f"{number}.export", (number, number))
    exportcache.keep(cache / "large.export", large)
    assert sorted(path.name for path in cache.iterdir()) == ["1.export", "2.export", "3.export"]
    assert exportcache.take(cache / "1.export", tmp_path / "taken")  # it was used now
    exportcache.keep(cache / "4.export", small)
    assert sorted(path.name for path in cache.iterdir()) == ["1.export", "3.export", "4.export"]
    shutil.rmtree(cache)
    assert not exportcache.take(cache / "1.export", tmp_path / "taken")
