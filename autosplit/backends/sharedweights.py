"""Let variants of a stage share weights that ONNX Runtime has packed: equal tensors are in one file, which workers map once.

ONNX Runtime writes each optimised graph with a data file of its own. Those of two variants differ in the tensors that it folded
from constants of one size, such as a part of the position embeddings. All others are equal, byte for byte.
"""

import mmap
import os
from hashlib import sha256
from pathlib import Path

from autosplit.backends.aligning import Blob, blobs, outside, set_offsets
from autosplit.memory.lives import aligned

SHARED = "shared.data"
"""Name of the hard link to the data file of the first variant, beside the graph of another one."""


def share(path: Path, first: Path) -> None:
    """Let tensors of the graph ``path`` refer to equal ones of the graph ``first``, and keep the others in its own data file.

    A graph without large tensors has no such file, and nothing to share. Both are graphs that ``align`` has seen, on
    one disk, each with its tensors in a file of its name and '.data'.
    Raises: ValueError: an entry of a tensor has another form.
    """
    import onnx

    own, others = _data_of(path), _data_of(first)
    if not (own.exists() and others.exists()):
        return
    model = onnx.load(str(path), load_external_data=False)
    known: dict[bytes, int] = {}
    with others.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for tensor in outside(onnx.load(str(first), load_external_data=False)):
            known |= {_digest(data, blob): blob[0] for blob in blobs(tensor).values()}
    draft = own.with_name(f".{own.name}")
    with own.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, draft.open("wb") as kept:
        for tensor in outside(model):
            own_blobs = blobs(tensor)
            found = {key: known.get(_digest(data, blob)) for key, blob in own_blobs.items()}
            if None not in found.values():
                set_offsets(tensor, {key: offset for key, offset in found.items() if offset is not None}, SHARED)
                continue
            offsets = {}
            for key, (offset, length) in own_blobs.items():
                offsets[key] = kept.seek(aligned(kept.tell()))
                kept.write(data[offset : offset + length])
            set_offsets(tensor, offsets, own.name)
    os.link(others, path.with_name(SHARED))
    draft.replace(own)
    path.write_bytes(model.SerializeToString())


def _data_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _digest(data: mmap.mmap, blob: Blob) -> bytes:
    offset, length = blob
    with memoryview(data) as view, view[offset : offset + length] as part:
        return sha256(part).digest()
