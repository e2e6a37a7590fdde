"""CP-SAT is asked with items and a number of blocks that suit the demands; and whether constraints can be proved hopeless."""

from collections.abc import Sequence
from math import inf
from time import monotonic

from autosplit.costs.problem import Block, Problem
from autosplit.planners.cpsat import stage_model
from autosplit.planners.items import contract
from autosplit.planners.objective import demand_faults
from autosplit.values.constraints import Demands

MAX_OPS = 5000
MORE_BLOCKS = 3
"""Blocks for each device where devices are shared and nobody says how many there should be."""
MOST_OF_A_PROOF_S = 2.0
"""For one proof that some constraints cannot hold together, while fewer of them are sought."""


def ask(
    problem: Problem,
    demands: Demands,
    limit_s: float,
    bound_s: float,
    hint: Sequence[Block],
    time_limit_s: float,
    seed: int,
    any_plan: bool = False,
) -> stage_model.Answer | None:
    """CP-SAT's answer, or None where the model is too large; what it says of fewer blocks than there could be proves nothing.

    The arguments are those of ``ilp.solve_ilp``.
    """
    if problem.num_ops > MAX_OPS:
        return None
    exact = contract(problem, demands).exact
    items = contract(problem, demands, limit_s=limit_s, merge=exact)
    most = int(min(items.num_items, problem.num_devices if not demands.reuse else inf, demands.max_stages or inf))
    num_slots = demands.num_stages or min(most, max(MORE_BLOCKS * problem.num_devices, len(hint)))
    if not (demands.contiguous or demands.reuse or demands.num_stages or demands.max_stages):
        num_slots = most = problem.num_devices
    if demands.num_stages and num_slots > items.num_items:
        return stage_model.Answer(None, inf, True)
    answer = stage_model.solve_ilp(
        problem, items, demands, num_slots=num_slots, limit_s=limit_s, bound_s=bound_s, hint=hint, time_limit_s=time_limit_s,
        seed=seed, any_plan=any_plan,
    )  # fmt: skip
    if answer is not None and num_slots < most and demands.num_stages is None:
        return stage_model.Answer(answer.blocks, bound_s, False)
    return answer


def rows_on_one_device(problem: Problem) -> list[tuple[Block, ...]]:
    """Everything on one device, for each class of devices."""
    everything = tuple(range(problem.num_ops))
    return [(Block(everything, (members[0],)),) for members in problem.device_classes]


def is_hopeless(problem: Problem, demands: Demands, deadline: float, seed: int = 0) -> bool:
    """Whether it is proved before the deadline that no plan meets the demands; False proves nothing."""
    left_s = min(deadline - monotonic(), MOST_OF_A_PROOF_S)
    if left_s <= 0 or any(not demand_faults(problem, demands, row) for row in rows_on_one_device(problem)):
        return False
    answer = ask(problem, demands, inf, 0.0, (), left_s, seed, any_plan=True)
    return answer is not None and answer.infeasible
