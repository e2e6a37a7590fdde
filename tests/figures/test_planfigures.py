"""Figures of plans and runs: what is drawn, not how it looks."""

from dataclasses import replace

import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from autosplit.costs.schedule import chain, simulate
from autosplit.errors import UsageError
from autosplit.figures import plot_accuracy, plot_plans, plot_schedule, plot_stage_balance, plot_tradeoff
from autosplit.figures.picture import colour, time_unit
from autosplit.reports.results import RunStats
from autosplit.values.graph import Graph
from autosplit.values.plan import Plan


def bars(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


pytestmark = pytest.mark.filterwarnings("error")


def test_balance_has_a_bar_a_stage(plan: Plan) -> None:
    figure = plot_stage_balance(plan)
    [axes] = figure.axes
    assert [bar.get_height() for bar in bars(axes)] == pytest.approx([4.0, 6.0])
    assert axes.get_ylabel() == "time for each request [ms]"
    assert not figure.legends


def test_balance_shows_measured_beside_predicted(plan: Plan, stats: RunStats) -> None:
    figure = plot_stage_balance(plan, stats)
    heights = [bar.get_height() for bar in bars(figure.axes[0])]
    assert heights == pytest.approx([4.0, 4.4, 0.2, 1.0, 6.0, 6.6, 0.2, 1.0])
    figure.draw_without_rendering()
    drawn = [bar.get_window_extent().height for bar in bars(figure.axes[0])]
    assert drawn == pytest.approx([drawn[0] * height / 4.0 for height in heights])
    assert [text.get_text() for text in figure.axes[0].texts] == ["4", "4.6", "6", "6.8"]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_plans_stand_on_one_scale_with_a_bar_a_device(plan: Plan) -> None:
    shared = replace(plan, stages=tuple(replace(stage, devices=("cpu:0",)) for stage in plan.stages))
    figure = plot_plans({"split": plan, "shared": shared})
    split, both = figure.axes
    assert [label.get_text() for label in split.get_yticklabels()] == ["cpu:0", "cpu:1", "cpu:2"]
    assert [bar.get_width() for bar in bars(split)] == pytest.approx([4.0, 3.0, 3.0])
    assert [(bar.get_x(), bar.get_width()) for bar in bars(both)] == [pytest.approx((0, 4)), pytest.approx((4, 6))]
    assert split.get_xlim() == both.get_xlim()
    assert split.get_title(loc="left").startswith("split: 250 items/s predicted")
    with pytest.raises(UsageError, match="no plans"):
        plot_plans({})


def test_a_schedule_has_a_lane_a_replica_and_a_colour_a_request() -> None:
    schedule = simulate(chain([1e-3, 2e-3]), 3)
    figure = plot_schedule(schedule.actions, schedule.actions[:4])
    above, below = figure.axes
    assert [label.get_text() for label in above.get_yticklabels()] == ["stage0.0", "stage1.0"]
    assert above.get_title(loc="left") == "Schedule predicted: 3 requests"
    assert below.get_title(loc="left").startswith("Schedule measured")
    assert above.get_xlim() == below.get_xlim() == pytest.approx((0, 7.0))
    assert below.get_xlabel() == "time since the first request [ms]"
    assert [len(lane.get_paths()) for lane in above.collections] == [3, 3]
    assert {text.get_text() for text in above.texts} == {"0", "1", "2"}
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_schedule_can_be_cut_off_and_needs_actions() -> None:
    schedule = simulate(chain([1e-3, 2e-3]), 30)
    assert plot_schedule(schedule.actions, until_s=5e-3).axes[0].get_xlim() == pytest.approx((0, 5.0))
    with pytest.raises(UsageError, match="no actions"):
        plot_schedule([])


def test_accuracy_states_how_far_off_the_prediction_is() -> None:
    figure = plot_accuracy({"stages": [(0.01, 0.01), (0.01, 0.011)], "whole": [(0.05, 0.04)], "none": []}, "Stage times")
    [axes] = figure.axes
    assert figure.get_suptitle() == "Stage times: off by 9.1% in the median, 25.0% at most"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted [ms]", "measured [ms]")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["within 10%", "stages", "whole", "none"]
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="series 'z' has a time that is not positive"):
        plot_accuracy({"z": [(0.0, 1.0)]})
    with pytest.raises(UsageError, match="nothing to compare"):
        plot_accuracy({"z": []})


def test_a_tradeoff_joins_undominated_ways_and_marks_the_chosen_one() -> None:
    ways = {"fast": (0.02, 90.0), "quick": (0.01, 50.0), "poor": (0.03, 40.0)}
    figure = plot_tradeoff(ways, "quick", "Measured")
    [axes] = figure.axes
    assert [tuple(point) for point in axes.lines[0].get_xydata()] == [(10.0, 50.0), (20.0, 90.0)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fast", "quick (chosen)", "poor"]
    with pytest.raises(UsageError, match="'other' is not one of the ways"):
        plot_tradeoff(ways, "other", "Measured")


@pytest.mark.parametrize("largest,unit", [(2.0, "s"), (0.5, "ms"), (2e-4, "us"), (0.0, "us")])
def test_times_have_the_unit_that_reads_well(largest: float, unit: str) -> None:
    assert time_unit(largest)[1] == unit


def test_colours_start_again_when_there_are_many_stages(graph: Graph) -> None:
    assert colour(0) == colour(7) != colour(1)
