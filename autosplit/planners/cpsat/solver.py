"""CP-SAT by the clock of the planners."""

from typing import Any

from ortools.sat.python import cp_model

from autosplit import cpsat
from autosplit.planners import clock

SCALE = 1e9
"""Steps in the limit of a model: its numbers are whole, and every coefficient is rounded down."""
MOST_STEPS = 1e13
"""Steps above which sums of 10^5 terms could overflow 64 bits."""
TERMS_PER_SECOND = 20_000
"""Most terms of a model for each second left; larger ones take too long to build."""
UNIT_S, LEAST_WORK_S = 5.0, 0.05
"""Seconds of a unit of the solver's own count of work, and least seconds of one call where work is counted."""


def solve(model: cp_model.CpModel, deadline: float, seed: int) -> tuple[cp_model.CpSolver, Any]:
    """Solve a model until a deadline: the solver with its solution, and its status.

    Where work is counted, the solver stops by its own count of work, and has one worker: then equal runs are equal. Two workers
    that take turns are equal too, but needed 46 s where one and two needed 1.5 s (4 ops, 3 stages, replicas, 2 devices).
    """
    limit_s = clock.machine_seconds_left(deadline)
    if clock.counts_work():
        most = max(deadline - clock.now(), LEAST_WORK_S) / UNIT_S
        solver, status = cpsat.run(model, limit_s, seed=seed, num_workers=1, most_work=most)
    else:
        solver, status = cpsat.run(model, limit_s, seed=seed)
    clock.spend(UNIT_S * float(solver.response_proto.deterministic_time))
    return solver, status
