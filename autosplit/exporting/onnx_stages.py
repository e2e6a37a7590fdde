"""Read the ONNX stages of another tool back as a split: the weights in each file say which ops it holds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from autosplit.errors import UsageError, raise_faults
from autosplit.planning.givensplits import GivenSplit, split_from_labels
from autosplit.planning.moduleunits import Unit, path_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.programs import weight
from autosplit.values.machine import Machine

MIN_ELEMENTS = 2
"""Smaller weights are not looked for: many have one content."""


def onnx_files(text: str) -> list[Path]:
    """The ONNX files that a text names: a folder with stages in the order of their names, or files with commas between."""
    if Path(text).is_dir():
        files = Path(text).rglob("*.onnx")
        return sorted(files, key=lambda path: (len(str(path)), str(path)))  # stage10 comes after stage9
    return [Path(part.strip()) for part in text.split(",")] if text.endswith(".onnx") else []


def from_onnx_stages(files: Sequence[Path], traced: Traced, machine: Machine) -> GivenSplit:
    """The split that ONNX files make; stage n is on device n.

    A weight is known by its name, or by its content where the tool gave it another one or turned it. An op goes to the file
    with its weights, and an op without weights to the latest file that its inputs come from.

    Raises: UsageError: a file cannot be read, holds no weight of the model, or the files are more than the devices.
    """
    import onnx

    graph, faults = traced.graph, list[str]()
    known: dict[str, int] = {}
    contents = _contents(traced)
    for number, path in enumerate(files):
        try:
            model = onnx.load(path)
        except Exception as failure:  # protobuf raises classes of its own
            faults.append(f"'{path}' cannot be read as ONNX: {str(failure)[:200]}")
            continue
        found: set[str] = set()
        for tensor in model.graph.initializer:
            named = [name for name in graph.weights if tensor.name == name or tensor.name.endswith(f".{name}")]
            found |= set(named[:1]) or contents.get(_key(torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())), set())
        if not found:
            faults.append(f"'{path}' holds no weight of '{graph.name}'")
        for name in found:
            known.setdefault(name, number)
    if len(files) > len(machine.devices):
        faults.append(f"there are {len(files)} files and {len(machine.devices)} devices; name more with --devices")
    raise_faults(UsageError, f"these ONNX stages do not fit '{graph.name}'", faults)
    label: dict[str, int] = {}
    for op in graph.ops:
        own = [known[name] for name in op.weights if name in known]
        sources = [label[graph.producer[value]] for value in op.inputs if value in graph.producer]
        label[op.name] = max([*own, *sources], default=0)
    units = tuple(Unit((path_of(op),), (op.name,)) for op in graph.ops)
    return split_from_labels(f"{len(files)} ONNX stages", graph, machine, label, units, in_order=True)


def _contents(traced: Traced) -> Mapping[tuple[object, ...], set[str]]:
    """The content of each weight, as it is and turned, to the names of the weights that have it."""
    found: dict[tuple[object, ...], set[str]] = {}
    for name in traced.graph.weights:
        tensor = weight(traced.program, name).detach()
        for form in (tensor, tensor.t()) if tensor.dim() == 2 else (tensor,):
            if tensor.numel() >= MIN_ELEMENTS:
                found.setdefault(_key(form), set()).add(name)
    return found


def _key(tensor: torch.Tensor) -> tuple[object, ...]:
    """A tensor's shape and digest; equal tensors have the same key."""
    values = tensor.to(torch.float64).flatten()
    places = torch.arange(1, values.numel() + 1, dtype=torch.float64)
    return tuple(tensor.shape), float(values.sum()), float((values * places).sum())
