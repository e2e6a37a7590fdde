import math

import pytest
import torch
from torch import nn

from autosplit.compat.torchparts import pytree
from autosplit.errors import ModelError, TraceError, UsageError
from autosplit.examples.mlp import mlp
from autosplit.examples.tied import tied
from autosplit.examples.unet import unet
from autosplit.tracing.capturing import WITHOUT_CACHE, trace
from autosplit.tracing.loading import load_model
from autosplit.values.graph import Graph

TEXT = "hidden_size=32&num_hidden_layers=1&num_attention_heads=2&intermediate_size=64&vocab_size=100"


class Net(nn.Module):
    """A module from a function, which gets the module as ``net``."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            if isinstance(child, torch.Tensor):
                self.register_buffer(name, child)
            else:
                setattr(self, name, child)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def traced(module, *inputs, **kwargs):
    return trace(load_model(module.eval(), inputs=kwargs or inputs))


def assert_same(ours, own):
    """Equal bit for bit, in the same containers."""
    (our_leaves, our_spec), (own_leaves, own_spec) = pytree.tree_flatten(ours), pytree.tree_flatten(own)
    assert our_spec == own_spec
    for mine, theirs in zip(our_leaves, own_leaves, strict=True):
        assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs


def assert_equals_eager(result, module, *inputs, **kwargs):
    with torch.inference_mode():
        assert_same(result.run(*inputs, **kwargs), module(*inputs, **kwargs))


@pytest.mark.parametrize(
    "spec",
    [
        "transformers:ResNetForImageClassification?depths=1,1&hidden_sizes=8,16&embedding_size=8&image_size=32",
        f"transformers:BertModel?{TEXT}",
        f"transformers:LlamaModel?{TEXT}",
        "transformers:GPT2Model?n_embd=32&n_layer=1&n_head=2&vocab_size=100",
        "transformers:WhisperModel?d_model=32&encoder_layers=1&decoder_layers=1&encoder_attention_heads=2"
        "&decoder_attention_heads=2&encoder_ffn_dim=32&decoder_ffn_dim=32&max_source_positions=50",
    ],
)
def test_transformers_model_equals_eager_and_keeps_its_output_class(spec):
    model = load_model(spec, batch=2, seq_len=None if "ResNet" in spec else 16)
    result = trace(model)
    assert_equals_eager(result, model.module, *model.args, **model.kwargs)
    assert type(result.run(**model.kwargs)).__module__.startswith("transformers.")
    assert Graph.from_dict(result.graph.to_dict()).hash == result.graph.hash


def test_graph_of_a_small_net():
    module, inputs = mlp(batch=2, width=8, depth=2)
    graph = traced(module, *inputs).graph
    assert [(op.name, op.operator, op.module) for op in graph.ops] == [
        ("linear", "aten.linear.default", "0"),
        ("relu", "aten.relu.default", "1"),
        ("linear_1", "aten.linear.default", "2"),
    ]
    first, relu, last = graph.ops
    assert first.weights == ("0.weight", "0.bias")
    assert first.signature == "aten.linear.default(float32[2,8], weight float32[8,8], weight float32[8])"
    assert (first.signature, relu.outputs, last.inputs) == (last.signature, ("relu",), ("relu",))
    assert graph.values["relu"].num_bytes == 2 * 8 * 4
    assert graph.weights["2.weight"].num_bytes == 8 * 8 * 4
    assert (graph.inputs, graph.outputs) == (("input_1",), ("linear_1",))


def test_program_agrees_with_graph():
    module, inputs = unet(size=16, channels=4)
    result = traced(module, *inputs)
    nodes = {node.name: node for node in result.program.graph.nodes}
    assert tuple(name for name, node in nodes.items() if node.op == "placeholder") == result.graph.inputs
    assert all(nodes[op.name].op == "call_function" for op in result.graph.ops)
    assert {node.target for node in nodes.values() if node.op == "get_attr"} == set(result.graph.weights)
    assert set(result.specs) == set(result.graph.values)


def test_graph_is_functional():
    module, inputs = unet(size=16, channels=4)
    result = traced(module, *inputs)
    assert "aten.relu_.default" not in {op.operator for op in result.graph.ops}
    assert_equals_eager(result, module, *inputs)


def test_view_that_is_written_in_place_becomes_functional():
    def forward(net, x):
        y = net.linear(x)
        y[:, :2].mul_(2)
        return y + 1

    module = Net(forward, linear=nn.Linear(4, 4))
    x = torch.randn(2, 4)
    assert_equals_eager(traced(module, x), module, x)


def test_tied_weight_appears_once():
    module, inputs = tied(vocabulary=30, width=4)
    graph = traced(module, *inputs).graph
    assert graph.weight_bytes == sum(p.nbytes for p in module.parameters())
    assert [op.operator for op in graph.ops if "embedding.weight" in op.weights] == [
        "aten.embedding.default",
        "aten.linear.default",
    ]


def test_tuples_belong_to_the_op_that_makes_them():
    module = Net(lambda net, x: (x.split(2, dim=1)[2] + 1, torch.topk(x, 2)[1], net.lstm(x)[0]), lstm=nn.LSTM(8, 4))
    x = torch.randn(3, 8)
    result = traced(module, x)
    outputs = {op.operator: op.outputs for op in result.graph.ops}
    assert outputs["aten.split.Tensor"] == ("getitem_2",)
    assert len(outputs["aten.topk.default"]) == 1
    assert not any("getitem" in op.name for op in result.graph.ops)
    assert_equals_eager(result, module, x)


def test_unusual_inputs_and_outputs():
    """Inputs and weights handed back, one value twice, constants, unused inputs, a mask that is dropped."""

    def forward(net, x, unused, *, factor=1, flag=None):
        y = net.linear(x) * factor + torch.tensor([1.0, 2.0])
        return {"x": x, "y": [y, y], "w": net.linear.weight, "b": net.buffer, "k": factor, "none": flag, "t": torch.tensor(2.0)}

    module = Net(forward, linear=nn.Linear(2, 2), buffer=torch.arange(3)).eval()
    x, unused = torch.randn(3, 2), torch.randn(5)
    result = trace(load_model(torch.export.export(module, (x, unused), {"factor": 3}, strict=False)))
    with torch.inference_mode():
        assert_same(result.run(x, unused, factor=3), module(x, unused, factor=3))
    assert len(result.graph.inputs) == 2
    assert result.graph.consumers[result.graph.inputs[1]] == ()
    assert set(result.graph.outputs).isdisjoint(result.graph.inputs)
    assert result.graph.outputs == tuple(dict.fromkeys(result.graph.outputs))
    with pytest.raises(UsageError, match=rf"was 3 in the trace and is 4 now; '{result.graph.inputs[0]}' is float32\[1\], and"):
        result.run(x[:1, 0], unused, factor=4)


def test_a_model_that_returns_its_input():
    x = torch.randn(3)
    result = traced(Net(lambda net, x: x), x)
    assert [op.operator for op in result.graph.ops] == ["aten.clone.default"]
    assert torch.equal(result.run(x), x)
    assert result.run(x).data_ptr() != x.data_ptr()


def test_inputs_that_do_not_fit_are_refused():
    module, inputs = mlp(batch=2, width=8, depth=2)
    result = traced(module, *inputs)
    with pytest.raises(UsageError, match=r"is float32\[3,8\], and float32\[2,8\] is expected.*trace it again"):
        result.run(torch.zeros(3, 8))
    with pytest.raises(UsageError, match="is float64"):
        result.run(torch.zeros(2, 8, dtype=torch.float64))
    with pytest.raises(UsageError, match=rf"'{result.graph.inputs[0]}' is int, and a dense float32\[2,8\] is expected"):
        result.run(3)
    with pytest.raises(UsageError, match=r"which takes \(input\): missing a required argument: 'input'"):
        result.run(y=inputs[0])


def test_keyword_order_and_layout_of_a_request_do_not_matter():
    module = Net(lambda net, a, b: a.t() @ b).eval()
    a, b = torch.randn(5, 6).t(), torch.randn(6, 5)
    result = traced(module, a=a, b=b)
    expected = result.run(a=a, b=b)
    assert result.specs["a"].stride == (1, 6)
    assert torch.equal(result.run(b=b, a=a.contiguous()), expected)
    shifted = torch.empty(31)[1:].view(6, 5).copy_(b)
    assert torch.equal(result.run(a=a, b=shifted), expected)


def test_weights_are_aligned():
    """A weight mapped from a file may start anywhere; a stage's copy of it starts on a 64-byte boundary."""
    linear = nn.Linear(64, 64)
    linear.weight = nn.Parameter(torch.randn(64 * 64 + 1)[1:].view(64, 64))
    result = traced(linear, torch.randn(1, 64))
    assert result.program.weight.data_ptr() % 64 == 0
    assert torch.equal(result.program.weight, linear.weight)


def test_a_weight_may_be_called_like_an_attribute_of_a_graph_module():
    module = Net(lambda net, x: net.meta(x) + net.shape_env, meta=nn.Linear(4, 4), shape_env=torch.randn(4))
    x = torch.randn(2, 4)
    result = traced(module, x)
    assert_equals_eager(result, module, x)
    assert set(result.graph.weights) == {"model.meta.weight", "model.meta.bias", "model.shape_env"}


@pytest.mark.parametrize("shapes", [None, (({0: torch.export.Dim("items", max=8)},),)], ids=["static", "dynamic"])
def test_so_may_a_weight_of_an_exported_program_which_is_left_as_it_is(shapes):
    module = Net(lambda net, *x: net.meta(*x), meta=nn.Linear(4, 4))
    x = torch.randn(2, 4)
    exported = torch.export.export(module, (x,), dynamic_shapes=shapes)
    result = trace(load_model(exported, inputs=(x,)))
    assert_equals_eager(result, module, x)
    assert set(result.graph.weights) == {"model.meta.weight", "model.meta.bias"}
    assert set(exported.state_dict) == {"meta.weight", "meta.bias"}


def test_weights_whose_names_would_become_one_stay_apart():
    names = ["a/b", "a_b", "a b"]

    def forward(net, x):
        return sum((i + 1) * net.layers[name](x) for i, name in enumerate(names)) + getattr(net, "layers/x") + net.layers_x(x)

    module = Net(
        forward,
        layers=nn.ModuleDict({name: nn.Linear(4, 4) for name in names}),
        layers_x=nn.Linear(4, 4),
        **{"layers/x": torch.randn(4)},
    )
    x = torch.randn(2, 4)
    result = traced(module, x)
    assert_equals_eager(result, module, x)
    assert {"layers.a_b.weight", "model.layers.a_b.weight", "model1.layers.a_b.weight"} < set(result.graph.weights)
    assert len(result.graph.weights) == 9


def test_clones_that_change_nothing_are_dropped():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU())
    assert [op.name for op in traced(net, torch.randn(2, 4)).graph.ops] == ["linear", "relu"]


def test_changed_buffer_is_refused_and_left_alone():
    def forward(net, x):
        net.count.add_(1)
        return x + net.count

    module = Net(forward, count=torch.zeros(1))
    with pytest.raises(TraceError, match=r"changes buffer 'count' \(.*test_capturing.py:\d+: .*; return the new value"):
        traced(module, torch.zeros(2))
    assert module.count.item() == 0


def test_changed_input_is_refused():
    with pytest.raises(TraceError, match=r"changes input 'args_0'.*copy it first"):
        traced(Net(lambda net, x: x.add_(1)), torch.zeros(2))


def test_batch_norm_in_training_mode_is_refused():
    net = nn.Sequential(nn.BatchNorm1d(4))
    graph_module = torch.fx.symbolic_trace(net.train())
    with pytest.raises(TraceError, match=r"(?s)changes buffer '0.running_mean'.*call eval\(\)"):
        trace(load_model(graph_module, inputs=torch.randn(3, 4)))


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: x + torch.rand(2),
        lambda net, x: nn.functional.dropout(x, 0.5, training=True),
        lambda net, x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1),
    ],
)
def test_random_numbers_are_refused(function):
    with pytest.raises(TraceError, match=r"draws random numbers; call eval\(\).*test_capturing.py:\d+"):
        traced(Net(function), torch.ones(2, 2))


def test_branch_on_data_is_refused_with_the_users_line():
    def forward(net, x):
        if x.sum() > 0:
            return x + 1
        return x - 1

    line = forward.__code__.co_firstlineno + 1
    with pytest.raises(TraceError, match=rf"the branch or loop at .*test_capturing.py:{line}: if x.sum\(\) > 0:.*torch.where"):
        traced(Net(forward), torch.ones(2))


def test_number_read_out_of_a_tensor_is_refused():
    with pytest.raises(TraceError, match=r"reads a number out of a tensor.*test_capturing.py"):
        traced(Net(lambda net, x: x * x.sum().item()), torch.ones(2))


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: (x + 1).nonzero(),
        lambda net, x: (x + 1)[x > 0].sum(),
        lambda net, x: x.repeat_interleave(x[0].long(), 1) * 2,
    ],
)
def test_sizes_that_depend_on_values_are_refused(function):
    with pytest.raises(TraceError, match=r"(?s)size depends on values.*torch.where.*test_capturing.py:\d+"):
        traced(Net(function), torch.ones(2, 2))


def test_a_size_that_only_weights_tell_is_fixed():
    net = Net(lambda net, x: x[:, net.kept] + 1, kept=torch.tensor([True, False, True]))
    result = traced(net, torch.randn(2, 3))
    assert result.run(torch.randn(2, 3)).shape == (2, 2)


def test_weights_and_values_that_are_not_dense_are_refused():
    with pytest.raises(TraceError, match=r"its weight 'table' is torch.sparse_coo on cpu.*call its to_dense\(\) first"):
        traced(Net(lambda net, x: torch.sparse.mm(net.table, x), table=torch.eye(2).to_sparse()), torch.ones(2, 2))
    with pytest.raises(TraceError, match=r"'to_sparse' .* gives a tensor that is not dense"):
        traced(Net(lambda net, x: x.to_sparse().to_dense() + 1), torch.ones(2, 2))


def test_reading_memory_by_its_place_is_refused():
    with pytest.raises(TraceError, match=r"'as_strided' .* reads memory by its place.*test_capturing.py:\d+"):
        traced(Net(lambda net, x: (x + 1).as_strided((3, 4), (4, 1), 1)), torch.ones(2, 8))


def change_a_view_of_strides(net, x):
    y = x.clone()
    y[0].as_strided((4,), (1,), 4).mul_(2)
    return y + 1


def change_overlapping_windows(net, x):
    windows = (x + 1).unfold(1, 2, 1)
    windows.add_(1)
    return windows


@pytest.mark.parametrize("function", [change_a_view_of_strides, change_overlapping_windows])
def test_a_write_through_shared_elements_is_refused_with_its_line(function):
    """The reason was cut in mid-sentence, and named no line."""
    said = r"test_capturing.py:\d+: .* writes through as_strided, or through a view whose elements share memory\. Write to a copy"
    with pytest.raises(TraceError, match=said):
        traced(Net(function), torch.ones(4, 4))


def pack_and_run(net, x, lengths):
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(net.rnn(packed)[0], batch_first=True)[0]


def test_a_packed_sequence_is_refused_with_the_way_out():
    net = Net(pack_and_run, rnn=nn.GRU(4, 4, batch_first=True))
    said = r"the recurrent layer at .*test_capturing.py:\d+: .*takes a packed sequence.*Give it the padded tensor"
    with pytest.raises(TraceError, match=said):
        traced(net, torch.zeros(2, 3, 4), torch.tensor([3, 2]))


def test_a_conjugated_or_negated_weight_is_stored_as_its_values():
    table = torch.randn(2, dtype=torch.complex64)
    result = traced(Net(lambda net, x: x * net.one + net.other, one=table.conj(), other=table.conj().imag), torch.ones(2))
    assert not any(weight.is_conj() or weight.is_neg() for weight in result.program.state_dict().values())
    assert torch.equal(result.run(torch.ones(2)), table.conj() + table.conj().imag)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parts_compiled_by_jit_are_refused_by_name():
    net = Net(lambda net, x: net.part(x) + 1, part=torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(TraceError, match=r"module 'part' \(RecursiveScriptModule\) is compiled by torch.jit.*as it was before"):
        traced(net, torch.ones(2, 2))


def test_a_buffer_that_is_assigned_to_itself_is_not_changed():
    def forward(net, x):
        net.table = net.table.to(x.device)
        return x + net.table

    net = Net(forward, table=torch.ones(2))
    result = traced(net, torch.randn(2, 2))
    assert result.graph.outputs == ("add",)
    assert_equals_eager(result, net, torch.randn(2, 2))


@pytest.mark.parametrize("num_draws", [1, 3])
def test_inputs_that_the_model_cannot_compute_are_an_error_of_the_trace(num_draws):
    net = Net(lambda net, x: net.table(x), table=nn.Embedding(4, 2)).eval()
    with pytest.raises(TraceError, match=r"'Net' fails on its example inputs: IndexError.*: index out of range"):
        trace(load_model(net, inputs=torch.tensor([9])), num_draws=num_draws)


def test_arrays_and_models_that_return_no_tensor_are_told_with_the_way_out():
    with pytest.raises(TraceError, match=r"'Net' cannot be traced: it returns no tensor. Return what it computes"):
        traced(Net(lambda net, x: None).eval(), torch.ones(2))
    with pytest.raises(ModelError, match=r"input\[0\] is ndarray, and a dense tensor is expected; torch.from_numpy makes one"):
        load_model(nn.Linear(2, 2).eval(), inputs=(torch.ones(2).numpy(),))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("transformers:ViTModel?hidden_size=32&num_hidden_layers=1&image_size=32&patch_size=64", "RuntimeError at .*Kernel size"),
        (f"transformers:RobertaModel?{TEXT}&max_position_embeddings=16", "RuntimeError at .*: index 16 is out of"),
    ],
)
def test_inputs_made_up_for_a_model_that_fails_on_them_are_told_with_the_way_out(spec, reason):
    with pytest.raises(TraceError, match=rf"fails on the inputs made up for it: {reason}.*give it as 'file.py:function'"):
        trace(load_model(spec))


def test_a_mask_that_only_a_trace_lacks_can_be_given():
    spec = "transformers:LongT5Model?num_layers=1&num_decoder_layers=1&d_model=32&d_ff=64&d_kv=16&num_heads=2&vocab_size=256"
    with pytest.raises(TraceError, match=r"traced with the inputs made up for it: .*, such as an attention_mask\. Write a"):
        trace(load_model(spec))
    ids = torch.full((1, 16), 3)
    trace(load_model(spec, inputs={"input_ids": ids, "decoder_input_ids": ids, "attention_mask": torch.ones_like(ids)}))


def test_too_many_inputs_are_told_without_a_line_of_python_itself():
    with pytest.raises(TraceError, match="traced: TypeError: too many positional arguments"):
        traced(nn.Sequential(nn.Linear(2, 2)), torch.ones(2, 2), torch.ones(2, 2))


def test_cache_object_is_refused_with_the_way_out():
    spec = "transformers:GPT2Model?n_embd=32&n_layer=1&n_head=2&vocab_size=100&use_cache=true"
    with pytest.raises(TraceError, match=r"DynamicCache.*\?use_cache=false"):
        trace(load_model(spec, seq_len=8))


def test_a_module_that_returns_a_cache_is_traced_without_it():
    module = load_model("transformers:GPT2Model?n_embd=32&n_layer=1&n_head=2&vocab_size=100&use_cache=true", seq_len=8).module
    found = trace(load_model(module, inputs={"input_ids": torch.arange(8)[None]}))
    assert found.notes == (WITHOUT_CACHE,) and module.config.use_cache and found.module_error.absolute == 0
    assert list(found.run(input_ids=torch.zeros(1, 8, dtype=torch.int64))) == ["last_hidden_state"]


def test_control_flow_in_the_graph_is_refused():
    def forward(net, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    with pytest.raises(TraceError, match=r"control flow.*\(.*test_capturing.py:\d+"):
        traced(Net(forward), torch.ones(2))


def test_error_in_the_model_names_the_users_line():
    with pytest.raises(TraceError, match=r"test_capturing.py:\d+: .*lambda"):
        traced(Net(lambda net, x: net.linear(x), linear=nn.Linear(3, 3)), torch.ones(2))


def test_model_that_depends_on_python_state_is_caught():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            Counting.calls += 1
            return x * Counting.calls

    with pytest.raises(TraceError, match=r"gives other outputs when it is called again .*: output 0 is off by .*keeps state"):
        traced(Counting(), torch.ones(2))


def test_one_tensor_given_twice_is_two_inputs():
    module, x = Net(lambda net, a, b: a + 2 * b), torch.ones(2, 3)
    result = traced(module, x, x)
    assert len(result.graph.inputs) == 2
    assert_equals_eager(result, module, torch.ones(2, 3), torch.zeros(2, 3))


def first_input_kept(net, x):
    net.kept = 2 * x if net.kept is None else net.kept
    return x + net.kept


def test_values_of_the_example_inputs_that_become_constants_are_caught():
    net = Net(first_input_kept)
    net.kept = None
    with pytest.raises(TraceError, match=r"on other inputs of the same shapes .* else than the model: output 0 is off by"):
        traced(net, torch.ones(3))
    assert net.kept is None


def test_python_values_among_the_outputs_are_compared():
    def forward(net, x):
        net.calls += 1
        return x, net.calls

    net = Net(forward)
    net.calls = 0
    with pytest.raises(TraceError, match=r"called again .*: output 1 is 2 in place of 1"):
        traced(net, torch.ones(2))
    assert net.calls == 0


def test_outputs_that_are_views_of_inputs_are_traced():
    module = Net(lambda net, x: (x, x.view(-1), x.t()))
    assert_equals_eager(traced(module, torch.randn(2, 3)), module, torch.randn(2, 3))


def test_an_encoder_with_a_padding_mask_computes_what_it_does_without_the_fast_path():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    padded = torch.tensor([[False, False, False], [False, True, True]])
    inputs = {"src": torch.randn(2, 3, 16), "src_key_padding_mask": padded}
    result = traced(encoder, **inputs)
    [note] = result.notes
    assert "set_fastpath_enabled(False)" in note
    assert result.module_error.absolute == 0.0
    with torch.inference_mode():
        assert torch.allclose(result.run(**inputs)[~padded], encoder(**inputs)[~padded], atol=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_error_against_the_module_is_kept():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    error = traced(layer, torch.randn(2, 3, 16)).module_error
    assert 0 < error.relative < 1e-5  # torch's fast path is another kernel
    assert traced(nn.Linear(2, 2), torch.ones(1, 2)).module_error.absolute == 0.0
    assert trace(load_model(nn.Linear(2, 2).eval(), inputs=torch.ones(1, 2)), num_draws=0).module_error is None


def test_a_dynamic_dimension_is_fixed_with_a_note_and_follows_the_batch():
    module, (x,) = mlp(batch=2, width=8, depth=1)
    dynamic = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("items", max=64)},))
    result = trace(load_model(dynamic))
    assert result.notes[0].startswith("the exported program has dynamic dimensions")
    assert "dimension 0 of 'input' is fixed to 2" in result.notes[0]
    larger = trace(load_model(dynamic, batch=5))
    assert larger.example_inputs[0].shape == (5, 8)
    assert "is fixed to 5" in larger.notes[0]
    assert trace(load_model(torch.export.export(module, (x,)))).notes == ()


def test_masks_that_differ_while_a_model_is_traced_have_a_way_out():
    spec = f"transformers:Aimv2TextModel?{TEXT}"
    with pytest.raises(TraceError, match=r"off by .* give '\?attn_implementation=eager'"):
        trace(load_model(spec))
    trace(load_model(spec + "&attn_implementation=eager"))
    model = load_model(spec)
    model.module.set_attn_implementation("eager")
    trace(model)


class Turning(nn.Module):
    """Gives one answer while it is captured and recorded as a graph, and another one when it is called next."""

    def __init__(self, captured, called):
        super().__init__()
        self.answers = iter([captured])
        self.called = called

    def forward(self, x):
        return x + next(self.answers, self.called)


@pytest.mark.parametrize(
    ("captured", "called"),
    [
        ([1.0, -math.inf], [500.0, -math.inf]),
        ([1.0, math.nan], [500.0, math.nan]),
        ([1.0, -math.inf], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.nan]),
        ([1.0, math.inf], [1.0, -math.inf]),
        ([1, 2], [1, 3]),
        ([1.0], [1.0, 1.0]),
        ([1 + 2j], [1 - 2j]),
        ([1e-9], [0.0]),
    ],
)
def test_wrong_numbers_are_caught_beside_infinities_and_nans_too(captured, called):
    with pytest.raises(TraceError, match=r"computes something else than the model: '?output 0'? is "):
        traced(Turning(torch.tensor(captured), torch.tensor(called)), torch.zeros((), dtype=torch.tensor(captured).dtype))


@pytest.mark.parametrize("called", [[1.0, -math.inf, math.nan], [1.0005, -math.inf, math.nan]])
def test_infinities_and_nans_of_the_model_are_no_error(called):
    result = traced(Turning(torch.tensor([1.0, -math.inf, math.nan]), torch.tensor(called)), torch.zeros(3))
    assert torch.equal(result.run(torch.zeros(3)).nan_to_num(), torch.tensor([1.0, -math.inf, math.nan]).nan_to_num())


def test_failing_trace_prints_nothing(capfd):
    def forward(net, x):
        return x + 1 if x.sum() > 0 else x

    with pytest.raises(TraceError):
        traced(Net(forward), torch.ones(2))
    assert capfd.readouterr() == ("", "")


def test_exported_programs_static_dynamic_and_from_a_file(tmp_path):
    module, inputs = mlp(batch=2, width=8, depth=2)
    direct = traced(module, *inputs)
    exported = torch.export.export(module, inputs, strict=False)
    torch.export.save(exported, tmp_path / "net.pt2")
    dynamic = torch.export.export(module, inputs, strict=False, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    for model in (load_model(exported), load_model(tmp_path / "net.pt2", trust=True), load_model(dynamic)):
        result = trace(model)
        assert [op.signature for op in result.graph.ops] == [op.signature for op in direct.graph.ops]
        assert set(result.graph.weights) == set(direct.graph.weights)
        assert torch.equal(result.run(*inputs), direct.run(*inputs))


def test_fx_graph_module():
    module, inputs = mlp(batch=2, width=8, depth=2)
    result = trace(load_model(torch.fx.symbolic_trace(module), inputs=inputs))
    assert_equals_eager(result, module, *inputs)


def test_ctrl_c_that_comes_while_a_class_is_created_is_ctrl_c() -> None:
    def stopped(net, x):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise RuntimeError("Error calling __set_name__ on 'Field' instance") from interrupt

    with pytest.raises(KeyboardInterrupt):
        trace(load_model(Net(stopped).eval(), inputs=(torch.zeros(2),)))
