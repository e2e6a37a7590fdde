import contextlib
import json
import math
import resource
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autosplit import cli
from autosplit.costs.cost import evaluate
from autosplit.costs.problem import Block
from autosplit.costs.workloads import parse_dnn_partitioning, parse_pipedream, read_split, read_workload
from autosplit.errors import InfeasibleError, PlanError, UsageError
from autosplit.planners.portfolio import solve
from autosplit.values.constraints import Demands

FOLDER = Path(__file__).parents[1] / "data" / "workloads"

ONE_ACCELERATOR = {
    "layer-bert24_inference": 92.406,
    "layer-gnmt_inference": 182.563,
    "layer-inceptionv3_inference": 310.969,
    "layer-resnet50_inference": 201.450,
    "op-bert_l-3_inference": 49.353,
    "op-bert_l-3_training": 122.987,
    "op-bert_l-6_inference": 77.462,
    "op-resnet50_inference": 325.132,
}


@pytest.mark.parametrize("name", ONE_ACCELERATOR)
def test_the_published_files_on_one_accelerator(name):
    problem = read_workload(FOLDER / f"{name}.json")
    loads = evaluate(problem, [Block(tuple(range(problem.num_ops)), (0,))])
    assert loads.bottleneck_s == pytest.approx(ONE_ACCELERATOR[name], abs=6e-4)


def small(**changes):
    data = {
        "maxSizePerFPGA": 10.0,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [
            {"id": 5, "supportedOnFpga": 1, "cpuLatency": 10.0, "fpgaLatency": 1.0, "isBackwardNode": 0, "size": 3.0},
            {"id": 7, "supportedOnFpga": 1, "cpuLatency": 20.0, "fpgaLatency": 2.0, "isBackwardNode": 0, "colorClass": 1},
            {"id": 6, "supportedOnFpga": 0, "cpuLatency": 4.0, "fpgaLatency": 0.0, "isBackwardNode": 0, "colorClass": 2},
        ],
        "edges": [{"sourceId": 5, "destId": 7, "cost": 0.5}, {"sourceId": 5, "destId": 6, "cost": 0.5}],
    }
    data.update(changes)
    return data


def node(**changes):
    return {"id": 1, "supportedOnFpga": 1, "cpuLatency": 1.0, "fpgaLatency": 1.0, "isBackwardNode": 0, **changes}


def test_costs_of_a_split_by_hand():
    problem = parse_dnn_partitioning(small(), "small")
    assert problem.devices == ("acc0", "acc1", "cpu0")
    blocks = read_split(problem, {"assignment": {"5": "acc0", "7": "acc1", "6": "cpu0"}})
    assert evaluate(problem, blocks).device_s.tolist() == [1.5, 2.5, 4.0]
    paper = {"fpgas": [{"nodes": [5]}, {"nodes": [7]}], "cpus": [{"nodes": [6]}]}
    assert read_split(problem, paper) == blocks


def test_all_cores_are_one_device_and_none_is_none():
    assert parse_dnn_partitioning(small(maxCPUs=4), "x").devices == ("acc0", "acc1", "cpu0")
    assert parse_dnn_partitioning(small(maxCPUs=0, nodes=[node()], edges=[]), "x").devices == ("acc0", "acc1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": [], "edges": []}, "no nodes"),
        ({"nodes": [node(), node()], "edges": []}, "node 1 stands twice"),
        ({"nodes": [node(cpuLatency=-1.0)], "edges": []}, "nodes.0.cpuLatency: 0 or more is needed.*, but it is -1.0"),
        ({"nodes": [node(fpgaLatency=math.nan)], "edges": []}, "nodes.0.fpgaLatency: .* it is nan"),
        ({"nodes": [node(fpgaLatency="2")], "edges": []}, "nodes.0.fpgaLatency: Input should be a valid number, but is '2'"),
        ({"nodes": [{"id": 1}], "edges": []}, "nodes.0.cpuLatency: Field required"),
        ({"nodes": ["x"], "edges": []}, "nodes.0: Input should be a mapping of names to values, but is 'x'"),
        ({"edges": [{"sourceId": 5, "destId": 99, "cost": 1.0}]}, "unknown node 99"),
        ({"edges": [{"sourceId": 5}]}, "edges.0.destId: Field required"),
        ({"edges": [{"sourceId": 5, "destId": 7, "cost": -1.0}]}, "edges.0.cost: .* it is -1.0"),
        (
            {"edges": [{"sourceId": 5, "destId": 7, "cost": 1.0}, {"sourceId": 5, "destId": 6, "cost": 2.0}]},
            "one node has one cost",
        ),
        ({"edges": [{"sourceId": 5, "destId": 7, "cost": 1.0}, {"sourceId": 7, "destId": 5, "cost": 1.0}]}, "has a cycle: "),
        ({"maxFPGAs": 0, "maxCPUs": 0}, "no devices"),
        ({"maxCPUs": 0}, "there are no CPUs"),
        ({"maxSizePerFPGA": None}, "maxSizePerFPGA: Input should be a valid number, but is None"),
        ({"nodes": 3}, "nodes: Input should be a valid list, but is 3"),
    ],
)
def test_bad_files_say_what_is_wrong(changes, message):
    with pytest.raises(UsageError, match=message):
        parse_dnn_partitioning(small(**changes), "bad")


def test_missing_and_truncated_files(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        read_workload(tmp_path / "none.json")
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(small())[:50])
    with pytest.raises(UsageError, match="truncated"):
        read_workload(path)


def test_a_backward_class_without_forward_node_mirrors_its_edges():
    nodes = [node(id=0), node(id=1), node(id=2, isBackwardNode=1, colorClass=9), node(id=3, isBackwardNode=1)]
    nodes[0]["colorClass"], nodes[3]["colorClass"] = 4, 4
    edges = [{"sourceId": a, "destId": b, "cost": 0.0} for a, b in [(0, 1), (1, 2), (2, 3)]]
    problem = parse_dnn_partitioning(small(nodes=nodes, edges=edges), "training")
    assert {(problem.ops[a], problem.ops[b]) for a, b in problem.order} == {("0", "1"), ("3", "2")}


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"5": "acc0"}, "op '7' is on no device"),
        ({"5": "acc0", "7": "gpu", "6": "cpu0"}, "device 'gpu' is unknown"),
        ({"5": "acc0", "7": "acc0", "6": "cpu0", "8": "acc0"}, "op '8' is unknown"),
        ({"5": "acc0", "7": "acc0", "6": "acc0"}, "accelerators do not support node 6"),
        ([], "mapping from op to device"),
    ],
)
def test_bad_splits(split, message):
    with pytest.raises(PlanError, match=message):
        read_split(parse_dnn_partitioning(small(), "small"), split)


def profile_line(node, forward, backward, activation, parameters):
    times = f"forward_compute_time={forward}, backward_compute_time={backward}"
    return f"{node} -- Conv2d(3, 64, kernel_size=(3, 3)) -- {times}, activation_size={activation}, parameter_size={parameters}\n"


PROFILE = (
    profile_line("node1", "0.000", "0.000", "4000000.0", "0.000")
    + profile_line("node2", "2.5", "5.0", "1000000.0", "93184.0")
    + profile_line("node3", "1.0", "0.500", "[6000.0; 500.0]", "16.0")
    + "\tnode1 -- node2\n\tnode2 -- node3\n"
)


def test_a_pipedream_profile():
    problem = parse_pipedream(PROFILE, "tiny", num_devices=2, bytes_per_s=1e9)
    assert problem.ops == ("node1", "node2", "node3")
    assert problem.op_bytes.tolist() == [0.0, 93184.0, 16.0]
    loads = evaluate(problem, [Block((0, 1), (0,)), Block((2,), (1,))])
    assert loads.device_s == pytest.approx([7.5 + 2.0, 1.5 + 2.0])
    assert problem.nets[0].num_bytes == 4e6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no nodes"),
        ("nonsense", "line 1 is neither"),
        (PROFILE + "\tnode3 -- node9\n", "unknown node node9"),
        (PROFILE + "\tnode3 -- node1\n", "has a cycle"),
        (PROFILE.replace("5.0,", "x,"), "could not convert string to float: 'x'"),
        (PROFILE.replace("=2.5", "=-2.5"), "0 or more is needed"),
        (PROFILE.replace("parameter_size=16.0", ""), "line 3 has no parameter_size"),
    ],
)
def test_bad_profiles(text, message):
    with pytest.raises(UsageError, match=message):
        parse_pipedream(text, "bad", 2, 1e9)


def test_a_profile_from_a_file(tmp_path):
    path = tmp_path / "graph.txt"
    path.write_text(PROFILE)
    assert read_workload(path, "pipedream", num_devices=3).num_devices == 3


def ring(source, target):
    return {"sourceId": source, "destId": target, "cost": 0.0}


HOSTILE = {
    "20,000 nodes on 10,000 accelerators": (
        small(maxFPGAs=10_000, nodes=[node(id=n) for n in range(20_000)], edges=[]), "less than or equal to 1024",
    ),
    "20,000 nodes on 1,000 accelerators": (
        small(maxFPGAs=1_000, nodes=[node(id=n) for n in range(20_000)], edges=[]), "20000 nodes on 1001 devices are",
    ),
    "ids of equal hashes": (small(nodes=[node(id=n * (2**61 - 1)) for n in range(1, 20_000)], edges=[]), "nodes.0.id: "),
    "faults in every entry": (small(nodes=[{}] * 100_000, edges=[[]] * 100_000), "and 1 more"),
    "a long cycle": (
        small(nodes=[node(id=n) for n in range(9_000)], edges=[ring(n, (n + 1) % 9_000) for n in range(9_000)]),
        "-> … -> ",
    ),
    "a colour class of 1 MB": (small(nodes=[node(colorClass=["x" * 1_000_000])], edges=[]), "nodes.0.colorClass"),
    "half of a surrogate pair": (small(nodes=[node(colorClass="\ud800")], edges=[]), "half of a surrogate pair"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_in_a_sentence_within_a_second(tmp_path, data, message):
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(data))
    before_kib, started_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(UsageError, match=message) as failure:
        read_workload(path)
    assert time.process_time() - started_s < 3 and len(str(failure.value)) < 5_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200 * 1024


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n -- d -- " + "a" * 1_000_000, "line 1 has no forward_compute_time"),
        ("n -- d -- " + "a=[," * 250_000, "line 1 has no forward_compute_time"),
        ("n -- d -- forward_compute_time=" + "x" * 1_000_000, "forward_compute_time='xxx"),
        ("x" * 1_000_000, "line 1 is neither a node nor an edge: 'xxx"),
        ("x\n" * 500_000, "and 5 more|neither"),
        ("\n".join(PROFILE.splitlines()[0].replace("node1", f"n{n}") for n in range(2_000)), "2000 nodes on 1000 devices are"),
    ],
)
def test_hostile_profiles_are_refused_in_a_sentence_within_a_second(text, message):
    started_s = time.process_time()
    with pytest.raises(UsageError, match=message) as failure:
        parse_pipedream(text, "bad", 1000, 1e9)
    assert time.process_time() - started_s < 3 and len(str(failure.value)) < 5_000


# The same faults from Python and from the command line.


def autosplit(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def edges(*pairs, cost=0.5):
    return [{"sourceId": source, "destId": target, "cost": cost} for source, target in pairs]


UNEVEN = [*edges((5, 7)), *edges((5, 6), cost=0.7)]
JSON = json.dumps(small())
BAD_FILES = {
    "a cycle": (json.dumps(small(edges=edges((5, 7), (7, 5)))), "has a cycle: "),
    "an edge to itself": (json.dumps(small(edges=edges((5, 5)))), "has a cycle: "),
    "an unknown id": (json.dumps(small(edges=edges((5, 99)))), "unknown node 99"),
    "a negative time": (json.dumps(small(nodes=[node(fpgaLatency=-2.0)], edges=[])), "it is -2.0"),
    "no number": (json.dumps(small(nodes=[node(cpuLatency=math.nan)], edges=[])), "it is nan"),
    "an infinite size": (json.dumps(small(nodes=[node(size=math.inf)], edges=[])), "nodes.0.size: a finite number is needed"),
    "a time too small to use": (json.dumps(small(nodes=[node(fpgaLatency=1e-310)], edges=[])), "is not 0, but it is 1e-310"),
    "uneven costs": (json.dumps(small(edges=UNEVEN)), "one node has one cost"),
    "no nodes": (json.dumps(small(nodes=[], edges=[])), "it has no nodes"),
    "half a device": (json.dumps(small(maxFPGAs=1.5)), "maxFPGAs: Input should be a valid integer, but is 1.5"),
    "cut short": (JSON[: len(JSON) // 2], "truncated or not valid JSON"),
    "a list": ("[]", "the file: Input should be a mapping"),
    "no text": ("", "truncated or not valid JSON"),
    "more digits than Python reads": ("9" * 5000, "truncated or not valid JSON"),
    "lists in lists without end": ("[" * 200_000, "truncated or not valid JSON"),
}
BAD_PROFILES = {
    "a cycle": (PROFILE + "\tnode3 -- node1\n", "has a cycle: "),
    "an unknown id": (PROFILE + "\tnode3 -- node9\n", "unknown node node9"),
    "a negative time": (PROFILE.replace("=2.5", "=-2.5"), "0 or more is needed"),
    "no number": (PROFILE.replace("=2.5", "=nan"), "0 or more is needed"),
    "infinity": (PROFILE.replace("=2.5", "=inf"), "a finite number is needed"),
    "a time too small to use": (PROFILE.replace("=2.5", "=1e-310"), "is not 0, but it is 1e-310"),
    "no nodes": ("", "it has no nodes"),
    "a node twice": (PROFILE + profile_line("node1", 0, 0, 0, 0), "names node 'node1' again"),
    "cut short": (PROFILE[: PROFILE.index("activation_size=1000000.0")], "line 2 has no activation_size"),
}
BAD = [("dnn-partitioning", *case) for case in BAD_FILES.values()] + [("pipedream", *case) for case in BAD_PROFILES.values()]


@pytest.mark.parametrize(("format", "text", "message"), BAD, ids=[*BAD_FILES, *(f"pipedream {name}" for name in BAD_PROFILES)])
def test_a_bad_file_is_one_message_from_python_and_from_the_command_line(tmp_path, format, text, message):
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_workload(path, format)
    done = autosplit("search", path, "--format", format, "--json")
    assert done.exit_code == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert json.loads(done.stdout)["error"] == "UsageError" and message in json.loads(done.stdout)["message"]


ODD_FILES = {
    "one op": (small(nodes=[node()], edges=[]), 1.0),
    "more devices than ops": (small(maxFPGAs=9, nodes=[node(), node(id=2, cpuLatency=9.0, fpgaLatency=3.0)], edges=[]), 3.0),
    "zero-time ops": (small(nodes=[node(fpgaLatency=0.0), node(id=2, fpgaLatency=0.0)], edges=edges((1, 2), cost=0.0)), 0.0),
    "the smallest times": (small(nodes=[node(id=n, cpuLatency=1e-280, fpgaLatency=1e-280) for n in range(3)], edges=[]), 1e-280),
}
LINE = profile_line("node1", 1.0, 2.0, 0.0, 0.0)
ODD_PROFILES = {
    "one op": (LINE, 3.0),
    "more devices than ops": (LINE + profile_line("node2", 2.0, 2.0, 0.0, 0.0) + "\tnode1 -- node2\n", 4.0),
    "zero-time ops": (profile_line("node1", 0.0, 0.0, 5.0, 0.0), 0.0),
}
ODD = [("dnn-partitioning", json.dumps(data), value) for data, value in ODD_FILES.values()]
ODD += [("pipedream", *case) for case in ODD_PROFILES.values()]


@pytest.mark.parametrize(("format", "text", "value"), ODD, ids=[*ODD_FILES, *(f"pipedream {name}" for name in ODD_PROFILES)])
@pytest.mark.parametrize("objective", ["throughput", "latency", "pareto"])
@pytest.mark.parametrize("shape", [[], ["--any-sets"]])
def test_odd_files_have_right_answers(tmp_path, format, text, value, objective, shape):
    path = tmp_path / "odd"
    path.write_text(text)
    problem = read_workload(path, format)
    if objective == "throughput":
        assert solve(problem, Demands(contiguous=not shape)).objective_s == value
    words = ["search", path, "--format", format, *shape, "--objective", objective, "--time-limit", "2s", "--seed", 1, "--json"]
    done = autosplit(*words)
    assert done.exit_code == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {"objective", "bound", "gap", "status", "method", "solve_s", "assignment", "loads"} <= set(answer)
    assert set(answer["assignment"]) == set(problem.ops) and set(answer["loads"]) == set(problem.devices)
    if objective == "throughput":
        assert (answer["objective"], answer["bound"], answer["gap"], answer["status"]) == (value, value, 0.0, "optimal")


def test_a_cap_below_the_largest_op_is_answered_with_what_cannot_hold_together(tmp_path):
    path = tmp_path / "tight.json"
    path.write_text(json.dumps(small(maxSizePerFPGA=2.0, maxCPUs=0, nodes=[node(size=3.0)], edges=[])))
    with pytest.raises(InfeasibleError, match="op '1' needs 3 B") as caught:
        solve(read_workload(path))
    for shape in ([], ["--any-sets"]):
        done = autosplit("search", path, "--format", "dnn-partitioning", *shape, "--json")
        answer = json.loads(done.stdout)
        assert done.exit_code == 1 and str(caught.value) in done.stderr
        assert answer["status"] == "infeasible" and answer["conflict"] == list(caught.value.conflict) != []
        assert (answer["objective"], answer["bound"], answer["gap"], answer["assignment"]) == (None, None, None, {})


@pytest.mark.parametrize("shape", [[], ["--any-sets"]])
def test_no_time_at_all_gives_a_plan_with_its_gap(shape):
    path = FOLDER / "op-bert_l-3_training.json"
    done = autosplit("search", path, "--format", "dnn-partitioning", *shape, "--time-limit", "0s", "--json")
    answer = json.loads(done.stdout)
    assert answer["status"] in ("optimal", "feasible") and 0 <= answer["gap"] <= 1
    blocks = read_split(read_workload(path), answer)
    assert evaluate(read_workload(path), blocks).bottleneck_s == pytest.approx(answer["objective"])


def test_replicas_of_an_answer_are_judged_as_replicas(tmp_path):
    (tmp_path / "graph.txt").write_text(LINE)
    assumed = ["--format", "pipedream", "--num-devices", 3, "--bandwidth", 1e6, "--json"]
    answer = autosplit("search", tmp_path / "graph.txt", *assumed, "--max-replicas", 3).stdout
    assert list(json.loads(answer)["loads"]) == ["acc0", "acc1", "acc2"]
    (tmp_path / "split.json").write_text(answer)
    judged = json.loads(autosplit("evaluate", tmp_path / "graph.txt", "--split", tmp_path / "split.json", *assumed).stdout)
    assert judged["loads"] == json.loads(answer)["loads"] and judged["objective"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pin", "5=acc0"], "leave out --pin"),
        (["--format", "onnx"], "valid: model, dnn-partitioning"),
        (["--objective", "x"], "valid"),
    ],
)
def test_flags_that_mean_nothing_for_a_workload_are_refused(tmp_path, words, message):
    (tmp_path / "small.json").write_text(JSON)
    done = autosplit("search", tmp_path / "small.json", "--format", "dnn-partitioning", *words)
    assert done.exit_code == 1 and message in done.stderr
    (tmp_path / "split.json").write_text("{}")
    assert "is on no device" in autosplit("evaluate", tmp_path / "small.json", "--split", tmp_path / "split.json").stderr
    assert (
        "'x' is not known"
        in autosplit("evaluate", tmp_path / "small.json", "--split", tmp_path / "split.json", "--format", "x").stderr
    )


def parts_of(data, path=()):
    yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from parts_of(value, (*path, key))


def with_part(data, path, value):
    if not path:
        return value
    changed = json.loads(json.dumps(data))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


SPLITS = [{"5": "acc0", "7": "acc1", "6": "cpu0"}, {"fpgas": [{"nodes": [5]}, {"nodes": [7]}], "cpus": [{"nodes": [6]}]}]


@pytest.mark.parametrize("data", [small(), *SPLITS])
def test_any_part_may_be_anything_and_the_fault_is_named(data):
    """Every part of a file, put to everything that JSON can hold: read, or refused with a message."""
    problem = parse_dnn_partitioning(small(), "small")
    for path in parts_of(data):
        for value in (None, True, -1, 1.5, math.nan, math.inf, 10**400, "x", [], {}, [1]):
            with contextlib.suppress(UsageError, PlanError):
                other = with_part(data, path, value)
                parse_dnn_partitioning(other, "other") if data == small() else read_split(problem, other)


def test_a_split_is_simulated_at_full_load_and_under_a_rate(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(small()))
    (tmp_path / "split.json").write_text(json.dumps({"5": "acc0", "7": "acc1", "6": "cpu0"}))
    words = ["evaluate", tmp_path / "small.json", "--split", tmp_path / "split.json", "--json"]
    full = json.loads(autosplit(*words, "--simulate", 200).stdout)
    assert full["simulated"]["requests_per_unit"] == pytest.approx(1 / full["objective"])
    done = autosplit(*words, "--arrival-rate", 0.1, "--seed", 3, "--trace", tmp_path / "trace.json")
    loaded = json.loads(done.stdout)["simulated"]
    assert loaded["requests"] == 1000 and 5.5 <= loaded["latency"]["p50"] <= loaded["latency"]["p99"]
    names = {
        event["args"]["name"]
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert names == {"stage0.0", "stage1.0", "stage2.0"}
    planned = json.loads(
        autosplit("search", tmp_path / "small.json", "--format", "dnn-partitioning", "--json", "--simulate", 200).stdout
    )
    assert planned["simulated"]["requests_per_unit"] == pytest.approx(1 / planned["objective"], rel=0.02)
    assert "--arrival-rate must be a number above 0" in str(autosplit(*words, "--arrival-rate", 0).stderr)


def test_inputs_of_a_pipedream_profile_take_no_time():
    text = PROFILE.replace(
        "node1 -- Conv2d(3, 64, kernel_size=(3, 3)) -- forward_compute_time=0.000",
        "node1 -- Input0 -- forward_compute_time=600.0",
    )
    problem = parse_pipedream(text, "tiny", num_devices=2, bytes_per_s=1e9)
    assert problem.compute_s[0].tolist() == [0.0, 0.0]
    assert evaluate(problem, [Block((0,), (0,)), Block((1, 2), (1,))]).device_s.tolist() == [0.0, 9.0]


def test_a_pipedream_profile_with_transfers_beside_compute():
    problem = parse_pipedream(PROFILE, "tiny", num_devices=2, bytes_per_s=1e9, overlap=True)
    assert evaluate(problem, [Block((0, 1), (0,)), Block((2,), (1,))]).device_s == pytest.approx([7.5, 2.0])


# Kind, ms forward and backward, bytes of the output and of the weights: a net like AlexNet, whose loader takes longest.
CONVOLUTIONS = [
    ("Input", 636.0, 0.0, 154e6, 0),
    ("Conv2d", 22.3, 6.4, 198e6, 93e3),
    ("ReLU", 0.8, 0.7, 198e6, 0),
    ("MaxPool2d", 0.8, 1.1, 48e6, 0),
    ("Conv2d", 3.1, 5.6, 143e6, 1.2e6),
    ("MaxPool2d", 0.6, 0.9, 33e6, 0),
    ("Conv2d", 3.3, 6.6, 66e6, 2.7e6),
    ("Conv2d", 4.4, 7.2, 44e6, 3.5e6),
    ("MaxPool2d", 0.4, 0.3, 9e6, 0),
    ("Linear", 1.7, 3.1, 4e6, 151e6),
    ("Linear", 0.5, 0.5, 1e6, 16e6),
]


@pytest.mark.parametrize(("overlap", "slowest_ms"), [(True, 28.7), (False, 28.7 + 1.5 + 1.9 + 2 * 48e6 / 25e6)])
def test_a_pipedream_profile_of_convolutions_is_as_slow_as_its_first_one(overlap, slowest_ms):
    """The second device cannot take the first convolution's output of 198 MB in less, unless transfers take no time."""
    text = "".join(
        f"node{number} -- {kind} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={activation}, parameter_size={weights}\n"
        for number, (kind, forward, backward, activation, weights) in enumerate(CONVOLUTIONS)
    )
    text += "".join(f"\tnode{number} -- node{number + 1}\n" for number in range(len(CONVOLUTIONS) - 1))
    problem = parse_pipedream(text, "convolutions", num_devices=4, bytes_per_s=25e9, overlap=overlap)
    solution = solve(problem, time_limit_s=2.0)
    assert solution.status == "optimal" and solution.objective_s == pytest.approx(slowest_ms)
