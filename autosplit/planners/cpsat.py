"""The CP-SAT solver as every planner here uses it."""

from ortools.sat.python import cp_model

NUM_WORKERS = 2


def solver_for(time_limit_s: float, seed: int) -> cp_model.CpSolver:
    """A solver that stops after so many seconds.

    OR-Tools 9.15 must not compare constraints by inclusion while it simplifies: with that, it calls models infeasible that
    have solutions, as often as not where linear constraints hold under several conditions at once (its issue 5274).
    """
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_search_workers = NUM_WORKERS
    solver.parameters.random_seed = seed
    solver.parameters.presolve_inclusion_work_limit = 0
    return solver
