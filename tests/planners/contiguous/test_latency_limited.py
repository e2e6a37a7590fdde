"""Limits on a plan are searched for, not only checked: whenever brute force finds a plan, solve() does."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import exhaustive
import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.contract import EXACT, check, solved
from problems import chain, random_problem

from autosplit.costs.cost import evaluate
from autosplit.costs.pieces import latency_s
from autosplit.costs.problem import Block, Problem
from autosplit.planners.contiguous.linear import chain_in_order
from autosplit.planners.contiguous.proving import chain_blocks
from autosplit.planners.instance import contract
from autosplit.planners.portfolio import solve
from autosplit.values.constraints import Demands

LIMITS = st.fixed_dictionaries(
    {"objective": st.sampled_from(["throughput", "throughput", "latency"]), "contiguous": st.sampled_from([True, True, False])},
    optional={
        "num_stages": st.integers(1, 3),
        "max_replicas": st.integers(1, 2),
        "min_stage_s": st.sampled_from([0.5, 1.0, 2.0, 3.0, 4.0]),
        "max_latency_s": st.sampled_from([4.0, 6.0, 8.0, 10.0, 14.0, 20.0]),
    },
)


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(st.integers(0, 10**6), LIMITS)
def test_all_limits_together_are_met_as_well_as_brute_force_meets_them(seed, options):
    problem, solution, demands = solved(seed, options, num_ops=1 + seed % 4, num_devices=1 + seed % 2)
    if solution is not None:
        best_s = check(problem, solution, demands)
        assert solution.objective_s == pytest.approx(best_s, rel=EXACT)


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(st.integers(0, 10**6), LIMITS)
def test_nobody_is_told_that_nothing_fits_because_time_was_short(seed, options):
    problem, solution, demands = solved(seed, options, time_limit_s=0.0, num_ops=1 + seed % 4, num_devices=2)
    if solution is not None:
        check(problem, solution, demands)


def series(seed: int) -> Problem:
    """Ops in a row on unequal devices, each reading the one before: a sample's time is the sum over the blocks."""
    random = np.random.default_rng(seed)
    problem = chain([1.0] * 7, num_devices=3, num_bytes=0.3)
    problem.transfers.latency_s[:3, :3] = 0.7
    return replace(problem, compute_s=random.integers(1, 9, (7, 3)) * np.array([1.0, 1.2, 2.0])).verify()


@pytest.mark.parametrize("seed", range(4))
def test_the_soonest_chain_below_a_load_is_the_soonest_of_all_chains(seed):
    problem = series(seed)
    demands = Demands(max_latency_s=1e9)
    items = contract(problem, demands)
    assert items.num_items == 7
    rows = [
        tuple(Block(tuple(range(*ends)), (device,)) for ends, device in zip(pairwise((0, *cuts, 7)), devices, strict=True))
        for count in range(3)
        for cuts in combinations(range(1, 7), count)
        for devices in [[0, 1, 2][: count + 1], [2, 0, 1][: count + 1], [1, 2, 0][: count + 1], [2, 1, 0][: count + 1],
                        [0, 2, 1][: count + 1], [1, 0, 2][: count + 1]]
    ]  # fmt: skip
    for limit_s in (14.0, 20.0, 30.0, inf):
        fits = [latency_s(problem, row) for row in rows if evaluate(problem, row).bottleneck_s <= limit_s]
        found = chain_in_order(items, np.arange(7), limit_s * (1 + 1e-6), delay_s=0.7)
        assert (found is None) == (not fits)
        if found is not None:
            assert (
                found.value_s - 0.7 == pytest.approx(min(fits)) == pytest.approx(latency_s(problem, chain_blocks(items, found)))
            )


def test_a_latency_limit_costs_no_more_throughput_than_it_must():
    problem = chain([2.0, 3.0, 2.0, 3.0], num_devices=3, num_bytes=0.5)
    free = solve(problem)
    for limit_s in (latency_s(problem, free.blocks) - 0.1, 11.0):
        solution = solve(problem, Demands(max_latency_s=limit_s), time_limit_s=5)
        best = exhaustive.best_blocks(problem, Demands(max_latency_s=limit_s))
        assert best is not None and latency_s(problem, solution.blocks) <= limit_s
        assert (solution.objective_s, solution.status) == (pytest.approx(best[1]), "optimal")


def test_a_hundred_ops_hold_a_latency_limit_between_the_ends():
    problem = chain([1.0 + (op * 7 % 5) for op in range(100)], num_devices=6, num_bytes=2.0)
    free = solve(problem, time_limit_s=1)
    longest_s, shortest_s = latency_s(problem, free.blocks), float(problem.compute_s[:, 0].sum())
    limit_s = (longest_s + shortest_s) / 2
    solution = solve(problem, Demands(max_latency_s=limit_s), time_limit_s=1)
    assert latency_s(problem, solution.blocks) <= limit_s < longest_s
    assert solution.objective_s < shortest_s / 2


def test_blocks_that_take_long_enough_are_sought_among_replicas_and_shared_devices():
    for seed in range(6):
        problem = random_problem(seed, num_ops=3 + seed // 5, num_devices=2, unsupported=False)
        demands = Demands(num_stages=3, min_stage_s=1.0, max_replicas=2, reuse=True).sharing()
        best = exhaustive.best_blocks(problem, demands)
        if best is not None:
            solution = solve(problem, Demands(num_stages=3, min_stage_s=1.0, max_replicas=2))
            assert solution.objective_s == pytest.approx(best[1], rel=EXACT)
