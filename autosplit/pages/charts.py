"""Plotly charts of a report's contents. Each function returns the HTML of one chart, without the library itself."""

from collections.abc import Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

import plotly.graph_objects as go

from autosplit.figures.picture import COLOURS
from autosplit.pages.contents import Contents, OpRow, Step, Way
from autosplit.tables import bytes_text, seconds_text

GREY, DARK = "#c9c9c9", "#333333"
ROW_HEIGHT = 34
BUTTONS, LEGEND_HEIGHT = 28, 28
"""Pixels above a chart: for the buttons that it shows under the pointer, and below these for its legend."""
CONFIG: Mapping[str, Any] = {"displaylogo": False, "scrollZoom": True, "modeBarButtonsToRemove": ["lasso2d", "select2d"]}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "pentagon", "hexagon2")
ABOVE: Mapping[str, Any] = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}
"""The legend above a chart."""
BESIDE: Mapping[str, Any] = {"orientation": "v", "x": 1.02}
"""The legend at the right of a chart. Names at the points would overlap."""


def colour(number: int) -> str:
    """The colour of a stage or a request; colours repeat."""
    return COLOURS[number % len(COLOURS)]


def graph_chart(contents: Contents) -> str:
    """The ops coloured by stage. An op stands right of everything that it reads, and lines run on as text does."""
    figure = go.Figure()
    for cut, shade, width in ((False, GREY, 1), (True, DARK, 1.6)):
        xs: list[float | None] = []
        ys: list[float | None] = []
        for edge in contents.edges:
            if edge.cut == cut:
                xs += [*(x for x, _ in edge.points), None]
                ys += [*(y for _, y in edge.points), None]
        label = "value that crosses a cut" if cut else "value"
        figure.add_scatter(x=xs, y=ys, mode="lines", line={"color": shade, "width": width}, hoverinfo="skip", name=label)
    for number, stage in enumerate(contents.stages):
        ops = [op for op in contents.ops if op.stage == number]
        figure.add_scatter(
            x=[op.x for op in ops],
            y=[op.y for op in ops],
            mode="markers",
            marker={"color": colour(number), "size": 11, "line": {"color": "white", "width": 1}},
            name=f"{stage.name}: {'+'.join(stage.devices)}, {stage.backend}",
            text=[_op_text(op, contents) for op in ops],
            hovertemplate="%{text}<extra></extra>",
        )
    height = min(760, 150 + 22 * round(max((op.y for op in contents.ops), default=0)))
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False, autorange="reversed")
    return _html(figure, height)


def _op_text(op: OpRow, contents: Contents) -> str:
    stage = contents.stages[op.stage]
    lines = [f"<b>{escape(op.name)}</b>", escape(op.operator), escape(op.module) or "(root module)"]
    lines += [f"{escape(setting)}: {seconds_text(seconds)}" for setting, seconds in op.seconds.items()]
    lines.append(f"weights {bytes_text(op.weight_bytes)}, output {bytes_text(op.output_bytes)}")
    lines.append(f"{escape(stage.name)} on {escape('+'.join(stage.devices))}")
    lines.append(f"because {escape('; '.join(op.demands))}" if op.demands else "placed by the planner; no demand names it")
    return "<br>".join(lines)


def ways_chart(contents: Contents) -> str:
    """Each way's median with its slowest and fastest round, and its prediction."""
    by_latency = contents.objective == "latency"
    ways = sorted(contents.ways, key=lambda way: _figure(way, by_latency), reverse=by_latency)
    factor, unit = (1e3, "ms for a request alone") if by_latency else (1, "items/s")
    rounds = [[factor * value for value in (way.alone_s if by_latency else way.rounds_per_s)] for way in ways]
    middles = [median(values) for values in rounds]
    figure = go.Figure()
    figure.add_bar(
        y=[way.name for way in ways],
        x=middles,
        orientation="h",
        marker_color=[COLOURS[0] if way.chosen else GREY for way in ways],
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [max(values) - middle for values, middle in zip(rounds, middles, strict=True)],
            "arrayminus": [middle - min(values) for values, middle in zip(rounds, middles, strict=True)],
            "color": DARK,
            "thickness": 1,
        },
        customdata=[f"{len(values)} rounds" for values in rounds],
        hovertemplate="%{y}<br>%{x:.4g} " + unit + ", %{customdata}<extra></extra>",
        name="measured (median, slowest to fastest round)",
    )
    predicted = [way.predicted_latency_s if by_latency else way.predicted_per_s for way in ways]
    figure.add_scatter(
        y=[way.name for way, value in zip(ways, predicted, strict=True) if value],
        x=[factor * value for value in predicted if value],
        mode="markers",
        marker={"symbol": "line-ns", "size": 18, "line": {"width": 3, "color": COLOURS[1]}},
        name="predicted",
        hovertemplate="predicted %{x:.4g} " + unit + "<extra></extra>",
    )
    figure.update_xaxes(title=unit, rangemode="tozero")
    return _html(figure, 96 + ROW_HEIGHT * len(ways))


def _figure(way: Way, by_latency: bool) -> float:
    return median(way.alone_s if by_latency else way.rounds_per_s)


def schedule_chart(contents: Contents) -> str:
    """Predicted and measured work on the first requests, in one Gantt chart on one time axis."""
    figure = go.Figure()
    lanes: list[str] = []
    for kind, steps in contents.schedules.items():
        lanes += list(dict.fromkeys(f"{kind}: {step.lane}" for step in steps))
        for request in sorted({step.request for step in steps}):
            _add_request(figure, kind, [step for step in steps if step.request == request])
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1])
    figure.update_xaxes(title="ms since the first request", rangemode="tozero")
    figure.update_layout(barmode="overlay", showlegend=False)
    return _html(figure, 78 + ROW_HEIGHT * len(lanes))


def _add_request(figure: Any, kind: str, steps: Sequence[Step]) -> None:
    figure.add_bar(
        y=[f"{kind}: {step.lane}" for step in steps],
        base=[1e3 * step.start_s for step in steps],
        x=[1e3 * step.duration_s for step in steps],
        orientation="h",
        marker={
            "color": colour(steps[0].request),
            "opacity": [1.0 if step.kind == "compute" else 0.4 for step in steps],
            "line": {"color": "white", "width": 0.5},
        },
        text=[f"request {step.request}, {step.kind}, {seconds_text(step.duration_s)}" for step in steps],
        textposition="none",
        hovertemplate="%{text}<br>from %{base:.3f} ms<extra></extra>",
    )


def time_chart(contents: Contents) -> str:
    """Compute, transfer and wait of each worker, for each request."""
    figure = go.Figure()
    parts = (("busy_s", "compute"), ("transfer_s", "transfer"), ("wait_s", "wait"))
    for number, (name, label) in enumerate(parts):
        figure.add_bar(
            y=[worker.name for worker in contents.workers],
            x=[1e3 * getattr(worker, name) for worker in contents.workers],
            orientation="h",
            name=label,
            marker_color=GREY if name == "wait_s" else colour(number),
            hovertemplate=label + " %{x:.4g} ms<extra></extra>",
        )
    figure.add_bar(
        y=["host, a request alone"],
        x=[1e3 * contents.host_s],
        orientation="h",
        name="host",
        marker_color=colour(len(parts)),
        hovertemplate="host %{x:.4g} ms<extra></extra>",
    )
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    figure.update_xaxes(title="ms for each request (medians)")
    return _html(figure, 88 + ROW_HEIGHT * (len(contents.workers) + 1))


def memory_chart(contents: Contents) -> str:
    """Memory of each worker: its weights, what was predicted and what it held beside its process, and all that is resident."""
    figure = go.Figure()
    weights = {f"{stage.name} on {device}": stage.weight_bytes for stage in contents.stages for device in stage.devices}
    series = (
        ("weights of the stage", [weights.get(worker.name, 0) for worker in contents.workers]),
        ("predicted", [worker.predicted_bytes or 0 for worker in contents.workers]),
        ("held at most", [worker.held_bytes for worker in contents.workers]),
        ("resident, shared pages divided", [worker.proportional_bytes for worker in contents.workers]),
    )
    for number, (label, sizes) in enumerate(series):
        figure.add_bar(
            y=[worker.name for worker in contents.workers],
            x=[size / 2**20 for size in sizes],
            orientation="h",
            name=label,
            marker_color=colour(number),
            hovertemplate=label + " %{x:.4g} MiB<extra></extra>",
        )
    figure.update_xaxes(title="MiB")
    return _html(figure, 88 + 2 * ROW_HEIGHT * len(contents.workers))


def trade_chart(contents: Contents) -> str:
    """Measured throughput beside latency; ways that no other way beats in both are joined: the Pareto front."""
    points = sorted(((way.latency_s, median(way.rounds_per_s), way) for way in contents.ways), key=lambda point: point[:2])
    front = [point for point in points if not any(_beats(other, point) for other in points)]
    figure = go.Figure()
    figure.add_scatter(
        x=[1e3 * latency_s for latency_s, _, _ in front],
        y=[rate for _, rate, _ in front],
        mode="lines",
        line={"color": COLOURS[0], "dash": "dot", "shape": "hv"},
        name="Pareto front",
        hoverinfo="skip",
    )
    for number, (latency_s, rate, way) in enumerate(points):
        figure.add_scatter(
            x=[1e3 * latency_s],
            y=[rate],
            mode="markers",
            marker={
                "size": 15 if way.chosen else 11,
                "symbol": "star" if way.chosen else SYMBOLS[number % len(SYMBOLS)],
                "color": colour(number),
            },
            name=way.name,
            hovertemplate=escape(way.name) + "<br>%{y:.4g} items/s, %{x:.4g} ms<extra></extra>",
        )
    figure.update_xaxes(title="ms for a request alone", rangemode="tozero")
    figure.update_yaxes(title="items/s", rangemode="tozero")
    return _html(figure, 390, legend=BESIDE)


def front_chart(contents: Contents) -> str:
    """The planner's front: predicted throughput beside latency, coloured by the memory of the fullest device."""
    front = contents.front
    figure = go.Figure()
    figure.add_scatter(
        x=[1e3 * plan.latency_s for plan in front],
        y=[plan.items_per_s for plan in front],
        mode="markers",
        marker={
            "size": 13,
            "color": [plan.peak_bytes / 2**20 for plan in front],
            "colorscale": "Viridis",
            "showscale": True,
            "colorbar": {"title": "MiB"},
        },
        text=[f"plan {p.number}: {escape(p.stages)}<br>{bytes_text(p.peak_bytes)} on the fullest device" for p in front],
        hovertemplate="%{text}<br>%{y:.4g} items/s, %{x:.4g} ms<extra></extra>",
    )
    figure.update_xaxes(title="predicted ms for a request alone", rangemode="tozero")
    figure.update_yaxes(title="predicted items/s", rangemode="tozero")
    figure.update_layout(showlegend=False)
    return _html(figure, 350)


def _beats(one: tuple[float, float, Way], other: tuple[float, float, Way]) -> bool:
    return one[0] <= other[0] and one[1] >= other[1] and one[:2] != other[:2]


def accuracy_chart(contents: Contents) -> str:
    """Error of the predictions of stored runs, oldest first."""
    figure = go.Figure()
    figure.add_scatter(
        x=list(range(1, len(contents.runs) + 1)),
        y=[run.predicted_per_s / run.measured_per_s - 1 for run in contents.runs],
        mode="markers",
        text=[f"{escape(run.way)}<br>{run.date}" for run in contents.runs],
        marker={"color": COLOURS[0]},
        hovertemplate="%{text}<br>%{y:+.1%}<extra></extra>",
    )
    figure.add_hline(y=0, line={"color": DARK, "width": 1})
    figure.update_xaxes(title="stored run, oldest first")
    figure.update_yaxes(title="predicted over measured, less one", tickformat="+.0%")
    figure.update_layout(showlegend=False)
    return _html(figure, 290)


def _html(figure: Any, height: int, legend: Mapping[str, Any] = ABOVE) -> str:
    above = BUTTONS + (LEGEND_HEIGHT if legend is ABOVE and figure.layout.showlegend is not False else 0)
    margin = {"l": 10, "r": 10, "t": above, "b": 40}
    figure.update_layout(height=above + height, margin=margin, template="plotly_white", legend=dict(legend), dragmode="pan")
    figure.update_yaxes(automargin=True, ticklabelstandoff=4)
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG))
