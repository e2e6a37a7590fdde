import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autosplit.tracing.differing import difference
from autosplit.tracing.family import trace_family
from autosplit.tracing.loading import load_model
from autosplit.tracing.padding import TOLERANCE, cut, pad, with_checked_padding

TEXT = "hidden_size=32&num_hidden_layers=1&num_attention_heads=2&intermediate_size=64&vocab_size=100"


def checked(model, shapes, **sizes):
    return with_checked_padding(trace_family(model, shapes, sizes))


def of_module(module, *inputs, axis=1, **sizes):
    model = load_model(module.eval(), inputs=inputs)
    return checked(model, {"x": {axis: "seq"}}, **(sizes or {"seq": range(2, 17)}))


class Attention(nn.Module):
    """Attention of every place to every place, without a mask."""

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


class Causal(nn.Module):
    """Attention of every place to those before it."""

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class Mean(nn.Module):
    """A mean over the axis."""

    def forward(self, x):
        return x.relu().mean(1)


class Sum(nn.Module):
    """A sum over the axis, which zeros do not change."""

    def forward(self, x):
        return x.sum(1)


class Normed(nn.Module):
    """A batch norm that takes its statistics from the request."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Function(nn.Module):
    """A module from a function of one tensor."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Strided(nn.Module):
    """A convolution that gives fewer elements than it gets."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, stride=2)

    def forward(self, x):
        return self.conv(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bert_may_be_padded_with_the_mask_that_it_takes(dtype):
    model = load_model(f"transformers:BertModel?{TEXT}&dtype={dtype}", batch=2, seq_len=8)
    for weight in model.module.parameters():  # the usual small ones let rounding vanish in the norms
        weight.data.mul_(20 if weight.dim() > 1 else 1)
    axes = {0: "batch", 1: "seq"}
    model = load_model(model.module, inputs={"input_ids": model.kwargs["input_ids"]})
    family = checked(model, {"input_ids": axes}, seq=range(4, 33), batch=range(1, 5))
    assert family.unpaddable == {}
    assert family.masks == ("attention_mask",)


@pytest.mark.parametrize(
    ("module", "op"),
    [(Attention(), "scaled_dot_product_attention"), (Mean(), "mean"), (Normed(), "_native_batch_norm_legit")],
)
def test_dimension_that_an_op_mixes_is_refused_with_the_op(module, op):
    family = of_module(module.bfloat16(), torch.randn(2, 8, 4, dtype=torch.bfloat16))
    assert f"op '{op}' mixes elements along it" in family.unpaddable["seq"]
    assert "test_padding.py" in family.unpaddable["seq"]


@pytest.mark.parametrize("module", [Causal(), Sum(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
def test_dimension_that_padding_does_not_change_may_be_padded(module):
    name = "input" if isinstance(module, nn.Sequential) else "x"
    model = load_model(module.eval(), inputs=(torch.randn(2, 8, 4),))
    assert checked(model, {name: {1: "seq"}}, seq=range(2, 17)).unpaddable == {}


def test_output_that_is_shorter_than_the_input_cannot_be_cut_back():
    family = of_module(Strided(), torch.randn(2, 4, 8), axis=2, seq=range(4, 17))
    assert "axis 2 of output 'conv1d' is not as long" in family.unpaddable["seq"]


def test_one_size_needs_no_padding():
    assert of_module(Mean(), torch.randn(2, 8, 4), seq=(8,)).unpaddable == {}


class Shifted(nn.Module):
    """The element before each one."""

    def forward(self, x):
        return x - nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class Centred(nn.Module):
    """The elements without their mean."""

    def forward(self, x):
        return x - x.mean(1, keepdim=True)


PARTS = [
    *(Attention(), Causal(), Shifted(), Centred(), Function(lambda x: x.flip(1)), Function(lambda x: x.cumsum(1))),
    *(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), Function(lambda x: x + x.shape[1])),
]


@given(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=4), st.lists(st.integers(2, 15), min_size=3, max_size=3), st.randoms()
)
@settings(max_examples=6, deadline=None, derandomize=True)
def test_random_model_is_padded_exactly_where_its_own_answers_stay(parts, sizes, random):
    module = nn.Sequential(*parts).eval()
    family = checked(load_model(module, inputs=(torch.randn(2, 8, 4),)), {"input": {1: "seq"}}, seq=range(2, 17))
    torch.manual_seed(random.randrange(99))
    changes = False
    for size in sizes:
        x = torch.randn(2, size, 4)
        with torch.inference_mode():
            own, padded = module(x), module(pad(x, (2, 16, 4)))
        changes |= difference(padded[:, :size], own)[1] > TOLERANCE
        assert torch.equal(family.at({"seq": size}).run(x), own)
        if not family.unpaddable:
            assert difference(family.variants[0].run(pad(x, (2, 16, 4)))[:, :size], own)[1] < TOLERANCE
    assert changes == bool(family.unpaddable)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=3), st.sampled_from([torch.float32, torch.int64]))
@settings(max_examples=30)
def test_cut_undoes_pad(axes, dtype):
    tensor = torch.ones([size for size, _ in axes], dtype=dtype)
    padded = pad(tensor, [size + more for size, more in axes])
    names = {axis: str(axis) for axis in range(len(axes))}
    assert torch.equal(cut(padded, names, {str(axis): size for axis, (size, _) in enumerate(axes)}), tensor)
    assert padded.sum() == tensor.sum()
