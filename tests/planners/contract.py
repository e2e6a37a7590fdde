"""What every planner owes: its plans verify, never beat brute force, equal it when proved; its bounds never exceed it."""

from dataclasses import replace

import exhaustive
import pytest
from problems import random_problem

from autosplit.costs.problem import Problem, Solution
from autosplit.errors import InfeasibleError
from autosplit.planners.latency import with_reuse
from autosplit.planners.portfolio import solve
from autosplit.planners.request import Request, request_faults

EXACT = 2e-6


def request_of(problem: Problem, **options) -> Request:
    """The request that solve() makes of its arguments."""
    num_stages = options.get("num_stages")
    return with_reuse(Request(**options, reuse=num_stages is not None and num_stages > problem.num_devices))


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
    """A random problem, its solution (None when infeasible) and the request; infeasible only where brute force says so.

    Where a chain shares a device though nobody asked for that, there is no plan that does not.
    """
    problem = random_problem(seed, **wanted)
    options = {key: min(value, problem.num_ops) if key == "num_stages" else value for key, value in options.items()}
    request = request_of(problem, **options)
    shared = replace(request, reuse=request.reuse or request.contiguous)
    try:
        solution = solve(problem, time_limit_s=time_limit_s, **options)
    except InfeasibleError as refusal:
        assert "in time" not in str(refusal) or time_limit_s < 1
        small = problem.num_ops * problem.num_devices <= 9
        assert "in time" in str(refusal) or exhaustive.best_blocks(problem, shared if small else request) is None
        return problem, None, request
    devices = [device for block in solution.blocks for device in block.devices]
    if len(set(devices)) < len(devices) and not request.reuse:
        assert time_limit_s < 1 or exhaustive.best_blocks(problem, request) is None
        return problem, solution, shared
    return problem, solution, request
