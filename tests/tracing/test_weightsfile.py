"""Weights in a file: the same bits and strides, aligned, one copy of what has two names, and readable by others."""

import json
from pathlib import Path

import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from autosplit.errors import PlanError
from autosplit.tracing.tensorspec import TensorSpec, spec_of
from autosplit.tracing.weightsfile import map_weights, weight_starts, write_weights

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


def specs_of(weights: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(w.shape), w.stride(), spec_of(name, w).dtype) for name, w in weights.items()]


def numbers(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.dtype.is_complex else weight.to(torch.float64)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()), max_size=6))
def test_weights_come_back_as_they_lay(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[torch.dtype, list[int], bool]]
) -> None:
    path = tmp_path_factory.mktemp("weights") / "w"
    weights = {}
    for number, (dtype, shape, turned) in enumerate(drawn):
        weight = torch.randint(0, 2, shape).to(dtype)
        weights[f"w.{number}"] = weight.permute(list(reversed(range(weight.dim())))) if turned else weight
    specs = specs_of(weights)
    size = write_weights(path, "key", weights, specs)
    found = map_weights(path, "key", size, specs)
    assert size == path.stat().st_size
    for name, weight in weights.items():
        assert torch.equal(numbers(found[name]), numbers(weight)) and found[name].dtype == weight.dtype
        assert found[name].stride() == weight.stride() and found[name].data_ptr() % 64 == 0


def test_one_tensor_with_two_names_is_written_once_and_others_can_read_it(tmp_path: Path) -> None:
    one = torch.nn.Parameter(torch.randn(16, 32))
    weights = {"a": one, "b": one, "c": one.t()}
    size = write_weights(tmp_path / "w", "key", weights, specs_of(weights))
    starts = weight_starts(tmp_path / "w")
    assert starts["a"] == starts["b"] != starts["c"] and 2 * one.nbytes < size < 3 * one.nbytes
    raw = (tmp_path / "w").read_bytes()
    assert raw[starts["a"] :][: one.nbytes] == one.detach().numpy().tobytes()
    with safe_open(tmp_path / "w", "pt") as file:
        assert sorted(file.keys()) == ["a", "c"] and torch.equal(file.get_tensor("a").view(16, 32), one)
    assert weight_starts(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["__metadata__"].update(stage="other"), "belongs to another stage"),
        (lambda header: header["w"].update(data_offsets=[0, 4096]), "cannot be read"),
        (lambda header: header["w"].update(data_offsets=[64, 128]), "cannot be read"),
        (lambda header: header["w"].update(shape=[2, 32]), "cannot be read"),
        (lambda header: header.update(v=header.pop("w")), "cannot be read.*w"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, change: object, message: str) -> None:
    weights = {"w": torch.randn(16)}
    size = write_weights(tmp_path / "w", "key", weights, specs_of(weights))
    raw = (tmp_path / "w").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)  # type: ignore[operator]
    text = json.dumps(header).encode().ljust(length)
    (tmp_path / "w").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(PlanError, match=message):
        map_weights(tmp_path / "w", "key", size + len(text) - length, specs_of(weights))


def test_a_weight_larger_than_its_entry_is_refused(tmp_path: Path) -> None:
    weights = {"w": torch.randn(16)}
    size = write_weights(tmp_path / "w", "key", weights, specs_of(weights))
    with pytest.raises(PlanError, match="'w' does not fit the 64 bytes"):
        map_weights(tmp_path / "w", "key", size, [TensorSpec("w", (17,), (1,), "float32")])
