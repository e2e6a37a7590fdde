from dataclasses import replace

from problems import chain

from autosplit.planners.instance import contract
from autosplit.values.constraints import Demands


def test_groups_and_what_lies_between_become_one_item():
    problem = chain([1.0] * 5, groups=((1, 3),))
    assert contract(problem, Demands()).ops == ((0,), (1, 2, 3), (4,))
    assert contract(problem, Demands(contiguous=False)).ops == ((0,), (1, 3), (2,), (4,))


def test_a_cycle_of_the_order_becomes_one_item():
    problem = chain([1.0] * 5)
    problem = replace(problem, order=((0, 1), (1, 2), (2, 0), (2, 3)))
    assert sorted(contract(problem, Demands()).ops) == [(0, 1, 2), (3,), (4,)]
