"""Find where tools that cut between modules may cut: units of ops that stay on one device, and the list of layers.

A model's ``forward`` also computes between its modules: a residual addition, a reshape. Such a loose op runs where its inputs
are. So modules whose values meet in a loose op belong together, unless a module around them brings its inputs to its device.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from networkx.utils import UnionFind

from autosplit.values.graph import Graph, Op

T = TypeVar("T")

_CALL = re.compile(r"@\d+")
"""A module that is called again has a number behind its path."""

_LAYER = re.compile(r"(?:(.*?)\.)?(\d+)(?:\.|$)")
"""Pattern of a path with the number of a layer: the part before the number, and the number."""

LIST_SHARE = 0.5
"""A second list of layers counts too if it has at least this share of the ops of the largest list."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Ops that stay on one device, and the paths of the modules that name them, both in graph order."""

    modules: tuple[str, ...]
    ops: tuple[str, ...]


def labels(units: Sequence[Unit], places: Sequence[int]) -> dict[str, int]:
    """Op name to the place of its unit."""
    return {op: place for unit, place in zip(units, places, strict=True) for op in unit.ops}


def path_of(op: Op) -> str:
    """The path of the module that an op is in, without the number of the call."""
    return _CALL.sub("", op.module)


def is_under(path: str, top: str) -> bool:
    """Whether a module is another one or a part of it; every module is part of ``''``, the model."""
    return not top or path == top or path.startswith(f"{top}.")


def module_units(graph: Graph) -> tuple[Unit, ...]:
    """The smallest units that a map from modules to devices can place, in the order of their first op.

    A module is one unit if a loose op of its ``forward`` mixes inputs of the module with outputs of its parts. Other loose
    ops tie the parts whose values they read. Ops that share a weight are in one unit.
    """
    paths = {op.name: path_of(op) for op in graph.ops}
    every = set(paths.values())
    split = {path for path in every if any(other != path and is_under(other, path) for other in every)}
    whole, together, home = _whole_modules(graph, paths, split), UnionFind(), dict[str, str]()
    for op in graph.ops:
        path = paths[op.name]
        tops = [top for top in whole if is_under(path, top)]
        if tops or path not in split:
            home[op.name] = min(tops, key=len, default=path)
        elif homes := [home[source] for source in _sources(graph, op) if source in home]:
            home[op.name] = homes[0]
            together.union(*homes)
    for op in reversed(graph.ops):
        if op.name not in home:  # it reads no module's values, and goes to the first op that reads its own
            readers = [reader for value in op.outputs for reader in graph.consumers[value] if reader in home]
            first = min(readers, key=graph.index.__getitem__, default="")
            home[op.name] = home[first] if first else next(iter(home.values()), "")
    first_reader: dict[str, str] = {}
    for op in graph.ops:
        for weight in op.weights:
            together.union(first_reader.setdefault(weight, home[op.name]), home[op.name])
    units: dict[str, tuple[list[str], list[str]]] = {}
    for op in graph.ops:
        modules, ops = units.setdefault(together[home[op.name]], ([], []))
        ops.append(op.name)
        if home[op.name] not in modules:
            modules.append(home[op.name])
    return tuple(Unit(tuple(modules), tuple(ops)) for modules, ops in units.values())


def _sources(graph: Graph, op: Op) -> list[str]:
    return [graph.producer[value] for value in op.inputs if value in graph.producer]


def _whole_modules(graph: Graph, paths: Mapping[str, str], split: Collection[str]) -> set[str]:
    """The modules, other than the model itself, with a loose op that mixes values from outside and inside.

    Args:
        paths: op to the module that it is in.
        split: the modules that have others inside.
    """
    whole: set[str] = set()
    inside: set[str] = {op.name for op in graph.ops if paths[op.name] not in split or op.weights}
    for op in graph.ops:
        path, sources = paths[op.name], _sources(graph, op)
        made_here = [source in inside and is_under(paths[source], path) for source in sources]
        if any(made_here):
            inside.add(op.name)
        foreign = len(sources) < len(op.inputs) or not all(made_here)
        if path and path in split and any(made_here) and foreign:
            whole.add(path)
    return whole


def layer_lists(graph: Graph) -> dict[str, int]:
    """The lists of layers of a model: the path of each list to its number of layers, the list with most ops first.

    Lists with less than half the ops of the largest one are left out.
    """
    ops: dict[str, int] = {}
    layers: dict[str, set[int]] = {}
    for op in graph.ops:
        if match := _LAYER.match(path_of(op)):
            path = match[1] or ""
            ops[path] = ops.get(path, 0) + 1
            layers.setdefault(path, set()).add(int(match[2]))
    whole = [path for path in ops if len(layers[path]) > 1 and layers[path] == set(range(len(layers[path])))]
    most = max((ops[path] for path in whole), default=0)
    ranked = sorted(whole, key=lambda path: -ops[path])
    return {path: len(layers[path]) for path in ranked if ops[path] >= LIST_SHARE * most}


def named_list(path: str) -> str:
    """A list of layers in a message."""
    return f"'{path}'" if path else "the model"


def named_lists(lists: Mapping[str, int]) -> str:
    """The lists of layers with their lengths, in a message."""
    return ", ".join(f"{named_list(path)} of {count}" for path, count in lists.items()) or "none"


def layer_units(graph: Graph, path: str) -> tuple[Unit, ...]:
    """The layers of the list at ``path`` as units, together with the ops around them.

    Ops before the first layer are in its unit. An op that is in no layer is in the unit of the last layer whose values it reads.
    Ops that read only the model's inputs are in the unit of their first reader.
    """
    number: dict[str, int] = {}
    floating: list[Op] = []
    for op in graph.ops:
        match = _LAYER.match(path_of(op))
        if match and (match[1] or "") == path:
            number[op.name] = int(match[2])
            continue
        before = [number[graph.producer[value]] for value in op.inputs if graph.producer.get(value) in number]
        if before:
            number[op.name] = max(before)
        else:
            floating.append(op)
    for op in reversed(floating):
        after = [number[reader] for value in op.outputs for reader in graph.consumers[value]]
        number[op.name] = 0 if op.weights else min(after, default=0)
    dot = f"{path}." if path else ""
    names: dict[int, list[str]] = {layer: [] for layer in range(max(number.values()) + 1)}
    for op in graph.ops:
        names[number[op.name]].append(op.name)
    return tuple(Unit((f"{dot}{layer}",), tuple(ops)) for layer, ops in names.items() if ops)


def joined(places: Mapping[str, T]) -> dict[str, T]:
    """Module path to place, with a module in place of its parts if all of them have one place.

    >>> joined({"a.0": 1, "a.1": 1, "b.0": 1, "b.1": 2})
    {'a': 1, 'b.0': 1, 'b.1': 2}
    """
    found = dict(places)
    for name in sorted(places, key=lambda name: -name.count(".")):
        parent = name.rpartition(".")[0]
        while parent:
            inside = [other for other in found if other.startswith(f"{parent}.")]
            if not inside or any(found[other] != found[inside[0]] for other in inside):
                break
            found = {
                (parent if other == inside[0] else other): place
                for other, place in found.items()
                if other == inside[0] or other not in inside
            }
            parent = parent.rpartition(".")[0]
    return found


def snapped(graph: Graph, units: Sequence[Unit], stages: Sequence[Sequence[str]]) -> list[int]:
    """The stage that holds most of each unit: most bytes of weights, then most ops, then the earliest.

    Args:
        stages: the ops of each stage.
    """
    home = {op: number for number, ops in enumerate(stages) for op in ops}
    places = []
    for unit in units:
        there: dict[int, list[str]] = {}
        for op in unit.ops:
            there.setdefault(home[op], []).append(op)
        places.append(max(there, key=lambda stage: (graph.stage_bytes(tuple(there[stage])), len(there[stage]), -stage)))
    return places
