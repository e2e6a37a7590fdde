"""What every planner owes: its plans verify, never beat brute force, equal it when proved; its bounds never exceed it."""

from dataclasses import replace
from math import inf

import pytest
from problems import random_problem

from autosplit.errors import InfeasibleError
from autosplit.planners import exhaustive
from autosplit.planners.portfolio import solve
from autosplit.planners.request import Request, request_faults
from autosplit.problem import Problem, Solution

EXACT = 2e-6


def request_of(problem: Problem, **options) -> Request:
    """The request that solve() makes of its arguments."""
    num_stages = options.get("num_stages")
    return Request(**options, reuse=num_stages is not None and num_stages > problem.num_devices)


def check(problem: Problem, solution: Solution, request: Request) -> float:
    """Hold a solution to the contract; returns the true optimum in seconds."""
    assert request_faults(problem, request, solution.blocks) == []
    best = exhaustive.best_blocks(problem, request)
    assert best is not None
    assert solution.objective_s >= best[1] * (1 - EXACT)
    assert solution.bound_s <= best[1] * (1 + EXACT)
    if solution.status == "optimal":
        assert solution.objective_s == pytest.approx(best[1], rel=EXACT)
    return best[1]


def solved(seed: int, options: dict, time_limit_s: float = 20.0, **wanted) -> tuple[Problem, Solution | None, Request]:
    """A random problem, its solution (None when infeasible) and the request; infeasible only where brute force says so."""
    problem = random_problem(seed, **wanted)
    options = {key: min(value, problem.num_ops) if key == "num_stages" else value for key, value in options.items()}
    request = request_of(problem, **options)
    try:
        return problem, solve(problem, time_limit_s=time_limit_s, **options), request
    except InfeasibleError:
        assert exhaustive.best_blocks(problem, request) is None
        return problem, None, request


def without_limits(request: Request) -> Request:
    """The same request without a latency limit."""
    return replace(request, max_latency_s=inf)
