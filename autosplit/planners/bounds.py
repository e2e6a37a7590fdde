"""The compute bound: what no plan can beat, from compute alone.

For any weights w >= 0 of the classes, the loads of all devices weighted by w add up to at least the sum over all items of the
least w * compute. So ``T * sum(w) >= sum over items of min over classes of (w * compute)``. The best weights are the duals of the
linear program that spreads each item over the devices.
"""

import numpy as np
from ortools.linear_solver import pywraplp

from autosplit.costs.problem import Floats
from autosplit.planners.items import Items
from autosplit.values.constraints import Demands

MAX_LP_ENTRIES = 40_000


def multipliers(items: Items) -> Floats:
    """Weights of the classes with ``sum(count * weight) = 1`` that make the compute bound large, shape (K,)."""
    counts = np.array([len(members) for members in items.classes], dtype=np.float64)
    work = _work(items)
    candidates = _simple_weights(work)
    if len(counts) > 1:
        candidates.append(_lp_duals(work, counts) if work.size <= MAX_LP_ENTRIES else _ascent(work, counts))
    best = max(candidates, key=lambda weights: _value(work, weights, counts))
    return np.asarray(best / (best @ counts))


def work_bound_s(work_s: Floats, counts: Floats) -> float:
    """No device is busy for less, in seconds, if ops are spread over the devices: the compute bound with simple weights.

    Args:
        work_s: compute of each op on a device of each class, shape (num_ops, K).
        counts: devices of each class, shape (K,).
    """
    return max(_value(work_s, weights, counts) for weights in _simple_weights(work_s))


def _simple_weights(work: Floats) -> list[Floats]:
    """Weights that need no search: all classes alike, one class only, or each by what all items take on it."""
    candidates = [np.ones(work.shape[1]), *np.eye(work.shape[1])]
    totals = np.where(np.isfinite(work), work, 0.0).sum(axis=0)
    return [*candidates, 1 / totals] if (totals > 0).all() else candidates


def item_work(items: Items, weights: Floats) -> Floats:
    """The least weighted compute of each item, shape (num_items,)."""
    work = _work(items)
    with np.errstate(invalid="ignore"):
        priced = np.where(weights > 0, work * weights, np.where(np.isfinite(work), 0.0, np.inf))
    return np.asarray(priced.min(axis=1))


def compute_bound_s(items: Items, demands: Demands, weights: Floats) -> float:
    """No plan has a smaller largest load, in seconds; infinite where an item fits on no device."""
    counts = np.array([len(members) for members in items.classes])
    widest = min(demands.max_replicas, int(counts.sum()))
    single = float(_work(items).min(axis=1).max()) / widest
    return max(float(item_work(items, weights).sum()), single)


def _work(items: Items) -> Floats:
    return items.compute_s if items.overlap else items.compute_s + items.fixed_s


def _value(work: Floats, weights: Floats, counts: Floats) -> float:
    with np.errstate(invalid="ignore"):
        priced = np.where(weights > 0, work * weights, np.where(np.isfinite(work), 0.0, np.inf))
    return float(priced.min(axis=1).sum() / (weights @ counts))


def _lp_duals(work: Floats, counts: Floats) -> Floats:
    """The duals of the load rows of the linear program that spreads the items."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    top = solver.NumVar(0, solver.infinity(), "")
    rows = [solver.Constraint(-solver.infinity(), 0.0) for _ in counts]
    for row, count in zip(rows, counts, strict=True):
        row.SetCoefficient(top, -float(count))
    scale = float(np.where(np.isfinite(work), work, 0.0).max()) or 1.0
    for costs in work:
        whole = solver.Constraint(1.0, 1.0)
        for row, cost in zip(rows, costs, strict=True):
            if np.isfinite(cost):
                part = solver.NumVar(0, 1, "")
                whole.SetCoefficient(part, 1.0)
                row.SetCoefficient(part, float(cost) / scale)
    solver.Minimize(top)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return np.ones(len(counts))
    duals = np.array([max(0.0, -row.dual_value()) for row in rows])
    return duals if duals.any() else np.ones(len(counts))


def _ascent(work: Floats, counts: Floats, num_rounds: int = 60) -> Floats:
    """Weights by subgradient ascent on their logarithms, for problems that are too large for the linear program."""
    weights = 1 / np.maximum(np.where(np.isfinite(work), work, 0.0).sum(axis=0), 1e-300)
    weights /= weights @ counts
    best, best_value = weights, _value(work, weights, counts)
    for number in range(num_rounds):
        choice = np.argmin(np.where(np.isfinite(work), work * weights, np.inf), axis=1)
        loads = np.bincount(choice, work[np.arange(len(work)), choice], minlength=len(counts)) / counts
        weights = weights * np.exp(0.5 / (1 + number) ** 0.5 * (loads / max(loads.mean(), 1e-300) - 1).clip(-1, 1))
        weights /= weights @ counts
        value = _value(work, weights, counts)
        if value > best_value:
            best, best_value = weights, value
    return np.asarray(best)
