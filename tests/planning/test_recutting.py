"""The next best cuts of small plans, beside every move there is."""

from dataclasses import replace
from time import monotonic

import numpy as np
import pytest
from fuzzing import examples
from problems import chain, random_problem

from autosplit.costs.cost import evaluate
from autosplit.costs.faults import find_faults
from autosplit.costs.pieces import latency_s
from autosplit.costs.problem import Block, Net, Problem
from autosplit.planners.portfolio import solve
from autosplit.planning.recutting import next_cuts
from autosplit.values.constraints import Demands


def cuts_of(problem: Problem, blocks: tuple[Block, ...], contiguous: bool, objective="throughput", limit_s: float = 60.0):
    return next_cuts(problem, blocks, Demands(objective, contiguous), deadline=monotonic() + limit_s)


def moved(blocks: tuple[Block, ...], ops: tuple[int, ...], target: int) -> list[Block]:
    left = [replace(block, ops=tuple(op for op in block.ops if op not in ops)) for block in blocks]
    left[target] = replace(left[target], ops=tuple(sorted((*left[target].ops, *ops))))
    return left


def test_a_plan_that_is_no_chain_has_a_next_best_cut_between_devices_that_meet():
    problem = replace(
        chain([3.0, 1.0, 1.0, 3.0], num_bytes=0.0), nets=(Net(0, (1, 2), 0.5), Net(1, (3,), 0.5), Net(2, (3,), 0.5))
    )
    blocks = (Block((0, 3), (0,)), Block((1, 2), (1,)))
    (cut,) = cuts_of(problem, blocks, contiguous=False)
    every = [evaluate(problem, moved(blocks, (op,), 0 if op in (1, 2) else 1)).bottleneck_s for op in range(4)]
    assert cut.objective_s == pytest.approx(min(every)) and cut.slower == pytest.approx(
        min(every) / evaluate(problem, blocks).bottleneck_s - 1
    )
    assert cut.tried >= 4 and cut.border == "dev0 and dev1" and cut.ops == 1


def test_devices_that_hand_each_other_nothing_have_no_cut():
    problem = replace(chain([1.0, 1.0]), nets=(), order=())
    assert cuts_of(problem, (Block((0,), (0,)), Block((1,), (1,))), contiguous=False) == []


def test_a_group_moves_as_a_whole():
    problem = replace(chain([2.0, 1.0, 1.0, 2.0], num_bytes=0.1), groups=((0, 1),))
    (cut,) = cuts_of(problem, (Block((0, 1), (0,)), Block((2, 3), (1,))), contiguous=False)
    assert cut.ops == 1 and "'op2' on 'dev0'" in cut.moved


@pytest.mark.parametrize("seed", range(examples(12)))
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_cut_costs_what_some_legal_plan_costs_and_never_less_than_the_optimum(seed, contiguous):
    problem = random_problem(seed, num_ops=6, num_devices=3, unsupported=False, caps=False, pooled=False)
    solution = solve(problem, Demands(contiguous=contiguous), time_limit_s=5)
    for cut in cuts_of(problem, solution.blocks, contiguous):
        assert cut.objective_s is None or cut.objective_s >= solution.bound_s * (1 - 1e-9)
        names = [
            problem.index[text.strip("' ")]
            for text in cut.moved.partition(" on ")[0].split(",")
            if text.strip("' ") in problem.ops
        ]
        if cut.objective_s is not None and len(names) == cut.ops:
            target = next(n for n, b in enumerate(solution.blocks) if cut.moved.endswith(f"on '{problem.devices[b.devices[0]]}'"))
            row = moved(solution.blocks, tuple(names), target)
            assert not find_faults(problem, row, contiguous=contiguous)
            assert evaluate(problem, row).bottleneck_s == pytest.approx(cut.objective_s)


def test_blocks_that_share_a_device_have_no_cut_between_them_and_one_for_each_two_devices():
    problem = chain([1.0, 2.0, 1.0, 2.0, 3.0], num_bytes=0.1)
    blocks = (Block((0,), (0,)), Block((1,), (1,)), Block((2, 3), (0,)), Block((4,), (0,)))
    (cut,) = cuts_of(problem, blocks, contiguous=True, objective="latency")
    assert cut.border == "dev0 and dev1" and cut.objective_s == pytest.approx(latency_s(problem, moved(blocks, (2,), 1)))


def test_a_cut_that_no_device_allows_is_said_to_be_none_and_no_time_gives_none():
    problem = chain([1.0, 1.0, 1.0, 1.0])
    pinned = problem.compute_s.copy()
    pinned[:2, 1] = pinned[2:, 0] = np.inf
    blocks = (Block((0, 1), (0,)), Block((2, 3), (1,)))
    (cut,) = cuts_of(replace(problem, compute_s=pinned), blocks, contiguous=True)
    assert cut.objective_s is None and cut.tried > 0
    assert cuts_of(problem, blocks, contiguous=True, limit_s=0.0) == []
