"""The one way to run CP-SAT: its known faults are avoided, and Ctrl-C ends it at once."""

from concurrent.futures import ThreadPoolExecutor, wait
from math import inf
from typing import Any

from ortools.sat.python import cp_model

NUM_WORKERS = 2

LEAST_S = 0.01


def run(
    model: cp_model.CpModel, time_limit_s: float, *, seed: int = 0, num_workers: int = NUM_WORKERS, most_work: float = inf
) -> tuple[cp_model.CpSolver, Any]:
    """Solve a model: the solver with its solution, and its status. Ctrl-C ends it at once.

    OR-Tools 9.15 must not compare constraints by inclusion in its presolve: it then calls models infeasible that have solutions,
    often where linear constraints hold under several conditions (its issue 5274). It must not catch SIGINT either: it takes the
    first one as the end of its time, and the next one kills the process before Python can clean up. Python handles a signal only
    between its own instructions, so the solver runs in a thread.

    Args:
        model: the model to solve.
        time_limit_s: seconds after which the best solution so far is returned.
        seed: of everything random.
        num_workers: threads of the solver.
        most_work: limit of the solver's own count of work, in its units.
    """
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(time_limit_s, LEAST_S)
    solver.parameters.max_deterministic_time = most_work
    solver.parameters.num_workers = num_workers
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
