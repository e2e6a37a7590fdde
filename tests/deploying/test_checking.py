"""What is said of a plan whose numbers are wrong, and what its answers are compared with."""

from dataclasses import replace

import pytest
import torch

from autosplit.backends import workspace as workspaces
from autosplit.backends.base import get_backend
from autosplit.backends.checking import F32_TOLERANCE, TOLERANCES
from autosplit.backends.eager import EagerBackend
from autosplit.backends.workspace import NUM_DISTINCT, Workspace, threaded_reference
from autosplit.deploying import checking
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.differing import NumericalError
from autosplit.tracing.loading import load_model
from autosplit.tracing.verifying import distinct_inputs
from autosplit.values.plan import UNKNOWN, Plan, Stage

ERROR = NumericalError(1.0, 0.5, "y")


class Zeros(EagerBackend):
    """Runs the stage and throws the answer away."""

    name, exact = "zeros", False

    def compile(self, program, threads, precision="f32"):
        run = super().compile(program, threads, precision)
        return lambda inputs: [torch.zeros_like(value) for value in run(inputs)]


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(load_model("autosplit.examples.mlp:mlp?depth=4&width=16"))


@pytest.fixture
def plan(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(checking, "get_backend", lambda name: Zeros() if name == "zeros" else get_backend(name))
    ops = [op.name for op in traced.graph.ops]
    stages = Stage("one", tuple(ops[:4]), ("cpu:0",)), Stage("two", tuple(ops[4:]), ("cpu:1",), "zeros")
    return Plan(traced.source, traced.graph.hash, "", stages, UNKNOWN)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_the_stage_and_the_backend_with_wrong_numbers_are_named(traced: Traced, plan: Plan, precision: str) -> None:
    fault = checking.blame(replace(plan, precision=precision), traced, traced.example_inputs, ERROR, 0.1)
    assert f"backend 'zeros' ({precision}) gives wrong numbers on stage 'stage1'" in fault


def test_where_no_stage_alone_is_wrong_the_backends_are_named(traced: Traced, plan: Plan) -> None:
    right = replace(plan, stages=tuple(replace(stage, backend="eager") for stage in plan.stages))
    fault = checking.blame(right, traced, traced.example_inputs, ERROR, 0.1)
    assert "2 stages (eager, f32) differ from f32 eager: 'y' is off by 0.5" in fault and "tolerance is 0.1" in fault


def test_bits_are_asked_of_exact_stages_in_f32_only(traced: Traced, plan: Plan) -> None:
    reference = threaded_reference(traced, {})
    exact = replace(plan, stages=plan.stages[:1])
    assert checking.limit_of(exact, reference) == 0
    assert checking.limit_of(plan, reference) == F32_TOLERANCE
    least, most = TOLERANCES["bf16"]
    assert least <= checking.limit_of(replace(exact, precision="bf16"), reference) < most


def test_a_slow_model_is_compared_on_fewer_inputs(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(threaded_reference(traced, {}).work) == NUM_DISTINCT
    monkeypatch.setattr(workspaces, "SLOW_S", 0.0)
    slow = threaded_reference(traced, {op.name: 1 for op in traced.graph.ops})
    assert len(slow.work) == len(slow.own) == 2
    for inputs, outputs in zip(slow.work, slow.own, strict=True):
        torch.testing.assert_close(outputs[0], traced.program(*inputs)[0])


def test_plans_share_the_outputs_of_the_unsplit_model_unless_threads_may_change_bits(traced: Traced, plan: Plan) -> None:
    one, *_ = eager = tuple(replace(stage, backend="eager") for stage in plan.stages)
    own = replace(plan, stages=tuple(replace(stage, threads=torch.get_num_threads()) for stage in eager))
    mixed = replace(own, stages=(replace(one, threads=torch.get_num_threads() + 1), *own.stages[1:]))
    assert checking.threads_of(plan) == checking.threads_of(own) == {}
    assert set(checking.threads_of(mixed)) == {op.name for op in traced.graph.ops}
    with Workspace() as workspace:
        found = workspace.reference(traced, {})
        assert workspace.reference(traced, {}) is found
        assert workspace.reference(traced, {traced.graph.ops[0].name: 1}) is not found


class Bags(torch.nn.Module):
    """Takes offsets that begin with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.EmbeddingBag(10, 4)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.table(x, offsets)


def test_made_up_inputs_that_the_model_refuses_are_not_sent() -> None:
    traced = trace(load_model(Bags().eval(), inputs=(torch.arange(6), torch.tensor([0, 2, 4, 5]))))
    reference = threaded_reference(traced, {})
    assert 1 <= len(reference.work) == len(reference.own) < NUM_DISTINCT
    assert all(inputs[1][0] == 0 for inputs in reference.work)


def test_inputs_that_repeat_an_item_or_have_8_bits_are_made_too() -> None:
    eight_bits = torch.ones(30).to(torch.float8_e4m3fn)
    example = [torch.ones(1, 8).expand(4, 8), torch.arange(8).expand(4, 8), torch.zeros(2, 3).t(), eight_bits]
    first, *others = distinct_inputs(example, 4)
    assert all(tensor is given for tensor, given in zip(first, example, strict=True))
    for inputs in others:
        assert [tensor.stride() for tensor in inputs] == [tensor.stride() for tensor in example]
        assert not any(torch.equal(tensor.float(), given.float()) for tensor, given in zip(inputs, example, strict=True))
