"""The exporter's table is made once, and is the exporter's own again afterwards."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from autosplit.backends.onnxfile import write_onnx
from autosplit.compat import runtimes
from autosplit.compat.runtimes import kept_translations
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import split

pytest.importorskip("onnxscript")

REGISTRATION = "torch.onnx._internal.exporter._registration"


class Table:
    """In the place of torch's; counts how often it is made."""

    made = 0

    @classmethod
    def from_torchlib(cls, opset_version: int = 18) -> tuple[int, int]:
        cls.made += 1
        return cls.made, opset_version


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Table]]:
    monkeypatch.setitem(sys.modules, REGISTRATION, SimpleNamespace(ONNXRegistry=Table))
    monkeypatch.setattr(Table, "made", 0)
    runtimes._made.cache_clear()
    yield Table
    runtimes._made.cache_clear()


def test_the_table_is_made_once_for_each_version_of_the_format(table: type[Table]) -> None:
    with kept_translations():
        assert [table().from_torchlib(opset_version=version) for version in (18, 20, 18)] == [(1, 18), (2, 20), (1, 18)]
    with kept_translations():
        assert table().from_torchlib(opset_version=20) == (2, 20)


def test_others_get_a_table_of_their_own_also_after_an_error(table: type[Table]) -> None:
    with pytest.raises(ValueError, match="refused"), kept_translations():
        table().from_torchlib()
        raise ValueError("refused")
    assert table().from_torchlib() == (2, 18) and table().from_torchlib() == (3, 18)


@pytest.mark.parametrize("place", [SimpleNamespace(), SimpleNamespace(ONNXRegistry=int)])
def test_a_torch_that_keeps_it_elsewhere_goes_on_as_ever(monkeypatch: pytest.MonkeyPatch, place: SimpleNamespace) -> None:
    monkeypatch.setitem(sys.modules, REGISTRATION, place)
    with kept_translations():
        pass


def test_the_exporter_of_this_torch_takes_the_table_that_is_kept(tmp_path) -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=2&width=8"))
    [program] = split(traced, [[op.name for op in traced.graph.ops]])
    write_onnx(program, tmp_path / "first.onnx")
    before = runtimes._made.cache_info()
    write_onnx(program, tmp_path / "second.onnx")
    after = runtimes._made.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 1)
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "second.onnx").read_bytes()
