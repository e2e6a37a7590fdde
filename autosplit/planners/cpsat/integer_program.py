"""The integer program of a problem: the items and the number of blocks that suit its demands, solved by CP-SAT."""

from math import inf

from autosplit.costs.judge import judge
from autosplit.costs.problem import Problem
from autosplit.planners.clock import now
from autosplit.planners.cpsat.stage_model import search_stages
from autosplit.planners.incumbent import Incumbent, plans_on_one_device
from autosplit.planners.instance import MANY_ITEMS, contract
from autosplit.values.constraints import Demands

FEW_ITEMS = 12
"""Most items of which each may be a block of its own, if devices hold several blocks. The proof then holds for all plans."""
MORE_BLOCKS = 3
"""Blocks for each device where devices are shared and no number of blocks is demanded."""
LONGEST_REFUTATION_S = 2.0
"""Most seconds for the question whether constraints conflict; each of them is asked about in turn."""


def find_any_plan(incumbent: Incumbent, deadline: float) -> None:
    """Any blocks that meet the demands; the objective does not count."""
    solve_integer_program(incumbent, deadline, any_plan=True)


def solve_integer_program(incumbent: Incumbent, deadline: float, any_plan: bool = False) -> None:
    """The best blocks under every rule at once, or any blocks that meet the demands."""
    problem, demands = incumbent.problem, incumbent.demands
    if problem.num_ops > MANY_ITEMS or incumbent.closed or (incumbent.blocks and now() >= deadline):
        return
    instance = contract(problem, demands, limit_s=incumbent.objective_s)
    most = int(min(instance.num_items, problem.num_devices if not demands.reuse else inf, demands.max_stages or inf))
    enough = most if instance.num_items <= FEW_ITEMS else MORE_BLOCKS * problem.num_devices
    num_slots = demands.num_stages or min(most, max(enough, len(incumbent.blocks)))
    if not (demands.contiguous or demands.reuse or demands.num_stages or demands.max_stages):
        num_slots = most = problem.num_devices
    if num_slots > instance.num_items and demands.num_stages:
        incumbent.refuted = demands
        return
    holds_for_all = num_slots >= most or demands.num_stages is not None
    search_stages(incumbent, instance, num_slots, deadline, any_plan=any_plan, holds_for_all=holds_for_all)


def is_refuted(problem: Problem, demands: Demands, deadline: float, seed: int = 0) -> bool:
    """Whether it is proved before the deadline that no plan meets the demands; False proves nothing."""
    deadline = min(deadline, now() + LONGEST_REFUTATION_S)
    if now() >= deadline or any(not judge(problem, demands, row).faults for row in plans_on_one_device(problem)):
        return False
    trial = Incumbent(problem, demands, seed)
    find_any_plan(trial, deadline)
    return trial.refuted is not None
