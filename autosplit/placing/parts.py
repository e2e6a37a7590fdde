"""The connected parts of a model on each device: the stages of a pipeline, which need not be a chain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autosplit.placing.sites import Choice, Site
from autosplit.values.graph import Graph


@dataclass(frozen=True, slots=True)
class Part:
    """Ops at one site that are connected, in graph order."""

    name: str
    site: Site
    ops: tuple[str, ...]


def parts_of(graph: Graph, choices: Mapping[str, Choice]) -> tuple[Part, ...]:
    """The parts in an order in which each reads only from the ones before it.

    The ops are cut into few runs of one site each (``Graph.runs``). Ops of a run are connected where they share a value or a
    weight: two branches without either are two parts.
    """
    labels = {op: str(choice.site) for op, choice in choices.items()}
    found = [part for run in graph.runs(labels, labels) for part in connected(graph, run)]
    return tuple(Part(f"part{number}", choices[ops[0]].site, ops) for number, ops in enumerate(found))


def connected(graph: Graph, ops: Sequence[str]) -> list[tuple[str, ...]]:
    """The ops in groups that share no value and no weight; groups and ops in the order of the first op."""
    group: dict[str, int] = {}
    members: list[list[str]] = []
    for name in ops:
        op = graph.ops[graph.index[name]]
        touched = [f"value {value}" for value in (*op.inputs, *op.outputs)] + [f"weight {weight}" for weight in op.weights]
        joined = sorted({group[key] for key in touched if key in group})
        home = joined[0] if joined else len(members)
        if not joined:
            members.append([])
        for other in joined[1:]:
            members[home] += members[other]
            members[other] = []
            group.update({key: home for key, number in group.items() if number == other})
        members[home].append(name)
        group.update(dict.fromkeys(touched, home))
    ordered = [tuple(sorted(names, key=graph.index.__getitem__)) for names in members if names]
    return sorted(ordered, key=lambda names: graph.index[names[0]])
