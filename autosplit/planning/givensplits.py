"""Read a split that another tool made: accelerate's device map, vLLM's partition, torch's split_spec, a list of op names.

A split has the ops of each stage and the tool's rules: which ops it keeps together, and whether its stages follow each other in
the order of the graph.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from autosplit.errors import UsageError, close_names, raise_faults
from autosplit.files import read_data
from autosplit.parsing import MAX_YAML_BYTES, read_text, shown
from autosplit.planning.moduleunits import (
    Unit,
    is_under,
    labels,
    layer_lists,
    layer_units,
    module_units,
    named_list,
    named_lists,
    path_of,
)
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine

PARTITION = re.compile(r"\s*\d+\s*(,\s*\d+\s*)*")

DEVICE_OF_MAP = re.compile(r"\d{1,5}|[a-z]+(:[\d+,-]+)?")
"""A device in a map: a number, or a kind with an index or cores."""

ENDS = {"beginning": 0, "end": 1, "splitpoint.beginning": 0, "splitpoint.end": 1}
"""The words of a split_spec, and whether the cut is after the module."""


@dataclass(frozen=True, slots=True)
class GivenSplit:
    """A split of a graph by another tool.

    Attributes:
        kind: the kind of file or text that it was read from, in words.
        stages: the ops of each stage, in graph order; values only go to the same or a later stage.
        units: the ops that the tool keeps together.
        in_order: whether the tool's stages are runs of units in graph order, one on each device.
        notes: sentences for the user.
    """

    kind: str
    stages: tuple[tuple[str, ...], ...]
    devices: tuple[str, ...]
    units: tuple[Unit, ...]
    in_order: bool
    notes: tuple[str, ...] = ()


def read_given(text: str, graph: Graph, machine: Machine, prefix: str = "") -> GivenSplit:
    """The split that a text names: ``16,32``, or a file of one of the formats.

    Args:
        text: numbers of layers with commas between; or a path: ``.json`` (accelerate's device map, TVM's list of
            ``op_name`` and ``op_index``), ``.yaml`` (module path to ``beginning`` or ``end``), ``.txt`` (the last op of each
            stage, a name a line).
        machine: the devices that the stages get, in order.
        prefix: what stands before the names of the user's modules in the graph.
    Raises: UsageError: the file is malformed or does not fit the model or the devices; the message has every fault.
    """
    if PARTITION.fullmatch(text):
        return from_partition([int(count) for count in text.split(",")], graph, machine)
    path = Path(text)
    if path.suffix == ".txt":
        try:
            lines = [line.partition("#")[0].strip() for line in read_text(path, MAX_YAML_BYTES).splitlines()]
        except (OSError, ValueError) as failure:
            raise UsageError(f"split file '{path}' cannot be read: {failure}") from None
        return from_op_names([line for line in lines if line], graph, machine, f"list of ops '{path.name}'")
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise UsageError(
            f"split '{text}' is not understood; give numbers of layers such as 16,32, or a file: device_map.json, "
            "split_spec.yaml, stages.txt with the last op of each stage, or a folder of ONNX files"
        )
    data = read_data(path, "split", UsageError)
    if path.suffix == ".json" and isinstance(data, list):
        return from_op_names(_tvm_names(data, graph), graph, machine, f"TVM split list '{path.name}'")
    if not isinstance(data, dict) or not data:
        raise UsageError(f"split file '{path}' holds {shown(data)}; a mapping from module paths is needed")
    data = {prefix + name if name and isinstance(name, str) else name: value for name, value in data.items()}
    if path.suffix == ".json":
        return from_device_map(data, graph, machine)
    return from_split_spec(data, graph, machine)


def from_partition(counts: Sequence[int], graph: Graph, machine: Machine) -> GivenSplit:
    """vLLM's ``VLLM_PP_LAYER_PARTITION``: the number of layers on each rank. Raises: UsageError: it does not fit."""
    lists = layer_lists(graph)
    if len(lists) != 1:
        raise UsageError(f"a layer partition needs a model with one list of layers, and '{graph.name}' has: {named_lists(lists)}")
    [(path, num_layers)] = lists.items()
    faults = [f"rank {rank} has no layer" for rank, count in enumerate(counts) if count < 1]
    if sum(counts) != num_layers:
        faults.append(f"the numbers add up to {sum(counts)}, and {named_list(path)} has {num_layers} layers")
    faults += _too_many(len(counts), machine)
    raise_faults(UsageError, f"partition '{','.join(map(str, counts))}' does not fit '{graph.name}'", faults)
    units = layer_units(graph, path)
    ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
    kind = f"layer partition {','.join(map(str, counts))}"
    return split_from_labels(kind, graph, machine, labels(units, ranks), units, in_order=True)


def from_device_map(entries: Mapping[str, Any], graph: Graph, machine: Machine) -> GivenSplit:
    """accelerate's device map: module path to a device. Raises: UsageError: it does not fit, with every fault."""
    numbers, faults = _device_numbers(entries, machine)
    paths = {op.name: path_of(op) for op in graph.ops}
    label: dict[str, int] = {}
    for op in graph.ops:
        of_weights = [key for weight in op.weights for key in _entry_of(weight, entries)]
        keys = _entry_of(paths[op.name], entries) or of_weights
        named = {numbers.get(str(entries[key]), 0) for key in keys}
        if len(named) > 1:
            faults.append(f"op '{op.name}' reads weights on several devices: {', '.join(map(repr, keys))}")
        if named:
            label[op.name] = min(named)
    units = module_units(graph)
    lost: dict[str, None] = {}
    for unit in units:
        placed = [op for op in unit.ops if op in label]
        if not placed:
            lost |= dict.fromkeys(unit.modules)
        for name in unit.ops:
            label.setdefault(name, label[placed[0]] if placed else 0)
    known = {*paths.values(), *graph.weights}
    strange = [key for key in entries if key and not any(is_under(name, key) for name in known)]
    faults += [f"no entry holds module '{name}'" for name in lost]
    said = [f"'{key}' is not a module with ops or weights{close_names(key, known)}" for key in strange]
    # Modules without ops are usual (dropout in evaluation). Only if another module lacks an entry is the key a typo.
    faults += said if lost else []
    raise_faults(UsageError, f"the device map does not fit '{graph.name}'", faults)
    cut = [unit for unit in units if len({label[op] for op in unit.ops}) > 1]
    notes = [*said, *(f"it cuts {', '.join(map(repr, unit.modules))}, whose values meet outside of them" for unit in cut)]
    return split_from_labels("accelerate device map", graph, machine, label, units, in_order=False, notes=notes)


def _entry_of(path: str, entries: Mapping[str, Any]) -> list[str]:
    """The longest key that holds a module, in a list; empty if there is none."""
    parts = path.split(".") if path else []
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return [key for key in [*prefixes, ""] if key in entries][:1]


def _device_numbers(entries: Mapping[str, Any], machine: Machine) -> tuple[dict[str, int], list[str]]:
    """Each device of a map to the number of one of the machine, and faults.

    Names of the machine are kept, and numbers count its devices. Other names, such as ``cpu`` or ``cuda:1``, then take devices
    that are left, of their own kind first.
    """
    names = [device.name for device in machine.devices]
    faults, found, others = [], dict[str, int](), list[str]()
    for value in {str(value): value for value in entries.values()}.values():
        text = str(value)
        if value == "disk":
            faults.append("it puts modules on 'disk', and autosplit holds all weights in memory")
        elif type(value) not in (int, str) or value == "meta" or not DEVICE_OF_MAP.fullmatch(text):
            faults.append(f"{shown(value)} is not a device; write a number from 0 on, or a name such as cpu or cuda:1")
        elif text in names:
            found[text] = names.index(text)
        elif text.isdecimal() and int(text) < len(names):
            found[text] = int(text)
        else:
            others.append(text)
    for text in others:
        free = [number for number in range(len(names)) if number not in found.values()]
        if text.isdecimal() or not free:
            faults.append(f"it names device '{text}', and the devices are {', '.join(names)}; name more with --devices")
        else:
            kind = text.partition(":")[0]
            found[text] = min(free, key=lambda number: not names[number].startswith(kind))
    return found, faults


def from_split_spec(entries: Mapping[str, Any], graph: Graph, machine: Machine) -> GivenSplit:
    """torch's split_spec: module path to ``beginning`` or ``end``. Raises: UsageError: it does not fit, with every fault."""
    paths = [path_of(op) for op in graph.ops]
    known = {".".join(path.split(".")[:length]) for path in paths for length in range(1, path.count(".") + 2)} - {""}
    inside = {module: [number for number, path in enumerate(paths) if is_under(path, module)] for module in known}
    spans = {module: (numbers[0], numbers[-1] + 1) for module, numbers in inside.items()}
    faults: list[str] = []
    cuts: dict[int, str] = {}
    for module, end in entries.items():
        if module not in known:
            faults.append(f"'{module}' is not a module with ops{close_names(str(module), known)}")
        if str(end).lower() not in ENDS:
            faults.append(f"'{module}' has {shown(end)}; write beginning or end")
        if module not in known or str(end).lower() not in ENDS:
            continue
        cut = spans[module][ENDS[str(end).lower()]]
        if cut in (0, len(paths)):
            faults.append(f"the {end} of '{module}' is the {'end' if cut else 'beginning'} of the model, so a stage is empty")
        elif cut in cuts:
            faults.append(f"'{module}' cuts where '{cuts[cut]}' does, so a stage is empty")
        cuts[cut] = module
    faults += _too_many(len(cuts) + 1, machine)
    raise_faults(UsageError, f"the split_spec does not fit '{graph.name}'", faults)
    borders = {0, len(paths), *(border for span in spans.values() for border in span)}
    return _sliced("split_spec", graph, machine, sorted(cuts), sorted(borders))


def from_op_names(names: Sequence[str], graph: Graph, machine: Machine, kind: str) -> GivenSplit:
    """The last op of each stage but the last one. Raises: UsageError: it does not fit, with every fault."""
    faults = [f"'{name}' is not an op of the graph{close_names(name, graph.index)}" for name in names if name not in graph.index]
    cuts = [graph.index[name] + 1 for name in names if name in graph.index]
    faults += [
        f"'{names[n + 1]}' does not come after '{names[n]}'" for n, (a, b) in enumerate(pairwise(cuts)) if not faults and b <= a
    ]
    cuts = [cut for cut in cuts if cut < len(graph.ops)]  # the last op may be named or not
    faults += _too_many(len(cuts) + 1, machine)
    raise_faults(UsageError, f"the {kind} does not fit '{graph.name}'", faults)
    return _sliced(kind, graph, machine, cuts, range(len(graph.ops) + 1))


def _tvm_names(entries: Sequence[Any], graph: Graph) -> list[str]:
    """The ops that TVM's ``graph_split`` is given: the ``op_index``-th op whose operator is called ``op_name``."""
    names, faults = [], []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("op_name"), str) or not isinstance(entry.get("op_index"), int):
            faults.append(f"{shown(entry)} has no op_name and op_index")
            continue
        word = entry["op_name"].rpartition(".")[2]
        alike = [op.name for op in graph.ops if word in op.operator.split(".")]
        if not 0 <= entry["op_index"] < len(alike):
            faults.append(f"op {entry['op_index']} called '{word}' is asked for, and the graph has {len(alike)}")
        else:
            names.append(alike[entry["op_index"]])
    raise_faults(UsageError, f"the split list does not fit '{graph.name}'", faults)
    return names


def _too_many(num_stages: int, machine: Machine) -> list[str]:
    count = len(machine.devices)
    return [f"it has {num_stages} stages, and there are {count} devices; name more with --devices"] if num_stages > count else []


def _sliced(kind: str, graph: Graph, machine: Machine, cuts: Sequence[int], borders: Sequence[int]) -> GivenSplit:
    """A split of the ops in graph order at some positions; the tool may cut at the borders only."""
    names = [op.name for op in graph.ops]
    stages = tuple(tuple(names[a:b]) for a, b in pairwise([0, *cuts, len(names)]))
    units = tuple(Unit((path_of(graph.ops[a]),), tuple(names[a:b])) for a, b in pairwise(borders))
    return GivenSplit(kind, stages, tuple(device.name for device in machine.devices[: len(stages)]), units, in_order=True)


def split_from_labels(
    kind: str,
    graph: Graph,
    machine: Machine,
    label: Mapping[str, int],
    units: tuple[Unit, ...],
    *,
    in_order: bool,
    notes: Sequence[str] = (),
) -> GivenSplit:
    """A split by the number of the device of each op; ops of one device that cannot run in one go are several stages.

    Args:
        kind, units, in_order, notes: as in ``GivenSplit``.
        label: op name to the number of its device.
    """
    runs = tuple(graph.runs(label, label))
    devices = tuple(machine.devices[label[ops[0]]].name for ops in runs)
    return GivenSplit(kind, runs, devices, units, in_order, tuple(notes))
