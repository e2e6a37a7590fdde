"""Figures of a graph: what is drawn, not how it looks."""

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from autosplit.errors import UsageError
from autosplit.figures import plot_graph, plot_op_costs
from autosplit.figures.graphs import num_crossing
from autosplit.figures.picture import colour
from autosplit.values.graph import Graph
from autosplit.values.plan import Plan


def bars(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


pytestmark = pytest.mark.filterwarnings("error")


def test_ops_are_coloured_by_stage_and_cuts_are_counted(graph: Graph, plan: Plan) -> None:
    figure = plot_graph(graph, plan)
    [dots] = [item for item in figure.axes[0].collections if isinstance(item, PathCollection)]
    assert [to_hex(shade).upper() for shade in np.asarray(dots.get_facecolor())] == [colour(0)] * 10 + [colour(1)] * 10
    place = {op: number for number, stage in enumerate(plan.stages) for op in stage.ops}
    assert num_crossing(graph, place) == 2
    assert "20 ops, 2 values cross a cut" in figure.axes[0].get_title(loc="left")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "stage0: cpu:0, eager, 10 ops, 768 B of weights",
        "stage1: cpu:1+cpu:2, eager, 10 ops, 512 B of weights",
    ]
    inner, crossing = [item for item in figure.axes[0].collections if isinstance(item, LineCollection)]
    assert len(crossing.get_segments()) <= 2 * 2 < len(inner.get_segments())


def test_small_graphs_show_names_and_large_ones_do_not(graph: Graph, large_graph: Graph) -> None:
    assert "relu_3" in [text.get_text() for text in plot_graph(graph).axes[0].texts]
    assert len(large_graph.ops) == 400
    assert not plot_graph(large_graph).axes[0].texts


def test_a_picture_shows_itself_in_a_notebook(large_graph: Graph) -> None:
    png = plot_graph(large_graph)._repr_png_()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000


def test_dear_ops_are_larger(graph: Graph) -> None:
    seconds = {op.name: 1.0 if op.name == "conv_2" else 0.1 for op in graph.ops}
    [dots] = [item for item in plot_graph(graph, seconds=seconds).axes[0].collections if isinstance(item, PathCollection)]
    sizes = list(dots.get_sizes())
    assert sizes.index(max(sizes)) == graph.index["conv_2"]


def test_op_costs_are_summed_by_operator(graph: Graph) -> None:
    seconds = {op.name: 0.003 if op.name.startswith("conv") else 0.001 for op in graph.ops}
    figure = plot_op_costs(graph, seconds, "cpu:0")
    ordered, summed, share = figure.axes
    assert ordered.get_ylabel() == "time of the op [ms]"
    assert [label.get_text() for label in summed.get_yticklabels()][:2] == ["conv", "bn"]
    assert bars(summed)[0].get_width() == pytest.approx(15.0)
    assert list(map(float, np.asarray(share.lines[0].get_ydata())))[-1] == pytest.approx(100.0)
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_an_op_without_seconds_is_named(graph: Graph) -> None:
    with pytest.raises(UsageError, match=r"1 ops of 'blocks' have no seconds, such as 'add_4'"):
        plot_op_costs(graph, {op.name: 1.0 for op in graph.ops[:-1]})


@pytest.mark.timeout(60)
def test_figures_do_without_pyplot() -> None:
    program = "import sys, autosplit.figures; assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
