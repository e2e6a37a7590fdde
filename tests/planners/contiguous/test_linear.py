"""Along one order of the items the chain planner is exact: it equals every way to cut the order and to choose devices."""

from itertools import combinations, pairwise, product
from math import inf
from time import monotonic

import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, random_problem

from autosplit.costs.judge import judge
from autosplit.costs.problem import Block
from autosplit.planners.contiguous import linear
from autosplit.planners.contiguous.proving import chain_blocks
from autosplit.planners.instance import contract
from autosplit.values.constraints import Demands


def best_along(problem, items, demands, order):
    """The best objective of all chains whose blocks are intervals of the order, by trying them all."""
    best_s = inf
    most = min(demands.max_replicas, problem.num_devices)
    sets = [group for size in range(1, most + 1) for group in combinations(range(problem.num_devices), size)]
    for count in range(1, min(items.num_items, problem.num_devices) + 1):
        for cuts in combinations(range(1, items.num_items), count - 1):
            parts = [items.expand(order[a:b]) for a, b in pairwise([0, *cuts, items.num_items])]
            for devices in product(sets, repeat=count):
                used = [device for group in devices for device in group]
                blocks = [Block(ops, group) for ops, group in zip(parts, devices, strict=True)]
                if len(set(used)) == len(used) and not (judged := judge(problem, demands, blocks)).faults:
                    best_s = min(best_s, judged.objective_s)
    return best_s


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([1, 1, 2]), st.sampled_from([0.0, 2.0]))
def test_a_chain_is_the_best_along_its_order(seed, max_replicas, min_stage_s):
    problem = random_problem(seed, num_ops=1 + seed % 4)
    demands = Demands(max_replicas=max_replicas, min_stage_s=min_stage_s)
    items = contract(problem, demands)
    orders = {tuple(order.tolist()): order for order in linear.topological_orders(items)}
    for order in orders.values():
        found = linear.chain_in_order(items, order, inf)
        best_s = best_along(problem, items, demands, order.tolist())
        value_s = inf if found is None else found.value_s
        assert value_s <= best_s * (1 + 1e-9)
        if items.exact:
            assert value_s == pytest.approx(best_s)
            if found is not None:
                blocks = chain_blocks(items, found)
                assert judge(problem, demands, blocks).faults == ()
                assert judge(problem, demands, blocks).objective_s == pytest.approx(value_s)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_orders_are_topological_and_the_best_of_them_is_taken(seed):
    items = contract(random_problem(seed), Demands())
    orders = linear.topological_orders(items)
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)
    for order in orders:
        place = np.argsort(order)
        assert sorted(order.tolist()) == list(range(items.num_items))
        assert all(place[item] < place[later] for item in range(items.num_items) for later in items.after.row(item))
    alone = [linear.chain_in_order(items, order, inf) for order in orders]
    best_s = min((chain.value_s for chain in alone if chain is not None), default=inf)
    found = linear.best_chain(items, inf, monotonic() + 60)
    assert (inf if found is None else found.value_s) == pytest.approx(best_s)


def test_only_chains_below_the_limit_count():
    items = contract(chain([2.0, 2.0], num_bytes=0.0), Demands())
    order = np.arange(items.num_items)
    assert linear.chain_in_order(items, order, 2.0) is None
    assert linear.chain_in_order(items, order, 2.1).value_s == 2.0
