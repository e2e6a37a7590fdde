"""Demands add up: what they mean together for the ops of a graph, and what cannot hold together."""

import pytest

from autosplit.errors import UsageError
from autosplit.values.constraints import Constraints, Demands, Placement
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.machine import Device, Machine, parse_device

NAMES = ("add", "add_1", "relu", "conv")
OPERATORS = {
    "add": "aten.add.Tensor",
    "add_1": "aten.add.Tensor",
    "relu": "aten.relu.default",
    "conv": "aten.convolution.default",
}
OPS = tuple(Op(n, OPERATORS[n], f"block.{n}", (NAMES[i - 1] if i else "x",), (n,), (), n) for i, n in enumerate(NAMES))
GRAPH = Graph("net", ("x",), (NAMES[-1],), OPS, {n: Value(n, (8,), "float32", 32) for n in ("x", *NAMES)}, {}).verify()
TWO = Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])


def free_devices(constraints: Constraints) -> dict[str, list[str]]:
    """Op name to the devices that it may run on."""
    barred = constraints.verify(GRAPH, TWO).placement(GRAPH, TWO).barred
    return {op: [device.name for device in TWO.devices if (op, device.name) not in barred] for op in NAMES}


def test_two_forbids_that_mean_the_same_op_add_up() -> None:
    """The later one took the place of the earlier: 'add' was put on cpu:0, though it was forbidden there."""
    wanted = Constraints(forbids={"add_1": ("cpu:0",), "aten.relu*": ("cpu:1",), "block": ("cpu:1",)})
    with pytest.raises(UsageError) as caught:
        wanted.verify(GRAPH, TWO)
    said = "these cannot hold together for op 'add_1': 'add_1' is forbidden on 'cpu:0'; 'block' is forbidden on 'cpu:1'"
    assert said in str(caught.value) and "1 fault" in str(caught.value)
    assert free_devices(Constraints(forbids={"relu": ("cpu:0",), "aten.add*": ("cpu:1",)})) == {
        "add": ["cpu:0"], "add_1": ["cpu:0"], "relu": ["cpu:1"], "conv": ["cpu:0", "cpu:1"]
    }  # fmt: skip


def test_two_pins_of_one_op_to_two_devices_are_refused_with_the_set() -> None:
    """The later pin won in silence."""
    with pytest.raises(UsageError) as caught:
        Constraints(pins={"add": "cpu:0", "*": "cpu:1"}).verify(GRAPH, TWO)
    assert "together for op 'add': '*' is pinned to 'cpu:1'; 'add' is pinned to 'cpu:0'" in str(caught.value)


def test_a_pin_to_a_forbidden_device_is_refused_and_says_how_many_ops_it_is_about() -> None:
    with pytest.raises(
        UsageError, match=r"op 'add' and 1 more: 'aten.add.*' is forbidden on 'cpu:0'; 'block' is pinned to 'cpu:0'"
    ):
        Constraints(pins={"block": "cpu:0"}, forbids={"aten.add*": ("cpu:0",)}).verify(GRAPH, TWO)


def test_groups_that_share_an_op_become_one() -> None:
    """An op that two patterns matched was kept together with the ops of the last one only."""
    placement = Constraints(together=("aten.add*", "relu", "add_1", "block.relu")).placement(GRAPH, TWO)
    assert placement.groups == (("add", "add_1"), ("relu",))
    joined = Constraints(together=("aten.add*", "conv", "*d*_1", "block")).placement(GRAPH, TWO)
    assert joined.groups == (NAMES,)


def test_a_device_with_a_list_of_what_it_supports_runs_nothing_else() -> None:
    wanted = Constraints(allows={"aten.convolution*": ("cpu:1",), "aten.relu*": ("cpu:1",), "aten.bmm*": ("cpu:1",)})
    assert free_devices(wanted) == {"add": ["cpu:0"], "add_1": ["cpu:0"], "relu": ["cpu:0", "cpu:1"], "conv": ["cpu:0", "cpu:1"]}
    assert wanted.notes(GRAPH) == ["'aten.bmm*' matches no op of 'net', so it has no effect here"]
    assert not wanted.forced


def test_a_list_for_many_models_may_forbid_ops_that_a_model_does_not_have_but_a_misspelt_name_is_refused() -> None:
    wanted = Constraints(forbids={"aten.bmm.default": ("cpu:1",), "*attention*": ("cpu:0",)}).verify(GRAPH, TWO)
    assert len(wanted.notes(GRAPH)) == 2
    with pytest.raises(UsageError, match="'reluu' matches no op, module path or operator; close names: 'relu'"):
        Constraints(forbids={"reluu": ("cpu:1",)}).verify(GRAPH, TWO)


def test_constraints_are_demands_and_reach_the_planner_as_they_are() -> None:
    wanted = Constraints(num_stages=2, max_latency_s=0.5)
    assert isinstance(wanted, Demands) and wanted.counted
    assert Constraints().placement(GRAPH, TWO) == Placement()


@pytest.mark.parametrize(
    "demands,said",
    [
        (Demands(num_stages=3), ["the number of its stages is 2, and 3 is asked for"]),
        (
            Demands(max_stages=1, max_replicas=1),
            ["the number of its stages is 2, and at most 1 is allowed", "one of its stages has 2 replic"],
        ),
        (Demands(max_replicas=2, min_stage_s=0.2), ["one of its stages takes 100.00 ms, and at least 200.00 ms is asked for"]),
        (Demands(max_replicas=2, max_latency_s=0.5), ["a request takes 1.00 s, and at most 500.00 ms is allowed"]),
    ],
)
def test_every_broken_demand_is_listed(demands: Demands, said: list[str]) -> None:
    found = demands.broken(num_stages=2, num_replicas=2, shortest_s=0.1, latency_s=1.0)
    found = found if demands.max_replicas > 1 or len(said) > 1 else found[:-1]
    assert [one.startswith(text) for one, text in zip(found, said, strict=True)] == [True] * len(said)


def test_ops_stay_off_devices_that_do_not_support_them() -> None:
    limited = Machine((Device("null:0", "null", operators=("aten.add*",)), Device("null:1", "null", index=1)), {})
    found = Constraints().verify(GRAPH, limited)
    barred = found.placement(GRAPH, limited).barred
    assert barred == {(op, "null:0"): f"'null:0' does not support operator {OPERATORS[op]}" for op in ("relu", "conv")}
    with pytest.raises(UsageError, match=r"support operator aten.relu.default; 'relu' is forbidden on 'null:1'"):
        Constraints(forbids={"relu": ("null:1",)}).verify(GRAPH, limited)
