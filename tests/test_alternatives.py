"""The simple ways are plans that verify, and those that do not fit are left out."""

from autosplit.alternatives import ALL_CORES, EVEN_SPLIT, ONE_DEVICE, REPLICAS, eager_today, machine_of, simple_plans
from autosplit.graph import Graph, Op, Value, Weight
from autosplit.machine import Machine, parse_device
from autosplit.plan import Source

NUM_OPS = 5
OPS = tuple(Op(f"a{i}", "linear", "", (f"a{i - 1}" if i else "x",), (f"a{i}",), (f"w{i}",), f"s{i}") for i in range(NUM_OPS))
VALUES = {name: Value(name, (8,), "float32", 32) for name in ["x", *[op.name for op in OPS]]}
WEIGHTS = {f"w{i}": Weight(f"w{i}", (1024,), "float32", 4096) for i in range(NUM_OPS)}
GRAPH = Graph("chain", ("x",), ("a4",), OPS, VALUES, WEIGHTS).verify()
TWO = Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])
SOURCE = Source("m:f")


def test_the_four_ways_verify() -> None:
    plans = simple_plans(GRAPH, TWO, SOURCE, "eager", "cpu:1")
    assert list(plans) == [ONE_DEVICE, ALL_CORES, REPLICAS, EVEN_SPLIT]
    for plan in plans.values():
        plan.verify(GRAPH, machine_of([plan], TWO))
    assert plans[ONE_DEVICE].stages[0].devices == ("cpu:1",)
    assert (plans[ALL_CORES].stages[0].devices, plans[ALL_CORES].stages[0].threads) == (("cpu:0-1",), 2)
    assert plans[REPLICAS].stages[0].devices == ("cpu:0", "cpu:1")
    assert [len(stage.ops) for stage in plans[EVEN_SPLIT].stages] == [2, 3]


def test_a_memory_cap_leaves_out_what_does_not_fit() -> None:
    capped = TWO.with_memory({"cpu:0": 3 * 4096, "cpu:1": 3 * 4096})
    assert list(simple_plans(GRAPH, capped, SOURCE, "eager", "cpu:0")) == [EVEN_SPLIT]
    tight = TWO.with_memory({"cpu:0": 4096, "cpu:1": 4096})
    assert simple_plans(GRAPH, tight, SOURCE, "eager", "cpu:0") == {}


def test_one_device_has_neither_replicas_nor_a_split() -> None:
    assert list(simple_plans(GRAPH, Machine.of([parse_device("cpu:0")]), SOURCE, "eager", "cpu:0")) == [ONE_DEVICE]
    assert list(eager_today(GRAPH, TWO, SOURCE)) == ["all cores (eager)"]
    assert list(eager_today(GRAPH, Machine.of([parse_device("cpu:0-1")]), SOURCE)) == ["one device (eager)"]
