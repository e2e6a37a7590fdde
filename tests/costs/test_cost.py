from dataclasses import replace

import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, random_blocks, random_problem, slow_loads

from autosplit.costs import judge as judging
from autosplit.costs.cost import evaluate, memory_bytes, pool_bytes
from autosplit.costs.faults import find_faults
from autosplit.costs.judge import Solution, judge
from autosplit.costs.pieces import latency_s, pieces
from autosplit.costs.problem import HOST, Block, Net, Pool, SharedWeight
from autosplit.errors import PlanError
from autosplit.values.constraints import Demands


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 10**6))
def test_loads_equal_the_definition(seed):
    problem = random_problem(seed)
    blocks = random_blocks(problem, seed)
    expected = slow_loads(problem, blocks)
    found = evaluate(problem, blocks)
    if problem.overlap:
        assert found.device_s == pytest.approx(np.array(expected))
    else:
        assert found.device_s == pytest.approx(np.array(expected))
        assert found.device_s == pytest.approx(found.compute_s + found.transfer_s)
    assert (found.stage_s <= found.block_s).all()


def test_two_blocks_pay_the_transfer_on_both_sides():
    loads = evaluate(chain([3, 4]), [Block((0,), (0,)), Block((1,), (1,))])
    assert loads.device_s.tolist() == [4.0, 5.0]
    assert loads.bottleneck_s == 5.0


def test_overlap_takes_the_larger_part():
    loads = evaluate(chain([3, 4], num_bytes=5.0, overlap=True), [Block((0,), (0,)), Block((1,), (1,))])
    assert loads.device_s.tolist() == [5.0, 5.0]


def test_send_once_and_send_for_each_destination():
    problem = chain([1, 1, 1], 3, nets=(Net(0, (1, 2), 2.0),))
    blocks = [Block((op,), (op,)) for op in range(3)]
    assert evaluate(problem, blocks).device_s.tolist() == [5.0, 3.0, 3.0]
    assert evaluate(replace(problem, send_once=True), blocks).device_s.tolist() == [3.0, 3.0, 3.0]


def test_replicas_share_the_samples_and_each_hold_the_weights():
    problem = chain([4, 6], 3, op_bytes=np.array([10.0, 20.0]))
    blocks = [Block((0,), (0,)), Block((1,), (1, 2))]
    assert evaluate(problem, blocks).device_s.tolist() == [5.0, 3.5, 3.5]
    assert evaluate(problem, blocks).block_s.tolist() == [5.0, 7.0]
    assert memory_bytes(problem, blocks).tolist() == [10.0, 20.0, 20.0]


def test_weights_count_once_in_a_block_and_once_in_a_pool():
    problem = chain([1, 1, 1], weights=(SharedWeight(100.0, (0, 2)),), pools=(Pool((0, 1), 1000.0),))
    apart = [Block((0,), (0,)), Block((1, 2), (1,))]
    assert memory_bytes(problem, apart).tolist() == [101.0, 102.0]
    assert pool_bytes(problem, apart) == [103.0]
    assert memory_bytes(problem, [Block((0, 1, 2), (0, 1))]).tolist() == [103.0, 103.0]
    assert memory_bytes(problem, [Block((0,), (0,)), Block((1,), (1,)), Block((2,), (0,))]).tolist() == [202.0, 1.0]


def test_devices_of_one_processor_share_its_time_and_its_memory():
    problem = chain([3, 4, 5], 3, num_bytes=0.0)
    shared = replace(problem, processors=(0, 0, 1), memory_bytes=np.array([1.0, 1.0, 9.0]))
    blocks = [Block((0,), (0,)), Block((1,), (2,)), Block((2,), (1,))]
    assert evaluate(problem, blocks).device_s.tolist() == [3.0, 5.0, 4.0]
    assert evaluate(shared, blocks).device_s.tolist() == [8.0, 8.0, 4.0]
    assert memory_bytes(shared, blocks).tolist() == [2.0, 2.0, 1.0]
    assert len(find_faults(shared, blocks)) == 2 and not find_faults(problem, blocks)
    fork = replace(shared, nets=(), order=())
    assert latency_s(fork, blocks) == 8.0 and latency_s(replace(fork, processors=()), blocks) == 5.0


def test_blocks_that_share_a_device_add_up():
    blocks = [Block((0,), (0,)), Block((1,), (1,)), Block((2,), (0,))]
    assert evaluate(chain([1, 2, 3]), blocks).device_s.tolist() == [6.0, 4.0]


def test_latency_counts_branches_once_and_delays_in_full():
    problem = chain([1, 5, 2, 1], 2, nets=(Net(HOST, (0,), 1.0), Net(0, (1, 2), 0.0), Net(1, (3,), 0.0), Net(2, (3,), 0.0)))
    problem.transfers.latency_s[:] = 0.25
    one = [Block((0, 1, 2, 3), (0,))]
    assert latency_s(problem, one) == pytest.approx(9.25)
    branches = [Block((0,), (0,)), Block((1,), (0,)), Block((2,), (1,)), Block((3,), (0,))]
    assert latency_s(problem, branches) == pytest.approx(0.25 + 1 + 0.25 + 5 + 0.25 + 1)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 10**6))
def test_pieces_run_in_order_and_latency_is_at_least_the_critical_compute(seed):
    problem = random_problem(seed, unsupported=False)
    blocks = random_blocks(problem, seed)
    parts = pieces(problem, blocks)
    assert sorted(op for part in parts for op in part.ops) == list(range(problem.num_ops))
    assert all(any(set(part.ops) <= set(b.ops) and part.devices == b.devices for b in blocks) for part in parts)
    home = {op: number for number, part in enumerate(parts) for op in part.ops}
    for net in problem.nets:
        assert all(home[net.producer] <= home[op] for op in net.consumers if HOST not in (net.producer, op))
    assert latency_s(problem, blocks) >= problem.compute_s.min(axis=1).max() - 1e-9


def test_a_device_is_returned_to_as_seldom_as_its_values_allow():
    """An op that needs nothing waits for its block; it was a piece of its own."""
    problem = chain([1.0, 1.0, 1.0])
    problem = replace(problem, nets=(Net(0, (2,), 1.0), Net(1, (2,), 1.0)), order=((0, 2), (1, 2)))
    blocks = [Block((0,), (0,)), Block((1, 2), (1,))]
    assert pieces(problem, blocks[::-1]) == blocks


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 10**6))
def test_latency_is_never_below_the_load_of_an_unreplicated_device(seed):
    problem = random_problem(seed, overlap=False, unsupported=False)
    blocks = [replace(block, devices=block.devices[:1]) for block in random_blocks(problem, seed)]
    assert latency_s(problem, blocks) >= evaluate(problem, blocks).bottleneck_s - 1e-9


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([Block((0, 1), (0,))], "op 'op2' is in 0 blocks"),
        ([Block((0, 1, 2), (0,)), Block((2,), (1,))], "op 'op2' is in 2 blocks"),
        ([Block((0, 1, 9), (0,))], "does not exist"),
        ([Block((0, 1, 2), (7,))], "does not exist"),
        ([Block((0, 1, 2), ())], "no devices"),
        ([Block((1,), (0,)), Block((0, 2), (1,))], "reads 'op0' in block 1"),
        ([Block((0,), (0,)), Block((1, 2), (1,))], "must stay together"),
        ([Block((0, 1), (1,)), Block((2,), (0,))], "pinned to dev0"),
        ([Block((0, 1, 2), (0,))], "holds 3 B, and its cap is 2 B"),
    ],
)
def test_faults(blocks, message):
    compute = np.ones((3, 2))
    compute[0, 1] = np.inf
    problem = chain(
        [1, 1, 1],
        compute_s=compute,
        groups=((0, 1),),
        memory_bytes=np.array([2.0, 3.0]),
        reasons={(0, 1): "op0 is pinned to dev0"},
    )
    assert any(message in fault for fault in find_faults(problem, blocks))


def test_pool_fault():
    problem = chain([1, 1], pools=(Pool((0, 1), 1.0),))
    assert "together, and their cap is 1 B" in find_faults(problem, [Block((0,), (0,)), Block((1,), (1,))])[0]


def test_verify_refuses_broken_demands_and_a_bound_above_the_objective():
    problem, alone = chain([3, 4]), [Block((0, 1), (0,))]
    good = Solution(judge(problem, Demands(), alone), 7.0, "optimal", "hand", 0.0)
    assert good.verify() is good and (good.objective_s, good.gap) == (7.0, 0.0)
    with pytest.raises(PlanError, match="above its objective of 7 s"):
        replace(good, bound_s=8.0).verify()
    for demands, words in ((Demands(num_stages=2), "2 is asked for"), (Demands(max_latency_s=6.0), "at most 6.00 s is allowed")):
        with pytest.raises(PlanError, match=words):
            replace(good, judged=judge(problem, demands, alone)).verify()


def test_a_judge_evaluates_once_and_counts_the_parts_of_a_request(monkeypatch):
    problem, blocks = chain([3, 4], num_bytes=0.0), [Block((0,), (0,)), Block((1,), (1,))]
    asked = []
    monkeypatch.setattr(judging, "evaluate", lambda *given: asked.append(given) or evaluate(*given))
    judged = judge(problem, Demands("latency", max_latency_s=10.0, min_stage_s=1.0), blocks, num_parts=3)
    assert judged.latency_s == judged.objective_s == 3 + 4 + 2 * 4 and judged.loads.bottleneck_s == 4.0
    assert judged.faults == ("a request takes 15.00 s, and at most 10.00 s is allowed",) and len(asked) == 1
