"""A placed graph as DOT and as a picture: a colour for each device, copies as marked edges."""

from collections.abc import Mapping

from autosplit.figures.graphs import draw_ops, layout_of, size_of
from autosplit.figures.picture import Picture, colour
from autosplit.values.dot import digraph, quoted
from autosplit.values.graph import Graph


def dot_text(graph: Graph, devices: Mapping[str, str], copies: Mapping[str, str]) -> str:
    """The graph in the DOT language.

    Args:
        graph: the graph with copies as ops.
        devices: op name to device, copies too.
        copies: name of each copy to its label.
    """
    names = list(dict.fromkeys(devices.values()))
    lines = []
    for op in graph.ops:
        look = 'shape=box, style="filled,dashed"' if op.name in copies else "shape=ellipse"
        label = quoted(copies.get(op.name, f"{op.name}\n{devices[op.name]}"))
        lines.append(f'{quoted(op.name)} [label={label}, fillcolor="{colour(names.index(devices[op.name]))}", {look}];')
    for op in graph.ops:
        for value in dict.fromkeys(op.inputs):
            if value in graph.producer:
                crosses = op.name in copies or graph.producer[value] in copies
                lines.append(f"{quoted(graph.producer[value])} -> {quoted(op.name)}{' [style=dashed]' if crosses else ''};")
    return digraph(graph.name, lines, "style=filled, fontcolor=white")


def draw(graph: Graph, devices: Mapping[str, str], copies: Mapping[str, str], title: str) -> Picture:
    """The graph in reading order: ops in the colour of their device, copies as white squares with a dark border."""
    layout, names = layout_of(graph), list(dict.fromkeys(devices.values()))
    width, height = size_of(layout, graph, None)
    figure = Picture(figsize=(width, height + 0.22 * len(names)), layout="constrained")
    counts = {name: sum(device == name and op not in copies for op, device in devices.items()) for name in names}
    place = {op: names.index(device) for op, device in devices.items()}
    labels = [f"{name}: {count} ops" for name, count in counts.items()]
    draw_ops(figure, layout, graph, place, title, labels, squares=copies)
    return figure
