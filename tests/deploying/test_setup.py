"""Values that cannot be used are refused when a Setup or a Budget is made, all at once."""

from unittest.mock import Mock

import pytest

import autosplit
from autosplit.deploying.setup import BUDGET, Budget, Hosts, Setup
from autosplit.errors import BackendError, DeviceError, UsageError
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Stage


def test_every_fault_of_a_setup_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"2 faults[\s\S]*precision 'fp8' is not known; valid: f32, tf32, bf16, f16[\s\S]*queue_depth.* is 0"
    ):
        Setup(precision="fp8", queue_depth=0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="backends must be a list of str"):
        Setup(backends=[1])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="on the accelerators of this machine; over hosts give precision= for all"):
        Setup(max_error=0.1, hosts=Mock(spec=Hosts))
    assert Setup(backends="eager").considered == ("eager",)
    with pytest.raises((UsageError, BackendError), match="'tensorrt' does not exist"):
        Setup(backends=["tensorrt"])


def test_every_fault_of_a_budget_is_named() -> None:
    with pytest.raises(UsageError, match=r"3 faults[\s\S]*search_s.*-1[\s\S]*planner_s.*inf[\s\S]*num_rounds.* is 0"):
        Budget(search_s=-1, planner_s=float("inf"), num_rounds=0)
    assert (BUDGET.compiling_s, Budget(search_s=5, compile_s=7.0).compiling_s) == (60.0, 7.0)


def test_a_device_that_is_not_here_is_refused_before_anything_is_loaded() -> None:
    """A machine value with cuda:0 ended in an AttributeError where torch has no CUDA."""
    traced = autosplit.trace("autosplit.examples.mlp:mlp?depth=1&width=4")
    stage = Stage("all", tuple(op.name for op in traced.graph.ops), ("cuda:99",))
    plan = Plan(traced.source, traced.graph.hash, "", (stage,), UNKNOWN)
    with pytest.raises(DeviceError, match="'cuda:99' is not here: this machine has 0 CUDA devices"):
        autosplit.open_pipeline(traced, plan, Machine.of([parse_device("cuda:99")]))
