"""A simulated accelerator with rules, as real ones have them, and a precision for each device."""

import random
from dataclasses import replace
from itertools import combinations, permutations, product
from math import inf, isclose
from pathlib import Path
from threading import Thread

import pytest
import torch
from fuzzing import examples
from torch import nn

from autosplit import Budget, annotate
from autosplit.errors import BackendError, ProfileError, UsageError
from autosplit.placing.parts import parts_of
from autosplit.placing.precisions import errors_of
from autosplit.placing.rules import broken_rules, keep_rules, parts_on
from autosplit.placing.sites import Choice, Site
from autosplit.planning.predicting import predict
from autosplit.shapes.pipelines import open_pipeline
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.links import Link
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage
from autosplit.values.planfile import read_plan, write_plan
from autosplit.values.profile import Profile

CPU = parse_device("cpu:0")
NULLS = ("null:0", "null:1")


def npu(**rules: object) -> Machine:
    return Machine.of([CPU, replace(parse_device("npu:0"), **rules)])


def random_graph(choose: random.Random, num_ops: int) -> Graph:
    ops, names = [], ["x"]
    for number in range(num_ops):
        inputs = tuple(dict.fromkeys(choose.choice(names[-4:]) for _ in range(2)))
        ops.append(Op(f"op{number}", "aten.add.Tensor", "", inputs, (f"v{number}",), (), ""))
        names.append(f"v{number}")
    values = {name: Value(name, (1,), "float32", 4) for name in names}
    return Graph("random", ("x",), (names[-1],), tuple(ops), values, {}).verify()


@pytest.mark.parametrize("seed", range(examples(6)))
def test_as_many_ops_stay_as_a_brute_force_finds(seed: int) -> None:
    choose = random.Random(seed)
    graph = random_graph(choose, 12)
    machine = npu(max_subgraphs=1 + seed % 2, min_ops=1 + seed % 3)
    device = machine["npu:0"]
    wanted = choose.sample([op.name for op in graph.ops], 8)

    def choices(kept: tuple[str, ...]) -> dict[str, Choice]:
        return {op.name: Choice(Site("npu:0" if op.name in kept else "cpu:0"), "pattern", "") for op in graph.ops}

    allowed = [
        len(kept)
        for count in range(9)
        for kept in combinations(wanted, count)
        if not broken_rules(device, parts_on(graph, choices(kept), device))
    ]
    found, faults = keep_rules(graph, choices(tuple(wanted)), Site("cpu:0"), machine)
    assert not faults and not broken_rules(device, parts_on(graph, found, device))
    assert sum(choice.site.device == "npu:0" for choice in found.values()) == max(allowed)


def test_rules_that_bind_are_named_and_the_model_runs() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid()).eval()
    traced = trace(load_model(module, inputs=(torch.randn(1, 8),)))
    machine = npu(
        min_ops=2, max_subgraphs=1, shares="cpu:0", one_model=True, operators=("aten.linear*", "aten.relu*", "aten.sig*")
    )
    with pytest.raises(UsageError, match="op 'tanh' is not supported on npu:0"):
        annotate(traced, {"*": "npu:0"}, default="cpu:0", machine=machine)
    placed = annotate(traced, {"*": "npu:0"}, default="cpu:0", fallback="cpu:0", machine=machine)
    assert [op for op, device in placed.devices.items() if device == "npu:0"] == ["linear", "relu", "linear_1"]
    assert placed.copies == ()
    assert placed.why("sigmoid") == (
        "op 'sigmoid' is on cpu:0 (eager) by fallback: the part from 'linear_2' is subgraph 2 for npu:0, which takes 1; "
        "op 'sigmoid' runs on cpu:0"
    )
    assert torch.equal(placed.run(*traced.example_inputs), module(*traced.example_inputs))
    with pytest.raises(UsageError, match="the part of 1 op from 'relu' is too small for npu:0, which takes 2 or more; give a"):
        annotate(traced, {"relu": "npu:0"}, default="cpu:0", machine=machine)


def test_a_device_of_one_model_runs_one_at_a_time() -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=2&width=8"))
    one, other = (annotate(traced, {"*": "npu:0"}, default="cpu:0", machine=npu(one_model=True)) for _ in range(2))
    [lock] = one.runner.locks
    assert other.runner.locks == (lock,)
    answers = []
    with lock:
        waiting = Thread(target=lambda: answers.append(other.run(*traced.example_inputs)))
        waiting.start()
        waiting.join(0.05)
        assert answers == []
    waiting.join(20)
    assert torch.equal(answers[0], traced.run(*traced.example_inputs))


def test_a_precision_for_each_device_with_its_error() -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=3&width=16"))
    machine = Machine.of([CPU, parse_device("cpu:1")])
    placed = annotate(traced, {"linear_1": ("cpu:1", "eager", "bf16")}, default="cpu:0", machine=machine)
    part, whole = errors_of(placed)
    assert (part.site, part.num_ops, whole.part) == ("cpu:1 (eager, bf16)", 1, "the whole model")
    assert 0 < part.relative < 0.02 and 0 < whole.relative < 0.02
    with pytest.raises(BackendError, match=r"off by 0\.0\d+ of the largest value against f32, and at most 1e-06 is allowed"):
        annotate(traced, {"linear_1": ("cpu:1", "eager", "bf16")}, default="cpu:0", machine=machine, max_error=1e-6)
    assert annotate(traced, default="cpu:0", machine=machine, max_error=0.0).copies == ()
    bf16 = annotate(traced, {"*": ("cpu:1", "eager", "bf16")}, default="cpu:0", machine=machine).plan()
    assert bf16.precision == "bf16"


@pytest.mark.parametrize("seed", range(3))
def test_the_planner_keeps_rules_as_well_as_brute_force(seed: int) -> None:
    choose = random.Random(seed)
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=4&width=8"))
    ops = [op.name for op in traced.graph.ops]
    ruled = replace(parse_device("null:1"), max_subgraphs=1, min_ops=4)
    machine = Machine.of([parse_device("null:0"), ruled], [Link(a, b, 0, 1e-4, 0, 1e-4, 0) for a, b in permutations(NULLS)])
    slower = {"null:0": 1.0, "null:1": 3.0}  # without rules less than four ops are best there
    seconds = {(op, name): slower[name] * choose.uniform(1e-3, 2e-3) for op in ops for name in NULLS}
    profile = Profile.given(traced.graph, seconds)
    placed = annotate(traced, default="auto", machine=machine, profile=profile, budget=Budget(planner_s=2))
    assert not broken_rules(ruled, parts_on(traced.graph, placed.choices, ruled))
    best_s = inf
    for names in product(NULLS, repeat=len(ops)):
        choices = {op: Choice(Site(name), "pattern", "") for op, name in zip(ops, names, strict=True)}
        if not broken_rules(ruled, parts_on(traced.graph, choices, ruled)):
            parts = parts_of(traced.graph, choices)
            stages = tuple(Stage(part.name, part.ops, (part.site.device,)) for part in parts)
            plan = predict(Plan(Source("m"), traced.graph.hash, "", stages, UNKNOWN), traced.graph, machine, profile)
            best_s = min(best_s, plan.prediction.bottleneck_s)
    predicted = placed.plan().prediction
    assert isclose(predicted.bottleneck_s, best_s) and predicted.bound_s <= best_s * (1 + 1e-9) and predicted.gap < 1e-6


def test_parts_in_two_precisions_run_as_a_pipeline_and_from_a_file(tmp_path: Path) -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=3&width=16"))
    machine = Machine.of(map(parse_device, NULLS))
    placed = annotate(traced, {"linear_1": ("null:1", "eager", "bf16")}, default="null:0", machine=machine)
    plan = placed.plan()
    assert plan.precisions == ["f32", "bf16", "f32"] and "eager:bf16" in plan.summary()
    assert plan.hash != replace(plan, stages=tuple(replace(stage, precision=None) for stage in plan.stages)).hash
    write_plan(plan, traced.graph, tmp_path / "plan.yaml")
    again = read_plan(tmp_path / "plan.yaml").resolve(traced.graph)
    assert again.precisions == plan.precisions
    assert annotate(traced, again, default="null:0", machine=machine).same_as(placed)
    with open_pipeline(traced, again, machine) as model:
        assert torch.equal(model(*traced.example_inputs), placed.run(*traced.example_inputs))
    with pytest.raises(ProfileError, match="holds no measurement of eager on null:0"):
        predict(again, traced.graph, machine, Profile.given(traced.graph, {}))
