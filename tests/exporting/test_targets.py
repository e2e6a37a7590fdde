"""What every export target has in common, and the targets that write text only."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from autosplit.errors import PlanError, UsageError
from autosplit.exporting.accelerate_map import with_weights
from autosplit.exporting.base import ABOUT, TARGETS, Job, get_target, loss_note, write_export
from autosplit.planning.moduleunits import layer_lists, layer_units, module_units
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage
from autosplit.values.profile import Profile

LAYERS = 4
TAKES = {"replicas": ("onnxruntime", "triton", "ray-serve"), "streams": ("onnxruntime", "triton")}
"""Targets that can express several replicas of a stage, and several streams."""


class Block(nn.Module):
    """A residual layer: its addition mixes the input of the block with what its parts make."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """Token and position embeddings that meet outside of them, layers, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, 8), nn.Embedding(4, 8)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.scale = nn.Parameter(torch.ones(8))
        self.head.weight = self.tokens.weight
        self.unused = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(4))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x) * self.scale)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def traced(net: nn.Module) -> Traced:
    return trace(load_model(net, inputs=(torch.arange(4)[None],)))


def plan_of(traced: Traced, first_ops: int) -> Plan:
    """Two stages of eager on two cores, the first with this number of ops."""
    ops = tuple(op.name for op in traced.graph.ops)
    parts = (ops[:first_ops], ops[first_ops:])
    stages = tuple(Stage(f"stage{n}", part, (f"cpu:{n}",)) for n, part in enumerate(parts))
    return Plan(Source(""), traced.graph.hash, "", stages, UNKNOWN)


@pytest.fixture
def halves(traced: Traced) -> Plan:
    """A cut inside the third layer, after its first part."""
    third = next(n for n, op in enumerate(traced.graph.ops) if op.module == "layers.2.down")
    return plan_of(traced, third)


def test_modules_whose_values_meet_outside_of_them_are_one_unit(traced: Traced) -> None:
    units = module_units(traced.graph)
    assert [unit.modules for unit in units] == [
        ("tokens", "places", "head"),
        ("layers.0",),
        ("layers.1",),
        ("layers.2",),
        ("layers.3",),
        ("norm",),
    ]
    assert sorted(op for unit in units for op in unit.ops) == sorted(op.name for op in traced.graph.ops)


def test_layers_take_what_is_around_them(traced: Traced) -> None:
    assert layer_lists(traced.graph) == {"layers": LAYERS}
    units = layer_units(traced.graph, "layers")
    assert [unit.modules for unit in units] == [(f"layers.{n}",) for n in range(LAYERS)]
    assert units[-1].ops[-1] == traced.graph.ops[-1].name and units[0].ops[0] == traced.graph.ops[0].name


def test_vllm_gets_the_layers_of_each_rank(traced: Traced, halves: Plan, tmp_path: Path) -> None:
    notes = write_export("vllm", Job(traced, halves), tmp_path / "out")
    [line] = [text for text in (tmp_path / "out" / "vllm.env").read_text().splitlines() if not text.startswith("#")]
    counts = [int(count) for count in line.removeprefix("VLLM_PP_LAYER_PARTITION=").split(",")]
    assert (counts, sum(counts), len(counts)) == ([3, 1], LAYERS, len(halves.stages))
    assert "vllm cuts only between layers: 2 of" in notes[1] and "not known, because nothing was measured" in notes[1]
    assert json.loads((tmp_path / "out" / ABOUT).read_text())["notes"] == notes


def test_vllm_refuses_a_rank_without_a_layer(traced: Traced, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="stage 'stage0' has most of no layer"):
        write_export("vllm", Job(traced, plan_of(traced, 2)), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_names_what_it_cannot_express(traced: Traced, halves: Plan, name: str) -> None:
    target = get_target(name)
    assert target.name == name and target.accepts(halves) == []
    first, second = halves.stages
    coarse = replace(halves, precision="bf16")
    assert any("bf16" in fault for fault in target.accepts(coarse))
    twice = replace(halves, stages=(replace(first, devices=("cpu:0", "cpu:2")), second))
    wide = replace(halves, stages=(replace(first, threads=2, streams=2), second))
    for plan, word in ((twice, "replicas"), (wide, "streams")):
        faults = target.accepts(plan)
        assert bool(faults) == (name not in TAKES[word])
        assert not faults or ("stage 'stage0'" in faults[0] and f"2 {word}" in faults[0])


@pytest.mark.parametrize(("name", "kinds"), [("openvino", {"npu"}), ("executorch", set())])
def test_a_kind_of_device_that_a_target_lacks_is_refused(halves: Plan, name: str, kinds: set[str]) -> None:
    for kind in ("cuda", "npu"):
        faults = get_target(name).accepts(replace(halves, stages=(replace(halves.stages[0], devices=(f"{kind}:0",)),)))
        assert bool(faults) == (kind not in kinds)
        assert not faults or f"is on '{kind}:0', and {name} takes cpu" in faults[0]


def test_all_reasons_come_at_once(traced: Traced, halves: Plan, tmp_path: Path) -> None:
    first, second = halves.stages
    bad = replace(halves, precision="bf16", stages=(replace(first, threads=2, streams=2), replace(second, devices=("cpu:0",))))
    with pytest.raises(UsageError, match=r"vllm cannot express this plan \(3 faults\)"):
        write_export("vllm", Job(traced, bad), tmp_path / "out")


@pytest.mark.parametrize("is_better", [True, False])
def test_a_target_whose_rules_make_the_plan_faster_says_so(traced: Traced, halves: Plan, is_better: bool) -> None:
    """It said "-5.4% lost"."""
    ops = [op.name for op in traced.graph.ops]
    profile = Profile.given(traced.graph, {(op, stage.devices[0]): 1e-3 for op in ops for stage in halves.stages})
    first, last = halves.stages
    uneven = replace(halves, stages=(replace(first, ops=tuple(ops[:-1])), replace(last, ops=tuple(ops[-1:]))))
    plan, moved = (uneven, halves) if is_better else (halves, uneven)
    note = loss_note(Job(traced, plan, profile=profile), moved, "this target cuts in the middle")
    assert re.search(r": \d+\.\d% (gained|lost)$", note) and note.endswith("gained") == is_better


def test_an_unknown_runtime_gets_close_names() -> None:
    with pytest.raises(UsageError, match=r"runtime 'acelerate' is not one .* close names: 'accelerate'; valid: onnxruntime"):
        get_target("acelerate")


def test_accelerate_runs_the_map(net: nn.Module, traced: Traced, halves: Plan, tmp_path: Path) -> None:
    write_export("accelerate", Job(traced, halves), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "device_map.json").read_text())
    parts = {"tokens": 0, "places": 0, "head": 0, "scale": 1, "norm": 1, "unused": 0}
    assert found == parts | {f"layers.{n}": int(n > 2) for n in range(LAYERS)}
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    from accelerate.utils.modeling import check_device_map

    check_device_map(net, found)
    moved = accelerate.dispatch_model(Net().eval(), dict.fromkeys(found, "cpu"), force_hooks=True)
    moved.load_state_dict(net.state_dict())
    ids = torch.tensor([[3, 1, 2, 0]])
    assert torch.equal(moved(ids), net(ids))


def test_modules_on_one_device_are_joined(traced: Traced) -> None:
    everywhere = {unit.modules[0]: 0 for unit in module_units(traced.graph) if unit.modules[0].startswith("layers")}
    assert with_weights(traced.graph, {**everywhere, "tokens": 1, "places": 1, "head": 1, "norm": 1, "scale": 1}, {}) == {
        "layers": 0,
        "tokens": 1,
        "places": 1,
        "head": 1,
        "norm": 1,
        "scale": 1,
    }
