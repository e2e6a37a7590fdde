"""Several models on one host: the planner's ways on parts of a machine, the choice, its latencies and its refusals."""

from dataclasses import replace
from math import inf

import pytest

from autosplit.errors import InfeasibleError, UsageError
from autosplit.planning.question import Question
from autosplit.planning.sharing import Sharing, Tenant, cheapest_s, share_devices, tenants_of, ways_of
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import Source, held_on
from autosplit.values.profile import Profile

NAMES = ("null:0", "null:1")


def chain(name: str, seconds: tuple[float, ...], weight_bytes: int = 64) -> tuple[Graph, Profile]:
    """A chain of ops with these seconds on each device."""
    names = ["x", *(f"a{number}" for number in range(len(seconds)))]
    values = {one: Value(one, (1,), "float32", 4) for one in names}
    weights = {f"w{k}": Value(f"w{k}", (1,), "float32", weight_bytes) for k in range(len(seconds))}
    ops = tuple(Op(f"a{k}", "linear", "", (names[k],), (names[k + 1],), (f"w{k}",), f"s{k}") for k in range(len(seconds)))
    graph = Graph(name, ("x",), (names[-1],), ops, values, weights)
    return graph, Profile.given(graph, {(op.name, d): s for op, s in zip(ops, seconds, strict=True) for d in NAMES})


def planned(cases: list[tuple[Tenant, tuple[Graph, Profile]]], machine: Machine) -> Sharing:
    ways = []
    for tenant, (graph, profile) in cases:
        question = Question(graph, profile, Source("m:f"), machine, ("eager",), time_limit_s=0.3)
        ways.append(ways_of(question, tenant, len(cases)))
    tenants, graphs = [tenant for tenant, _ in cases], [graph for _, (graph, _) in cases]
    return share_devices(tenants, ways, graphs, machine)


def test_three_models_fill_two_devices() -> None:
    """0.5 and twice 0.25 of a device at the rates: the first has one for itself, or all share both."""
    machine = Machine.of(map(parse_device, NAMES))
    slow, quick = chain("slow", (0.02, 0.03)), chain("quick", (0.01, 0.015))
    cases = [(Tenant("a", 10.0), slow), (Tenant("b", 10.0), quick), (Tenant("c", 10.0), quick)]
    found = planned(cases, machine)
    assert found.factor == pytest.approx(2.0, rel=1e-3) and found.bound == pytest.approx(found.factor, rel=1e-3)
    assert sum(share for way in found.ways for share in way.shares.values()) == pytest.approx(1.0, rel=1e-3)
    assert found.saturation == found.factor
    assert "all rates and limits hold: the largest common factor is 2" in found.sentence
    [row, *_] = found.rows()
    assert row["predicted_per_s"] == pytest.approx(20.0, rel=1e-2) and row["latency_s"] == pytest.approx(0.1, rel=1e-2)
    seconds = cheapest_s(Question(*slow, Source("m:f"), machine, ("eager",)))
    assert {name: list(one) for name, one in seconds.items()} == {name: [0.02, 0.03] for name in NAMES}


def test_a_limit_on_latency_lowers_the_factor_and_is_named() -> None:
    machine = Machine.of([parse_device("null:0")])
    found = planned(
        [(Tenant("a", 10.0, max_latency_s=0.1), chain("a", (0.05,))), (Tenant("b", 10.0), chain("b", (0.02,)))], machine
    )
    assert found.factor == pytest.approx(0.5 / 0.7, rel=1e-2) and found.saturation == pytest.approx(1 / 0.7, rel=1e-2)
    assert found.latencies_s(found.factor)[0] == pytest.approx(0.1) and found.latencies_s(2.0) == [inf, inf]
    assert "the rates cannot be met" in found.sentence and "'a' is at its limit of 100" in found.sentence
    with pytest.raises(InfeasibleError, match=r"model 'a' alone: .*50"):
        planned([(Tenant("a", 10.0, max_latency_s=0.04), chain("a", (0.05,)))], machine)


def test_a_slowdown_counts_in_loads_and_latencies() -> None:
    """0.5 of a device for one model and 0.3 for each of two others; beside them the first takes twice as long."""
    machine = Machine.of(map(parse_device, NAMES))
    cases = [(Tenant("a", 10.0, slowdown=2.0), chain("a", (0.05,))), *[(Tenant(n, 10.0), chain(n, (0.03,))) for n in "bc"]]
    found = planned(cases, machine)
    assert found.factor == pytest.approx(2 / 1.6, rel=1e-2)
    assert sum(found.ways[0].shares.values()) == pytest.approx(1.0, rel=1e-2)
    at_s = found.latencies_s(0.5)[0]
    alone = replace(found, tenants=tuple(replace(tenant, slowdown=1.0) for tenant in found.tenants))
    assert alone.factor == pytest.approx(2 / 1.1, rel=1e-2) and at_s > 2 * alone.latencies_s(0.5)[0]


def test_memory_holds_for_all_models_together() -> None:
    cases = [(Tenant(name, 1.0), chain(name, (0.1,), 60)) for name in "abc"]
    machine = Machine.of(map(parse_device, NAMES))
    found = planned(cases, machine.with_memory(dict.fromkeys(NAMES, 2_200)))
    for device in machine.devices:
        both = zip(cases, found.plans, strict=True)
        assert sum(sum(held_on(device, plan.stages, machine.devices, graph)) for (_, (graph, _)), plan in both) <= 2_200
    with pytest.raises(InfeasibleError, match=r"fits all models together: they need at least 'a' .*caps are: 'null:0'"):
        planned(cases, machine.with_memory(dict.fromkeys(NAMES, 750)))


def test_a_set_of_cores_takes_time_of_each_core() -> None:
    graph, _ = chain("net", (0.1,))
    machine = Machine.of(map(parse_device, ("cpu:0-1", "cpu:0", "cpu:1")))
    profile = Profile.given(graph, {("a0", "cpu:0"): 0.1, ("a0", "cpu:1"): 0.1, ("a0", "cpu:0-1"): 0.06})
    threads = {setting: 2 if setting.device == "cpu:0-1" else 1 for setting in profile.measured}
    profile = replace(profile, measured={s._replace(threads=threads[s]): found for s, found in profile.measured.items()})

    question = Question(graph, profile, Source("m:f"), machine, ("eager",))
    ways = ways_of(question, Tenant("a", 1.0), 1)
    assert {tuple(plan.loads_s) for plan in ways} == {("cpu:0",), ("cpu:1",), ("cpu:0", "cpu:1"), ("cpu:0-1",)}
    [whole] = [plan for plan in ways if "cpu:0-1" in plan.loads_s]
    found = Sharing((Tenant("a", 10.0),), (whole,), machine, inf)
    assert found.ways[0].shares == pytest.approx({"cpu:0": 0.6, "cpu:1": 0.6}, rel=1e-3)


def test_every_fault_of_what_is_asked_is_named() -> None:
    with pytest.raises(UsageError) as failure:
        tenants_of(["a", "b"], {"a": 0.0, "c": 1.0}, {"a": -1.0}, {"a": -2.0})
    for words in ("'b' has no rate", "rates names 'c'", "rate of 'a' must be above 0", "limit of 'a'", "weight of 'a'"):
        assert words in str(failure.value)
    with pytest.raises(UsageError, match="there are no models"):
        tenants_of([], {})
