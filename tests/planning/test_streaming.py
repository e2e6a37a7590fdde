"""Models larger than an accelerator: which weights stay, are streamed or are on cores, against every split of a chain."""

from dataclasses import replace
from itertools import pairwise, product
from math import inf

import pytest

from autosplit.costs.cost import streamed
from autosplit.costs.planschedule import schedule_plan
from autosplit.errors import InfeasibleError, PlanError
from autosplit.memory.slots import NUM_CONTEXTS
from autosplit.planning.caps import front_within_caps, plan_within_caps
from autosplit.planning.explaining import explain
from autosplit.planning.predicting import predict, problem_of
from autosplit.planning.question import Question
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.links import Link
from autosplit.values.machine import HOST, Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage
from autosplit.values.planfile import read_plan, write_plan
from autosplit.values.profile import Profile
from autosplit.values.residency import least_bytes

CORE, GPU, SOURCE, M = "null:0", "cuda:0", Source("m:f"), 1_000_000
COPY_S_PER_BYTE, OP_S, CORE_S_PER_BYTE = 1e-6, 1.0, 4e-6
BESIDE = (NUM_CONTEXTS + 1) * 128
"""Bytes of inputs and outputs of the requests in progress, and of a value, each in a line of its own."""


def chain(weights: list[int]) -> Graph:
    names = ["x", *(f"a{k}" for k in range(len(weights)))]
    ops = tuple(
        Op(f"a{k}", "linear", "", (names[k],), (names[k + 1],), (f"w{k}",) if size else (), f"s{k}")
        for k, size in enumerate(weights)
    )
    values = {name: Value(name, (1,), "float32", 1) for name in names}
    return Graph(
        "chain", ("x",), (names[-1],), ops, values, {f"w{k}": Value(f"w{k}", (1,), "u8", s) for k, s in enumerate(weights)}
    )


def profile_of(graph: Graph) -> Profile:
    seconds = {(op.name, GPU): OP_S for op in graph.ops}
    own = graph.own_bytes(op.name for op in graph.ops)[0]
    seconds |= {(op.name, CORE): max(OP_S, size * CORE_S_PER_BYTE) for op, size in zip(graph.ops, own, strict=True)}
    return Profile.given(graph, seconds)


def machine_of(cap: int | None, *devices: str) -> Machine:
    links = [
        Link(a, b, 0.0, 0.0, 0.0, 0.0, 0.0, pinned_s_per_byte=COPY_S_PER_BYTE if (a, b) == (HOST, GPU) else 0.0)
        for a, b in product((HOST, *devices), repeat=2)
        if a != b
    ]
    machine = Machine.of(map(parse_device, devices), links)
    return machine if cap is None else machine.with_memory({GPU: cap})


def asked(graph: Graph, cap: int | None, *devices: str) -> Question:
    machine, demands = machine_of(cap, *devices), Constraints(max_replicas=1)
    return Question(graph, profile_of(graph), SOURCE, machine, ("eager",), demands, time_limit_s=1.0)


def planned(graph: Graph, cap: int | None, *devices: str) -> Plan:
    return plan_within_caps(asked(graph, cap, *devices))


def of_stages(graph: Graph, *stages: Stage) -> Plan:
    plan = Plan(SOURCE, graph.hash, "", stages, UNKNOWN)
    return predict(plan, graph, machine_of(None, CORE, GPU), profile_of(graph))


def every_split_s(graph: Graph, cap: int) -> float:
    """Least seconds of a plan whose first and last ops are on the core, and the others on the GPU, in what room there is."""
    names, least_s = [op.name for op in graph.ops], inf
    for first, last in product(range(len(names) + 1), repeat=2):
        if first > last:
            continue
        parts = [names[:first], names[first:last], names[last:]]
        stages = [Stage(f"s{k}", tuple(ops), (GPU if k == 1 else CORE,)) for k, ops in enumerate(parts) if ops]
        held = graph.stage_bytes(tuple(parts[1]))
        room = cap - BESIDE
        if held > room:
            if least_bytes(*graph.own_bytes(parts[1])) > room:
                continue
            stages = [replace(stage, resident_bytes=room) if stage.devices == (GPU,) else stage for stage in stages]
        least_s = min(least_s, of_stages(graph, *stages).prediction.bottleneck_s)
    return least_s


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("weights", [[M] * 8, [4 * M, 0, M, 0, M, 0, M, 0, M, 0, M, 0]])
def test_no_split_with_any_residency_is_better(weights: list[int], share: float) -> None:
    graph = chain(weights)
    cap = round(share * sum(weights)) + BESIDE
    plan = planned(graph, cap, CORE, GPU).verify(graph, machine_of(cap, CORE, GPU))
    assert plan.prediction.bound_s <= plan.prediction.bottleneck_s <= 1.03 * every_split_s(graph, cap)
    ops = tuple(op.name for op in graph.ops)
    least = least_bytes(*graph.own_bytes(ops))
    cores = of_stages(graph, Stage("s", ops, (CORE,)))
    on_gpu = of_stages(graph, Stage("s", ops, (GPU,), resident_bytes=max(least, cap - BESIDE)))
    others = [cores, on_gpu] if least <= cap - BESIDE else [cores]
    assert plan.prediction.bottleneck_s <= 1.0001 * min(one.prediction.bottleneck_s for one in others)


def test_a_model_on_the_accelerator_alone_is_streamed_and_slower_by_its_copies() -> None:
    graph = chain([M] * 8)
    plan = planned(graph, 4 * M + BESIDE, GPU)
    [stage] = plan.stages
    assert [one.hash for one, _ in front_within_caps(asked(graph, 4 * M + BESIDE, GPU))] == [plan.hash]
    assert stage.resident_bytes == 4 * M and stage.memory is not None and plan.rows()[0]["backend"] == "eager, streamed"
    assert stage.memory.weight_bytes == stage.resident_bytes
    assert plan.prediction.bottleneck_s == pytest.approx(8.0, rel=0.01)  # six copies of 1 s are beside eight ops
    simulated = schedule_plan(plan, graph, profile_of(graph), machine_of(4 * M + BESIDE, GPU).link, num_requests=30)
    assert simulated.steady_per_s == pytest.approx(plan.prediction.throughput_per_s, rel=1e-6)
    why = explain(graph, plan, machine_of(4 * M + BESIDE, GPU), profile_of(graph), time_limit_s=1.0)
    assert why.bound_by == "compute"


def test_what_bounds_a_streamed_plan_is_the_link_or_the_memory() -> None:
    graph = chain([3 * M] * 8)
    plan = planned(graph, 9 * M + BESIDE, GPU)
    why = explain(graph, plan, machine_of(9 * M + BESIDE, GPU), profile_of(graph), time_limit_s=2.0)
    assert why.bound_by == "memory" and why.devices[0].transfer_s > why.devices[0].compute_s
    assert " s of it are waits for streamed weights)" in why.because
    assert {change.change for change in why.changes} >= {"twice the bandwidth", "no memory caps"}
    faster = {change.change: change.times for change in why.changes}
    simulated = schedule_plan(plan, graph, profile_of(graph), machine_of(None, GPU).link, num_requests=30)
    assert simulated.steady_per_s == pytest.approx(plan.prediction.throughput_per_s, rel=1e-6)
    assert 1.5 < faster["twice the bandwidth"] <= 2.0 < faster["no memory caps"]


def test_an_op_larger_than_the_cap_goes_to_a_core_or_is_named() -> None:
    graph = chain([9 * M, M, M, M, M])
    plan = planned(graph, 2_500_000, CORE, GPU)
    assert [stage.devices for stage in plan.stages if "a0" in stage.ops] == [(CORE,)]
    assert any(stage.resident_bytes is not None for stage in plan.stages)
    with pytest.raises(
        InfeasibleError, match=r"op 'a0': its weights alone take .*B, streamed or not, and the cap of 'cuda:0' is"
    ):
        planned(graph, 2_500_000, GPU)


def test_a_plan_file_says_what_is_streamed_and_each_contradiction_is_refused(tmp_path) -> None:
    graph, path = chain([M] * 8), tmp_path / "plan.yaml"
    plan = planned(graph, 4 * M + BESIDE, GPU)
    write_plan(plan, graph, path)
    assert read_plan(path).resolve(graph) == plan
    text = path.read_text(encoding="utf-8")
    assert "  residency: streamed\n  resident_bytes: " in text
    least = text.replace(f"  resident_bytes: {plan.stages[0].resident_bytes}\n", "")
    path.write_text(least, encoding="utf-8")
    edited = read_plan(path).resolve(graph)
    assert edited.stages[0].resident_bytes == 2 * M and not edited.prediction.throughput_per_s
    for before, after, fault in (
        ("residency: streamed", "residency: floating", "'resident' or 'streamed'"),
        ("residency: streamed", "residency: resident", "has resident_bytes, and all its weights stay; add residency: streamed"),
        ("resident_bytes: ", "resident_bytes: -", "greater than or equal to 0"),
    ):
        path.write_text(text.replace(before, after), encoding="utf-8")
        with pytest.raises(PlanError, match=fault):
            read_plan(path).resolve(graph)
    machine = machine_of(4 * M + BESIDE, CORE, GPU)
    for stage, fault in (
        (replace(plan.stages[0], devices=(CORE,)), "'null:0' computes in the memory of the host, where its weights are"),
        (replace(plan.stages[0], backend="openvino"), "is streamed on openvino, and only eager streams weights"),
        (replace(plan.stages[0], resident_bytes=1500), r"has resident_bytes=1500; .* take at least 2000000 \(1.9 MiB\)"),
        (replace(plan.stages[0], resident_bytes=6 * M), "'cuda:0' would hold .* of weights"),
        (replace(plan.stages[0], resident_bytes=99 * M), r"(?s)weights take 8000000 \(7.6 MiB\): they stay.*hold 7.6 MiB of"),
        (replace(plan.stages[0], devices=(CORE,), backend="openvino"), "(?s)2 faults.*'null:0' computes.*streamed on openvino"),
    ):
        with pytest.raises(PlanError, match=fault):
            replace(plan, stages=(stage,)).verify(graph, machine)


def test_a_block_without_weights_is_never_streamed() -> None:
    graph = chain([3 * M, 3 * M, 0])
    plan = of_stages(graph, Stage("s0", ("a0", "a1"), (GPU,)), Stage("s1", ("a2",), (GPU,)))
    problem, blocks = problem_of(plan, graph, machine_of(4 * M, GPU), profile_of(graph), Constraints())
    assert [block.resident_bytes for block in streamed(problem, blocks)] == [4 * M, inf]


def test_two_stages_on_one_accelerator_share_its_room() -> None:
    graph = chain([M] * 8)
    names = [op.name for op in graph.ops]
    halves = [Stage(f"s{k}", tuple(names[a:b]), (GPU,), resident_bytes=2_500_000) for k, (a, b) in enumerate(pairwise((0, 4, 8)))]
    plan = of_stages(graph, *halves)
    assert plan.prediction.bottleneck_s >= 8.0
    assert not [stage for stage in plan.verify(graph, machine_of(5 * M + 1000, CORE, GPU)).stages if stage.load_s < 4.0]
    with pytest.raises(PlanError, match=r"would hold 4\.8 MiB of weights.*its cap is 3\.9 MiB"):
        plan.verify(graph, machine_of(4_100_000, CORE, GPU))
