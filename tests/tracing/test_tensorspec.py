import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.tracing.tensorspec import (
    ALIGNMENT,
    TensorSpec,
    copy_into,
    differences,
    empty_like_spec,
    extent_bytes,
    laid_out,
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
@settings(max_examples=60, deadline=None)
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


def test_laid_out_copies_only_what_lies_otherwise():
    tensor = torch.randn(4, 4)
    assert laid_out(tensor, spec_of("x", tensor)) is tensor
    spec = TensorSpec("x", (4, 4), (1, 4), "float32", 4)
    copy = laid_out(tensor, spec)
    assert torch.equal(copy, tensor)
    assert (copy.stride(), copy.data_ptr() % ALIGNMENT) == ((1, 4), 4)


def test_differences_ignore_layout_and_name_shapes():
    spec = TensorSpec("x", (2, 3), (3, 1), "float32")
    assert differences([spec], [torch.zeros(3, 2).t()]) == []
    assert differences([spec], [torch.zeros(2, 2)]) == ["'x' is float32[2,2], and float32[2,3] is expected"]
    assert differences([spec], []) == ["1 tensors are expected, and 0 are given"]
