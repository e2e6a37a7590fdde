from dataclasses import replace
from math import inf
from time import monotonic

import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Draw, chain, random_blocks, random_problem

from autosplit.costs.faults import find_faults
from autosplit.costs.pieces import latency_s
from autosplit.costs.problem import HOST, Net, Problem
from autosplit.planners.delays import Delays, critical_path_s
from autosplit.planners.latency.segments import meeting_ops, segment_bound_s
from autosplit.planners.portfolio import solve
from autosplit.values.constraints import Demands


def with_nets(problem: Problem, readers: list[list[int]], num_bytes: float = 1.0) -> Problem:
    nets = tuple(Net(op, tuple(found), num_bytes) for op, found in enumerate(readers) if found)
    return replace(problem, nets=nets, order=tuple((net.producer, op) for net in nets for op in net.consumers)).verify()


# A fork at 0 and a smaller one at 2:  0 -> 1 ---------> 6
#                                      0 -> 2 -> 3 -> 5 -> 6,  2 -> 4 -> 5
FORKS = [[1, 2], [6], [3, 4], [5], [5], [6], []]


def test_branches_meet_where_all_paths_come_together() -> None:
    assert meeting_ops(FORKS) == [6, 6, 5, 5, 5, 6, 7]
    assert meeting_ops([[1, 2], [3], [], []]) == [4, 3, 4, 4]


@pytest.mark.parametrize(("num_bytes", "bound_s"), [(0.0, 20.0), (0.5, 20.0 + 1.0), (9.0, 24.0)])
def test_a_fork_takes_what_two_devices_take_or_one(num_bytes: float, bound_s: float) -> None:
    """1 + (5 beside 4) + ... : each value that crosses keeps the way that ends later waiting, or both branches run in turn."""
    problem = with_nets(chain([6.0, 4.0, 5.0, 9.0]), [[1, 2], [3], [3], []], num_bytes)
    assert critical_path_s(problem, Delays(problem)) == 20.0
    assert segment_bound_s(problem, 1, monotonic() + 20) == pytest.approx(bound_s)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.booleans())
def test_no_plan_is_sooner(seed: int, contiguous: bool, forks: bool, caps: bool) -> None:
    problem = random_problem(seed, num_ops=7, loose_order=False, caps=caps, pooled=False)
    if forks:
        problem = with_nets(problem, FORKS, num_bytes=float(Draw(seed, {}).random.randint(0, 3)))
    bound_s = segment_bound_s(problem, problem.num_devices, monotonic() + 5)
    alone_s = segment_bound_s(problem, 1, monotonic() + 5)
    assert bound_s >= critical_path_s(problem, Delays(problem, problem.num_devices)) * (1 - 1e-9)
    for number in range(20):
        blocks = random_blocks(problem, seed + number, contiguous)
        if not find_faults(problem, blocks, contiguous=contiguous):
            value_s = latency_s(problem, blocks)
            assert bound_s <= value_s * (1 + 1e-9)
            if all(len(block.devices) == 1 for block in blocks):
                assert alone_s <= value_s * (1 + 1e-9)


def test_what_has_no_end_or_no_time_counts_as_its_longest_path() -> None:
    problem = with_nets(chain([1.0] * 7), FORKS, 0.0)
    assert segment_bound_s(problem, 1, monotonic() - 1) == 5.0
    ends = replace(problem, nets=(*problem.nets, Net(1, (HOST,), 1.0)), memory_bytes=np.full(2, inf))
    assert segment_bound_s(ends, 1, monotonic() + 5) == 5.0


def test_three_branches_on_two_devices_take_half_their_work_also_where_an_end_without_work_hangs_on_them() -> None:
    readers = [[1, 2, 3], [4], [4, 5], [4], [], []]
    problem = with_nets(chain([1.0, 4.0, 4.0, 4.0, 1.0, 0.0]), readers, 0.0)
    assert critical_path_s(problem, Delays(problem)) == 6.0
    assert segment_bound_s(problem, 1, monotonic() - 1) == pytest.approx(1 + 12 / 2 + 1)


def test_branches_that_no_device_holds_together_pay_for_all_that_crosses() -> None:
    """Two devices each hold four of seven ops. Any path has five, so it pays for one value; two have to cross."""
    problem = with_nets(chain([1.0] * 7), [[1], [2, 3, 4], [5], [5], [5], [6], []], 3.0)
    for table in problem.transfers.arrays():
        np.fill_diagonal(table, 0.0)
    tight = replace(problem, memory_bytes=np.full(2, 4.0))
    demands = Demands(objective="latency")
    solution = solve(tight, demands, time_limit_s=2.0)
    assert critical_path_s(tight, Delays(tight)) < solution.objective_s
    assert segment_bound_s(tight, 1, monotonic() + 5) == pytest.approx(solution.objective_s)
    assert solution.status == "optimal"


def test_a_chain_within_caps_is_where_annealing_starts() -> None:
    """Twenty ops on four devices that hold six each; three values are cheap to hand over, and the plan cuts there."""
    problem = chain([1.0] * 20, num_devices=4, memory_bytes=np.full(4, 6.0))
    nets = tuple(replace(net, num_bytes=1.0 if net.producer in (4, 8, 13) else 50.0) for net in problem.nets)
    solution = solve(replace(problem, nets=nets), Demands(objective="latency"), time_limit_s=1.0)
    assert solution.status == "optimal" and solution.objective_s == pytest.approx(20.0 + 3 * 2.0)
