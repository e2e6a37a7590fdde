"""Which plan is chosen, and the sentence that says why: a baseline only where the rounds tell it from the plan."""

from dataclasses import replace

import pytest

from autosplit.reports.judging import Unfit, Verdict, decide
from autosplit.reports.outcomes import PLAN, Outcome, Ratio
from autosplit.reports.results import LatencyStats, RunStats
from autosplit.reports.runreport import RunReport
from autosplit.values.plan import UNKNOWN, Plan, Prediction, Source, Stage

STATS = RunStats(4, 1.0, LatencyStats.of([0.1]), LatencyStats.of([0.0]), (), 0)
MADE = Plan(Source("m:f"), "g", "p", (Stage("stage0", ("a",), ("cpu:0",)),), Prediction(0.1, 0.1, 0.1, 0.0, 10.0))


def outcome(*rounds_per_s: float, latency_s: float = 0.1, equal: bool = True) -> Outcome:
    """A plan that ran in these rounds; one figure stands for two equal rounds."""
    rounds = rounds_per_s if len(rounds_per_s) > 1 else rounds_per_s * 2
    latency = LatencyStats.of([latency_s])
    return Outcome(MADE, rounds, (latency_s,) * len(rounds), latency, latency, equal, 0.0, 0.0, STATS)


def judged(outcomes: dict[str, Outcome], objective: str = "throughput", forced: bool = False, **more: Unfit) -> tuple[str, str]:
    verdict = decide(outcomes, objective, forced, **more)
    return verdict.chosen, verdict.sentence


def test_a_faster_baseline_becomes_the_plan() -> None:
    verdict = decide({PLAN: outcome(10, 10), "replicas": outcome(12, 12.4)}, "throughput", forced=False)
    words = "'replicas' measures 1.22 times as fast as the plan (1.20 to 1.24 in 2 rounds), so it is the chosen way."
    assert verdict == Verdict("replicas", words, sure=True)


@pytest.mark.parametrize(("rate", "bound_s"), [(20.0, 0.05), (8.0, 0.1)])
def test_a_baseline_without_a_prediction_is_a_plan_with_its_measured_figures_and_a_bound(rate: float, bound_s: float) -> None:
    """A compiled baseline has no profile: the plan said "nothing predicted, no bound"."""
    compiled = outcome(rate)
    compiled = replace(compiled, plan=replace(compiled.plan, prediction=UNKNOWN))
    report = RunReport("m", 1, {PLAN: outcome(10), "compiled": compiled}, Verdict("compiled", "", True))
    told = report.best_plan.prediction
    assert (told.throughput_per_s, told.bound_s) == (rate, bound_s) and "no bound" not in report.best_plan.summary()
    assert replace(report, verdict=Verdict(PLAN, "", True)).best_plan == MADE


def test_one_round_never_changes_the_plan() -> None:
    """A baseline that ran for one round became the plan as 3.13 times as fast, beside a spread of 677 %."""
    fast = replace(outcome(31.3), rounds_per_s=(31.3,))
    verdict = decide({PLAN: outcome(10, 10), "replicas": fast}, "throughput", forced=False)
    assert (verdict.chosen, verdict.sure) == (PLAN, False)
    assert verdict.sentence.startswith("One round cannot tell the plan from 'replicas'")


@pytest.mark.parametrize(
    ("rounds_per_s", "words"),
    [
        ((15, 9, 13, 12, 14), "The machine was busy: cannot tell the plan from 'replicas' (the plan measured 0.77 times as fast"),
        ((10.1, 9.9, 10.1, 10.2, 9.95), "The plan and the best baseline, 'replicas', are level within the noise"),
    ],
)
def test_a_difference_within_the_noise_changes_nothing_and_is_an_answer(rounds_per_s: tuple[float, ...], words: str) -> None:
    verdict = decide({PLAN: outcome(*[10.0] * 5), "replicas": outcome(*rounds_per_s)}, "throughput", forced=False)
    assert (verdict.chosen, verdict.sure) == (PLAN, False) and verdict.sentence.startswith(words)


EIGHT = replace(
    MADE, stages=tuple(Stage(f"s{n}", ("a",), ("cpu:0",), backend=("eager", "openvino", "onnxruntime")[n % 3]) for n in range(8))
)


@pytest.mark.parametrize(
    ("plan_per_s", "chosen", "words"),
    [
        (
            (10.1, 9.9, 10.0, 10.05, 9.95),
            "replicas",
            "The plan and 'replicas' are level within the noise (the plan measured 1.00 times as fast, 0.99 to 1.01 in 5 "
            "rounds). 'replicas' is the chosen way because it is simpler: 1 stage instead of 8 and 1 backend instead of 3.",
        ),
        (
            (10.2, 9.0, 10.1, 8, 14),
            "replicas",
            "The machine was busy: cannot tell the plan from 'replicas' (the plan measured 1.01",
        ),
        ((11, 9.0, 11, 8, 14), PLAN, "The machine was busy: cannot tell the plan from 'replicas' (the plan measured 1.10"),
        ((10.4, 10.5, 10.4), PLAN, "The plan measures 1.04 times as fast as the best baseline"),
        ((9.9,), PLAN, "One round cannot tell the plan from 'replicas'"),
    ],
)
def test_a_simpler_baseline_that_is_level_becomes_the_plan(plan_per_s: tuple[float, ...], chosen: str, words: str) -> None:
    """A plan of eight stages over three backends was kept beside replicas that were as fast."""
    plan = replace(outcome(10), plan=EIGHT, rounds_per_s=plan_per_s)
    outcomes = {PLAN: plan, "replicas": outcome(*[10.0] * 5)}
    verdict = decide(outcomes, "throughput", forced=False)
    assert verdict.chosen == chosen and verdict.sentence.startswith(words)
    assert decide(outcomes | {"even split": plan}, "throughput", forced=False).chosen == chosen
    assert decide(outcomes, "throughput", forced=True).chosen == PLAN
    assert decide(outcomes, "throughput", forced=False, unfit=lambda other, s: ["8 stages were asked for"]).chosen == PLAN


def test_the_interval_leaves_out_the_outermost_rounds_where_there_are_many() -> None:
    assert Ratio.of([1.3]) == Ratio(1.3, 1.3, 1.3, 1) and not Ratio.of([1.3]).ahead
    assert Ratio.of([0.2, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 9.0]) == Ratio(1.35, 1.1, 1.6, 8)
    assert Ratio.of([0.9, 1.1, 1.2, 1.3, 1.4]) == Ratio(1.2, 0.9, 1.4, 5)


def test_rivals_are_judged_by_all_rounds_that_they_ran_beside_each_other() -> None:
    outcomes = {PLAN: outcome(8, 8), "a": outcome(10, 10, 11, 11, 11), "b": outcome(10.1, 10.1, 10, 10, 10), "slow": outcome(2)}
    chosen, sentence = judged(outcomes)
    assert chosen == "a" and "1.25 times as fast as the plan" in sentence
    assert outcomes["slow"].against(outcomes["a"], "throughput").median == 0.2


def test_a_baseline_ahead_of_the_plan_is_not_put_aside_for_one_that_is_not() -> None:
    outcomes = {PLAN: outcome(10, 10, 10), "a": outcome(10.4, 10.4, 10.1), "b": outcome(9, 10.9, 10.6)}
    assert outcomes["b"].against(outcomes["a"], "throughput").median > 1
    chosen, sentence = judged(outcomes)
    assert chosen == "a" and "1.04 times as fast as the plan" in sentence


def test_a_plan_that_was_given_is_kept_and_the_sentence_says_so() -> None:
    chosen, sentence = judged({PLAN: outcome(10), "replicas": outcome(12)}, forced=True)
    assert chosen == PLAN and sentence.endswith("the plan stays the chosen way because it was given.")


def test_a_baseline_that_breaks_a_demand_is_not_chosen_however_fast_it_is() -> None:
    rates = {PLAN: 10, "replicas": 13, "all cores": 12, "slow": 5}
    outcomes = {name: replace(outcome(rate), plan=replace(MADE, chosen=name)) for name, rate in rates.items()}

    def unfit(*names: str) -> Unfit:
        return lambda other, latency_s: ["it has 2 replicas"] if other.chosen in names else []

    chosen, sentence = judged(outcomes, unfit=unfit("replicas"))
    assert chosen == "all cores" and "'all cores' measures 1.20 times as fast as the plan" in sentence
    assert judged(outcomes, unfit=unfit("replicas", "all cores")) == (
        PLAN,
        "'replicas' measures 1.30 times as fast as the plan (1.30 to 1.30 in 2 rounds); the plan stays the chosen way "
        "because that baseline is not what was asked for: it has 2 replicas.",
    )
    chosen, sentence = judged({**outcomes, PLAN: outcome(20)}, unfit=unfit("replicas"))
    assert chosen == PLAN and "as fast as the best baseline, 'all cores'" in sentence


def test_rounds_are_compared_one_by_one_so_that_drift_cancels() -> None:
    verdict = decide({PLAN: outcome(10, 5, 2.1), "replicas": outcome(9, 4.5, 2)}, "throughput", forced=False)
    assert verdict.sure and "The plan measures 1.11 times as fast as the best baseline" in verdict.sentence


def test_a_baseline_with_wrong_numbers_is_never_chosen() -> None:
    assert judged({PLAN: outcome(10), "replicas": outcome(99, equal=False)})[0] == PLAN


@pytest.mark.parametrize("rate", [5, 20])
def test_a_plan_with_wrong_numbers_gives_way_to_one_with_right_ones_however_fast_it_is(rate: float) -> None:
    outcomes = {PLAN: outcome(rate, equal=False), "slow": outcome(3), "wrong": outcome(99, equal=False), "right": outcome(10)}
    assert judged(outcomes) == ("right", "The plan gives wrong numbers, so 'right' is the chosen way.")
    assert judged(outcomes, forced=True) == (PLAN, "The plan gives wrong numbers, and stays the chosen way because it was given.")
    assert judged({PLAN: outcomes[PLAN], "wrong": outcomes["wrong"]})[0] == PLAN


def test_latency_is_judged_by_the_request_alone() -> None:
    outcomes = {PLAN: outcome(10, latency_s=0.2), "all cores": outcome(1, latency_s=0.1)}
    assert judged(outcomes, "latency")[0] == "all cores"


def test_rounds_of_requests_alone_are_compared_one_by_one_so_that_drift_cancels() -> None:
    """The machine was slow in the last rounds; the baseline stopped before, and has the lower median for that."""
    plan, other = replace(outcome(10), alone_s=(0.1, 0.1, 0.2, 0.2)), replace(outcome(10), alone_s=(0.11, 0.11))
    chosen, sentence = judged({PLAN: plan, "all cores": other}, "latency")
    assert chosen == PLAN and sentence.startswith(
        "The plan measures 1.10 times as low a latency as the best baseline, 'all cores'"
    )


def test_a_plan_that_equals_a_baseline_has_one_row_and_its_ratio_can_be_recomputed() -> None:
    same = outcome(10, 12)
    report = RunReport("net", 1, {PLAN: same, "replicas": same, "slow": outcome(5, 6)}, Verdict(PLAN, "why", True))
    first, second = report.rows()
    assert (first["chosen"], first["plan"], second["plan"]) == ("*", "plan = replicas", "slow")
    assert second["of_plan"] == second["items_per_s"] / first["items_per_s"]


def test_a_report_of_a_plan_for_latency_shows_that_first() -> None:
    made = replace(outcome(10, latency_s=0.2), plan=replace(MADE, objective="latency"))
    report = RunReport("net", 1, {PLAN: made, "all cores": outcome(5, latency_s=0.1)}, Verdict("all cores", "why", True))
    first, second = report.rows()
    assert (first["plan"], first["of_plan"], second["plan"], second["predicted_s"]) == ("all cores", 2.0, PLAN, 0.1)
    assert list(first)[2:7] == ["latency_s", "of_plan", "spread", "predicted_s", "items_per_s"]


def test_a_baseline_that_ran_in_one_round_has_no_spread() -> None:
    """It was shown as 0.0 %, the steadiest of all."""
    report = RunReport(
        "net", 1, {PLAN: outcome(10, 12), "slow": replace(outcome(2), rounds_per_s=(2.0,))}, Verdict(PLAN, "why", True)
    )
    spreads = [row["spread"] for row in report.rows()]
    assert spreads[0] == pytest.approx(2 / 11) and spreads[1] != spreads[1]


def test_a_plan_that_is_a_baseline_is_called_one() -> None:
    same = outcome(10)
    assert judged({PLAN: same, "replicas": same, "all cores": outcome(5)}) == (
        PLAN,
        "The plan is the baseline 'replicas', and no other one measures better.",
    )


def test_without_a_baseline_there_is_nothing_to_compare() -> None:
    chosen, sentence = judged({PLAN: outcome(10)})
    assert chosen == PLAN and "nothing to compare it with" in sentence


@pytest.mark.parametrize("chosen", [PLAN, "replicas"])
def test_the_report_gives_the_figures_of_the_chosen_way(chosen: str) -> None:
    fast = replace(outcome(12), max_abs_error=0.5)
    report = RunReport("net", 1, {PLAN: outcome(10), "replicas": fast}, Verdict(chosen, "why", True))
    data = report.to_dict()
    assert data["throughput_per_s"] == (10 if chosen == PLAN else 12)
    assert data["max_abs_error"] == (0 if chosen == PLAN else 0.5)
    assert data["baselines"] == {"replicas": 12}
    assert repr(report) == "RunReport('net', 2 plans: why)"
    assert repr(report.plan.plan).startswith("Plan(1 ops on cpu:0 (eager): 10 items/s predicted")
    assert "net, 1 item a request: why" in report._repr_html_() and list(report.frame().index) == ["replicas", PLAN]


def test_a_notebook_shows_why_baselines_were_left_out() -> None:
    report = RunReport("net", 1, {PLAN: outcome(10)}, Verdict(PLAN, "why", True), {"replicas": "too large"}, ("no x",))
    shown = report._repr_html_()
    assert "ways left out" in shown and ">too large</td>" in shown and ">no x</td>" in shown


@pytest.mark.parametrize(
    "trace_error,words",
    [
        (None, "which were not compared with the module's."),
        (0.0, "and these are equal bit for bit to the module's, both on torch's own number of threads."),
        (2e-7, "and these differ by 2e-07 of the largest value from the module's, both on torch's own number of threads."),
    ],
)
def test_a_report_tells_the_error_against_the_module_too(trace_error: float | None, words: str) -> None:
    exact = replace(outcome(10), max_relative_error=0.0)
    report = RunReport("net", 1, {PLAN: exact}, Verdict(PLAN, "why", True), trace_error=trace_error)
    assert report.errors == f"Outputs are equal bit for bit to the traced model's on as many threads (1 a stage), {words}"
    assert report.to_dict()["trace_relative_error"] == trace_error


def test_statistics_are_short_in_a_prompt() -> None:
    assert repr(STATS) == "RunStats(4 requests, median latency 100.00 ms, restarts: 0)"
    assert "(1 request," in repr(replace(STATS, num_requests=1))
