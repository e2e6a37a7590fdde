import json
from dataclasses import replace
from itertools import permutations
from math import inf
from pathlib import Path

import exhaustive
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import chain, random_problem
from typer.testing import CliRunner

from autosplit.cli import app
from autosplit.costs.cost import evaluate
from autosplit.costs.faults import find_faults
from autosplit.costs.pieces import latency_s
from autosplit.costs.problem import Block
from autosplit.costs.workloads import read_workload
from autosplit.errors import InfeasibleError
from autosplit.planners import pareto as planner
from autosplit.planners.pareto import dominates, front_of, pareto, values_of
from autosplit.planners.portfolio import solve
from autosplit.values.constraints import Demands

pytestmark = pytest.mark.usefixtures("processor_time")

WORKLOAD = Path(__file__).parents[1] / "data" / "workloads" / "layer-bert24_inference.json"
FORMAT = ("--format", "dnn-partitioning")


def front_of_few(problem, time_limit_s):
    """A front with one limit of each kind between its ends, which takes a third of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "NUM_LIMITS", 1)
        return pareto(problem, time_limit_s=time_limit_s)


def test_a_chain_trades_latency_for_throughput_and_memory():
    problem = chain([4.0, 4.0, 4.0, 4.0], num_bytes=0.5)
    values = [values_of(solution.judged) for solution in pareto(problem, time_limit_s=4)]
    assert (8.5, 17.0, 2.0) in values
    assert (16.0, 16.0, 4.0) in values
    assert values == sorted(values)


def test_a_front_holds_a_plan_between_the_ends_that_only_a_memory_cap_finds():
    problem = chain([1.0, 1.0, 10.0], num_bytes=0.1)
    problem = replace(problem, op_bytes=np.array([5.0, 5.0, 1.0]))
    values = [values_of(solution.judged) for solution in pareto(problem, time_limit_s=4)]
    assert [min(figures) for figures in zip(*values, strict=True)] == pytest.approx([10.1, 12.0, 6.0])


@settings(max_examples=1, deadline=None)
@given(st.integers(0, 10**6))
@example(45089)
@example(524289)  # the quickest plan shares a device, and is found by annealing only
@example(6034)  # no plan with one block on a device fits; plans that share devices do
def test_points_run_recompute_and_do_not_dominate_each_other(seed):
    problem = random_problem(seed, num_ops=1 + seed % 5, num_devices=2)
    demands = Demands()
    best = exhaustive.best_blocks(problem, demands)
    shared = exhaustive.best_blocks(problem, replace(demands, reuse=True))
    try:
        solutions = front_of_few(problem, time_limit_s=0.6)
    except InfeasibleError:
        assert shared is None
        return
    assert shared is not None
    points = [values_of(solution.judged) for solution in solutions]
    for (_, alone_s, _), solution in zip(points, solutions, strict=True):
        assert find_faults(problem, solution.blocks) == []
        assert solution.objective_s == evaluate(problem, solution.blocks).bottleneck_s
        assert alone_s == latency_s(problem, solution.blocks)
    assert not any(dominates(one, other) for one, other in permutations(points, 2))
    # A quick plan with several blocks on a device is in the front too, and may be the best for throughput as well.
    quickest_s = min(bottleneck_s for bottleneck_s, _, _ in points)
    assert shared[1] * (1 - 2e-6) <= quickest_s <= (inf if best is None else best[1]) * (1 + 2e-6)
    assert best is not None or {solution.status for solution in solutions} == {"shared"}
    fastest = exhaustive.best_blocks(problem, Demands(objective="latency").sharing())
    assert fastest is not None and min(alone_s for _, alone_s, _ in points) <= fastest[1] * (1 + 1e-6)


@pytest.mark.parametrize("seed", [62, 138, 202])
def test_what_is_proved_of_one_block_on_a_device_is_not_claimed_of_plans_that_share(seed):
    # a shared plan below the best of the others was called optimal, with its own load as the bound
    problem = random_problem(seed, num_ops=4, num_devices=2, grouped=False)
    shared = exhaustive.best_blocks(problem, Demands(reuse=True))
    found = 0
    for solution in front_of_few(problem, time_limit_s=0.5):
        if len({device for block in solution.blocks for device in block.devices}) < len(solution.blocks):
            found += 1
            assert 0 < solution.bound_s <= shared[1] * (1 + 2e-6)
            assert solution.status == "feasible"
    assert found


def test_limits_hold_for_every_point_and_what_cannot_be_is_refused():
    problem = chain([4.0, 4.0, 4.0, 4.0], num_bytes=0.5)
    assert {len(s.blocks) for s in pareto(problem, Demands(num_stages=2), time_limit_s=2)} == {2}
    assert [len(s.blocks) for s in pareto(problem, Demands(max_latency_s=16.5), time_limit_s=2)] == [1]
    with pytest.raises(InfeasibleError):
        pareto(problem, Demands(max_latency_s=3.0), time_limit_s=2)


def test_stages_that_only_plans_with_shared_devices_can_have_are_no_end_of_the_search():
    problem = chain([1.0, 2.0], num_bytes=0.0, op_bytes=np.array([1.0, 5.0]), memory_bytes=np.array([9.0, 0.5]))
    front = pareto(problem, Demands(num_stages=2), time_limit_s=2)
    assert [[block.devices for block in solution.blocks] for solution in front] == [[(0,), (0,)]]
    assert [(solution.objective_s, solution.bound_s, solution.status) for solution in front] == [(3.0, 3.0, "shared")]


def test_of_equal_points_the_one_with_fewer_stages_stays():
    problem = chain([1.0, 1.0], num_bytes=0.0)
    values = values_of(solve(problem, Demands(num_stages=1)).judged)
    assert front_of([(values, 2, "wide"), ((inf, *values[1:]), 1, "slow"), (values, 1, "one")]) == ["one"]


def test_the_command_prints_the_front_of_a_workload_with_its_plans():
    done = CliRunner().invoke(app, ["search", str(WORKLOAD), *FORMAT, "--objective", "pareto", "--time-limit", "1.5s", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    front = result["front"]
    assert result["objective"] == front[0]["objective"] and len(front) > 2
    values = [(row["objective"], row["latency"], row["peak_bytes"]) for row in front]
    assert values == sorted(values) and front[-1]["latency"] == min(latency for _, latency, _ in values)
    problem = read_workload(WORKLOAD)
    for row in front:
        places = [
            Block(tuple(map(problem.ops.index, s["ops"])), tuple(map(problem.devices.index, s["devices"]))) for s in row["stages"]
        ]
        assert evaluate(problem, places).bottleneck_s == pytest.approx(row["objective"], rel=1e-9)
        assert latency_s(problem, places) == pytest.approx(row["latency"], rel=1e-9)
        assert set(row["assignment"]) == set(problem.ops)
