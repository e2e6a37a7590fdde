"""What every planner owes: its plans verify, never beat brute force, equal it when proved; its bounds never exceed it."""

from dataclasses import replace

import exhaustive
import pytest
from problems import random_problem

from autosplit.costs.judge import Solution, judge
from autosplit.costs.problem import Problem
from autosplit.errors import InfeasibleError
from autosplit.planners.portfolio import solve
from autosplit.values.constraints import Demands

EXACT = 2e-6


def demands_of(problem: Problem, **options) -> Demands:
    """The demands that solve() makes of its arguments."""
    num_stages = options.get("num_stages")
    return Demands(**options, reuse=num_stages is not None and num_stages > problem.num_devices).sharing()


def check(problem: Problem, solution: Solution, demands: Demands) -> float:
    """Hold a solution to the contract; returns the true optimum in seconds."""
    assert judge(problem, demands, solution.blocks).faults == ()
    best = exhaustive.best_blocks(problem, demands)
    assert best is not None
    assert solution.objective_s >= best[1] * (1 - EXACT)
    assert solution.bound_s <= best[1] * (1 + EXACT)
    if solution.status == "optimal":
        assert solution.objective_s == pytest.approx(best[1], rel=EXACT)
    return best[1]


def solved(seed: int, options: dict, time_limit_s: float = 20.0, **wanted) -> tuple[Problem, Solution | None, Demands]:
    """A random problem, its solution (None when infeasible) and the demands; infeasible only where brute force says so.

    Where a chain shares a device though nobody asked for that, there is no plan that does not.
    """
    problem = random_problem(seed, **wanted)
    options = {key: min(value, problem.num_ops) if key == "num_stages" else value for key, value in options.items()}
    demands = demands_of(problem, **options)
    shared = replace(demands, reuse=demands.reuse or demands.contiguous)
    try:
        solution = solve(problem, Demands(**options), time_limit_s=time_limit_s)
    except InfeasibleError as refusal:
        assert "in time" not in str(refusal) or time_limit_s < 1
        small = problem.num_ops * problem.num_devices <= 9
        assert "in time" in str(refusal) or exhaustive.best_blocks(problem, shared if small else demands) is None
        return problem, None, demands
    devices = [device for block in solution.blocks for device in block.devices]
    if len(set(devices)) < len(devices) and not demands.reuse:
        assert time_limit_s < 1 or exhaustive.best_blocks(problem, demands) is None
        return problem, solution, shared
    return problem, solution, demands
