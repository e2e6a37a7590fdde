from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from autosplit.figures import plot_baselines, plot_run
from autosplit.reports.runreport import RunReport
from autosplit.values.graph import Graph


def bars(axes: Axes) -> list[Rectangle]:
    return [bar for bar in axes.patches if isinstance(bar, Rectangle)]


def test_baselines_stand_fastest_first_with_the_chosen_one_in_colour(report: RunReport) -> None:
    [axes] = plot_baselines(report).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["plan: 2 stages (eager)", "one device"]
    assert [bar.get_width() for bar in bars(axes)] == [240.0, 120.0]
    assert [text.get_text() for text in axes.texts] == ["240  (250 predicted)", "120  (0.50×)"]
    assert axes.get_title(loc="left") == "blocks: the plan and its baselines; 'plan' is the one to use"


def test_a_run_shows_the_plan_on_the_graph_above_what_was_measured(report: RunReport, graph: Graph) -> None:
    figure = plot_run(report, graph)
    upper, lower = figure.axes
    assert upper.get_title(loc="left") == "blocks: 20 ops, 2 values cross a cut"
    assert [bar.get_width() for bar in bars(lower)] == [240.0, 120.0]
    assert figure.html().startswith('<img alt="" src="data:image/svg+xml;base64,')
