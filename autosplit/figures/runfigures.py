"""Figures of a run: the measured ways to run the model, alone or below the plan on the model's graph; memory of workers."""

from math import isfinite

from matplotlib.figure import FigureBase

from autosplit.figures.graphs import draw_graph, layout_of, size_of
from autosplit.figures.picture import COLOURS, DARK, PALE, Picture, bare, beside, colour, rate_text, sheet, title
from autosplit.reports.outcomes import Outcome
from autosplit.reports.runreport import RunReport
from autosplit.tables import seconds_text
from autosplit.values.graph import Graph


def plot_baselines(report: RunReport) -> Picture:
    """The measured figure of every way to run the model, the best first and the chosen one in colour.

    The figure is the throughput, or the latency if the plan is for latency. A thin line spans the worst to the best round, a dark
    mark stands where the figure was predicted.
    """
    figure = Picture(figsize=(9.0, _height(report)), layout="constrained")
    _draw_baselines(figure, report)
    return figure


def plot_run(report: RunReport, graph: Graph) -> Picture:
    """The chosen way drawn over the model's graph, as traced for it, above the figures of every way to run the model."""
    plan, layout = report.best.plan, layout_of(graph)
    width, height = size_of(layout, graph, plan)
    figure = Picture(figsize=(max(9.0, width), height + _height(report)), layout="constrained")
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(height, _height(report)))[:, 0]
    draw_graph(upper, layout, graph, plan, None)
    _draw_baselines(lower, report)
    return figure


def plot_memory(report: RunReport) -> Picture:
    """Memory of each worker of the chosen way: predicted bytes, the most held, and resident bytes."""
    workers = report.best.stats.stages
    memory = {stage.name: stage.memory for stage in report.best.plan.stages}
    predicted = [found.held_bytes if (found := memory[worker.stage]) else 0 for worker in workers]
    series = {
        "predicted": predicted,
        "held at most": [worker.held_bytes for worker in workers],
        "resident, shared pages divided": [worker.proportional_bytes for worker in workers],
    }
    figure, axes = sheet(width=9.0, height=1.2 + 0.6 * len(workers))
    for number, (label, sizes) in enumerate(series.items()):
        rows = [row + 0.26 * (number - 1) for row in range(len(workers))]
        axes.barh(rows, [size / 2**20 for size in sizes], height=0.24, color=colour(number), label=label)
    axes.set_yticks(range(len(workers)), [f"{worker.stage} on {worker.device}" for worker in workers])
    axes.invert_yaxis()
    axes.set_xlabel("memory [MiB]")
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    bare(axes)
    return figure


def _height(report: RunReport) -> float:
    return 1.2 + 0.42 * len(report.distinct())


def _draw_baselines(figure: FigureBase, report: RunReport) -> None:
    for_latency = report.plan.plan.objective == "latency"
    outcomes = report.distinct()
    names = sorted(outcomes, key=lambda name: _measured(outcomes[name], for_latency), reverse=not for_latency)
    best = _measured(report.best, for_latency)
    axes = figure.subplots()
    for row, name in enumerate(names):
        outcome, chosen = outcomes[name], report.chosen in name.split(" = ")
        rounds, measured = _rounds(outcome, for_latency), _measured(outcome, for_latency)
        prediction = outcome.plan.prediction
        predicted = 1e3 * prediction.latency_s if for_latency else prediction.throughput_per_s
        axes.barh(row, measured, color=COLOURS[0] if chosen else PALE, height=0.7)
        axes.plot([min(rounds), max(rounds)], [row, row], color=DARK, linewidth=1)
        text = _text(measured, for_latency)
        if not chosen and isfinite(best) and best:
            text += f"  ({measured / best:.2f}×)"
        if predicted:
            axes.plot([predicted] * 2, [row - 0.35, row + 0.35], color=DARK, linewidth=2)
            text += f"  ({_text(predicted, for_latency)} predicted)"
        beside(axes, max(*rounds, measured, predicted), row, text)
    axes.set_yticks(range(len(names)), [report.label(name) for name in names])
    axes.invert_yaxis()
    axes.margins(x=0.75)  # room for the figures beside the bars
    plan = report.plan.plan
    latency = "latency of a request alone" if plan.sequences is None else "time from a token to the next one"
    axes.set_xlabel(f"{latency}, measured [ms]" if for_latency else f"throughput, measured [{plan.item}/s]")
    title(figure, f"{report.model}: the {report.searched} and its baselines; the chosen way is '{report.label(report.chosen)}'")
    bare(axes)


def _rounds(outcome: Outcome, for_latency: bool) -> list[float]:
    return [1e3 * seconds for seconds in outcome.alone_s] if for_latency else list(outcome.rounds_per_s)


def _measured(outcome: Outcome, for_latency: bool) -> float:
    return 1e3 * outcome.latency.p50_s if for_latency else outcome.throughput_per_s


def _text(value: float, for_latency: bool) -> str:
    return seconds_text(value / 1e3) if for_latency else rate_text(value)
