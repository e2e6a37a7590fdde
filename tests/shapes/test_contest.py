from dataclasses import replace

import pytest

from autosplit.reports.outcomes import PLAN
from autosplit.shapes.contest import LONGEST, ShapedOutcome, ShapedReport, choose
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage

ONE = Plan(Source("m"), "h", "", (Stage("s", ("a", "b"), ("cpu:0",)),), UNKNOWN)
TWO = replace(ONE, stages=(Stage("s", ("a",), ("cpu:0",)), Stage("t", ("b",), ("cpu:1",))))


def outcome(plan, *rounds_per_s, fault=""):
    return ShapedOutcome(plan, 2, rounds_per_s, (0.1, 0.2, 0.3), fault)


@pytest.mark.parametrize(
    ("plan", "others", "chosen", "words"),
    [
        (outcome(TWO, 9, 9, 9), {}, PLAN, "nothing to compare"),
        (outcome(TWO, 9, 9, 9), {"one": outcome(ONE, 4, 4, 4)}, PLAN, "2.25 times"),
        (outcome(TWO, 4, 4, 4), {"one": outcome(ONE, 9, 9, 9)}, "one", "2.25 times"),
        (outcome(TWO, 9, 9, 9), {"one": outcome(ONE, 8, 10, 8)}, "one", "simpler"),
        (outcome(ONE, 9, 9, 9), {"other": outcome(ONE, 8, 10, 10)}, "other", "measured more"),
        (outcome(ONE, 9, 9, 9), {"other": outcome(ONE, 8, 10, 8)}, PLAN, "stays"),
        (outcome(TWO, 9, 9, 9, fault="off by 1"), {"one": outcome(ONE, 1, 1, 1)}, "one", "wrong answers"),
        (outcome(TWO, 4, 4, 4), {"one": outcome(ONE, 9, 9, 9, fault="off by 1")}, PLAN, "nothing to compare"),
    ],
)
def test_no_plan_is_chosen_that_is_slower_than_another_way_or_wrong(plan, others, chosen, words):
    found, sentence = choose({PLAN: plan, **others})
    assert found == chosen
    assert words in sentence


def test_rows_say_how_many_times_as_fast_as_padding_to_the_longest():
    outcomes = {PLAN: outcome(TWO, 9, 9, 9), LONGEST: outcome(TWO, 3, 3, 3)}
    [first, last] = ShapedReport("m", outcomes, *choose(outcomes), {}).rows()
    assert (first["way"], first["times_longest"], last["times_longest"]) == ("plan *", 3, 1)
    assert first["p50_s"] == 0.2
