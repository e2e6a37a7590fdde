"""What no plan can beat is beaten by no plan, however the weights of the classes were found."""

from math import inf

import exhaustive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_problem

from autosplit.planners import bounds
from autosplit.planners.items import contract
from autosplit.values.constraints import Demands


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([1, 2]))
def test_no_plan_beats_the_compute_bound(seed, contiguous, max_replicas):
    problem = random_problem(seed, num_ops=1 + seed % 4)
    demands = Demands(contiguous=contiguous, max_replicas=max_replicas)
    items = contract(problem, demands)
    weights = bounds.multipliers(items)
    assert weights @ [len(members) for members in items.classes] == pytest.approx(1.0) and (weights >= 0).all()
    best = exhaustive.best_blocks(problem, demands)
    optimum_s = inf if best is None else best[1]
    assert bounds.compute_bound_s(items, demands, weights) <= optimum_s * (1 + 1e-9)
    assert bounds.item_work(items, weights).sum() <= optimum_s * (1 + 1e-9)
    equal = np.full(len(weights), 1 / problem.num_devices)
    assert bounds.compute_bound_s(items, demands, equal) <= bounds.compute_bound_s(items, demands, weights) * (1 + 1e-9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_weights_by_ascent_are_valid_and_no_better_than_the_duals(seed):
    """Large problems get their weights by ascent: a bound as well, at most that of the linear program."""
    items = contract(random_problem(seed, alike=False, num_devices=3, unsupported=False), Demands())
    counts = np.array([len(members) for members in items.classes], dtype=float)
    work = bounds._work(items)
    by_duals, by_ascent = (bounds._value(work, find(work, counts), counts) for find in (bounds._lp_duals, bounds._ascent))
    assert by_ascent <= by_duals * (1 + 1e-6) + 1e-12


def test_unequal_devices_share_the_work_by_their_speed():
    """Six ops of 1 s on a device and of 2 s on another: no plan is below the 4 s that sharing them out would take."""
    problem = random_problem(0, num_ops=6, num_devices=2, alike=False, unsupported=False, caps=False, host=False)
    times = np.tile([1.0, 2.0], (6, 1))
    items = contract(type(problem)(**{**vars(problem), "compute_s": times, "nets": (), "order": (), "groups": ()}), Demands())
    assert bounds.compute_bound_s(items, Demands(), bounds.multipliers(items)) == pytest.approx(4.0)
