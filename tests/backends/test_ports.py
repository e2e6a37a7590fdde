import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosplit.backends.ports import DenseStage, port
from autosplit.tracing.freesizes import any_strides
from autosplit.tracing.tensorspec import laid_out, spec_of


@st.composite
def permuted(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape).permute(order)


@given(permuted())
def test_permuted_tensors_come_and_go_without_a_copy(value):
    handed = port(spec_of("x", value))
    dense = handed.dense(value)
    back = handed.restore(dense)
    assert dense.is_contiguous()
    assert tuple(dense.shape) == handed.dense_shape
    assert dense.data_ptr() == value.data_ptr() == back.data_ptr()
    assert torch.equal(back, value)
    assert back.stride() == value.stride()


def test_tensors_with_gaps_or_repeats_are_copied_and_keep_their_strides():
    gapped = torch.arange(12.0).reshape(3, 4)[:, :2]
    for value in (gapped, gapped.t(), torch.arange(3.0).expand(2, 3), torch.arange(3.0).expand(2, 3).t()):
        handed = port(spec_of("x", value))
        assert handed.copied
        back = handed.restore(handed.dense(value))
        assert torch.equal(back, value)
        assert back.stride() == value.stride()


def test_an_input_with_other_strides_than_its_spec_is_copied_once():
    value = torch.randn(2, 3, 4, 5)
    handed = port(spec_of("x", value.contiguous(memory_format=torch.channels_last)))
    assert torch.equal(handed.dense(value), value.permute(0, 2, 3, 1))
    assert handed.dense(value).is_contiguous()


class Turn(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.view(6).view(2, 3).t(),)


def test_wrapped_stages_give_the_same_values():
    x = torch.randn(2, 3)
    source, target = port(spec_of("x", x)), port(spec_of("y", x.t()))
    assert torch.equal(DenseStage(Turn(), [source], [target])(x)[0], x)


def test_a_stage_can_be_made_to_take_any_strides(after_attention):
    [spec] = after_attention.inputs
    x = torch.randn(spec.shape)
    with pytest.raises(RuntimeError, match="view"):
        after_attention.module(x)
    assert torch.equal(any_strides(after_attention.module)(x)[0], after_attention.module(laid_out(x, spec))[0])


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (torch.arange(32.0).reshape(2, 16)[:, :8].unflatten(1, (2, 4)).transpose(1, 2), (2, 8)),
        (torch.arange(32.0).reshape(4, 8).t().expand(2, 8, 4), (2, 32)),
        (torch.arange(16.0).reshape(2, 1, 8).expand(2, 4, 8), (16, 4)),
    ],
    ids=["turned, with gaps", "turned and repeated", "repeated inside"],
)
def test_a_copied_input_can_be_viewed_as_it_was_traced(value, shape):
    class Flatten(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (x.transpose(1, 2).view(shape),)

    source, (expected,) = port(spec_of("x", value)), Flatten()(value)
    target = port(spec_of("y", expected.contiguous()))
    assert source.copied
    assert torch.equal(DenseStage(Flatten(), [source], [target])(source.dense(value))[0], expected)
