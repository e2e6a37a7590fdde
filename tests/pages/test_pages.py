"""A report page holds all that was measured, loads nothing, and its run file gives the same page."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import autosplit
from autosplit.errors import UsageError
from autosplit.pages import contents as contents_module
from autosplit.pages import writing
from autosplit.pages.contents import Contents, contents_of, read_contents, write_contents
from autosplit.pages.document import report_page
from autosplit.planning.caps import front_rows
from autosplit.values.constraints import Constraints
from autosplit.values.timeline import Action

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"

TEXTS_IN_THE_WAY = """<i id="in-the-way">not checked</i><script>
addEventListener("load", () => setTimeout(() => {
  const hit = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const faults = [];
  for (const plot of document.querySelectorAll(".plotly-graph-div")) {
    const inside = plot.getBoundingClientRect();
    const texts = [...plot.querySelectorAll(".legendtext, .ytick text, .g-xtitle text, .g-ytitle text, .modebar")];
    const boxes = texts.map(text => text.getBoundingClientRect());
    boxes.forEach((box, at) => {
      if (box.left < inside.left - 1 || box.right > inside.right + 1) faults.push("clipped: " + texts[at].textContent);
      boxes.slice(0, at).forEach((other, before) => {
        if (!hit(box, other) || !box.width || !other.width) return;
        faults.push(texts[before].textContent + " over " + texts[at].textContent);
      });
    });
  }
  document.getElementById("in-the-way").textContent = faults.join("; ");
}, 1000));
</script>"""
"""Writes into the page which texts of its charts lie over each other, over the buttons, or outside of their chart."""


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
        front=front_rows(writing._front(result, wanted)),
    )
    return result, contents


def test_every_op_has_its_times_and_the_reason_for_its_place(found: tuple[autosplit.AutoResult, Contents]) -> None:
    result, contents = found
    assert [op.name for op in contents.ops] == [op.name for op in result.traced.graph.ops]
    assert all(len(op.seconds) == 2 and min(op.seconds.values()) > 0 for op in contents.ops)
    pinned = next(op for op in contents.ops if op.name == "linear")
    assert pinned.demands == ["'linear' is pinned to 'cpu:0'"]
    assert contents.stages[pinned.stage].devices == ["cpu:0"]


def test_cuts_are_the_edges_between_stages(found: tuple[autosplit.AutoResult, Contents]) -> None:
    result, contents = found
    assert any(edge.cut for edge in contents.edges)
    assert len(contents.stages) == len(result.plan.stages) == 2
    assert {step.lane for step in contents.schedules["measured"]} == {step.lane for step in contents.schedules["predicted"]}


def test_a_page_draws_requests_without_the_pause_between_rounds() -> None:
    """A round of three requests, a pause, and a round of twenty."""
    starts_s = [0.0, 0.1, 0.2, *(6 + 0.1 * number for number in range(20))]
    actions = [Action("s", 0, number, start_s, start_s + 0.1, "compute") for number, start_s in enumerate(starts_s)]
    drawn = contents_module._steps(actions)
    assert [step.request for step in drawn] == list(range(3, 3 + contents_module.NUM_REQUESTS))
    assert drawn[0].start_s == 0 and contents_module._steps([]) == [] and len(contents_module._steps(actions[:2])) == 2


def test_the_front_is_the_planners_and_keeps_to_the_demands(found: tuple[autosplit.AutoResult, Contents]) -> None:
    _, contents = found
    assert contents.front and all(plan.stages.count("|") == 1 and plan.peak_bytes > 0 for plan in contents.front)
    assert max(plan.items_per_s for plan in contents.front) > 0


def test_a_run_file_gives_the_same_page(found: tuple[autosplit.AutoResult, Contents], tmp_path: Path) -> None:
    _, contents = found
    write_contents(contents, tmp_path / "run.json")
    assert read_contents(tmp_path / "run.json") == contents


def test_a_page_loads_nothing_and_escapes_what_it_shows(found: tuple[autosplit.AutoResult, Contents]) -> None:
    _, contents = found
    page = report_page(contents.model_copy(update={"model": "<script>alert(1)</script>", "notes": ["a < b & c"]}))
    assert "<script>alert(1)" not in page
    assert "a &lt; b &amp; c" in page
    assert contents.verdict.replace("'", "&#x27;") in page
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="', page)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"schema": 99}, "schema version 99"),
        ({"ops": [{"name": "x"}]}, "ops.0"),
        ({"ways": 3}, "ways"),
        ({"runs": [{"date": "", "way": "", "predicted_per_s": float("nan"), "measured_per_s": 1}]}, "predicted_per_s"),
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
def test_a_browser_draws_every_chart(found: tuple[autosplit.AutoResult, Contents], tmp_path: Path) -> None:
    contents = found[1].model_copy(update={"front": found[1].front * 2})
    (tmp_path / "page.html").write_text(report_page(contents) + TEXTS_IN_THE_WAY)
    flags = [*QUIET.split(), "--window-size=700,1000", f"--user-data-dir={tmp_path}", "--virtual-time-budget=9000", "--dump-dom"]
    shown = subprocess.run(
        [str(CHROMIUM), *flags, f"file://{tmp_path}/page.html"], capture_output=True, text=True, timeout=100, check=True
    ).stdout
    assert shown.count('class="main-svg"') >= 6
    assert "predicted items/s" in shown
    assert "stage1: cpu:1, eager" in shown
    assert re.findall(r'<i id="in-the-way">(.*?)</i>', shown) == [""]
