import math
from dataclasses import replace
from time import monotonic

import exhaustive
import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, random_blocks, random_problem

from autosplit.costs.faults import find_faults
from autosplit.costs.judge import judge
from autosplit.costs.pieces import latency_s
from autosplit.costs.problem import HOST, Block, Net, Pool, Problem, Transfers
from autosplit.errors import InfeasibleError
from autosplit.planners import delays
from autosplit.planners.clusters import forced_clusters
from autosplit.planners.delays import Delays, critical_path_s
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.latency.order_annealing import anneal_order, is_plain
from autosplit.planners.latency.scheduling import list_schedule
from autosplit.planners.portfolio import solve
from autosplit.planners.row_annealing import anneal_rows
from autosplit.values.constraints import Demands

EXACT = 1e-6


def fork(branch_s: float, delay_s: float, num_devices: int = 2) -> Problem:
    """One op, two branches beside each other, one op that reads both."""
    transfers = Transfers.free(num_devices)
    transfers.latency_s[:] = delay_s
    transfers.latency_s[np.diag_indices(num_devices + 1)] = 0
    nets = (Net(0, (1, 2), 1.0), Net(1, (3,), 1.0), Net(2, (3,), 1.0))
    return Problem(
        name="fork",
        ops=("first", "left", "right", "last"),
        devices=tuple(f"dev{number}" for number in range(num_devices)),
        compute_s=np.repeat(np.array([1.0, branch_s, branch_s, 1.0])[:, None], num_devices, axis=1),
        nets=nets,
        order=((0, 1), (0, 2), (1, 3), (2, 3)),
        transfers=transfers,
        op_bytes=np.ones(4),
        memory_bytes=np.full(num_devices, math.inf),
    ).verify()


@pytest.mark.parametrize("contiguous", [True, False])
def test_branches_run_side_by_side_where_that_pays(contiguous):
    solution = solve(fork(5.0, 1.0), Demands(objective="latency", contiguous=contiguous), time_limit_s=3)
    assert solution.objective_s == pytest.approx(1 + 1 + 5 + 1)
    assert solution.status == "optimal"
    slow = solve(fork(5.0, 3.0), Demands(objective="latency", contiguous=contiguous), time_limit_s=3)
    assert slow.objective_s == pytest.approx(1 + 3 + 5 + 1) and slow.status == "optimal"
    slow = solve(fork(5.0, 5.0), Demands(objective="latency", contiguous=contiguous), time_limit_s=1)
    assert slow.objective_s == pytest.approx(12) and len(slow.blocks) == 1


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_device_of_little_use_ends_no_search(contiguous):
    """CP-SAT's numbers have 64 bits, and a step is a billionth of the best latency."""
    problem = fork(5.0, 1.0, num_devices=3)
    problem = replace(problem, compute_s=problem.compute_s * np.array([1.0, 1.0, 1e20]))
    solution = solve(problem, Demands(objective="latency", contiguous=contiguous), time_limit_s=30)
    assert (solution.objective_s, solution.status) == (pytest.approx(1 + 1 + 5 + 1), "optimal")


@pytest.mark.parametrize(
    ("pools", "min_stage_s"), [((Pool((1,), 0.3),), 0.0), ((), 2.0 + 1e-9)], ids=["a pool filled", "the shortest stage"]
)
def test_annealing_finds_what_meets_a_limit_but_for_rounding(pools, min_stage_s):
    """0.1 and 0.2 bytes are more than 0.3 in float64, and no more for the check of a plan."""
    problem = chain([1.0, 1.0], op_bytes=np.array([0.1, 0.2]), pools=pools)
    problem = replace(problem, compute_s=problem.compute_s * np.array([2.0, 1.0]))
    demands, best = Demands("latency", min_stage_s=min_stage_s), (Block((0, 1), (1,)),)
    assert not judge(problem, demands, best).faults
    incumbent = Incumbent(problem, demands)
    incumbent.offer((Block((0, 1), (0,)),), "start")
    anneal_rows(incumbent, monotonic() + 9)
    assert (incumbent.blocks, incumbent.methods[-1]) == (best, "annealing")


def test_a_chain_stays_on_the_fastest_device():
    problem = chain([3.0, 2.0, 4.0])
    problem = replace(problem, compute_s=problem.compute_s * np.array([2.0, 1.0]))
    solution = solve(problem, Demands(objective="latency"))
    assert (solution.objective_s, solution.status) == (pytest.approx(9), "optimal")
    assert [block.devices for block in solution.blocks] == [(1,)]


def test_a_memory_cap_forces_a_second_device():
    problem = replace(chain([3.0, 2.0, 4.0], num_bytes=0.5), memory_bytes=np.full(2, 2.0))
    solution = solve(problem, Demands(objective="latency"))
    assert solution.objective_s == pytest.approx(10)
    assert len({device for block in solution.blocks for device in block.devices}) == 2


def test_a_latency_limit_that_nothing_meets_is_refused():
    with pytest.raises(InfeasibleError, match=r"at least 9\.00 s .* at most 5\.00 s"):
        solve(chain([3.0, 2.0, 4.0]), Demands(objective="latency", max_latency_s=5.0))


def test_a_number_of_stages_is_kept():
    solution = solve(fork(5.0, 1.0, 3), Demands(objective="latency", num_stages=2))
    assert len(solution.blocks) == 2 and len({block.devices for block in solution.blocks}) == 2
    assert len(solve(fork(5.0, 1.0), Demands(objective="latency", num_stages=4)).blocks) == 4


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([1, 1, 2]))
def test_equals_brute_force_on_small_graphs(seed, contiguous, max_replicas):
    problem = random_problem(seed, num_ops=1 + seed % 4, num_devices=2)
    demands = Demands("latency", contiguous, max_replicas=max_replicas).sharing()
    best = exhaustive.best_blocks(problem, demands)
    try:
        solution = solve(
            problem, Demands(objective="latency", contiguous=contiguous, max_replicas=max_replicas), time_limit_s=1.5
        )
    except InfeasibleError:
        assert best is None
        return
    assert best is not None and judge(problem, demands, solution.blocks).faults == ()
    assert solution.bound_s <= best[1] * (1 + EXACT)
    assert solution.objective_s == pytest.approx(best[1], rel=EXACT) or max_replicas > 1
    assert solution.objective_s >= best[1] * (1 - EXACT)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6))
def test_clusters_cost_what_their_ops_cost(seed):
    problem = random_problem(seed, loose_order=False, unsupported=False, grouped=True, num_ops=7)
    clusters = forced_clusters(problem, contiguous=True)
    assert sorted(op for ops in clusters.members for op in ops) == list(range(7))
    clusters.problem.verify()
    blocks = random_blocks(clusters.problem, seed, contiguous=True)
    whole = clusters.expand(blocks)
    assert latency_s(problem, whole) == pytest.approx(latency_s(clusters.problem, blocks))
    assert clusters.shrink(whole) == tuple(blocks)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6))
def test_list_schedules_become_legal_blocks_not_below_the_critical_path(seed):
    problem = random_problem(seed, loose_order=False, grouped=False, caps=False, pooled=False, num_devices=3)
    delays = Delays(problem)
    blocks = list_schedule(problem, delays)
    assert find_faults(problem, blocks) == []
    assert critical_path_s(problem, delays) <= latency_s(problem, blocks) * (1 + 1e-9)


@pytest.mark.parametrize("most_cells", [delays.MOST_CELLS, 1000, 1])
def test_the_table_of_ops_and_bytes_has_a_largest_size(monkeypatch: pytest.MonkeyPatch, most_cells: int) -> None:
    """With 10,000 ops and 16 classes of devices it took 5 GB. With fewer steps of bytes the bound stays a bound."""
    transfers = Transfers.free(2)
    transfers.latency_s[:HOST, :HOST] = 1 - np.eye(2)
    problem = replace(chain([1.0] * 12), transfers=transfers, op_bytes=np.ones(12), memory_bytes=np.array([6.0, 8.0]))
    monkeypatch.setattr(delays, "MOST_CELLS", most_cells)
    _, _, most = delays.byte_steps(problem, Delays(problem))
    assert 12 * len(problem.device_classes) * most.max() <= max(most_cells, 24)
    bound_s = critical_path_s(problem, Delays(problem))
    assert 12 <= bound_s <= 13 and (bound_s == 13 or most_cells == 1)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_no_plan_is_quicker_than_the_longest_path_that_sees_caps(seed, contiguous, grouped):
    problem = random_problem(seed, caps=True, num_ops=1 + seed % 3, num_devices=2, grouped=grouped)
    demands = Demands(objective="latency", contiguous=contiguous, reuse=True)
    clusters = forced_clusters(problem, contiguous)
    best = exhaustive.best_blocks(problem, demands)
    if best is not None:
        assert critical_path_s(clusters.problem, Delays(clusters.problem)) <= best[1] * (1 + 1e-9)


def test_two_ops_that_fit_no_device_together_pay_their_transfer():
    problem = chain([1.0, 1.0, 1.0], num_bytes=3.0, op_bytes=np.array([2.0, 0.0, 2.0]), memory_bytes=np.full(2, 3.0))
    assert critical_path_s(problem, Delays(problem)) == pytest.approx(3.0 + 2 * 3.0)
    roomy = replace(problem, memory_bytes=np.full(2, 4.0))
    assert critical_path_s(roomy, Delays(roomy)) == pytest.approx(3.0)


def test_annealing_an_order_finds_the_branches_and_holds_the_caps():
    problem = replace(fork(5.0, 0.5), memory_bytes=np.full(2, 3.0))
    start = [Block((0, 1, 2), (0,)), Block((3,), (1,))]
    found = anneal_order(problem, start, seed=0, deadline=monotonic() + 0.2, enough_s=7.0)
    assert find_faults(problem, found) == []
    assert latency_s(problem, found) == pytest.approx(1 + 0.5 + 5 + 1)
    assert is_plain(problem) and not is_plain(replace(problem, groups=((0, 1),)))


def test_an_order_against_the_values_leaves_the_clusters_as_they_are():
    problem = chain([1.0] * 24, groups=((0, 2),))
    turned = replace(problem, order=tuple((b, a) if a % 2 else (a, b) for a, b in problem.order))
    assert forced_clusters(problem, contiguous=True).problem.num_ops == 22
    alone = replace(problem, groups=())
    assert forced_clusters(alone, contiguous=True).problem is alone
    assert forced_clusters(turned, contiguous=True).problem.num_ops == 24


def test_a_wide_graph_of_300_ops_beats_one_device_in_time():
    width, depth = 6, 50
    nets = [Net(row * depth + step, (row * depth + step + 1,), 1.0) for row in range(width) for step in range(depth - 1)]
    num_ops = width * depth
    transfers = Transfers.free(3)
    transfers.send_s_per_byte[:3, :3] = 0.01
    problem = Problem(
        name="wide",
        ops=tuple(f"op{number}" for number in range(num_ops)),
        devices=("a", "b", "c"),
        compute_s=np.ones((num_ops, 3)),
        nets=tuple(nets),
        order=tuple((net.producer, net.consumers[0]) for net in nets),
        transfers=transfers,
        op_bytes=np.ones(num_ops),
        memory_bytes=np.full(3, math.inf),
    ).verify()
    started = monotonic()
    solution = solve(problem, Demands(objective="latency"), time_limit_s=4)
    assert solution.objective_s <= 101
    assert monotonic() - started < 12
    assert all(isinstance(block, Block) for block in solution.blocks)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_latency_limit_that_only_shared_devices_meet_is_met(contiguous):
    problem = fork(5.0, 1.0)
    solution = solve(problem, Demands(max_latency_s=8.5, contiguous=contiguous), time_limit_s=3)
    assert latency_s(problem, solution.blocks) == pytest.approx(8)
    assert len(solution.blocks) > len({device for block in solution.blocks for device in block.devices})
