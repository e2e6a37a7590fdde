"""Let variants of a stage share weights that ONNX Runtime has packed: equal tensors are in one file, which workers map once.

ONNX Runtime writes each optimised graph with a data file of its own. Those of two variants differ in the tensors that it folded
from constants of one size, such as a part of the position embeddings. All others are equal, byte for byte.
"""

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autosplit.backends.aligning import Blob, blobs, outside, set_offsets
from autosplit.memory.lives import aligned

KEY_BYTES = 64
"""First bytes by which tensors are told apart before they are compared."""

SHARED = "shared.data"
"""End of the name of a hard link, beside a graph, to a data file of the first variant."""


class _Known(NamedTuple):
    """Bytes of a tensor of the first variant: the file, which is mapped as ``data``, and the place there."""

    source: Path
    data: mmap.mmap
    blob: Blob


def share(paths: Iterable[Path], firsts: Iterable[Path]) -> None:
    """Let tensors of the graphs ``paths`` refer to equal ones of the graphs ``firsts``, and keep the others in their data files.

    A graph without large tensors has no such file, and nothing to share. All are graphs that ``align`` has seen, on one disk,
    each with its tensors in a file of its name and '.data'. Tensors of one length are compared byte by byte, which takes a tenth
    of the time of a hash; those whose first bytes differ are not read.
    Raises: ValueError: an entry of a tensor has another form.
    """
    import onnx

    with ExitStack() as opened:
        known: dict[tuple[int, bytes], list[_Known]] = {}
        for first in filter(_has_data, firsts):
            file = opened.enter_context(_data_of(first).open("rb"))
            data = opened.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            for tensor in outside(onnx.load(str(first), load_external_data=False)):
                for blob in blobs(tensor).values():
                    known.setdefault(_key(data, blob), []).append(_Known(_data_of(first), data, blob))
        for path in filter(_has_data, paths):
            _refer(path, known)


def _refer(path: Path, known: Mapping[tuple[int, bytes], Sequence[_Known]]) -> None:
    """Let tensors of one graph refer to known ones."""
    import onnx

    own, model, links = _data_of(path), onnx.load(str(path), load_external_data=False), dict[Path, str]()
    draft = own.with_name(f".{own.name}")
    with own.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, draft.open("wb") as kept:
        for tensor in outside(model):
            own_blobs = blobs(tensor)
            equal = {key: _equal(data, blob, known.get(_key(data, blob), ())) for key, blob in own_blobs.items()}
            found = {key: one for key, one in equal.items() if one is not None}
            if len(found) == len(own_blobs) and len(sources := {one.source for one in found.values()}) == 1:
                [source] = sources
                link = links.setdefault(source, f"{len(links)}.{SHARED}")
                set_offsets(tensor, {key: one.blob[0] for key, one in found.items()}, link)
                continue
            offsets = {}
            for key, (offset, length) in own_blobs.items():
                offsets[key] = kept.seek(aligned(kept.tell()))
                kept.write(data[offset : offset + length])
            set_offsets(tensor, offsets, own.name)
    for source, link in links.items():
        os.link(source, path.with_name(link))
    draft.replace(own)
    path.write_bytes(model.SerializeToString())


def _data_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _has_data(path: Path) -> bool:
    return _data_of(path).exists()


def _key(data: mmap.mmap, blob: Blob) -> tuple[int, bytes]:
    """Length and first bytes."""
    offset, length = blob
    return length, data[offset : offset + min(length, KEY_BYTES)]


def _equal(data: mmap.mmap, blob: Blob, known: Sequence[_Known]) -> _Known | None:
    """The first of these that holds the same bytes."""
    return next((one for one in known if np.array_equal(_array(data, blob), _array(one.data, one.blob))), None)


def _array(data: mmap.mmap, blob: Blob) -> "np.ndarray[Any, Any]":
    offset, length = blob
    kind = np.dtype(np.uint8 if length % 8 else np.uint64)
    return np.frombuffer(data, kind, length // kind.itemsize, offset)
