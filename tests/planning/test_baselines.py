"""The baselines are plans that verify, and those that do not fit are left out."""

from dataclasses import replace

import pytest

from autosplit.planning.baselines import (
    ALL_CORES,
    CALLER_CORE,
    CALLER_THREADS,
    EVEN_SPLIT,
    IN_CALLER,
    ONE_DEVICE,
    REPLICAS,
    STREAMS,
    UNKNOWN,
    baselines_by_backend,
    baselines_of,
    baselines_with,
    machine_of,
    out_of_reach,
    unmet_demands,
    with_streams_predicted,
    without_autosplit,
)
from autosplit.planning.predicting import predict
from autosplit.values.constraints import Constraints, Objective
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import Plan, Prediction, Source, Stage
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Samples, Setting

NUM_OPS = 5
OPS = tuple(Op(f"a{i}", "linear", "", (f"a{i - 1}" if i else "x",), (f"a{i}",), (f"w{i}",), f"s{i}") for i in range(NUM_OPS))
VALUES = {name: Value(name, (8,), "float32", 32) for name in ["x", *[op.name for op in OPS]]}
WEIGHTS = {f"w{i}": Value(f"w{i}", (1024,), "float32", 4096) for i in range(NUM_OPS)}
GRAPH = Graph("chain", ("x",), ("a4",), OPS, VALUES, WEIGHTS).verify()
TWO = Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])
SOURCE = Source("m:f")
APART = "op 'a0' and others that stay together are in several stages"
FORBIDDEN = "'a3' is forbidden on 'cpu:1', and op 'a3' runs on 'cpu:1'"
SHORT = "one of its stages takes 5.00 ms, and at least 8.00 ms is asked for"
WAYS = [f"{name} (eager)" for name in (ONE_DEVICE, ALL_CORES, REPLICAS, EVEN_SPLIT)]


def test_the_four_ways_verify() -> None:
    plans = baselines_with(GRAPH, TWO, SOURCE, "eager", "cpu:1")
    assert list(plans) == [ONE_DEVICE, ALL_CORES, REPLICAS, EVEN_SPLIT]
    for plan in plans.values():
        plan.verify(GRAPH, machine_of([plan], TWO))
    assert plans[ONE_DEVICE].stages[0].devices == ("cpu:1",)
    assert (plans[ALL_CORES].stages[0].devices, plans[ALL_CORES].stages[0].threads) == (("cpu:0-1",), 2)
    assert plans[REPLICAS].stages[0].devices == ("cpu:0", "cpu:1")
    assert [len(stage.ops) for stage in plans[EVEN_SPLIT].stages] == [2, 3]


def test_a_memory_cap_leaves_out_what_does_not_fit() -> None:
    capped = TWO.with_memory({"cpu:0": 3 * 4096, "cpu:1": 3 * 4096})
    assert list(baselines_with(GRAPH, capped, SOURCE, "eager", "cpu:0")) == [EVEN_SPLIT]
    tight = TWO.with_memory({"cpu:0": 4096, "cpu:1": 4096})
    assert baselines_with(GRAPH, tight, SOURCE, "eager", "cpu:0") == {}


def test_one_device_has_neither_replicas_nor_a_split() -> None:
    assert list(baselines_with(GRAPH, Machine.of([parse_device("cpu:0")]), SOURCE, "eager", "cpu:0")) == [ONE_DEVICE]


def test_the_callers_process_has_one_core_or_all_or_a_thread_on_each() -> None:
    plans = baselines_with(GRAPH, TWO, SOURCE, "onnxruntime", "cpu:1", in_caller=True)
    stages = {name: plan.stages[0] for name, plan in plans.items() if plan.process == "caller"}
    devices = {IN_CALLER: ("cpu:0-1",), CALLER_THREADS: ("cpu:0", "cpu:1"), CALLER_CORE: ("cpu:1",)}
    assert {name: stage.devices for name, stage in stages.items()} == devices and stages[CALLER_CORE].threads == 1
    streaming = baselines_with(GRAPH, TWO, SOURCE, "openvino", "cpu:1", streams=True, in_caller=True)[CALLER_THREADS]
    assert (streaming.process, streaming.stages[0].devices, streaming.stages[0].streams) == ("caller", ("cpu:0-1",), 2)
    whole = baselines_with(GRAPH, Machine.of([parse_device("cpu:0")]), SOURCE, "onnxruntime", "cpu:0", in_caller=True)
    assert [name for name, plan in whole.items() if plan.process == "caller"] == [IN_CALLER]


def test_other_backends_add_the_ways_that_use_the_whole_machine() -> None:
    ways = baselines_by_backend(GRAPH, TWO, SOURCE, ["openvino", "eager"], "onnxruntime", "cpu:0")
    others = [f"{name} ({backend})" for backend in ("openvino", "eager") for name in (ALL_CORES, REPLICAS)]
    assert list(ways) == [f"{name} (onnxruntime)" for name in (ONE_DEVICE, ALL_CORES, REPLICAS, EVEN_SPLIT)] + others
    assert all(way.chosen == name for name, way in ways.items())
    assert (without_autosplit(ways), without_autosplit(["replicas (eager)"])) == ("all cores (eager)", "")
    alone = baselines_by_backend(GRAPH, Machine.of([parse_device("cpu:0-1")]), SOURCE, ["eager"], "openvino", "cpu:0-1")
    assert list(alone) == ["one device (openvino)", "one device (eager)"] and without_autosplit(alone) == "one device (eager)"


@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1"], ["cpu:0-1"]])
def test_a_backend_with_streams_adds_one_process_that_works_on_a_request_for_each_core(devices: list[str]) -> None:
    machine = Machine.of(map(parse_device, devices))
    ways = baselines_by_backend(GRAPH, machine, SOURCE, ["openvino", "eager"], "eager", devices[0], ["openvino"])
    assert [name for name in ways if STREAMS in name] == ["streams (openvino)"]
    way = ways["streams (openvino)"].verify(GRAPH, machine_of([ways["streams (openvino)"]], machine))
    assert [(stage.devices, stage.threads, stage.streams) for stage in way.stages] == [(("cpu:0-1",), 2, 2)]
    one = Machine.of([parse_device("cpu:0")])
    assert STREAMS not in baselines_with(GRAPH, one, SOURCE, "openvino", "cpu:0", streams=True)


def test_streams_are_predicted_as_replicas_on_their_cores() -> None:
    ways = baselines_by_backend(GRAPH, TWO, SOURCE, ["openvino"], "openvino", "cpu:0", ["openvino"])
    streams, replicas = ways["streams (openvino)"], ways["replicas (openvino)"]
    assert with_streams_predicted(ways) == ways
    prediction = Prediction(0.02, 0.04, bound_s=0.01, gap=0.5, throughput_per_s=50.0)
    found = with_streams_predicted({**ways, "replicas (openvino)": replace(replicas, prediction=prediction)})
    assert found["streams (openvino)"].prediction == prediction
    assert found["streams (openvino)"].loads_s == {"cpu:0-1": 0.02} and found["streams (openvino)"].hash == streams.hash
    fewer = replace(replicas, prediction=prediction, stages=(replace(replicas.stages[0], devices=("cpu:0",)),))
    other = with_streams_predicted({**ways, "replicas (openvino)": fewer})  # another number of cores tells nothing
    assert other["streams (openvino)"].prediction == UNKNOWN


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_a_way_that_beats_the_bound_on_plans_has_a_bound_all_the_same(objective: Objective) -> None:
    """Both cores as one device are no answer of the planner, and had no bound as the plan."""
    seconds = {Setting("cpu:0", "eager", 1): 1.0, Setting("cpu:1", "eager", 1): 1.0, Setting("cpu:0-1", "eager", 2): 0.2}
    samples = {setting: {op.name: Samples((one,)) for op in OPS} for setting, one in seconds.items()}
    measured = {setting: Measured(rows, per="op", cut_s_per_byte=0.0) for setting, rows in samples.items()}
    profile = replace(Profile.empty(GRAPH), measured=measured).verify()
    first = baselines_with(GRAPH, TWO, SOURCE, "eager", "cpu:0")[ONE_DEVICE]
    plan = replace(first, prediction=Prediction(2.6, 5.0, 2.5, 0.1, 0.4), objective=objective)
    found = baselines_of(GRAPH, plan, TWO, profile).plans
    whole = found["all cores (eager)"]
    assert whole.prediction.bound_s == pytest.approx(1.0, rel=1e-3) and whole.prediction.gap == 0.0
    assert all(
        0 < one.prediction.bound_s <= whole.prediction.bound_s for one in found.values() if one.prediction.throughput_per_s
    )
    told = baselines_of(GRAPH, replace(plan, prediction=replace(plan.prediction, bound_s=0.0)), TWO, profile).plans
    assert all(one.prediction.bound_s == 0 for one in told.values()), "nothing is known without a bound on plans"


def test_a_way_that_cannot_be_the_fastest_by_the_profile_is_named_with_the_reason() -> None:
    ways = baselines_by_backend(GRAPH, TWO, SOURCE, ["eager"], "onnxruntime", "cpu:0")
    predicted = replace(UNKNOWN, throughput_per_s=100.0)
    ways["replicas (onnxruntime)"] = replace(ways["replicas (onnxruntime)"], prediction=predicted)
    ways["even split (onnxruntime)"] = replace(
        ways["even split (onnxruntime)"], prediction=replace(predicted, throughput_per_s=60.0)
    )
    reasons = out_of_reach(ways, 90.0, {"onnxruntime": 0.02, "eager": 0.05})
    slow = [f"{name} (eager)" for name in (ALL_CORES, REPLICAS)]
    assert list(reasons) == ["one device (onnxruntime)", "even split (onnxruntime)", *slow]
    assert reasons["all cores (eager)"] == "the best way is predicted at 100 items/s, which it cannot reach (52 items/s at most)"


def test_a_backend_whose_devices_were_timed_together_at_a_slow_moment_is_tried() -> None:
    """Alone it was as fast as the plan's backend, beside its neighbour half as fast."""
    ways = baselines_by_backend(GRAPH, TWO, SOURCE, ["openvino"], "onnxruntime", "cpu:0")
    name = "replicas (openvino)"
    ways[name] = replace(ways[name], prediction=replace(UNKNOWN, throughput_per_s=17.0))
    assert name not in out_of_reach(ways, 30.0, {"onnxruntime": 0.068, "openvino": 0.06})
    assert name in out_of_reach(ways, 30.0, {"onnxruntime": 0.068, "openvino": 0.12})


def test_replicas_on_devices_of_different_kinds_are_left_out_where_they_are_hopeless() -> None:
    """Predicted at 10.3 items/s beside 350, they were tried: the bound took the GPU's speed for both."""
    mixed = Machine.of(map(parse_device, ("cpu:0", "cuda:0")))
    seconds_s = {"cpu:0": 0.19, "cuda:0": 0.003}
    profile = Profile.given(GRAPH, {(op.name, name): s / len(GRAPH.ops) for op in GRAPH.ops for name, s in seconds_s.items()})
    everything = Stage("stage0", tuple(op.name for op in GRAPH.ops), ("cuda:0",))
    plan = predict(Plan(SOURCE, GRAPH.hash, profile.hash, (everything,), UNKNOWN), GRAPH, mixed, profile)
    found = baselines_of(GRAPH, plan, mixed, profile)
    assert "replicas (eager)" not in found.plans and "it cannot reach" in found.left_out["replicas (eager)"]
    there = replace(mixed.devices[1], context_bytes=10_000, memory_bytes=10_000 + GRAPH.weight_bytes - 1)
    capped = baselines_of(GRAPH, plan, replace(mixed, devices=(mixed.devices[0], there)), profile)
    assert capped.plans["one device (eager)"].stages[0].devices == ("cpu:0",)  # what fits, beside the context


def test_of_quick_models_more_ways_are_tried() -> None:
    ways = baselines_by_backend(GRAPH, TWO, SOURCE, ["eager"], "onnxruntime", "cpu:0")
    left_out = {
        alone_s: list(out_of_reach(ways, 1.7 / alone_s, {"onnxruntime": alone_s, "eager": 1.6 * alone_s}))
        for alone_s in (0.2, 0.002)
    }
    assert left_out == {0.2: ["one device (onnxruntime)", "all cores (eager)", "replicas (eager)"], 0.002: []}


@pytest.mark.parametrize(
    "wanted,backends,said",
    [
        (Constraints(), None, {}),
        (Constraints(max_replicas=1), None, {"replicas (eager)": "one of its stages has 2 replicas, and at most 1 is allowed"}),
        (Constraints(max_stages=1), None, {"even split (eager)": "the number of its stages is 2, and at most 1 is allowed"}),
        (Constraints(), ["onnxruntime"], dict.fromkeys(WAYS, "it runs on eager, and onnxruntime is asked for")),
        (
            Constraints(max_latency_s=0.01),
            None,
            dict.fromkeys(WAYS, "a request takes 20.00 ms, and at most 10.00 ms is allowed"),
        ),
        (
            Constraints(together=("a*",)),
            None,
            {"even split (eager)": APART},
        ),
        (
            Constraints(num_stages=2),
            None,
            dict.fromkeys(set(WAYS) - {"even split (eager)"}, "the number of its stages is 1, and 2 is asked for"),
        ),
        (
            Constraints(pins={"a0": "cpu:0"}),
            None,
            dict.fromkeys(["all cores (eager)", "replicas (eager)"], "'a0' is pinned to 'cpu:0', and op 'a0' runs on 'cpu:1'"),
        ),
        (
            Constraints(forbids={"a3": ("cpu:1",)}),
            None,
            dict.fromkeys(
                ["all cores (eager)", "replicas (eager)", "even split (eager)"],
                "'a3' is forbidden on 'cpu:1', and op 'a3' runs on 'cpu:1'",
            ),
        ),
    ],
)
def test_a_way_is_unfit_where_it_breaks_a_demand_and_the_reason_names_it(wanted, backends, said) -> None:
    ways = baselines_by_backend(GRAPH, TWO, SOURCE, ["eager"], "eager", "cpu:0")
    assert set(ways) == set(WAYS)
    found = {name: unmet_demands(way, 0.02, GRAPH, TWO, wanted, backends) for name, way in ways.items()}
    assert {name: reasons[0] for name, reasons in found.items() if reasons} == said


@pytest.mark.parametrize(
    ("least_s", "said"), [(0.004, []), (0.008, ["one of its stages takes 5.00 ms, and at least 8.00 ms is asked for"])]
)
def test_replicas_share_what_a_stage_takes_at_least(least_s, said) -> None:
    way = baselines_by_backend(GRAPH, TWO, SOURCE, ["eager"], "eager", "cpu:0")["replicas (eager)"]
    way = replace(way, stages=tuple(replace(stage, load_s=0.01) for stage in way.stages))
    assert unmet_demands(way, 0.02, GRAPH, TWO, Constraints(min_stage_s=least_s)) == said
