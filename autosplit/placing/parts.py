"""The connected parts of a model on each device: the stages of a pipeline, which need not be a chain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx

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
    links = networkx.Graph()
    for position in (graph.index[name] for name in ops):
        op = graph.ops[position]
        links.add_node(position)
        links.add_edges_from((position, f"value {value}") for value in (*op.inputs, *op.outputs))
        links.add_edges_from((position, f"weight {weight}") for weight in op.weights)
    groups = [sorted(node for node in nodes if isinstance(node, int)) for nodes in networkx.connected_components(links)]
    return [tuple(graph.ops[position].name for position in positions) for positions in sorted(groups)]
