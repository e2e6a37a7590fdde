"""Random graphs and random maps: equal numbers, one copy for each value and destination, no step that changes a placed graph."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from arenas import ArenaInterpreter
from fuzzing import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from autosplit import annotate, copy_to
from autosplit.errors import PlanError, StageError, UsageError
from autosplit.placing.placed import Placed
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.values.machine import Machine, parse_device

MACHINE = Machine.of(map(parse_device, ("cpu:0", "cpu:1", "null:0")))
NAMES = tuple(device.name for device in MACHINE.devices)
STEPS: tuple[Callable[..., torch.Tensor], ...] = (
    lambda x, y, layer: torch.relu(x),
    lambda x, y, layer: x + y,
    lambda x, y, layer: layer(x),
    lambda x, y, layer: x.t(),
    lambda x, y, layer: x[:, :4].repeat(1, 2),
    lambda x, y, layer: torch.cat([x, y], 1)[:, ::2],
    lambda x, y, layer: x.unsqueeze(0).expand(2, -1, -1).sum(0),
    lambda x, y, layer: x.chunk(2, 1)[1].contiguous().view(8, 4).repeat(1, 2) * y,
    lambda x, y, layer: torch.softmax(x, -1) @ y,
    lambda x, y, layer: torch.max(x, 1, keepdim=True)[0] + x.t(),
    lambda x, y, layer: torch.ones(8, 8) - y,
)


class Random(nn.Module):
    """Steps on 8 × 8 matrices; a step reads two earlier results, and two steps share one layer."""

    def __init__(self, steps: tuple[tuple[int, int, int], ...]) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(8, 8), steps

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = [x, y]
        for kind, one, other in self.steps:
            made.append(STEPS[kind](made[-1 - one % len(made)], made[-1 - other % len(made)], self.layer))
        return made[-1], made[len(made) // 2]


def traced_of(module: nn.Module, *inputs: torch.Tensor) -> Traced:
    return trace(load_model(module.eval(), inputs=inputs or (torch.randn(2, 8),)))


@cache
def random_model(seed: int) -> Traced:
    """A model of every kind of step in random order, each on two random earlier results."""
    choose = random.Random(seed)
    kinds = choose.sample(range(len(STEPS)), len(STEPS))
    steps = tuple((kind, choose.randrange(5), choose.randrange(5)) for kind in kinds)
    return traced_of(Random(steps), torch.randn(8, 8), torch.randn(8, 8))


def place(traced: Traced, patterns: object = None, **options: object) -> Placed:
    return annotate(traced, patterns, **{"default": "cpu:0", "machine": MACHINE, **options})


def equal(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(map(torch.equal, one, other))


@settings(max_examples=examples(16), deadline=None, phases=[Phase.generate])
@given(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=40, max_size=40))
def test_random_graphs_with_random_maps(seed, devices):
    traced = random_model(seed)
    sites = {op.name: NAMES[devices[number % 40]] for number, op in enumerate(traced.graph.ops)}
    placed = place(traced, sites)
    homes = {value: sites[op] for value, op in traced.graph.producer.items()}
    homes |= {value: sites[traced.graph.consumers[value][0]] for value in traced.graph.inputs if traced.graph.consumers[value]}
    pairs = {(value, sites[op.name]) for op in traced.graph.ops for value in op.inputs if homes[value] != sites[op.name]}
    assert {(copy.value, copy.target) for copy in placed.copies} == pairs
    assert len(placed.copies) == len(pairs)
    assert sum(op.operator == "autosplit.device_copy.default" for op in placed.graph.ops) == len(pairs)
    expected = traced.run(*traced.example_inputs)
    assert equal(placed.run(*traced.example_inputs), expected)
    checked = ArenaInterpreter(placed, placed.program).check(*traced.example_inputs)
    assert equal(traced.unflatten_outputs(checked), expected)
    assert annotate(placed) is placed and annotate(placed, sites, "cpu:0") is placed
    for plan in placed.memory.values():
        assert plan.verify().peak_bytes >= plan.bound_bytes
    again = place(traced, placed.plan())
    assert again.same_as(placed) and again.plan().stages == placed.plan().stages


def test_a_missing_copy_is_found():
    traced = traced_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    placed = place(traced, {"relu": "cpu:1"})
    with pytest.raises(StageError, match="op 'relu' in the memory of cpu:1 reads 'linear' in the memory of cpu:0; a copy is"):
        ArenaInterpreter(placed, traced.program).check(*traced.example_inputs)


class Shared(nn.Module):
    """An input, a weight and a constant that two devices use."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.right.weight = self.left.weight
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x + self.table) * (self.right(x) - self.table)


def test_an_input_is_copied_once_and_weights_and_constants_never():
    traced = traced_of(Shared())
    placed = place(traced, {"right": "cpu:1", "sub": "cpu:1", "mul": "cpu:1"})
    assert [(copy.value, copy.source, copy.target) for copy in placed.copies] == [
        ("x", "cpu:0", "cpu:1"),
        ("linear", "cpu:0", "cpu:1"),
    ]
    assert torch.equal(placed.run(*traced.example_inputs), traced.run(*traced.example_inputs))


def test_devices_that_share_a_memory_need_no_copy():
    npu = replace(parse_device("npu:0"), shares="cpu:0")
    machine = Machine.of([parse_device("cpu:0"), parse_device("cpu:1"), npu])
    traced = traced_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    placed = place(traced, {"relu": "npu:0"}, machine=machine)
    assert placed.copies == () and set(placed.memory) == {"cpu:0"}
    assert torch.equal(placed.run(*traced.example_inputs), traced.run(*traced.example_inputs))
    assert ArenaInterpreter(placed, placed.program).check(*traced.example_inputs)


class Explicit(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        there = copy_to(torch.relu(x), "cpu:1")
        return torch.sigmoid(torch.tanh(there)) + copy_to(copy_to(x, "cpu:1"), "cpu:0").exp()


def test_explicit_copies_lead_their_readers_and_redundant_ones_are_removed():
    traced = traced_of(Explicit())
    placed = place(traced, {"add": "cpu:0"})
    assert [placed.devices[op] for op in ("relu", "tanh", "sigmoid", "exp", "add")] == [
        "cpu:0",
        "cpu:1",
        "cpu:1",
        "cpu:0",
        "cpu:0",
    ]
    assert len(placed.copies) == 2
    assert placed.removed == (
        "the explicit copy of 'x' to cpu:1: a copy to cpu:0 follows",
        "the explicit copy of 'x' to cpu:0: it is there",
    )
    assert placed.why("sigmoid") == "op 'sigmoid' is on cpu:1 (eager) by the explicit copy of 'relu' to cpu:1"
    assert torch.equal(placed.run(*traced.example_inputs), Explicit()(*traced.example_inputs))
    kept = place(traced, {"*": "cpu:0"})
    assert not kept.copies and len(kept.removed) == 3
    with pytest.raises(UsageError, match=r"op 'add' has inputs on two devices \(cpu:1 by the explicit copy of 'relu' to cpu:1"):
        place(traced)


class ToCuda(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.to("cuda:0") + torch.arange(8, device="cuda:0")).to("cpu").exp()


def test_a_model_that_copies_to_cuda_is_traced_without_it():
    traced = traced_of(ToCuda())
    machine = Machine.of(map(parse_device, ("cpu:0", "cuda:0")))
    placed = place(traced, machine=machine)
    assert [placed.devices[op] for op in ("add", "relu", "exp")] == ["cuda:0", "cuda:0", "cpu:0"]
    assert {copy.value: copy.target for copy in placed.copies} == {"arange": "cuda:0", "relu": "cpu:0"}
    with pytest.raises(UsageError, match="device 'cuda:0' is not one of cpu:0, cpu:1, null:0"):
        place(traced)


def test_every_fault_of_a_map_at_once():
    traced = traced_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    with pytest.raises(UsageError) as caught:
        place(
            traced,
            {"linea": "cpu:0", "aten.reluu*": "cpu:0"}
            | {"relu": "cpu:7", "0": "cpu:1", "aten.linear*": "cpu:0", "2": ("cpu:0", "egaer"), "1": 1},
            machine=MACHINE.with_memory({"cpu:1": 300}),
        )
    text = str(caught.value)
    assert "(7 faults)" in text
    assert "'aten.reluu*' matches no op, module path or operator; close names: 'aten.relu'" in text
    assert "'1': 1 is not a site; write 'cpu:1', ('cpu:1', 'openvino') or ('cpu:1', 'openvino', 'bf16')" in text
    assert "op 'linear' needs 416 B by itself, and the cap of cpu:1 is 300 B; raise the cap, or give a fallback" in text
    assert "'linea' matches no op, module path or operator; close names: 'linear'" in text
    assert "'relu': device 'cpu:7' is not one of cpu:0, cpu:1, null:0; close names: 'cpu:1'" in text
    assert (
        "op 'linear' is put on cpu:1 (eager) by '0' and on cpu:0 (eager) by 'aten.linear*'; name one of the two in priority"
        in text
    )
    assert "backend 'egaer' does not exist" in text
    placed = place(traced, {"0": "cpu:1", "aten.linear*": "cpu:0"}, priority=["0"])
    assert placed.devices == {"linear": "cpu:1", "relu": "cpu:0", "linear_1": "cpu:0", "linear_on_cpu_0": "cpu:0"}


class Circle(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(copy_to(copy_to(copy_to(x, "cpu:1"), "cpu:0"), "cpu:1"))


def test_explicit_copies_in_a_circle_are_refused():
    with pytest.raises(UsageError, match=r"explicit copies take 'x' in a circle \(cpu:1 -> cpu:0 -> cpu:1\); keep the last one"):
        place(traced_of(Circle()))


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(copy_to(copy_to(x, "cpu:1"), "cpu:1"))


def test_a_second_copy_to_the_same_device_is_removed():
    """It was refused as a circle."""
    placed = place(traced_of(Twice()))
    assert placed.devices["relu"] == "cpu:1"
    assert "the explicit copy of 'x' to cpu:1: a copy to cpu:1 follows" in placed.removed


def test_an_op_that_its_device_cannot_run_falls_back_with_the_reason():
    npu = replace(parse_device("npu:0"), dtypes=("float32",), operators=("aten.embedding*", "aten.linear*"))
    machine = Machine.of([parse_device("cpu:0"), npu])
    traced = traced_of(nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.ReLU()), torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(UsageError) as caught:
        place(traced, {"*": "npu:0"}, machine=machine)
    assert "op 'embedding' is not supported on npu:0 (dtype int64), where pattern '*' puts it; give a fallback" in str(
        caught.value
    )
    assert "op 'relu' is not supported on npu:0 (operator aten.relu.default)" in str(caught.value)
    with pytest.raises(
        UsageError, match=r"op 'relu' is not supported on npu:0 \(operator .*\), and the fallback is the same; give"
    ):
        place(traced, {"*": "npu:0"}, machine=machine, fallback="npu:0")
    with pytest.raises(UsageError, match=r"bf16.*, and on the fallback op 'embedding' is not supported on npu:0"):
        place(traced, {"*": ("cpu:0", "onnxruntime", "bf16")}, machine=machine, fallback="npu:0")
    placed = place(traced, {"*": "npu:0"}, machine=machine, fallback="cpu:0")
    assert placed.choices["linear"].site.device == "npu:0"
    assert placed.why("embedding") == (
        "op 'embedding' is on cpu:0 (eager) by fallback: op 'embedding' is not supported on npu:0 (dtype int64); it runs on cpu:0"
    )


def test_caps_move_ops_to_the_fallback_or_are_refused_with_the_numbers():
    traced = traced_of(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    machine = MACHINE.with_memory({"cpu:1": 700})
    placed = place(traced, {"*": "cpu:1"}, machine=machine, fallback="cpu:0")
    assert list(placed.devices.values())[:4] == ["cpu:1", "cpu:1", "cpu:0", "cpu:0"]
    assert "with op 'linear_2' cpu:1 would hold 864 B of weights, and the cap of cpu:1 is 700 B" in placed.why("linear_2")
    with pytest.raises(
        UsageError, match="op 'linear' needs 416 B by itself, and the cap of cpu:1 is 300 B; raise the cap, or give"
    ):
        place(traced, {"0": "cpu:1"}, machine=MACHINE.with_memory({"cpu:1": 300}))


def test_a_plan_of_another_model_is_refused():
    small, large = (traced_of(nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))) for count in (1, 2))
    with pytest.raises(PlanError, match="the plan was made for graph"):
        place(large, place(small).plan())


def test_views_of_a_placed_graph():
    traced = traced_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    placed = place(traced, {"relu": "cpu:1"})
    assert placed.text().splitlines() == [
        "linear           cpu:0  eager f32  64 B  storage 1 at 64",
        "linear_on_cpu_1  cpu:1  copy       64 B  storage 0 at 0",
        "relu             cpu:1  eager f32  64 B  storage 0 at 0",
    ]
    assert list(placed.frame().loc["relu", ["device", "by"]]) == ["cpu:1", "pattern"]
    assert '"linear_on_cpu_1" -> "relu" [style=dashed];' in placed.dot()
    assert placed.picture().svg().startswith("<?xml")
    assert placed.why("linear_on_cpu_1") == "'linear_on_cpu_1' copies 'linear' from cpu:0 to cpu:1 for 'relu'"
    assert placed.summary() == "Sequential: 1 ops on cpu:0 (eager), 1 ops on cpu:1 (eager), 1 copies of 64 B"
