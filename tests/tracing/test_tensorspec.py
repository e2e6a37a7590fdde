from dataclasses import replace

import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.tracing.tensorspec import (
    ALIGNMENT,
    TensorSpec,
    copy_into,
    differences,
    empty_like_spec,
    extent_bytes,
    is_laid_out,
    laid_out,
    row_major,
    spec_of,
    storage_bytes,
    view_storage,
    zeros,
)

TENSORS = {
    "dense": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).t(),
    "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "slice with gaps": torch.randn(4, 8)[:, 2:5],
    "expanded": torch.randn(1, 4).expand(5, 4),
    "expanded scalar": torch.tensor(2.0).expand(3, 2),
    "overlapping": torch.arange(10.0).unfold(0, 3, 1),
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 4),
    "unaligned": torch.randn(9)[3:],
    "bool": torch.randn(7) > 0,
    "bfloat16": torch.randn(5, 5).bfloat16()[1:, 1:],
    "complex": torch.randn(3, dtype=torch.complex64),
    "int64": torch.arange(6).view(2, 3),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_copy_has_the_numbers_and_the_layout(kind):
    tensor = TENSORS[kind]
    spec = spec_of("x", tensor)
    copy = empty_like_spec(spec)
    copy_into(copy, tensor)
    assert torch.equal(copy, tensor)
    assert spec_of("x", copy) == spec
    assert tensor.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("kind", TENSORS)
def test_zeros_have_the_layout(kind):
    tensor = TENSORS[kind]
    made = zeros(spec_of("x", tensor))
    assert torch.equal(made, torch.zeros_like(tensor))
    assert (made.stride(), made.dtype) == (tensor.stride(), tensor.dtype)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    slices=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=4, max_size=4),
    expand=st.integers(0, 3),
    seed=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(60), deadline=None)
def test_copy_of_any_view(sizes, slices, expand, seed):
    tensor = torch.randn(sizes)
    for dim, (start, step) in zip(range(tensor.dim()), slices, strict=False):
        tensor = tensor[(slice(None),) * dim + (slice(min(start, tensor.shape[dim] - 1), None, step),)]
    order = list(range(tensor.dim()))
    seed.shuffle(order)
    tensor = tensor.permute(order)
    if expand:
        tensor = tensor[None].expand(expand, *tensor.shape)
    spec = spec_of("x", tensor)
    buffer = torch.zeros(storage_bytes(spec) + 8, dtype=torch.uint8)
    copy_into(view_storage(buffer, spec), tensor)
    assert torch.equal(view_storage(buffer, spec), tensor)
    assert spec_of("x", view_storage(buffer, spec)) == spec
    assert not buffer[storage_bytes(spec) :].any()


def test_extent_counts_repeated_elements_once_and_gaps():
    assert extent_bytes(spec_of("x", TENSORS["expanded"])) == 4 * 4
    assert extent_bytes(spec_of("x", TENSORS["slice with gaps"])) == (3 * 8 + 3) * 4
    assert spec_of("x", TENSORS["expanded"]).num_bytes == 5 * 4 * 4
    assert storage_bytes(TensorSpec("x", (2,), (1,), "float32", 12)) == 20


@pytest.mark.parametrize("kind", TENSORS)
def test_what_lies_as_its_spec_is_not_copied(kind):
    tensor, spec = TENSORS[kind], spec_of("x", TENSORS[kind])
    assert is_laid_out(tensor, spec) and laid_out(tensor, spec) is tensor
    for anywhere in (False, True):
        moved = replace(spec, offset_bytes=(spec.offset_bytes + 32) % ALIGNMENT)
        assert is_laid_out(tensor, moved, anywhere=anywhere) == (anywhere or not tensor.numel())


class Own(torch.Tensor):
    """A tensor that answers ops in its own way."""


COMPLEX = torch.randn(2, 2, dtype=torch.complex64)
UNLIKE = {
    "transposed": (torch.randn(4, 3).t(), {}),
    "another stride where the size is 1": (torch.randn(2, 1).as_strided((2, 1), (1, 7)), {}),
    "another stride of no elements": (torch.empty(0, 4).as_strided((0, 4), (9, 1)), {}),
    "expanded": (torch.randn(1, 4).expand(3, 4), {}),
    "at another offset": (torch.randn(9)[3:], {}),
    "conjugated": (COMPLEX.conj(), {}),
    "negated": (COMPLEX.conj().imag, {"stride": (4, 2)}),
    "followed by autograd": (torch.randn(2, 2, requires_grad=True), {}),
    "of a subclass": (torch.randn(2, 2).as_subclass(Own), {}),
    "a parameter": (torch.nn.Parameter(torch.randn(2, 2), requires_grad=False), {}),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_what_a_kernel_would_read_otherwise_is_laid_out_anew(kind):
    tensor, changes = UNLIKE[kind]
    shape = tuple(tensor.shape)
    spec = TensorSpec("x", shape, row_major(shape), str(tensor.dtype).removeprefix("torch."))
    spec = replace(spec, **changes)
    assert not is_laid_out(tensor, spec)
    found = laid_out(tensor, spec)
    assert type(found) is torch.Tensor and not (found.requires_grad or found.is_conj() or found.is_neg())
    assert is_laid_out(found, spec) and spec_of("x", found) == spec
    assert torch.equal(found, tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg())


def test_numbers_of_another_dtype_are_converted():
    spec = TensorSpec("x", (2,), (1,), "float32")
    assert laid_out(torch.tensor([1, 2], dtype=torch.int32), spec).tolist() == [1.0, 2.0]


def test_differences_ignore_layout_and_name_shapes():
    spec = TensorSpec("x", (2, 3), (3, 1), "float32")
    assert differences([spec], [torch.zeros(3, 2).t()]) == []
    assert differences([spec], [torch.zeros(2, 2)]) == ["'x' is float32[2,2], and float32[2,3] is expected"]
    assert differences([spec], []) == ["1 tensors are expected, and 0 are given"]
