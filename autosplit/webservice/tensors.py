"""Tensors of the Open Inference Protocol, version 2, to torch tensors and back.

A tensor is a list of numbers in JSON, or bytes after the JSON (the binary tensor data extension): little-endian, row-major.
Names, datatypes, shapes and sizes are compared with the model's before any value is read. A model for requests of several sizes
announces -1 for an axis that may have any size up to that of its spec.
"""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import orjson
import torch

from autosplit.errors import UsageError, raise_faults
from autosplit.parsing import MAX_BRACKETS, shown
from autosplit.tracing.tensorspec import TensorSpec, row_major

JSON_LENGTH = "inference-header-content-length"
"""The HTTP header with the bytes of JSON before the binary data."""

DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
}
"""Dtype of torch to the protocol's datatype."""

MAX_KEPT_BYTES = 4096
"""Longest JSON whose meaning is kept for the next request: no client fills the memory."""

_ONLY_BINARY = ("FP16", "BF16")
"""Datatypes for which the protocol has no JSON form."""

_JSON_KINDS: Mapping[str, tuple[type, ...]] = {"BOOL": (bool,), "FP32": (int, float), "FP64": (int, float)}
"""Datatype to the types of its numbers in JSON; all others take integers."""


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request: its tensors in the order of the model's inputs, and how to answer.

    Attributes:
        id: the caller's own name of the request, '' for none.
        tensors: one for each input.
        outputs: name to whether its answer is binary, in the order of the answer.
    """

    id: str
    tensors: tuple[torch.Tensor, ...]
    outputs: Mapping[str, bool]


def unserved(specs: Iterable[TensorSpec]) -> list[str]:
    """A sentence for each tensor whose dtype the protocol does not have."""
    return [f"'{spec.name}' has dtype {spec.dtype}, which the protocol lacks" for spec in specs if spec.dtype not in DATATYPES]


Free = Mapping[str, Collection[int]]
"""Tensor to the axes that may have any size up to that of its spec."""

FIXED: Free = {}
"""No axis of any tensor."""


def metadata(specs: Sequence[TensorSpec], free: Free = FIXED) -> list[dict[str, Any]]:
    """Name, datatype and shape of each tensor, as the protocol says them: -1 for a free axis."""
    return [{"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": _announced(spec, free)} for spec in specs]


def _announced(spec: TensorSpec, free: Free) -> list[int]:
    return [-1 if axis in free.get(spec.name, ()) else size for axis, size in enumerate(spec.shape)]


def _sized(entry: Mapping[str, Any], spec: TensorSpec, free: Free) -> TensorSpec:
    """The spec with the sizes of an input along its free axes, if these are sizes from 0 to the spec's own."""
    shape = entry.get("shape")
    if not free.get(spec.name) or not isinstance(shape, list) or len(shape) != len(spec.shape):
        return spec
    if not all(type(size) is int and 0 <= size <= most for size, most in zip(shape, spec.shape, strict=True)):
        return spec
    own = [size if axis in free[spec.name] else most for axis, (size, most) in enumerate(zip(shape, spec.shape, strict=True))]
    return TensorSpec(spec.name, tuple(own), row_major(own), spec.dtype)


def read_request(
    body: memoryview,
    json_bytes: int | None,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    free: Free = FIXED,
) -> InferRequest:
    """A request, its tensors as views of ``body`` where they are binary and aligned.

    Args:
        body: JSON, then binary data; may be written to.
        json_bytes: bytes of JSON; None if all is JSON.
        free: axes of the inputs that may have any size up to the spec's.
    Raises: UsageError: the JSON is malformed, or every fault of its tensors.
    """
    if not body:
        raise UsageError("the body is empty; it must be JSON")
    length = len(body) if json_bytes is None else json_bytes
    if not 0 < length <= len(body):
        raise UsageError(f"the header {JSON_LENGTH} says {length} bytes of JSON, and the body has {len(body)}")
    text, num_binary = bytes(body[:length]), len(body) - length
    lay_out = _layout if num_binary and length <= MAX_KEPT_BYTES else _layout.__wrapped__
    name, entries, wanted = lay_out(
        text, num_binary, tuple(inputs), tuple(outputs), tuple((name, tuple(axes)) for name, axes in free.items())
    )
    tensors = {spec.name: _tensor(entry, spec, body, length + start) for entry, spec, start in entries}
    return InferRequest(name, tuple(tensors[spec.name] for spec in inputs), wanted)


@lru_cache(256)
def _layout(
    text: bytes,
    num_binary: int,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    free: tuple[tuple[str, tuple[int, ...]], ...],
) -> tuple[str, list[tuple[dict[str, Any], TensorSpec, int]], Mapping[str, bool]]:
    """The id, the inputs, each with its spec and its first byte of binary data, and the outputs that the JSON of a request names.

    Clients send the same JSON with other binary data, so results are kept.

    Raises: UsageError: as ``read_request``, but for values in JSON.
    """
    try:
        if text.count(b"[") + text.count(b"{") > MAX_BRACKETS:
            raise ValueError(f"it has more than {MAX_BRACKETS} lists and objects")
        content = orjson.loads(text)
    except ValueError as failure:
        raise UsageError(f"the body is not JSON: {failure}") from None
    given = _entries(content, "inputs")
    faults = _name_faults("input", [entry["name"] for entry in given], inputs)
    by_name = {spec.name: spec for spec in inputs}
    entries, end = [], 0
    for entry in given:
        if (spec := by_name.get(entry["name"])) is not None:
            own = _sized(entry, spec, dict(free))
            entries.append((entry, own, end))
            faults += _spec_faults(entry, own, _announced(spec, dict(free)))
            end += _binary_bytes(entry) or 0
    if end != num_binary:
        faults.append(f"the inputs announce {end} bytes of binary data, and {num_binary} follow the JSON")
    raise_faults(UsageError, "the request does not fit the model", faults)
    return _id(content), entries, _wanted(content, outputs)


def write_answer(
    answer: Mapping[str, Any], outputs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], wanted: Mapping[str, bool]
) -> tuple[bytes, int | None]:
    """The body of an answer, and its bytes of JSON if binary data follows.

    Args:
        answer: the other fields: model, version, id.
        wanted: as ``InferRequest.outputs``.
    Raises: UsageError: JSON cannot hold a value, such as NaN.
    """
    by_name = {spec.name: (spec, tensor) for spec, tensor in zip(outputs, tensors, strict=True)}
    rows, binary = list[dict[str, Any]](), list[memoryview]()
    for name, is_binary in wanted.items():
        spec, tensor = by_name[name]
        row: dict[str, Any] = {"name": name, "datatype": DATATYPES[spec.dtype], "shape": list(tensor.shape)}
        if is_binary:
            binary.append(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            row["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise UsageError(f"output '{name}' holds NaN or infinity, which JSON lacks; ask for it with binary_data: true")
            row["data"] = tensor.flatten().numpy()
        rows.append(row)
    text = orjson.dumps({**answer, "outputs": rows}, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join([text, *binary]), len(text)) if binary else (text, None)


def _entries(content: Any, key: str) -> list[dict[str, Any]]:
    """The list of named objects under a key. Raises: UsageError: it is none."""
    rows = content.get(key) if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and isinstance(row.get("name"), str) for row in rows):
        raise UsageError(f"the JSON must hold '{key}', a list of objects that each have a 'name'")
    return rows


def _name_faults(kind: str, names: Sequence[str], specs: Sequence[TensorSpec]) -> list[str]:
    known = [spec.name for spec in specs]
    faults = [f"there is no {kind} {shown(name)}; the {kind}s are: {', '.join(known)}" for name in names if name not in known]
    faults += [f"{kind} {shown(name)} is given twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    return faults + [f"{kind} '{name}' is missing" for name in known if kind == "input" and name not in names]


def _parameters(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    found = entry.get("parameters")
    return found if isinstance(found, dict) else {}


def _binary_bytes(entry: Mapping[str, Any]) -> int | None:
    """Bytes of binary data of an input, as announced; None for an input in JSON."""
    found = _parameters(entry).get("binary_data_size")
    return found if type(found) is int and found >= 0 else None


def _spec_faults(entry: Mapping[str, Any], spec: TensorSpec, announced: Sequence[int]) -> list[str]:
    """Why an input is not of the spec, of which ``announced`` is told; its values are not looked at, but for their number."""
    name, datatype = spec.name, DATATYPES[spec.dtype]
    faults = []
    if entry.get("datatype") != datatype:
        faults.append(f"input '{name}' has datatype {shown(entry.get('datatype'))}, and the model takes {datatype}")
    if entry.get("shape") != list(spec.shape):
        limit = f", at most {list(spec.shape)}" if -1 in announced else ""
        faults.append(f"input '{name}' has shape {shown(entry.get('shape'))}, and the model takes {list(announced)}{limit}")
    if "binary_data_size" in _parameters(entry):
        size = _binary_bytes(entry)
        if size != spec.num_bytes:
            given = shown(_parameters(entry)["binary_data_size"])
            faults.append(f"input '{name}' has {given} bytes of binary data, and {spec.num_bytes} are needed")
        if "data" in entry:
            faults.append(f"input '{name}' has both 'data' and binary data")
    elif datatype in _ONLY_BINARY:
        way_out = f"send its {spec.num_bytes} bytes after the JSON, and this number as its parameter 'binary_data_size'"
        faults.append(f"input '{name}' has datatype {datatype}, which the protocol passes as binary data only: {way_out}")
    elif not isinstance(entry.get("data"), list):
        faults.append(f"input '{name}' has neither a list 'data' nor a parameter 'binary_data_size'")
    return faults


def _tensor(entry: Mapping[str, Any], spec: TensorSpec, body: memoryview, start: int) -> torch.Tensor:
    """The tensor of an input that has no fault. Raises: UsageError: its values in JSON are not of its datatype or number."""
    if "data" not in entry:
        if not spec.num_bytes:
            return torch.empty(spec.shape, dtype=spec.torch_dtype)
        tensor = torch.frombuffer(body, dtype=spec.torch_dtype, count=prod(spec.shape), offset=start).view(spec.shape)
        return tensor if tensor.data_ptr() % tensor.itemsize == 0 else tensor.clone()
    values, count = _flat(entry["data"], len(spec.shape)), prod(spec.shape)
    kinds = _JSON_KINDS.get(DATATYPES[spec.dtype], (int,))
    if len(values) != count:
        raise UsageError(f"input '{spec.name}' has {len(values)} values, and its shape {list(spec.shape)} has {count}")
    if not set(map(type, values)) <= set(kinds):
        strange = next(value for value in values if type(value) not in kinds)
        raise UsageError(f"input '{spec.name}' holds {shown(strange)}, which is not of type {DATATYPES[spec.dtype]}")
    try:
        with np.errstate(over="raise"):
            return torch.from_numpy(np.array(values, dtype=spec.dtype)).view(spec.shape)
    except (ArithmeticError, TypeError, ValueError) as failure:
        raise UsageError(f"input '{spec.name}' holds a number that does not fit {DATATYPES[spec.dtype]}: {failure}") from None


def _flat(values: list[Any], depth: int) -> list[Any]:
    """The values of nested or flat lists, at most ``depth`` deep, in row-major order."""
    for _ in range(depth - 1):
        if not (values and isinstance(values[0], list)):
            break
        values = [one for row in values for one in (row if isinstance(row, list) else [row])]
    return values


def _id(content: Mapping[str, Any]) -> str:
    found = content.get("id", "")
    if not isinstance(found, str) or len(found) > 1000:
        raise UsageError(f"the request's id is {shown(found)}; it must be a text of at most 1000 characters")
    return found


def _wanted(content: Mapping[str, Any], specs: Sequence[TensorSpec]) -> dict[str, bool]:
    """Name of each output to whether it is asked for as binary data."""
    binary = _parameters(content).get("binary_data_output") is True
    if not content.get("outputs"):
        rows: list[dict[str, Any]] = [{"name": spec.name} for spec in specs]
    else:
        rows = _entries(content, "outputs")
        raise_faults(
            UsageError, "the request does not fit the model", _name_faults("output", [row["name"] for row in rows], specs)
        )
    wanted = {row["name"]: _parameters(row).get("binary_data", binary) is True for row in rows}
    dtypes = {spec.name: DATATYPES[spec.dtype] for spec in specs}
    return {name: is_binary or dtypes[name] in _ONLY_BINARY for name, is_binary in wanted.items()}


assert sys.byteorder == "little", "the protocol's binary data is little-endian"
