import pytest
import torch
from torch import nn

from autosplit.backends.base import get_backend
from autosplit.backends.checking import check
from autosplit.backends.lowering import LOWERED, lowered
from autosplit.errors import BackendError
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import load_stage, save_stage


class Attention(nn.Module):
    """A matrix product with a weight that an f32 op reads too, attention with a boolean mask, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x).unsqueeze(1)
        seen = nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=mask)
        return seen + self.linear.weight.sum(), mask.long() @ mask.long().T


@pytest.fixture(scope="module")
def program(whole):
    torch.manual_seed(0)
    inputs = (torch.randn(2, 4, 16), torch.ones(4, 4, dtype=torch.bool).tril())
    return whole(trace(load_model(Attention().eval(), inputs=inputs))), inputs


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_products_run_in_half_precision_and_all_else_as_before(program, precision):
    stage, inputs = program
    half = lowered(stage, precision)
    halves = {node.target for node in half.module.graph.nodes if str(node.target).endswith(f"_{precision}")}
    assert halves == {f"linear.weight_{precision}", f"linear.bias_{precision}"}
    assert set(half.weights) == halves | {"linear.weight"}
    owners = {node.meta["op"] for node in half.module.graph.nodes if "op" in node.meta}
    assert owners == {"linear", "scaled_dot_product_attention"}
    expected, found = stage.module(*inputs), half.module(*inputs)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    assert torch.equal(found[1], expected[1])
    assert 0 < float((found[0] - expected[0]).detach().abs().max()) < 0.1


def test_workers_load_the_lowered_weights_from_one_file(program, tmp_path):
    stage, inputs = program
    save_stage(stage, tmp_path / "stage")
    with pytest.raises(BackendError, match="not prepared for eager in bf16"):
        get_backend("eager").load(tmp_path / "stage", 1, "bf16")
    get_backend("eager").prepare(stage, tmp_path / "stage", "bf16")
    found = get_backend("eager").load(tmp_path / "stage", 1, "bf16")(inputs)
    expected = get_backend("eager").compile(stage, 1, "bf16")(inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert {w.dtype for w in load_stage(tmp_path / "stage" / "bf16").weights.values()} == {torch.bfloat16, torch.float32}


def test_operators_are_named_as_torch_names_them():
    for name in LOWERED:
        _, packet, overload = name.split(".")
        assert str(getattr(getattr(torch.ops.aten, packet), overload)) == name


def test_eager_in_half_precision_is_a_choice_and_its_error_is_given(program):
    stage, inputs = program
    errors = [check(get_backend("eager"), stage, inputs, precision=one).relative for one in ("f32", "tf32", "f16", "bf16")]
    assert errors[0] == errors[1] == 0 < errors[2] < errors[3] < 0.1  # a core computes in f32 where an accelerator may in tf32


def test_a_stage_that_views_a_strided_input_is_lowered(after_attention):
    assert lowered(after_attention, "bf16").ops == after_attention.ops
