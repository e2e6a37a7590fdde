"""Let variants of a stage share weights that ONNX Runtime has packed: equal tensors are in one file, which workers map once.

ONNX Runtime writes each optimised graph with a data file of its own. Those of two variants differ in the tensors that it folded
from constants of one size, such as a part of the position embeddings. All others are equal, byte for byte.
"""

import mmap
import os
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from autosplit.backends.aligning import Blob, blobs, outside, set_offsets
from autosplit.memory.lives import aligned

SHARED = "shared.data"
"""End of the name of a hard link, beside a graph, to a data file of the first variant."""


def share(paths: Iterable[Path], firsts: Iterable[Path]) -> None:
    """Let tensors of the graphs ``paths`` refer to equal ones of the graphs ``firsts``, and keep the others in their data files.

    A graph without large tensors has no such file, and nothing to share. All are graphs that ``align`` has seen, on one disk,
    each with its tensors in a file of its name and '.data'.
    Raises: ValueError: an entry of a tensor has another form.
    """
    import onnx

    known: dict[bytes, tuple[Path, int]] = {}
    for first in filter(_has_data, firsts):
        with _data_of(first).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for tensor in outside(onnx.load(str(first), load_external_data=False)):
                known |= {_digest(data, blob): (_data_of(first), blob[0]) for blob in blobs(tensor).values()}
    for path in filter(_has_data, paths):
        _refer(path, known)


def _refer(path: Path, known: Mapping[bytes, tuple[Path, int]]) -> None:
    """Let tensors of one graph refer to known ones, by their digests to the file and the offset."""
    import onnx

    own, model, links = _data_of(path), onnx.load(str(path), load_external_data=False), dict[Path, str]()
    draft = own.with_name(f".{own.name}")
    with own.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, draft.open("wb") as kept:
        for tensor in outside(model):
            own_blobs = blobs(tensor)
            found = {key: known[digest] for key, blob in own_blobs.items() if (digest := _digest(data, blob)) in known}
            if len(found) == len(own_blobs) and len(sources := {source for source, _ in found.values()}) == 1:
                [source] = sources
                link = links.setdefault(source, f"{len(links)}.{SHARED}")
                set_offsets(tensor, {key: offset for key, (_, offset) in found.items()}, link)
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


def _digest(data: mmap.mmap, blob: Blob) -> bytes:
    offset, length = blob
    with memoryview(data) as view, view[offset : offset + length] as part:
        return sha256(part).digest()
