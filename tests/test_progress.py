"""What the bars show, and to whom."""

import io
import re
import warnings
from types import SimpleNamespace

import pytest
from rich.console import Console

from autosplit import progress
from autosplit.progress import StepTimes, bars, between, notebook_bars, progress_shown, quiet


def test_brackets_in_what_is_being_done_are_shown_as_they_are() -> None:
    """Rich takes them for markup, and raises MarkupError where what looks like a tag is closed and was not open."""
    out = io.StringIO()
    with bars(Console(file=out, force_terminal=True, width=120)) as report:
        report("search", 0.5, "cannot read [/tmp/model.onnx]")
    assert "cannot read [/tmp/model.onnx]" in out.getvalue()


def test_a_long_text_leaves_room_for_the_bar() -> None:
    """In 80 columns the name of the step, the bar and the time left became dots."""
    out = io.StringIO()
    with bars(Console(file=out, force_terminal=True, color_system=None, width=80)) as report:
        report("search", 0.5, "measuring 6 ops on cpu:0+cpu:1 (onnxruntime): 10494 items/s predicted (optimal, gap 0.00 %)")
    assert re.search(r"  search ━{12}╸? *━* +50% 0:00:00 -:--:-- measuring 6 ops", out.getvalue())


def test_every_step_has_a_bar_of_its_own_that_ends_at_100_percent() -> None:
    out = io.StringIO()
    with bars(Console(file=out, force_terminal=True, color_system=None, width=80)) as report:
        report("trace", 0.0, "loading")
        report("search", 0.5, "measuring")
    last = out.getvalue()[out.getvalue().rindex("  trace") :]
    assert re.search(r"trace ━{24} 100%.*\n.*search ━{24} 100%", last), last


def test_bars_are_drawn_only_where_a_person_looks_on() -> None:
    with progress_shown(True) as report:  # stderr is captured here
        assert report is quiet
    with progress_shown(False) as report:
        assert report is quiet
    told: list[tuple[str, float, str]] = []
    with progress_shown(lambda *now: told.append(now)) as report:
        between(report, 0.5, 1.0)("run", 0.5, "round 1")
    assert told == [("run", 0.75, "round 1")]


def test_a_notebook_shows_bars_without_ipywidgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich draws nothing in a notebook without ipywidgets, and warned once for each report."""
    drawn: list[str] = []
    output = SimpleNamespace(update=lambda page: drawn.append(page.data))
    monkeypatch.setattr("IPython.display.display", lambda page, display_id: output)
    with warnings.catch_warnings(), notebook_bars() as report:
        warnings.simplefilter("error")
        report("trace", 0.0, "loading a<b>")
        report("search", 0.5, "measuring")
    assert 'value="0.000"' in drawn[0] and "loading a&lt;b&gt;" in drawn[0]
    assert re.findall("[0-9]+%", drawn[1]) == ["100%", "50%"] and "measuring" in drawn[1]
    assert re.findall("[0-9]+%", drawn[-1]) == ["100%", "100%"] and "measuring" not in drawn[-1]


def test_the_seconds_of_a_text_end_with_the_next_one_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, seen = iter([0.0, 1.0, 1.5, 4.0, 6.0, 9.0]), []
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now_s))
    times = StepTimes(lambda *told: seen.append(told), 2.5)
    for text in ["preparing", "preparing", "timing", "done", "timing"]:
        times("profile", 0.5, text)
    assert times.seconds == {"start": 2.5, "preparing": 3.0, "timing": 2.0}
    assert times.steps_s == {"start": 2.5, "profile": 9.0}
    assert seen[0] == ("profile", 0.5, "preparing") and len(seen) == 5
