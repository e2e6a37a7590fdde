"""Figures of a run: what every way to run the model measured, alone or below the plan on the model's graph."""

from matplotlib.figure import FigureBase

from autosplit.figures.graphs import draw_graph, layout_of, size_of
from autosplit.figures.picture import COLOURS, DARK, PALE, Picture, bare, beside, rate_text
from autosplit.reports.outcomes import PLAN
from autosplit.reports.runreport import RunReport
from autosplit.values.graph import Graph


def plot_baselines(report: RunReport) -> Picture:
    """The measured throughput of the plan and of every baseline, the one to use in colour.

    A thin line spans the slowest to the fastest round, a dark mark stands where the throughput was predicted.
    """
    figure = Picture(figsize=(8.0, _height(report)), layout="constrained")
    _draw_baselines(figure, report)
    return figure


def plot_run(report: RunReport, graph: Graph) -> Picture:
    """The plan to use drawn over the model's graph, above what every way to run the model measured.

    Args:
        report: the run, with its baselines.
        graph: the model, traced for the plan to use.
    """
    plan, layout = report.best.plan, layout_of(graph)
    width, height = size_of(layout, graph, plan)
    figure = Picture(figsize=(max(9.0, width), height + _height(report)), layout="constrained")
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(height, _height(report)))[:, 0]
    draw_graph(upper, layout, graph, plan, None)
    _draw_baselines(lower, report)
    return figure


def _height(report: RunReport) -> float:
    return 1.0 + 0.42 * len(report.distinct())


def _draw_baselines(figure: FigureBase, report: RunReport) -> None:
    outcomes = report.distinct()
    names = sorted(outcomes, key=lambda name: -outcomes[name].throughput_per_s)
    best_per_s = report.best.throughput_per_s
    axes = figure.subplots()
    for row, name in enumerate(names):
        outcome, chosen = outcomes[name], report.chosen in name.split(" = ")
        rate, predicted = outcome.throughput_per_s, outcome.plan.prediction.throughput_per_s
        axes.barh(row, rate, color=COLOURS[0] if chosen else PALE, height=0.7)
        axes.plot([min(outcome.rounds_per_s), max(outcome.rounds_per_s)], [row, row], color=DARK, linewidth=1)
        text = rate_text(rate) if chosen else f"{rate_text(rate)}  ({rate / best_per_s:.2f}×)"
        if predicted:
            axes.plot([predicted] * 2, [row - 0.35, row + 0.35], color=DARK, linewidth=2)
            text += f"  ({rate_text(predicted)} predicted)"
        beside(axes, max(*outcome.rounds_per_s, rate, predicted), row, text)
    axes.set_yticks(range(len(names)), [_label(report, name) for name in names])
    axes.invert_yaxis()
    axes.margins(x=0.4)
    axes.set_xlabel("throughput, measured [items/s]")
    axes.set_title(f"{report.model}: the plan and its baselines; '{report.chosen}' is the one to use", fontsize=11, loc="left")
    bare(axes)


def _label(report: RunReport, name: str) -> str:
    """The name of a baseline, or of the plan with its stages and backends, because 'plan' alone does not say how it runs."""
    if name != PLAN:
        return name
    stages = report.plan.plan.stages
    backends = ", ".join(dict.fromkeys(stage.backend for stage in stages))
    return f"plan: {len(stages)} stage{'s' * (len(stages) > 1)} ({backends})"
