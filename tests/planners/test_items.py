from dataclasses import replace
from math import inf
from time import monotonic

from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, random_problem

from autosplit.planners import bounds
from autosplit.planners.contiguous import downsets, linear
from autosplit.planners.contiguous.device_usage import usage_of
from autosplit.planners.items import contract
from autosplit.values.constraints import Demands


def best(problem, demands):
    items = contract(problem, demands)
    usage = usage_of(items, demands)
    limit_s, weights = inf, bounds.multipliers(items)
    while (outcome := downsets.best_chain(items, demands, usage, weights, limit_s, monotonic() + 60)).chain is not None:
        assert outcome.chain.value_s < limit_s
        limit_s = outcome.chain.value_s
    assert outcome.complete
    return limit_s


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_one_order_is_never_better_than_all_orders_and_no_bound_is_above(seed):
    problem = random_problem(seed, pooled=False)
    demands = Demands()
    items = contract(problem, demands)
    weights = bounds.multipliers(items)
    bound_s = bounds.compute_bound_s(items, demands, weights)
    found = linear.best_chain(items, demands, usage_of(items, demands), weights, bound_s, inf, monotonic() + 60)
    everywhere = best(problem, demands)
    assert (found.value_s if found else inf) >= everywhere * (1 - 1e-9)
    assert bound_s <= everywhere * (1 + 1e-9)


def test_groups_and_what_lies_between_become_one_item():
    problem = chain([1.0] * 5, groups=((1, 3),))
    assert contract(problem, Demands()).ops == ((0,), (1, 2, 3), (4,))
    assert contract(problem, Demands(contiguous=False)).ops == ((0,), (1, 3), (2,), (4,))


def test_a_cycle_of_the_order_becomes_one_item():
    problem = chain([1.0] * 5)
    problem = replace(problem, order=((0, 1), (1, 2), (2, 0), (2, 3)))
    assert sorted(contract(problem, Demands()).ops) == [(0, 1, 2), (3,), (4,)]
