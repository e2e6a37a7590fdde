import importlib
import json
import math
import operator

import pytest
import torch
from torch import fx

from autosplit.errors import PlanError
from autosplit.tracing.programs import decode, encode, packages

ATEN = torch.ops.aten


def graph_with(target, *args, **kwargs):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(target, tuple(x if arg == "x" else arg for arg in args), kwargs),))
    return graph


GRAPHS = [
    graph_with(ATEN.clamp.default, "x", -math.inf, 0.1 + 0.2),
    graph_with(ATEN._to_copy.default, "x", dtype=torch.float64, device=torch.device("cpu"), layout=torch.strided),
    graph_with(ATEN.clone.default, "x", memory_format=torch.channels_last),
    graph_with(ATEN.sum.dim_IntList, "x", [0, -1], True),
    graph_with(ATEN.index.Tensor, "x", [None, 3]),
    graph_with(ATEN.gelu.default, "x", approximate="tanh"),
    graph_with(ATEN.mul.Scalar, "x", complex(1, -2)),
    graph_with(ATEN.full_like.default, "x", math.nan),
]


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: str(next(n.target for n in graph.nodes if n.op == "call_function")))
def test_json_and_back(graph):
    text = json.dumps(encode(graph), allow_nan=False)
    again = decode(json.loads(text))
    assert encode(again) == encode(graph)
    assert str(again) == str(graph)


UNKNOWN = "it is not known to check its arguments"


def node(**changes):
    return {"op": "call_function", "name": "y", "target": "aten.relu.default", "args": [{"node": "x"}], "kwargs": {}} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "os.system.default"}, "operator 'os.system.default' is not registered"),
        ({"target": "aten.relu"}, "operator 'aten.relu' is not registered"),
        ({"target": "load_library.__globals__.x"}, "is not registered"),
        ({"target": "aten.relu.__call__"}, "is not registered"),
        ({"target": "aten.from_file.default", "args": ["/etc/hostname", True, 4]}, UNKNOWN),
        ({"target": "aten.fill_.Scalar", "args": [{"node": "x"}, 7]}, "'aten.fill_.Scalar' is not allowed: it writes"),
        ({"target": "aten.relu.out", "kwargs": {"out": {"node": "x"}}}, "it writes to its arguments"),
        ({"target": "aten.save.default"}, "is not allowed"),
        ({"target": "aten.set.source_Storage"}, UNKNOWN),
        ({"target": "aten.item.default"}, "it returns something other than tensors"),
        ({"target": "_c10d_functional.broadcast.default"}, UNKNOWN),
        ({"target": "profiler._record_function_enter_new.default"}, "is not allowed"),
        ({"target": "aten._sparse_coo_tensor_unsafe.default"}, UNKNOWN),  # with _to_dense it wrote into other tensors
        ({"target": "aten._to_dense.default"}, UNKNOWN),
        ({"target": "aten.segment_reduce.default"}, UNKNOWN),  # it trusts lengths
        ({"target": "aten._fft_r2c.default"}, UNKNOWN),  # it trusts dimensions
        ({"target": "aten.repeat_interleave.Tensor"}, UNKNOWN),
        ({"target": "aten.as_strided.default"}, UNKNOWN),  # it reaches all that shares memory with its tensor
        ({"target": "aten.empty.memory_format"}, UNKNOWN),  # it shows memory that was used before
        ({"target": "aten._to_copy.default", "kwargs": {"dtype": -3}}, "'dtype' is -3, and a dtype, a layout or a device"),
        ({"target": "aten._to_copy.default", "kwargs": {"dtype": {"dtype": "quint8"}}}, "numbers are quantised or packed"),
        ({"target": "aten._to_copy.default", "kwargs": {"layout": {"layout": "sparse_coo"}}}, "only dense tensors are allowed"),
        ({"target": "aten._to_copy.default", "kwargs": {"device": {"device": "meta"}}}, "'device' is device 'meta'"),
        ({"target": "aten._to_copy.default", "kwargs": {"device": "meta"}}, "'device' is 'meta', and a dtype"),
        (
            {"target": "aten.reflection_pad1d.default", "args": [{"node": "x"}, [-(2**63), -(2**63)]]},
            "'padding' holds -9223372036",
        ),
        ({"target": "aten.batch_norm.default", "kwargs": {"training": True}}, "it writes to its statistics"),
        ({"op": "call_method", "target": "relu"}, "no nodes of kind 'call_method'"),
        ({"op": "call_module", "target": "relu"}, "no nodes of kind 'call_module'"),
        ({"op": "get_attr", "target": "w') or print('here", "args": []}, "weight name"),
        ({"op": "placeholder", "target": "x=print('here')", "args": []}, "not the name of a value"),
        ({"name": "y\nprint('here')"}, "not the name of a value"),
        ({"name": "x"}, "stands twice"),
        ({"kwargs": {"a=print('here'), b": 1}}, "not the name of a value"),
        ({"args": [{"node": "z"}]}, "cannot be read: KeyError: 'z'"),
        ({"args": [{"dtype": "load"}]}, "'load' is not a dtype"),
        ({"args": [{"python": "print()"}]}, "cannot be read"),
        ({"args": None}, "cannot be read"),
    ],
)
def test_hostile_and_broken_nodes_are_refused(changes, message):
    first = {"op": "placeholder", "name": "x", "target": "x", "args": [], "kwargs": {}}
    with pytest.raises(PlanError, match=message):
        decode([first, node(**changes)])


def test_strings_stay_strings():
    """Generated code quotes them: a string cannot break out of its argument."""
    graph = graph_with(ATEN.gelu.default, "x", approximate="tanh') or print('here")
    module = fx.GraphModule({}, decode(encode(graph)))
    with pytest.raises(RuntimeError, match="approximate"):
        module(torch.zeros(2))


def test_argument_without_json_form_is_refused():
    with pytest.raises(PlanError, match=r"op 'relu_default' .* an argument is object"):
        encode(graph_with(ATEN.relu.default, object()))


def test_an_operator_made_by_a_call_is_at_home_where_its_function_is():
    """The rule of its shape was taken, which torch itself registers then, and workers did not know the operator."""
    home = importlib.import_module("transformers.integrations.moe")
    graph = fx.Graph()
    graph.call_function(torch.ops.transformers.grouped_mm_fallback.default, tuple(graph.placeholder(name) for name in "abc"))
    assert packages(graph) == (home.__name__,)


def test_a_trusted_maker_may_call_every_operator():
    first = {"op": "placeholder", "name": "x", "target": "x", "args": [], "kwargs": {}}
    graph = decode([first, node(target="aten._fft_r2c.default", args=[{"node": "x"}, [0], 0, True])], trust=True)
    assert [n.target for n in graph.nodes][1:] == [ATEN._fft_r2c.default]


def test_operators_give_way_to_others_that_check_unless_the_maker_is_trusted():
    graph = fx.Graph()
    x, *parameters = (graph.placeholder(name) for name in "xwbmv")
    made = graph.call_function(ATEN._native_batch_norm_legit_no_training.default, (x, *parameters, 0.1, 1e-5))
    picked = graph.call_function(operator.getitem, (made, 0))
    graph.output((graph.call_function(ATEN.empty_like.default, (picked,)), picked))
    again = decode(encode(graph))
    assert [n.target for n in again.nodes if n.op == "call_function"] == [ATEN.batch_norm.default, ATEN.zeros_like.default]
    values = torch.randn(2, 3, 4), *torch.rand(4, 3)
    found, wanted = (fx.GraphModule({}, one)(*values)[1] for one in (again, decode(encode(graph), trust=True)))
    assert torch.equal(found, wanted)
    with pytest.raises(RuntimeError, match="weight should contain 3 elements not 2"):
        fx.GraphModule({}, again)(values[0], torch.ones(2), *values[2:])
