"""Predicted against measured: what counts as a run, and how the errors are summed up."""

from dataclasses import asdict, replace

import pytest

from autosplit.reports.accuracy import Accuracy, Run, StageRun, run_of, runs_of_report
from autosplit.reports.judging import Verdict
from autosplit.reports.outcomes import Outcome
from autosplit.reports.results import LatencyStats, RunStats, StageStats
from autosplit.reports.runreport import RunReport
from autosplit.values.plan import Plan, Prediction, Source, Stage

LATENCY = LatencyStats.of([0.01])
WHOLE = LatencyStats.of([0.009])
COPY = LatencyStats.of([0.001])
WORKER = StageStats("stage0", "cpu:0", 0, "eager", 1, 9, 0, 0, WHOLE, LATENCY, COPY, LATENCY, 0, 0, 0, 0.1)
PLAN = Plan(Source("m:f"), "g", "p", (Stage("stage0", ("a", "b"), ("cpu:0",), load_s=0.011),), Prediction(0, 0, 0, 0, 110.0))


def outcome(plan: Plan = PLAN, fault: str = "") -> Outcome:
    stats = RunStats(9, 0.1, LATENCY, LATENCY, (WORKER,), 0)
    return Outcome(plan, (90.0, 100.0, 105.0), (0.01,), LATENCY, LATENCY, not fault, 0.0, 0.0, stats, fault=fault)


def test_errors_are_shares_of_what_was_measured_and_copies_count_for_the_stage() -> None:
    run = run_of("run", "net", "plan", PLAN, outcome(), "today")
    assert run is not None
    assert (run.error, run.stages[0].error) == (pytest.approx(0.1), pytest.approx(0.1))
    assert run.backends == "eager" and run.spread == pytest.approx(0.15)
    assert Run.from_dict(asdict(run)) == run


def test_what_was_not_predicted_or_gave_wrong_numbers_is_no_run() -> None:
    unknown = replace(PLAN, prediction=replace(PLAN.prediction, throughput_per_s=0.0))
    assert run_of("run", "net", "plan", unknown, outcome(unknown), "today") is None
    assert run_of("run", "net", "plan", PLAN, outcome(fault="backend 'x' gives wrong numbers"), "today") is None
    with pytest.raises(ValueError, match="0 items/s"):
        Run.from_dict({**asdict(run_of("run", "net", "plan", PLAN, outcome(), "today")), "measured_per_s": 0})


def test_a_way_with_two_names_counts_once() -> None:
    both = outcome()
    report = RunReport("net", 1, {"plan": both, "one device": both, "replicas": outcome()}, Verdict("plan", "", True))
    assert [run.way for run in runs_of_report(report, "today")] == ["plan", "replicas"]


def test_the_summary_gives_median_and_worst_size_for_all_each_shape_and_each_kind() -> None:
    told = enumerate((1.0, 0.8))
    stages = tuple(StageRun("s", f"cpu:{number}", "eager", 1, 1, predicted, 1.0) for number, predicted in told)
    runs = [
        Run(kind, "net", "plan", "h", "f32", predicted, 100.0, 0.0, stages, "today")
        for kind, predicted in (("run", 98.0), ("run", 103.0), ("searched", 150.0))
    ]
    every, replicated, ran, *_ = Accuracy(tuple(runs)).summary()
    assert (every["shape"], replicated["shape"], replicated["runs"]) == ("all", "1 stage, replicated", 3)
    assert (every["runs"], every["median_error"], every["worst_error"]) == (3, pytest.approx(0.03), pytest.approx(0.5))
    assert (ran["kind"], ran["runs"], ran["worst_error"]) == ("run", 1 + 1, pytest.approx(0.03))
    assert every["workers"] == 6 and every["worst_stage_error"] == pytest.approx(0.2)
    assert len(Accuracy(tuple(runs)).frame()) == 3 and "<table>" in Accuracy(tuple(runs))._repr_html_()


def test_workers_that_share_a_device_have_no_error_of_their_own() -> None:
    stages = tuple(
        StageRun(device, device, "eager", 1, 1, predicted, 1.0) for device, predicted in (("a", 0.5), ("b", 0.9), ("a", 0.5))
    )
    run = Run("run", "net", "plan", "h", "f32", 98.0, 100.0, 0.0, stages, "today")
    assert [stage.device for stage in run.undisturbed] == ["b"] and run.row()["workers"] == 3
    [every, *_] = Accuracy((run,)).summary()
    assert (every["workers"], every["worst_stage_error"]) == (1, pytest.approx(0.1))
