"""CP-SAT as a job-shop scheduler: ops are intervals, a device runs one op at a time, and values take time between devices.

It ignores that a block waits for all its inputs, that transfers keep devices busy, and that they take longer between some devices
than between others. So its optimum is a bound for every plan.
"""

from math import floor

import numpy as np
from ortools.sat.python import cp_model

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.problem import Problem
from autosplit.planners.clock import now
from autosplit.planners.cpsat.solver import SCALE, TERMS_PER_SECOND, solve
from autosplit.planners.delays import Delays


def shortest_schedule_s(
    problem: Problem, delays: Delays, limit_s: float, bound_s: float, time_limit_s: float, seed: int
) -> float:
    """A bound on the seconds of every schedule, at most ``limit_s``.

    Args:
        problem: its groups share a device; it has no values of the host, and its memory caps do not count.
        delays: between ops on two devices.
        limit_s: schedules that are not shorter do not count.
        bound_s: a known bound.
        time_limit_s: for the solver.
        seed: of the solver.
    """
    if len(delays.edges) * problem.num_devices**2 > TERMS_PER_SECOND * time_limit_s or limit_s <= 0:
        return bound_s
    model = _Model(problem, delays, limit_s, bound_s)
    solver, status = solve(model.model, now() + time_limit_s, seed)
    return limit_s if status == cp_model.INFEASIBLE else max(bound_s, solver.BestObjectiveBound() / model.scale)


class _Model:
    """The variables of the CP-SAT model, and its constraints by kind."""

    def __init__(self, problem: Problem, delays: Delays, limit_s: float, bound_s: float) -> None:
        self.problem, self.delays = problem, delays
        self.model = cp_model.CpModel()
        self.scale = SCALE / limit_s
        horizon = int(SCALE) + 1
        self.makespan = self.model.NewIntVar(min(floor(bound_s * self.scale * (1 - TOLERANCE)), horizon), horizon, "makespan")
        self.start = [self.model.NewIntVar(0, horizon, "") for _ in range(problem.num_ops)]
        self.end = [self.model.NewIntVar(0, horizon, "") for _ in range(problem.num_ops)]
        self.on: list[dict[int, cp_model.IntVar]] = []
        self.rows: list[list[cp_model.IntervalVar]] = [[] for _ in problem.devices]
        self._place()
        for row in self.rows:
            self.model.AddNoOverlap(row)
        for maker, reader in delays.edges:
            self._delay(maker, reader)
        self.model.AddMaxEquality(self.makespan, self.end)
        self.model.Minimize(self.makespan)

    def _steps(self, seconds: float) -> int:
        """Seconds in steps, rounded down, and cut off above the horizon, since the solver's numbers are finite."""
        return floor(min(seconds * self.scale * (1 - 1e-12), SCALE + 2))

    def _place(self) -> None:
        for op, costs in enumerate(self.problem.compute_s):
            self.on.append({int(device): self.model.NewBoolVar("") for device in np.flatnonzero(np.isfinite(costs))})
            self.model.AddExactlyOne(self.on[op].values())
            for device, flag in self.on[op].items():
                size = self._steps(float(costs[device]))
                self.rows[device].append(self.model.NewOptionalIntervalVar(self.start[op], size, self.end[op], flag, ""))
        for group in self.problem.groups:
            for op in group[1:]:
                for device in range(self.problem.num_devices):
                    one, other = self.on[group[0]].get(device), self.on[op].get(device)
                    if one is not None and other is not None:
                        self.model.Add(one == other)
                    elif one is not None or other is not None:
                        self.model.Add((one if one is not None else other) == 0)

    def _delay(self, maker: int, reader: int) -> None:
        """No reader starts before its value arrives."""
        table = self.delays.between(maker, reader)
        self.model.Add(self.start[reader] >= self.end[maker])
        apart = table[~np.eye(len(table), dtype=bool)]
        if not apart.any():
            return
        if (apart == apart[0]).all():
            other = self.model.NewBoolVar("")
            for device, flag in self.on[maker].items():
                there = self.on[reader].get(device)
                self.model.AddBoolOr([flag.Not(), other] if there is None else [flag.Not(), there, other])
            self.model.Add(self.start[reader] >= self.end[maker] + self._steps(float(apart[0]))).OnlyEnforceIf(other)
            return
        for device, flag in self.on[maker].items():
            for place, there in self.on[reader].items():
                wait = self._steps(float(table[device, place]))
                if wait:
                    self.model.Add(self.start[reader] >= self.end[maker] + wait).OnlyEnforceIf(flag, there)
