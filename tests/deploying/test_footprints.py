"""The memory account: planner, plan, host and measurement count alike."""

from dataclasses import replace

import pytest
import torch

from autosplit import api
from autosplit.backends.workspace import Workspace
from autosplit.deploying.comparing import compare
from autosplit.deploying.footprints import Footprints
from autosplit.deploying.networks import deploy
from autosplit.deploying.replanning import plan_on
from autosplit.deploying.setup import Budget, Setup
from autosplit.devices.limits import usable_cores
from autosplit.errors import DeviceError, PlanError
from autosplit.memory.stages import count, footprints_of, with_footprints
from autosplit.planning.baselines import Baselines, unmet_demands
from autosplit.serving.hostmanager import HostManager
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage, held_on
from autosplit.values.profile import Profile

CORE = f"cpu:{usable_cores()[0]}"


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(load_model("autosplit.examples.tied:tied"))


def one_stage(traced: Traced, device: str) -> Plan:
    stage = Stage("stage0", tuple(op.name for op in traced.graph.ops), (device,))
    return Plan(Source("m"), traced.graph.hash, "", (stage,), UNKNOWN)


def test_the_host_takes_a_plan_at_the_bytes_that_were_counted_and_refuses_one_byte_less(traced: Traced) -> None:
    ops = [op.name for op in traced.graph.ops]
    halves = tuple(Stage(f"stage{k}", tuple(part), ("null:0",)) for k, part in enumerate((ops[:2], ops[2:])))
    plan = count(traced.graph, replace(one_stage(traced, "null:0"), stages=halves), values_of(traced))
    free = Machine.of([parse_device("null:0")])
    total = sum(held_on(free["null:0"], plan.stages, free.devices, traced.graph))
    with Workspace() as workspace:
        fitting = free.with_memory({"null:0": total})
        plan.verify(traced.graph, fitting)
        with HostManager(fitting) as host:
            deploy(host, "net", traced, plan, fitting, workspace)
            assert host.devices["null:0"].used_bytes == total
        short = free.with_memory({"null:0": total - 1})
        with pytest.raises(PlanError, match=r"device 'null:0' would hold .* of weights and .* beside them .* and its cap is"):
            plan.verify(traced.graph, short)
        with HostManager(short) as host, pytest.raises(DeviceError, match=r"needs .* on device 'null:0', and .* are free"):
            deploy(host, "net", traced, plan, free, workspace)
        with pytest.raises(PlanError, match="beside them"), HostManager() as host:
            deploy(host, "net", traced, one_stage(traced, "null:0"), short.with_memory({"null:0": 1}), workspace)


def test_a_stage_is_measured_once_and_then_counts_as_it_was_measured(traced: Traced) -> None:
    machine, plan = Machine.of([parse_device(CORE)]), one_stage(traced, CORE)
    footprints, profile = Footprints(machine), Profile.given(traced.graph, {(op.name, CORE): 1e-3 for op in traced.graph.ops})
    measured = footprints.account(traced, profile).measured(plan)
    [memory] = [stage.memory for stage in measured.stages]
    assert memory is not None and memory.measured and memory.base_bytes > 1e6
    found = footprints.footprint(traced, plan, plan.stages[0])
    assert found is not None and memory.held_bytes == found.held_bytes
    assert traced.graph.weight_bytes <= memory.held_bytes < traced.graph.weight_bytes + 20e6
    footprints.measure(traced, replace(plan, queue_depth=2))
    assert footprints.footprint(traced, plan, plan.stages[0]) is found  # what was measured first stays
    again = Profile.from_dict(with_footprints(profile, footprints.of(traced)).to_dict())
    assert count(traced.graph, plan, values_of(traced), footprints_of(again)) == measured


def test_weights_that_were_saved_a_moment_ago_count_once() -> None:
    """Each worker's own memory also held its weights, until they were on disk: 154.7 MB in place of 10.6 MB."""
    traced, machine = trace(load_model("autosplit.examples.mlp:mlp?depth=4&width=3000")), Machine.of([parse_device(CORE)])
    footprints, plan = Footprints(machine), one_stage(traced, CORE)
    footprints.measure(traced, plan)
    found = footprints.footprint(traced, plan, plan.stages[0])
    assert found is not None and traced.graph.weight_bytes > 140e6
    assert found.base_bytes < 30e6 and traced.graph.weight_bytes <= found.held_bytes < traced.graph.weight_bytes + 20e6


def test_a_small_stage_holds_its_weights() -> None:
    """It held half of them: malloc gave free memory back while it loaded, which the process that forks workers had left."""
    traced, machine = trace(load_model("autosplit.examples.mlp:mlp?depth=2&width=512")), Machine.of([parse_device(CORE)])
    footprints, plan = Footprints(machine), one_stage(traced, CORE)
    footprints.measure(traced, plan)
    found = footprints.footprint(traced, plan, plan.stages[0])
    assert found is not None and traced.graph.weight_bytes <= found.held_bytes < traced.graph.weight_bytes + 1e6


def test_two_stages_of_12_6_mb_of_weights_fit_under_caps_of_30_mb() -> None:
    """They were refused with their weights counted twice. A core that is the only one gets both, and twice the cap."""
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=4&width=1254"))
    cores, ops = [f"cpu:{core}" for core in usable_cores()[:2]], [op.name for op in traced.graph.ops]
    parts = ops[: len(ops) // 2], ops[len(ops) // 2 :]
    halves = tuple(Stage(f"stage{k}", tuple(part), (cores[-k],)) for k, part in enumerate(parts))
    machine = Machine.of(map(parse_device, cores)).with_memory(dict.fromkeys(cores, 60_000_000 // len(cores)))
    profile = Profile.given(traced.graph, {(op, core): 1e-3 for op in ops for core in cores})
    plan = Footprints(machine).account(traced, profile).measured(replace(one_stage(traced, CORE), stages=halves))
    held = [stage.memory for stage in plan.verify(traced.graph, machine).stages if stage.memory is not None]
    assert [memory.weight_bytes for memory in held if memory.measured] == pytest.approx([12.6e6, 12.6e6], rel=0.01)


def test_a_baseline_that_ran_counts_as_it_was_measured_and_is_unfit_beyond_a_cap(traced: Traced) -> None:
    machine, plan = Machine.of([parse_device(CORE)]), one_stage(traced, CORE)
    beside, setup = Baselines({"one device": replace(plan, queue_depth=2)}), Setup(progress=False, store=None)
    report = compare({1: (traced, None)}, plan, beside, machine, setup=setup, budget=Budget(num_rounds=1, num_requests=8))
    ran = report.outcomes["one device"].plan
    [memory] = [stage.memory for stage in ran.stages]
    assert memory is not None and memory.measured and memory.held_bytes >= traced.graph.weight_bytes
    assert not unmet_demands(ran, 1.0, traced.graph, machine, Constraints())
    small = machine.with_memory({CORE: memory.weight_bytes + memory.beside_bytes - 1})
    [fault] = unmet_demands(ran, 1.0, traced.graph, small, Constraints())
    assert f"device '{CORE}' would hold" in fault


def test_a_cap_that_one_device_cannot_hold_gives_a_plan_that_fits() -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=6&width=256"))
    names = ("null:0", "null:1")
    machine = Machine.of(map(parse_device, names))
    profile = Profile.given(traced.graph, {(op.name, name): 1e-3 for op in traced.graph.ops for name in names})
    capped = machine.with_memory(dict.fromkeys(names, traced.graph.weight_bytes * 4 // 5))
    setup, budget = Setup(progress=False, store=None), Budget(search_s=0, planner_s=2, explain_s=0)
    found = api.search(traced, profile, capped, setup=setup, budget=budget).plan.verify(traced.graph, capped)
    assert len(found.stages) == 2 and all(stage.memory is not None for stage in found.stages)
    beside = Baselines({"one device": one_stage(traced, names[0])})
    tight = machine.with_memory(dict.fromkeys(names, traced.graph.weight_bytes + 1))  # holds all weights, and nothing beside them
    assert len(plan_on(tight, traced, found, profile).stages) == 2
    report = compare({1: (traced, profile)}, found, beside, capped, setup=setup, budget=Budget(num_rounds=1, num_requests=8))
    assert "device 'null:0' would hold" in report.left_out["one device"]


class Branches(torch.nn.Module):
    """Two branches that meet, behind a first layer or with an input each: the networks of Glow's own tests of its partitioner."""

    def __init__(self, first: torch.nn.Module | None = None) -> None:
        super().__init__()
        layers = lambda: (torch.nn.Linear(16, 16), torch.nn.Sigmoid(), torch.nn.Linear(16, 8), torch.nn.Sigmoid())  # noqa: E731
        self.first, self.left, self.right = first, torch.nn.Sequential(*layers()), torch.nn.Sequential(*layers())

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        left, right = inputs if self.first is None else [torch.sigmoid(self.first(inputs[0]))] * 2
        return self.left(left) * self.right(right)


@pytest.mark.parametrize(
    ("first", "inputs", "cap_bytes", "num_devices"), [(torch.nn.Linear(32, 16), 1, 3072, 3), (None, 2, 2048, 4)]
)
def test_devices_of_a_few_kilobytes_hold_a_plan_with_few_slots(
    first: torch.nn.Module | None, inputs: int, cap_bytes: int, num_devices: int
) -> None:
    module, x = Branches(first).eval(), tuple(torch.randn(1, 32 if first else 16) for _ in range(inputs))
    traced, names = api.trace(module, inputs=x), [f"null:{number}" for number in range(num_devices)]
    machine = Machine.of(map(parse_device, names)).with_memory(dict.fromkeys(names, cap_bytes))
    profile = Profile.given(traced.graph, {(op.name, name): 1e-5 for op in traced.graph.ops for name in names})
    setup, budget = Setup(progress=False, store=None), Budget(search_s=0, explain_s=0)
    plan = api.search(traced, profile, machine, setup=setup, budget=budget).plan.verify(traced.graph, machine)
    assert traced.graph.weight_bytes > cap_bytes and plan.queue_depth < setup.queue_depth
    with HostManager(machine) as host, Workspace() as workspace, torch.no_grad():
        engine = deploy(host, "net", traced, plan, machine, workspace)
        assert all(device.used_bytes <= cap_bytes for device in host.devices.values())
        [[y]] = engine.run_many([x])
        assert torch.equal(y, module(*x))
