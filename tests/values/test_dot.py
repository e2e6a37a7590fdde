"""DOT files: every op, every value that is read, and what crosses a cut."""

import re
from dataclasses import replace

from autosplit.values.dot import graph_dot, plan_dot
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage


def diamond() -> Graph:
    """x -> a -> (b, c) -> d."""
    reads = {"a": ("relu", "x"), "b": ("linear", "a"), "c": ("linear", "a"), "d": ("add", "b", "c")}
    ops = tuple(Op(name, kind, "", tuple(inputs), (name,), (), kind) for name, (kind, *inputs) in reads.items())
    return Graph("diamond", ("x",), ("d",), ops, {name: Value(name, (2, 3), "float32", 24) for name in "xabcd"}, {}).verify()


STAGES = (Stage("stage0", ("a", "b"), ("cpu:0",), load_s=0.002), Stage("stage1", ("c", "d"), ("cpu:1", "cpu:2"), "openvino"))
PLAN = Plan(Source("m:f"), diamond().hash, "", STAGES, UNKNOWN)


def test_a_graph_is_written_with_its_stages_as_clusters_and_bold_edges_over_cuts() -> None:
    text = graph_dot(diamond(), PLAN)
    assert text.splitlines()[:7] == [
        'digraph "diamond" {',
        "  node [shape=box]",
        "  subgraph cluster_0 {",
        '    label="stage0\\ncpu:0 (eager)\\n2 ops\\n2.00 ms"',
        '    "a" [label="a\\nrelu"]',
        '    "b" [label="b\\nlinear"]',
        "  }",
    ]
    edges = re.findall(r'"(\w)" -> "(\w)" \[label="24 B"(, style=bold)?\]', text)
    assert [(source, target) for source, target, bold in edges if bold] == [("x", "a"), ("a", "c"), ("b", "d")]
    assert [(source, target) for source, target, bold in edges if not bold] == [("a", "b"), ("c", "d")]
    alone = graph_dot(diamond())
    assert "cluster" not in alone and "bold" not in alone and len(re.findall(r"label=\"\w\\n", alone)) == 4


def test_a_plan_is_written_with_the_bytes_between_its_stages() -> None:
    text = plan_dot(diamond(), PLAN)
    assert re.findall(r'"(\w+)" -> "(\w+)" \[label="(\d+ B)"\]', text) == [
        ("host", "stage0", "24 B"),
        ("stage0", "stage1", "48 B"),
        ("stage1", "host", "24 B"),
    ]
    assert '"stage1" [label="stage1\\ncpu:1 + cpu:2 (openvino)\\n2 ops"]' in text


def test_a_name_cannot_end_its_string() -> None:
    assert 'digraph "a\\"b\\\\c\\nd" {' in graph_dot(replace(diamond(), name='a"b\\c\nd'))
