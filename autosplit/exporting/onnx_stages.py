"""Read the ONNX stages of another tool back as a split: the weights in each file say which ops it holds."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autosplit.errors import UsageError, one_line, raise_faults
from autosplit.planning.givensplits import GivenSplit, split_from_labels
from autosplit.planning.moduleunits import Unit, path_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.programs import weight
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine

MIN_ELEMENTS = 2
"""Smaller weights are not known by their content: many have the same."""

Key = tuple[tuple[int, ...], bytes]
"""Shape and digest of a tensor; equal tensors have equal keys, whatever their dtype."""


@dataclass(frozen=True, slots=True)
class Initializer:
    """A tensor in a file: its name there, its key, and the weights of the model that have this name and this content."""

    name: str
    key: Key
    by_name: frozenset[str]
    by_content: frozenset[str]


def onnx_files(text: str) -> list[Path]:
    """The ONNX files that a text names: a folder with stages in the order of their names, or files with commas between."""
    if Path(text).is_dir():
        files = Path(text).rglob("*.onnx")
        return sorted(files, key=lambda path: (len(str(path)), str(path)))  # stage10 comes after stage9
    return [Path(part.strip()) for part in text.split(",")] if text.endswith(".onnx") else []


def from_onnx_stages(files: Sequence[Path], traced: Traced, machine: Machine) -> GivenSplit:
    """The split that ONNX files make; stage n is on device n.

    A weight is known by its content, also if the tool turned it; its name there chooses between weights of equal content, and
    stands for the content where the model has other numbers. A file in which a name and a content contradict each other, such
    as a half that counts its layers from 0 again, is read by its contents alone. An op goes to the file with its weights, and
    an op without weights to the latest file that its inputs come from.

    Raises: UsageError: a file cannot be read, holds no weight of the model, has weights that contradict another file, the files
        are not in the order of the graph, or are more than the devices.
    """
    graph, faults = traced.graph, list[str]()
    contents = _contents(traced)
    homes: dict[str, dict[int, Key | None]] = {}  # weight to the files that hold it for certain, with the key of other numbers
    perhaps: dict[str, int] = {}
    for number, path in enumerate(files):
        found: set[str] = set()
        read = _read(path, graph, contents, faults)
        for one in read or ():
            known = one.by_content & one.by_name or one.by_content or one.by_name
            found |= known
            for name in known:
                if len(known) == 1:
                    homes.setdefault(name, {})[number] = None if one.by_content else one.key
                perhaps.setdefault(name, number)
        if read is not None and not found:
            faults.append(f"'{path}' holds no weight of '{graph.name}'")
    if len(files) > len(machine.devices):
        faults.append(f"there are {len(files)} files and {len(machine.devices)} devices; name more with --devices")
    for name, there in homes.items():
        if len(set(there.values())) > 1:
            places = " and ".join(f"'{files[number]}'" for number in there)
            faults.append(f"{places} hold different numbers for weight '{name}'; export the stages of one model")
    raise_faults(UsageError, f"these ONNX stages do not fit '{graph.name}'", faults)
    label = _labels(graph, files, {name: set(there) for name, there in homes.items()}, perhaps, faults)
    raise_faults(UsageError, f"these ONNX stages do not fit '{graph.name}'", faults)
    units = tuple(Unit((path_of(op),), (op.name,)) for op in graph.ops)
    return split_from_labels(f"{len(files)} ONNX stages", graph, machine, label, units, in_order=True)


def _labels(
    graph: Graph, files: Sequence[Path], homes: Mapping[str, set[int]], perhaps: Mapping[str, int], faults: list[str]
) -> dict[str, int]:
    """Op name to the number of its file; a sentence for each op that is in no file or would go backwards joins ``faults``.

    Args:
        homes: weight to the files that hold it for certain.
        perhaps: weight to the first file with its content, which other weights have too.
    """
    label: dict[str, int] = {}
    for op in graph.ops:
        latest = max((label[graph.producer[value]] for value in op.inputs if value in graph.producer), default=0)
        held = [homes[name] for name in op.weights if name in homes]
        common = set.intersection(*held) if held else set[int]()
        label[op.name] = min((number for number in common if number >= latest), default=latest)
        if held and not common:
            names = ", ".join(f"'{name}' in '{files[min(homes[name])]}'" for name in op.weights if name in homes)
            faults.append(f"op '{op.name}' has its weights in several files: {names}")
        elif held and max(common) < latest:
            faults.append(
                f"op '{op.name}' has its weights in '{files[max(common)]}', and reads a value from '{files[latest]}', which is "
                "later; name the files in the order of the graph"
            )
        elif not held:
            label[op.name] = max([latest, *(perhaps[name] for name in op.weights if name in perhaps)])
    return label


def _read(path: Path, graph: Graph, contents: Mapping[Key, frozenset[str]], faults: list[str]) -> list[Initializer] | None:
    """The initializers of a file, without names where these contradict the contents.

    None if one cannot be read: a sentence for each such fault joins ``faults``.
    """
    import onnx

    try:
        tensors = list(onnx.load(path).graph.initializer)
    except Exception as failure:  # protobuf raises classes of its own
        faults.append(f"'{path}' cannot be read as ONNX: {one_line(failure)}")
        return None
    found, num_faults = list[Initializer](), len(faults)
    for number, tensor in enumerate(tensors):
        label = f"number {number}"
        try:
            name = str(tensor.name)
            label = f"'{name:.60}'"
            array = onnx.numpy_helper.to_array(tensor)
            key = _key(array)
        except Exception as failure:  # as above, and those of onnx and numpy for bytes, types and texts that do not fit
            faults.append(f"initializer {label} of '{path}' cannot be read: {one_line(failure)}")
            continue
        named = [known for known in graph.weights if name == known or name.endswith(f".{known}")]
        fits = [known for known in named if prod(graph.weights[known].shape) == array.size]
        found.append(Initializer(name, key, frozenset(sorted(fits, key=len)[-1:]), contents.get(key, frozenset())))
    if len(faults) > num_faults:
        return None
    if any(one.by_name and one.by_content and not one.by_name & one.by_content for one in found):
        return [Initializer(one.name, one.key, frozenset(), one.by_content) for one in found]
    return found


def _contents(traced: Traced) -> dict[Key, frozenset[str]]:
    """The key of each weight, as it is and turned, to the names of the weights that have it."""
    found: dict[Key, set[str]] = {}
    for name in traced.graph.weights:
        tensor = weight(traced.program, name).detach()
        for form in (tensor, tensor.t()) if tensor.dim() == 2 else (tensor,):
            if tensor.numel() >= MIN_ELEMENTS:
                found.setdefault(_key(form.to(torch.float64).numpy()), set()).add(name)
    return {key: frozenset(names) for key, names in found.items()}


def _key(array: "np.ndarray[Any, Any]") -> Key:
    """Raises: one of numpy's exceptions: the array does not hold numbers."""
    values = np.ascontiguousarray(array, dtype=np.float64)
    return tuple(array.shape), hashlib.sha256(values.data).digest()
