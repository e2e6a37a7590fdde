"""The CP-SAT solver with the settings of all planners."""

from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from ortools.sat.python import cp_model

from autosplit.planners import clock

NUM_WORKERS = 2

UNIT_S, LEAST_WORK_S = 5.0, 0.05
"""Seconds of a unit of the solver's own count of work, and least seconds of one call where work is counted."""


def solve(model: cp_model.CpModel, deadline: float, seed: int) -> tuple[cp_model.CpSolver, Any]:
    """Solve a model: the solver with its solution, and its status. Ctrl-C ends it at once.

    Where work is counted, the solver stops by its own count of work, and has one worker: then equal runs are equal. Two workers
    that take turns are equal too, but needed 46 s where one and two needed 1.5 s (4 ops, 3 stages, replicas, 2 devices).

    OR-Tools 9.15 must not compare constraints by inclusion in its presolve: it then calls models infeasible that have solutions,
    often where linear constraints hold under several conditions (its issue 5274). It must not catch SIGINT either: it takes the
    first one as the end of its time, and the next one kills the process before Python can clean up. Python handles a signal only
    between its own instructions, so the solver runs in a thread.
    """
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(clock.machine_seconds_left(deadline), 0.01)
    solver.parameters.num_search_workers = NUM_WORKERS
    if clock.counts_work():
        solver.parameters.max_deterministic_time = max(deadline - clock.now(), LEAST_WORK_S) / UNIT_S
        solver.parameters.num_search_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.presolve_inclusion_work_limit = 0
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as thread:
        status = thread.submit(solver.solve, model)
        try:
            found = status.result()
            clock.spend(UNIT_S * float(solver.response_proto.deterministic_time))
            return solver, found
        except BaseException:
            while not status.done():  # a solver that has not begun yet cannot be stopped
                solver.stop_search()
                wait([status], 0.01)
            raise
