"""Figures of a graph: its ops coloured by stage, and the seconds of its ops."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import FigureBase

from autosplit.errors import UsageError
from autosplit.figures.layout import GraphLayout, Point, lay_out
from autosplit.figures.picture import (
    COLOURS,
    DARK,
    GREY,
    PALE,
    Picture,
    bare,
    below,
    beside,
    colour,
    mark,
    stage_label,
    time_unit,
)
from autosplit.values.graph import Graph
from autosplit.values.plan import Plan

NAMED_OPS = 40
"""Most ops that are drawn with their names, in lines of ``NAMED_COLUMNS``."""

NAMED_COLUMNS = 14

ELIDED = 7
"""Letters kept at each end of a long name."""

SHORT_NAMES = {"_native_batch_norm_legit_no_training": "batch_norm", "scaled_dot_product_attention": "attention"}


def plot_graph(graph: Graph, plan: Plan | None = None, seconds: Mapping[str, float] | None = None) -> Picture:
    """The ops in reading order, coloured by stage; connections that cross a cut are dark.

    An op stands right of everything it reads; the drawing runs on in the next line as text does. A connection
    to another line leaves at the right and comes in at the left.

    Args:
        plan: colours the ops by stage; without it all have one colour.
        seconds: op name to seconds; an op's area grows with it.
    """
    layout = layout_of(graph)
    figure = Picture(figsize=size_of(layout, graph, plan), layout="constrained")
    draw_graph(figure, layout, graph, plan, seconds)
    return figure


def layout_of(graph: Graph) -> GraphLayout:
    """Places for every op, with room for the names of a small graph."""
    return lay_out(graph, columns=NAMED_COLUMNS if _named(graph) else None)


def size_of(layout: GraphLayout, graph: Graph, plan: Plan | None) -> tuple[float, float]:
    """Width and height of the drawing with its legend, in inches."""
    width = min(15.0, (0.85 if _named(graph) else 0.26) * layout.width + 1.5)
    height = min(14.0, 0.7 + (0.36 if _named(graph) else 0.2) * layout.height)
    return max(7.0, width), height + 0.22 * len(plan.stages if plan else ())


def draw_graph(
    figure: FigureBase, layout: GraphLayout, graph: Graph, plan: Plan | None, seconds: Mapping[str, float] | None
) -> None:
    """Draw the picture of ``plot_graph`` into a figure or a part of one."""
    place = {op: number for number, stage in enumerate(plan.stages if plan else ()) for op in stage.ops}
    crossing = num_crossing(graph, place)
    cuts = f", {crossing} value{'s cross' if crossing != 1 else ' crosses'} a cut" if plan else ""
    larger = "; the larger an op, the longer it takes" if seconds else ""
    labels = [stage_label(plan, number, graph) for number in range(len(plan.stages))] if plan else []
    draw_ops(figure, layout, graph, place, f"{graph.name}: {len(graph.ops)} ops{cuts}{larger}", labels, seconds)


def draw_ops(
    figure: FigureBase,
    layout: GraphLayout,
    graph: Graph,
    place: Mapping[str, int],
    title: str,
    labels: Sequence[str],
    seconds: Mapping[str, float] | None = None,
    squares: Collection[str] = (),
) -> None:
    """Draw ops in the colours of their places, and their connections; those that join two places are dark.

    Args:
        place: op name to number of its place; 0 if it is left out.
        labels: the legend, a text for each place.
        seconds: op name to seconds; an op's area grows with it.
        squares: ops that are drawn as white squares with a coloured border.
    """
    axes, curves = figure.subplots(), draw_order(layout, place)
    for crossing, shade, width in ((False, PALE, 0.7), (True, DARK, 1.3)):
        segments = [points for crosses, points in curves if crosses == crossing]
        axes.add_collection(LineCollection(segments, colors=shade, linewidths=width, zorder=2 if crossing else 1))
    sizes = dict(zip(graph.index, _node_sizes(graph, seconds, dense=layout.width > 30), strict=True))
    for is_square, marker, width in ((False, "o", 0.6), (True, "s", 1.8)):
        if names := [name for name in sizes if (name in squares) == is_square]:
            x, y = np.array([layout.positions[name] for name in names]).T
            shades = [colour(place.get(name, 0)) for name in names]
            fill, edge = ("white", shades) if is_square else (shades, "white")
            area = [sizes[name] for name in names]
            axes.scatter(x, y, s=area, c=fill, edgecolors=edge, linewidths=width, marker=marker, zorder=3 + is_square)
    for op in graph.ops if _named(graph) else ():
        below(axes, layout.positions[op.name], elided(op.name))
    axes.set_axis_off()
    axes.set_xlim(-1.2, layout.width + 0.2)
    axes.set_ylim(layout.height - 0.2, -0.8)
    axes.set_title(title, fontsize=11, loc="left")
    if labels:
        marks = [mark(number, label) for number, label in enumerate(labels)]
        figure.legend(handles=marks, loc="outside lower left", ncols=1, frameon=False, fontsize=9)


def _named(graph: Graph) -> bool:
    return len(graph.ops) <= NAMED_OPS


def draw_order(layout: GraphLayout, place: Mapping[str, int]) -> list[tuple[bool, tuple[Point, ...]]]:
    """The curves of the connections, each with whether it joins two places (op name to number); these come last, on top."""
    curves = [
        (place.get(source) != place.get(target), points) for (source, target), parts in layout.edges.items() for points in parts
    ]
    return sorted(curves, key=lambda curve: curve[0])


def _node_sizes(graph: Graph, seconds: Mapping[str, float] | None, dense: bool) -> list[float]:
    base = 22.0 if dense else 60.0
    if not seconds:
        return [base] * len(graph.ops)
    largest = max(seconds.values(), default=0.0) or 1.0
    return [base * (0.3 + 4.0 * seconds.get(op.name, 0.0) / largest) for op in graph.ops]


def plot_op_costs(graph: Graph, seconds: Mapping[str, float], subject: str = "") -> Picture:
    """Seconds of each op in graph order, and of all ops of each operator.

    Args:
        seconds: op name to seconds, for instance a profile's corrected ones.
        subject: where this was measured, for the title.
    Raises: UsageError: an op has no seconds.
    """
    if absent := [op.name for op in graph.ops if op.name not in seconds]:
        raise UsageError(f"{len(absent)} ops of '{graph.name}' have no seconds, such as '{absent[0]}'; give seconds for every op")
    totals: dict[str, float] = {}
    for op in graph.ops:
        totals[op.operator] = totals.get(op.operator, 0.0) + seconds[op.name]
    ranked = sorted(totals, key=lambda operator: -totals[operator])
    shade = {operator: colour(rank) if rank < len(COLOURS) else GREY for rank, operator in enumerate(ranked)}
    costs = np.array([seconds[op.name] for op in graph.ops])
    factor, unit = time_unit(float(costs.max()))
    total_factor, total_unit = time_unit(max(totals.values()))

    figure = Picture(figsize=(12, 4), layout="constrained")
    ordered, summed = figure.subplots(1, 2, width_ratios=(3, 2))
    x = np.arange(len(costs))
    ordered.bar(x, costs * factor, width=1.0, color=[shade[op.operator] for op in graph.ops])
    ordered.set_xlabel("op, in graph order")
    ordered.set_ylabel(f"time of the op [{unit}]")
    ordered.set_xlim(-0.5, len(costs) - 0.5)
    share = ordered.twinx()
    total = float(costs.sum()) or 1.0
    share.plot(x, np.cumsum(costs) / total * 100, color="#404040", linewidth=1.2)
    share.set_ylim(0, 105)
    share.set_ylabel("share of the whole, summed up [%]")
    shown = ranked[:12]
    summed.barh(range(len(shown)), [totals[o] * total_factor for o in shown], color=[shade[o] for o in shown])
    summed.set_yticks(range(len(shown)), [_short_operator(operator) for operator in shown])
    summed.invert_yaxis()
    summed.set_xlabel(f"time of all its ops [{total_unit}]")
    for row, operator in enumerate(shown):
        beside(summed, totals[operator] * total_factor, row, f"{totals[operator] / total:.0%}")
    summed.margins(x=0.15)
    bare(ordered, summed)
    figure.suptitle(f"{graph.name}: where the time goes{f' on {subject}' if subject else ''}", x=0.01, ha="left", fontsize=11)
    return figure


def num_crossing(graph: Graph, place: Mapping[str, int]) -> int:
    """How many values cross from stage to stage, one counted once for each stage that reads it."""
    crossing = {
        (value, place.get(reader.name))
        for reader in graph.ops
        for value in reader.inputs
        if value in graph.producer and place.get(graph.producer[value]) != place.get(reader.name)
    }
    return len(crossing)


def _short_operator(operator: str) -> str:
    """The operator's name without its namespace and overload.

    >>> _short_operator("aten.add.Tensor")
    'add'
    """
    name = operator.removeprefix("aten.").removesuffix(".default").removesuffix(".Tensor")
    return SHORT_NAMES.get(name, name)


def elided(name: str) -> str:
    """The name, its middle left out where it is long.

    >>> elided("_native_batch_norm_legit_no_training_4"), elided("adaptive_avg_pool2d_1")
    ('batch_norm_4', 'adaptiv…ool2d_1')
    """
    for long, short in SHORT_NAMES.items():
        name = name.replace(long, short)
    return name if len(name) <= 2 * ELIDED + 1 else f"{name[:ELIDED]}…{name[-ELIDED:]}"
