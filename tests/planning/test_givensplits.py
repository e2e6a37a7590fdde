"""Splits of other tools: read, refused with every fault, and judged on a machine of two unequal devices."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autosplit.errors import PlanError, UsageError
from autosplit.memory.stages import count
from autosplit.planning.baselines import baseline_plan
from autosplit.planning.givensplits import GivenSplit, read_given
from autosplit.planning.peers import BY_MEMORY, EVEN_BYTES, EVEN_LAYERS, FASTEST_ONLY, peer_baselines, predicted_peers
from autosplit.planning.predicting import predict
from autosplit.planning.question import Question
from autosplit.planning.splitjudging import ANY_RULES, GIVEN, SAME_RULES, Judgement, crossing_bytes, judge_split
from autosplit.reports.judging import Verdict
from autosplit.reports.outcomes import PLAN, Outcome
from autosplit.reports.results import LatencyStats, RunStats
from autosplit.reports.runreport import RunReport
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import Source
from autosplit.values.profile import Profile

NUM_LAYERS = 6
TWO = Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])


def chain() -> Graph:
    """An embedding, layers of two ops, and a head: 14 ops in a row."""
    places = ["embed", *[f"layers.{n}.{part}" for n in range(NUM_LAYERS) for part in ("up", "down")], "head"]
    names = [place.replace(".", "_") for place in places]
    reads = ["x", *names[:-1]]
    rows = zip(names, places, reads, strict=True)
    ops = tuple(Op(n, "aten.linear.default", place, (read,), (n,), (f"{place}.weight",), "s") for n, place, read in rows)
    values = {name: Value(name, (1000,), "float32", 4000) for name in ["x", *names]}
    weights = {f"{place}.weight": Value(f"{place}.weight", (1000,), "float32", 4000) for place in places}
    return Graph("chain", ("x",), (names[-1],), ops, values, weights).verify()


GRAPH = chain()
PROFILE = Profile.given(
    GRAPH, {(op.name, device): seconds for op in GRAPH.ops for device, seconds in (("cpu:0", 1e-3), ("cpu:1", 3e-3))}
)
"""The second device takes three times as long for every op."""


def written(folder: Path, name: str, data: object) -> str:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


ASKED = Question(GRAPH, PROFILE, Source("m"), TWO, ("eager",), time_limit_s=2)


def judged(split: GivenSplit) -> Judgement:
    return judge_split(split, ASKED)


def sizes(split: GivenSplit) -> list[int]:
    return [len(ops) for ops in split.stages]


def test_each_format_is_read(tmp_path: Path) -> None:
    entries = {"embed": 0, "layers.0": 0, "layers.1": "cpu:0", "layers": 1, "head": "cpu:1", "dropout": 1}
    found = read_given(written(tmp_path, "device_map.json", entries), GRAPH, TWO)
    assert (sizes(found), found.devices, found.in_order) == ([5, 9], ("cpu:0", "cpu:1"), False)
    assert found.notes == ("'dropout' is not a module with ops or weights",)
    assert sizes(read_given("2,4", GRAPH, TWO)) == [5, 9]
    spec = "layers.2: beginning\n"
    assert sizes(read_given(written(tmp_path, "spec.yaml", spec), GRAPH, TWO)) == [5, 9]
    assert sizes(read_given(written(tmp_path, "end.yaml", "layers.1: SplitPoint.END"), GRAPH, TWO)) == [5, 9]
    names = "# the last op of each stage\nlayers_1_down\nhead\n"
    assert sizes(read_given(written(tmp_path, "stages.txt", names), GRAPH, TWO)) == [5, 9]
    tvm = [{"op_name": "nn.linear", "op_index": 4}]
    assert sizes(read_given(written(tmp_path, "tvm.json", tvm), GRAPH, TWO)) == [5, 9]


@pytest.mark.parametrize("order", [1, -1])
def test_names_take_the_devices_that_numbers_leave(tmp_path: Path, order: int) -> None:
    """``cpu`` took device 0 before the map's number 0 was read, so that the whole model was on one device."""
    entries = dict([("embed", "cpu"), ("layers", 0), ("head", 0)][::order])
    found = read_given(written(tmp_path, "map.json", entries), GRAPH, TWO)
    assert (sizes(found), found.devices) == ([1, 13], ("cpu:1", "cpu:0"))


def test_a_map_may_name_weights_in_place_of_modules(tmp_path: Path) -> None:
    weights = [name for op in GRAPH.ops for name in op.weights]
    entries = {name: int(not name.startswith("embed")) for name in weights}
    assert sizes(read_given(written(tmp_path, "map.json", entries), GRAPH, TWO)) == [1, 13]


@pytest.mark.parametrize("device", [None, "meta", -1, True, [0], 0.5, "gpu 0", ""])
def test_what_is_no_device_in_a_map_is_refused(tmp_path: Path, device: object) -> None:
    with pytest.raises(UsageError, match="is not a device; write a number from 0 on, or a name such as cpu or cuda:1"):
        read_given(written(tmp_path, "map.json", {"embed": 0, "": device}), GRAPH, TWO)


@pytest.mark.parametrize(
    ("name", "content", "faults"),
    [
        ("", "2,3,0", ["rank 2 has no layer", "add up to 5, and 'layers' has 6", "3 stages, and there are 2 devices"]),
        ("", "all", ["split 'all' is not understood; give numbers of layers such as 16,32, or a file"]),
        (
            "map.json",
            {"embed": 0, "layer": 1, "head": "disk"},
            ["'disk', and autosplit holds all", "no entry holds module 'layers.0.up'", "'layer' is not a module with ops"],
        ),
        ("map.json", {"": 5}, ["names device '5', and the devices are cpu:0, cpu:1"]),
        ("map.json", {}, ["a mapping from module paths is needed"]),
        (
            "spec.yaml",
            "layer.2: end\nhead: middle\nembed: beginning\n",
            ["'layer.2' is not a module with ops; close names: 'layers.2'", "'head' has 'middle'", "'embed' is the beginning"],
        ),
        ("ops.txt", "layers_3_up\nlayers_1_up\n", ["'layers_1_up' does not come after 'layers_3_up'", "3 stages"]),
        ("ops.txt", "layers_3_upp\n", ["'layers_3_upp' is not an op of the graph; close names: 'layers_3_up'"]),
        ("ops.json", [{"op_name": "linear", "op_index": 99}, 3], ["op 99 called 'linear' is asked for, and the graph has 14"]),
        ("absent.txt", None, ["cannot be read"]),
        ("bad.json", "{", ["is truncated or not valid JSON"]),
    ],
)
def test_a_split_that_does_not_fit_is_refused_with_every_fault(
    tmp_path: Path, name: str, content: object, faults: list[str]
) -> None:
    text = str(content) if not name else str(tmp_path / name)
    if name and content is not None:
        written(tmp_path, name, content)
    with pytest.raises(UsageError) as failure:
        read_given(text, GRAPH, TWO)
    for fault in faults:
        assert fault in str(failure.value)


def test_layers_of_two_speeds_are_judged_by_time() -> None:
    """Even by layers the slow device holds back the fast one; the best split gives it a quarter of the layers."""
    found = judged(read_given("3,3", GRAPH, TWO))
    given, best = found.plans[GIVEN], found.plans[SAME_RULES]
    assert found.bottleneck == "cpu:1" and given.prediction.bottleneck_s >= 7 * 3e-3
    assert best.prediction.bottleneck_s >= 11e-3  # 11 ops on the fast device, 3 on the slow one: 9 ms
    assert {stage.devices[0]: len(stage.ops) for stage in best.stages} == {"cpu:0": 11, "cpu:1": 3}
    assert found.lost == pytest.approx(1 - best.prediction.bottleneck_s / given.prediction.bottleneck_s)
    assert "the best split under the same rules reaches" in found.sentence
    text = " ".join(found.why)
    assert "It has 50% of the weights and 75% of the time in ops." in text
    assert "and not after 'layers_2_down'" in text and "3 ops on 'cpu:1'" in text
    assert found.plans[EVEN_LAYERS].stages == given.stages
    assert "One device alone, without a split, is faster" in text and found.plans[FASTEST_ONLY].prediction.bottleneck_s < 21e-3


def test_a_request_of_several_items_is_judged_by_its_items() -> None:
    split = read_given("3,3", GRAPH, TWO)
    four = judge_split(split, replace(ASKED, source=Source("m", batch=4)))
    for name, plan in judged(split).plans.items():
        assert four.plans[name].microbatch == 4
        assert four.plans[name].prediction.throughput_per_s == pytest.approx(4 * plan.prediction.throughput_per_s)


def test_a_report_shows_the_rules_of_other_tools_or_why_they_do_not_apply() -> None:
    plan = predict(
        baseline_plan(GRAPH, Source("m"), "plan", "eager", [(tuple(GRAPH.index), [TWO["cpu:0"]])]), GRAPH, TWO, PROFILE
    )
    found = predicted_peers(GRAPH, plan, TWO, PROFILE)
    assert set(found.left_out) == {BY_MEMORY}
    latency = LatencyStats.of([0.1])
    ran = Outcome(plan, (1.0,), (1.0,), latency, latency, True, 0.0, 0.0, RunStats(1, 1.0, latency, latency, (), 0))
    rows = RunReport("m", 1, {PLAN: ran}, Verdict(PLAN, "", sure=True), peers=found).peer_rows()
    assert rows[0]["split"] == FASTEST_ONLY and {row["split"] for row in rows} == set(found.plans)
    assert rows[0]["of_chosen"] == pytest.approx(1.0) and rows[-1]["of_chosen"] < 1
    other = replace(plan, stages=tuple(replace(stage, backend="openvino") for stage in plan.stages))
    assert "openvino" in predicted_peers(GRAPH, other, TWO, PROFILE).left_out[EVEN_LAYERS]


def test_the_best_split_obeys_the_rules(tmp_path: Path) -> None:
    layers = read_given("5,1", GRAPH, TWO)
    best = judged(layers).plans[SAME_RULES]
    home = {op: stage.name for stage in best.stages for op in stage.ops}
    assert all(len({home[op] for op in unit.ops}) == 1 for unit in layers.units)
    free = judged(read_given(written(tmp_path, "ops.txt", "layers_4_down"), GRAPH, TWO))
    assert sorted(len(stage.ops) for stage in free.plans[SAME_RULES].stages) in ([4, 10], [3, 11])
    assert free.lost < 0.05 and free.plans[ANY_RULES].prediction.throughput_per_s >= free.plans[GIVEN].prediction.throughput_per_s


def test_the_best_split_keeps_the_caps_with_all_that_it_holds() -> None:
    """Its 11 ops on the fast device have 44 kB of weights, and values and rings beside them, with one slot at least."""
    split = read_given("3,3", GRAPH, TWO)
    free = count(GRAPH, replace(judged(split).plans[SAME_RULES], queue_depth=1))
    held = {stage.devices[0]: stage.memory.weight_bytes + stage.memory.beside_bytes for stage in free.stages if stage.memory}
    capped = TWO.with_memory({"cpu:0": held["cpu:0"] - 1, "cpu:1": 200_000})
    found = judge_split(split, replace(ASKED, machine=capped))
    best = found.plans[SAME_RULES].verify(GRAPH, capped)
    assert {stage.devices[0]: len(stage.ops) for stage in best.stages} == {"cpu:0": 9, "cpu:1": 5}
    assert all(stage.memory is not None for stage in best.stages)
    assert best.prediction.bound_s <= best.prediction.bottleneck_s and found.lost > 0
    assert "device 'cpu:0' would hold" in found.left_out[FASTEST_ONLY] and FASTEST_ONLY not in found.plans
    with pytest.raises(PlanError, match=r"device 'cpu:1' would hold .* beside them"):
        judge_split(split, replace(ASKED, machine=TWO.with_memory({"cpu:1": 40_000})))


def test_modules_that_the_best_map_moves_are_named(tmp_path: Path) -> None:
    """All is on the slow device but the head; modules that move as a whole have one name."""
    found = judged(read_given(written(tmp_path, "map.json", {"": 1, "head": 0}), GRAPH, TWO))
    [moves] = [sentence for sentence in found.why if "moves" in sentence and "from 'cpu:1' to 'cpu:0'" in sentence]
    assert "'layers." in moves and ".up'" not in moves
    assert found.lost > 0.5


def test_a_device_that_the_best_map_returns_to_has_several_stages(tmp_path: Path) -> None:
    """Both ends of the chain are fast on the first device, the middle on the second: each stage reads only earlier ones."""
    slow = {"cpu:0": {"layers.2", "layers.3"}, "cpu:1": {"embed", "layers.0", "layers.1", "layers.4", "layers.5", "head"}}
    op_s = {
        (op.name, name): 3e-3 if any(place in op.module for place in places) else 1e-3
        for op in GRAPH.ops
        for name, places in slow.items()
    }
    split = read_given(written(tmp_path, "map.json", {"": 0}), GRAPH, TWO)
    found = judge_split(split, replace(ASKED, profile=Profile.given(GRAPH, op_s)))
    best = found.plans[SAME_RULES].verify(GRAPH, TWO)
    assert len(best.stages) > 2 and {stage.devices for stage in best.stages} == {("cpu:0",), ("cpu:1",)}
    assert best.prediction.bottleneck_s < found.plans[GIVEN].prediction.bottleneck_s


def test_bytes_of_cuts_are_counted_once_for_each_device() -> None:
    """Two ops of the second stage read the value on the cut."""
    split = read_given("2,4", GRAPH, TWO)
    placed = [(ops, [device]) for ops, device in zip(split.stages, TWO.devices, strict=True)]
    plan = baseline_plan(GRAPH, Source("m"), GIVEN, "eager", placed)
    ops = (*GRAPH.ops[:-1], replace(GRAPH.ops[-1], inputs=(*GRAPH.ops[-1].inputs, split.stages[0][-1])))
    assert crossing_bytes(plan, replace(GRAPH, ops=ops)) == 4000


def test_peers_rules_are_baselines_that_say_why_they_do_not_apply() -> None:
    found = peer_baselines(GRAPH, TWO, Source("m"), "eager", "cpu:0")
    assert set(found.plans) == {FASTEST_ONLY, EVEN_LAYERS, EVEN_BYTES}
    assert found.left_out == {BY_MEMORY: "the memory of the devices is not given (--memory)"}
    capped = TWO.with_memory({"cpu:0": 100_000, "cpu:1": 20_000})
    by_memory = peer_baselines(GRAPH, capped, Source("m"), "eager", "cpu:0").plans[BY_MEMORY]
    assert [len(stage.ops) for stage in by_memory.stages] == [11, 3]
    flat = replace(GRAPH, ops=tuple(replace(op, module="") for op in GRAPH.ops))
    assert peer_baselines(flat, TWO, Source("m"), "eager", "cpu:0").left_out[EVEN_LAYERS] == "the model has no list of layers"
