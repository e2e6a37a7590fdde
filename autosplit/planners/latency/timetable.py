"""CP-SAT as a job-shop scheduler: ops are intervals, a device runs one op at a time, and values take time between devices.

It ignores that a transfer keeps both ends busy and that a block waits for all its inputs. So its optimum is a bound for every
plan, and its timetable is turned into blocks that are evaluated like any other.
"""

from math import floor

import numpy as np
from ortools.sat.python import cp_model

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.problem import HOST, Floats, Net, Problem
from autosplit.planners.cpsat.solver import solve
from autosplit.planners.delays import Delays
from autosplit.planners.latency.list_scheduling import Timetable

SCALE = 1e9
"""Steps in the best known latency; every duration is rounded down."""

MAX_TERMS = 400_000


def best_timetable(
    problem: Problem,
    delays: Delays,
    limit_s: float,
    bound_s: float,
    time_limit_s: float,
    seed: int,
    busy: bool = False,
) -> tuple[Timetable | None, float]:
    """A timetable with a makespan below ``limit_s``, the smallest if there is time, and a bound on every makespan in seconds.

    Args:
        problem: its groups share a device; memory caps hold for all but shared weights.
        delays: between ops on two devices.
        limit_s: latency of a known plan.
        bound_s: a known bound.
        time_limit_s: for the solver.
        seed: of the solver.
        busy: transfers keep devices busy. False where they overlap with compute, and with replicas.
    """
    if len(delays.edges) * problem.num_devices**2 > MAX_TERMS or time_limit_s <= 0 or limit_s <= 0:
        return None, bound_s
    model = _Model(problem, delays, limit_s, bound_s, busy)
    solver, status = solve(model.model, time_limit_s, seed)
    if status == cp_model.INFEASIBLE:
        return None, limit_s
    proved_s = max(bound_s, solver.BestObjectiveBound() / model.scale)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, proved_s
    return model.table(solver), proved_s


class _Model:
    """The variables of the CP-SAT model, and its constraints by kind."""

    def __init__(self, problem: Problem, delays: Delays, limit_s: float, bound_s: float, busy: bool) -> None:
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
        for net in problem.nets if busy else ():
            self._move(net)
        for row in self.rows:
            self.model.AddNoOverlap(row)
        self._memory()
        for maker, reader in delays.edges:
            self._delay(maker, reader)
        self.model.AddMaxEquality(self.makespan, [*self.end, *self._outputs()])
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

    def _move(self, net: Net) -> None:
        """A value keeps the device of its maker busy after the maker, and each other device before its readers there."""
        readers = [op for op in net.consumers if op != HOST]
        if net.producer == HOST or not readers or self.problem.num_devices == 1:
            return
        t, maker, horizon = self.problem.transfers, self.on[net.producer], int(SCALE) + 1
        apart = ~np.eye(self.problem.num_devices, dtype=bool)
        sends_s = (t.send_s + net.num_bytes * t.send_s_per_byte)[:HOST, :HOST].min(axis=1, where=apart, initial=np.inf)
        takes_s = (t.receive_s + net.num_bytes * t.receive_s_per_byte)[:HOST, :HOST].min(axis=0, where=apart, initial=np.inf)
        wait = self._steps(float(t.latency_s[:HOST, :HOST].min(where=apart, initial=np.inf)))
        sent = self.model.NewIntVar(0, horizon, "")
        crosses = []
        for device in range(self.problem.num_devices):
            here = [(self.start[op], self.on[op][device]) for op in readers if device in self.on[op]]
            if not here:
                continue
            takes, came = self.model.NewBoolVar(""), self.model.NewIntVar(0, horizon, "")
            for begin, flag in here:
                self.model.Add(takes >= flag - maker.get(device, 0))
                self.model.Add(begin >= came).OnlyEnforceIf(takes, flag)
            size = self._steps(float(takes_s[device]))
            self.rows[device].append(self.model.NewOptionalIntervalVar(came - size, size, came, takes, ""))
            self.model.Add(came - size >= sent + wait).OnlyEnforceIf(takes)
            crosses.append(takes)
        for device, flag in maker.items():
            size, sends = self._steps(float(sends_s[device])), self.model.NewBoolVar("")
            for takes in crosses:
                self.model.AddBoolOr([flag.Not(), takes.Not(), sends])
            self.rows[device].append(self.model.NewOptionalIntervalVar(sent - size, size, sent, sends, ""))
            self.model.Add(sent - size >= self.end[net.producer]).OnlyEnforceIf(sends)

    def _memory(self) -> None:
        step = max(float(self.problem.op_bytes.sum()), 1.0) / 1e6
        for device, cap in enumerate(self.problem.memory_bytes):
            if np.isfinite(cap):
                held = [
                    self.on[op][device] * floor(size / step)
                    for op, size in enumerate(self.problem.op_bytes)
                    if device in self.on[op]
                ]
                self.model.Add(sum(held) <= floor(cap * (1 + TOLERANCE) / step) + 1)

    def _delay(self, maker: int, reader: int) -> None:
        """No reader starts before its value arrives."""
        if reader == HOST:
            return
        table = self.delays.between(maker, reader)
        if maker == HOST:
            self.model.Add(
                self.start[reader] >= sum(flag * self._steps(float(table[0, d])) for d, flag in self.on[reader].items())
            )
            return
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

    def _outputs(self) -> list[cp_model.LinearExprT]:
        ends = []
        for maker, reader in self.delays.edges:
            if reader == HOST:
                table = self.delays.between(maker, HOST)
                sends = sum(flag * self._steps(float(table[d, 0])) for d, flag in self.on[maker].items())
                ends.append(self.end[maker] + sends)
        return ends

    def table(self, solver: cp_model.CpSolver) -> Timetable:
        """The solver's timetable."""
        device = [next(device for device, flag in flags.items() if solver.Value(flag)) for flags in self.on]
        start_s: Floats = np.array([solver.Value(start) / self.scale for start in self.start])
        return Timetable(np.array(device, dtype=np.int64), start_s)
