"""What is said of a plan whose numbers are wrong."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from autosplit import comparing
from autosplit.alternatives import UNKNOWN
from autosplit.backends.base import BF16_TOLERANCE, F32_TOLERANCE, NumericalError, get_backend
from autosplit.backends.eager import EagerBackend
from autosplit.loading import load_model
from autosplit.plan import Plan, Stage
from autosplit.results import LatencyStats
from autosplit.running.pipeline import Pipeline
from autosplit.tracing import Traced, trace

ERROR = NumericalError(1.0, 0.5, "y")


class Zeros(EagerBackend):
    """Runs the stage and throws the answer away."""

    name, exact = "zeros", False

    def compile(self, program, threads, precision="f32"):
        run = super().compile(program, threads, precision)
        return lambda inputs: [torch.zeros_like(value) for value in run(inputs)]


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(load_model("autosplit.examples.mlp:mlp?depth=4&width=16"))


@pytest.fixture
def plan(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(comparing, "get_backend", lambda name: Zeros() if name == "zeros" else get_backend(name))
    ops = [op.name for op in traced.graph.ops]
    stages = Stage("one", tuple(ops[:4]), ("cpu:0",)), Stage("two", tuple(ops[4:]), ("cpu:1",), "zeros")
    return Plan(traced.source, traced.graph.hash, "", stages, UNKNOWN)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_the_stage_and_the_backend_with_wrong_numbers_are_named(traced: Traced, plan: Plan, precision: str) -> None:
    fault = comparing._blame(replace(plan, precision=precision), traced, traced.example_inputs, ERROR, 0.1)
    assert f"backend 'zeros' ({precision}) gives wrong numbers on stage 'stage1'" in fault


def test_where_no_stage_alone_is_wrong_the_backends_are_named(traced: Traced, plan: Plan) -> None:
    right = replace(plan, stages=tuple(replace(stage, backend="eager") for stage in plan.stages))
    fault = comparing._blame(right, traced, traced.example_inputs, ERROR, 0.1)
    assert "2 stages (eager, f32) differ from f32 eager: 'y' is off by 0.5" in fault and "tolerance is 0.1" in fault


def test_bits_are_asked_of_exact_stages_in_f32_only(traced: Traced, plan: Plan) -> None:
    work = [traced.example_inputs]
    expected = comparing._expected(traced, work, plan)
    exact = replace(plan, stages=plan.stages[:1])
    assert comparing._limit(exact, traced, work, expected) == 0
    assert comparing._limit(plan, traced, work, expected) == F32_TOLERANCE
    least, most = BF16_TOLERANCE
    assert least <= comparing._limit(replace(exact, precision="bf16"), traced, work, expected) < most


class _Ran:
    """A pipeline of two workers that answers a microbatch every 10 ms once it is full, and a whole second later at both ends."""

    def __init__(self) -> None:
        self.answered: list[int] = []

    def run_many(self, work: Sequence[object]) -> None:
        steps_ns = [10_000_000] * len(work)
        steps_ns[0] = steps_ns[1] = steps_ns[-1] = steps_ns[-2] = 1_000_000_000
        self.answered = list(accumulate(steps_ns))

    def answered_ns(self, count: int) -> list[int]:
        return self.answered[-count:]


def _loaded(plan: Plan, pipeline: object, p50_s: float = 0.1) -> comparing.Loaded:
    error = NumericalError(0.0, 0.0, "y")
    return comparing.Loaded(plan, cast(Pipeline, pipeline), [()], error, "", LatencyStats.of([p50_s]))


@pytest.mark.parametrize("num_items", [1, 20, 31])
def test_filling_and_draining_a_pipeline_do_not_count(plan: Plan, num_items: int) -> None:
    two = replace(plan, stages=(replace(plan.stages[0], devices=("cpu:0", "cpu:1")),))
    entry = _loaded(two, _Ran())
    entry.run(num_items)
    assert entry.rounds_per_s == [pytest.approx(100.0)]


def test_slower_ways_run_as_long_as_the_first_and_not_as_often(plan: Plan) -> None:
    ways = {"first": _loaded(plan, _Ran(), 0.1), "slow": _loaded(plan, _Ran(), 1.0), "fast": _loaded(plan, _Ran(), 0.01)}
    sent: dict[str, int] = {}
    for name, entry in ways.items():
        entry.run = functools.partial(sent.__setitem__, name)  # type: ignore[method-assign]
    comparing.Arena.run_round(cast(comparing.Arena, SimpleNamespace(loaded=ways)), ["first", "slow", "fast"], 1, 50)
    assert sent == {"first": 50, "slow": 5, "fast": 50}


class _Ring:
    """An arena in which each way has a speed of its own."""

    def __init__(self, plan: Plan, per_s: dict[str, float]) -> None:
        self.per_s = per_s
        self.loaded = {name: _loaded(plan, None, 1 / speed) for name, speed in per_s.items()}

    def run_round(self, names: Sequence[str], number: int, num_items: int) -> None:
        for name in names:
            self.loaded[name].rounds_per_s.append(self.per_s[name])

    def unload(self, name: str) -> None:
        del self.loaded[name]


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_the_slowest_of_too_many_ways_leave_and_the_one_to_keep_stays(plan: Plan, objective: str) -> None:
    ways = {f"way {number}": 10.0 * number for number in range(1, 8)}
    ring = _Ring(plan, {comparing.PLAN: 35.0, **ways})
    contest = comparing._Contest(cast(comparing.Arena, ring), objective, keep="way 1")
    reasons = {name: reason for way in ways for name, reason in contest.admit(way).items()}
    assert list(ring.loaded) == [comparing.PLAN, "way 1", "way 4", "way 5", "way 6", "way 7"]
    assert list(reasons) == ["way 2", "way 3"]
    assert reasons["way 2"] == "a short run was 0.57 times as good as the plan's"
