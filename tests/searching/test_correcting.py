from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosplit.running.messages import WorkerEvent
from autosplit.searching.correcting import (
    MOST_SAMPLES,
    Seen,
    at_usual_speed,
    beside_s,
    corrected,
    shares_s,
    slowdowns,
    spans_of,
    taken_s,
)
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.values.plan import Plan, Prediction, Source, Stage
from autosplit.values.profile import Profile
from autosplit.values.samples import Samples, Setting

SECOND = 1_000_000_000


def plan(*stages: Stage) -> Plan:
    return Plan(Source("m", 1), "graph", "profile", stages, Prediction(1.0, 1.0, 1.0, 0.0, 1.0))


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=3))
def test_what_workers_took_of_a_device_adds_up_to_when_it_was_busy(lengths: list[list[int]]) -> None:
    spans = [[(sum(own[:k]) * SECOND, sum(own[: k + 1]) * SECOND) for k in range(len(own))] for own in lengths]
    found = shares_s(spans)
    assert sum(map(sum, found)) == pytest.approx(max(map(sum, lengths)))
    for own, seconds in zip(lengths, found, strict=True):
        assert all(taken <= length + 1e-9 for taken, length in zip(seconds, own, strict=True))


def test_stages_on_one_core_are_not_charged_for_each_other_and_know_which_neighbours_were_busy() -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=3&width=8"))
    ops = [op.name for op in traced.graph.ops]
    seconds = {(op, device): 1.0 for op in ops for device in ("cpu:0", "cpu:1")}
    profile = Profile.given(traced.graph, seconds)
    cut = [ops[:1], ops[1:2], ops[2:]]
    placed = zip(cut, ("cpu:0", "cpu:1", "cpu:0"), strict=True)
    stages = [Stage(f"s{n}", tuple(part), (device,), "eager") for n, (part, device) in enumerate(placed)]
    spans = [[(a * SECOND, b * SECOND)] for a, b in ((0, 4), (0, 3), (2, 6))]
    ran = plan(*stages)
    seen = corrected(profile, ran, taken_s(ran, spans), [0.0, 0.5, 0.0])
    on_0, on_1 = Setting("cpu:0", "eager", 1), Setting("cpu:1", "eager", 1)
    assert [stage.samples.median_s for stage in seen.stages] == [3, 2.5, 3]
    assert [(stage.setting, stage.busy) for stage in seen.stages] == [(on_0, ("cpu:1",)), (on_1, ("cpu:0",)), (on_0, ("cpu:1",))]


def test_a_request_counts_until_the_next_is_asked_for_and_the_mean_of_many_is_one_sample() -> None:
    events = [WorkerEvent(k, 0, 10 * k, 10 * k, 10 * k + 1, 10 * k + 6, 10 * k + 9, k % 2) for k in range(2 * MOST_SAMPLES)]
    spans = spans_of(events)
    assert [end - begin for begin, end in spans] == [9, 8] * (MOST_SAMPLES - 1) + [9, 7]
    [taken] = taken_s(plan(Stage("s", ("op",), ("cpu:0",))), [spans])
    assert taken.samples_s == pytest.approx([8.5e-9] * (MOST_SAMPLES - 1) + [8e-9])
    assert [taken.samples_s for taken in taken_s(plan(*[Stage("s", ("op",), ("cpu:0",))] * 2), [[], []])] == [(), ()]


def test_what_was_seen_while_a_device_was_slow_is_put_right_by_what_ran_beside_it() -> None:
    def medians(*seen: Seen) -> list[list[float]]:
        return [[round(own.median_s, 9) for own in one.taken] for one in at_usual_speed(seen)]

    def seen(ran: Plan, on_0: float, on_1: float, expected_s: float = 1.0) -> Seen:
        count = len(ran.stages)
        return Seen(ran, (Samples((3.0,)),) * count, {"cpu:0": on_0, "cpu:1": on_1}, [expected_s] * count)

    both = plan(Stage("s", ("op",), ("cpu:0",)), Stage("t", ("op",), ("cpu:1",)))
    three = plan(*both.stages, Stage("u", ("op",), ("cpu:2",)))
    assert medians(seen(both, 1.0, 1.0), seen(both, 1.5, 1.0), seen(both, 1.1, 0.95)) == [[3, 3], [2.1, 3], [3, 3]]
    assert medians(seen(three, 2.0, 2.0), seen(three, 1.0, 1.0)) == [[1.5] * 3, [3] * 3]  # of cpu:2 the others tell
    assert medians(seen(both, 9.0, 9.0)) == [[3, 3]]  # nothing to hold it against
    for expected_s, right in ((1.4, 1.5), (2.0, 2.0), (2.9, 3.0), (3.1, 3.0)):
        assert medians(seen(both, 2.0, 2.0, expected_s), seen(both, 1.0, 1.0))[0] == [right] * 2


def test_a_worker_that_could_not_be_asked_says_nothing_of_its_device() -> None:
    ran = plan(
        *(Stage(name, ("op",), (device,)) for name, device in (("s", "cpu:0"), ("t", "cpu:0"), ("u", "cpu:1"), ("v", "cpu:1")))
    )
    taken = tuple(Samples(seconds) for seconds in ((1.0,), (2.0,), (3.0,), ()))
    assert beside_s(ran, taken) == {"cpu:0": 3.0}
    assert [one.taken for one in at_usual_speed([Seen(ran, taken, {}, [0.0] * 4)])] == [taken]


def test_plans_beside_each_other_share_the_seconds_of_each_core() -> None:
    """Replicas of the first plan run for 2 s beside the second one and alone for 2 s; the second one has all cores for 2 s."""
    replicas = replace(plan(Stage("s", ("op",), ("cpu:0", "cpu:1"))), loads_s={"cpu:0": 1.5, "cpu:1": 1.5})
    both = replace(plan(Stage("s", ("op",), ("cpu:0-1",))), loads_s={"cpu:0-1": 1.0})
    first = [[(0, 4 * SECOND)], [(0, 4 * SECOND)]]
    second = [[(2 * SECOND, 6 * SECOND)]]
    assert slowdowns([replicas, both], [first, second]) == pytest.approx([1.0, 3.0])
    assert slowdowns([replicas, both], [first, [[]]]) == pytest.approx([8 / 6, 1.0])
    two = replace(plan(Stage("a", ("op",), ("cpu:0",)), Stage("b", ("op",), ("cpu:1",))), loads_s={"cpu:0": 2.0, "cpu:1": 2.0})
    assert slowdowns([two], [first]) == pytest.approx([2.0])
