"""Pictures: figures made without pyplot, one palette, one way to write units and labels."""

import io
import re
import textwrap
from base64 import b64encode
from html import escape

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D

from autosplit.tables import bytes_text
from autosplit.values.graph import Graph
from autosplit.values.plan import Plan

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C6D31")
"""Distinct for every common colour vision: Okabe and Ito's palette (2008), its yellow darkened for white paper."""

GREY = "#8a8a8a"
PALE = "#c4c4c4"
DARK = "#202020"
BAND = "#e8e8e8"
LABEL = "#fefefe"
"""Text inside coloured bars."""

IN_A_PAGE = {"#000000": "currentColor", DARK: "currentColor", PALE: "var(--pale)", BAND: "var(--band)", "#ffffff": "var(--paper)"}
"""Colours that an HTML page replaces by its own, which differ in light and dark mode."""

CHARACTERS_PER_INCH = 12.0
"""Characters of a title that surely fit into an inch of its figure."""

SCALES = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "us"))


class Picture(Figure):
    """A figure that a notebook shows without pyplot and without ``%matplotlib inline``."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()

    def svg(self) -> str:
        """The figure as SVG, letters as outlines; one figure, one text."""
        buffer = io.StringIO()
        with rc_context({"svg.hashsalt": "autosplit"}):
            self.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()

    def inline(self, name: str) -> str:
        """The figure as an SVG element for an HTML page, in the colours of the page; ``name`` is read out in its place."""
        with rc_context({"savefig.transparent": True}):
            drawn = self.svg()
        drawn = re.sub(r"<g id=\"[\w.]+\">", "<g>", drawn[drawn.index("<svg ") :])  # ids that other figures of the page have too
        drawn = re.sub("#[0-9a-f]{6}", lambda found: IN_A_PAGE.get(found[0], found[0]), drawn)
        return drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" fill="currentColor" ', 1)

    def html(self) -> str:
        """The figure as an HTML image that needs no other file."""
        return f'<img alt="" src="data:image/svg+xml;base64,{b64encode(self.svg().encode()).decode()}">'


def colour(index: int) -> str:
    """The colour of a stage, a device or a kind, by its position."""
    return COLOURS[index % len(COLOURS)]


def time_unit(largest_s: float) -> tuple[float, str]:
    """The factor and the unit that make seconds readable, chosen for the largest of them.

    >>> time_unit(0.02)
    (1000.0, 'ms')
    """
    return next((factor, unit) for least, factor, unit in SCALES if largest_s >= least)


def rate_text(per_s: float) -> str:
    """Items per second with four significant digits, and never with an exponent.

    >>> rate_text(51.9412), rate_text(11070.0)
    ('51.94', '11,070')
    """
    return f"{per_s:,.0f}" if per_s >= 1000 else f"{per_s:.4g}"


def sheet(width: float, height: float) -> tuple[Picture, Axes]:
    """A figure with one pair of axes, in inches."""
    figure = Picture(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def title(figure: FigureBase, text: str) -> None:
    """Write the title of a figure, or of a part of one, in as many lines as it needs to stay inside."""
    width = figure.get_figure(root=True).get_figwidth()
    figure.suptitle(textwrap.fill(text, int(CHARACTERS_PER_INCH * width)), x=0.01, ha="left", fontsize=11)


def bare(*all_axes: Axes) -> None:
    """Take away the frame at the top and the right."""
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)


def above(axes: Axes, x: float, y: float, number: float) -> None:
    """Write a number above a bar that ends at (x, y)."""
    axes.annotate(f"{number:.3g}", (x, y), (0, 2), textcoords="offset points", ha="center", fontsize=8)


def below(axes: Axes, point: tuple[float, float], text: str) -> None:
    """Write small text under a point."""
    axes.annotate(text, point, (0, -7), textcoords="offset points", fontsize=6.5, ha="center", va="top")


def beside(axes: Axes, x: float, y: float, text: str) -> None:
    """Write text right of a point."""
    axes.annotate(text, (x, y), (3, 0), textcoords="offset points", va="center", fontsize=8)


def inside(axes: Axes, x: float, y: float, text: str) -> None:
    """Write text on a coloured bar, as far as the axes reach."""
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=LABEL, clip_on=True)


def mark(number: int, label: str) -> Line2D:
    """A legend entry in the colour of a stage."""
    return Line2D([], [], marker="o", linestyle="", color=colour(number), label=label)


def stage_label(plan: Plan, number: int, graph: Graph | None = None) -> str:
    """Name, devices, backend and size of a stage; with the graph, its weights too."""
    stage = plan.stages[number]
    weights = f", {bytes_text(graph.stage_bytes(stage.ops))} of weights" if graph else ""
    return f"{stage.name}: {'+'.join(stage.devices)}, {stage.shown}, {len(stage.ops)} ops{weights}"
