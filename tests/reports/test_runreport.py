"""Which way is chosen, and the sentence that says why: never one that measured slower than a baseline."""

from dataclasses import replace

import pytest

from autosplit.reports.results import LatencyStats, RunStats
from autosplit.reports.runreport import PLAN, Outcome, RunReport, Unfit, judge
from autosplit.values.plan import Plan, Prediction, Source, Stage

STATS = RunStats(4, 1.0, LatencyStats.of([0.1]), LatencyStats.of([0.0]), (), 0)
MADE = Plan(Source("m:f"), "g", "p", (Stage("stage0", ("a",), ("cpu:0",)),), Prediction(0.1, 0.1, 0.1, 0.0, 10.0))


def outcome(*rounds_per_s: float, latency_s: float = 0.1, equal: bool = True) -> Outcome:
    latency = LatencyStats.of([latency_s])
    return Outcome(MADE, rounds_per_s, (latency_s,), latency, latency, equal, 0.0, 0.0, STATS)


def test_a_faster_baseline_becomes_the_plan() -> None:
    chosen, sentence = judge({PLAN: outcome(10, 10), "replicas": outcome(12, 12)}, "throughput", forced=False)
    assert (chosen, "1.20 times as fast as the plan, so it becomes the plan" in sentence) == ("replicas", True)


def test_rivals_are_judged_by_all_rounds_that_they_ran_beside_each_other() -> None:
    ways = {PLAN: outcome(8, 8), "a": outcome(10, 10, 11, 11, 11), "b": outcome(10.1, 10.1, 10, 10, 10), "slow": outcome(2)}
    chosen, sentence = judge(ways, "throughput", forced=False)
    assert chosen == "a" and "1.25 times as fast as the plan" in sentence
    assert sentence.endswith("'b' is further ahead of the plan, but in all rounds of both 'a' was 1.10 times as fast.")
    assert ways["slow"].faster_than(ways["a"], "throughput") == 0.2


def test_a_way_ahead_of_the_plan_is_not_put_aside_for_one_that_is_not() -> None:
    ways = {PLAN: outcome(10, 10, 10), "a": outcome(10.4, 10.4, 5), "b": outcome(9, 10.9, 10)}
    assert ways["b"].faster_than(ways["a"], "throughput") > 1 >= ways["b"].faster_than(ways[PLAN], "throughput")
    chosen, sentence = judge(ways, "throughput", forced=False)
    assert chosen == "a" and "1.04 times as fast as the plan" in sentence and "further" not in sentence


def test_a_forced_plan_is_kept_and_the_sentence_says_so() -> None:
    chosen, sentence = judge({PLAN: outcome(10), "replicas": outcome(12)}, "throughput", forced=True)
    assert chosen == PLAN and "kept because its shape was asked for" in sentence


def test_a_way_that_breaks_a_demand_is_not_chosen_however_fast_it_is() -> None:
    rates = {PLAN: 10, "replicas": 13, "all cores": 12, "slow": 5}
    ways = {name: replace(outcome(rate), plan=replace(MADE, chosen=name)) for name, rate in rates.items()}

    def unfit(*names: str) -> Unfit:
        return lambda way, latency_s: ["it has 2 replicas"] if way.chosen in names else []

    chosen, sentence = judge(ways, "throughput", False, unfit("replicas"))
    assert chosen == "all cores" and "'all cores' measures 1.20 times as fast as the plan" in sentence
    assert judge(ways, "throughput", False, unfit("replicas", "all cores")) == (
        PLAN,
        "'replicas' measures 1.30 times as fast as the plan; the plan is kept because that way is not what was asked for: "
        "it has 2 replicas.",
    )
    chosen, sentence = judge({**ways, PLAN: outcome(20)}, "throughput", False, unfit("replicas"))
    assert chosen == PLAN and "as fast as the best baseline, 'all cores'" in sentence


def test_rounds_are_compared_one_by_one_so_that_drift_cancels() -> None:
    chosen, _ = judge({PLAN: outcome(10, 5, 2.1), "replicas": outcome(9, 4.5, 9)}, "throughput", forced=False)
    assert chosen == PLAN


def test_a_way_with_wrong_numbers_is_never_chosen() -> None:
    assert judge({PLAN: outcome(10), "replicas": outcome(99, equal=False)}, "throughput", forced=False)[0] == PLAN


@pytest.mark.parametrize("rate", [5, 20])
def test_a_plan_with_wrong_numbers_gives_way_to_one_with_right_ones_however_fast_it_is(rate: float) -> None:
    ways = {PLAN: outcome(rate, equal=False), "slow": outcome(3), "wrong": outcome(99, equal=False), "right": outcome(10)}
    assert judge(ways, "throughput", forced=False) == ("right", "The plan gives wrong numbers, so 'right' becomes the plan.")
    assert judge(ways, "throughput", forced=True)[0] == PLAN
    assert judge({PLAN: ways[PLAN], "wrong": ways["wrong"]}, "throughput", forced=False)[0] == PLAN


def test_latency_is_judged_by_the_request_alone() -> None:
    ways = {PLAN: outcome(10, latency_s=0.2), "all cores": outcome(1, latency_s=0.1)}
    assert judge(ways, "latency", forced=False)[0] == "all cores"


def test_rounds_of_requests_alone_are_compared_one_by_one_so_that_drift_cancels() -> None:
    """The machine was slow in the last two rounds; the other way stopped before, and has the lower median for that."""
    plan, other = replace(outcome(10), alone_s=(0.1, 0.2, 0.2)), replace(outcome(10), alone_s=(0.11,))
    assert judge({PLAN: plan, "all cores": other}, "latency", forced=False) == (
        PLAN,
        "The plan measures 1.10 times as low a latency as the best baseline, 'all cores'.",
    )


def test_a_report_of_a_plan_for_latency_shows_that_first() -> None:
    made = replace(outcome(10, latency_s=0.2), plan=replace(MADE, objective="latency"))
    report = RunReport("net", 1, {PLAN: made, "all cores": outcome(5, latency_s=0.1)}, "all cores", "why")
    first, second = report.rows()
    assert (first["way"], first["of_plan"], second["way"], second["predicted_s"]) == ("all cores", 2.0, PLAN, 0.1)
    assert list(first)[3:7] == ["latency_p50_s", "spread", "predicted_s", "items_per_s"]


def test_a_way_that_ran_in_one_round_has_no_spread() -> None:
    """It was shown as 0.0 %, the steadiest of all."""
    report = RunReport("net", 1, {PLAN: outcome(10, 12), "slow": outcome(2)}, PLAN, "why")
    spreads = [row["spread"] for row in report.rows()]
    assert spreads[0] == pytest.approx(2 / 11) and spreads[1] != spreads[1]


def test_a_plan_that_is_a_baseline_is_called_one() -> None:
    same = outcome(10)
    assert judge({PLAN: same, "replicas": same, "all cores": outcome(5)}, "throughput", forced=False) == (
        PLAN,
        "The plan is the baseline 'replicas', and no other one measures better.",
    )


def test_without_a_baseline_there_is_nothing_to_compare() -> None:
    chosen, sentence = judge({PLAN: outcome(10)}, "throughput", forced=False)
    assert chosen == PLAN and "nothing to compare it with" in sentence


@pytest.mark.parametrize("chosen", [PLAN, "replicas"])
def test_the_report_gives_the_figures_of_the_chosen_way(chosen: str) -> None:
    fast = replace(outcome(12), max_abs_error=0.5)
    report = RunReport("net", 1, {PLAN: outcome(10), "replicas": fast}, chosen, "why")
    data = report.to_dict()
    assert data["throughput_per_s"] == (10 if chosen == PLAN else 12)
    assert data["max_abs_error"] == (0 if chosen == PLAN else 0.5)
    assert data["baselines"] == {"replicas": 12}
    assert repr(report) == "RunReport('net', 2 ways: why)"
    assert repr(report.plan.plan).startswith("Plan(1 ops on cpu:0 (eager): 10 items/s predicted")
    assert "net, 1 item a request: why" in report._repr_html_() and list(report.frame().index) == ["replicas", PLAN]
