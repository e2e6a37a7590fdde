"""More blocks than devices: on tiny problems the answer is that of brute force, and a larger one is better than the chain cut."""

from dataclasses import replace
from itertools import combinations, pairwise, product

import exhaustive
import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, random_problem

from autosplit.costs.cost import evaluate
from autosplit.costs.judge import judge
from autosplit.costs.problem import Block
from autosplit.errors import InfeasibleError
from autosplit.planners.portfolio import solve
from autosplit.values.constraints import Demands


def found_by(problem, demands):
    """The blocks and their objective in seconds, or None."""
    try:
        found = solve(problem, demands, time_limit_s=0.5, name_conflict=False)
    except InfeasibleError:
        return None
    return found.blocks, found.objective_s


def best_chain_s(problem, num_stages):
    """The best of all ways to cut a chain and to put its parts on devices."""
    found = []
    for cuts in combinations(range(1, problem.num_ops), num_stages - 1):
        parts = [tuple(range(a, b)) for a, b in pairwise([0, *cuts, problem.num_ops])]
        for devices in product(range(problem.num_devices), repeat=num_stages):
            blocks = [Block(ops, (device,)) for ops, device in zip(parts, devices, strict=True)]
            found.append(evaluate(problem, blocks).bottleneck_s)
    return min(found)


def test_a_stage_is_long_enough_but_for_rounding():
    """0.1 s and 0.7 s are less than 0.8 s in float64, and no less for the check of a plan."""
    problem = chain([0.1, 0.7, 0.8], num_bytes=0.0)
    found = found_by(problem, Demands(num_stages=2, min_stage_s=0.8, reuse=True))
    assert found is not None and [block.ops for block in found[0]] == [(0, 1), (2,)]


@settings(max_examples=examples(12), deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([3, 4]))
def test_tiny_chains_equal_brute_force(seed, num_stages):
    times = [1.0 + (seed // 7**place) % 7 for place in range(5)]
    problem = chain(times, num_bytes=0.25 * (seed % 4))
    demands = Demands(num_stages=num_stages, reuse=True)
    blocks, value_s = found_by(problem, demands)
    assert judge(problem, demands, blocks).faults == ()
    assert value_s == judge(problem, demands, blocks).objective_s == pytest.approx(best_chain_s(problem, num_stages))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_what_is_found_is_a_plan_and_never_better_than_brute_force(seed):
    problem = random_problem(seed, num_ops=4, num_devices=2)
    demands = Demands(num_stages=3, reuse=True)
    found, best = found_by(problem, demands), exhaustive.best_blocks(problem, demands)
    if found is not None:
        assert judge(problem, demands, found[0]).faults == ()
        assert best is not None and found[1] >= best[1] * (1 - 1e-9)


def test_several_stages_share_a_device_where_that_balances():
    """1 + 3 on one device, 2 + 2 on the other: a chain of two blocks gives 5 s, one of three gives 4 s."""
    problem = chain([1.0, 4.0, 3.0], num_bytes=0.0)
    assert found_by(problem, Demands(num_stages=3, reuse=True))[1] == 4.0


def test_many_ops_are_annealed_from_the_best_chain_cut_in_two() -> None:
    """Two devices take turns at 60 ops: the one is fast at the first and the last third, the other at the second."""
    problem = chain([1.0] * 90, num_bytes=0.01)
    slow = np.where((np.arange(90) // 30 == 1)[:, None] == [False, True], 1.0, 3.0)
    found = solve(replace(problem, compute_s=slow), Demands(num_stages=3, reuse=True), time_limit_s=1.0)
    assert len(found.blocks) == 3 and found.objective_s < solve(replace(problem, compute_s=slow), time_limit_s=1.0).objective_s
