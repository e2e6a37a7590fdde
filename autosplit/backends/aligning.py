"""Every tensor of an ONNX file's data on a 64-byte boundary, and shapes inside the file itself.

ONNX Runtime appends the weights it packed to the data file as they come. Its matrix kernels read packed weights with
aligned loads, so after a tensor of an odd size a session on that file ends the process with a segmentation fault (seen
with Swin in 1.31). Written down anew with gaps, the file may be mapped. One that has no such tensor is left as it is.
ONNX Runtime also puts shapes into the data file, if they are long, and then does not read them there (Mamba's split into
128 parts in 1.31).
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from autosplit.tensorspec import ALIGNMENT

PREPACKED = "prepacked_"


def align(path: Path) -> None:
    """Move the data of ``path`` (in ``path`` + '.data') to aligned offsets, packed weights included, or into the file.

    Packed weights are entries 'prepacked_N' of a tensor: ``key|offset;length;checksum``, with one part after '|' a buffer.
    Raises: ValueError: an entry has another form.
    """
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    outside = [tensor for tensor in _tensors(model.graph) if tensor.external_data]
    shapes = [tensor for tensor in outside if tensor.data_type == onnx.TensorProto.INT64 and len(tensor.dims) == 1]
    for tensor in shapes:
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
        tensor.ClearField("external_data")
        tensor.data_location = onnx.TensorProto.DEFAULT
    tensors = [tensor for tensor in outside if tensor.external_data]
    if not shapes and all(offset % ALIGNMENT == 0 for tensor in tensors for offset in _offsets(tensor)):
        return
    source = path.with_name(f"{path.name}.data")
    draft = source.with_suffix(".aligned")
    with source.open("rb") as old, mmap.mmap(old.fileno(), 0, access=mmap.ACCESS_READ) as data, draft.open("wb") as new:
        for tensor in tensors:
            _move(tensor, data, new)
    draft.replace(source)
    path.write_bytes(model.SerializeToString())


def _tensors(graph: Any) -> Iterator[Any]:
    """All tensors of a graph and of the graphs inside its nodes."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from _tensors(attribute.g)


def _offsets(tensor: Any) -> Iterator[int]:
    """Where the data of a tensor begins, and each of its packed buffers."""
    for entry in tensor.external_data:
        if entry.key == "offset":
            yield int(entry.value)
        elif entry.key.startswith(PREPACKED):
            yield from (int(buffer.split(";")[0]) for buffer in entry.value.split("|")[1:])


def _move(tensor: Any, data: mmap.mmap, new: BinaryIO) -> None:
    """Copy what one tensor refers to, and refer to the copy."""
    fields = {entry.key: entry for entry in tensor.external_data}
    length = int(fields["length"].value)
    offset = int(fields["offset"].value) if "offset" in fields else 0
    moved = _append(new, data, offset, length)
    if "offset" in fields:
        fields["offset"].value = str(moved)
    elif moved:
        tensor.external_data.add(key="offset", value=str(moved))
    for key, entry in fields.items():
        if key.startswith(PREPACKED):
            name, *buffers = entry.value.split("|")
            entry.value = "|".join([name, *(_move_buffer(buffer, data, new) for buffer in buffers)])


def _move_buffer(buffer: str, data: mmap.mmap, new: BinaryIO) -> str:
    offset, length, *rest = buffer.split(";")
    return ";".join([str(_append(new, data, int(offset), int(length))), length, *rest])


def _append(new: BinaryIO, data: mmap.mmap, offset: int, length: int) -> int:
    """Write ``data[offset : offset + length]`` at the next boundary; returns where."""
    start = -(-new.tell() // ALIGNMENT) * ALIGNMENT
    new.write(b"\0" * (start - new.tell()))
    with memoryview(data) as view, view[offset : offset + length] as part:
        new.write(part)
    return start
