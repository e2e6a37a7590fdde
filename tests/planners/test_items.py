from dataclasses import replace
from math import inf
from time import monotonic

from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, random_problem

from autosplit.planners.contiguous import downsets, linear
from autosplit.planners.items import contract
from autosplit.values.constraints import Demands


def best(problem, demands):
    items = contract(problem, demands)
    limit_s = inf
    while (outcome := downsets.best_chain(items, limit_s, monotonic() + 60)).chain is not None:
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
    found = linear.best_chain(items, inf, monotonic() + 60)
    everywhere = best(problem, demands)
    assert (found.value_s if found else inf) >= everywhere * (1 - 1e-9)
    assert items.compute_bound_s <= everywhere * (1 + 1e-9)


def test_groups_and_what_lies_between_become_one_item():
    problem = chain([1.0] * 5, groups=((1, 3),))
    assert contract(problem, Demands()).ops == ((0,), (1, 2, 3), (4,))
    assert contract(problem, Demands(contiguous=False)).ops == ((0,), (1, 3), (2,), (4,))


def test_a_cycle_of_the_order_becomes_one_item():
    problem = chain([1.0] * 5)
    problem = replace(problem, order=((0, 1), (1, 2), (2, 0), (2, 3)))
    assert sorted(contract(problem, Demands()).ops) == [(0, 1, 2), (3,), (4,)]
