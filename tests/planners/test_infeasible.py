from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
from problems import chain

from autosplit.costs.problem import Pool
from autosplit.costs.workloads import read_workload
from autosplit.errors import InfeasibleError
from autosplit.planners.infeasible import conflict
from autosplit.planners.portfolio import solve
from autosplit.values.constraints import Demands

WORKLOADS = Path(__file__).parents[1] / "data" / "workloads"


def closed(problem, *pairs):
    """The problem with (op, device, reason) closed."""
    compute = problem.compute_s.copy()
    for op, device, _ in pairs:
        compute[op, device] = np.inf
    return replace(problem, compute_s=compute, reasons={(op, device): reason for op, device, reason in pairs})


def test_an_op_larger_than_every_cap():
    problem = chain([1, 1], op_bytes=np.array([9 * 2.0**20, 1.0]), memory_bytes=np.full(2, 8 * 2.0**20))
    with pytest.raises(InfeasibleError, match=r"op 'op0' needs 9.0 MiB of weights on one device, and the largest cap is 8.0 MiB"):
        solve(problem)


def test_ops_that_stay_together_and_are_larger_than_every_cap():
    problem = chain([1, 1], op_bytes=np.full(2, 5.0), memory_bytes=np.full(2, 8.0), groups=((0, 1),))
    with pytest.raises(InfeasibleError, match=r"ops 'op0', 'op1', which stay together, need 10 B"):
        solve(problem)


def test_all_ops_larger_than_all_devices():
    problem = chain([1, 1, 1], op_bytes=np.full(3, 6.0), memory_bytes=np.full(2, 8.0))
    with pytest.raises(InfeasibleError, match=r"the ops need 18 B of weights, and all devices together hold 16 B"):
        solve(problem)


def test_ops_that_do_not_pack():
    problem = chain([1, 1, 1], op_bytes=np.full(3, 5.0), memory_bytes=np.full(2, 8.0))
    with pytest.raises(InfeasibleError, match="cannot hold together") as caught:
        solve(problem)
    assert "'dev0' holds at most 8 B" in str(caught.value)
    assert "'dev1' holds at most 8 B" in str(caught.value)
    assert "chain" not in str(caught.value)


def test_an_op_without_a_device():
    problem = closed(chain([1, 1]), (0, 0, "op 'op0' is pinned to 'dev1'"), (0, 1, "op 'op0' is forbidden on 'dev1'"))
    with pytest.raises(InfeasibleError, match=r"op 'op0' has no device: op 'op0' is pinned to 'dev1'; op 'op0' is forbidden"):
        solve(problem)


def test_only_the_pins_that_conflict_are_named():
    pins = [(0, 1, "op0 is pinned to dev0"), (2, 0, "op2 is pinned to dev1"), (4, 1, "op4 is pinned to dev0")]
    problem = closed(chain([1.0] * 6, memory_bytes=np.full(2, 50.0)), *pins)
    with pytest.raises(InfeasibleError, match="cannot hold together") as caught:
        solve(problem, Demands(reuse=False))
    text = str(caught.value)
    assert all(reason in text for _, _, reason in pins)
    assert "one block on a device" in text
    assert "50 B" not in text


def test_a_device_runs_two_stages_where_the_pins_want_it_and_nobody_forbids_it():
    pins = [(0, 1, "op0 is pinned to dev0"), (2, 0, "op2 is pinned to dev1"), (4, 1, "op4 is pinned to dev0")]
    for options in ({}, {"num_stages": 3}, {"max_stages": 3}, {"objective": "latency", "num_stages": 3}):
        solution = solve(closed(chain([1.0] * 6), *pins), Demands(**options))
        assert [block.devices for block in solution.blocks] == [(0,), (1,), (0,)], options


def test_a_pool_too_small():
    problem = chain([1, 1], 2, pools=(Pool((0, 1), 1.0),))
    with pytest.raises(InfeasibleError, match=r"'dev0', 'dev1' hold at most 1 B together"):
        solve(problem)


def test_stages_that_cannot_be_long_enough():
    with pytest.raises(InfeasibleError, match=r"a stage takes at least 5\.00 s") as caught:
        solve(chain([1, 1], num_bytes=0.0), Demands(num_stages=2, min_stage_s=5.0))
    assert [words.split()[0] for words in caught.value.conflict] == ["exactly", "a", "all"]
    with pytest.raises(InfeasibleError, match=r"a stage takes at least 1\.50 s"):
        solve(chain([1, 1], num_bytes=0.0), Demands(num_stages=2, min_stage_s=1.5))


def test_ops_that_stay_together_but_are_pinned_apart():
    problem = closed(chain([1, 1]), (0, 1, "op 'op0' is pinned to 'dev0'"), (1, 0, "op 'op1' is pinned to 'dev1'"))
    with pytest.raises(InfeasibleError, match=r"stay together, have no device: .*op1' is pinned to 'dev1'; .*op0' is"):
        solve(replace(problem, groups=((0, 1),)))


def test_fewer_stages_than_the_weights_need():
    problem = chain([1, 1, 1], 3, op_bytes=np.full(3, 6.0), memory_bytes=np.full(3, 8.0))
    assert len(solve(problem).blocks) == 3
    with pytest.raises(InfeasibleError, match=r"at most 2 stages, 18 B of weights, and the 16 B that the 2 largest devices hold"):
        solve(problem, Demands(max_stages=2))


def test_stages_and_latency_that_conflict_are_named_and_nothing_else():
    problem = chain([1.0] * 4, 3, num_bytes=1.0, memory_bytes=np.full(3, 50.0), groups=((1, 2),))
    with pytest.raises(InfeasibleError, match="cannot hold together") as caught:
        solve(problem, Demands(num_stages=3, max_latency_s=6.0), time_limit_s=0.3)
    text = str(caught.value)
    assert "exactly 3 stages" in text and "at most 6.00 s" in text and "50 B" not in text and "stay together" not in text


def test_weights_that_do_not_pack_are_refused_whatever_the_time_limit():
    problem = read_workload(WORKLOADS / "layer-bert24_inference.json")
    cap = np.full(problem.num_devices, problem.op_bytes.sum() / problem.num_devices * 1.0001)
    with pytest.raises(InfeasibleError, match=r"cannot hold together: 'acc0' holds at most"):
        solve(replace(problem, memory_bytes=cap), time_limit_s=10)
    with pytest.raises(InfeasibleError, match=r"in time|no time to find out|cannot hold together"):
        solve(replace(problem, memory_bytes=cap), time_limit_s=0.0)


def test_a_conflict_that_could_not_be_shrunk_says_so():
    problem = chain([1, 1, 1], op_bytes=np.full(3, 5.0), memory_bytes=np.full(2, 8.0))
    assert "no time" in conflict(problem, Demands(), deadline=monotonic() - 1)
    assert "chain" in conflict(problem, Demands(), deadline=monotonic() - 1)
    found = conflict(problem, Demands(), deadline=monotonic() + 10)
    assert "no time" not in found and "chain" not in found
