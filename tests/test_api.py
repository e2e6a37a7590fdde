"""The main job from Python: five calls on real workers, and a search that learns from what it measures."""

import asyncio
import errno
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import autosplit
from autosplit.api import AutoResult, run_subjects
from autosplit.backends.workspace import Workspace
from autosplit.deploying.bench import Bench
from autosplit.deploying.setup import Budget, Setup
from autosplit.devices.limits import affinity
from autosplit.errors import PlanError, ProfileError, UsageError
from autosplit.planning.baselines import baselines_of
from autosplit.planning.givensplits import read_given
from autosplit.planning.predicting import measured_backends
from autosplit.planning.question import Question
from autosplit.planning.splitjudging import GIVEN, judge_split
from autosplit.reports.outcomes import PLAN
from autosplit.tracing.splitting import save_stage, unsplit
from autosplit.tracing.verifying import distinct_inputs
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan
from autosplit.values.profile import Profile

CORES = affinity()[:2]
TWO = Machine.of(parse_device(f"cpu:{core}") for core in CORES)
TIED = "autosplit.examples.tied:tied"


@cache
def traced_of(spec: str, batch: int = 1) -> autosplit.Traced:
    """One trace for all tests."""
    return autosplit.trace(spec, batch=batch)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> AutoResult:
    """A net with a tied weight and a dict output, four items a request, two backends, on two devices."""
    folder = tmp_path_factory.mktemp("profiles")
    two = ["eager", "onnxruntime"]
    budget = Budget(search_s=0.3, planner_s=0.5, num_requests=40, num_rounds=2)
    return autosplit.auto(traced_of(TIED, 4), TWO, setup=Setup(backends=two, store=folder), budget=budget)


@pytest.mark.timeout(300)
def test_auto_finds_a_plan_whose_outputs_match(found: AutoResult) -> None:
    assert found.report.best.outputs_equal
    report = found.report
    assert report.best.against(report.plan, "throughput").median >= 1
    assert found.plan.prediction.bound_s > 0 and found.search.plan.prediction.bound_s > 0
    assert found.plan.source.spec == TIED and found.plan.versions["torch"] == torch.__version__


def test_the_search_measured_its_candidates_and_kept_their_stages(found: AutoResult) -> None:
    ran = [trial for trial in found.search.trials if trial.measured_per_s]
    assert ran and ran[0].times_first == pytest.approx(1.0)
    assert len({trial.plan.hash for trial in ran}) == len(ran)
    assert found.search.profile.stages
    assert len(found.search.frame()) == len(found.search.trials)
    assert "<table>" in found.search._repr_html_()
    assert "data:image/svg+xml" in found._repr_html_()
    assert len(repr(found.search)) < 400 and len(repr(found)) < 400, "an interactive session shows it: it was 780,000 letters"


@pytest.mark.timeout(200)
def test_a_plan_that_cuts_requests_runs_beside_baselines_that_do_not() -> None:
    spec = "autosplit.examples.mlp:mlp?depth=4&width=64"
    whole, half = (traced_of(spec, batch) for batch in (4, 2))
    profiles = [
        Profile.given(one.graph, {(op.name, device.name): 1e-4 for op in one.graph.ops for device in TWO.devices})
        for one in (whole, half)
    ]
    found = autosplit.search(half, profiles[1], TWO, setup=Setup(queue_depth=7), budget=Budget(search_s=0)).plan
    plan = replace(found, source=whole.source)
    subjects = {2: (half, profiles[1]), 4: (whole, profiles[0])}
    setup, budget = Setup(backends=["eager"]), Budget(num_requests=20, num_rounds=1)
    report = run_subjects(subjects, plan, TWO, Constraints(), setup=setup, budget=budget)
    assert (plan.microbatch, plan.queue_depth) == (2, 7), "the depth was taken for the seconds of streamed weights"
    sizes = {name: outcome.plan.microbatch for name, outcome in report.outcomes.items()}
    assert sizes["plan"] == 2 and sizes["all cores (eager)"] == 4 and set(sizes.values()) == {2, 4}
    assert all(("2 at a time" in name) == (size == 2) for name, size in sizes.items() if name != "plan")
    assert all(outcome.outputs_equal and outcome.max_abs_error == 0 for outcome in report.outcomes.values())
    assert report.best.plan.graph_hash == (half if report.best.plan.microbatch == 2 else whole).graph.hash


@pytest.mark.timeout(200)
@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_both_figures_are_measured_in_rounds_and_the_stages_in_full_ones(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosplit.deploying.contest.SCREEN_S", 0.0)  # rounds are short here, and the budget is not
    traced = traced_of("autosplit.examples.mlp:mlp?depth=4&width=64")
    seconds = {(op.name, device.name): 1e-4 for op in traced.graph.ops for device in TWO.devices}
    profile = Profile.given(traced.graph, seconds)
    plan = replace(autosplit.search(traced, profile, TWO, Constraints(num_stages=2), budget=0).plan, objective=objective)
    report = autosplit.run(traced, plan, TWO, profile=profile, budget=Budget(num_requests=40, num_rounds=4))
    full, alone = len(report.plan.rounds_per_s), len(report.plan.alone_s)
    assert (full >= 4, alone) == (True, 3) if objective == "throughput" else (full, alone >= 4) == (3, True)
    assert report.plan.latency.count >= alone and report.plan.loaded_latency.p50_s > 0
    assert report.plan.stats.num_requests >= 40 - 3 and all(outcome.alone_s for outcome in report.outcomes.values())
    values = [row["latency_s"] for row in report.rows()] if objective == "latency" else []
    assert values == sorted(values) and report.to_dict()["latency_s"]["p50"] == report.best.latency.p50_s


@pytest.mark.timeout(200)
@pytest.mark.parametrize("spec", ["autosplit.examples.unet:unet?channels=4&size=32", TIED])
def test_three_stages_on_two_devices_equal_the_unsplit_model(spec: str) -> None:
    traced = traced_of(spec)
    seconds = {(op.name, device.name): 1e-4 for op in traced.graph.ops for device in TWO.devices}
    profile = autosplit.Profile.given(traced.graph, seconds)
    plan = autosplit.search(traced, profile, TWO, Constraints(num_stages=3), budget=Budget(search_s=0)).plan
    assert len(plan.stages) == 3
    with autosplit.open_pipeline(traced, plan, TWO) as model:
        for inputs in distinct_inputs(traced.example_inputs, 3):
            torch.set_num_threads(1)
            args = torch.utils._pytree.tree_unflatten(list(inputs), traced.in_spec)
            expected, answer = traced.run(*args[0], **args[1]), model(*args[0], **args[1])
            assert type(answer) is type(expected)
            for ours, own in zip(*map(torch.utils._pytree.tree_leaves, (answer, expected)), strict=True):
                assert torch.equal(ours, own)


def test_any_set_of_ops_on_a_device_is_several_stages_there(tmp_path: Path) -> None:
    """Without a chain of devices the search ended in an IndexError."""
    module, x = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))).eval(), torch.randn(4, 16)
    traced = autosplit.trace(module, inputs=(x,))
    one, other = (device.name for device in TWO.devices)
    outer, inner = {one: 1e-3, other: 1.0}, {one: 1.0, other: 1e-3}
    seconds = zip(traced.graph.ops, (outer, inner, inner, outer), strict=True)
    profile = Profile.given(traced.graph, {(op.name, device): own[device] for op, own in seconds for device in own})
    chain, plan = (
        autosplit.search(traced, profile, TWO, demands, budget=Budget(search_s=0)).plan
        for demands in (Constraints(), Constraints(contiguous=False))
    )
    assert plan.prediction.bottleneck_s < 0.01 < 1.0 < chain.prediction.bottleneck_s
    assert [(len(stage.ops), stage.devices) for stage in plan.stages] == [(1, (one,)), (2, (other,)), (1, (one,))]
    with autosplit.open_pipeline(traced, plan) as service, torch.no_grad():
        assert torch.equal(service(x), module(x))
    (tmp_path / "map.json").write_text('{"0": 0, "1": 1, "2": 1, "3": 0}')
    split = read_given(str(tmp_path / "map.json"), traced.graph, TWO)
    given = judge_split(split, Question(traced.graph, profile, plan.source, TWO, ("eager",), time_limit_s=0.5)).plans[GIVEN]
    assert given.hash == plan.hash
    with pytest.raises(UsageError, match="reuse=False forbids that; drop one"):
        autosplit.search(traced, profile, TWO, Constraints(contiguous=False, reuse=False))


def test_a_profile_without_a_common_backend_is_refused() -> None:
    traced = traced_of(TIED)
    profile = autosplit.Profile.given(traced.graph, {(op.name, "null:0"): 1.0 for op in traced.graph.ops})
    with pytest.raises(ProfileError, match="no backend on all of null:0, null:1"):
        measured_backends(profile, Machine.of(map(parse_device, ("null:0", "null:1"))))


def test_the_main_backends_own_ways_run_however_little_the_profile_promises_them() -> None:
    traced = autosplit.trace("autosplit.examples.mlp:mlp?depth=3&width=8")
    machine = Machine.of([parse_device("null:0"), parse_device("null:1")])
    seconds = {(op.name, device.name): 1.0 for op in traced.graph.ops for device in machine.devices}
    profile = Profile.given(traced.graph, seconds)
    plan = autosplit.search(traced, profile, machine, Constraints(num_stages=2, max_replicas=1), budget=Budget(search_s=0)).plan
    fast = replace(plan, prediction=replace(plan.prediction, throughput_per_s=1e6))
    found = baselines_of(traced.graph, fast, machine, profile)
    assert "replicas (eager)" in found.plans and "even split (eager)" in found.left_out


def test_of_the_ops_that_a_backend_refuses_some_are_named_and_the_rest_counted() -> None:
    """Of a model in bf16 ONNX Runtime refuses nearly all of them, and the report had a paragraph for each."""
    traced = autosplit.trace("autosplit.examples.mlp:mlp?depth=8&width=8")
    machine = Machine.of([parse_device("null:0")])
    names = [op.name for op in traced.graph.ops]
    profile = Profile.given(traced.graph, dict.fromkeys([(name, "null:0") for name in names], 1.0))
    setting, measured = next(iter(profile.measured.items()))
    refusing = replace(measured, refused=dict.fromkeys(names[1:], "no rule"))
    profile = replace(profile, measured={setting: measured, setting._replace(backend="onnxruntime"): refusing})
    plan = autosplit.search(traced, profile, machine, setup=Setup(backends=["eager"]), budget=Budget(search_s=0)).plan
    reason = baselines_of(traced.graph, plan, machine, profile).left_out["onnxruntime alone"]
    assert reason.startswith(f"it refuses op '{names[1]}' (no rule), ") and reason.endswith(f"and {len(names) - 6} more")


def test_a_baseline_for_which_descriptors_are_short_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(bench: Bench, name: str, *args: Any, load: Any = Bench.load) -> Any:
        if name != PLAN:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return load(bench, name, *args)

    monkeypatch.setattr(Bench, "load", load)
    traced = traced_of("autosplit.examples.mlp:mlp?depth=2&width=8")
    ops = {(op.name, device.name): 1e-4 for op in traced.graph.ops for device in TWO.devices}
    profile = Profile.given(traced.graph, ops)
    plan = autosplit.search(traced, profile, TWO, Constraints(num_stages=2), budget=Budget(search_s=0)).plan
    report = autosplit.run(traced, plan, TWO, profile=profile, budget=Budget(num_requests=4, num_rounds=1))
    assert len(report.distinct()) == 1, "the plan, which may be the even split"
    assert "Too many open files" in report.left_out["replicas (eager)"]


def test_devices_may_be_named_in_each_call(tmp_path: Path) -> None:
    traced = traced_of(TIED)
    name = f"cpu:{CORES[0]}"
    profile = autosplit.measure(traced, name, setup=Setup(backends=["eager"]))
    assert {setting.device for setting in profile.measured} == {name}
    plan = autosplit.search(traced, profile, name, budget=Budget(search_s=0)).plan
    assert autosplit.run(traced, plan, name, baselines=False, budget=Budget(num_requests=4, num_rounds=1)).best.outputs_equal
    with autosplit.open_pipeline(traced, plan, name) as model:
        inputs = traced.example_inputs
        expected, late = model(*inputs), model.submit(*inputs, priority=1, deadline_s=60.0)
        answers = [late.result(), *model.stream([inputs] * 3), asyncio.run(model.call_async(*inputs))]
        assert all(torch.equal(answer[key], value) for answer in answers for key, value in expected.items())
        assert model.stats().num_requests == 6
    again = autosplit.predict(plan.unpredicted(), profile, devices=name)
    assert again.prediction.throughput_per_s == pytest.approx(plan.prediction.throughput_per_s)
    autosplit.write_plan(plan, traced.graph, tmp_path / "plan.yaml")
    with autosplit.load(str(tmp_path / "plan.yaml")).open() as model:
        assert model(*inputs).keys() == expected.keys()
    assert autosplit.measure(traced, [name], setup=Setup(backends="eager")).measured.keys() == profile.measured.keys()
    with pytest.raises(UsageError, match="devices"):
        autosplit.measure(traced, [7])  # type: ignore[list-item]


@pytest.mark.timeout(300)
def test_what_people_write_first_is_understood() -> None:
    """Devices as a list, a backend's name, one tensor as inputs, seconds as a budget."""
    module, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval(), torch.randn(1, 8)
    names = [device.name for device in TWO.devices]
    found = autosplit.auto(module, names, inputs=x, setup=Setup(backends="eager", progress=False), budget=0)
    assert found.machine == autosplit.machine_for(",".join(names)) and {key.backend for key in found.profile.measured} == {
        "eager"
    }
    assert torch.allclose(autosplit.trace(module, x).run(x), module(x))
    assert Setup(backends="eager, eager").considered == ("eager", "eager")
    with pytest.raises(UsageError, match="search_s must be at least 0 seconds, but is -5"):
        autosplit.run(found.traced, found.plan, names, budget=-5)


def test_a_plan_of_a_function_in_a_file_runs_as_the_user_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal names what is accepted, whether the call named a model or not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "detectors.py").write_text(
        "import torch\ndef net(): return torch.nn.Linear(3, 3).eval(), (torch.zeros(1, 3),)\ndef other(): return net()\n"
    )
    traced = autosplit.trace("detectors.py:net")
    profile = autosplit.Profile.given(traced.graph, {(op.name, "cpu:0"): 1.0 for op in traced.graph.ops})
    plan = autosplit.search(traced, profile, Machine.of([parse_device("cpu:0")]), budget=0).plan
    autosplit.write_plan(plan, traced.graph, tmp_path / "plan.yaml")
    for spec in ("detectors.py:net", "detectors:net", f"{tmp_path}/detectors.py:net"):
        assert autosplit.load("plan.yaml", spec).plan.hash == plan.hash
    for given in (None, "detectors.py:other"):
        with pytest.raises(UsageError, match=r"pass --model 'detectors\.py:net'( if you trust it)?$"):
            autosplit.load("plan.yaml", given)
    monkeypatch.chdir("/")
    assert autosplit.load(tmp_path / "plan.yaml", f"{tmp_path}/detectors.py:net").plan.hash == plan.hash


def test_demands_that_contradict_each_other_are_refused_before_a_trace() -> None:
    module = torch.nn.Linear(2, 2)  # in training mode, which a trace refuses
    few, barred = Constraints(num_stages=3, max_stages=2), Constraints(pins={"linear": "cpu:0"}, forbids={"linear": ("cpu:0",)})
    for demands, fault in ((few, "num_stages 3 is above max_stages 2"), (barred, "'linear' is pinned to 'cpu:0' and forbidden")):
        with pytest.raises(UsageError, match=fault):
            autosplit.auto(module, TWO, demands, inputs=torch.ones(1, 2))
    with pytest.raises(UsageError, match="names device 'cpu:77', which is not one of"):
        autosplit.auto(module, TWO, Constraints(pins={"x": "cpu:77"}), inputs=torch.ones(1, 2))


def test_a_plan_of_unknown_code_is_not_run(tmp_path: Path) -> None:
    traced = traced_of(TIED)
    profile = autosplit.Profile.given(traced.graph, {(op.name, "cpu:0"): 1.0 for op in traced.graph.ops})
    one = Machine.of([parse_device("cpu:0")])
    plan = autosplit.search(traced, profile, one, budget=Budget(search_s=0)).plan
    autosplit.write_plan(plan, traced.graph, tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    (tmp_path / "foreign.yaml").write_text(text.replace(TIED, "somebody.net:make"))
    with pytest.raises(UsageError, match="does not run unasked"):
        autosplit.load(tmp_path / "foreign.yaml")
    again = autosplit.load(str(tmp_path / "plan.yaml"))
    assert again.plan.hash == plan.hash and again.machine == one
    placed = again.placed()
    assert set(placed.devices.values()) == {"cpu:0"} and placed.plan().stages[0].ops == plan.stages[0].ops


def test_a_plan_is_not_run_as_that_of_another_model(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        "schema: 1\nmodel: {spec: 'autosplit.examples.mlp:mlp'}\nmade_from: {graph: ''}\n"
        "stages: [{name: a, devices: [cpu:0], ops: [x]}]\n"
    )
    with pytest.raises(UsageError, match=r"is for model '.*mlp:mlp', and not for 'my.module:net'.* '.*mlp:mlp', or no --model$"):
        autosplit.load(tmp_path / "plan.yaml", "my.module:net")


def test_a_plan_of_a_python_object_is_loaded_with_the_object(tmp_path: Path) -> None:
    module, inputs = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval(), (torch.ones(1, 4),)
    traced = autosplit.trace(module, inputs)
    profile = autosplit.Profile.given(traced.graph, {(op.name, "cpu:0"): 1.0 for op in traced.graph.ops})
    one = Machine.of([parse_device("cpu:0")])
    plan = autosplit.search(traced, profile, one, budget=Budget(search_s=0)).plan
    path = tmp_path / "plan.yaml"
    autosplit.write_plan(plan, traced.graph, path)
    again = autosplit.load(str(path), module, inputs=inputs)
    assert (again.plan.hash, again.traced.graph.hash, again.machine) == (plan.hash, traced.graph.hash, one)
    with pytest.raises(UsageError, match=r"is for a Python object.*load\(path, module, inputs=\.\.\.\)"):
        autosplit.load(path)
    with pytest.raises(PlanError):
        autosplit.load(path, torch.nn.Linear(4, 4).eval(), inputs=inputs)


def test_a_plan_in_bf16_is_not_exported_in_f32(tmp_path: Path) -> None:
    traced = traced_of("autosplit.examples.mlp:mlp?depth=2&width=8")
    found = baselines_of(traced.graph, Plan(traced.source, traced.graph.hash, "", (), UNKNOWN), TWO, None)
    coarse = replace(next(iter(found.plans.values())), precision="bf16")
    with pytest.raises(UsageError, match="the plan computes in bf16, and an export does in f32"):
        autosplit.export(traced, coarse, tmp_path / "exported")
    assert not list(tmp_path.iterdir())


def test_stages_of_other_microbatches_do_not_share_files() -> None:
    """In the first version a microbatch of 2 ran the stage that was saved for 4: the names of ops and values are the same."""
    with Workspace() as workspace:
        folders = []
        for batch in (2, 4):
            traced = traced_of(TIED, batch)
            folders.append(workspace.add(unsplit(traced), "eager", "f32"))
        assert folders[0] != folders[1]


def test_stages_of_other_models_do_not_share_files() -> None:
    """Before, a second model ran with the weights of the first one if both had the same ops."""
    inputs = (torch.randn(1, 4),)
    weights = torch.nn.Linear(4, 4, bias=False).eval()
    same = torch.nn.Linear(4, 4, bias=False).eval()
    same.weight = weights.weight
    steep, flat = (torch.nn.Sequential(torch.nn.LeakyReLU(slope)).eval() for slope in (0.1, 0.2))
    with Workspace() as workspace:
        one, two, other, *slopes = (
            workspace.save(unsplit(autosplit.trace(module, inputs=inputs)))
            for module in (weights, same, torch.nn.Linear(4, 4, bias=False).eval(), steep, flat)
        )
        assert one == two and len({one, other, *slopes}) == 4
        traced = autosplit.trace(weights, inputs=inputs)
        before = workspace.reference(traced, {})
        with torch.no_grad():
            weights.weight.mul_(2)
        assert workspace.save(unsplit(traced)) not in {one, other}
        assert workspace.reference(traced, {}) is not before


def test_a_stage_that_is_saved_elsewhere_is_loaded_from_there_and_stays(tmp_path: Path) -> None:
    traced = traced_of(TIED)
    save_stage(unsplit(traced), tmp_path / "saved")
    with Workspace() as workspace:
        assert workspace.save(unsplit(traced), there=tmp_path / "saved") == workspace.save(unsplit(traced))
        assert workspace.add(unsplit(traced), "eager", "f32") == tmp_path / "saved"
    assert (tmp_path / "saved").exists()
