"""Explanations of small problems whose answer is known."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from problems import chain
from typer.testing import CliRunner

from autosplit.cli import app
from autosplit.costs.cost import evaluate
from autosplit.costs.problem import Block, Problem, Transfers
from autosplit.costs.wires import Wires
from autosplit.costs.workloads import parse_dnn_partitioning
from autosplit.deploying.setup import Budget
from autosplit.errors import PlanError, UsageError
from autosplit.planners.portfolio import solve
from autosplit.planning.explaining import explain, explain_blocks
from autosplit.planning.plans import plan_model
from autosplit.planning.predicting import predict
from autosplit.planning.question import Question
from autosplit.searching.loop import search
from autosplit.values.constraints import Constraints, Demands
from autosplit.values.explanation import Change, Explanation
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.links import Wire
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import Source
from autosplit.values.planfile import read_plan, write_plan
from autosplit.values.profile import Profile

WORKLOAD = Path(__file__).parents[1] / "data" / "workloads" / "layer-bert24_inference.json"
OPS = tuple(Op(f"a{i}", "linear", "", (f"a{i - 1}" if i else "x",), (f"a{i}",), (), f"s{i}") for i in range(4))
VALUES = {name: Value(name, (8,), "float32", 32) for name in ["x", *[op.name for op in OPS]]}
GRAPH = Graph("chain", ("x",), ("a3",), OPS, VALUES, {}).verify()
TWO = Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])
PROFILE = Profile.given(GRAPH, {(op.name, device.name): 1.0 for op in OPS for device in TWO.devices})


def explained(problem: Problem, **options) -> Explanation:
    blocks = solve(problem, time_limit_s=5).blocks
    return explain_blocks(problem, blocks, time_limit_s=5, **options)


def change(explanation: Explanation, words: str) -> Change:
    return next(row for row in explanation.changes if words in row.change)


def test_the_card_that_bounds_a_plan_is_named_also_where_a_demand_forces_the_plan():
    """Before, the busiest device was called the bottleneck, with its own seconds."""
    cards = Wire("a receives", ("b",), ("a",), 0.5), Wire("b receives", ("a",), ("b",), 0.5)
    problem = replace(chain([1.0, 1.0], 2, num_bytes=8.0), devices=("a/cpu:0", "b/cpu:0"), wires=Wires(cards))
    problem = replace(problem, transfers=Transfers.free(2))
    blocks = [Block((0,), (0,)), Block((1,), (1,))]
    found = explain_blocks(problem, blocks, Demands(num_stages=2), time_limit_s=2)
    assert found.bottleneck == "b receives"
    assert found.because.startswith(
        "'b receives' is the bottleneck: 4.00 s, and with any number of stages it would be 50.0% less"
    )


def test_compute_bounds_even_work_with_cheap_transfers():
    found = explained(chain([1.0] * 6, num_bytes=0.01))
    assert found.bound_by == "compute"
    assert found.objective_s == pytest.approx(3.01)
    more = change(found, "one more device")
    assert more.objective_s == pytest.approx(2.02) and more.times == pytest.approx(3.01 / 2.02) and more.proved
    assert change(found, "bandwidth").objective_s == pytest.approx(3.005)
    (cut,) = found.cuts
    assert cut.objective_s == pytest.approx(4.01) and cut.ops == 1
    assert cut.slower == pytest.approx(4.01 / 3.01 - 1)


@pytest.mark.parametrize("num_cpus", [0, 1])
def test_one_more_device_brings_what_a_file_with_one_more_says(num_cpus):
    # a transfer between the two cost nothing: 7 and 6 instead of 9
    nodes = [{"id": n, "supportedOnFpga": True, "fpgaLatency": 3, "cpuLatency": 30, "size": 1} for n in range(3)]
    edges = [{"sourceId": n, "destId": n + 1, "cost": 4} for n in range(2)]
    file = {"maxFPGAs": 1, "maxCPUs": num_cpus, "maxSizePerFPGA": 9, "nodes": nodes, "edges": edges}
    one, two = (parse_dnn_partitioning(file | {"maxFPGAs": count}, "small") for count in (1, 2))
    more = change(explain_blocks(one, solve(one).blocks, unit=""), "one more device")
    assert more.proved and more.objective_s == solve(two).objective_s == 9.0


def test_transfers_bound_what_must_be_sent():
    problem = chain([1.0] * 4, num_bytes=10.0)
    problem = replace(problem, memory_bytes=np.array([3.0, 3.0]))
    blocks = solve(problem).blocks
    found = explain_blocks(replace(problem, memory_bytes=np.full(2, np.inf), name="free"), blocks, time_limit_s=5)
    assert found.bound_by == "transfer"
    row = next(row for row in found.devices if row.device == found.bottleneck)
    assert row.transfer_share == pytest.approx(10 / row.load_s)
    assert change(found, "another plan").objective_s == pytest.approx(4.0)


def test_a_memory_cap_bounds_what_it_forces():
    problem = replace(chain([4.0, 4.0, 1.0, 1.0], num_bytes=1.0), memory_bytes=np.array([1.0, 3.0]))
    problem = replace(problem, compute_s=problem.compute_s * np.array([0.2, 1.0]))
    found = explained(problem)
    assert found.bound_by == "memory" and "no memory caps" in found.because
    assert change(found, "no memory caps").objective_s == pytest.approx(2.0)


def test_a_pin_bounds_what_it_forbids():
    free = chain([4.0, 4.0], num_bytes=0.1)
    pinned = free.compute_s.copy()
    pinned[:, 1] = np.inf
    found = explained(replace(free, compute_s=pinned), loosened={"'op*' not pinned to 'dev0'": free})
    assert found.bound_by == "constraint" and "not pinned" in found.because
    assert change(found, "not pinned").objective_s == pytest.approx(4.1)


def test_a_group_bounds_what_it_keeps_together():
    found = explained(replace(chain([4.0, 4.0], num_bytes=0.1), groups=((0, 1),)))
    assert found.bound_by == "constraint"
    assert change(found, "nothing kept together").objective_s == pytest.approx(4.1)


def test_an_op_that_takes_longest_everywhere_cannot_be_cut():
    found = explained(chain([1.0, 9.0], num_bytes=0.0))
    assert found.bound_by == "indivisible" and "'op1'" in found.because
    assert change(found, "one more device").times == pytest.approx(1.0)
    assert found.cuts[0].objective_s is None


def test_a_stage_count_bounds_and_units_are_the_files_own():
    problem = chain([2.0, 2.0], num_bytes=9.0)
    blocks = solve(problem, Demands(num_stages=2)).blocks
    found = explain_blocks(problem, blocks, demands=Demands(num_stages=2), time_limit_s=5, unit="")
    assert found.bound_by == "constraint" and "any number of stages" in found.because
    assert " ms" not in found.text and "11" in found.because


def test_latency_is_explained_in_its_own_terms():
    problem = chain([2.0, 2.0], num_bytes=0.0)
    found = explain_blocks(
        problem, solve(problem, Demands(objective="latency")).blocks, Demands(objective="latency"), time_limit_s=5
    )
    assert found.objective_s == 4.0 and "a sample takes 4.00 s" in found.because.lower()
    assert change(found, "one more device").times == pytest.approx(1.0)


def test_a_device_keeps_its_name_in_the_sentence_about_latency():
    problem = replace(chain([2.0, 2.0]), devices=("CPU:0", "CPU:1"))
    solution = solve(problem, Demands(objective="latency"))
    found = explain_blocks(
        problem, solution.blocks, demands=Demands(objective="latency"), bound_s=solution.bound_s, time_limit_s=0.0
    )
    assert found.because.startswith(f"A sample takes 4.00 s; '{found.bottleneck}' is the bottleneck with 4.00 s a sample")


def test_a_plan_that_is_not_the_best_is_told_so():
    problem = chain([1.0] * 4, num_bytes=0.0)
    found = explain_blocks(problem, [Block((0,), (0,)), Block((1, 2, 3), (1,))], time_limit_s=5)
    assert change(found, "another plan").objective_s == pytest.approx(2.0)
    assert found.cuts[0].objective_s == pytest.approx(2.0)
    assert found.cuts[0].slower == pytest.approx(-1 / 3)


def test_what_there_is_no_time_for_is_named_and_what_is_proved_is_not_looked_for_again():
    problem = chain([1.0] * 4, num_bytes=0.01)
    solution = solve(problem)
    hurried = explain_blocks(problem, solution.blocks, time_limit_s=0.0)
    assert hurried.left_out == ("another plan under the same demands", "one more device like 'dev0'", "twice the bandwidth")
    assert not hurried.changes and not hurried.cuts and "no time left to look at: another plan" in hurried.text
    assert explain_blocks(problem, solution.blocks, bound_s=solution.bound_s, time_limit_s=0.0).left_out == hurried.left_out[1:]
    assert explain_blocks(problem, solution.blocks, bound_s=solution.bound_s, time_limit_s=0.0).bound_s == solution.bound_s


def test_a_plan_that_is_no_chain_has_cuts_too():
    problem = chain([1.0] * 4, num_bytes=0.01)
    solution = solve(problem, Demands(contiguous=False))
    found = explain_blocks(problem, solution.blocks, bound_s=solution.bound_s, demands=Demands(contiguous=False), time_limit_s=5)
    (cut,) = found.cuts
    assert cut.objective_s == pytest.approx(3.01) and f"costs 3.01 s (+{cut.slower:.1%}), of {cut.tried} tried" in found.text


def test_an_explanation_reads_as_text_table_and_data():
    problem = chain([1.0] * 6, num_bytes=0.01)
    found = explained(problem)
    loads = evaluate(problem, solve(problem).blocks)
    assert [row["load_s"] for row in found.rows()] == loads.device_s.tolist()
    assert len(found.text.splitlines()) == 1 + len(found.cuts) + len(found.changes) and str(found) == found.text
    assert found._repr_html_().count("<table>") == 3
    assert list(found.frame().index) == ["dev0", "dev1"]
    assert json.loads(json.dumps(found.to_dict()))["bottleneck"] == found.bottleneck


def test_a_plan_is_explained_with_its_constraints():
    wanted = Constraints(pins={"a*": "cpu:0"}, max_replicas=1)
    plan = plan_model(Question(GRAPH, PROFILE, Source("m:f"), TWO, ("eager",), wanted))
    found = explain(GRAPH, plan, TWO, PROFILE, wanted, time_limit_s=5)
    assert found.objective_s == pytest.approx(plan.prediction.bottleneck_s)
    assert (found.bottleneck, found.bound_by) == ("cpu:0", "constraint")
    assert change(found, "'a*' not pinned to 'cpu:0'").times == pytest.approx(2, rel=0.01)
    free = plan_model(Question(GRAPH, PROFILE, Source("m:f"), TWO, ("eager",), Constraints(max_replicas=1)))
    assert explain(GRAPH, free, TWO, PROFILE, Constraints(max_replicas=1), time_limit_s=5).bound_by == "compute"


def test_ops_that_take_no_time_are_explained():
    found = explained(chain([0.0, 0.0]), demands=Demands(num_stages=2))
    assert found.objective_s == 0.0 and found.text
    assert "host" not in found.because


def test_a_search_leaves_its_explanation_in_the_plan_and_in_its_file(tmp_path):
    traced: Any = SimpleNamespace(graph=GRAPH)
    question = Question(GRAPH, PROFILE, Source("m:f"), TWO, ("eager",), Constraints(max_replicas=1))
    plan = search(question, traced, budget=Budget(0.0, explain_s=0.5)).plan
    assert plan.explain() == explain(GRAPH, plan, TWO, PROFILE, Constraints(max_replicas=1))
    assert plan.explain().bound_s == pytest.approx(plan.prediction.bound_s)
    write_plan(plan, GRAPH, tmp_path / "plan.yaml")
    again = read_plan(tmp_path / "plan.yaml").resolve(GRAPH)
    assert again == plan and again.explain().text == plan.explain().text
    with pytest.raises(UsageError, match=r"holds no explanation; autosplit\.explain\("):
        search(question, traced, budget=Budget(0.0, explain_s=0.0)).plan.explain()


def test_an_explanation_is_not_given_for_other_stages_or_another_profile(tmp_path):
    traced: Any = SimpleNamespace(graph=GRAPH)
    question = Question(GRAPH, PROFILE, Source("m:f"), TWO, ("eager",), Constraints(num_stages=2))
    plan = search(question, traced, budget=Budget(0.0, explain_s=0.5)).plan
    path = tmp_path / "plan.yaml"
    write_plan(plan, GRAPH, path)
    data = yaml.safe_load(path.read_text())
    data["stages"][0]["ops"], data["stages"][1]["ops"] = ["a0"], ["a1 .. a3"]
    path.write_text(yaml.safe_dump(data))
    edited = read_plan(path).resolve(GRAPH)
    with pytest.raises(UsageError, match=r"explanation of other stages; autosplit\.explain\("):
        edited.explain()
    write_plan(edited, GRAPH, path)
    assert "why" not in yaml.safe_load(path.read_text())
    assert predict(plan, GRAPH, TWO, PROFILE).why is None
    data["why"]["changes"][0]["times"] = "many"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError, match=r"why\.changes\.0\.times"):
        read_plan(path)


def test_the_command_explains_a_workload_in_the_files_own_unit():
    words = ["search", str(WORKLOAD), "--format", "dnn-partitioning", "--explain", "--time-limit", "4s"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    explanation = result["explanation"]
    assert explanation["objective_s"] == pytest.approx(result["objective"])
    assert explanation["bottleneck"] == max(result["loads"], key=result["loads"].get)
    assert explanation["bound_by"] == "compute"
    more = next(row for row in explanation["changes"] if "one more device" in row["change"])
    assert more["proved"] and more["objective_s"] < result["objective"]
    shown = CliRunner().invoke(app, words)
    assert "is the bottleneck: 17.7899" in shown.stdout and "next best cut costs" in shown.stdout
