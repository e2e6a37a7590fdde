"""Graph layout: where each op is drawn, left to right by depth and line by line as text runs. No torch.

A depth level is a column (Sugiyama, Tagawa and Toda, 1981: layers, then an order within each that follows the neighbours). A
model of hundreds of levels would be one endless strip, so the columns are broken into lines.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autosplit.values.graph import Graph

Point = tuple[float, float]

STUB = 0.75
"""How far a connection to another line is drawn, in columns."""


@dataclass(frozen=True)
class GraphLayout:
    """Places on a sheet whose y axis points down; a column is 1 wide, an op 1 high.

    Attributes:
        positions: op name to (x, y).
        edges: (maker, reader) to the curves that are drawn for it, each a sequence of points.
        width: columns of the longest line.
        height: rows of all lines together.
    """

    positions: Mapping[str, Point]
    edges: Mapping[tuple[str, str], tuple[tuple[Point, ...], ...]]
    width: int
    height: float


def lay_out(graph: Graph, columns: int | None = None) -> GraphLayout:
    """Places for every op, with at most ``columns`` in a line; by default a sheet is about three times as wide as high."""
    depth = depths(graph)
    slots = _slots(graph, depth)
    num_levels = max(depth.values()) + 1
    mean_height = len(graph.ops) / num_levels + 1
    most = columns or max(24, math.ceil(math.sqrt(3 * num_levels * mean_height)))
    num_lines = math.ceil(num_levels / most)
    width = math.ceil(num_levels / num_lines)
    heights = [0] * math.ceil(num_levels / width)
    for op, level in depth.items():
        heights[level // width] = max(heights[level // width], slots[op] + 1)
    # A free row above each line is for the arcs of skip connections.
    tops = [sum(heights[:line]) + 1.0 * line for line in range(len(heights))]
    line = {op: level // width for op, level in depth.items()}
    positions = {op: (float(level % width), tops[level // width] + slots[op]) for op, level in depth.items()}
    edges = {}
    for reader in graph.ops:
        for maker in _makers(graph, reader.inputs):
            same = line[maker] == line[reader.name]
            edges[maker, reader.name] = _curves(positions[maker], positions[reader.name], same)
    return GraphLayout(positions, edges, width, tops[-1] + heights[-1])


def depths(graph: Graph) -> dict[str, int]:
    """Op name to its level: one more than the deepest op it reads; an op that reads none stands just before its reader."""
    depth: dict[str, int] = {}
    for op in graph.ops:
        depth[op.name] = max((depth[maker] + 1 for maker in _makers(graph, op.inputs)), default=0)
    rootless = set()
    for op in graph.ops:
        if all(value not in graph.inputs and graph.producer[value] in rootless for value in op.inputs):
            rootless.add(op.name)
    for op in reversed(graph.ops):
        readers = [reader for value in op.outputs for reader in graph.consumers[value]]
        if op.name in rootless and readers:
            depth[op.name] = max(0, min(depth[reader] for reader in readers) - 1)
    return depth


def _makers(graph: Graph, values: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(graph.producer[value] for value in values if value in graph.producer))


def _slots(graph: Graph, depth: Mapping[str, int]) -> dict[str, int]:
    """Op name to its row within the column: near the ops it reads, so that a chain is a straight line."""
    levels: dict[int, list[str]] = {}
    for op in graph.ops:
        levels.setdefault(depth[op.name], []).append(op.name)
    slots: dict[str, int] = {}
    for level in sorted(levels):
        wished = {op: _wished_row(graph, op, slots) for op in levels[level]}
        free = 0
        for name in sorted(levels[level], key=lambda name: wished[name]):
            slots[name] = free if math.isinf(wished[name]) else max(free, int(wished[name]))
            free = slots[name] + 1
    return slots


def _wished_row(graph: Graph, op: str, slots: Mapping[str, int]) -> float:
    """The highest row of the ops that it reads; below all others, if it reads none."""
    rows = [slots[maker] for maker in _makers(graph, graph.ops[graph.index[op]].inputs) if maker in slots]
    return min(rows, default=math.inf)


def _curves(start: Point, end: Point, same_line: bool) -> tuple[tuple[Point, ...], ...]:
    (x0, y0), (x1, y1) = start, end
    if not same_line:
        return ((start, (x0 + STUB, y0 - 0.25 * STUB)), ((x1 - STUB, y1 - 0.25 * STUB), end))
    if x1 - x0 <= 1 or abs(y1 - y0) >= 1:
        return ((start, end),) if x1 - x0 <= 1 else (_bent(start, end),)
    rise = min(0.85, 0.35 + 0.04 * (x1 - x0))
    steps = [number / 12 for number in range(13)]
    return (tuple((x0 + (x1 - x0) * t, y0 + (y1 - y0) * t - rise * (1 - (2 * t - 1) ** 4)) for t in steps),)


def _bent(start: Point, end: Point) -> tuple[Point, ...]:
    """Change the row at once, then run straight: between the two rows there is no other op in the way."""
    (x0, y0), (x1, y1) = start, end
    return (start, (x1 - 1, y0 + 0.35), end) if y1 < y0 else (start, (x0 + 1, y1 - 0.35), (x1 - 0.5, y1 - 0.35), end)
