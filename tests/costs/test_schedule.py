"""Schedules: drawn tables, the closed form, a recurrence as the oracle, and the loads of the one evaluator."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain as chain_problem
from problems import random_blocks, random_problem

from autosplit.costs.cost import evaluate
from autosplit.costs.graphproblem import problem_from
from autosplit.costs.pieces import latency_s
from autosplit.costs.planschedule import plan_stages, schedule_blocks, schedule_plan
from autosplit.costs.problem import Block, Net
from autosplit.costs.schedule import Schedule, chain, poisson_arrivals, simulate
from autosplit.costs.simulation import SimStage
from autosplit.errors import PlanError, UsageError
from autosplit.values.constraints import Placement
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.links import Link
from autosplit.values.machine import HOST, Machine, parse_device
from autosplit.values.plan import Plan, Prediction, Source, Stage
from autosplit.values.profile import Profile

SLOW_LINK = Link("any", "any", latency_s=0.25, send_s=0.5, send_s_per_byte=0.125, receive_s=0.25, receive_s_per_byte=0.0)


def slow_link(source: str, target: str) -> Link:
    return SLOW_LINK


def stage(name: str, seconds: float, *sources: str, device: str | None = None) -> SimStage:
    return SimStage(name, (device or name,), (seconds,), dict.fromkeys(sources or (HOST,), ()))


def makespan_s(stage_s: Sequence[float], num_requests: int, latency_s: float = 0.0) -> float:
    """Seconds from the first request in to the last result out of a chain whose stages have devices of their own."""
    return sum(stage_s) + latency_s + (num_requests - 1) * max(stage_s)


# Drawn tables. A column is one second.


def test_the_bottleneck_sets_the_pace() -> None:
    drawn = """
        stage0.0 | 0 1 2 3 . . . . .
        stage1.0 | . 0 0 1 1 2 2 3 3
    """
    assert_drawn(simulate(chain([1, 2]), 4), drawn)


def test_one_slot_stops_the_sender_until_the_receiver_has_run() -> None:
    drawn = """
        stage0.0 | 0 1 . . 2 . . 3 . . . . .
        stage1.0 | . 0 0 0 1 1 1 2 2 2 3 3 3
    """
    assert_drawn(simulate(chain([1, 3]), 4, slots=1), drawn)


def test_two_slots_let_the_sender_run_ahead() -> None:
    drawn = """
        stage0.0 | 0 1 2 . 3 . . . . . . . .
        stage1.0 | . 0 0 0 1 1 1 2 2 2 3 3 3
    """
    schedule = simulate(chain([1, 3]), 4, slots=2)
    assert_drawn(schedule, drawn)
    first, second = schedule.times
    assert (first.blocked_s, first.starved_s) == (3.0, 0.0)
    assert (second.busy_s, second.starved_s, second.requests) == (12.0, 0.0, 4)


def test_a_skip_connection_waits_for_both_ways() -> None:
    drawn = """
        a.0 | 0 1 2 . . . .
        b.0 | . 0 0 1 1 2 2
        c.0 | . . . 0 . 1 . 2
    """
    stages = [stage("a", 1), stage("b", 2, "a"), stage("c", 1, "a", "b")]
    assert_drawn(simulate(stages, 3), drawn)


def test_two_branches_run_side_by_side() -> None:
    drawn = """
        left.0  | 0 1 .
        right.0 | 0 1 .
        join.0  | . 0 1
    """
    assert_drawn(simulate([stage("left", 1), stage("right", 1), stage("join", 1, "left", "right")], 2), drawn)


def test_stages_on_one_device_take_turns() -> None:
    drawn = """
        a.0 | 0 1 . 2 . 3 . .
        b.0 | . 0 1 . 2 . 3 .
        c.0 | . . 0 . 1 . 2 3
    """
    schedule = simulate([stage("a", 1, device="d0"), stage("b", 1, "a"), stage("c", 1, "b", device="d0")], 4)
    assert_drawn(schedule, drawn)
    assert schedule.device_busy_s == {"d0": 8.0, "b": 4.0}
    assert [times.queued_s for times in schedule.times] == [2.0, 0.0, 2.0]


def test_sending_and_receiving_occupy_their_devices_and_latency_nobody() -> None:
    stages = chain([1, 1], num_bytes=2)
    one = simulate(stages, 1, link=slow_link)
    # host: 0.5 + 0.25 to send, 0.25 under way; each stage: 0.25 in, 1.0, 0.75 out, 0.25 under way; host: 0.25 in.
    assert one.makespan_s == pytest.approx(1.0 + 2 * (0.25 + 1.0 + 0.75 + 0.25) + 0.25)
    kinds = [(action.stage, action.kind, action.duration_s) for action in one.actions]
    assert kinds == [
        ("stage0", "receive", 0.25),
        ("stage0", "compute", 1.0),
        ("stage0", "send", 0.75),
        ("stage1", "receive", 0.25),
        ("stage1", "compute", 1.0),
        ("stage1", "send", 0.75),
    ]
    many = simulate(stages, 100, link=slow_link)
    assert 1 / many.steady_per_s == pytest.approx(2.0)


def test_each_value_pays_the_fixed_share() -> None:
    one = simulate([SimStage("a", ("a",), (1.0,), {HOST: ()}, results=(0.0,))], 1, link=slow_link)
    two = simulate([SimStage("a", ("a",), (1.0,), {HOST: ()}, results=(0.0, 0.0))], 1, link=slow_link)
    assert two.makespan_s - one.makespan_s == pytest.approx(0.5 + 0.25)


def test_a_request_is_finished_with_its_last_microbatch() -> None:
    schedule = simulate(chain([1, 1]), 2, microbatches=3)
    assert schedule.finished_s == (4.0, 7.0)
    assert schedule.started_s[0] == 0.0
    assert len(schedule.finished_s) == 2
    assert {action.request for action in schedule.actions} == set(range(6))


def test_given_arrivals_count_the_wait_before_admission() -> None:
    schedule = simulate(chain([2]), 3, arrivals_s=[0.0, 1.0, 9.0])
    assert schedule.finished_s == (2.0, 4.0, 11.0)
    assert schedule.latencies_s == (2.0, 3.0, 2.0)
    assert (schedule.latency_s(0.5), schedule.latency_s(1.0)) == (2.0, 3.0)


def test_the_makespan_begins_with_the_first_request() -> None:
    # it began at 0, so that a device that never waited was idle for most of it
    schedule = simulate(chain([1]), 2, arrivals_s=[5.0, 6.0])
    assert (schedule.makespan_s, schedule.throughput_per_s, schedule.bubble) == (2.0, 1.0, 0.0)
    assert schedule.rows()[0]["busy"] == 1.0


def test_utilisation_and_bubble() -> None:
    schedule = simulate(chain([1, 1, 1]), 4)
    assert schedule.bubble == pytest.approx(1 - 12 / 18)
    assert [row["busy"] for row in schedule.rows()] == pytest.approx([4 / 6] * 3)
    assert list(schedule.frame().index) == ["stage0", "stage1", "stage2"]
    assert "bubble 33.3%" in schedule.summary()
    assert "<table>" in schedule._repr_html_()


def test_a_pipeline_that_takes_no_time() -> None:
    schedule = simulate(chain([0, 0]), 3)
    assert schedule.makespan_s == 0.0
    assert schedule.throughput_per_s == math.inf
    assert schedule.bubble == 0.0


# The closed form, and a recurrence where there is none.

seconds = st.integers(0, 8).map(float)


@given(st.lists(seconds, min_size=1, max_size=6), st.integers(1, 30))
def test_a_chain_with_slots_enough_is_the_closed_form(stage_s: list[float], num_requests: int) -> None:
    schedule = simulate(chain(stage_s), num_requests, slots=2)
    assert schedule.makespan_s == makespan_s(stage_s, num_requests)


@given(st.lists(seconds, min_size=1, max_size=5), st.integers(1, 20), st.integers(0, 3))
def test_links_lengthen_the_fill_and_load_the_stages(stage_s: list[float], num_requests: int, num_bytes: int) -> None:
    schedule = simulate(chain(stage_s, num_bytes), num_requests, link=slow_link, slots=64)
    out = 0.5 + 0.125 * num_bytes
    busy = [out, *[0.25 + value + out for value in stage_s], 0.25]
    assert schedule.makespan_s == pytest.approx(makespan_s(busy, num_requests, latency_s=0.25 * (len(stage_s) + 1)))


@st.composite
def pipelines(draw: st.DrawFn) -> list[SimStage]:
    """Random stages with skips and replicas, each replica on a device of its own."""
    stages: list[SimStage] = []
    for number in range(draw(st.integers(1, 5))):
        replicas = draw(st.integers(1, 3))
        times = tuple(draw(seconds) for _ in range(replicas))
        known = [HOST, *[s.name for s in stages]]
        sources = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
        sizes = {source: (float(draw(st.integers(0, 4))),) for source in sources}
        results = draw(st.one_of(st.none(), st.just((1.0,))))
        stages.append(SimStage(f"s{number}", tuple(f"d{number}.{r}" for r in range(replicas)), times, sizes, results))
    return stages


def recurrence(stages: Sequence[SimStage], units: int, link: Link, slots: int, come: Sequence[float]) -> list[float]:
    """When each result is there, by max-plus equations: every stage replica has a device of its own."""
    read = {source for s in stages for source in s.sources}
    results = {s.name: s.results or () for s in stages if s.results is not None or s.name not in read}
    ends = [SimStage("feed", ("h",), (0.0,), {}), *stages, SimStage("drain", ("h",), (0.0,), results)]
    name_of = {HOST: "feed"}
    readers = {
        s.name: [(t.name, t.sources[source]) for t in ends[1:] for source in t.sources if name_of.get(source, source) == s.name]
        for s in ends
    }
    replicas = {s.name: len(s.devices) for s in ends}
    ran: dict[tuple[str, int], float] = {}
    left: dict[tuple[str, int], float] = {}
    there: dict[tuple[str, str, int], float] = {}
    for k in range(units):
        for s in ends:
            ready = [there[name_of.get(source, source), s.name, k] for source in s.sources]
            if s.name == "feed":
                ready = [come[k]]
            sizes = [size for values in s.sources.values() for size in values]
            work = sum(link.receive_s + size * link.receive_s_per_byte for size in sizes) + s.seconds[k % replicas[s.name]]
            now = max([*ready, left.get((s.name, k - replicas[s.name]), 0.0)]) + work
            ran[s.name, k] = now
            for target, values in readers[s.name]:
                turn = math.lcm(replicas[s.name], replicas[target])
                now = max(now, ran.get((target, k - slots * turn), 0.0))
                now += sum(link.send_s + size * link.send_s_per_byte for size in values)
                there[s.name, target, k] = now + link.latency_s
            left[s.name, k] = now
    return [ran["drain", k] for k in range(units)]


@settings(max_examples=examples(300))
@given(
    pipelines(),
    st.integers(1, 16),
    st.integers(1, 3),
    st.sampled_from([SLOW_LINK, Link("", "", 0.0, 0.0, 0.0, 0.0, 0.0), Link("", "", 2.0, 0.0, 0.5, 0.0, 0.25)]),
    st.booleans(),
)
def test_the_simulation_is_the_recurrence(
    stages: list[SimStage], num_requests: int, slots: int, link: Link, open_loop: bool
) -> None:
    arrivals = [float(2 * k) for k in range(num_requests)] if open_loop else None
    schedule = simulate(stages, num_requests, link=lambda *_: link, slots=slots, arrivals_s=arrivals)
    come = arrivals or [0.0] * num_requests
    expected = recurrence(stages, num_requests, link, slots, come)
    assert schedule.finished_s == pytest.approx(expected)


@given(pipelines(), st.integers(1, 12), st.integers(1, 3), st.integers(1, 4))
def test_what_holds_on_shared_devices_too(stages: list[SimStage], num_requests: int, slots: int, num_devices: int) -> None:
    names = [f"shared{number % num_devices}" for number in range(sum(len(s.devices) for s in stages))]
    shared = [replace(s, devices=tuple(names.pop() for _ in s.devices)) for s in stages]
    schedule = simulate(shared, num_requests, link=slow_link, slots=slots)
    alone = simulate(stages, num_requests, link=slow_link, slots=slots)
    # Every stage does every request once, and a device one thing at a time.
    for s in stages:
        done = [action.request for action in schedule.actions if action.stage == s.name and action.kind == "compute"]
        assert sorted(done) == list(range(num_requests))
    device = {(s.name, replica): name for s in shared for replica, name in enumerate(s.devices)}
    for name in set(device.values()):
        spans = sorted((a.start_s, a.end_s) for a in schedule.actions if device[a.stage, a.replica] == name)
        assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(spans))
    # No device works longer than the makespan; results are in order; work does not depend on where it is done.
    assert max(schedule.device_busy_s.values()) <= schedule.makespan_s + 1e-9
    assert list(schedule.finished_s) == sorted(schedule.finished_s)
    assert sum(schedule.device_busy_s.values()) == pytest.approx(sum(alone.device_busy_s.values()))
    for times in schedule.times:
        waits = times.starved_s + times.blocked_s + times.queued_s
        assert min(times.starved_s, times.blocked_s, times.queued_s) >= 0
        assert times.busy_s + waits <= schedule.makespan_s + 1e-9


def test_poisson_arrivals_are_seeded_and_have_their_rate() -> None:
    times = poisson_arrivals(50.0, 5000, seed=3)
    assert times == poisson_arrivals(50.0, 5000, seed=3) != poisson_arrivals(50.0, 5000, seed=4)
    assert list(times) == sorted(times)
    assert 5000 / times[-1] == pytest.approx(50.0, rel=0.05)


def test_waiting_grows_as_the_arrival_rate_nears_the_bottleneck() -> None:
    """One server of fixed time: the mean wait of M/D/1 is load / (2 (1 - load)) of a service (Pollaczek, 1930)."""
    for load in (0.2, 0.5, 0.8):
        schedule = simulate(chain([1.0]), 15_000, arrivals_s=poisson_arrivals(load, 15_000, seed=1))
        mean = sum(schedule.latencies_s) / 15_000
        assert mean == pytest.approx(1 + load / (2 * (1 - load)), rel=0.05)


# Plans.


def diamond() -> Graph:
    """x -> a -> (b, c) -> d, with two values from a to c, one of them a skip to d."""
    values = [Value(name, (4,), "float32", 16) for name in ("x", "a", "a2", "b", "c", "d")]
    ops = (
        Op("a", "f", "", ("x",), ("a", "a2"), ("w",), "sa"),
        Op("b", "f", "", ("a",), ("b",), (), "sb"),
        Op("c", "f", "", ("a", "a2"), ("c",), (), "sc"),
        Op("d", "f", "", ("b", "c", "a2"), ("d",), ("w",), "sd"),
    )
    weights = {"w": Value("w", (4,), "float32", 16)}
    return Graph("diamond", ("x",), ("d",), ops, {value.name: value for value in values}, weights).verify()


GRAPH = diamond()
OP_S = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 1.5}
MACHINE = Machine.of(
    [parse_device(f"null:{index}") for index in range(4)],
    [replace(SLOW_LINK, source=f"null:{a}", target=f"null:{b}") for a in range(4) for b in range(4)],
)
PROFILE = Profile.given(GRAPH, {(op, f"null:{i}"): value for op, value in OP_S.items() for i in range(4)})


def plan_of(*stages: tuple[str, tuple[str, ...]]) -> Plan:
    made = tuple(Stage(f"stage{i}", tuple(ops), devices) for i, (ops, devices) in enumerate(stages))
    return Plan(Source("m:f"), GRAPH.hash, "p", made, Prediction(0, 0, 0, 0, 0), queue_depth=8)


SPLIT = plan_of(("a", ("null:0",)), ("bc", ("null:1", "null:2")), ("d", ("null:3",)))


def test_the_stages_of_a_plan_have_the_values_that_cross() -> None:
    first, middle, last = plan_stages(SPLIT, GRAPH, lambda s, _: sum(OP_S[op] for op in s.ops))
    assert first == SimStage("stage0", ("null:0",), (1.0,), {HOST: (16,)})
    assert middle == SimStage("stage1", ("null:1", "null:2"), (5.0, 5.0), {"stage0": (16, 16)})
    assert last == SimStage("stage2", ("null:3",), (1.5,), {"stage1": (16, 16), "stage0": (16,)}, results=(16,))


def test_a_plan_of_other_ops_is_refused() -> None:
    with pytest.raises(PlanError, match="op 'd' is on no stage"):
        plan_stages(replace(SPLIT, stages=SPLIT.stages[:2]), GRAPH, lambda *_: 1.0)


def test_device_loads_and_throughput_are_those_of_the_evaluator() -> None:
    schedule = schedule_plan(SPLIT, GRAPH, PROFILE, MACHINE.link, num_requests=400)
    free = problem_from(GRAPH, MACHINE, Placement(), MACHINE.devices)
    problem = replace(free, compute_s=np.repeat([[OP_S[op.name]] for op in GRAPH.ops], 4, axis=1))
    loads = evaluate(problem, [Block((0,), (0,)), Block((1, 2), (1, 2)), Block((3,), (3,))])
    for number, name in enumerate(problem.devices):
        assert schedule.device_busy_s[name] / 400 == pytest.approx(loads.device_s[number])
    assert 1 / schedule.steady_per_s == pytest.approx(loads.bottleneck_s, rel=0.01)


def test_a_request_of_two_microbatches_is_done_with_its_second_one() -> None:
    whole = schedule_plan(SPLIT, GRAPH, PROFILE, MACHINE.link, num_requests=8)
    halves = schedule_plan(SPLIT, GRAPH, PROFILE, MACHINE.link, num_requests=4, microbatches=2)
    assert halves.finished_s == whole.finished_s[1::2]


# Solutions of a problem.


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.booleans())
def test_blocks_take_what_the_evaluator_says(seed: int, overlap: bool) -> None:
    """One sample alone is the critical path; many keep every device busy for its load, and the largest sets the pace."""
    problem = random_problem(seed, unsupported=False, overlap=overlap, num_ops=1 + seed % 7, num_devices=1 + seed % 3)
    blocks = random_blocks(problem, seed)
    alone_s, loads = latency_s(problem, blocks), evaluate(problem, blocks)
    one_s = schedule_blocks(problem, blocks, 1).makespan_s
    if all(len(block.devices) == 1 for block in blocks):
        assert one_s == pytest.approx(alone_s)
    assert one_s <= alone_s * (1 + 1e-9)
    turn = math.lcm(*(len(block.devices) for block in blocks))
    samples = 12 * turn
    full = schedule_blocks(problem, blocks, samples)
    for device, name in enumerate(problem.devices):
        busy_s = max(full.device_busy_s.get(lane, 0.0) for lane in (name, f"{name} transfers"))
        assert busy_s / samples == pytest.approx(loads.device_s[device])
    least_s = samples * loads.bottleneck_s
    assert least_s * (1 - 1e-9) <= full.makespan_s <= (least_s + 2 * turn * alone_s) * (1 + 1e-9)


def test_a_sender_pays_once_and_transfers_run_beside_compute() -> None:
    """One value to two readers: 1 s of work and 2 s of sending to each, or once; with overlap the longer of the two."""
    fan = replace(
        chain_problem([1.0, 1.0, 1.0], num_devices=3, num_bytes=2.0), nets=(Net(0, (1, 2), 2.0),), order=((0, 1), (0, 2))
    ).verify()
    blocks = [Block((op,), (op,)) for op in range(3)]
    for once, overlap, busy_s in ((False, False, 5.0), (True, False, 3.0), (False, True, 4.0), (True, True, 2.0)):
        schedule = schedule_blocks(replace(fan, send_once=once, overlap=overlap), blocks, 50)
        assert max(schedule.device_busy_s.values()) / 50 == busy_s
        assert 1 / schedule.steady_per_s == pytest.approx(busy_s)


def test_blocks_wait_longer_the_faster_requests_come() -> None:
    problem = chain_problem([1.0, 1.0, 1.0, 1.0], num_bytes=0.5)
    blocks = [Block((0, 1), (0,)), Block((2, 3), (1,))]
    slow, fast = (schedule_blocks(problem, blocks, 500, arrivals_s=poisson_arrivals(rate, 500, 7)) for rate in (0.05, 0.35))
    assert slow.latency_s(0.0) == pytest.approx(latency_s(problem, blocks)) and slow.latency_s(0.5) < fast.latency_s(0.5)


def test_every_fault_of_the_arguments_is_listed() -> None:
    bad = [SimStage("a", ("d",), (-1.0,)), SimStage("a", ("d", "e"), (1.0,), {"z": ()})]
    with pytest.raises(UsageError) as caught:
        simulate(bad, 0, slots=0, microbatches=0, arrivals_s=[2.0, 1.0])
    for text in (
        "num_requests must be at least 1, but is 0",
        "slots must",
        "microbatches must",
        "'a', and so is another",
        "takes -1.0 s",
        "2 devices and 1 times",
        "reads 'z', which is not an earlier stage",
        "0 requests have 2 arrival times",
        "ascending",
    ):
        assert text in str(caught.value)
    with pytest.raises(UsageError, match="there are no stages"):
        simulate([], 1)
    with pytest.raises(UsageError, match="quantile must be between 0 and 1"):
        simulate(chain([1]), 1).latency_s(1.5)
    with pytest.raises(UsageError, match="rate_per_s must be positive"):
        poisson_arrivals(0.0, 3)


def assert_drawn(schedule: Schedule, drawn: str) -> None:
    """The schedule looks like the drawing; idle columns at a line's end may be left away."""

    def lines(text: str) -> list[str]:
        return [line.strip().rstrip(" .") for line in text.strip().splitlines()]

    assert lines(schedule.text(tick_s=1.0)) == lines(drawn)
