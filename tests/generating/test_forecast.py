"""Forecasts against sums by hand, and the mean seconds of both phases."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from pipelines import wait_until

from autosplit.errors import PlanError, WorkerError
from autosplit.generating.forecast import between, host_text, replicas_of, simulated
from autosplit.generating.generators import Generator
from autosplit.generating.hostcost import HostTime
from autosplit.generating.phases import PhaseProfile, mixed_phases, stored_phases, traffic_on
from autosplit.generating.sequences import Capacity
from autosplit.generating.steps import TOKENS
from autosplit.reports.outcomes import TokenRates
from autosplit.values.links import Link
from autosplit.values.machine import HOST, Machine, parse_device
from autosplit.values.plan import PYTHON_OBJECT, UNKNOWN, Plan, Stage
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Samples, Setting
from autosplit.values.sequences import Sequences
from tests.generating.caches import BUCKETS, VOCABULARY, Pipeline, expected

PLAN = Plan(PYTHON_OBJECT, "", "", (Stage("one", ("a",), ("cpu:0", "cpu:1")), Stage("two", ("b",), ("cpu:2", "cpu:3"))), UNKNOWN)
SECONDS = {1: [1.0, 2.0], 2: [1.5, 3.0], 9: [4.0, 4.0]}


def test_two_stages_keep_two_groups_under_way():
    """The second stage is the slower one: once it has work, a token of each group takes its seconds."""
    sequences = Sequences(prompt=8, new=5, max_sequences=2, max_length=20)
    found = simulated(SECONDS, SECONDS, ["a", "b"], sequences)
    one_after_the_other = simulated(SECONDS, SECONDS, ["a", "a"], sequences)
    assert found.first_token_s == pytest.approx((8 + 12) / 2)
    # tokens of the first sequence at 8, 14, 18, 22, 26, of the second one at 12, 16, 20, 24, 28
    assert found.per_token_s == pytest.approx((18 + 16) / 4 / 2)
    assert found.tokens_per_s == pytest.approx(10 / 28)
    assert one_after_the_other.tokens_per_s < found.tokens_per_s


def test_the_host_takes_its_time_between_steps():
    """Tokens of one sequence come half a second after their step. With two groups the host works while the first stage waits."""
    one, two = (Sequences(prompt=1, new=20, max_sequences=count, max_length=40) for count in (1, 2))
    step_s = {1: [1.0, 2.0]}
    assert simulated(step_s, step_s, ["a", "b"], one, host_s=0.5) == TokenRates(1 / 3.5, 3.5, 3.5)
    assert simulated(step_s, step_s, ["a", "b"], two, host_s=0.5).per_token_s == pytest.approx(4.0, rel=0.02)


def test_the_host_takes_sequences_in_before_the_first_step():
    one, step_s = Sequences(prompt=1, new=20, max_sequences=1, max_length=40), {1: [1.0, 2.0]}
    found = simulated(step_s, step_s, ["a", "b"], one, host_s=0.5, start_s=2.0)
    assert found == TokenRates(20 / 72, 5.5, 3.5)


def test_a_stage_is_faster_while_its_neighbours_wait():
    """The second stage does half of its work beside the first one, in a second, and the rest alone, in half a second."""
    busy_s, alone_s = {1: [1.0, 2.0]}, {1: [0.5, 1.0]}
    one, two = (Sequences(prompt=1, new=20, max_sequences=count, max_length=40) for count in (1, 2))
    assert simulated(busy_s, alone_s, ["a", "b"], two).per_token_s == pytest.approx(2 * 1.5, rel=0.05)
    assert simulated(busy_s, alone_s, ["a", "b"], one).per_token_s == pytest.approx(1.5)
    assert simulated(busy_s, alone_s, ["a", "b"], one, num_beside=1).per_token_s == pytest.approx(2.25)


def test_the_share_of_the_host_is_said():
    told = TokenRates(1.0, 1.0, 0.5)
    words = "the host is predicted to take 50.00 ms between steps of 2 sequences, 10% of the time per token"
    assert host_text(PLAN, told, Sequences(max_sequences=8), 0.05) == words


def test_one_host_answers_one_pipeline_after_another():
    """Two groups on two stages of a second each: a host that needs two seconds for a step is the bottleneck."""
    sequences = Sequences(prompt=1, new=20, max_sequences=2, max_length=40)
    step_s = {1: [1.0, 1.0], 2: [1.0, 1.0]}
    found = simulated(step_s, step_s, ["a", "b"], sequences, host_s=2.0)
    assert found.per_token_s == pytest.approx(4.0, rel=0.05)


def test_a_limit_on_the_time_per_token_holds_while_prompts_come():
    """A long prompt beside a sequence that decodes: prompts get what the limit leaves of a step."""
    seconds = {1: [1.0], 2: [1.0], 9: [5.0]}
    free = Sequences(prompt=40, new=30, max_sequences=2, max_length=80)
    found = {limit: simulated(seconds, seconds, ["a"], replace(free, per_token_s=limit)) for limit in (None, 1.2)}
    assert found[None].per_token_s > 1.2 >= found[1.2].per_token_s
    assert found[1.2].first_token_s > found[None].first_token_s


def test_sizes_between_two_that_were_measured():
    known = {4: [1.0, 2.0], 12: [3.0, 2.0]}
    assert between(known, [2, 4, 8, 12]) == {2: [1.0, 2.0], 4: [1.0, 2.0], 8: [2.0, 2.0], 12: [3.0, 2.0]}


def test_replicas_are_pipelines_side_by_side():
    assert [[stage.devices for stage in one.stages] for one in replicas_of(PLAN)] == [
        [("cpu:0",), ("cpu:2",)],
        [("cpu:1",), ("cpu:3",)],
    ]
    with pytest.raises(PlanError, match="each stage of a generator has 1 devices or each 2"):
        replicas_of(replace(PLAN, stages=(PLAN.stages[0], replace(PLAN.stages[1], devices=("cpu:2",)))))


class Steps(SimpleNamespace):
    """The sizes of a family of steps of two ops, with a value of a byte for each token."""

    allowed, shapes, unpaddable = {TOKENS: (1, 2, 9)}, {"ids": {0: TOKENS}}, {}
    table, source, largest, sequences = "", None, {TOKENS: 9}, Sequences(prompt=14, new=10, max_sequences=2, max_length=40)

    def at(self, at):
        return SimpleNamespace(graph=SimpleNamespace(values={"x": SimpleNamespace(num_bytes=at[TOKENS])}), tokens=at[TOKENS])


def measured(tokens, refused=()):
    """Op a takes a second for each token, op b a second for each step, and a cut two seconds."""
    ops = {op: Samples((seconds,)) for op, seconds in (("a", float(tokens)), ("b", 1.0)) if op not in refused}
    there = Measured(ops, per="op", refused=dict.fromkeys(refused, "it is not known"), cut_s_per_byte=2.0 / tokens)
    return Profile("steps", f"{tokens}", {"a": "a", "b": "b"}, {Setting("cpu:0", "eager", 1): there})


def test_an_op_takes_its_mean_seconds_of_both_phases():
    """Two groups of one sequence: 20 steps, of which 28 prompt tokens fill 3.5, 8 in each beside a token that goes on."""
    family, machine = Steps(), Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])
    flow = traffic_on(family, machine)
    assert flow.counts == {(1,): 16.5, (9,): 3.5}
    found = mixed_phases(family, {9: measured(9), 1: measured(1)}, flow.verify(family.allowed))
    assert found.op_s("a", "cpu:0", "eager") == pytest.approx((16.5 * 1 + 3.5 * 9) / 20)
    assert found.op_s("b", "cpu:0", "eager") == pytest.approx(1.0)
    assert found.measured["cpu:0", "eager", 1].cut_s_per_byte * 9 == pytest.approx(2.0)
    links = (Link("cpu:0", HOST, 0.0, 1.0, 0.0, 1.0, 0.0), Link(HOST, "cpu:0", 0.0, 1.0, 0.0, 1.0, 0.0))
    phases = {tokens: replace(measured(tokens), links=links) for tokens in (9, 1)}
    told = mixed_phases(family, phases, flow.verify(family.allowed), HostTime(9.0, 4.0))
    assert [[link.receive_s for link in told.phases[tokens].links] for tokens in (1, 9)] == [[0.0, 1.0]] * 2
    assert (told.links[0].receive_s, told.host_s, told.start_s) == (0.0, 9.0, 4.0)
    assert (found.graph_hash, dict(found.shapes.buckets), sorted(found.phases)) == ("9", {TOKENS: (1, 2, 9)}, [1, 9])


def test_an_op_that_is_refused_in_one_phase_is_refused():
    family = Steps()
    flow = traffic_on(family, Machine.of([parse_device("cpu:0")])).verify(family.allowed)
    found = mixed_phases(family, {9: measured(9), 2: measured(2, refused=["b"])}, flow)
    assert found.table(SimpleNamespace(hash="9"), Setting("cpu:0", "eager", 1)).keys() == {"a"}


def test_a_phase_that_no_store_holds_gives_no_profile(monkeypatch):
    monkeypatch.setattr("autosplit.generating.phases.measure_host", lambda *asked: HostTime(0.5))
    family, machine = Steps(), Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])
    found = stored_phases(family, machine, lambda one: measured(one.tokens))
    assert isinstance(found, PhaseProfile)
    assert sorted(found.phases) == [1, 2, 9]  # a group, all sequences at once, and beside them a chunk of a prompt
    assert stored_phases(family, machine, lambda one: measured(one.tokens) if one.tokens == 9 else None) is None


def test_the_smallest_step_with_prompts_is_measured_too(monkeypatch):
    """It reads weights in another form than steps of decoding, so it does not lie on the line from these to the largest step."""
    monkeypatch.setattr("autosplit.generating.phases.measure_host", lambda *asked: HostTime(0.5))
    family, machine = Steps(), Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])
    family.allowed = {TOKENS: (1, 2, 4, 8, 9)}
    found = stored_phases(family, machine, lambda one: measured(one.tokens))
    assert sorted(found.phases) == [1, 2, 4, 9]


def test_sequences_go_to_the_pipeline_with_the_fewest():
    pipelines = [Pipeline(2, 80, holds=True) for _ in range(2)]
    side = Generator(pipelines[0], BUCKETS, Capacity(2, 80, VOCABULARY), 1, beside=[(pipelines[1], BUCKETS)], plan=PLAN)
    futures = [side.submit([number], max_new_tokens=3) for number in range(6)]
    wait_until(lambda: (side.num_running, side.num_waiting) == (4, 2))
    assert [one.num_running for one in side._turns._schedulers] == [2, 2]
    for one in pipelines:
        one.release()
    assert [future.result() for future in futures] == [expected([number], 3) for number in range(6)]
    assert side.generate([[7], [8, 9]], max_new_tokens=2) == [expected([7], 2), expected([8, 9], 2)]
    assert list(side.stream([5], max_new_tokens=2)) == expected([5], 2)
    assert (side.capacity.max_sequences, side.stats(clear=True).num_tokens, side.stats().num_tokens) == (4, 24, 0)
    pipelines[1].failure = gone = WorkerError("gone")
    pipelines[1].outcome = lambda *_: gone
    with side._turns._changed:  # so that each pipeline has one at once
        good, bad = (side.submit([number], max_new_tokens=3) for number in (1, 2))
    assert (good.result(), bad.exception()) == (expected([1], 3), gone)
    side.close()
    assert not side._turns._thread.is_alive()
    for one in pipelines:
        one.close()
