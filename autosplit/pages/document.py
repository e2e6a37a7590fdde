"""The report page: one HTML file that holds its data, its charts and the chart library, and loads nothing."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from plotly.offline import get_plotlyjs

from autosplit.pages import charts
from autosplit.pages.contents import Contents
from autosplit.tables import bytes_text, cell, heading, seconds_text

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 24px; color: #222; }
h1 { font-size: 24px; margin-bottom: 4px; } h2 { font-size: 18px; margin: 36px 0 4px; }
p.verdict { font-size: 18px; border-left: 4px solid #4c72b0; padding: 6px 14px; background: #f4f6fa; }
p.unsure { border-color: #dd8452; background: #fdf6f0; } p.hint { color: #666; margin: 0 0 8px; }
table { border-collapse: collapse; font-size: 14px; } th, td { text-align: left; padding: 3px 14px 3px 0; vertical-align: top; }
th { border-bottom: 1px solid #bbb; font-weight: 600; } td { border-bottom: 1px solid #eee; } td.number { white-space: nowrap; }
"""


def report_page(contents: Contents) -> str:
    """The page as HTML. It needs no network: plotly's library is inside (5 MB)."""
    sections = [
        _section("Ways compared", _WAYS, charts.ways_chart(contents)),
        _section("The plan on the model's graph", _GRAPH, charts.graph_chart(contents)),
        _section("Stages", "", _stages(contents)),
        _section("Schedule", _SCHEDULE, charts.schedule_chart(contents)),
        _section("Where the time goes", _TIME, charts.time_chart(contents)),
        _section("Memory", _MEMORY, charts.memory_chart(contents)),
        _section("Throughput and latency, measured", _TRADE, charts.trade_chart(contents)),
    ]
    if contents.front:
        chart = charts.front_chart(contents) if len(contents.front) > 1 else ""
        body = chart + _table([plan.model_dump() for plan in contents.front])
        sections.append(_section("What other plans trade", _FRONT, body))
    if contents.why:
        sections.append(_section("Why it is not faster", "", _list(contents.why)))
    if contents.candidates:
        sections.append(_section("What the search tried", "", _table(contents.candidates)))
    if contents.left_out:
        rows = [{"way": way, "reason": reason} for way, reason in contents.left_out.items()]
        sections.append(_section("Ways left out", "", _table(rows)))
    if contents.peers:
        sections.append(_section("The rules of other tools", _PEERS, _table(contents.peers)))
    if contents.runs:
        sections.append(_section("Accuracy of predictions", _ACCURACY, charts.accuracy_chart(contents)))
    if contents.notes:
        sections.append(_section("Notes", "", _list(contents.notes)))
    sections.append(
        _section("Provenance", "", _table([{"what": name, "value": text} for name, text in contents.provenance.items()]))
    )
    title = f"autosplit: {escape(contents.model)}"
    confidence = "" if contents.sure else " unsure"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body><h1>{escape(contents.model)}</h1>"
        f'<p class="verdict{confidence}">{escape(contents.verdict)}</p>'
        f'<p class="hint">{_CONFIDENCE[contents.sure]}</p>{"".join(sections)}</body></html>'
    )


_CONFIDENCE = {
    True: "The rounds tell this way from the next best one.",
    False: "The rounds do not tell this way from the next best one: run more rounds on a quiet machine to know.",
}
_WAYS = "Median of interleaved rounds; thin lines span the slowest to the fastest round, thick marks are predictions."
_GRAPH = (
    "Scroll to zoom, drag to move, point at an op for its times. Dark lines cross a cut. A line that leaves its row comes in at "
    "the op that reads the value."
)
_SCHEDULE = "Each colour is a request; pale parts are transfers. Predicted above, measured below."
_TIME = (
    "A worker waits when it has no request, or no free slot for its outputs. The host's bar is what a request alone takes beyond "
    "compute and transfer."
)
_MEMORY = (
    "Predicted and held: weights, values and what the backend takes, without what a bare worker has for itself and without "
    "rings. Resident: pages that several processes map are divided among them."
)
_TRADE = "The dotted line joins the ways that no other way beats in both; the star is the way to use."
_FRONT = "The planner's front, as predicted: no plan is better than another in throughput, latency and memory together."
_PEERS = "How vLLM, accelerate, exo and ollama would split the model over these devices; all figures are predicted."
_ACCURACY = "All stored runs of this model; above zero the prediction promised too much."


def _section(title: str, hint: str, body: str) -> str:
    hint = f'<p class="hint">{escape(hint)}</p>' if hint else ""
    return f"<section><h2>{escape(title)}</h2>{hint}{body}</section>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{escape(heading(name))}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td{_one_line(value)}>{escape(cell(name, value))}</td>" for name, value in row.items()) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _one_line(value: Any) -> str:
    """Keeps a number beside its unit."""
    return ' class="number"' if isinstance(value, int | float) else ""


def _stages(contents: Contents) -> str:
    return _table(
        [
            {
                "stage": stage.name,
                "devices": "+".join(stage.devices),
                "backend": stage.backend,
                "ops": stage.num_ops,
                "predicted for each request": seconds_text(stage.predicted_s) if stage.predicted_s else "",
                "weights": bytes_text(stage.weight_bytes),
                "memory cap": bytes_text(stage.cap_bytes) if stage.cap_bytes else "none",
            }
            for stage in contents.stages
        ]
    )
