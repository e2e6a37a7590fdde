import pytest

from autosplit.backends.profiling import RuntimeNode
from autosplit.measuring.attribution import attribute, proportional, value_names, without_preempted
from autosplit.values.graph import Graph, Op, Value

OPERATORS = ["conv2d", "batch_norm", "relu", "linear", "layer_norm", "gelu", "linear"]


def model() -> Graph:
    """conv - batch_norm (a tuple of which one value is read) - relu - linear - layer_norm - gelu - linear."""
    names = ["conv2d", "getitem", "relu", "linear", "layer_norm", "gelu", "linear_1"]
    values = {name: Value(name, (1,), "float32", 4) for name in ["x", *names]}
    ops = [
        Op("batch_norm" if value == "getitem" else value, f"aten.{operator}.default", "", (source,), (value,), (), operator)
        for operator, value, source in zip(OPERATORS, names, ["x", *names], strict=False)
    ]
    return Graph("model", ("x",), ("linear_1",), tuple(ops), values, {}).verify()


WEIGHTS = {"conv2d": 3.0, "batch_norm": 0.5, "relu": 0.5, "linear": 4.0, "layer_norm": 1.0, "gelu": 1.0, "linear_1": 2.0}
NAMES = value_names(model())


def medians(nodes: list[RuntimeNode], aliases: dict[str, str] | None = None) -> dict[str, float]:
    found, source = attribute(model(), nodes, NAMES if aliases is None else aliases, WEIGHTS)
    assert source == "profiler"
    return {op: samples.median_s for op, samples in found.items()}


def test_a_fused_node_is_shared_by_the_ops_upstream_that_nobody_else_bears_the_name_of() -> None:
    seconds = medians([RuntimeNode("relu_nchwc", "Conv", (8.0, 8.0)), RuntimeNode("linear/MatMulAddFusion", "Gemm", (2.0, 4.0))])
    assert (seconds["conv2d"], seconds["batch_norm"], seconds["relu"]) == (6, 1, 1)
    assert seconds["linear"] == 3 and seconds["layer_norm"] == seconds["linear_1"] == 0


def test_a_node_without_a_name_is_placed_by_kind_between_its_neighbours() -> None:
    nodes = [
        RuntimeNode("fused conv2d", "FusedConv", (4.0,)),
        RuntimeNode("linear", "Gemm", (5.0,)),
        RuntimeNode("SkipLayerNorm_token_4", "SkipLayerNormalization", (0.5,)),
        RuntimeNode("gelu_token_5", "Gelu", (0.25,)),
        RuntimeNode("node_MatMul_7", "Gemm", (3.0,)),
    ]
    seconds = medians(nodes, {**NAMES, "node_MatMul_7": "linear_1"})
    assert (seconds["layer_norm"], seconds["gelu"], seconds["linear_1"]) == (0.5, 0.25, 3)


@pytest.mark.parametrize(
    ("kind", "operators"),
    [
        ("MatMul", ["mul.Tensor", "matmul.default"]),
        ("Expand", ["exp.default", "expand.default"]),
        ("Add", ["addmm.default", "add.Tensor"]),
        ("Concat", ["t.default", "cat.default"]),
        ("Transpose", ["conv_transpose2d.input", "transpose.int"]),
        ("ReduceSum", ["cumsum.default", "sum.dim_IntList"]),
        ("FusedConv", ["relu.default", "conv2d.default"]),
        ("GlobalAveragePool", ["max_pool2d.default", "adaptive_avg_pool2d.default"]),
        ("QuickGelu", ["relu.default", "gelu.default"]),
        ("Softmax", ["log.default", "_safe_softmax.default"]),
        ("Gather", ["mul.Tensor", "embedding.default"]),
        ("EmbedLayerNormalization", ["mul.Tensor", "layer_norm.default"]),
        ("Split", ["slice.Tensor", "split_with_sizes.default"]),
        ("Attention", ["layer_norm.default", "scaled_dot_product_attention.default"]),
        ("Reshape", ["mul.Tensor", "_unsafe_view.default"]),
        ("BatchNormalization", ["group_norm.default", "batch_norm.default"]),
    ],
)
def test_a_kind_is_that_of_the_op_that_does_its_work(kind: str, operators: list[str]) -> None:
    names = ["begin", "other", "own", "end"]
    ops = [
        Op(name, f"aten.{operator}", "", (source,), (name,), (), operator)
        for name, operator, source in zip(names, ["neg.default", *operators, "neg.default"], ["x", *names], strict=False)
    ]
    values = {name: Value(name, (1,), "float32", 4) for name in ["x", *names]}
    graph = Graph("model", ("x",), ("end",), tuple(ops), values, {}).verify()
    nodes = [RuntimeNode("begin", "Neg", (1.0,)), RuntimeNode("fused", kind, (1.0,)), RuntimeNode("end", "Neg", (1.0,))]
    found, _ = attribute(graph, nodes, value_names(graph), {})
    assert found["own"].median_s >= found["other"].median_s  # the other, which no node bears the name of, shares the time
    nodes.insert(1, RuntimeNode("other", "Other", (4.0,)))
    found, _ = attribute(graph, nodes, value_names(graph), {})
    assert found["own"].median_s == 1  # what is no kind of its would go with the other


def test_a_node_of_no_kind_goes_with_the_op_before_it() -> None:
    seconds = medians([RuntimeNode("linear", "Gemm", (5.0,)), RuntimeNode("ReorderOutput_1", "ReorderOutput", (1.0,))])
    assert sum(seconds[op] for op in ("conv2d", "batch_norm", "relu", "linear")) == pytest.approx(6)


def test_origins_name_every_op_of_a_fused_node() -> None:
    seconds = medians(
        [RuntimeNode("x", "Convolution", (4.0,), ("conv2d", "getitem", "relu")), RuntimeNode("linear", "FullyConnected", (1.0,))]
    )
    assert (seconds["conv2d"], seconds["batch_norm"], seconds["relu"], seconds["linear"]) == (3, 0.5, 0.5, 1)


def test_time_is_kept_whatever_the_names() -> None:
    nodes = [RuntimeNode(name, "Gemm", (1.0, 2.0)) for name in ("linear", "linear_1", "mystery", "relu")]
    found, _ = attribute(model(), nodes, NAMES, WEIGHTS)
    assert sum(samples.samples_s[0] for samples in found.values()) == pytest.approx(4)
    assert sum(samples.samples_s[1] for samples in found.values()) == pytest.approx(8)


def test_nodes_that_say_too_little_are_shared_out_as_eager_took_its_ops() -> None:
    found, source = attribute(model(), [RuntimeNode("subgraph_0", "Everything", (6.0, 12.0))], NAMES, WEIGHTS)
    assert source == "proportional"
    assert found["linear"].samples_s == (2.0, 4.0) and found["relu"].samples_s == (0.25, 0.5)
    assert attribute(model(), [], NAMES, WEIGHTS)[1] == "proportional"


def test_ops_without_weights_share_equally() -> None:
    assert proportional(model(), [7.0], {})["relu"].samples_s == (1.0,)


def test_samples_stretched_by_a_time_slice_are_left_out_and_all_nodes_keep_as_many() -> None:
    nodes = [RuntimeNode("a", "Gemm", (0.001, 0.005, 0.0011)), RuntimeNode("b", "Relu", (1e-6, 2e-6, 3e-6))]
    assert [node.samples_s for node in without_preempted(nodes, 2e-4)] == [(0.001, 0.0011), (1e-6, 2e-6)]
    assert without_preempted([], 2e-4) == []
