"""Write weights to a safetensors file, each on a 64-byte boundary, so that any runtime can map them.

A weight is a flat tensor of its extent, gaps included, padded to a multiple of 64 bytes; ``stage.json`` or a bundle's
manifest has its shape and strides. Tied weights have one entry, and the metadata lists their other names and the key. This
module writes the file itself, because safetensors copies each tensor first; safetensors reads it, maps it, and refuses
inconsistent files.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from autosplit.errors import PlanError
from autosplit.memory.lives import ALIGNMENT, aligned
from autosplit.tracing.tensorspec import TensorSpec, extent_bytes, laid_out, spec_of

STAGE, METADATA = "stage", "__metadata__"

_LENGTH_BYTES = 8
"""Size of the number at the start of the file, the length of the header."""

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes; tensors of other dtypes are stored as bytes."""


def write_weights(path: Path, key: str, weights: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec]) -> int:
    """Write the file and return its size in bytes.

    Args:
        key: the key of the stage or bundle that has these weights.
        specs: the layout of each, with an offset of 0.
    """
    metadata, entries = {STAGE: key}, dict[str, Any]()
    kept: dict[tuple[int, TensorSpec], str] = {}
    end = 0
    for spec in specs:
        name = kept.setdefault((weights[spec.name].data_ptr(), replace(spec, name="")), spec.name)
        if name != spec.name:
            metadata[f".{spec.name}"] = name
            continue
        num_bytes = aligned(extent_bytes(spec))
        code = _CODES.get(spec.torch_dtype, "U8")
        count = num_bytes // (spec.torch_dtype.itemsize if spec.torch_dtype in _CODES else 1)
        entries[spec.name] = {"dtype": code, "shape": [count], "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    header = json.dumps({METADATA: metadata, **entries}).encode()
    header += b" " * (-(len(header) + _LENGTH_BYTES) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
        for spec in specs:
            if spec.name in entries and extent_bytes(spec):
                begin, end = entries[spec.name]["data_offsets"]
                file.write(bytes_of(laid_out(weights[spec.name], spec)))
                file.write(bytes(end - begin - extent_bytes(spec)))
        return file.tell()


def map_weights(
    path: Path, key: str, num_bytes: int, specs: Sequence[TensorSpec], stored: Mapping[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """Map the weights from the file: they are read on first use, and all processes that map the file share them.

    ``key`` and ``num_bytes`` are those of ``write_weights``; ``stored`` has the names in the file, where these differ.
    Raises: PlanError: the file is missing, truncated, of another stage or bundle, or lacks a weight.
    """
    try:
        found_bytes = path.stat().st_size
        if found_bytes != num_bytes:
            raise PlanError(
                f"weights file '{path}' has {found_bytes} bytes, and {num_bytes} are expected: it is truncated. "
                "Save the stage or bundle again."
            )
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get(STAGE) != key:
                raise PlanError(
                    f"weights file '{path}' belongs to another stage or bundle than the files beside it. "
                    "Save the stage or bundle again."
                )
            found = {}
            for spec in specs:
                name = (stored or {}).get(spec.name, spec.name)
                found[spec.name] = _shaped(file.get_tensor(metadata.get(f".{name}", name)), spec)
            return found
    except OSError as failure:
        raise PlanError(
            f"weights file '{path}' cannot be read: {failure.strerror or failure}. Save the stage or bundle again."
        ) from None
    except (SafetensorError, ValueError) as failure:
        raise PlanError(f"weights file '{path}' cannot be read: {failure!s:.200}. Save the stage or bundle again.") from None


def weight_starts(path: Path) -> dict[str, int]:
    """The offset in bytes of each weight in a file of ``write_weights``; empty if there is no file."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
    metadata = header.pop(METADATA)
    starts = {name: _LENGTH_BYTES + length + entry["data_offsets"][0] for name, entry in header.items()}
    return starts | {name[1:]: starts[kept] for name, kept in metadata.items() if name != STAGE}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor, gaps included, without a copy."""
    count = extent_bytes(spec_of("", tensor)) // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,)).view(torch.uint8).numpy().data


def _shaped(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The weight in an entry of the file. Raises: ValueError: the entry is too small or not aligned."""
    if flat.data_ptr() % ALIGNMENT or flat.nbytes < extent_bytes(spec) or flat.nbytes % spec.torch_dtype.itemsize:
        raise ValueError(f"'{spec.name}' does not fit the {flat.nbytes} bytes that it has there")
    return flat.view(spec.torch_dtype).as_strided(spec.shape, spec.stride)
