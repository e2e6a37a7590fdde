"""Wires between hosts: what passes them, by evaluator, simulator and planner, beside sums by hand and brute force."""

from dataclasses import replace
from random import Random

import exhaustive
import numpy as np
import pytest
from fuzzing import examples
from problems import chain, random_blocks, random_problem

from autosplit.costs.cost import evaluate
from autosplit.costs.pieces import latency_s
from autosplit.costs.planschedule import schedule_blocks
from autosplit.costs.problem import HOST, Block, Net, Transfers
from autosplit.costs.wires import Wires
from autosplit.planners.portfolio import solve
from autosplit.values.constraints import Demands
from autosplit.values.links import Wire, bus

HOSTS = ("host", "a", "b", "c")


def cards(s_per_byte: float, hosts=HOSTS) -> tuple[Wire, ...]:
    """The card of each host, out and in."""
    ways = [
        (Wire(f"{one} sends", (one,), hosts, s_per_byte), Wire(f"{one} receives", hosts, (one,), s_per_byte)) for one in hosts
    ]
    return tuple(wire for pair in ways for wire in pair)


def on_hosts(problem, s_per_byte: float, per_host: int = 1):
    """The problem with ``per_host`` devices on each host, and cards."""
    names = tuple(f"{HOSTS[1 + number // per_host]}/cpu:{number % per_host}" for number in range(problem.num_devices))
    return replace(problem, devices=names, wires=Wires(cards(s_per_byte)))


def loads(problem, blocks) -> dict[str, float]:
    found = evaluate(problem, blocks)
    return {wire.name: load for wire, load in zip(problem.wires.all, found.wire_s.tolist(), strict=True) if load}


def test_a_card_carries_all_that_its_links_carry():
    problem = on_hosts(chain([1, 1, 1], 3, nets=(Net(HOST, (0,), 8.0), Net(0, (1, 2), 2.0), Net(2, (HOST,), 1.0))), 0.5)
    problem = replace(problem, transfers=Transfers.free(3))
    blocks = [Block((op,), (op,)) for op in range(3)]
    assert loads(problem, blocks) == {
        "host sends": 4.0, "a receives": 4.0, "a sends": 1.0, "b receives": 1.0, "b sends": 1.0, "c receives": 1.0,
        "c sends": 0.5, "host receives": 0.5,
    }  # fmt: skip
    assert evaluate(problem, blocks).bottleneck_s == 4.0 and evaluate(problem, blocks).device_s.max() == 1.0
    assert latency_s(problem, blocks) == pytest.approx(4 + 1 + (1 + 1) + 1 + 0.5)  # a value for c passes b


def test_a_value_passes_the_hosts_in_between():
    """Predicted as if it went straight from a to c, a plan over a slow card was 3.2 times as fast as measured."""
    nets = (Net(HOST, (0, 2), 8.0), Net(0, (1,), 1.0), Net(0, (2,), 4.0), Net(1, (HOST,), 2.0), Net(2, (HOST,), 2.0))
    problem = replace(on_hosts(chain([1, 1, 1], 3, nets=nets), 0.5), transfers=Transfers.free(3))
    blocks = [Block((op,), (op,)) for op in range(3)]
    assert loads(problem, blocks) == {
        "host sends": 4.0, "a receives": 4.0, "a sends": (8 + 1 + 4) / 2, "b receives": (8 + 1 + 4) / 2,
        "b sends": (8 + 4 + 2) / 2, "c receives": (8 + 4 + 2) / 2, "c sends": 2.0, "host receives": 2.0,
    }  # fmt: skip
    passed = replace(problem, wires=replace(problem.wires, passing_s={"b": 0.25}))
    assert latency_s(passed, blocks) == latency_s(problem, blocks) + 0.25, "the value from a to c passes b"


def test_replicas_that_take_turns_meet_those_of_their_own_host():
    problem = on_hosts(chain([1, 1], 4, num_bytes=8.0), 0.5, per_host=2)
    both = [Block((0,), (0, 2)), Block((1,), (1, 3))]
    crossed = [Block((0,), (0, 2)), Block((1,), (3, 1))]
    assert loads(problem, both) == {}
    assert loads(problem, crossed) == {"a sends": 2.0, "a receives": 2.0, "b sends": 2.0, "b receives": 2.0}


@pytest.mark.parametrize(("peer_to_peer", "between"), [(False, 2.0), (True, 0.0)])
def test_a_bus_carries_what_enters_and_what_leaves_its_devices_and_their_streamed_weights(peer_to_peer, between):
    nets = (Net(HOST, (0,), 8.0), Net(0, (1,), 4.0), Net(1, (2,), 6.0), Net(2, (HOST,), 10.0))
    wires = Wires(bus(("cuda:0", "cuda:1"), ("cpu:0",), 0.5, peer_to_peer))
    problem = replace(
        chain([1, 1, 1], 3, nets=nets),
        devices=("cuda:0 (eager)", "cuda:1", "cpu:0"),
        transfers=Transfers.free(3),
        op_bytes=np.array([0.0, 16.0, 0.0]),
        pinned_s_per_byte=(0.01, 0.01, 0.0),
        wires=wires,
    )
    enters, leaves = "bus of cuda:0, cuda:1 (in)", "bus of cuda:0, cuda:1 (out)"
    blocks = [Block((op,), (op,)) for op in range(3)]
    assert loads(problem, blocks) == {enters: 4.0 + between, leaves: 3.0 + between}
    two = [Block((0,), (0,)), Block((1,), (0,)), Block((2,), (2,))]  # between two stages on one device too
    assert loads(problem, two) == {enters: 4.0 + between, leaves: 3.0 + between}
    turns = [Block((0, 1), (0, 1)), Block((2,), (2,))]
    assert loads(problem, turns) == {enters: 4.0, leaves: 3.0}
    assert evaluate(problem, turns).bottleneck_s == 4.0 and problem.device_classes == ((0, 1), (2,))
    kept = [Block((0, 1, 2), (0,), resident_bytes=16.0)]
    assert loads(problem, kept) == {enters: 4.0, leaves: 5.0}
    twice = replace(problem, op_bytes=np.array([16.0, 16.0, 16.0]))  # of three equal parts, two in the two buffers
    assert loads(twice, [Block((0, 1, 2), (0,), resident_bytes=32.0)]) == {enters: 4.0 + 24.0, leaves: 5.0}


@pytest.mark.parametrize("seed", range(4))
def test_plans_around_a_bus_are_as_good_as_brute_force(seed):
    problem = random_problem(seed, num_ops=4, num_devices=3, caps=False, pooled=False)
    problem = replace(problem, devices=("cuda:0", "cuda:1", "cpu:0"), wires=Wires(bus(("cuda:0", "cuda:1"), ("cpu:0",), 0.7)))
    found = solve(problem, Demands(), time_limit_s=0.5)
    best = exhaustive.best_blocks(problem, Demands(reuse=False))
    assert best is not None and found.bound_s <= best[1] * (1 + 1e-6) and found.objective_s <= best[1] * 1.25


@pytest.mark.parametrize("seed", range(examples(20)))
def test_the_simulation_keeps_the_pace_of_the_evaluator(seed):
    problem = on_hosts(random_problem(seed, num_ops=5, num_devices=3, unsupported=False), 0.3 * Random(seed).random())
    blocks = random_blocks(problem, seed)
    schedule = schedule_blocks(problem, blocks, 200)
    value_s = evaluate(problem, blocks).bottleneck_s
    assert schedule.makespan_s >= 199 * value_s * (1 - 1e-9)
    assert schedule.makespan_s <= 230 * value_s + latency_s(problem, blocks)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
@pytest.mark.parametrize("seed", range(examples(6)))
def test_plans_around_wires_are_as_good_as_brute_force(seed, objective):
    problem = random_problem(seed, num_ops=4, num_devices=3, caps=False, pooled=False)
    problem = on_hosts(problem, 0.5 * (1 + seed % 3))
    demands = Demands(objective=objective)
    found = solve(problem, demands, time_limit_s=0.5)
    best = exhaustive.best_blocks(problem, replace(demands, reuse=objective == "latency"))
    assert best is not None
    assert found.bound_s <= best[1] * (1 + 1e-6)
    assert found.objective_s <= best[1] * 1.25
