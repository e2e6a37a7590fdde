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
from autosplit.tracing.splitting import WEIGHTS, StageProgram, save_stage


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


def test_a_stage_is_exported_once_and_one_with_other_weights_again(
    mlp: Traced, whole, prepared, cache: Path, exports: list[str]
) -> None:
    prepared("first", mlp)
    second = prepared("second", mlp)
    assert len(exports) == len(list(cache.iterdir())) == 1
    for name in ("onnxruntime", "openvino"):
        get_backend(name).write(whole(mlp), second, "f32")  # type: ignore[attr-defined]
        [found] = get_backend(name).load(second, 1)(mlp.example_inputs)
        torch.testing.assert_close(found, mlp.program(*mlp.example_inputs)[0], rtol=1e-4, atol=1e-5)
    layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(2))).eval()
    for name in ("one", "other"):
        torch.nn.init.normal_(layers[0].weight)
        prepared(name, trace(load_model(layers, inputs=(torch.randn(4, 32),))))
    assert len(exports) == len(list(cache.iterdir())) == 3


def test_links_to_one_file_of_weights_are_hashed_once(
    mlp: Traced, whole, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = []
    monkeypatch.setattr(exportcache, "file_hash", lambda path, real=exportcache.file_hash: hashed.append(path.name) or real(path))
    save_stage(whole(mlp), tmp_path / "stage")
    save_stage(whole(mlp), tmp_path / "link", tmp_path / "stage")
    first = exportcache.place(tmp_path / "stage")
    assert exportcache.place(tmp_path / "link") == first
    assert hashed.count(WEIGHTS) == 1
    with (tmp_path / "link" / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    assert exportcache.place(tmp_path / "link") != first


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
    exportcache.keep(folder / "kept.export", [folder / "model.onnx"])
    content = bytearray((folder / "kept.export").read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    (folder / "kept.export").write_bytes(content[: data.draw(st.integers(place + 1, len(content)))])
    assert not exportcache.take(folder / "kept.export", folder)


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
        exportcache.keep(cache / f"{number}.export", [small])
        os.utime(cache / f"{number}.export", (number, number))
    exportcache.keep(cache / "large.export", [large])
    assert sorted(path.name for path in cache.iterdir()) == ["1.export", "2.export", "3.export"]
    assert exportcache.take(cache / "1.export", tmp_path)  # it was used now
    exportcache.keep(cache / "4.export", [small])
    assert sorted(path.name for path in cache.iterdir()) == ["1.export", "3.export", "4.export"]
    shutil.rmtree(cache)
    assert not exportcache.take(cache / "1.export", tmp_path)
