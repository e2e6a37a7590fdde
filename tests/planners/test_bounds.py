"""What no plan can beat is beaten by no plan, however the weights of the classes were found."""

from math import inf

import exhaustive
import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp
from problems import random_problem

from autosplit.planners import bounds
from autosplit.planners.instance import contract
from autosplit.values.constraints import Demands


@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([1, 2]))
def test_no_plan_beats_the_compute_bound(seed, contiguous, max_replicas):
    problem = random_problem(seed, num_ops=1 + seed % 4)
    demands = Demands(contiguous=contiguous, max_replicas=max_replicas)
    items = contract(problem, demands)
    weights = items.multipliers
    assert weights @ [len(members) for members in items.classes] == pytest.approx(1.0) and (weights >= 0).all()
    best = exhaustive.best_blocks(problem, demands)
    optimum_s = inf if best is None else best[1]
    assert items.priced_work.sum() <= items.compute_bound_s <= optimum_s * (1 + 1e-9)
    equal = np.full(len(weights), 1 / problem.num_devices)
    assert bounds.least_priced(items.work_s, equal).sum() <= items.priced_work.sum() * (1 + 1e-9)


def spread_s(work: np.ndarray, counts: list[int]) -> float:
    """The largest load if every item may be spread over the devices: the linear program whose duals are the best weights."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    top = solver.NumVar(0, solver.infinity(), "")
    shares = [[solver.NumVar(0, 1, "") if np.isfinite(cost) else None for cost in row] for row in work]
    for row in shares:
        solver.Add(sum(share for share in row if share is not None) == 1)
    for k, count in enumerate(counts):
        solver.Add(
            sum(share * float(cost) for share, cost in zip([r[k] for r in shares], work[:, k], strict=True) if share is not None)
            <= count * top
        )
    solver.Minimize(top)
    return float(solver.Objective().Value()) if solver.Solve() == pywraplp.Solver.OPTIMAL else inf


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_the_weights_are_the_best_there_are(seed):
    items = contract(random_problem(seed, alike=False, num_devices=3), Demands())
    work = items.compute_s if items.overlap else items.compute_s + items.fixed_s
    assert items.priced_work.sum() == pytest.approx(spread_s(work, [len(members) for members in items.classes]), rel=1e-6)


def test_unequal_devices_share_the_work_by_their_speed():
    """Six ops of 1 s on a device and of 2 s on another: no plan is below the 4 s that sharing them out would take."""
    problem = random_problem(0, num_ops=6, num_devices=2, alike=False, unsupported=False, caps=False, host=False)
    times = np.tile([1.0, 2.0], (6, 1))
    items = contract(type(problem)(**{**vars(problem), "compute_s": times, "nets": (), "order": (), "groups": ()}), Demands())
    assert items.compute_bound_s == pytest.approx(4.0)
