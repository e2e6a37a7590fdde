"""Plan values and plan.yaml: round trips, and every fault named."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from autosplit.errors import PlanError, UsageError
from autosplit.values.constraints import Constraints, matching_ops
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Prediction, Source, Stage
from autosplit.values.planfile import read_plan, spans, write_plan

MACHINE = Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])


def chain(num_ops: int = 6) -> Graph:
    """x -> a0 -> a1 -> ... with one weight of 4 KiB an op."""
    values = [Value(name, (1, 8), "float32", 32) for name in ["x", *[f"a{i}" for i in range(num_ops)]]]
    ops = [
        Op(f"a{i}", "aten.linear.default", f"block{i // 3}.fc{i}", (f"a{i - 1}" if i else "x",), (f"a{i}",), (f"w{i}",), f"s{i}")
        for i in range(num_ops)
    ]
    weights = {f"w{i}": Value(f"w{i}", (32, 32), "float32", 4096) for i in range(num_ops)}
    return Graph("chain", ("x",), (f"a{num_ops - 1}",), tuple(ops), {v.name: v for v in values}, weights).verify()


def plan_of(graph: Graph, *stages: tuple[str, ...]) -> Plan:
    made = tuple(Stage(f"stage{i}", ops, (f"cpu:{i}",)) for i, ops in enumerate(stages))
    return Plan(Source("m:f", 4, 16), graph.hash, "p", made, Prediction(0.5, 1.0, 0.4, 0.2, 8.0), microbatch=2)


GRAPH = chain()
GOOD = plan_of(GRAPH, ("a0", "a1", "a2"), ("a3", "a4", "a5"))


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    write_plan(GOOD, GRAPH, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml").resolve(GRAPH) == GOOD
    assert GOOD.verify(GRAPH, MACHINE) is GOOD


@pytest.mark.parametrize(
    "old,new", [("- a0 .. a2", "- a0 .. a1"), ("- cpu:1", "- cpu:0"), ("queue_depth: 4", "queue_depth: 2"), ("f32", "bf16")]
)
def test_what_was_predicted_is_not_kept_for_a_plan_that_was_edited(tmp_path: Path, old: str, new: str) -> None:
    path, loaded = tmp_path / "plan.yaml", replace(GOOD, stages=tuple(replace(stage, load_s=0.5) for stage in GOOD.stages))
    write_plan(loaded, GRAPH, path)
    text = path.read_text()
    path.write_text(text.replace("schema: 1", "schema: 1  # looked at, and left as it was"))
    assert read_plan(path).resolve(GRAPH) == loaded
    path.write_text(text.replace("- a3 .. a5", "- a2 .. a5").replace(old, new) if "a0" in old else text.replace(old, new))
    edited = read_plan(path).resolve(GRAPH)
    assert edited.hash != loaded.hash and (edited.prediction, edited.status) == (UNKNOWN, "manual")
    assert "nothing predicted" in edited.summary() and {stage.load_s for stage in edited.stages} == {0.0}


@pytest.mark.parametrize(
    "old,new",
    [
        ("load_s: 0.5", "load_s: 0.25"),
        ("load_s: 0.5", "load_s: .nan"),
        ("throughput_per_s: 8", "throughput_per_s: 80"),
        ("cpu:1: 0.5", "cpu:1: 2"),
    ],
)
def test_no_prediction_is_kept_where_a_figure_of_it_was_edited(tmp_path: Path, old: str, new: str) -> None:
    path, stages = tmp_path / "plan.yaml", tuple(replace(stage, load_s=0.5) for stage in GOOD.stages)
    loaded = replace(GOOD, stages=stages, loads_s={"cpu:0": 1, "cpu:1": 0.5}, prediction=replace(GOOD.prediction, bound_s=1e-5))
    write_plan(loaded, GRAPH, path)
    text = path.read_text()
    assert read_plan(path).resolve(GRAPH) == loaded
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert read_plan(path).resolve(GRAPH) == loaded.unpredicted()
    path.write_text(path.read_text().split("  figures:")[0])
    kept = read_plan(path).resolve(GRAPH)
    assert kept.hash == loaded.hash and kept.prediction != UNKNOWN


def test_an_objective_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(GOOD, GRAPH, path)
    path.write_text(path.read_text().replace("objective: throughput", "objective: throughtput"))
    with pytest.raises(PlanError, match="objective: Input should be 'throughput' or 'latency'"):
        read_plan(path)


def test_a_queue_may_not_be_so_deep_that_its_slots_fill_the_memory() -> None:
    assert replace(GOOD, queue_depth=1024).verify(GRAPH, MACHINE)
    with pytest.raises(PlanError, match="queue_depth must be at least 1 and at most 1024, but is 1000000000"):
        replace(GOOD, queue_depth=10**9).verify(GRAPH, MACHINE)


def test_a_span_that_counts_down_or_has_three_ends_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(GOOD, GRAPH, path)
    data = yaml.safe_load(path.read_text())
    names = [op.name for op in GRAPH.ops]
    wrong = [f"{names[-1]} .. {names[0]}", f"{names[0]} .. {names[1]} .. {names[-1]}"]
    data["stages"][0]["ops"] = wrong
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError) as failure:
        read_plan(path).resolve(GRAPH)
    assert all(f"has the span '{span}'; write 'first .. last'" in str(failure.value) for span in wrong)


def test_a_span_may_be_written_without_blanks(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(GOOD, GRAPH, path)
    path.write_text(path.read_text().replace("- a0 .. a2", "- a0..a2"))
    assert read_plan(path).resolve(GRAPH) == GOOD


def test_two_replicas_on_one_device_are_refused() -> None:
    twice = replace(GOOD, stages=(replace(GOOD.stages[0], devices=("cpu:0", "cpu:0")), GOOD.stages[1]))
    with pytest.raises(PlanError, match="'stage0' names a device twice: cpu:0, cpu:0"):
        twice.verify(GRAPH, MACHINE)


def test_a_plan_says_its_precision(tmp_path: Path) -> None:
    coarse = replace(GOOD, precision="bf16")
    write_plan(coarse, GRAPH, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml").resolve(GRAPH) == coarse
    assert coarse.hash != GOOD.hash and " in bf16: " in coarse.summary() and "f32" not in GOOD.summary()


def test_a_plan_says_its_streams_and_none_is_without_a_thread(tmp_path: Path) -> None:
    both = replace(GOOD.stages[0], devices=("cpu:0-1",), ops=tuple(GRAPH.index), threads=2, streams=2)
    plan, machine = replace(GOOD, stages=(both,)), Machine.of([parse_device("cpu:0-1")])
    write_plan(plan.verify(GRAPH, machine), GRAPH, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml").resolve(GRAPH) == plan
    alone = replace(plan, stages=(replace(both, streams=1),))
    assert alone.hash != plan.hash and "(eager, 2 streams)" in plan.summary() and "streams" not in alone.summary()
    unknown = replace(plan, prediction=replace(plan.prediction, throughput_per_s=0.0))
    assert "devices shared, gap" in replace(plan, status="shared").summary()
    assert "8 items/s predicted" in plan.summary() and "nothing predicted" in unknown.summary()
    with pytest.raises(PlanError, match="stage 'stage0' has streams=2 and threads=1; each stream takes one"):
        replace(plan, stages=(replace(both, threads=1),)).verify(GRAPH, machine)
    with pytest.raises(PlanError, match=r"stage 'stage0' has threads=0; at least 1 is needed$"):
        replace(plan, stages=(replace(both, threads=0, streams=1),)).verify(GRAPH, machine)


def test_a_plan_says_that_it_runs_in_the_callers_process(tmp_path: Path) -> None:
    one = replace(GOOD, stages=(replace(GOOD.stages[0], ops=tuple(GRAPH.index)),), process="caller").verify(GRAPH, MACHINE)
    write_plan(one, GRAPH, tmp_path / "plan.yaml")
    assert "process: caller" in (tmp_path / "plan.yaml").read_text()
    assert read_plan(tmp_path / "plan.yaml").resolve(GRAPH).hash == one.hash != replace(one, process="workers").hash
    assert "in the caller's process" in one.summary()
    with pytest.raises(PlanError, match="can hold one stage, and the plan has 2"):
        replace(GOOD, process="caller").verify(GRAPH, MACHINE)


def test_spans_name_runs_of_graph_order() -> None:
    assert spans(("a0", "a1", "a3"), GRAPH) == ["a0 .. a1", "a3"]


def test_every_placement_fault_is_listed() -> None:
    bad = plan_of(GRAPH, ("a3", "a1", "nope"), ("a0", "a1", "a4"))
    with pytest.raises(PlanError) as caught:
        bad.verify(GRAPH, MACHINE)
    for text in ("'nope'", "op 'a1' is on stage 'stage0' and on stage 'stage1'", "2 ops are on no stage: 'a2', 'a5'"):
        assert text in str(caught.value)


def test_spans_that_are_short_or_overlap_are_one_fault_each() -> None:
    graph, names = chain(60), [f"a{i}" for i in range(60)]
    with pytest.raises(PlanError) as caught:
        plan_of(graph, tuple(names[:30]), tuple(names[10:40])).verify(graph, MACHINE)
    assert str(caught.value).splitlines() == [
        "plan does not fit graph 'chain' (2 faults):",
        "  * 20 ops are on stage 'stage0' and on stage 'stage1': 'a10', 'a11', 'a12' and 17 more",
        "  * 20 ops are on no stage: 'a40', 'a41', 'a42' and 17 more",
    ]


def test_a_misspelt_op_gets_close_names(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(GOOD, GRAPH, path)
    path.write_text(path.read_text().replace("a0 .. a2", "a0 .. a22"))
    with pytest.raises(PlanError, match="'a22', which the graph does not have; close names: 'a2'"):
        read_plan(path).resolve(GRAPH)
    with pytest.raises(PlanError, match="'a22', which the graph does not have; close names: 'a2'"):
        plan_of(GRAPH, ("a0", "a1", "a22"), ("a3", "a4", "a5")).verify(GRAPH, MACHINE)


def test_a_tensor_may_not_go_back() -> None:
    with pytest.raises(PlanError, match="op 'a3' on stage 'stage0' reads 'a2' from stage 'stage1'"):
        plan_of(GRAPH, ("a3", "a4", "a5"), ("a0", "a1", "a2")).verify(GRAPH, MACHINE)


def test_memory_cap_threads_device_and_microbatch_are_checked() -> None:
    capped = MACHINE.with_memory({"cpu:0": 8192})
    stages = (replace(GOOD.stages[0], threads=3), replace(GOOD.stages[1], devices=("cuda:7",)))
    with pytest.raises(PlanError) as caught:
        replace(GOOD, stages=stages, microbatch=3, queue_depth=0).verify(GRAPH, capped)
    for text in ("12.0 KiB of weights", "3 threads on 'cpu:0', which has 1 cores", "'cuda:7'", "microbatch 3", "queue_depth"):
        assert text in str(caught.value)


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    write_plan(GOOD, GRAPH, tmp_path / "plan.yaml")
    with pytest.raises(PlanError, match="another model"):
        read_plan(tmp_path / "plan.yaml").resolve(chain(7))


@pytest.mark.parametrize("keep", [0, 10, 200, 400])
def test_a_truncated_plan_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(GOOD, GRAPH, path)
    path.write_text(path.read_text()[:keep])
    with pytest.raises(PlanError, match=r"plan\.yaml"):
        read_plan(path)


def test_a_span_with_an_unknown_op_and_an_unknown_field_are_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(GOOD, GRAPH, path)
    data = yaml.safe_load(path.read_text())
    data["stages"][0]["ops"] = ["a0 .. zz"]
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError, match="'zz'"):
        read_plan(path).resolve(GRAPH)
    data["stages"][0]["sped"] = 3
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError, match=r"stages\.0\.sped"):
        read_plan(path)


def test_numbers_and_fields_of_the_parts_of_a_plan_file_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(GOOD, GRAPH, path)
    data = yaml.safe_load(path.read_text())
    data["model"]["batch"], data["predicted"]["sped"] = 0, 1.0
    data["stages"][0]["memory"] = {"weight_bytes": -1, "arena_bytes": 0, "backend_bytes": 0, "ring_bytes": 0, "base_bytes": 0}
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    for text in (
        "model: batch must be at least 1",
        "predicted.sped",
        "stages.0.memory: weight_bytes must be at least 0",
        "3 faults",
    ):
        assert text in str(caught.value)


def test_backends_and_devices_that_are_none_are_named_with_the_other_faults_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(GOOD, GRAPH, path)
    data = yaml.safe_load(path.read_text())
    data["stages"][0]["backend"], data["stages"][1]["devices"], data["stages"][1]["threads"] = "onxruntime", ["cpu-1"], 0
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    known = "the backends are eager, onnxruntime, openvino, inductor; close names: 'onnxruntime'"
    said = f"backend 'onxruntime' does not exist, {known}"
    for text in (f"stages.0.backend: stage 'stage0': {said}", "stages.1.devices: device 'cpu-1'", "stages.1.threads", "3 faults"):
        assert text in str(caught.value)
    with pytest.raises(PlanError, match=f"stage 'stage0': {said}"):
        replace(GOOD, stages=(replace(GOOD.stages[0], backend="onxruntime"), GOOD.stages[1])).verify(GRAPH, MACHINE)


@pytest.mark.parametrize(
    "pattern,ops",
    [("a1", ("a1",)), ("block0", ("a0", "a1", "a2")), ("*.fc4", ("a4",)), ("aten.lin*", tuple(f"a{i}" for i in range(6)))],
)
def test_a_pattern_is_an_op_a_module_or_an_operator(pattern: str, ops: tuple[str, ...]) -> None:
    assert matching_ops(GRAPH, pattern) == ops


def test_constraints_list_every_fault() -> None:
    wrong = Constraints(num_stages=0, pins={"blok0": "cpu:0", "a1": "cpu:9"}, max_latency_s=-1.0)
    with pytest.raises(UsageError) as caught:
        wrong.verify(GRAPH, MACHINE)
    for text in ("num_stages must be at least 1", "'blok0' matches no op", "close names: 'block0.fc", "'cpu:9'", "max_latency_s"):
        assert text in str(caught.value)
    assert not Constraints().forced


def written(tmp_path: Path, *stages: list[str] | None, graph: Graph = GRAPH) -> Plan:
    """The plan of a file whose stages list these ops."""
    path = tmp_path / "plan.yaml"
    write_plan(GOOD, GRAPH, path)
    data = yaml.safe_load(path.read_text())
    entry = {key: value for key, value in data["stages"][0].items() if key not in ("ops", "name")}
    data["stages"] = [entry | {"name": f"s{number}"} | ({} if ops is None else {"ops": ops}) for number, ops in enumerate(stages)]
    data["made_from"]["graph"] = graph.hash
    path.write_text(yaml.safe_dump(data))
    return read_plan(path).resolve(graph)


def test_a_stage_lists_patterns_and_one_takes_the_rest(tmp_path: Path) -> None:
    assert [stage.ops for stage in written(tmp_path, ["block0.fc0", "*.fc1", "a2 .. a3"], None).stages] == [
        ("a0", "a1", "a2", "a3"), ("a4", "a5")
    ]  # fmt: skip
    assert [stage.ops for stage in written(tmp_path, None, ["block1"]).stages] == [("a0", "a1", "a2"), ("a3", "a4", "a5")]
    with pytest.raises(PlanError, match="stages 's0', 's2' have no ops; only one stage"):
        written(tmp_path, None, ["block1"], [])


def test_stages_in_any_order_are_sorted_unless_there_is_a_cycle(tmp_path: Path) -> None:
    plan = written(tmp_path, ["a4 .. a5"], ["a0 .. a1"], ["a2 .. a3"])
    assert [stage.name for stage in plan.stages] == ["s1", "s2", "s0"]
    around = written(tmp_path, ["a0", "a2 .. a5"], ["a1"])
    assert [stage.name for stage in around.stages] == ["s0", "s1"]
    with pytest.raises(PlanError, match="a tensor goes to the same or a later stage"):
        around.verify(GRAPH, MACHINE)


def test_ops_of_two_stages_and_overlapping_spans_cost_no_time(tmp_path: Path) -> None:
    graph = chain(4000)
    whole = "a0 .. a3999"
    started_s = time.process_time()
    assert len(written(tmp_path, [whole] * 2000, graph=graph).stages[0].ops) == 4000
    with pytest.raises(PlanError, match="4000 ops are on stage 's0' and on stage 's1': 'a0', 'a1', 'a2' and 3997 more"):
        written(tmp_path, *[[whole]] * 200, graph=graph)
    with pytest.raises(PlanError, match="has 300 patterns of ops, and at most 200 are allowed"):
        written(tmp_path, [f"x{number}*" for number in range(300)], graph=graph)
    with pytest.raises(PlanError, match=r"names op 'xxx.*\.\.\.x*'"):
        written(tmp_path, ["x" * 1_000_000])
    assert time.process_time() - started_s < 10


def test_devices_of_a_plan_have_no_core_in_common() -> None:
    machine = Machine.of([parse_device("cpu:0"), parse_device("cpu:0-1"), parse_device("cpu:1")])
    assert GOOD.verify(GRAPH, machine) is GOOD
    beside = replace(GOOD.stages[1], devices=("cpu:0-1",))
    with pytest.raises(PlanError, match="devices 'cpu:0' and 'cpu:0-1' overlap on core 0; a plan uses one of them"):
        replace(GOOD, stages=(GOOD.stages[0], beside)).verify(GRAPH, machine)
    with pytest.raises(PlanError, match="precision must be one of f32, tf32, bf16, f16, but is 'fp8'"):
        replace(GOOD, precision="fp8").verify(GRAPH, machine)  # type: ignore[arg-type]
