"""Figures of plans: balance, plans side by side, the schedule, accuracy."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from autosplit.errors import UsageError
from autosplit.figures.picture import (
    BAND,
    GREY,
    PALE,
    Picture,
    above,
    bare,
    colour,
    inside,
    sheet,
    stage_label,
    time_unit,
    title,
)
from autosplit.reports.results import RunStats
from autosplit.values.plan import Plan
from autosplit.values.timeline import Action, lanes

PARTS: tuple[tuple[str, str], ...] = (("", ""), ("", "////"), (PALE, ""))
"""Shade (or the stage's colour) and hatch of computing, sending and waiting."""


def plot_stage_balance(plan: Plan, stats: RunStats | None = None) -> Picture:
    """Predicted busy time of each stage for each request, beside the measured one: the mean of its replicas' medians."""
    measured = {stage.name: _measured_parts(stats, stage.name) for stage in plan.stages} if stats else {}
    factor, unit = time_unit(max([stage.load_s for stage in plan.stages] + [sum(parts) for parts in measured.values()]))
    figure, axes = sheet(width=max(6.0, 2.4 * len(plan.stages) + 1.0), height=4.2)
    width = 0.36 if measured else 0.55
    for number, stage in enumerate(plan.stages):
        left = number - width / 2 - 0.02 if measured else number
        axes.bar(left, stage.load_s * factor, width, color=colour(number))
        above(axes, left, stage.load_s * factor, stage.load_s * factor)
        if measured:
            parts = [part * factor for part in measured[stage.name]]
            _stack(axes, number + width / 2 + 0.02, width, parts, colour(number))
    rate = plan.prediction.throughput_per_s
    axes.set_xticks(
        range(len(plan.stages)), [stage_label(plan, number).replace(": ", "\n", 1) for number in range(len(plan.stages))]
    )
    axes.set_ylabel(f"time for each request [{unit}]")
    axes.margins(y=0.12)
    title(figure, f"Stage balance: {rate:.4g} {plan.item}/s predicted")
    if measured:
        marks = [Patch(color=GREY, label="left: predicted")]
        names = ("right: computing", "sending", "waiting")
        marks += [
            Patch(facecolor=shade or GREY, hatch=hatch, alpha=0.6, edgecolor="white", label=name)
            for (shade, hatch), name in zip(PARTS, names, strict=True)
        ]
        figure.legend(handles=marks, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    bare(axes)
    return figure


def _stack(axes: Axes, x: float, width: float, parts: Sequence[float], shade: str) -> None:
    """One bar of computing, sending and waiting; the number above it is the busy part."""
    for number, ((own_shade, hatch), part) in enumerate(zip(PARTS, parts, strict=True)):
        below = sum(parts[:number])
        axes.bar(x, part, width, bottom=below, facecolor=own_shade or shade, hatch=hatch, alpha=0.6, edgecolor="white")
    above(axes, x, sum(parts), parts[0] + parts[1])


def _measured_parts(stats: RunStats, stage: str) -> tuple[float, float, float]:
    mine = [worker for worker in stats.stages if worker.stage == stage]
    count = max(1, len(mine))
    return (
        sum(worker.busy.p50_s for worker in mine) / count,
        sum(worker.transfer.p50_s for worker in mine) / count,
        sum(worker.wait.p50_s for worker in mine) / count,
    )


def plot_plans(plans: Mapping[str, Plan]) -> Picture:
    """The predicted load of each device under each plan, by stage, on one scale.

    Raises: UsageError: there are no plans.
    """
    if not plans:
        raise UsageError("there are no plans to compare; give at least one by name")
    loads = {name: _device_segments(plan) for name, plan in plans.items()}
    factor, unit = time_unit(max((sum(s for _, s in parts) for rows in loads.values() for parts in rows.values()), default=0.0))
    heights = [len(rows) + 0.9 for rows in loads.values()]
    figure = Picture(figsize=(9, 0.8 + 0.42 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(plans), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (name, plan) in zip(panels, plans.items(), strict=True):
        for row, parts in enumerate(loads[name].values()):
            left = 0.0
            for number, seconds in parts:
                axes.barh(row, seconds * factor, left=left * factor, color=colour(number), edgecolor="white", height=0.7)
                inside(axes, (left + seconds / 2) * factor, row, plan.stages[number].name)
                left += seconds
        axes.set_yticks(range(len(loads[name])), list(loads[name]))
        axes.invert_yaxis()
        gap = f", within {plan.prediction.gap:.1%} of the best possible" if plan.prediction.bound_s > 0 else ""
        axes.set_title(f"{name}: {plan.prediction.throughput_per_s:.4g} {plan.item}/s predicted{gap}", fontsize=10, loc="left")
        bare(axes)
    panels[-1].set_xlabel(f"time that the device is busy for each request [{unit}]")
    return figure


def _device_segments(plan: Plan) -> dict[str, list[tuple[int, float]]]:
    """Device name to (stage number, seconds for each request of the whole), in pipeline order."""
    segments: dict[str, list[tuple[int, float]]] = {}
    for number, stage in enumerate(plan.stages):
        for device in stage.devices:
            segments.setdefault(device, []).append((number, stage.load_s / len(stage.devices)))
    return segments


def plot_schedule(predicted: Sequence[Action], measured: Sequence[Action] = (), until_s: float | None = None) -> Picture:
    """A Gantt chart: which stage replica works on which request, and when.

    Computation is solid, transfers are pale. Requests differ by colour, and by number where there is room.

    Args:
        predicted: the actions of a simulation.
        measured: the actions of a run, drawn below on the same time axis.
        until_s: where the chart ends, in seconds; by default with the last action.
    Raises: UsageError: there are no actions.
    """
    panels = {name: actions for name, actions in (("predicted", predicted), ("measured", measured)) if actions}
    if not panels:
        raise UsageError("there are no actions to draw; simulate at least one request")
    end = until_s or max(action.end_s for actions in panels.values() for action in actions)
    factor, unit = time_unit(end)
    rows = {name: lanes(actions) for name, actions in panels.items()}
    heights = [len(names) + 0.9 for names in rows.values()]
    figure = Picture(figsize=(12, 0.9 + 0.42 * sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (name, actions) in zip(all_axes, panels.items(), strict=True):
        for row, lane in enumerate(rows[name]):
            mine = [action for action in actions if action.lane == lane and action.start_s < end]
            spans = [(action.start_s * factor, action.duration_s * factor) for action in mine]
            shades = [to_rgba(colour(action.request), 1.0 if action.kind == "compute" else 0.35) for action in mine]
            axes.broken_barh(spans, (row - 0.38, 0.76), facecolors=shades, edgecolors="white", linewidths=0.5)
            for action in mine:
                if action.kind == "compute" and action.duration_s > 0.018 * end and action.end_s <= end:
                    middle = (action.start_s + action.end_s) / 2 * factor
                    inside(axes, middle, row, str(action.request))
        axes.set_yticks(range(len(rows[name])), rows[name])
        axes.set_ylim(len(rows[name]) - 0.5, -0.5)
        axes.set_title(f"Schedule {name}: {len({action.request for action in actions})} requests", fontsize=10, loc="left")
        bare(axes)
    all_axes[-1].set_xlim(0, end * factor)
    all_axes[-1].set_xlabel(f"time since the first request [{unit}]")
    return figure


def plot_accuracy(
    series: Mapping[str, Sequence[tuple[float, float]]], subject: str = "Prediction", tolerance: float = 0.1
) -> Picture:
    """Predicted against measured seconds; on the diagonal they agree.

    Args:
        series: name to pairs of predicted and measured seconds, all positive; a series has a colour.
        subject: the predicted quantity, for the title.
        tolerance: width of the band that is drawn around the diagonal, as a share.
    Raises: UsageError: there are no pairs, or one is not positive.
    """
    pairs = [pair for points in series.values() for pair in points]
    wrong = [name for name, points in series.items() if any(min(pair) <= 0 for pair in points)]
    if not pairs or wrong:
        raise UsageError(
            f"series '{wrong[0]}' has a time that is not positive"
            if wrong
            else "there is nothing to compare; give at least one pair"
        )
    predicted, measured = np.array(pairs).T
    factor, unit = time_unit(float(max(predicted.max(), measured.max())))
    figure, axes = sheet(width=6.0, height=5.8 + 0.2 * len(series))
    low, high = (
        float(min(predicted.min(), measured.min())) * factor / 1.3,
        float(max(predicted.max(), measured.max())) * factor * 1.3,
    )
    line = np.array([low, high])
    axes.fill_between(line, line * (1 - tolerance), line * (1 + tolerance), color=BAND, label=f"within {tolerance:.0%}")
    axes.plot(line, line, color=GREY, linewidth=1)
    for number, (name, points) in enumerate(series.items()):
        x, y = np.array(points).reshape(-1, 2).T * factor
        axes.scatter(x, y, color=colour(number), marker="osD^vP"[number % 6], s=34, edgecolors="white", zorder=3, label=name)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low > 5 else tuple(range(1, 10))))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"predicted [{unit}]")
    axes.set_ylabel(f"measured [{unit}]")
    off = np.abs(predicted / measured - 1)
    title(figure, f"{subject}: off by {np.median(off):.1%} in the median, {off.max():.1%} at most")
    figure.legend(loc="outside lower left", frameon=False, fontsize=9)
    bare(axes)
    return figure


def plot_tradeoff(ways: Mapping[str, tuple[float, float]], chosen: str, subject: str) -> Picture:
    """Throughput beside latency of each way to run a model; a line joins the ways that no other way beats in both.

    Args:
        ways: name to seconds of a request alone, and items per second.
        chosen: the name of the way that is marked with a star.
    Raises: UsageError: there is no way of this name.
    """
    if chosen not in ways:
        raise UsageError(f"'{chosen}' is not one of the ways to draw: {', '.join(ways) or 'there are none'}")
    factor, unit = time_unit(max(latency_s for latency_s, _ in ways.values()))
    front = [
        (latency_s, rate)
        for latency_s, rate in sorted(set(ways.values()))
        if not any(s <= latency_s and r >= rate and (s, r) != (latency_s, rate) for s, r in ways.values())
    ]
    figure, axes = sheet(width=9.0, height=4.2)
    axes.step([s * factor for s, _ in front], [rate for _, rate in front], where="post", color=GREY, linestyle=":", linewidth=1)
    for number, (name, (latency_s, rate)) in enumerate(ways.items()):
        is_chosen = name == chosen
        marker, size = ("*", 220) if is_chosen else ("osD^vP"[number % 6], 40)
        label = f"{name} (chosen)" if is_chosen else name
        axes.scatter(
            latency_s * factor,
            rate,
            color=colour(number),
            marker=marker,
            s=size,
            edgecolors="white",
            zorder=3 + is_chosen,
            label=label,
        )
    slowest_s, highest = (max(each) for each in zip(*ways.values(), strict=True))
    axes.set(xlim=(0, 1.05 * slowest_s * factor), ylim=(0, 1.05 * highest))  # not by their range: equal ways lay on the edge
    axes.set_xlabel(f"latency of a request alone [{unit}]")
    axes.set_ylabel("throughput [items/s]")
    title(figure, subject)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    bare(axes)
    return figure
