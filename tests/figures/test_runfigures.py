"""Figures of a run: what is drawn, and that it stays inside."""

import re
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from autosplit.figures import plot_baselines, plot_memory, plot_run
from autosplit.reports.runreport import RunReport
from autosplit.values.graph import Graph


def bars(axes: Axes) -> list[Rectangle]:
    return [bar for bar in axes.patches if isinstance(bar, Rectangle)]


def test_ways_stand_best_first_with_the_chosen_one_in_colour(report: RunReport) -> None:
    figure = plot_baselines(report)
    [axes] = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["searched plan, 2 stages (eager)", "one device"]
    assert [bar.get_width() for bar in bars(axes)] == [240.0, 120.0]
    assert [text.get_text() for text in axes.texts] == ["240  (250 predicted)", "120  (0.50×)"]
    words = "blocks: the searched plan and its baselines; the chosen way is 'searched plan, 2 stages (eager)'"
    assert figure.get_suptitle().replace("\n", " ") == words


def test_ways_of_a_plan_for_latency_stand_by_latency(report: RunReport) -> None:
    outcomes = {
        name: replace(one, plan=replace(one.plan, objective="latency"), latency=replace(one.latency, p50_s=p50_s))
        for (name, one), p50_s in zip(report.outcomes.items(), (0.02, 0.01), strict=True)
    }
    [axes] = plot_baselines(replace(report, outcomes=outcomes)).axes
    assert [bar.get_width() for bar in bars(axes)] == [10.0, 20.0]
    assert axes.get_xlabel() == "latency of a request alone, measured [ms]"


def test_a_long_title_stays_inside(report: RunReport) -> None:
    """That of a BERT, with the name of the chosen way, was cut off at the right."""
    figure = plot_baselines(replace(report, model="BertForSequenceClassification" * 4))
    figure.draw_without_rendering()
    for text in [figure._suptitle, *figure.axes[0].texts]:  # type: ignore[attr-defined]
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


def test_memory_has_three_bars_a_worker(report: RunReport) -> None:
    [axes] = plot_memory(report).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage0 on cpu:0", "stage1 on cpu:1", "stage1 on cpu:2"]
    assert [bar.get_width() for bar in bars(axes)] == [0.0] * 3 + [2.0] * 3 + [0.0] * 3


def test_a_run_shows_the_plan_on_the_graph_above_what_was_measured(report: RunReport, graph: Graph) -> None:
    figure = plot_run(report, graph)
    upper, lower = figure.axes
    assert upper.get_title(loc="left") == "blocks: 20 ops, 2 values cross a cut"
    assert [bar.get_width() for bar in bars(lower)] == [240.0, 120.0]
    assert figure.html().startswith('<img alt="" src="data:image/svg+xml;base64,')


def test_a_drawing_in_a_page_has_the_colours_of_the_page(report: RunReport) -> None:
    drawn = plot_baselines(report).inline("Ways <compared>")
    assert drawn.startswith('<svg role="img" aria-label="Ways &lt;compared&gt;"')
    assert "currentColor" in drawn and "var(--pale)" in drawn and not re.search("#(000000|202020|c4c4c4|ffffff)", drawn)
    assert "<g id=" not in drawn
