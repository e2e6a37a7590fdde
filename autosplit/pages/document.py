"""The report page: one HTML file that holds its data and its drawings, and loads nothing."""

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from autosplit.figures import plot_accuracy, plot_baselines, plot_memory, plot_schedule, plot_stage_balance, plot_tradeoff
from autosplit.figures.picture import Picture
from autosplit.pages.contents import Contents
from autosplit.pages.graphdrawing import graph_drawing
from autosplit.tables import cell, heading

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #222; --pale: #c4c4c4; --band: #e8e8e8; --soft: #666; --box: #f2f5fa; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #17191d; --ink: #e4e4e4; --pale: #555; --band: #2c2f36; --soft: #a5a5a5; --box: #22262e; }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1000px; padding: 24px; }
html { background: var(--paper); color: var(--ink); }
h1 { font-size: 24px; margin-bottom: 4px; } h2 { font-size: 18px; margin: 36px 0 4px; }
p.verdict { font-size: 18px; border-left: 4px solid #0072b2; padding: 6px 14px; background: var(--box); }
p.unsure { border-color: #e69f00; } p.hint { color: var(--soft); margin: 0 0 8px; } code { white-space: nowrap; }
svg { display: block; max-width: 100%; height: auto; } div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; padding: 3px 14px 3px 0; vertical-align: top; }
th { border-bottom: 1px solid var(--pale); font-weight: 600; }
td { border-bottom: 1px solid var(--band); }
td.number { white-space: nowrap; }
table.header th { border: 0; white-space: nowrap; } table.header td { border: 0; overflow-wrap: anywhere; }
#graph { width: 100%; max-height: 70vh; border: 1px solid var(--band); touch-action: pinch-zoom; cursor: grab; }
#graph path { fill: none; stroke: var(--pale); } #graph path.cut { stroke: currentColor; stroke-width: 1.8; }
#graph circle { stroke: var(--paper); }
#op { background: var(--box); padding: 8px 14px; min-height: 7.5em; white-space: pre-wrap; }
p.legend span { margin-right: 18px; }
p.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 6px; margin-right: 6px; }
"""

CLEAR = {
    True: "The measured rounds are clear about it.",
    False: "The measured rounds do not show which of the best ways is better. More rounds on a quiet machine may show it.",
}
WAYS = "Median of interleaved rounds. A thin line spans the worst to the best round, a thick mark is the prediction."
GRAPH = (
    "Scroll to zoom, drag to move, double-click to go back, and point at an op for its times. Dark lines cross from stage to "
    "stage. A line that leaves its row comes in at the op that reads the value."
)
SCHEDULE = "The same first requests of a round, predicted and measured, each in its colour. Pale parts are transfers."
TIME = (
    "The predicted time of each stage beside the measured one. A worker waits when it has no request, or no free slot for its "
    "outputs."
)
MEMORY = (
    "Predicted and held: weights, values and the backend's own memory, without the memory of a bare worker and without "
    "rings. Resident: pages that several processes map are divided among them."
)
TRADE = "The dotted line joins the ways that no other way beats in both; the star is the chosen way."
FRONT = (
    "Plans of the planner, as predicted: none is better than another in throughput, latency and memory together. The star is the "
    "chosen way, as predicted; a row with * has its plan."
)
TRIALS = "Each row is a plan that the search tried. Its speed is compared with that of the first plan."
PEERS = "How vLLM, accelerate, exo and ollama would split the model over these devices; all figures are predicted."
ACCURACY = "Seconds of an item in all stored runs of this model, predicted and measured."
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
"""An option of a command, which must not be broken at the end of a line."""


def report_page(contents: Contents) -> str:
    """The page as HTML. It needs no network, and no file but itself."""
    report = contents.report
    facts = "".join(f"<tr><th>{escape(name)}</th><td>{_text(value)}</td></tr>" for name, value in contents.header.items())
    body = "".join(
        f"<section><h2>{escape(title)}</h2>{_hint(hint)}{made if isinstance(made, str) else _chart(made, title)}</section>"
        for title, hint, made in _sections(contents)
    )
    name = escape(report.model)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>autosplit: {name}</title><style>{STYLE}</style></head><body><h1>{name}</h1>"
        f'<table class="header">{facts}</table>'
        f'<p class="verdict{"" if report.verdict.sure else " unsure"}">{_text(report.sentence)}</p>'
        f"{_hint(CLEAR[report.verdict.sure])}{body}</body></html>"
    )


def _sections(contents: Contents) -> Iterator[tuple[str, str, str | Picture]]:
    """Title, hint and content of each section."""
    report, plan = contents.report, contents.plan
    yield "Ways compared", WAYS, plot_baselines(report)
    yield "The chosen way on the model's graph", GRAPH, graph_drawing(contents)
    yield "Stages of the chosen way", "", _table(_stages(contents))
    if any(contents.schedules.values()):
        yield "Schedule", SCHEDULE, plot_schedule(contents.schedules["predicted"], contents.schedules["measured"])
    yield "Where the time goes", TIME, plot_stage_balance(plan, report.best.stats)
    yield "Memory", MEMORY, plot_memory(report)
    ways = {report.label(name): (one.latency.p50_s, median(one.rounds_per_s)) for name, one in report.distinct().items()}
    chosen = next(report.label(name) for name in report.distinct() if report.chosen in name.split(" = "))
    yield "Throughput and latency, measured", TRADE, plot_tradeoff(ways, chosen, "Measured")
    if contents.front:
        yield "What other plans trade", FRONT, _front(contents) + _table(contents.front)
    if plan.why is not None:
        yield "Why it is not faster", "", _list(plan.why.text.splitlines())
    if contents.candidates:
        yield "What the search tried", TRIALS, _table(contents.candidates)
    if report.left_out:
        yield "Ways left out", "", _table([{"way": way, "reason": reason} for way, reason in report.left_out.items()])
    if peers := report.peer_rows():
        yield "The rules of other tools", PEERS, _table(peers)
    pairs = [(1 / run.predicted_per_s, 1 / run.measured_per_s) for run in contents.runs if run.predicted_per_s > 0]
    if pairs:
        yield "Accuracy of predictions", ACCURACY, plot_accuracy({"stored runs": pairs})
    yield "Notes", "", _list([report.call, *report.notes])
    yield "Details", "", _table([{"what": name, "value": text} for name, text in contents.details.items()])


def _front(contents: Contents) -> str:
    """The chart of the planner's front, with the chosen way among its plans or beside them."""
    points = {f"plan {row['number']}": (row["latency_s"], row["items_per_s"]) for row in contents.front}
    same = [f"plan {row['number']}" for row in contents.front if row["chosen"]]
    if not same:
        prediction = contents.report.best_plan.prediction
        same = [contents.report.label(contents.report.chosen)]
        points[same[0]] = (prediction.latency_s, prediction.throughput_per_s)
    return _chart(plot_tradeoff(points, same[0], "Predicted"), "What other plans trade")  # type: ignore[arg-type]


def _stages(contents: Contents) -> list[dict[str, str | int | float | None]]:
    caps_bytes = contents.caps_bytes
    return [
        {
            "stage": stage.name,
            "devices": "+".join(stage.devices),
            "backend": stage.shown,
            "ops": len(stage.ops),
            "predicted_s": stage.load_s or None,
            "weight_bytes": contents.graph.stage_bytes(stage.ops),
            "capped_bytes": min((caps_bytes[name] for name in stage.devices if name in caps_bytes), default=None),
        }
        for stage in contents.plan.stages
    ]


def _chart(picture: Picture, name: str) -> str:
    return f'<div class="chart">{picture.inline(name)}</div>'


def _hint(text: str) -> str:
    return f'<p class="hint">{_text(text)}</p>' if text else ""


def _text(text: str) -> str:
    return OPTION.sub(lambda found: f"<code>{found[0]}</code>", escape(text))


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{escape(heading(name))}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td{_one_line(value)}>{_text(cell(name, value))}</td>" for name, value in row.items()) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _one_line(value: Any) -> str:
    """Keeps a number beside its unit."""
    return ' class="number"' if isinstance(value, int | float) else ""
