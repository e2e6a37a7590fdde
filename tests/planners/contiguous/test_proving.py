"""Walks below rising limits: what they prove holds for every chain, and what they find is the best one."""

from math import inf
from time import monotonic

import exhaustive
import pytest
from fuzzing import examples
from problems import random_problem

from autosplit.planners.contiguous import proving
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.instance import contract
from autosplit.values.constraints import Demands


@pytest.mark.parametrize("seed", range(examples(12)))
def test_climbing_to_the_optimum_and_never_above_it(seed):
    problem = random_problem(seed, num_ops=5, caps=True, pooled=False)
    best = exhaustive.best_blocks(problem, Demands())
    optimum_s = inf if best is None else best[1]
    items = contract(problem, Demands())
    board = Incumbent(problem, Demands())
    board.prove(min(items.compute_bound_s, 1e9), "compute bound")
    if best is not None:
        board.offer(best[0], "exhaustive")
    proving._close_in(board, items, monotonic() + 20.0)
    assert board.bound_s <= optimum_s * (1 + 1e-9)
    if best is not None and items.exact and board.bound_s > 0:
        assert board.closed
