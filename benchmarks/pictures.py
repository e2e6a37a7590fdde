"""Make the pictures of docs/pictures from one real run, and from a notebook.

    python -m benchmarks.pictures [--search-s 10]

``plan.svg`` needs no browser. The screenshots need Chromium: report.png, report-dark.png, report-700.png (700 pixels wide),
docs.png, terminal.png and notebook.png. Run it on a quiet machine: the pictures show how well the run was predicted.
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image, ImageChops, ImageOps
from rich.console import Console

import autosplit
from autosplit import Budget, Constraints, Setup
from autosplit.commands.report import baselines_table, plan_table, run_table
from autosplit.figures import plot_run
from autosplit.files import write_atomic

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
NOTEBOOK = ROOT / "notebooks" / "3_judging_a_plan_by_hand.ipynb"
MODEL = "autosplit.examples.unet:unet?levels=3&size=64"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COLOURS = 256
"""Colours of a screenshot. Fewer than all keep a file small."""

MARGIN = 16
"""Pixels of background around what a screenshot shows."""

PAGE = """<meta charset=utf-8><style>
body { font: 15px sans-serif; width: 900px; } table { border-collapse: collapse; }
td, th { padding: 3px 10px; text-align: right; }
pre { background: #f4f4f4; font-size: 13px; padding: 6px 8px; white-space: pre-wrap; } pre.printed { background: none; }
</style>"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search-s", type=float, default=10.0, help="seconds for running candidate plans")
    arguments = parser.parse_args()
    wanted = Constraints(num_stages=2, max_replicas=1)
    setup = Setup(backends=("eager", "onnxruntime"), store=None)
    result = autosplit.auto(MODEL, constraints=wanted, setup=setup, budget=Budget(search_s=arguments.search_s))
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_atomic(FOLDER / "plan.svg", plot_run(result.report, result.traced.graph).svg())
    with TemporaryDirectory() as scratch:
        pages = Path(scratch)
        autosplit.write_report(result, pages / "report.html", constraints=wanted)
        write_atomic(pages / "terminal.svg", terminal(result))
        write_atomic(pages / "notebook.html", notebook())
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            print(f"no screenshots: none of {', '.join(BROWSERS)} is installed; plan.svg is written")
            return 0
        site = ["--quiet", "--strict", "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(pages / "site")]
        subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", *site], cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        )
        screenshot(browser, pages / "report.html", 1100, 1400)
        screenshot(browser, pages / "report.html", 1100, 1400, "report-dark.png", "--force-dark-mode")
        screenshot(browser, pages / "report.html", 700, 1500, "report-700.png")
        screenshot(browser, pages / "site" / "index.html", 1280, 900, "docs.png")
        screenshot(browser, pages / "terminal.svg", 1000, 1300)
        screenshot(browser, pages / "notebook.html", 960, 2600)
    for path in sorted(FOLDER.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")
    return 0


def terminal(result: autosplit.AutoResult) -> str:
    """What ``autosplit auto`` prints at 80 columns, as SVG."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    for view in (plan_table(result.plan), run_table(result.report), baselines_table(result.report)):
        console.print(view)
    return console.export_svg(title=f"autosplit auto '{MODEL}'")


def notebook() -> str:
    """The first part of the notebook after a run, as HTML."""
    read = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(read, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    return PAGE + "".join(map(cell_html, read.cells[2:8]))


def cell_html(cell: Any) -> str:
    """A cell with what it printed and showed."""
    if cell.cell_type == "markdown":
        title, _, text = cell.source.partition("\n") if cell.source.startswith("#") else ("", "", cell.source)
        return f"<h2>{escape(title.lstrip('# '))}</h2><p>{escape(text)}</p>"
    shown = [f"<pre>{escape(cell.source)}</pre>"]
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            shown.append(f'<img style="max-width:100%" src="data:image/png;base64,{data["image/png"]}">')
        elif "text/html" in data:
            shown.append(data["text/html"])
        else:
            shown.append(f'<pre class="printed">{escape(output.get("text", data.get("text/plain", "")))}</pre>')
    return "".join(shown)


def screenshot(browser: str, page: Path, width: int, height: int, name: str = "", *more: str) -> None:
    """Take a PNG of the top of a page, with a margin in place of all the background around it, in few colours.

    Args:
        browser: path of Chromium.
        page: the file.
        width: of the window, in pixels.
        height: of the window.
        name: of the picture; by default the name of the page.
        more: more flags of the browser.
    """
    taken = page.with_name(name or f"{page.stem}.png")
    size = [f"--window-size={width},{height}", "--hide-scrollbars", f"--screenshot={taken}", "--virtual-time-budget=5000"]
    flags = ["--headless", "--no-sandbox", "--disable-gpu", *more, *size, page.as_uri()]
    subprocess.run([browser, *flags], check=True, capture_output=True, timeout=120)
    image = Image.open(taken).convert("RGB")
    background = image.getpixel((0, image.height - 1))
    drawn = ImageChops.difference(image, Image.new("RGB", image.size, background)).getbbox()
    shown = ImageOps.expand(image.crop(drawn), border=MARGIN, fill=background)
    shown.quantize(COLOURS).save(FOLDER / taken.name, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
