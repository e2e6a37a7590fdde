"""A report page holds all that was measured, loads nothing, and its run file gives the same page."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

import autosplit
from autosplit.errors import UsageError
from autosplit.pages import writing
from autosplit.pages.contents import NUM_REQUESTS, Contents, contents_of, first_requests, read_contents, write_contents
from autosplit.pages.document import report_page
from autosplit.values.constraints import Constraints
from autosplit.values.timeline import Action

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
MAX_BYTES = 1_500_000

CHECK = """<i id="check">not checked</i><script>
addEventListener("load", () => {
  const faults = [];
  if (document.body.scrollWidth > innerWidth) faults.push("wider than the window: " + document.body.scrollWidth);
  for (const drawing of document.querySelectorAll("svg")) {
    const inside = drawing.getBoundingClientRect();
    for (const text of drawing.querySelectorAll("g[id], text, use")) {
      const box = text.getBoundingClientRect();
      if (box.left < inside.left - 1 || box.right > inside.right + 1) faults.push("clipped in " + drawing.ariaLabel);
    }
  }
  for (const option of document.querySelectorAll("code"))
    if (option.getClientRects().length > 1) faults.push("broken: " + option.textContent);
  document.querySelector("circle").dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
  document.getElementById("check").textContent = faults.join("; ") || document.getElementById("op").textContent;
});
</script>"""
"""Writes into the page what is wrong with its layout, or else the text about its first op."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[autosplit.AutoResult, Contents]:
    setup = autosplit.Setup(backends=["eager"], store=tmp_path_factory.mktemp("store"), progress=False)
    spent = autosplit.Budget(search_s=0, num_rounds=2, num_requests=12)
    wanted = Constraints(num_stages=2, max_replicas=1, pins={"linear": "cpu:0"})
    result = autosplit.auto("autosplit.examples.mlp:mlp?depth=4&width=32", "cpu:0,cpu:1", wanted, setup=setup, budget=spent)
    contents = contents_of(
        result.report,
        result.traced.graph,
        result.machine,
        profile=result.profile,
        constraints=wanted,
        candidates=result.search.rows(),
        front=writing._front(result, wanted),
    )
    return result, contents


@pytest.fixture(scope="module")
def page(found: tuple[autosplit.AutoResult, Contents]) -> str:
    return report_page(found[1])


def test_every_op_has_its_times_and_the_reason_for_its_place(found: tuple[autosplit.AutoResult, Contents], page: str) -> None:
    result, contents = found
    assert list(contents.seconds) == [op.name for op in result.traced.graph.ops]
    assert all(len(seconds) == 2 and min(seconds.values()) > 0 for seconds in contents.seconds.values())
    assert contents.demands["linear"] == ["'linear' is pinned to 'cpu:0'"]
    assert page.count("<circle ") == len(contents.graph.ops) and 'class="cut"' in page
    assert "linear is pinned" not in page and "'linear' is pinned to 'cpu:0'" in page


def test_schedules_show_the_same_requests(found: tuple[autosplit.AutoResult, Contents]) -> None:
    predicted, measured = found[1].schedules["predicted"], found[1].schedules["measured"]
    assert {action.lane for action in predicted} == {action.lane for action in measured}
    requests = {action.request for action in measured}
    assert requests == {action.request for action in predicted} == set(range(len(requests)))
    assert min(action.start_s for action in predicted) == min(action.start_s for action in measured) == 0.0


def test_a_schedule_has_no_pause_between_rounds() -> None:
    """A round of three requests, a pause, and a round of twenty."""
    starts_s = [0.0, 0.1, 0.2, *(6 + 0.1 * number for number in range(20))]
    actions = [Action("s", 0, number, start_s, start_s + 0.1, "compute") for number, start_s in enumerate(starts_s)]
    drawn = first_requests(actions)
    assert [action.request for action in drawn] == list(range(NUM_REQUESTS))
    assert (drawn[0].start_s, drawn[-1].end_s) == (0, pytest.approx(0.1 * NUM_REQUESTS))
    assert first_requests([]) == [] and len(first_requests(actions[:2])) == 2


def test_the_front_is_the_planners_and_marks_the_chosen_way(found: tuple[autosplit.AutoResult, Contents], page: str) -> None:
    _, contents = found
    assert contents.front and all(str(plan["stages"]).count("|") == 1 for plan in contents.front)
    assert page.count("(chosen)") == 2, "once among the measured ways, once in the front"


def test_a_page_begins_with_model_machine_date_command_and_versions(page: str) -> None:
    header = page[page.index("<h1>") : page.index('<p class="verdict')]
    assert re.findall("<th>(.*?)</th>", header) == ["model", "machine", "date", "command", "versions"]
    assert "autosplit.examples.mlp:mlp?depth=4&amp;width=32" in header and "cpu:0, cpu:1" in header
    assert f"autosplit {version('autosplit')}, python" in header and re.search(r"<td>20\d\d-\d\d-\d\d \d\d:\d\d UTC</td>", header)


def test_a_page_is_small_and_loads_nothing(page: str) -> None:
    assert len(page.encode()) < MAX_BYTES
    assert not re.search(r'<(link|img|iframe|object)\b|\b(src|href)="(?!#)|@import|url\((?!#)|fetch\(|XMLHttp|import\(', page)


def test_a_run_file_gives_the_same_page(found: tuple[autosplit.AutoResult, Contents], tmp_path: Path) -> None:
    """Also that of a run whose outputs differ by an infinite number."""
    _, contents = found
    wrong = replace(contents.report.plan, max_abs_error=math.inf, max_relative_error=math.nan)
    report = replace(contents.report, outcomes={**contents.report.outcomes, "wrong": wrong})
    contents = contents.model_copy(update={"report": report})
    write_contents(contents, tmp_path / "run.json")
    read = read_contents(tmp_path / "run.json")
    assert read.report.outcomes["wrong"].max_abs_error == math.inf
    assert report_page(read) == report_page(contents)


def test_a_page_escapes_what_it_shows_and_keeps_options_whole(found: tuple[autosplit.AutoResult, Contents]) -> None:
    contents = found[1]
    report = found[0].report
    strange = replace(report, model="<script>alert(1)</script>", notes=("a < b & c; --isolate rules it out",))
    page = report_page(contents.model_copy(update={"report": strange}))
    assert "<script>alert(1)" not in page
    assert "a &lt; b &amp; c; <code>--isolate</code> rules it out" in page
    assert contents.report.sentence.replace("'", "&#x27;") in page


@pytest.mark.parametrize(
    "change,words",
    [
        ({"schema": 99}, "schema version 99"),
        ({"graph": {"name": "x"}}, "graph.ops"),
        ({"report": 3}, "report"),
        ({"more": 3}, "more"),
    ],
)  # fmt: skip
def test_a_broken_run_file_is_refused_in_a_sentence(
    found: tuple[autosplit.AutoResult, Contents], tmp_path: Path, change: dict[str, object], words: str
) -> None:
    write_contents(found[1], tmp_path / "run.json")
    data = json.loads((tmp_path / "run.json").read_text()) | change
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match=re.escape(words)):
        read_contents(tmp_path / "run.json")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [700, 1200])
def test_a_browser_draws_every_chart_inside_the_page(page: str, tmp_path: Path, width: int) -> None:
    (tmp_path / "page.html").write_text(page + CHECK)
    flags = [*QUIET.split(), f"--window-size={width},1000", f"--user-data-dir={tmp_path}", "--virtual-time-budget=3000"]
    shown = subprocess.run(
        [str(CHROMIUM), *flags, "--dump-dom", f"file://{tmp_path}/page.html"],
        capture_output=True, text=True, timeout=100, check=True,
    ).stdout  # fmt: skip
    [checked] = re.findall(r'<i id="check">(.*?)</i>', shown, re.DOTALL)
    assert checked.startswith("linear: aten.")
