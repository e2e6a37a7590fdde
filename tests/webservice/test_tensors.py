"""Tensors of the protocol: what is read equals what was written, and every fault of a request is told."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosplit.errors import UsageError
from autosplit.tracing.tensorspec import TensorSpec, spec_of
from autosplit.webservice.tensors import DATATYPES, metadata, read_request, unserved, write_answer

X, IDS = TensorSpec("x", (2, 3), (3, 1), "float32"), TensorSpec("ids", (2,), (1,), "int64")
GOOD: dict[str, Any] = {
    "id": "7",
    "inputs": [
        {"name": "ids", "datatype": "INT64", "shape": [2], "data": [5, -(2**62)]},
        {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [[1, 2.5, 3], [4, 5, 6]]},
    ],
}


def read(content: Any, binary: bytes = b"", json_bytes: int | None = None) -> Any:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return read_request(
        memoryview(bytearray(text + binary)), len(text) if binary and json_bytes is None else json_bytes, [X, IDS], [X]
    )


def changed(number: int, **fields: Any) -> dict[str, Any]:
    rows = [{**row, **fields} if at == number else row for at, row in enumerate(GOOD["inputs"])]
    return {**GOOD, "inputs": rows}


def test_tensors_come_in_the_order_of_the_model() -> None:
    found = read(GOOD)
    assert found.id == "7" and found.outputs == {"x": False}
    assert torch.equal(found.tensors[0], torch.tensor([[1, 2.5, 3], [4, 5, 6]]))
    assert torch.equal(found.tensors[1], torch.tensor([5, -(2**62)]))


@given(
    st.sampled_from(sorted(DATATYPES)),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
    st.booleans(),
)
def test_what_is_read_equals_what_was_written(dtype: str, shape: list[int], odd: int, binary: bool) -> None:
    kind = getattr(torch, dtype)
    value = torch.full(shape, 1 + odd).to(kind)
    specs = [spec_of("first", torch.zeros(odd, dtype=torch.uint8)), spec_of("value", value)]
    tensors = [torch.arange(odd, dtype=torch.uint8), value]
    wanted = {"first": True, "value": binary or dtype in ("float16", "bfloat16")}
    body, json_bytes = write_answer({}, specs, tensors, wanted)
    sent = json.loads(body[:json_bytes])
    again = json.dumps({"inputs": sent["outputs"]}).encode()
    found = read_request(memoryview(bytearray(again + body[json_bytes:])), len(again), specs, specs)
    assert [torch.equal(one, other) for one, other in zip(found.tensors, tensors, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"inputs":', "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b"", "the body is empty"),
        (b"[" * 100_000, "depth limit exceeded"),
        (b"[" * 2_000_001, "more than 2000000 lists and objects"),
        ([], "must hold 'inputs'"),
        ({"inputs": [{"datatype": "FP32"}]}, "each have a 'name'"),
        (changed(0, name="y"), "there is no input 'y'; the inputs are: x, ids"),
        (changed(0, name="x"), "input 'x' is given twice"),
        ({"inputs": GOOD["inputs"][:1]}, "input 'x' is missing"),
        (changed(0, datatype="INT32"), "has datatype 'INT32', and the model takes INT64"),
        (changed(0, shape=[-1]), "has shape [-1], and the model takes [2]"),
        (changed(0, shape="2"), "has shape '2'"),
        (changed(0, data=[1]), "has 1 values, and its shape [2] has 2"),
        (changed(0, data=[1, [2]]), "holds [2], which is not of type INT64"),
        (changed(0, data=[1, 2.0]), "holds 2.0, which is not of type INT64"),
        (changed(0, data=[1, True]), "holds True, which is not of type INT64"),
        (changed(0, data=[1, 2**63]), "holds a number that does not fit INT64"),
        (changed(1, data=[1e99] * 6), "holds a number that does not fit FP32"),  # it became infinity, with a warning of numpy
        (changed(0, data="AAAA"), "has neither a list 'data' nor a parameter 'binary_data_size'"),
        (changed(1, data=[[1, 2, 3], [4, 5]]), "has 5 values, and its shape [2, 3] has 6"),
        (changed(0, parameters={"binary_data_size": 16}), "has both 'data' and binary data"),
        (changed(0, parameters={"binary_data_size": 15}), "has 15 bytes of binary data, and 16 are needed"),
        (changed(0, parameters={"binary_data_size": -16}), "has -16 bytes of binary data, and 16 are needed"),
        ({**GOOD, "id": 7}, "the request's id is 7"),
        ({**GOOD, "outputs": [{"name": "z"}]}, "there is no output 'z'"),
    ],
)
def test_every_fault_is_told(content: Any, said: str) -> None:
    with pytest.raises(UsageError) as failure:
        read(content)
    assert said in str(failure.value)


def test_all_faults_at_once() -> None:
    with pytest.raises(UsageError, match="4 faults"):
        read({"inputs": [{"name": "ids", "datatype": "FP16", "shape": [3]}]})


@pytest.mark.parametrize("num_bytes", [0, 15, 17])
def test_binary_data_shorter_or_longer_than_announced(num_bytes: int) -> None:
    row = {key: value for key, value in GOOD["inputs"][0].items() if key != "data"}
    content = {"inputs": [{**row, "parameters": {"binary_data_size": 16}}, GOOD["inputs"][1]]}
    text = json.dumps(content).encode()
    assert torch.equal(read(text, bytes(16)).tensors[1], torch.zeros(2, dtype=torch.int64))
    with pytest.raises(UsageError, match=f"announce 16 bytes of binary data, and {num_bytes} follow"):
        read(text, bytes(num_bytes), len(text))


@pytest.mark.parametrize("json_bytes", [0, 10**9])
def test_a_wrong_length_of_the_json(json_bytes: int) -> None:
    with pytest.raises(UsageError, match=f"says {json_bytes} bytes of JSON"):
        read(GOOD, json_bytes=json_bytes)


def test_json_holds_no_nan() -> None:
    answer = [torch.tensor([[1.0, float("nan"), 2], [0, 0, 0]])]
    with pytest.raises(UsageError, match="output 'x' holds NaN or infinity"):
        write_answer({}, [X], answer, {"x": False})
    body, json_bytes = write_answer({}, [X], answer, {"x": True})
    assert json_bytes is not None and body[json_bytes:] == answer[0].numpy().tobytes()


def test_metadata_and_dtypes_that_the_protocol_lacks() -> None:
    assert metadata([X]) == [{"name": "x", "datatype": "FP32", "shape": [2, 3]}]
    assert unserved([X, TensorSpec("z", (1,), (1,), "complex64")]) == ["'z' has dtype complex64, which the protocol lacks"]
