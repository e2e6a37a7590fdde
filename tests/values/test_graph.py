import json
from dataclasses import replace

import pytest

from autosplit.errors import GraphError
from autosplit.values.graph import Graph, Op, Value


def diamond() -> Graph:
    """x -> a -> (b, c) -> d; b and c read one shared weight."""
    values = {name: Value(name, (2, 3), "float32", 24) for name in ("x", "a", "b", "c", "d")}
    weights = {"w": Value("w", (3, 3), "float32", 36), "v": Value("v", (3,), "float32", 12)}
    ops = (
        Op("a", "relu", "", ("x",), ("a",), (), "relu(2,3)"),
        Op("b", "linear", "left", ("a",), ("b",), ("w", "v"), "linear(2,3)"),
        Op("c", "linear", "right", ("a",), ("c",), ("w",), "linear(2,3) no bias"),
        Op("d", "add", "", ("b", "c", "b"), ("d",), (), "add(2,3)"),
    )
    return Graph("diamond", ("x",), ("d",), ops, values, weights).verify()


def test_producers_and_consumers() -> None:
    graph = diamond()
    assert graph.producer == {name: name for name in "abcd"}
    assert graph.consumers == {"x": ("a",), "a": ("b", "c"), "b": ("d",), "c": ("d",), "d": ()}
    assert graph.index["d"] == 3


def test_a_weight_read_twice_counts_once() -> None:
    graph = diamond()
    assert graph.weight_bytes == 48
    assert graph.stage_bytes(("b", "c")) == 48 and graph.stage_bytes(("c",)) == 36


def test_json_round_trip_keeps_the_hash() -> None:
    graph = diamond()
    again = Graph.from_dict(json.loads(json.dumps(graph.to_dict())))
    assert again == graph and again.hash == graph.hash


def test_hash_ignores_the_name_and_sees_the_structure() -> None:
    graph = diamond()
    assert replace(graph, name="other").hash == graph.hash
    assert replace(graph, outputs=("c",)).hash != graph.hash
    wider = {**graph.values, "a": Value("a", (2, 4), "float32", 32)}
    assert replace(graph, values=wider).hash != graph.hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: replace(g, ops=(*g.ops, g.ops[0])), r"(?s)2 faults.*op 'a' stands twice.*value 'a' is made twice"),
        (lambda g: replace(g, ops=tuple(reversed(g.ops))), "reads 'b' before any op makes it"),
        (lambda g: replace(g, weights={}), "unknown weight 'w'"),
        (lambda g: replace(g, values={"x": g.values["x"]}), "makes 'a', whose shape is not known"),
        (lambda g: replace(g, values={k: v for k, v in g.values.items() if k != "x"}), "input 'x' has no known shape"),
        (lambda g: replace(g, outputs=("nope",)), "output 'nope' is made by no op"),
        (lambda g: Graph("empty", (), (), (), {}, {}), "it has no ops"),
    ],
)
def test_verify_names_each_fault(change, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        change(diamond()).verify()


def test_incomplete_data_is_a_graph_error() -> None:
    data = diamond().to_dict()
    del data["ops"][0]["signature"]
    with pytest.raises(GraphError, match="incomplete"):
        Graph.from_dict(data)
    with pytest.raises(GraphError, match=r"values\.x\.num_bytes: Input should be a valid integer.*, but is 'many'"):
        Graph.from_dict({**diamond().to_dict(), "values": [{"name": "x", "shape": [2], "dtype": "float32", "num_bytes": "many"}]})
    with pytest.raises(GraphError, match="incomplete: inputs: Input should be a valid tuple, but is 'x'"):
        Graph.from_dict({**diamond().to_dict(), "inputs": "x"})
    with pytest.raises(GraphError, match="incomplete: 'values'"):
        Graph.from_dict({key: value for key, value in diamond().to_dict().items() if key != "values"})


def test_tables() -> None:
    graph = diamond()
    assert graph.frame().loc["b", "weight_bytes"] == 48 and graph.frame().loc["a", "output_bytes"] == 24
    assert "4 ops" in graph._repr_html_() and graph.hash in repr(graph)


def test_runs_are_few_and_read_only_what_came_before() -> None:
    reads = {"a": ("x",), "b": ("a",), "c": ("x",), "d": ("b", "c"), "e": ("a",)}
    ops = tuple(Op(name, "aten.relu.default", "", inputs, (name,), (), "s") for name, inputs in reads.items())
    values = {name: Value(name, (1,), "float32", 4) for name in ("x", *reads)}
    graph = Graph("five", ("x",), ("d", "e"), ops, values, {}).verify()
    label = {"a": "one", "b": "other", "c": "one", "d": "one", "e": "one"}
    assert graph.runs(label, label) == [("a", "c", "e"), ("b",), ("d",)]
    assert graph.runs(["c", "a"], label) == [("a", "c")] and graph.runs([], label) == []
    assert graph.runs(label, {**label, "a": "other"}) == [("a", "b"), ("c", "d", "e")]


def test_of_an_embedding_only_the_rows_that_are_looked_up_are_used() -> None:
    table, matrix = Value("table", (1000,), "uint8", 1000), Value("matrix", (50,), "uint8", 50)
    look_up = Op("look_up", "aten.embedding.default", "", ("x",), ("y",), ("table",), "e")
    values = {"x": Value("x", (1,), "int64", 8), "y": Value("y", (5,), "uint8", 5), "z": Value("z", (2,), "uint8", 2)}

    def graph(*weights: str) -> Graph:
        multiply = Op("multiply", "aten.linear.default", "", ("y",), ("z",), weights, "m")
        return Graph("model", ("x",), ("z",), (look_up, multiply), values, {"table": table, "matrix": matrix})

    assert graph("matrix").used_bytes == 50 + 15
    assert graph("matrix", "table").used_bytes == 1050 + 15, "a table that a matrix product reads too is read whole"
