"""The restricted master: a linear program that covers all items with known sets, each held by a device; its duals are prices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from autosplit.costs.problem import Floats

Members = NDArray[np.bool_]


@dataclass
class RestrictedMaster:
    """The linear program: the largest share of every item that the devices can hold together, using the known sets."""

    solver: Any
    share: Any
    rows: list[Any]
    limits: list[Any]
    columns: list[list[Members]]
    seen: set[tuple[int, bytes]]

    @staticmethod
    def of(num_items: int, counts: Sequence[int]) -> "RestrictedMaster":
        """A program without sets, for the given number of devices of each class."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        share = solver.NumVar(0, solver.infinity(), "share")
        rows = [solver.Constraint(0, solver.infinity()) for _ in range(num_items)]
        for row in rows:
            row.SetCoefficient(share, -1)
        limits = [solver.Constraint(-solver.infinity(), count) for count in counts]
        solver.Objective().SetCoefficient(share, 1)
        solver.Objective().SetMaximization()
        return RestrictedMaster(solver, share, rows, limits, [[] for _ in counts], set())

    def add(self, kind: int, members: Members) -> bool:
        """Add a set that a device of a class can hold. Returns: whether it is new."""
        key = kind, members.tobytes()
        if key in self.seen or not members.any():
            return False
        self.seen.add(key)
        self.columns[kind].append(members)
        column = self.solver.NumVar(0, self.solver.infinity(), "")
        self.limits[kind].SetCoefficient(column, 1)
        for item in np.flatnonzero(members):
            self.rows[item].SetCoefficient(column, 1)
        return True

    def solve(self) -> tuple[float, Floats]:
        """The share, and the price of each item; prices add up to 1. If the solver gives up: 0 and equal prices."""
        if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
            return 0.0, np.full(len(self.rows), 1 / len(self.rows))
        prices = np.maximum([-row.dual_value() for row in self.rows], 0.0)
        if not 0.0 < prices.sum() < np.inf:
            prices = np.ones(len(self.rows))
        return float(self.share.solution_value()), prices / prices.sum()
