"""Copies have the same bits in the same layout, and memory is used again only once no caller holds it."""

import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.running.copying import CopyPool, copier, prepared_copy
from autosplit.tracing.tensorspec import TensorSpec, copy_into, empty_like_spec, spec_of
from tests.running.test_ring import tensors

pytestmark = pytest.mark.timeout(60)


@settings(max_examples=examples(150), deadline=None)
@given(tensors())
def test_a_copy_is_equal_and_laid_out_alike_in_new_and_in_kept_memory(value: torch.Tensor) -> None:
    spec = spec_of("x", value)
    copies = CopyPool([spec], max_kept=1)
    for _ in range(3):
        copy = copies.copy(value)
        assert spec_of("x", copy) == spec and copy.dtype == value.dtype
        assert torch.equal(copy, value) and not (value.numel() and copy.data_ptr() == value.data_ptr())
        del copy


@settings(max_examples=examples(100), deadline=None)
@given(tensors(), st.booleans())
def test_a_prepared_copy_reads_its_source_anew(value: torch.Tensor, is_dense: bool) -> None:
    spec = spec_of("x", value)
    source, target = (value.clone().contiguous() if is_dense else empty_like_spec(spec)), empty_like_spec(spec)
    call = prepared_copy(spec, target, source)
    for one in (torch.zeros_like(value), value):
        copy_into(source, one.clone())
        call()
        assert torch.equal(target, one)


@settings(max_examples=examples(150), deadline=None)
@given(tensors(), tensors())
def test_a_target_takes_any_layout_of_its_shape(target: torch.Tensor, value: torch.Tensor) -> None:
    """The target's layout is drawn, and the value is brought to its shape, as a permuted view where that is possible."""
    spec = spec_of("x", target)
    made = empty_like_spec(spec)
    source = torch.testing.make_tensor(list(reversed(spec.shape)), dtype=spec.torch_dtype, device="cpu")
    source = source.permute(list(reversed(range(source.ndim))))
    for dim, stride in enumerate(spec.stride):
        if stride == 0 and source.shape[dim]:
            source = source.narrow(dim, 0, 1).expand(source.shape)
    copier(spec)(made, source)
    assert torch.equal(made, source) and spec_of("x", made) == spec


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 3), st.lists(st.integers(-1, 5), max_size=40))
def test_no_copy_changes_while_it_or_a_view_of_it_is_held(max_kept: int, steps: list[int]) -> None:
    """Steps: -1 makes a copy and holds it (every other one through a view only), k lets go of the k-th held one."""
    copies = CopyPool([spec_of("x", torch.zeros(8))], max_kept)
    held: list[tuple[int, torch.Tensor]] = []
    for number, step in enumerate(steps):
        if step < 0:
            copy = copies.copy(torch.full((8,), float(number)))
            held.append((number, copy[2:4] if number % 2 else copy))
        elif step < len(held):
            del held[step]
        assert all((view == number).all() for number, view in held)


def test_memory_is_used_again_and_no_more_than_asked_is_kept() -> None:
    copies = CopyPool([spec_of("x", torch.zeros(1000))], max_kept=2)
    value = torch.ones(1000)
    first = copies.copy(value)
    place = first.data_ptr()
    second, third = copies.copy(value), copies.copy(value)
    assert len({place, second.data_ptr(), third.data_ptr()}) == 3
    del first
    assert copies.copy(value).data_ptr() == place
    assert len(copies._kept) == 2
    assert CopyPool([TensorSpec("x", (1 << 30,), (1,), "float32")], max_kept=2)._max_kept == 0


def test_a_copy_can_be_trained_on() -> None:
    """Answers are ordinary tensors, not those of inference mode."""
    copy = CopyPool([spec_of("x", torch.ones(2))], 1).copy(torch.ones(2, requires_grad=True))
    assert not copy.requires_grad and not copy.is_inference()
    weight = torch.ones(2, requires_grad=True)
    (weight * copy).sum().backward()
    assert weight.grad is not None


def test_conjugated_and_negated_views_are_resolved() -> None:
    """A lazily conjugated tensor reads otherwise than it lies in memory; its imaginary part is lazily negated."""
    value = torch.tensor([1 + 2j, 3 - 4j]).conj()
    for lazy in (value, value.imag[:1]):
        spec = TensorSpec("x", tuple(lazy.shape), tuple(lazy.stride()), str(lazy.dtype).removeprefix("torch."))
        made = empty_like_spec(spec)
        copier(spec)(made, lazy)
        assert torch.equal(made, lazy.resolve_conj().resolve_neg())
