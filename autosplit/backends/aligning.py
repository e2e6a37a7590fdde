"""Repair the data file that ONNX Runtime writes beside an optimised graph (seen in 1.31).

ONNX Runtime appends packed weights without padding, but its matrix kernels read them with aligned loads: after a tensor of an odd
size a session ends the process with a segmentation fault (Swin). So tensors off a 64-byte boundary are copied to the end of
the file. The others stay, because rewriting the whole file took two of the seven seconds of a ViT.

It also writes long shapes to the data file and then fails to read them there (Mamba's split into 128 parts). They move to the
graph.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from autosplit.memory.lives import ALIGNMENT, aligned

PREPACKED = "prepacked_"


def align(path: Path) -> None:
    """Align the tensors of ``path`` in ``path`` + '.data', and move shapes to ``path`` itself.

    Packed weights are entries 'prepacked_N' of a tensor: ``key|offset;length;checksum``, with one part after '|' for each buffer.
    Raises: ValueError: an entry has another form.
    """
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    outside = [tensor for tensor in tensors_of(model.graph) if tensor.external_data]
    shapes = [tensor for tensor in outside if tensor.data_type == onnx.TensorProto.INT64 and len(tensor.dims) == 1]
    for tensor in shapes:
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
        tensor.ClearField("external_data")
        tensor.data_location = onnx.TensorProto.DEFAULT
    tensors = [tensor for tensor in outside if tensor.external_data]
    if not shapes and all(offset % ALIGNMENT == 0 for tensor in tensors for offset in _offsets(tensor)):
        return
    with path.with_name(f"{path.name}.data").open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        file.seek(0, os.SEEK_END)
        for tensor in tensors:
            _move(tensor, data, file)
    path.write_bytes(model.SerializeToString())


def tensors_of(graph: Any) -> Iterator[Any]:
    """The tensors of a graph and of the graphs inside its nodes."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from tensors_of(attribute.g)


def _offsets(tensor: Any) -> Iterator[int]:
    """The offsets of a tensor's data and of its packed buffers."""
    for entry in tensor.external_data:
        if entry.key == "offset":
            yield int(entry.value)
        elif entry.key.startswith(PREPACKED):
            yield from (int(buffer.split(";")[0]) for buffer in entry.value.split("|")[1:])


def _move(tensor: Any, data: mmap.mmap, file: BinaryIO) -> None:
    """Copy the data of one tensor that is not aligned, and let the tensor refer to the copy."""
    fields = {entry.key: entry for entry in tensor.external_data}
    if "offset" in fields:
        fields["offset"].value = str(_moved(data, file, int(fields["offset"].value), int(fields["length"].value)))
    for key, entry in fields.items():
        if key.startswith(PREPACKED):
            name, *buffers = entry.value.split("|")
            entry.value = "|".join([name, *(_moved_buffer(buffer, data, file) for buffer in buffers)])


def _moved_buffer(buffer: str, data: mmap.mmap, file: BinaryIO) -> str:
    offset, length, *rest = buffer.split(";")
    return ";".join([str(_moved(data, file, int(offset), int(length))), length, *rest])


def _moved(data: mmap.mmap, file: BinaryIO, offset: int, length: int) -> int:
    """Append ``data[offset : offset + length]`` to the file unless it is aligned; return its offset."""
    if offset % ALIGNMENT == 0:
        return offset
    start = aligned(file.tell())
    file.write(b"\0" * (start - file.tell()))
    with memoryview(data) as view, view[offset : offset + length] as part:
        file.write(part)
    return start
