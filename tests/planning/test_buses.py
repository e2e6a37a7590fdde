"""Accelerators with a link each and a shared bus: predicted, simulated as a schedule, and run on simulated devices."""

from itertools import pairwise

import pytest

from autosplit import api
from autosplit.planning.explaining import explain
from autosplit.tracing.capturing import Traced
from autosplit.values.plan import Plan, Stage
from autosplit.values.residency import least_bytes
from benchmarks.gpucases import Case, simulated_case


@pytest.fixture(scope="module")
def traced() -> Traced:
    return api.trace("autosplit.examples.mlp:mlp?depth=8&width=512", batch=128)


def parted(case: Case, num_kept: int) -> Plan:
    """Equal parts of the ops on the accelerators, with room for so many layers beside the least."""
    graph, layer = case.traced.graph, max(case.traced.graph.own_bytes(case.ops)[0])
    ends = [k * len(case.ops) // len(case.names[1:]) for k in range(len(case.names))]
    parts = [(ops, least_bytes(*graph.own_bytes(ops)) + num_kept * layer) for a, b in pairwise(ends) for ops in [case.ops[a:b]]]
    return case.given(*(Stage(f"s{k}", ops, (f"cuda:{k}",), resident_bytes=room) for k, (ops, room) in enumerate(parts)))


@pytest.mark.parametrize(
    ("num_gpus", "rate", "num_kept"), [(2, 0.0, 0), (2, 1e10, 0), (2, 1e10, 1), (2, 1.5e10, 0), (4, 1e10, 0)]
)
def test_a_plan_takes_the_time_that_is_predicted_where_streams_and_values_share_a_bus(traced, num_gpus, rate, num_kept) -> None:
    """Schedules of four were 11 % too fast: towards their end the first stages were done and left the bus to the last one."""
    case = simulated_case(traced, num_gpus, rate)
    plan = parted(case, num_kept)
    predicted = 1 / plan.prediction.bottleneck_s
    assert case.run_per_s(plan) == pytest.approx(predicted, rel=0.05)
    assert case.scheduled_per_s(plan) == pytest.approx(predicted, rel=0.02)


def test_a_narrow_bus_bounds_a_plan_and_is_named(traced) -> None:
    free, shared = simulated_case(traced, 2), simulated_case(traced, 2, 1e10)
    assert parted(shared, 0).prediction.throughput_per_s < 0.6 * parted(free, 0).prediction.throughput_per_s
    why = explain(traced.graph, parted(shared, 0), shared.machine, shared.profile, time_limit_s=0.5)
    assert why.bound_by == "transfer" and "'bus of cuda:0, cuda:1 (in)' is the bottleneck" in why.because
    assert {one.change: one.times for one in why.changes}["twice the bandwidth"] > 1.5


def test_two_accelerators_hold_what_one_would_stream(traced) -> None:
    one, two = simulated_case(traced, 1), simulated_case(traced, 2, 1e10)
    plans = [case.planned(int(0.5 * traced.graph.weight_bytes), time_limit_s=0.3) for case in (one, two)]
    assert any(stage.resident_bytes for stage in plans[0].stages)
    assert not any(stage.resident_bytes for stage in plans[1].stages)
    assert plans[1].prediction.throughput_per_s > 1.5 * plans[0].prediction.throughput_per_s
