"""The CP-SAT solver as every planner here uses it."""

from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from ortools.sat.python import cp_model

NUM_WORKERS = 2


def solve(model: cp_model.CpModel, time_limit_s: float, seed: int) -> tuple[cp_model.CpSolver, Any]:
    """Ask CP-SAT about a model: the solver with its answer, and its status. Ctrl-C ends it at once.

    OR-Tools 9.15 must not compare constraints by inclusion while it simplifies: with that, it calls models infeasible that
    have solutions, as often as not where linear constraints hold under several conditions at once (its issue 5274).
    Nor must it catch SIGINT: it takes the first for the end of its time, and leaves the process to be killed by any later one,
    with all that Python had still to clear up. Python hears of a signal only between its own instructions, hence the thread.
    """
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_search_workers = NUM_WORKERS
    solver.parameters.random_seed = seed
    solver.parameters.presolve_inclusion_work_limit = 0
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as thread:
        status = thread.submit(solver.solve, model)
        try:
            return solver, status.result()
        except BaseException:
            while not status.done():  # a solver that has not begun yet cannot be stopped
                solver.stop_search()
                wait([status], 0.01)
            raise
