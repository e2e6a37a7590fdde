"""More blocks than devices: on tiny problems the beam search finds what brute force finds."""

from itertools import combinations, pairwise, product
from time import monotonic

import exhaustive
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, random_problem

from autosplit.costs.cost import evaluate
from autosplit.costs.judge import judge
from autosplit.costs.problem import Block
from autosplit.planners.contiguous.interleaved import improve_interleaved
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.items import contract
from autosplit.values.constraints import Demands


def found_by(problem, demands):
    """The blocks and their objective in seconds, or None."""
    items, found = contract(problem, demands), Incumbent(problem, demands)
    improve_interleaved(found, items, monotonic() + 20)
    return (found.blocks, found.objective_s) if found.blocks else None


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
    """Every order of a chain is the order, so that nothing is left to luck but the beam, which holds all labels here."""
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
    assert found_by(chain([1.0]), Demands(num_stages=2, reuse=True)) is None
