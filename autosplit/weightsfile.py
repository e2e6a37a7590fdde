"""Weights as bytes in one file, each on a 64-byte boundary, where any runtime may map them.

The file begins with 64 bytes that say what it is and whose weights it holds. Where each weight lies is written elsewhere
(in ``stage.json``), so that a reader needs no parser: a hostile file can at most hold other numbers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autosplit.errors import PlanError
from autosplit.tensorspec import ALIGNMENT, TensorSpec, empty_like_spec, extent_bytes, laid_out

HEADER_BYTES = ALIGNMENT


def places(weights: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec]) -> dict[str, int]:
    """Where in a file each weight begins, in bytes; names of one and the same tensor have one place.

    Args:
        weights: tensors by name.
        specs: their layouts, in the order of the file, none of them past a boundary.
    """
    found: dict[str, int] = {}
    known: dict[tuple[int, TensorSpec], int] = {}
    end = HEADER_BYTES
    for spec in specs:
        same = weights[spec.name].data_ptr(), TensorSpec("", spec.shape, spec.stride, spec.dtype)
        if same not in known:
            known[same] = end
            end += -(-extent_bytes(spec) // ALIGNMENT) * ALIGNMENT
        found[spec.name] = known[same]
    return found


def write_weights(
    path: Path, key: str, weights: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec], starts: Mapping[str, int]
) -> int:
    """Write the file; returns its bytes.

    Args:
        path: the file.
        key: whose weights these are.
        weights: tensors by name.
        specs: how each is to lie.
        starts: its place, from ``places``.
    """
    with path.open("wb", buffering=0) as file:
        file.write(_header(key))
        for spec in specs:
            if starts[spec.name] >= file.tell() and extent_bytes(spec):
                file.seek(starts[spec.name])
                left = _bytes_of(laid_out(weights[spec.name], spec), spec)
                while left:
                    left = left[file.write(left) :]
        end = -(-file.tell() // ALIGNMENT) * ALIGNMENT
        file.truncate(end)
    return end


def map_weights(
    path: Path, key: str, num_bytes: int, specs: Sequence[TensorSpec], starts: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """The weights by name, mapped from the file: read when they are first used, and shared with all who map it.

    Raises: PlanError: the file is missing, truncated, of another stage, or its places do not fit it.
    """
    try:
        found_bytes = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError as failure:
        raise PlanError(f"weights file '{path}' cannot be read: {failure.strerror}. Save the stage again.") from None
    if found_bytes != num_bytes:
        raise PlanError(
            f"weights file '{path}' has {found_bytes} bytes, and {num_bytes} are expected: it is truncated. Save the stage again."
        )
    if header != _header(key):
        raise PlanError(f"weights file '{path}' belongs to another stage than 'stage.json' beside it. Save the stage again.")
    try:
        whole = torch.UntypedStorage.from_file(str(path), False, num_bytes)
        return {spec.name: _mapped(whole, starts[spec.name], spec) for spec in specs}
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as failure:
        raise PlanError(f"weights file '{path}' does not fit its stage: {failure}. Save the stage again.") from None


def _header(key: str) -> bytes:
    return f"autosplit weights {key}\n".encode().ljust(HEADER_BYTES, b"\0")


def _bytes_of(tensor: torch.Tensor, spec: TensorSpec) -> memoryview:
    """What a tensor takes in memory, gaps included."""
    data = torch.empty(0, dtype=torch.uint8)
    data.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (extent_bytes(spec),), (1,))
    return data.numpy().data


def _mapped(whole: Any, start: int, spec: TensorSpec) -> torch.Tensor:
    """One weight in a storage of its own, which is a part of the mapping. Raises: ValueError: it would lie outside."""
    length = extent_bytes(spec)
    if not length:
        return empty_like_spec(spec)
    if start < HEADER_BYTES or start % ALIGNMENT or length < 0 or start + length > whole.nbytes():
        raise ValueError(f"'{spec.name}' of {length} bytes is said to begin at byte {start} of {whole.nbytes()}")
    weight = torch.empty(0, dtype=spec.torch_dtype)
    weight.set_(whole[start : start + length], 0, spec.shape, spec.stride)
    return weight
