"""CP-SAT on every rule at once: with time enough its plans are the best there are, and its bounds are bounds."""

from dataclasses import replace
from time import monotonic

import exhaustive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, random_problem

from autosplit.costs.judge import judge
from autosplit.costs.problem import Block, Pool, Problem
from autosplit.planners.cpsat.stage_model import search_stages
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.instance import contract
from autosplit.planners.portfolio import solve
from autosplit.values.constraints import Demands


def answer_of(problem: Problem, demands: Demands, known: tuple[Block, ...] = (), time_limit_s: float = 20.0) -> Incumbent:
    slots = demands.num_stages or (min(problem.num_ops, demands.max_stages or problem.num_ops, problem.num_devices))
    answer = Incumbent(problem, demands)
    answer.offer(known, "known")
    search_stages(answer, contract(problem, demands), slots, monotonic() + time_limit_s)
    return answer


REQUESTS = {
    "a chain": Demands(),
    "any sets": Demands(contiguous=False),
    "two stages": Demands(num_stages=2),
    "three stages on two devices": Demands(num_stages=3, reuse=True),
    "at most two": Demands(max_stages=2),
}


@pytest.mark.parametrize("name", REQUESTS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_plans_equal_brute_force(name, seed):
    demands = REQUESTS[name]
    problem = random_problem(seed, num_ops=max(demands.num_stages or 1, 2 + seed % 3), num_devices=2)
    best, answer = exhaustive.best_blocks(problem, demands), answer_of(problem, demands)
    if best is None:
        assert answer.refuted and not answer.blocks
        return
    assert not answer.refuted and answer.bound_s <= best[1] * (1 + 2e-6) + 1e-9
    assert judge(problem, demands, answer.blocks).faults == ()
    assert judge(problem, demands, answer.blocks).objective_s == pytest.approx(best[1], rel=2e-6, abs=1e-9)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_bounds_hold_with_replicas_too(seed):
    demands = Demands(max_replicas=2)
    problem = random_problem(seed, num_ops=2 + seed % 3, num_devices=2)
    best, answer = exhaustive.best_blocks(problem, demands), answer_of(problem, demands)
    assert (answer.refuted is not None) == (best is None)
    if best is not None:
        assert answer.bound_s <= best[1] * (1 + 2e-6) + 1e-9


def test_a_known_plan_that_nothing_beats_is_proved():
    problem = chain([2.0, 2.0], num_bytes=0.0)
    answer = answer_of(problem, Demands(), known=(Block((0,), (0,)), Block((1,), (1,))))
    assert answer.closed and answer.objective_s == answer.bound_s == pytest.approx(2.0)


@pytest.mark.parametrize("unit", [1 / 3, 1e19, 1e-9], ids=["thirds", "sums beyond 64 bits", "small parts of a byte"])
def test_bytes_that_fill_a_cap_fit(unit):
    # sizes were rounded up: the one plan there is was called impossible, and large sizes ended in a traceback
    sizes = np.array([2.0, 2.0, 1.0, 1.0]) * unit
    problem = chain([1.0] * 4, num_bytes=0.0, op_bytes=sizes, memory_bytes=np.full(2, 3.0 * unit))
    solution = solve(problem, Demands(contiguous=False), time_limit_s=60)
    assert (solution.objective_s, solution.status) == (2.0, "optimal")
    pooled = replace(problem, memory_bytes=np.full(2, 4.0 * unit), pools=(Pool((0, 1), 6.0 * unit),))
    assert answer_of(pooled, Demands(contiguous=False)).bound_s == pytest.approx(2.0)


def test_what_cannot_be_built_in_time_is_not_begun():
    answer = answer_of(chain([1.0] * 400, num_devices=8), Demands(), time_limit_s=0.01)
    assert not (answer.blocks or answer.refuted or answer.bound_s)


def test_no_plan_is_better_than_what_the_solver_says_is_proved():
    """OR-Tools 9.15 called this model infeasible, and a plan of 32 s was said to be optimal (see ``cpsat.solver``)."""
    problem = random_problem(3, num_ops=8, num_devices=3, pair_links=True)
    demands = Demands("latency", reuse=True)
    plan = [((0,), 1), ((3,), 0), ((5,), 1), ((4,), 2), ((1,), 0), ((2,), 0), ((6, 7), 2)]
    blocks = [Block(ops, (device,)) for ops, device in plan]
    assert not judge(problem, demands, blocks).faults
    assert judge(problem, demands, blocks).objective_s == 19.0
    answer = Incumbent(problem, demands, objective_s=32.0)
    search_stages(answer, contract(problem, demands, limit_s=32.0), 8, monotonic() + 2)
    assert not answer.refuted and answer.bound_s <= 19.0
