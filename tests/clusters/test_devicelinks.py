"""Links between devices of different hosts: who pays for the processor time of agents and driver, by hand."""

from itertools import permutations
from math import log

import numpy as np
import pytest

from autosplit.clusters import devicelinks
from autosplit.clusters.agent import HostFacts
from autosplit.clusters.devicelinks import FrameSizes, Payers, links_of
from autosplit.clusters.relaycost import COOLING_S, relay_after
from autosplit.costs.cost import evaluate
from autosplit.costs.graphproblem import problem_from
from autosplit.costs.pieces import latency_s
from autosplit.costs.planschedule import schedule_blocks
from autosplit.planners.portfolio import solve
from autosplit.values.constraints import Demands
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.links import Link
from autosplit.values.machine import HOST, Machine, parse_device

NETWORK_S, RING_S = 0.5, 0.0625
DRIVER_S, DRIVER_S_PER_BYTE, AGENT_S, AGENT_S_PER_BYTE = 0.125, 0.001, 0.25, 0.002
DEVICES = [parse_device(name) for name in ("a/cpu:0", "b/cpu:1")]
NETWORK = [Link(source, target, NETWORK_S, 0, 0, 0, 0) for source, target in permutations((HOST, "a", "b"), 2)]
RINGS = [
    Link(*ends, 0, RING_S, 0, RING_S, 0)
    for device in DEVICES
    for ends in ((device.name, device.host), (device.host, device.name))
]
RELAY = Link(HOST, "a", 0, DRIVER_S, DRIVER_S_PER_BYTE, AGENT_S, AGENT_S_PER_BYTE)
ALL, NOBODY = Payers(frozenset("ab"), frozenset("ab")), Payers(frozenset(), frozenset())


ONE = FrameSizes(inputs=1, between=1, outputs=1)


def machine(payers: Payers, sizes: FrameSizes = ONE) -> Machine:
    links = links_of(Machine.of(DEVICES, NETWORK), RINGS, {"a": RELAY, "b": RELAY}, payers, sizes)
    return Machine.of(DEVICES, links)


def facts(name: str, cores: tuple[int, ...], device: str, boot_id: str = "one") -> HostFacts:
    return HostFacts(name, "", 0, 0, (parse_device(device),), 0, {}, cores, boot_id)


def test_devices_pay_for_agents_and_driver_on_their_cores() -> None:
    paying = machine(ALL)
    assert paying.link("a/cpu:0", "b/cpu:1") == Link(
        "a/cpu:0", "b/cpu:1", NETWORK_S, RING_S + AGENT_S, AGENT_S_PER_BYTE, RING_S + AGENT_S, AGENT_S_PER_BYTE
    )
    both_s, both_s_per_byte = AGENT_S + DRIVER_S, AGENT_S_PER_BYTE + DRIVER_S_PER_BYTE
    assert paying.link(HOST, "a/cpu:0") == Link(HOST, "a/cpu:0", NETWORK_S, 0, 0, RING_S + both_s, both_s_per_byte)
    assert paying.link("b/cpu:1", HOST) == Link("b/cpu:1", HOST, NETWORK_S, RING_S + both_s, both_s_per_byte, 0, 0)
    assert paying.link("a", "a") == Link("a", "a", NETWORK_S, AGENT_S, AGENT_S_PER_BYTE, AGENT_S, AGENT_S_PER_BYTE), "passing a"


def test_processes_with_a_core_to_spare_cost_devices_nothing() -> None:
    spare = machine(NOBODY)
    assert spare.link("a/cpu:0", "b/cpu:1") == Link("a/cpu:0", "b/cpu:1", NETWORK_S + 2 * AGENT_S, RING_S, 0, RING_S, 0)
    assert spare.link("a", "a") == Link("a", "a", NETWORK_S + 2 * AGENT_S, 0, 0, 0, 0)
    assert spare.link(HOST, "a/cpu:0") == Link(HOST, "a/cpu:0", NETWORK_S + AGENT_S + DRIVER_S, 0, 0, RING_S, 0)


def test_who_pays_follows_from_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devicelinks, "boot_id", lambda: "one")
    monkeypatch.setattr(devicelinks, "affinity", lambda: (0, 1))
    a, b = facts("a", (0,), "cpu:0"), facts("b", (1,), "cpu:1")
    assert Payers.of([a, b]) == ALL
    assert Payers.of([a]) == Payers(frozenset("a"), frozenset()), "the driver has core 1"
    assert Payers.of([facts("a", (0, 1), "cpu:0")]) == NOBODY
    assert Payers.of([facts("a", (0, 1), "cpu:0"), b]) == ALL, "the other host on this machine uses core 1"
    assert Payers.of([a, facts("b", (1,), "cpu:1", "two")]) == Payers(frozenset("ab"), frozenset())
    assert Payers.of([facts("a", (0, 1), "cpu:0-1"), facts("b", (1,), "cpu:1", "two")]).driver == frozenset("a")


def test_values_that_share_a_frame_share_its_fixed_cost() -> None:
    shared = machine(ALL, FrameSizes(inputs=2, between=4, outputs=5))
    assert shared.link("a/cpu:0", "b/cpu:1").send_s == RING_S + AGENT_S / 4
    assert shared.link(HOST, "a/cpu:0").receive_s == RING_S + (AGENT_S + DRIVER_S) / 2
    assert shared.link("b/cpu:1", HOST).send_s == RING_S + (AGENT_S + DRIVER_S) / 5
    assert shared.link("b/cpu:1", HOST).send_s_per_byte == AGENT_S_PER_BYTE + DRIVER_S_PER_BYTE


def test_frame_sizes_are_counted_on_the_graph() -> None:
    """Four ops in a row; the first value is read by all of them: 1, 2 and 2 values cross the three cuts."""
    reads = {"one": ("x",), "two": ("a",), "three": ("a", "b"), "four": ("a", "c")}
    made = dict(zip(reads, "abcd", strict=True))
    ops = tuple(Op(name, "f", "", values, (made[name],), (), "f") for name, values in reads.items())
    graph = Graph("skips", ("x", "unread"), ("d", "d"), ops, {n: Value(n, (1,), "uint8", 1) for n in ("unread", *"xabcd")}, {})
    assert FrameSizes.of(graph) == FrameSizes(inputs=1, between=2, outputs=1)


def test_the_cache_decides_between_the_warm_and_the_cold_time() -> None:
    relay = Link(HOST, "a", 0, 1.0, 0.1, 2.0, 0.2, cold_send_s=3.0, cold_receive_s=6.0)
    assert relay_after(relay, 0) == Link(HOST, "a", 0, 1.0, 0.1, 2.0, 0.2)
    half = relay_after(relay, COOLING_S * log(2))
    assert (half.send_s, half.receive_s) == (pytest.approx(2.0), pytest.approx(4.0))
    assert relay_after(relay, 1e6) == Link(HOST, "a", 0, 3.0, 0.1, 6.0, 0.2)


@pytest.mark.parametrize("payers", [ALL, NOBODY])
def test_planner_evaluator_and_simulation_count_the_same(payers: Payers) -> None:
    num_bytes, op_s = 10, 3.0
    graph = Graph(
        "chain",
        inputs=("x",),
        outputs=("z",),
        ops=tuple(Op(*names) for names in (("one", "f", "", ("x",), ("y",), (), "f"), ("two", "f", "", ("y",), ("z",), (), "f"))),
        values={name: Value(name, (num_bytes,), "uint8", num_bytes) for name in "xyz"},
        weights={},
    )
    problem = problem_from(graph, machine(payers), np.full((2, len(DEVICES)), op_s))
    found = solve(problem, Demands(num_stages=2, max_replicas=1), time_limit_s=1.0)
    relayed_s = 2 * AGENT_S + DRIVER_S + num_bytes * (2 * AGENT_S_PER_BYTE + DRIVER_S_PER_BYTE) if payers is ALL else 0.0
    assert found.objective_s == pytest.approx(op_s + 2 * RING_S + relayed_s)
    assert evaluate(problem, found.blocks).bottleneck_s == pytest.approx(found.objective_s)
    alone_s = latency_s(problem, found.blocks)
    assert schedule_blocks(problem, found.blocks, 1).makespan_s == pytest.approx(alone_s)
    assert schedule_blocks(problem, found.blocks, 40).makespan_s == pytest.approx(alone_s + 39 * found.objective_s)
