"""The model's graph as an interactive drawing: SVG that a few lines of JavaScript zoom, move and explain."""

import json
from html import escape

from autosplit.figures.graphs import draw_order
from autosplit.figures.layout import lay_out
from autosplit.figures.picture import colour, stage_label
from autosplit.pages.contents import Contents
from autosplit.tables import bytes_text, seconds_text
from autosplit.values.graph import Op

UNIT = 24
"""Units of the drawing for one column and one row."""

RADIUS = 6

MAX_TIMES = 10_000
"""Most times of ops in all settings, which keep the page below 1.5 MB; beyond, an op has the times of its own backend alone."""

SCRIPT = """
const drawing = document.getElementById("graph"), shown = document.getElementById("op");
const texts = JSON.parse(document.getElementById("ops").textContent), whole = drawing.viewBox.baseVal;
const start = [whole.x, whole.y, whole.width, whole.height];
let from = null;
const explain = event => {
  const op = event.target.dataset.op;
  if (op !== undefined) shown.textContent = texts[op];
};
drawing.addEventListener("pointerover", explain);
drawing.addEventListener("click", explain);
drawing.addEventListener("wheel", event => {
  event.preventDefault();
  const box = drawing.getBoundingClientRect(), factor = event.deltaY < 0 ? 0.8 : 1.25;
  whole.x += whole.width * (1 - factor) * (event.clientX - box.left) / box.width;
  whole.y += whole.height * (1 - factor) * (event.clientY - box.top) / box.height;
  whole.width *= factor;
  whole.height *= factor;
}, {passive: false});
drawing.addEventListener("pointerdown", event => { from = event; });
addEventListener("pointerup", () => { from = null; });
drawing.addEventListener("pointermove", event => {
  if (!from) return;
  const scale = whole.width / drawing.getBoundingClientRect().width;
  whole.x -= (event.clientX - from.clientX) * scale;
  whole.y -= (event.clientY - from.clientY) * scale;
  from = event;
});
drawing.addEventListener("dblclick", () => { [whole.x, whole.y, whole.width, whole.height] = start; });
"""


def graph_drawing(contents: Contents) -> str:
    """The ops coloured by stage. An op stands right of everything that it reads, and lines run on as text does."""
    graph, stages = contents.graph, contents.plan.stages
    layout = lay_out(graph)
    stage_of = {op: number for number, stage in enumerate(stages) for op in stage.ops}
    lines = "".join(
        f'<path class="{"cut" if crossing else "value"}" d="{_path(points)}"/>'
        for crossing, points in draw_order(layout, stage_of)
    )
    dots = "".join(
        f'<circle cx="{UNIT * x:g}" cy="{UNIT * y:g}" r="{RADIUS}" fill="{colour(stage_of[op.name])}" data-op="{number}"/>'
        for number, op in enumerate(graph.ops)
        for x, y in [layout.positions[op.name]]
    )
    legend = "".join(
        f'<span><i style="background:{colour(number)}"></i>{escape(stage_label(contents.plan, number, graph))}</span>'
        for number in range(len(stages))
    )
    texts = json.dumps([_op_text(op, contents, stage_of[op.name]) for op in graph.ops]).replace("<", "\\u003c")
    size = f"{-UNIT} {-UNIT} {UNIT * (layout.width + 1):g} {UNIT * (layout.height + 1):g}"
    return (
        f'<p class="legend">{legend}</p><svg id="graph" viewBox="{size}" role="img" aria-label="ops of the model by stage">'
        f'{lines}{dots}</svg><pre id="op">Point at an op.</pre>'
        f'<script type="application/json" id="ops">{texts}</script><script>{SCRIPT}</script>'
    )


def _path(points: tuple[tuple[float, float], ...]) -> str:
    return "M" + "L".join(f"{UNIT * x:.4g} {UNIT * y:.4g}" for x, y in points)


def _op_text(op: Op, contents: Contents, number: int) -> str:
    """The facts about an op, one a line."""
    graph, stage = contents.graph, contents.plan.stages[number]
    weight_bytes = sum(graph.weights[name].num_bytes for name in op.weights)
    output_bytes = sum(graph.values[name].num_bytes for name in op.outputs)
    lines = [f"{op.name}: {op.operator}", f"in {op.module or 'the root module'}"]
    seconds = contents.seconds.get(op.name, {})
    if len(seconds) * len(graph.ops) > MAX_TIMES:
        seconds = {setting: value for setting, value in seconds.items() if stage.backend in setting}
    lines += [f"{setting}: {seconds_text(value)}" for setting, value in seconds.items()]
    lines.append(f"weights {bytes_text(weight_bytes)}, output {bytes_text(output_bytes)}")
    because = "; ".join(contents.demands.get(op.name, [])) or "the planner's choice, no demand names it"
    return "\n".join([*lines, f"{stage.name} on {'+'.join(stage.devices)}: {because}"])
