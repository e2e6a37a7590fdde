"""The compute bound: a lower bound for all plans, from compute alone.

For any weights w >= 0 of the classes, the loads of all devices weighted by w add up to at least the sum over all items of the
least w * compute. So ``T * sum(w) >= sum over items of min over classes of (w * compute)``. The right side is concave in w, and
cutting planes find the best weights.
"""

from collections.abc import Sequence

import numpy as np
from ortools.linear_solver import pywraplp

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.problem import Floats, Problem

MOST_PLANES = 100
"""Planes after which the weights are good enough: 2 classes of devices take about 4, and 16 classes about 30."""


def multipliers(work: Floats, counts: Floats) -> Floats:
    """Weights of the classes with ``sum(count * weight) = 1`` that make the compute bound large, shape (K,).

    Args:
        work: seconds of each item on each class, shape (num_items, K).
        counts: devices of each class, shape (K,).
    """
    candidates = _simple_weights(work)
    if len(counts) > 1:
        candidates += _cutting_planes(work, counts, candidates)
    best = max(candidates, key=lambda weights: _value(work, weights, counts))
    return np.asarray(best / (best @ counts))


def work_bound_s(problem: Problem, ops: Sequence[int] | slice = slice(None)) -> float:
    """No device is busy for less, in seconds, if some ops are spread over the devices: the compute bound with simple weights."""
    work_s = problem.compute_s[ops][:, problem.representatives]
    counts = np.array([len(members) for members in problem.device_classes], dtype=np.float64)
    return max(_value(work_s, weights, counts) for weights in _simple_weights(work_s))


def _simple_weights(work: Floats) -> list[Floats]:
    """Weights that need no search: all classes alike, one class only, or each by the time of all items on it."""
    candidates = [np.ones(work.shape[1]), *np.eye(work.shape[1])]
    totals = np.where(np.isfinite(work), work, 0.0).sum(axis=0)
    return [*candidates, 1 / totals] if (totals > 0).all() else candidates


def least_priced(work: Floats, weights: Floats) -> Floats:
    """The least weighted compute of each item, shape (num_items,)."""
    with np.errstate(invalid="ignore"):
        priced = np.where(weights > 0, work * weights, np.where(np.isfinite(work), 0.0, np.inf))
    return np.asarray(priced.min(axis=1))


def _value(work: Floats, weights: Floats, counts: Floats) -> float:
    return float(least_priced(work, weights).sum() / (weights @ counts))


def _cutting_planes(work: Floats, counts: Floats, starts: Sequence[Floats]) -> list[Floats]:
    """Weights with ever larger bounds, by cutting planes (Kelley, 1960).

    Each choice of a class for every item gives a plane that no bound is above. A small linear program finds the weights at which
    the planes known so far allow the most; the best choice there gives the next plane.
    """
    solver = pywraplp.Solver.CreateSolver("GLOP")
    top, shares = solver.NumVar(0, solver.infinity(), ""), [solver.NumVar(0, 1, "") for _ in counts]
    whole = solver.Constraint(1.0, 1.0)
    for share in shares:
        whole.SetCoefficient(share, 1.0)
    solver.Maximize(top)
    work = work[np.isfinite(work).any(axis=1)]
    scale = float(np.where(np.isfinite(work), work, 0.0).sum()) or 1.0
    found, waiting, best = [], [start / (start @ counts) for start in starts], 0.0
    for _ in range(MOST_PLANES):
        if not waiting:
            if solver.Solve() != pywraplp.Solver.OPTIMAL or top.solution_value() <= best * (1 + TOLERANCE):
                break
            waiting.append(np.array([share.solution_value() for share in shares]) / counts)
        weights = waiting.pop()
        with np.errstate(invalid="ignore"):
            choice = np.where(np.isfinite(work), work * weights, np.inf).argmin(axis=1)
        loads = np.bincount(choice, work[np.arange(len(work)), choice], len(counts)) / counts / scale
        plane = solver.Constraint(-solver.infinity(), 0.0)
        plane.SetCoefficient(top, 1.0)
        for share, load in zip(shares, loads, strict=True):
            plane.SetCoefficient(share, -float(load))
        found.append(weights)
        best = max(best, float(loads @ (weights * counts)))
    return found
