"""CPU cores and a simulated accelerator together: everything is real but the calls of torch.cuda."""

import re
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from simulated import cuda
from simulatedmemory import CONTEXT_BYTES, memory_of, taken

from autosplit import api
from autosplit.deploying.setup import Budget, Setup
from autosplit.devices.discovering import machine_for
from autosplit.devices.limits import affinity
from autosplit.keeping import stored_profile
from autosplit.measuring import measure
from autosplit.planning.backends import backend_choices
from autosplit.planning.question import Question
from autosplit.reports.outcomes import PLAN
from autosplit.searching.candidates import SearchResult
from autosplit.searching.precisions import other_precisions, without_worst
from autosplit.serving.hostmanager import HostManager
from autosplit.shapes.profiles import shapes_of
from autosplit.tracing.family import Family
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph
from autosplit.values.machine import HOST, Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage
from autosplit.values.planfile import write_plan
from autosplit.values.profile import Profile
from autosplit.values.residency import least_bytes
from autosplit.values.samples import Measured, Setting
from autosplit.webservice.repository import Repository


@pytest.mark.timeout(120)
def test_the_first_ops_on_a_core_and_the_rest_on_the_accelerator_under_a_cap(tmp_path, monkeypatch) -> None:
    """Weights of 6 MB, and room for half of them beside the context. Such a plan was refused after its first run."""
    monkeypatch.setattr("autosplit.searching.hunt.ROUND_S", 0.01)  # of the simulated clock, in which work takes far longer
    core = f"cpu:{affinity()[0]}"
    with cuda():
        machine = machine_for(f"{core},cuda:0", memory={"cuda:0": CONTEXT_BYTES + 3_500_000})
        traced = api.trace("autosplit.examples.mlp:mlp?depth=6&width=500")
        profile = measure(traced, machine, budget_s=0.3, store=tmp_path)
        found = profile.measured[Setting("cuda:0", "eager", 1)]
        assert found.source == "in-graph" and found.error == 0
        assert found.provenance.accelerator == {"name": "Simulated", "capability": "0.0", "driver": "1.0", "runtime": "none"}
        pairs = {(link.source, link.target) for link in profile.links}
        assert pairs == {(a, b) for a in (HOST, core, "cuda:0") for b in (HOST, core, "cuda:0") if a != b}
        first, last = traced.graph.ops[0].name, traced.graph.ops[-1].name
        wanted = Constraints(pins={first: core, last: "cuda:0"}, num_stages=2)
        plan = api.search(traced, profile, machine, wanted, budget=Budget(search_s=0.3, explain_s=0)).plan
        assert [stage.devices for stage in plan.stages] == [(core,), ("cuda:0",)]
        memory = plan.stages[1].memory
        assert memory is not None and 0 < memory.weight_bytes <= 3_500_000 and memory.base_bytes == 0
        stored = stored_profile(traced, plan, machine, Setup(store=tmp_path))
        assert stored is not None and {*stored.links} == {*profile.links}
        report = api.run(traced, plan, machine, baselines=False, budget=Budget(num_requests=20, num_rounds=1))
    outcome = report.best
    assert outcome.outputs_equal and outcome.max_abs_error == 0
    assert [stage.note for stage in outcome.stats.stages] == ["", ""]


@pytest.fixture(scope="module")
def on_device() -> tuple[Family, Plan, Profile, str]:
    """A model, a plan of its largest size on an accelerator alone, its profile on a core and there, and the core."""
    core, family = f"cpu:{affinity()[0]}", api.trace("autosplit.examples.mlp:mlp?depth=3&width=16", sizes={"batch": "1..2"})
    ops, stamp = tuple(op.name for op in family.graph.ops), (family.variants[0].source, family.graph.hash, "")
    profile = Profile.given(family.graph, {(op, name): 1e-4 for op in ops for name in (core, "cuda:0")})
    return family, Plan(*stamp, (Stage("s", ops, ("cuda:0",)),), UNKNOWN, microbatch=2), profile, core


@pytest.mark.timeout(120)
def test_a_plan_goes_on_without_a_device_that_is_lost_amid_1000_requests(on_device, tmp_path, monkeypatch) -> None:
    (family, plan, profile, core), requests = on_device, [torch.rand(2, 16) for _ in range(1000)]
    traced = family.variants[0]
    [stage] = plan.stages
    streamed = replace(plan, stages=(replace(stage, resident_bytes=least_bytes(*family.graph.own_bytes(stage.ops))),))
    monkeypatch.setenv("GONE", str(tmp_path / "first"))
    with cuda("simulated:Vanishing"):
        machine = machine_for(f"{core},cuda:0")
        with api.open_pipeline(traced, plan, machine, profile=profile) as service:
            for x, answer in zip(requests, service.stream(requests), strict=True):
                torch.testing.assert_close(answer, traced.run(x))
            [reason] = service.pipeline.replanned
        monkeypatch.setenv("GONE", str(tmp_path / "second"))
        budget = Budget(num_requests=1000, num_rounds=1)
        report = api.run(traced, streamed, machine, profile=profile, baselines=False, setup=Setup(progress=False), budget=budget)
    assert re.search(f"'cuda:0' was lost: .*fell off the bus.*no device.*; planned anew: stage0 on {core}$", reason)
    assert [stage.devices for stage in report.best.plan.stages] == [(core,)] and report.best.outputs_equal
    assert "device 'cuda:0' was lost, and all ran anew without it: " in report.notes[0]


@pytest.mark.timeout(120)
def test_a_served_plan_for_several_sizes_goes_on_without_a_device_that_is_lost(on_device, tmp_path, monkeypatch) -> None:
    (family, plan, profile, core), requests = on_device, [torch.rand(1 + number % 2, 16) for number in range(1000)]
    plan = replace(plan, shapes=shapes_of(family.only([{"batch": 1}]), plan, None))
    monkeypatch.setenv("GONE", str(tmp_path / "gone"))
    monkeypatch.setattr("autosplit.webservice.repository.stored_profile", lambda *given: profile)
    write_plan(plan, family.graph, tmp_path / "mlp.yaml")
    with cuda("simulated:Vanishing"), HostManager() as host:
        with closing(Repository(host, {"mlp": tmp_path / "mlp.yaml"}, devices=f"{core},cuda:0")) as repository:
            repository.load("mlp").result()
            answers = [host.submit("mlp/1", [x]) for x in requests]
            for x, answer in zip(requests, answers, strict=True):
                torch.testing.assert_close(answer.result(60)[0], family.at({"batch": len(x)}).run(x))
        health = host.health()
    assert health["devices"]["cuda:0"]["stages"] == [] and health["devices"][core]["stages"] == ["mlp/1/stage0"]
    [reason] = health["networks"]["mlp/1"]["replanned"]
    assert "'cuda:0' was lost" in reason and health["networks"]["mlp/1"]["state"] == "ready"


def measured(*settings: tuple[str, str]) -> Profile:
    return Profile("model", "", {}, measured={Setting(*setting, 1): Measured({}) for setting in settings})


def test_a_backend_that_one_kind_of_device_lacks_is_used_on_the_other() -> None:
    machine = Machine.of([parse_device(name) for name in ("cpu:0", "cpu:1", "cuda:0")])
    profile = measured(("cpu:0", "a"), ("cpu:1", "a"), ("cpu:0", "b"), ("cpu:1", "b"), ("cuda:0", "b"), ("cuda:0", "c"))
    assert api.measured_backends(profile, machine) == ("a", "b", "c")
    question = Question(Graph("model", (), (), (), {}, {}), profile, Source("m:f"), machine, ("a", "b", "c"))
    choices = [" ".join(choice.values()) for choice in backend_choices(question)]
    assert choices == ["b b b", "a a b", "a a c", "b b c"]


@pytest.mark.timeout(120)
def test_a_model_that_never_fitted_its_accelerator_is_measured_in_pieces_streamed_and_right() -> None:
    """Weights of 47 MB, and 67 MB free, of which drivers take 34 MB; nothing is capped."""
    core = f"cpu:{affinity()[0]}"
    with taken(0, memory_of(0).free_bytes - 2 * CONTEXT_BYTES - 3_000_000), cuda():
        machine = machine_for(f"{core},cuda:0")
        traced = api.trace("autosplit.examples.mlp:mlp?depth=6&width=1400")
        profile = measure(traced, machine, budget_s=0.3)
        assert "eager on cuda:0: measured in 6 pieces, since the model does not fit" in profile.notes
        found = profile.measured[Setting("cuda:0", "eager", 1)]
        assert found.ops.keys() == profile.measured[Setting(core, "eager", 1)].ops.keys() and found.error == 0
        wanted = Constraints(pins={op.name: "cuda:0" for op in traced.graph.ops})
        plan = api.search(traced, profile, machine, wanted, budget=Budget(search_s=0, explain_s=0)).plan
        assert [stage.resident_bytes is not None for stage in plan.stages] == [True]
        report = api.run(traced, plan, machine, baselines=False, budget=Budget(num_requests=20, num_rounds=1))
    assert report.best.outputs_equal and report.best.max_abs_error == 0


@pytest.mark.timeout(120)
def test_what_another_precision_would_bring_is_measured_on_the_accelerator_and_said() -> None:
    """Products take half of the time there in half precision and in TF32, casts as long as any op."""
    with cuda():
        machine = machine_for("cuda:0")
        traced = api.trace("autosplit.examples.mlp:mlp?depth=3&width=40")
        profile = measure(traced, machine, budget_s=0.1, links=False)
        plan = api.search(traced, profile, machine, budget=Budget(search_s=0, explain_s=0)).plan
        told = list(other_precisions(traced, plan, machine, profile, Setup(progress=False)))
    pattern = (
        r"(\w+) on cuda:0 would bring ([\d.]+) times the throughput of f32, with outputs off by (\S+) of the largest value: .*"
    )
    found = {one[1]: (float(one[2]), float(one[3])) for one in (re.fullmatch(pattern, text) for text in told) if one}
    assert found.keys() == {"tf32", "bf16", "f16"}
    assert found["tf32"][0] > 1.2 and 0 < found["tf32"][1] < 0.0025
    assert 0 < found["f16"][1] < found["bf16"][1] < 0.05
    assert not list(other_precisions(traced, replace(plan, precision="bf16"), machine, profile, Setup(progress=False)))


@pytest.mark.timeout(120)
def test_a_stage_gets_a_lower_precision_within_the_users_error_and_gives_it_back_beyond(tmp_path) -> None:
    """TF32 halves the time of a product on the simulated device, and is off by some 1e-4; a core computes in f32."""
    core = f"cpu:{affinity()[0]}"
    traced = api.trace("autosplit.examples.mlp:mlp?depth=3&width=40")
    first, last = traced.graph.ops[0].name, traced.graph.ops[-1].name
    wanted = Constraints(pins={first: core, last: "cuda:0"}, num_stages=2)
    with cuda():
        machine = machine_for(f"{core},cuda:0")
        profile = measure(traced, machine, ["eager"], budget_s=0.1, links=False)

        def searched(max_error: float, search_s: float = 0.0) -> SearchResult:
            setup = Setup(progress=False, store=tmp_path, max_error=max_error)
            return api.search(traced, profile, machine, wanted, setup=setup, budget=Budget(search_s=search_s, explain_s=0))

        found = searched(0.0025)
        assert [(stage.devices, stage.precision) for stage in found.plan.stages] == [((core,), None), (("cuda:0",), "tf32")]
        error = found.profile.measured[Setting("cuda:0", "eager:tf32", 1)].error
        assert error is not None and 0 < error < 0.0025
        assert not any("bf16" in setting.backend for setting in found.profile.measured)
        kept = Setup(progress=False, store=tmp_path)
        budget = Budget(num_requests=20, num_rounds=1)
        outcome = api.run(traced, found.plan, machine, baselines=False, setup=kept, budget=budget).outcomes[PLAN]
        assert outcome.outputs_equal and 0 < outcome.max_relative_error < 0.0025
        strict = replace(kept, max_error=outcome.max_relative_error / 2)
        beyond = api.run(traced, found.plan, machine, baselines=False, setup=strict, budget=budget).outcomes[PLAN]
        assert not beyond.outputs_equal and f"the tolerance is {strict.max_error:.3g}" in beyond.fault
        assert searched(error / 2).plan.precisions == ["f32", "f32"]
        stored = stored_profile(traced, found.plan, machine, kept)
        assert stored is not None and stored.measured[Setting("cuda:0", "eager:tf32", 1)].error == error


def test_the_least_exact_precision_of_a_plan_that_is_off_too_far_is_left_out() -> None:
    exact, rough = Setting("cuda:0", "eager:tf32", 1), Setting("cuda:1", "eager:bf16", 1)
    known = Profile("m", "", {}, measured={exact: Measured({}, error=1e-4), rough: Measured({}, error=1e-3)})
    machine = Machine.of([parse_device(name) for name in ("cuda:0", "cuda:1")])
    question = Question(Graph("m", (), (), (), {}, {}), known, Source("m:f"), machine, ("eager", "eager:tf32", "eager:bf16"))
    stages = Stage("a", ("x",), ("cuda:0",), precision="tf32"), Stage("b", ("y",), ("cuda:1",), precision="bf16")
    left = without_worst(question, Plan(Source("m:f"), "", "", stages, UNKNOWN), "it is off by 1e-3")
    assert left.backends == ("eager", "eager:tf32") and left.profile.notes == ("eager:bf16 is left out: it is off by 1e-3",)
    assert without_worst(left, Plan(Source("m:f"), "", "", (replace(stages[0], precision=None),), UNKNOWN), "wrong") == left
