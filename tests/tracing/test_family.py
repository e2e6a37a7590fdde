import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.compat.torchparts import FakeTensor
from autosplit.errors import TraceError, UsageError
from autosplit.tracing.family import trace_family
from autosplit.tracing.loading import load_model

aten = torch.ops.aten

BERT = "transformers:BertModel?hidden_size=32&num_hidden_layers=1&num_attention_heads=2&intermediate_size=64&vocab_size=100"


class Function(nn.Module):
    """A module from a function of one or two tensors."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, y=None):
        return self.function(x) if y is None else self.function(x, y)


class Branch(nn.Module):
    """Scales long inputs only."""

    def forward(self, x):
        if x.shape[1] > 10:
            x = x * 2
        return x.relu()


def family_of(module, inputs, shapes, **sizes):
    return trace_family(load_model(module.eval(), inputs=inputs), shapes, sizes)


@pytest.fixture(scope="module")
def bert():
    model = load_model(BERT, batch=2, seq_len=16)
    axes = {0: "batch", 1: "seq"}
    shapes = {"input_ids": axes, "attention_mask": axes}
    return model, trace_family(model, shapes, {"batch": range(1, 5), "seq": range(1, 33)})


def test_variants_equal_the_module_bit_for_bit_and_share_ops_and_weights(bert):
    model, family = bert
    found = family.only([{"batch": batch, "seq": seq} for batch in (1, 3) for seq in (1, 7, 32)])
    ops = [(op.name, op.operator, op.weights) for op in found.variants[0].graph.ops]
    weights = {name: tensor.data_ptr() for name, tensor in found.variants[0].program.state_dict().items()}
    assert len(found.variants) == 7
    assert found.sizes[0] == {"batch": 4, "seq": 32}
    assert found.variants[0].module_error.absolute == 0
    for variant, sizes in zip(found.variants, found.sizes, strict=True):
        assert [(op.name, op.operator, op.weights) for op in variant.graph.ops] == ops
        assert {name: tensor.data_ptr() for name, tensor in variant.program.state_dict().items()} == weights
        ids = torch.randint(1, 99, (sizes["batch"], sizes["seq"]))
        mask = (torch.rand(ids.shape) > 0.3).long()
        with torch.inference_mode():
            own = model.module(input_ids=ids, attention_mask=mask)
        ours = variant.run(input_ids=ids, attention_mask=mask)
        assert torch.equal(ours.last_hidden_state, own.last_hidden_state)


class Laid(nn.Module):
    """Values that begin inside others, are expanded, or lie channels last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        first, *_, last = self.conv(x).unbind(0)
        return first[1:, 2:], last.transpose(0, 1)[1], first.sum(0, keepdim=True).expand(3, -1, -1)


class Products(TorchDispatchMode):
    """Counts the layers and convolutions of real tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_product = func.overloadpacket in (aten.linear, aten.addmm, aten.conv2d, aten.convolution)
        self.count += is_product and not any(isinstance(value, FakeTensor) for value in args)
        return func(*args, **(kwargs or {}))


def test_further_size_needs_no_pass_and_has_the_layouts_of_one(bert):
    image = torch.randn(2, 3, 8, 8)
    laid = family_of(Laid(), (image,), {"x": {2: "rows"}}, rows=range(4, 17))
    for family, at in (bert[1], {"batch": 2, "seq": 9}), (laid, {"rows": 7}):
        with Products() as made:
            found = family.at(at)
            assert (family.at(at) is found, made.count) == (True, 0)
            computed = family.make(at, 1)
        assert made.count > 0
        assert (found.module_error, computed.module_error.absolute) == (None, 0.0)
        assert found.specs == computed.specs
        assert found.graph.hash == computed.graph.hash


class Alone(nn.Module):
    """Doubles a single row of several elements, which no guard of an export tells from two rows."""

    def forward(self, x):
        return x * 2 if x.shape[0] == 1 and x.shape[1] > 1 else x * 1


def test_model_that_does_something_else_at_a_size_of_1_is_refused():
    sizes = {"rows": range(1, 5), "length": range(1, 9)}
    with pytest.raises(TraceError, match="computes something else than the model"):
        family_of(Alone(), (torch.randn(2, 4),), {"x": {0: "rows", 1: "length"}}, **sizes)


def test_dimensions_of_inputs_and_outputs(bert):
    _, family = bert
    both = {0: "batch", 1: "seq"}
    assert family.dims == {"input_ids": both, "attention_mask": both}
    assert list(family.out_dims.values()) == [both, {0: "batch"}]


def test_sizes_of_a_request(bert):
    _, family = bert
    ids = torch.zeros(2, 7, dtype=torch.int64)
    assert family.sizes_of([ids, ids]) == {"batch": 2, "seq": 7}
    with pytest.raises(UsageError, match="'seq' is 7 in 'input_ids' axis 1 and 6 in 'attention_mask' axis 1"):
        family.sizes_of([ids, ids[:, :6]])
    with pytest.raises(UsageError, match=r"2 faults(.|\n)*empty(.|\n)*--seq-len 1..33"):
        family.sizes_of([torch.zeros(0, 33), torch.zeros(0, 33)])
    with pytest.raises(UsageError, match=r"--batch 1..5"):
        family.at({"batch": 5, "seq": 1})


def test_attention_mask_that_the_model_takes_is_filled_in():
    model = load_model(load_model(BERT).module, inputs={"input_ids": torch.ones(1, 8, dtype=torch.int64)})
    family = trace_family(model, {"input_ids": {1: "seq"}}, {"seq": (4, 8)})
    assert family.masks == ("attention_mask",)
    assert family.dims["attention_mask"] == {1: "seq"}


def test_exported_program_keeps_its_dynamic_dimensions():
    rows = torch.export.Dim("rows", min=1, max=8)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    program = torch.export.export(net, (torch.randn(3, 4),), dynamic_shapes=({0: rows},))
    family = trace_family(load_model(program), {"input": {0: "batch"}}, {"batch": range(1, 9)})
    x = torch.randn(5, 4)
    assert torch.equal(family.at({"batch": 5}).run(x), net(x))


def test_sizes_that_are_expressions_of_the_dimension():
    module = Function(lambda x: x[:, 1:].reshape(x.shape[0], -1, 2).flip(1) * x.shape[1])
    family = family_of(module, (torch.randn(1, 9),), {"x": {1: "seq"}}, seq=range(3, 16, 2))
    assert family.at({"seq": 7}).graph.values[family.variants[0].graph.outputs[0]].shape == (1, 3, 2)
    assert family.out_dims[family.variants[0].graph.outputs[0]] == {1: ""}


def test_dimension_that_the_model_specialises_on_is_named_with_its_line():
    with pytest.raises(TraceError, match=r"'seq' 64 and 4.*op 'mul' .*test_family.py:\d+: .*x \* 2"):
        family_of(Branch(), (torch.randn(1, 16),), {"x": {1: "seq"}}, seq=range(4, 65))


def test_dimension_that_a_weight_fixes_is_named_with_its_line():
    positions = torch.ones(1, 12, 4)
    with pytest.raises(TraceError, match=r"does not compute at other sizes \('seq' 12 and 4\).*test_family.py:\d+: .*positions"):
        family_of(Function(lambda x: x + positions), (torch.randn(2, 12, 4),), {"x": {1: "seq"}}, seq=range(4, 13))
    with pytest.raises(TraceError, match=r"takes 'seq' 12, and not 16: .*test_family.py:\d+: .*positions"):
        family_of(Function(lambda x: x + positions), (torch.randn(2, 12, 4),), {"x": {1: "seq"}}, seq=range(4, 17))


def test_model_without_a_symbolic_export_is_traced_for_each_size():
    chunks = Function(lambda x: sum(x.shape[1] % 4 == 0 and part for part in x.reshape(x.shape[0], 4, -1).unbind(1)))
    family = family_of(chunks, (torch.randn(1, 16),), {"x": {1: "seq"}}, seq=(4, 8, 12))
    assert [len(variant.graph.ops) for variant in family.only([{"seq": 8}]).variants] == [len(family.variants[0].graph.ops)] * 2
    with pytest.raises(TraceError, match=r"does not compute at 'seq' 10 \(of 4 sizes that were tried\): .*, such as 4,8,12"):
        family_of(chunks, (torch.randn(1, 16),), {"x": {1: "seq"}}, seq=(4, 8, 10, 12))
    with pytest.raises(TraceError, match=r"'seq' 5, 6, 7, .* \(of 16 sizes that were tried\): .*, such as 4,"):
        family_of(chunks, (torch.randn(1, 16),), {"x": {1: "seq"}}, seq=range(4, 65))
    seen = set()
    told = Function(lambda x: seen.add(int(x.shape[1])) or chunks(x))
    family_of(told, (torch.randn(1, 16),), {"x": {1: "seq"}}, seq=range(4, 129, 4))
    assert seen == {4, 8, 68, 124, 128}


@pytest.mark.parametrize(
    ("inputs", "shapes", "sizes", "fault"),
    [
        ((torch.ones(1, 4),), {"z": {1: "seq"}}, ["seq"], "takes no tensor 'z'"),
        ((torch.ones(1, 4),), {"x": {5: "seq"}}, ["seq"], "no elements along axis 5"),
        ((torch.ones(1, 4),), {"x": {1: "seq"}}, [], "'seq' has no sizes"),
        ((torch.ones(1, 4),), {"x": {1: "seq"}}, ["seq", "rows"], "sizes of 'rows' are given"),
        ((torch.ones(1, 4), torch.ones(1, 5)), {"x": {1: "seq"}, "y": {1: "seq"}}, ["seq"], "'seq' is 4 in 'x' and 5 in 'y'"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(inputs, shapes, sizes, fault):
    with pytest.raises(UsageError, match=fault):
        family_of(Function(torch.add), inputs, shapes, **dict.fromkeys(sizes, range(2, 9)))


def test_two_names_of_one_dimension_are_refused():
    with pytest.raises(TraceError, match="to be equal; give both axes one name"):
        family_of(
            Function(torch.add),
            (torch.ones(1, 4), torch.ones(1, 4)),
            {"x": {1: "seq"}, "y": {1: "other"}},
            seq=range(2, 9),
            other=range(2, 9),
        )
