"""Rounds: what counts of one, who runs in which, and which ways leave."""

import functools
import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autosplit.backends.workspace import Workspace
from autosplit.deploying import bench, comparing
from autosplit.deploying.bench import Bench, Contender
from autosplit.deploying.contest import NO_TIME, SCREEN_S, Contest, by_promise
from autosplit.deploying.setup import Budget, Setup
from autosplit.progress import quiet
from autosplit.reports.outcomes import PLAN
from autosplit.reports.results import LatencyStats
from autosplit.running.pipeline import Pipeline
from autosplit.running.request import Finished
from autosplit.tracing.differing import NumericalError
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage

OBJECTIVES = ("throughput", "latency")


@pytest.fixture
def plan() -> Plan:
    stages = Stage("one", ("a", "b"), ("cpu:0",)), Stage("two", ("c",), ("cpu:1",))
    return Plan(Source("m:f"), "graph", "", stages, UNKNOWN)


class _Ran:
    """A pipeline of two workers that answers a microbatch every 10 ms once it is full, and a whole second later at both ends."""

    max_in_flight = 6

    def __init__(self) -> None:
        self.num_sent = 0

    def submit(self) -> Future[Any]:
        self.num_sent += 1
        return Finished(0, (), None)

    def made_ns(self, count: int) -> list[list[int]]:
        steps_ns = [10_000_000] * count
        steps_ns[0] = steps_ns[1] = steps_ns[-1] = steps_ns[-2] = 1_000_000_000
        return [list(accumulate(steps_ns, initial=time.monotonic_ns()))[1:]]


def _loaded(plan: Plan, pipeline: Any, p50_s: float = 0.1) -> Contender:
    error = NumericalError(0.0, 0.0, "y")
    calls = [] if pipeline is None else [pipeline.submit]
    return Contender(plan, "network", cast(Pipeline, pipeline), calls, error, "", [p50_s])


@pytest.mark.parametrize("num_items", [1, 20, 31])
def test_filling_and_draining_a_pipeline_do_not_count(plan: Plan, num_items: int) -> None:
    two = replace(plan, stages=(replace(plan.stages[0], devices=("cpu:0", "cpu:1")),))
    entry = _loaded(two, _Ran())
    entry.run(num_items)
    assert entry.rounds_per_s == [pytest.approx(100.0)]


def test_a_round_does_not_sum_up_latencies_for_each_request(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    # it did, which took 26 us a request: an MLP of 42 us a request was measured at 14,400 items/s instead of 23,700
    entry, sums, of = _loaded(plan, _Ran()), [], bench.LatencyStats.of
    monkeypatch.setattr(bench.LatencyStats, "of", lambda times_s: sums.append(len(times_s)) or of(times_s))
    entry.run(200)
    assert len(sums) <= 10


class _Lanes(_Ran):
    """Two lanes that take 10 and 20 ms; the slower one still has three requests when the other has its last answer."""

    def made_ns(self, count: int) -> list[list[int]]:
        begin_ns, num_slow = time.monotonic_ns(), (count - 6) // 3 + 3
        lanes = ((10_000_000, count - num_slow), (20_000_000, num_slow))
        return [[begin_ns + period_ns * k for k in range(1, num + 1)] for period_ns, num in lanes]


@pytest.mark.parametrize("num_items", [2, 16, 40])
def test_lanes_that_do_not_end_together_count_each_by_itself(plan: Plan, num_items: int) -> None:
    two = replace(plan, stages=(replace(plan.stages[0], devices=("cpu:0", "cpu:1")),))
    entry = _loaded(two, _Lanes())
    entry.run(num_items)
    assert entry.rounds_per_s == [pytest.approx(150.0, rel=0.01)]


class _Held(_Ran):
    """Its first answer comes after all others, so that these wait for it."""

    def made_ns(self, count: int) -> list[list[int]]:
        return [[time.monotonic_ns() + 1_000_000_000] * count]


def test_requests_that_all_wait_for_one_are_timed_from_the_beginning(plan: Plan) -> None:
    two = replace(plan, stages=(replace(plan.stages[0], devices=("cpu:0", "cpu:1")),))
    entry = _loaded(two, held := _Held())
    entry.run(8)
    assert entry.rounds_per_s == [pytest.approx(held.num_sent, rel=0.01)]


@pytest.mark.parametrize(
    ("devices", "num_sent"),
    [
        ([("cpu:0", "cpu:1")], 2),
        ([("cpu:0", "cpu:1"), ("cpu:2", "cpu:3")], 4 + 4),
        (
            [("cpu:0",), ("cpu:1",), ("cpu:0",)],
            4 + 2 + 4,
        ),  # two for each device: what works ahead leaves the shared device to others later
    ],
)
def test_of_a_slow_stage_every_request_counts(plan: Plan, devices: Sequence[tuple[str, ...]], num_sent: int) -> None:
    stages = tuple(replace(plan.stages[0], name=f"s{number}", devices=names) for number, names in enumerate(devices))
    entry = _loaded(replace(plan, stages=stages), ran := _Ran(), p50_s=10.0)
    entry.run(1)
    assert ran.num_sent == num_sent
    if len(devices) == 1:
        assert entry.rounds_per_s == [pytest.approx(1.0, rel=0.01)]


def test_stages_that_share_a_device_promise_no_more_than_one_there(plan: Plan) -> None:
    """A plan for latency had 30 stages on two devices, and 15 times the requests that fit into a round were sent."""
    stages = tuple(replace(plan.stages[0], name=f"s{number}", devices=(f"cpu:{number % 2}",)) for number in range(30))
    assert _loaded(replace(plan, stages=stages), None, 0.1).pace_per_s == pytest.approx(20.0)


def test_slower_ways_run_as_long_as_the_first_and_not_as_often(plan: Plan) -> None:
    ways = {"first": _loaded(plan, _Ran(), 0.1), "slow": _loaded(plan, _Ran(), 1.0), "fast": _loaded(plan, _Ran(), 0.01)}
    sent: dict[str, int] = {}
    for name, entry in ways.items():
        entry.run = functools.partial(sent.__setitem__, name)  # type: ignore[method-assign]
    Bench.run_round(cast(Bench, SimpleNamespace(loaded=ways)), ["first", "slow", "fast"], 1, 50)
    assert sent == {"first": 50, "slow": 5, "fast": 50}


@pytest.mark.parametrize("full", [True, False])
def test_after_a_way_whose_threads_may_spin_on_the_cores_are_left_alone(
    plan: Plan, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = replace(plan, stages=tuple(replace(stage, threads=2) for stage in plan.stages))
    ways = {"narrow": _loaded(plan, _Ran(), 0.1), "wide": _loaded(wide, _Ran(), 0.1), "last": _loaded(plan, _Ran(), 0.1)}
    seen: list[str] = []
    for name, entry in ways.items():
        entry.run = entry.run_alone = lambda _, name=name: seen.append(name)  # type: ignore[method-assign, misc]
    monkeypatch.setattr(bench.time, "sleep", lambda seconds: seen.append("rest"))
    run = Bench.run_round if full else Bench.run_alone
    run(cast(Bench, SimpleNamespace(loaded=ways)), list(ways), 0, 1)
    assert seen == ["narrow", "wide", "rest", "last"]


class _Ring:
    """An bench in which each way has a speed of its own, with a drift that hits the last one in every other round."""

    def __init__(self, plan: Plan, per_s: dict[str, float], drift: float = 0.0) -> None:
        self.per_s = per_s
        self.drift = drift
        self.loaded = {name: _loaded(plan, None, 1 / speed) for name, speed in per_s.items()}

    def run_round(self, names: Sequence[str], number: int, num_items: int) -> None:
        for name in names:
            slower = self.drift if name == list(self.per_s)[-1] else 0.0
            self.loaded[name].rounds_per_s.append(self.per_s[name] * (1 + slower * (-1) ** number))

    def run_alone(self, names: Sequence[str], number: int, seconds: float) -> None:
        for name in names:
            slower = self.drift if name == list(self.per_s)[-1] else 0.0
            self.loaded[name].rounds_alone_s.append([1 / (self.per_s[name] * (1 + slower * (-1) ** number))])

    def load(self, name: str, plan: Plan, traced: Any) -> None:
        """All are loaded."""

    def unload(self, name: str) -> None:
        del self.loaded[name]


@pytest.mark.parametrize("num_names", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["full", "alone"])
def test_every_way_follows_others_and_none_always_comes_first(plan: Plan, num_names: int, kind: str) -> None:
    ways = {name: _loaded(plan, None, 1.0) for name in "abcde"[:num_names]}
    order: list[str] = []
    for name, entry in ways.items():
        entry.run = lambda num_items, name=name: order.append(name)  # type: ignore[misc]
        entry.run_alone = lambda seconds, name=name: order.append(name)  # type: ignore[misc]
    for number in range(6):
        if kind == "full":
            Bench.run_round(cast(Bench, SimpleNamespace(loaded=ways)), list(ways), number, 10)
        else:
            Bench.run_alone(cast(Bench, SimpleNamespace(loaded=ways)), list(ways), number, 1.0)
    rounds = [order[start : start + num_names] for start in range(0, len(order), num_names)]
    assert len(rounds) == 6 and all(sorted(names) == list(ways) for names in rounds)
    assert all(len({names.index(name) for names in rounds}) > 1 for name in ways)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_slowest_of_too_many_ways_leave_and_the_one_to_keep_stays(plan: Plan, objective: str) -> None:
    ways = {f"way {number}": 10.0 * number for number in range(1, 8)}
    ring = _Ring(plan, {PLAN: 35.0, **ways})
    contest = Contest(cast(Bench, ring), objective, keep="way 1", round_s=2.0)
    reasons = {name: reason for way in ways for name, reason in contest.screen(way).items()}
    assert list(ring.loaded) == [PLAN, "way 1", "way 4", "way 5", "way 6", "way 7"]
    assert list(reasons) == ["way 2", "way 3"]
    assert reasons["way 2"] == "in short runs 4 others were better (0.57 times as good as the plan there)"


@pytest.mark.parametrize(("num_ways", "round_s", "num_runs"), [(4, 2.0, 0), (5, 2.0, 5), (9, 0.2, 0)])
def test_no_short_run_is_made_where_the_first_round_is_as_short(plan: Plan, num_ways: int, round_s: float, num_runs: int) -> None:
    ways = {f"way {number}": 10.0 * number for number in range(1, num_ways + 1)}
    ring = _Ring(plan, {PLAN: 35.0, **ways})
    plans = dict.fromkeys(ring.loaded, plan)
    Contest(cast(Bench, ring), "throughput", "way 1", round_s).load(plans, cast(Any, {plan.microbatch: None}), math.inf)
    assert len(ring.loaded[PLAN].rounds("throughput")) == num_runs


def _halve(
    ring: _Ring, objective: str, barred: Collection[str] = (), decide: bool = True, until_s: float = math.inf
) -> dict[str, int]:
    """How many rounds each way ran, of four for all."""
    contest = Contest(cast(Bench, ring), objective, "", 2.0, barred=barred, decide=decide, until_s=until_s)

    def run(names: Sequence[str], number: int) -> None:
        if objective == "throughput":
            ring.run_round(names, number, 100)
        else:
            ring.run_alone(names, number, 1.0)

    contest.halve(run, 4)
    return {name: len(entry.rounds(objective)) for name, entry in ring.loaded.items()}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("decide", "runs"), [(True, {"plan": 4, "wrong": 1, "slow": 1, "a": 7, "b": 7}), (False, {"a": 4, "b": 4})]
)
def test_who_is_far_behind_stops_and_the_fastest_run_on(plan: Plan, decide: bool, runs: dict[str, int], objective: str) -> None:
    ring = _Ring(plan, {PLAN: 60.0, "wrong": 900.0, "slow": 30.0, "a": 100.0, "b": 100.0}, drift=0.1)
    ring.loaded["wrong"].fault = "backend 'x' gives wrong numbers"
    found = _halve(ring, objective, decide=decide)
    assert {name: found[name] for name in runs} == runs


def test_rounds_end_once_no_way_may_be_better_or_the_time_is_over(plan: Plan) -> None:
    assert _halve(_Ring(plan, {PLAN: 100.0, "a": 90.0, "b": 80.0}), "throughput") == {PLAN: 3, "a": 3, "b": 3}
    assert _halve(_Ring(plan, {PLAN: 100.0, "a": 99.0}, drift=0.01), "throughput") == {PLAN: 3, "a": 3}
    assert _halve(_Ring(plan, {PLAN: 100.0, "a": 95.0}, drift=0.1), "throughput") == {PLAN: 4, "a": 4}
    assert _halve(_Ring(plan, {PLAN: 100.0, "a": 95.0}, drift=0.1), "throughput", until_s=0.0) == {PLAN: 2, "a": 2}
    hurried = _halve(_Ring(plan, {PLAN: 100.0, "a": 95.0, "b": 70.0}), "throughput", until_s=0.0)
    assert hurried == {PLAN: 2, "a": 2, "b": 1}


@dataclass
class _Figures:
    """In place of an ``Outcome``, for which workers are asked."""

    latency: LatencyStats | None = None
    alone_s: tuple[float, ...] = ()


@pytest.mark.parametrize(
    ("round_s", "num_beside"), [(SCREEN_S, {"throughput": 0, "latency": 1}), (2.0, dict.fromkeys(OBJECTIVES, 3))]
)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_in_a_small_budget_the_requests_after_loading_tell_the_latency(
    plan: Plan, objective: str, round_s: float, num_beside: Mapping[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contender, "outcome", lambda _: _Figures())
    ring = _Ring(plan, {PLAN: 100.0, "a": 90.0})
    found = Contest(cast(Bench, ring), objective, "", round_s).run(5, None)
    other = "latency" if objective == "throughput" else "throughput"
    assert {len(entry.rounds(other)) for entry in ring.loaded.values()} == {num_beside[objective]}
    assert {name: one.latency.p50_s for name, one in found.items()} == {PLAN: pytest.approx(0.01), "a": pytest.approx(1 / 90)}


def test_the_most_promising_baselines_are_loaded_first(plan: Plan) -> None:
    def way(backend: str, per_s: float, latency_s: float = 0.1, process: str = "workers") -> Plan:
        stages = tuple(replace(stage, backend=backend) for stage in plan.stages)
        prediction = replace(UNKNOWN, throughput_per_s=per_s, latency_s=latency_s)
        return replace(plan, stages=stages, prediction=prediction, process=cast(Any, process))

    plans = {
        "x slow": way("x", 5),
        "x unknown": way("x", 0, 0.0),
        "x best": way("x", 9, 1e-3),
        "x caller": way("x", 0, 0.0, "caller"),
        "y": way("y", 7),
        "far": way("far behind", 6),
        "compiled": way("compiled", 0, 0.0),
        "usual": way("eager", 1),
    }
    order = by_promise(comparing.Baselines(plans), "usual")
    assert order == ["usual", "x caller", "compiled", "y", "x best", "x unknown", "x slow", "far"]


def _load(plans: Mapping[str, Plan], keep: str, late_s: float, round_s: float) -> tuple[list[str], dict[str, str]]:
    """The names that a contest loads, and its reasons for the others."""
    bench = SimpleNamespace(loaded={})
    bench.load = lambda name, *_: bench.loaded.setdefault(name)
    contest = Contest(cast(Any, bench), plans[PLAN].objective, keep, round_s)
    reasons = contest.load(plans, cast(Any, {plans[PLAN].microbatch: None}), late_s)
    return list(bench.loaded), reasons


def test_what_may_win_is_loaded_however_late_it_is(plan: Plan) -> None:
    def way(per_s: float, latency_s: float) -> Plan:
        return replace(plan, prediction=replace(UNKNOWN, throughput_per_s=per_s, latency_s=latency_s))

    plans = {PLAN: way(100, 0.1), "kept": way(10, 1.0), "close": way(80, 0.2), "unknown": way(0, 0), "behind": way(70, 0.125)}
    for objective, left_out in {"throughput": {"behind": "0.70"}, "latency": {"close": "0.50"}}.items():
        asked = {name: replace(one, objective=cast(Any, objective)) for name, one in plans.items()}
        for late_s, round_s, all_run in ((-math.inf, 2.0, False), (math.inf, 2.0, True), (math.inf, SCREEN_S, False)):
            loaded, reasons = _load(asked, "kept", late_s, round_s)
            assert loaded == [name for name in plans if all_run or name not in left_out]
            assert {name: text.partition("(")[2][:4] for name, text in reasons.items()} == ({} if all_run else left_out)


def test_a_small_budget_loads_the_most_promising_ways_only(plan: Plan) -> None:
    names = [f"way {number}" for number in range(6)]
    loaded, reasons = _load(dict.fromkeys((PLAN, *names, "kept"), plan), "kept", math.inf, SCREEN_S)
    assert loaded == [PLAN, *names[:4], "kept"]
    assert reasons == dict.fromkeys(names[4:], NO_TIME)


@pytest.mark.parametrize(("num_ways", "round_s", "runs"), [(5, 2.0, True), (4, 2.0, False), (4, SCREEN_S, False)])
def test_each_of_many_ways_runs_for_a_moment_where_rounds_are_longer(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, num_ways: int, round_s: float, runs: bool
) -> None:
    screened: list[str] = []
    monkeypatch.setattr(Contest, "screen", lambda _, name: screened.append(name) or {})
    names = [f"way {number}" for number in range(num_ways)]
    loaded, _ = _load(dict.fromkeys((PLAN, *names), plan), "", math.inf, round_s)
    assert loaded == [PLAN, *names] and screened == (names if runs else [])


def test_no_way_stops_for_being_behind_one_that_must_not_be_chosen(plan: Plan) -> None:
    ring = _Ring(plan, {PLAN: 60.0, "barred": 100.0, "slow barred": 30.0, "a": 55.0}, drift=0.1)
    found = _halve(ring, "throughput", barred={"barred", "slow barred"})
    assert (found["barred"], found["slow barred"]) == (4, 1) and found["a"] >= 4 and found[PLAN] >= 4


def test_the_line_on_the_time_names_each_step_and_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "installed", lambda: ["eager", "inductor"])
    machine = Machine.of([parse_device("cpu:0")])
    short, long = (
        comparing.expectation(machine, Setup(store="kept"), Budget(search_s=search_s, num_rounds=2)) for search_s in (3.0, 20.0)
    )
    usual = ", ".join(Setup().considered)
    assert f"measure {usual} on cpu:0" in short and "(less where 'kept' holds it)" in short and "inductor" not in short
    assert "compile for inductor 20 s" in long and "run candidate plans 20 s (the budget)" in long
    assert short.endswith(f"baselines {Budget(search_s=3.0).compare_s:.0f} s"), "comparing ends at its limit"
    for line in (short, long):
        total, *parts = map(int, re.findall(r"(\d+) s\b", line))
        assert total == sum(parts)
    assert "compile" not in comparing.expectation(machine, Setup(backends=["eager"]), Budget(search_s=20.0))


class TwoHosts:
    """As ``Setup`` takes hosts; nothing asks them anything."""

    machine, measure, engine_factory = None, print, print


def test_no_baseline_of_a_plan_over_hosts_runs_in_the_callers_process(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(comparing, "compile_baselines", lambda *_: ([], {}))
    monkeypatch.setattr(comparing, "baselines_of", lambda *_, isolate, **__: seen.append(isolate) or comparing.Baselines())
    subjects: Any = {plan.microbatch: (SimpleNamespace(graph=None), None)}
    for hosts in (None, TwoHosts()):
        setup = comparing.Setup(hosts=hosts, workspace=Workspace())
        comparing._baselines(subjects, plan, cast(Any, None), None, setup, comparing.Budget(), quiet)
    assert seen == [False, True]
