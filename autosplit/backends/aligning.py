"""Repair the data file that ONNX Runtime writes beside an optimised graph (seen in 1.31).

ONNX Runtime appends packed weights without padding, but its matrix kernels read them with aligned loads: after a tensor of an odd
size a session ends the process with a segmentation fault (Swin). So tensors off a 64-byte boundary are copied to the end of
the file. The others stay, because rewriting the whole file took two of the seven seconds of a ViT.

It also writes long shapes to the data file and then fails to read them there (Mamba's split into 128 parts). They move to the
graph.
"""

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from autosplit.memory.lives import ALIGNMENT, aligned

PREPACKED = "prepacked_"

Blob = tuple[int, int]
"""Offset and length of bytes in a data file."""


def align(path: Path) -> None:
    """Align the tensors of ``path`` in ``path`` + '.data', and move shapes to ``path`` itself.

    Packed weights are entries 'prepacked_N' of a tensor: ``key|offset;length;checksum``, with one part after '|' for each buffer.
    Raises: ValueError: an entry has another form.
    """
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    tensors = outside(model)
    shapes = [tensor for tensor in tensors if tensor.data_type == onnx.TensorProto.INT64 and len(tensor.dims) == 1]
    for tensor in shapes:
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
        tensor.ClearField("external_data")
        tensor.data_location = onnx.TensorProto.DEFAULT
    tensors = outside(model)
    if not shapes and all(offset % ALIGNMENT == 0 for tensor in tensors for offset, _ in blobs(tensor).values()):
        return
    beside = path.with_name(f"{path.name}.data")
    with beside.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        file.seek(0, os.SEEK_END)
        for tensor in tensors:
            set_offsets(tensor, {key: _moved(data, file, *blob) for key, blob in blobs(tensor).items()}, beside.name)
    path.write_bytes(model.SerializeToString())


def outside(model: Any) -> list[Any]:
    """The tensors of a model whose data are not in the graph itself."""
    return [tensor for tensor in _tensors_of(model.graph) if tensor.external_data]


def _tensors_of(graph: Any) -> Iterator[Any]:
    """The tensors of a graph and of the graphs inside its nodes."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from _tensors_of(attribute.g)


def blobs(tensor: Any) -> dict[str, Blob]:
    """The data of a tensor outside of the graph and its packed buffers, by the key of their entry and their place in it."""
    fields = {entry.key: entry.value for entry in tensor.external_data}
    found = {"offset": (int(fields["offset"]), int(fields["length"]))} if "offset" in fields else {}
    for key, value in fields.items():
        if key.startswith(PREPACKED):
            for place, buffer in enumerate(value.split("|")[1:]):
                offset, length, *_ = buffer.split(";")
                found[f"{key}|{place}"] = int(offset), int(length)
    return found


def set_offsets(tensor: Any, offsets: Mapping[str, int], location: str) -> None:
    """Let the ``blobs`` of a tensor be at these offsets of the file ``location``."""
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = location
        elif entry.key == "offset":
            entry.value = str(offsets["offset"])
        elif entry.key.startswith(PREPACKED):
            name, *buffers = entry.value.split("|")
            moved = [
                ";".join([str(offsets[f"{entry.key}|{place}"]), *buffer.split(";")[1:]]) for place, buffer in enumerate(buffers)
            ]
            entry.value = "|".join([name, *moved])


def _moved(data: mmap.mmap, file: BinaryIO, offset: int, length: int) -> int:
    """Append ``data[offset : offset + length]`` to the file unless it is aligned; return its offset."""
    if offset % ALIGNMENT == 0:
        return offset
    start = aligned(file.tell())
    file.write(b"\0" * (start - file.tell()))
    with memoryview(data) as view, view[offset : offset + length] as part:
        file.write(part)
    return start
