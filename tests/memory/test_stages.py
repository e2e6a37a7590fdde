"""The memory account of a core beside an accelerator: on a device counts what lies on the device."""

from dataclasses import replace
from itertools import pairwise

import pytest

from autosplit.errors import InfeasibleError
from autosplit.memory.account import Account
from autosplit.memory.slots import NUM_CONTEXTS
from autosplit.memory.stages import BUFFER_BYTES, OP_BYTES, StageKey, ValueMemory, count, stage_memories
from autosplit.planning.caps import plan_within_caps
from autosplit.planning.question import Question
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage, held_on
from autosplit.values.profile import Profile
from autosplit.values.samples import Footprint, Precision, stage_key

MB = 1_000_000
NAMES = [f"v{number}" for number in range(7)]
GRAPH = Graph(
    "chain",
    ("v0",),
    ("v6",),
    tuple(Op(one, "linear", "", (before,), (one,), (f"w{one}",), "s") for before, one in pairwise(NAMES)),
    {name: Value(name, (32,), "float32", 128) for name in NAMES},
    {f"w{name}": Value(f"w{name}", (1,), "float32", 100 * MB) for name in NAMES[1:]},
)
OPS = [op.name for op in GRAPH.ops]
MACHINE = Machine.of(map(parse_device, ("cpu:0", "cuda:0")))
HOST_WORKER = Footprint(300 * MB, 320 * MB, 20 * MB)
KNOWN = {StageKey("cpu", "eager", 1, "f32", stage_key(OPS[:2])): HOST_WORKER}


def capped(cap_bytes: int | None = None, context_bytes: int = 0, cpu_bytes: int | None = None) -> Machine:
    cuda = replace(MACHINE["cuda:0"], memory_bytes=cap_bytes, context_bytes=context_bytes)
    devices = replace(MACHINE["cpu:0"], memory_bytes=cpu_bytes), cuda
    return replace(MACHINE, devices=devices)


def question(machine: Machine) -> Question:
    profile = Profile.given(GRAPH, {(op, name): s for op in OPS for name, s in (("cpu:0", 1.0), ("cuda:0", 0.01))})
    return Question(GRAPH, profile, Source("m:f"), machine, ("eager",), Constraints(max_replicas=1), time_limit_s=0.3)


def test_the_process_and_the_rings_of_the_host_are_not_charged_to_the_accelerator() -> None:
    stages = Stage("stage0", tuple(OPS[:2]), ("cpu:0",)), Stage("stage1", tuple(OPS[2:]), ("cuda:0",))
    plan = count(GRAPH, Plan(Source("m"), GRAPH.hash, "", stages, UNKNOWN), None, KNOWN)
    core, device = (stage.memory for stage in plan.stages)
    assert core is not None and core.measured and core.base_bytes == 300 * MB
    assert device is not None and (device.base_bytes, device.backend_bytes, device.measured) == (0, 0, False)
    assert device.ring_bytes == NUM_CONTEXTS * (128 + 128)  # one input and one output for each request in progress


def test_a_table_that_a_product_shares_counts_twice_where_weights_are_packed_and_once_elsewhere() -> None:
    embedding, *products = (replace(op, weights=("wv1",)) for op in GRAPH.ops)
    graph = replace(GRAPH, ops=(replace(embedding, operator="aten.embedding.default"), *products))

    def backend_bytes(backend: str, names: list[str]) -> int:
        stage = Stage("one", tuple(names), ("cpu:0",), backend)
        [memory] = stage_memories(graph, Plan(Source("m"), graph.hash, "", (stage,), UNKNOWN))
        return memory.backend_bytes

    assert [backend_bytes(name, OPS) for name in ("onnxruntime", "eager")] == [100 * MB, 0]
    assert backend_bytes("onnxruntime", OPS[1:]) == backend_bytes("onnxruntime", OPS[:1]) == 0


@pytest.mark.parametrize(
    ("precision", "custom", "num_tables", "num_packed"),
    [("f32", "mine.custom.default", 0, 0), ("bf16", "mine.custom.default", 0.5, 1.5), ("f32", "aten.relu.default", 1, 3)],
)
def test_weights_of_products_as_they_are_stored_count_once(
    precision: Precision, custom: str, num_tables: float, num_packed: float
) -> None:
    """In f32 beside a custom operator, also a table of a lookup. Else OpenVINO packs them for each program, halved in bf16."""
    lookup, between, product = (replace(op, operator="aten.linear.default", weights=("wv1",)) for op in GRAPH.ops[:3])
    ops = replace(lookup, operator="aten.embedding.default"), replace(between, operator=custom, weights=()), product
    graph = replace(GRAPH, ops=ops, outputs=("v3",))
    sizes = ValueMemory(dict.fromkeys(NAMES, 128), others=[dict.fromkeys(NAMES, 64)] * 2)
    for backend, values, num in (("onnxruntime", sizes, num_tables), ("openvino", sizes, num_packed)):
        stage = Stage("one", tuple(OPS[:3]), ("cpu:0",), backend, precision=precision)
        [memory] = stage_memories(graph, Plan(Source("m"), graph.hash, "", (stage,), UNKNOWN), values)
        assert memory.backend_bytes // (50 * MB) == 2 * num


def test_each_program_of_a_worker_keeps_what_its_files_hand_to_custom_operators() -> None:
    """v0 and v2 enter and leave an operator between files, at two sizes; elsewhere values are freed after their last reader."""
    names = ("aten.mm.default", "mine.custom.default", "aten.mm.default", "aten.mm.default", "aten.mm.default", "aten.mm.default")
    ops = (replace(op, operator=name) for op, name in zip(GRAPH.ops, names, strict=True))
    graph, sizes = replace(GRAPH, ops=tuple(ops)), ValueMemory.of(GRAPH)
    both = replace(sizes, others=(dict.fromkeys(NAMES, 64),))

    def memory(backend: str, values: ValueMemory) -> tuple[int, int]:
        plan = Plan(Source("m"), graph.hash, "", (Stage("one", tuple(OPS), ("cpu:0",), backend),), UNKNOWN)
        [found] = stage_memories(graph, plan, values)
        return found.arena_bytes, found.backend_bytes

    own = {backend: BUFFER_BYTES[backend] + len(OPS) * 2 * OP_BYTES[backend] for backend in ("eager", "onnxruntime")}
    handed = 3  # the input, and what the custom operator reads and makes
    assert memory("onnxruntime", sizes) == (2 * 128, handed * 128)
    assert memory("onnxruntime", both) == (2 * 128, handed * (128 + 64) + own["onnxruntime"])
    assert memory("eager", sizes) == (2 * 128, 0)
    assert memory("eager", both) == (2 * 128, own["eager"])


def test_each_worker_takes_a_context_of_the_accelerator() -> None:
    machine = capped(10**9, context_bytes=50 * MB)
    halves = tuple(Stage(f"stage{k}", tuple(part), ("cuda:0",)) for k, part in enumerate((OPS[:3], OPS[3:])))
    plan = count(GRAPH, Plan(Source("m"), GRAPH.hash, "", halves, UNKNOWN))
    weights, beside = held_on(machine["cuda:0"], plan.stages, machine.devices, GRAPH)
    counted = [stage.memory.beside_bytes for stage in plan.stages if stage.memory is not None]
    assert weights == 600 * MB and beside == sum(counted) + 2 * 50 * MB


def test_a_plan_under_a_cap_on_the_accelerator_holds_after_the_stage_on_the_core_was_measured() -> None:
    """Four of six ops fit. A search's plan was refused after its first run: the core's worker counted on the device."""
    machine = capped(480 * MB, context_bytes=50 * MB)
    before = plan_within_caps(question(machine))
    after = plan_within_caps(replace(question(machine), account=Account(GRAPH, known=KNOWN)))
    for plan in (before, after):
        assert {name: len(stage.ops) for stage in plan.stages for name in stage.devices} == {"cpu:0": 2, "cuda:0": 4}
        count(GRAPH, plan, None, KNOWN).verify(GRAPH, machine)


def test_a_cap_below_the_context_leaves_the_accelerator_out_or_is_refused_in_a_sentence() -> None:
    plan = plan_within_caps(question(capped(40 * MB, context_bytes=50 * MB)))
    assert {name for stage in plan.stages for name in stage.devices} == {"cpu:0"}
    alone = capped(40 * MB, context_bytes=50 * MB).only(["cuda:0"])
    with pytest.raises(InfeasibleError, match=r"a worker takes 47\.7 MiB on 'cuda:0' for itself, and its cap is 38\.1 MiB"):
        plan_within_caps(question(alone))


def test_an_op_larger_than_the_cap_goes_to_the_core_or_is_named() -> None:
    plan = plan_within_caps(question(capped(90 * MB)))
    assert {name for stage in plan.stages for name in stage.devices} == {"cpu:0"}
    with pytest.raises(InfeasibleError, match=r"needs 95\.4 MiB of weights"):
        plan_within_caps(question(capped(90 * MB).only(["cuda:0"])))
