"""Walks below rising limits: what they prove holds for every chain, and what they find is the best one."""

from math import inf
from time import monotonic

import exhaustive
import numpy as np
import pytest
from problems import random_problem

from autosplit.planners.contiguous import proving
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.items import contract
from autosplit.planners.noncontiguous.hypergraph import hypergraph_of
from autosplit.values.constraints import Demands


@pytest.mark.parametrize("seed", range(12))
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


@pytest.mark.parametrize("seed", range(6))
def test_prices_never_cut_off_the_best_chain(seed):
    problem = random_problem(seed, num_ops=6, caps=True, pooled=False, overlap=False)
    items = contract(problem, Demands())
    graph = hypergraph_of(problem, items)
    best = exhaustive.best_blocks(problem, Demands())
    if best is None or not np.isfinite(graph.costs.compute_s.min(axis=1)).all() or best[1] == 0:
        return
    board = Incumbent(problem, Demands())
    board.offer(best[0], "exhaustive")
    bound = proving._priced(board, items, monotonic() + 0.1)
    assert bound is not None
    prices = proving._holding(bound, items, best[1] * (1 + 1e-6))
    class_of = {device: kind for kind, devices in enumerate(items.classes) for device in devices}
    for block in best[0]:
        inside = [number for number, ops in enumerate(items.ops) if set(ops) <= set(block.ops)]
        assert (prices.values[inside].sum(axis=0) <= prices.most[class_of[block.devices[0]]] + 1e-9).all()
