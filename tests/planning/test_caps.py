"""Plans within caps: the whole memory account, against brute force over all contiguous splits."""

from dataclasses import replace
from itertools import combinations, pairwise, permutations
from math import inf

import numpy as np
import pytest

from autosplit.errors import InfeasibleError, PlanError
from autosplit.memory.stages import StageKey, ValueMemory, count, footprints_of, stage_memories, with_footprints
from autosplit.planning.caps import front_within_caps, plan_within_caps
from autosplit.planning.predicting import predict
from autosplit.planning.question import Question, verify_early
from autosplit.values.constraints import Constraints, Objective
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage, cap_faults, held_on
from autosplit.values.profile import Profile
from autosplit.values.residency import fewest_bytes
from autosplit.values.samples import Footprint, stage_key

NAMES = ("null:0", "null:1")
SOURCE = Source("m:f")


def drawn(seed: int, num_ops: int = 6) -> tuple[Graph, Profile, Machine]:
    """A chain with random weights and values, one tied weight, and caps that some splits keep."""
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(1, 40, num_ops + 1) * 64]
    names = ["x", *(f"a{number}" for number in range(num_ops))]
    values = {name: Value(name, (size // 4,), "float32", size) for name, size in zip(names, sizes, strict=True)}
    weights = {f"w{k}": Value(f"w{k}", (1,), "float32", int(rng.integers(1, 60)) * 64) for k in range(num_ops)}
    read = [f"w{k}" if k != num_ops - 1 else "w0" for k in range(num_ops)]
    ops = tuple(Op(f"a{k}", "linear", "", (names[k],), (names[k + 1],), (read[k],), f"s{k}") for k in range(num_ops))
    graph = Graph("drawn", ("x",), (names[-1],), ops, values, weights)
    seconds = {(op.name, name): float(rng.integers(1, 9)) for op in ops for name in NAMES}
    caps = {name: int(rng.integers(200, 1600)) * 64 for name in NAMES}
    return graph, Profile.given(graph, seconds), Machine.of(map(parse_device, NAMES)).with_memory(caps)


def planned(graph: Graph, profile: Profile, machine: Machine, objective: Objective = "throughput") -> Plan:
    question = Question(
        graph, profile, SOURCE, machine, ("eager",), Constraints(objective=objective, max_replicas=1), time_limit_s=0.3
    )
    return plan_within_caps(question)


def figure_s(plan: Plan, objective: Objective) -> float:
    return plan.prediction.latency_s if objective == "latency" else plan.prediction.bottleneck_s


def every_split(graph: Graph, profile: Profile, machine: Machine) -> list[Plan]:
    """All plans with one or two contiguous stages, each on a device of its own, within the caps with few slots."""
    ops, found = [op.name for op in graph.ops], []
    for num_stages in (1, 2):
        for cuts in combinations(range(1, len(ops)), num_stages - 1):
            for devices in permutations(NAMES, num_stages):
                ends = zip((0, *cuts), (*cuts, len(ops)), strict=True)
                stages = [Stage(f"stage{k}", tuple(ops[a:b]), (devices[k],)) for k, (a, b) in enumerate(ends)]
                plan = Plan(SOURCE, graph.hash, profile.hash, tuple(stages), UNKNOWN, queue_depth=1)
                plan = count(graph, plan, None, footprints_of(profile))
                if not cap_faults(plan.stages, machine.devices, graph):
                    found.append(predict(plan, graph, machine, profile))
    return found


@pytest.mark.parametrize(("objective", "seeds"), [("throughput", (0, 1, 5, 19, 20, 23)), ("latency", (1, 5))])
def test_the_best_split_within_tight_caps_is_found_wherever_there_is_one(objective: Objective, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        graph, profile, machine = drawn(seed)
        possible = [figure_s(plan, objective) for plan in every_split(graph, profile, machine)]
        try:
            plan = planned(graph, profile, machine, objective).verify(graph, machine)
        except InfeasibleError:
            assert not possible
            continue
        assert all(stage.memory is not None for stage in plan.stages)
        found_s = figure_s(plan, objective)
        assert plan.prediction.bound_s <= found_s * (1 + 1e-9) and found_s <= min(possible, default=inf) * (1 + 1e-9)


def test_what_is_refused_before_ops_are_measured_has_no_plan_and_is_larger_than_its_caps() -> None:
    refused = 0
    for seed in range(20):
        graph, profile, free = drawn(seed)
        machine = free.with_memory({name: (free[name].memory_bytes or 0) // 12 for name in NAMES})
        try:
            assert verify_early(Constraints(), graph, machine) == Constraints()
        except InfeasibleError as failure:
            refused += 1
            assert " of weights" in failure.conflict[0] and not every_split(graph, profile, machine)
            with pytest.raises(InfeasibleError):
                planned(graph, profile, machine)
        least = fewest_bytes(*graph.own_bytes(op.name for op in graph.ops))
        streamed = Machine.of([parse_device("cuda:0")]).with_memory({"cuda:0": least})
        assert verify_early(Constraints(), graph, streamed) == Constraints()
        with pytest.raises(InfeasibleError, match=r"streamed ones take at least|of weights on one device"):
            verify_early(Constraints(), graph, streamed.with_memory({"cuda:0": least - 1}))
    assert 5 < refused < 15


def test_a_front_keeps_the_caps_with_all_that_its_plans_hold() -> None:
    graph, profile, machine = next(case for case in map(drawn, range(60)) if len(every_split(*case)) > 2)
    question = Question(graph, profile, SOURCE, machine, ("eager",), Constraints(max_replicas=1), time_limit_s=0.5)
    front = front_within_caps(question)
    best = planned(graph, profile, machine, "throughput")
    assert front[0][0].prediction.bottleneck_s == best.prediction.bottleneck_s
    for plan, peak_bytes in front:
        plan.verify(graph, machine)
        assert peak_bytes == max(sum(held_on(device, plan.stages, machine.devices, graph)) for device in machine.devices)


def test_what_was_measured_counts_in_place_of_weights_and_values() -> None:
    graph, profile, machine = drawn(0)
    everything = tuple(op.name for op in graph.ops)
    footprint = Footprint(1000, 90_000, 500)
    profile = with_footprints(profile, {StageKey("null", "eager", 1, "f32", stage_key(everything)): footprint})
    known = footprints_of(profile)
    halves = [everything[:3], everything[3:]]
    stages = tuple(Stage(f"stage{k}", ops, (NAMES[k],)) for k, ops in enumerate(halves))
    plan = Plan(SOURCE, graph.hash, profile.hash, stages, UNKNOWN)
    [whole] = stage_memories(graph, replace(plan, stages=(Stage("s", everything, NAMES[:1]),)), None, known)
    assert whole.measured and whole.held_bytes == 90_000 and whole.base_bytes == 1000
    for one, bare in zip(stage_memories(graph, plan, None, known), stage_memories(graph, plan), strict=True):
        assert not one.measured and one.base_bytes == 1000 and bare.base_bytes == 0
        assert one.held_bytes == bare.held_bytes + 500 and one.ring_bytes == bare.ring_bytes
    weighty = machine.with_memory(dict.fromkeys(NAMES, graph.weight_bytes))
    with pytest.raises(InfeasibleError, match=r"no plan within the caps was found: .* beside them .* its cap is"):
        planned(graph, profile, weighty)


def test_views_and_dead_values_take_no_memory() -> None:
    graph, _, _ = drawn(1)
    plan = Plan(SOURCE, graph.hash, "", (Stage("s", tuple(op.name for op in graph.ops), NAMES[:1]),), UNKNOWN)
    [dense] = stage_memories(graph, plan)
    plain = ValueMemory.of(graph)
    [viewed] = stage_memories(graph, plan, ValueMemory(plain.num_bytes, {f"a{k}": f"a{k - 1}" for k in range(1, 6)}))
    sizes = [plain.num_bytes[f"a{k}"] for k in range(6)]
    assert dense.arena_bytes == max(map(sum, pairwise(sizes)))
    assert viewed.arena_bytes == sizes[0]


def test_slots_follow_the_queue_depth_and_tight_caps_choose_fewer() -> None:
    """A stage of 128-byte tensors held 33 slots however few were asked for."""
    graph = Graph(
        "one",
        ("x",),
        ("y",),
        (Op("y", "relu", "", ("x",), ("y",), (), "s"),),
        {n: Value(n, (32,), "float32", 128) for n in "xy"},
        {},
    )
    machine = Machine.of([parse_device("null:0")])
    profile = Profile.given(graph, {("y", "null:0"): 1.0})
    ring_bytes = {}
    for depth in (8, 4, 2, 1):
        plan = plan_within_caps(Question(graph, profile, Source("m:f"), machine, ("eager",), queue_depth=depth))
        [stage] = count(graph, plan).stages
        assert stage.memory is not None
        ring_bytes[depth] = stage.memory.ring_bytes
    assert ring_bytes == {8: 33 * 128, 4: 33 * 128, 2: 17 * 128, 1: 9 * 128}
    tight = machine.with_memory({"null:0": 9 * 128 + 128})  # and the value
    plan = plan_within_caps(Question(graph, profile, Source("m:f"), tight, ("eager",)))
    assert plan.queue_depth == 1


def test_devices_that_share_a_memory_keep_its_cap_together() -> None:
    """Each was held to the cap, or to none, by itself."""
    graph, profile, free = drawn(2)
    profile = Profile.given(graph, {(op.name, name): 1.0 for op in graph.ops for name in NAMES})
    roomy = Machine.of([parse_device(NAMES[0]), replace(parse_device(NAMES[1]), shares=NAMES[0])])
    split = count(graph, planned(graph, profile, roomy))
    both = sum(held_on(roomy[NAMES[0]], split.stages, roomy.devices, graph))
    apart = [sum(held_on(free[name], split.stages, free.devices, graph)) for name in NAMES]
    assert len(split.stages) == 2 and both == sum(apart) > max(apart)
    split.verify(graph, roomy.with_memory({NAMES[0]: both}))
    tight = roomy.with_memory({NAMES[0]: both - 1})
    with pytest.raises(PlanError, match=r"device 'null:0', with null:1, would hold .*, and its cap is"):
        split.verify(graph, tight)
    planned(graph, profile, tight).verify(graph, tight)
    with pytest.raises(InfeasibleError) as failure:
        planned(graph, profile, roomy.with_memory({NAMES[0]: graph.stage_bytes(tuple(op.name for op in graph.ops)) - 1}))
    assert failure.value.conflict, "the weights alone need more, wherever they are"
