"""Tables for the terminal: units, alignment, and words that look like markup."""

import io
import re
from dataclasses import replace
from typing import Any

from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, Group

from autosplit.commands.measuring import DETAILS
from autosplit.commands.report import baselines_table, plan_table, run_table, table
from autosplit.reports.judging import Verdict
from autosplit.reports.outcomes import Outcome
from autosplit.reports.results import LatencyStats, RunStats, StageStats
from autosplit.reports.runreport import RunReport
from autosplit.tables import cell, heading
from autosplit.values.plan import Plan, Prediction, Source, Stage
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Samples, Setting

STAGES = (Stage("stage0", ("a", "b"), ("cpu:0",), load_s=0.004), Stage("stage1", ("c",), ("cpu:1",), load_s=0.006))
PLAN = Plan(Source("m:f"), "g", "p", STAGES, Prediction(0.006, 0.01, 0.006, 0.0, 166.7), method="dp", status="optimal")
LATENCY = LatencyStats.of([0.01])
WORKERS = tuple(
    StageStats(s.name, s.devices[0], 0, "eager", 1, 9, 0, 0, LATENCY, LATENCY, LATENCY, LATENCY, 2**20, 2**21, 3 * 2**20, 0.5)
    for s in STAGES
)
STATS = RunStats(9, 1.0, LATENCY, LATENCY, WORKERS, 2)
REPORT = RunReport(
    "mlp",
    4,
    {"plan": Outcome(PLAN, (150.0, 160.0, 155.0), (0.01,), LATENCY, LATENCY, True, 0.0, 0.0, STATS)},
    Verdict("plan", "No baseline fits.", False),
    {"replicas": "weights [bold]too large[/bold]"},
)


def text(made: Group, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(made)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_plan_table_has_stages_and_prediction() -> None:
    shown = text(plan_table(PLAN))
    assert "predicted: 166.7 items/s, 10.00 ms a request; no plan can be better\n" in shown
    assert "no plan can be better (optimal, gap 0.00%, dp)" in text(plan_table(PLAN, verbose=True))
    assert "4.00 ms" in shown
    assert "stage1" in shown


def test_the_run_table_has_predicted_beside_measured() -> None:
    shown = text(run_table(REPORT))
    for word in ("predicted", "busy", "wait", "transfer", "4.00 ms", "10.00 ms", "4 items a request"):
        assert word in shown
    assert "2.0 MiB" in text(run_table(REPORT, verbose=True))


def test_the_baselines_table_says_why_and_keeps_brackets() -> None:
    shown = text(baselines_table(REPORT))
    assert "155" in shown
    assert "items/s" in shown
    assert "No baseline fits." in shown
    assert "'replicas' was left out: weights [bold]too large[/bold]" in shown


def test_tables_of_a_run_fit_80_columns_and_mark_the_chosen_plan_in_front() -> None:
    outcome = REPORT.outcomes["plan"]
    named = {"plan": outcome, "even split (onnxruntime), 2 at a time": replace(outcome, rounds_per_s=(11000.0, 10001.0))}
    shown = text(baselines_table(replace(REPORT, outcomes=named, verdict=Verdict("plan", "Why.", True))), 80)
    assert [line.split()[:2] for line in shown.splitlines() if line.strip().startswith("*")] == [["*", "plan"], ["*", "Why."]]
    for made in (shown, text(run_table(REPORT), 80), text(plan_table(PLAN), 80)):
        assert max(map(len, made.splitlines())) <= 80 and made.count("───") and len(re.findall("^ ─+ $", made, re.M)) == 1


def test_missing_values_are_dashes_and_columns_can_be_left_out() -> None:
    shown = text(table([{"a_s": float("nan"), "b": "[x]", "c": 3}, {"a_s": 0.5, "b": "y", "c": True}], hide=["c"]))
    assert "-" in shown
    assert "[x]" in shown
    assert "500.00 ms" in shown
    assert "True" not in shown


def test_an_empty_table() -> None:
    assert "nothing" in text(table([], "nothing"))


WORD = st.text("abc:+()", min_size=1, max_size=14)
VALUES = st.one_of(st.none(), st.integers(0, 10**9), st.lists(WORD, max_size=12).map(" ".join))
NAMES = st.lists(
    st.lists(st.text("xyz", min_size=1, max_size=9), min_size=1, max_size=3).map("_".join), min_size=1, max_size=9, unique=True
)


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), NAMES, st.integers(60, 160))
def test_a_table_fits_its_width_and_breaks_no_word(data: st.DataObject, names: list[str], width: int) -> None:
    rows = data.draw(st.lists(st.fixed_dictionaries(dict.fromkeys(names, VALUES)), min_size=1, max_size=4))
    shown = text(table(rows), width)
    assert all(len(line) <= width for line in shown.splitlines())
    wanted = {word for row in rows for name in names for word in f"{heading(name)} {cell(name, row[name])}".split()}
    assert wanted <= set(shown.split())


def test_columns_that_find_no_room_go_on_below_beside_what_tells_rows_apart() -> None:
    rows: list[dict[str, Any]] = [{"network": "net", "stage": f"s{n}", **{f"column{k}": 10**9 for k in range(8)}} for n in (0, 1)]
    lines = [line.split() for line in text(table(rows), 80).splitlines() if "column" in line or " s1 " in line]
    assert [line[:2] for line in lines] == [["network", "stage"], ["net", "s1"]] * 2
    assert [word for line in lines[::2] for word in line[2:]] == [f"column{k}" for k in range(8)]


def test_measurements_and_workers_fit_80_columns_in_one_table() -> None:
    """A second table held the column 'transfer' alone, and one of a profile what only its makers read."""
    setting, number = Setting("cpu:0-15", "onnxruntime", 16), Samples((123.4e-6, 160e-6))
    summary = Profile("m", "g", {}, {setting: Measured({}, whole=number, alone=number, refused={"a": "why"})}).summary()
    wide = replace(PLAN, stages=tuple(replace(stage, backend="onnxruntime") for stage in STAGES))
    report = replace(REPORT, outcomes={"plan": replace(REPORT.plan, plan=wide)})
    for made in (table(summary, hide=DETAILS), run_table(report)):
        assert len([line for line in text(made, 80).splitlines() if "───" in line]) == 1
