"""Graphs and plans in the DOT language of Graphviz."""

import json
from collections.abc import Iterable, Iterator

from autosplit.tables import bytes_text, seconds_text
from autosplit.values.graph import Graph
from autosplit.values.plan import Plan, Stage


def graph_dot(graph: Graph, plan: Plan | None = None) -> str:
    """The ops of a graph with an edge for each value and reader, labelled with its bytes.

    With a plan, each stage is a cluster, and edges that cross a cut are bold.
    """
    stage_of = {op: number for number, stage in enumerate(plan.stages) for op in stage.ops} if plan else {}
    lines = [f"{quoted(op.name)} [label={quoted(op.name, op.operator)}]" for op in graph.ops if op.name not in stage_of]
    for number, stage in enumerate(plan.stages if plan else ()):
        ops = [graph.ops[graph.index[name]] for name in stage.ops]
        members = [f"  {quoted(op.name)} [label={quoted(op.name, op.operator)}]" for op in ops]
        lines += [f"subgraph cluster_{number} {{", f"  label={_label(stage)}", *members, "}"]
    lines += [f"{quoted(value)} [shape=ellipse]" for value in graph.inputs]
    for value, source, target in _edges(graph):
        bold = ", style=bold" if stage_of.get(source) != stage_of.get(target) else ""
        lines.append(f"{quoted(source)} -> {quoted(target)} [label={quoted(bytes_text(graph.values[value].num_bytes))}{bold}]")
    return digraph(graph.name, lines)


def plan_dot(graph: Graph, plan: Plan) -> str:
    """The stages of a plan, with an edge for all values that one stage hands to another, labelled with their bytes."""
    stage_of = {op: stage.name for stage in plan.stages for op in stage.ops}
    moved: dict[tuple[str, str], dict[str, int]] = {}
    for value, source, target in _edges(graph):
        ends = stage_of.get(source, "host"), stage_of.get(target, "host")
        if ends[0] != ends[1]:
            moved.setdefault(ends, {})[value] = graph.values[value].num_bytes
    for value in graph.outputs:
        source = stage_of.get(graph.producer.get(value, ""), "host")
        moved.setdefault((source, "host"), {})[value] = graph.values[value].num_bytes
    lines = [f"{quoted(stage.name)} [label={_label(stage)}]" for stage in plan.stages] + ['"host" [shape=ellipse]']
    for (source, target), values in moved.items():
        lines.append(f"{quoted(source)} -> {quoted(target)} [label={quoted(bytes_text(sum(values.values())))}]")
    return digraph(graph.name, lines)


def _edges(graph: Graph) -> Iterator[tuple[str, str, str]]:
    """Each value with its producer, or its own name for an input of the graph, and each op that reads it."""
    for value, readers in graph.consumers.items():
        yield from ((value, graph.producer.get(value, value), reader) for reader in readers)


def _label(stage: Stage) -> str:
    load = [seconds_text(stage.load_s)] if stage.load_s > 0 else []
    return quoted(stage.name, f"{' + '.join(stage.devices)} ({stage.shown})", f"{len(stage.ops)} ops", *load)


def quoted(*lines: str) -> str:
    """A quoted string of DOT: line breaks, quotes and backslashes are written as in JSON."""
    return json.dumps("\n".join(lines), ensure_ascii=False)


def digraph(name: str, lines: Iterable[str], look: str = "shape=box") -> str:
    """A graph with these lines; ``look`` has the attributes of its nodes."""
    return "\n".join([f"digraph {quoted(name)} {{", f"  node [{look}]", *(f"  {line}" for line in lines), "}", ""])
