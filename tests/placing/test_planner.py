"""default='auto': the planner places what no pattern names, with a bound, and says what the next best device costs."""

from dataclasses import replace
from itertools import permutations
from math import isclose

import pytest

from autosplit import Budget, annotate
from autosplit.errors import InfeasibleError, UsageError
from autosplit.memory.stages import count
from autosplit.placing.costs import costs_of
from autosplit.placing.placed import Placed
from autosplit.placing.sites import Choice, Site
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.values.links import Link
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import held_on
from autosplit.values.profile import Profile

MACHINE = Machine.of(
    map(parse_device, ("null:0", "null:1")),
    [Link(a, b, 0, 1e-4, 0, 1e-4, 0) for a, b in (("null:0", "null:1"), ("null:1", "null:0"))],
)


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(load_model("autosplit.examples.mlp:mlp?depth=4&width=8"))


@pytest.fixture(scope="module")
def profile(traced: Traced) -> Profile:
    return Profile.given(traced.graph, {(op.name, device.name): 1e-3 for op in traced.graph.ops for device in MACHINE.devices})


def test_the_planner_places_the_rest_with_patterns_as_pins_and_a_bound(traced: Traced, profile: Profile) -> None:
    placed = annotate(
        traced, {"linear": "null:1"}, default="auto", machine=MACHINE, profile=profile, budget=Budget(planner_s=300)
    )
    assert placed.devices["linear"] == "null:1" and placed.choices["linear"].kind == "pattern"
    assert {choice.kind for choice in placed.choices.values()} == {"pattern", "planner"}
    assert placed.planned is not None and placed.planned.status == "optimal"
    counts = [sum(choice.site.device == device.name for choice in placed.choices.values()) for device in MACHINE.devices]
    assert sorted(counts) == [3, 4] and len(placed.copies) == 1
    plan = placed.plan()
    assert isclose(plan.prediction.bottleneck_s, placed.planned.prediction.bottleneck_s)
    assert 0 < plan.prediction.bound_s <= plan.prediction.bottleneck_s
    why = placed.why("relu")
    assert "by the planner (optimal, gap 0.0%); it takes 1.00 ms there, and its copies 0.0 us" in why
    assert "; on null:0 1.00 ms, and its copies 400.0 us" in why
    again = annotate(placed, {"linear": "null:1"}, "auto", budget=Budget(planner_s=300))
    assert again is placed


def test_readers_that_share_a_memory_are_charged_one_copy(traced: Traced, profile: Profile) -> None:
    sharing = replace(parse_device("npu:0"), shares="null:1")
    links = [Link(a, b, 0, 1e-4, 0, 1e-4, 0) for a, b in permutations(("null:0", "null:1", "npu:0"), 2)]
    machine = Machine.of([*MACHINE.devices, sharing], links)
    choices = {op.name: Choice(Site("null:0"), "default", "") for op in traced.graph.ops}
    op = next(op for op in traced.graph.ops if not set(op.inputs) & set(traced.graph.inputs))
    doubled = replace(
        traced.graph, ops=(*traced.graph.ops, replace(traced.graph.ops[-1], name="other", inputs=op.outputs, outputs=()))
    )
    [reader] = traced.graph.consumers[op.outputs[0]]
    for name, device in ((reader, "null:1"), ("other", "npu:0")):
        choices[name] = Choice(Site(device), "default", "")
    here = next(cost for cost in costs_of(doubled, choices, machine, profile, op.name) if cost.device == "null:0")
    assert isclose(here.copy_s, 2e-4)


def test_pins_that_cannot_hold_and_a_missing_profile_are_named(traced: Traced, profile: Profile) -> None:
    with pytest.raises(UsageError, match="default='auto' needs the seconds of the ops"):
        annotate(annotate(traced, machine=MACHINE), {}, default="auto")
    with pytest.raises(InfeasibleError, match="the largest cap is 100 B"):
        annotate(traced, default="auto", machine=MACHINE.with_memory({"null:0": 100, "null:1": 100}), profile=profile)


def test_caps_count_values_and_ring_slots_beside_weights(traced: Traced, profile: Profile) -> None:
    free = annotate(traced, default="auto", machine=MACHINE, profile=profile, budget=Budget(planner_s=300))

    def held(placed: Placed) -> dict[str, tuple[int, int]]:
        plan = count(traced.graph, placed.plan(), values_of(traced))
        names = dict.fromkeys(name for stage in plan.stages for name in stage.devices)
        return {name: held_on(MACHINE[name], plan.stages, MACHINE.devices, traced.graph) for name in names}

    heavy = max(held(free), key=lambda name: sum(held(free)[name]))
    weights, beside = held(free)[heavy]
    machine = MACHINE.with_memory({heavy: weights + beside - 1})
    placed = annotate(traced, default="auto", machine=machine, profile=profile, budget=Budget(planner_s=300))
    assert sum(held(placed).get(heavy, (0, 0))) < weights + beside
    within = annotate(traced, default="auto", machine=MACHINE.with_memory({heavy: weights + beside}), profile=profile)
    assert sum(held(within)[heavy]) <= weights + beside
    tight = MACHINE.with_memory({device.name: weights for device in MACHINE.devices})
    with pytest.raises(
        InfeasibleError, match=r"of weights and .* beside them \(values, rings, backend, process\), and its cap is|no plan fits"
    ):
        annotate(traced, default="auto", machine=tight, profile=profile, budget=Budget(planner_s=300))
