"""Requests of several sizes from the command to the answer, on a small model in eager."""

import contextlib
import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autosplit
from autosplit import cli
from autosplit.backends.workspace import Workspace
from autosplit.commands.options import Profile
from autosplit.deploying.networks import place
from autosplit.deploying.replanning import plan_on
from autosplit.errors import BackendError, InfeasibleError, PlanError, TraceError, UsageError
from autosplit.memory.stages import BUFFER_BYTES
from autosplit.serving.hostmanager import HostManager
from autosplit.shapes.profiles import measure_sizes, shapes_of
from autosplit.shapes.timing import most_variants
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Stage
from autosplit.values.planfile import read_plan
from autosplit.values.profile import Profile as Measurements
from autosplit.webservice.repository import Repository

MLP = "autosplit.examples.mlp:mlp?depth=2&width=16"
FLAGS = ["--devices", "cpu:0", "--backend", "eager", "--budget", "0s"]


def call(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "rows.csv").write_text("batch,count\n1,8\n8,2\n")
    plan = folder / "plan.yaml"
    written = ["--rounds", 2, "-o", plan, "--report", folder / "page.html", "--json"]
    found = call("auto", MLP, "--batch", "1..8", "--traffic", folder / "rows.csv", *FLAGS, *written)
    assert found.exit_code == 0, found.output
    return plan, json.loads(found.stdout)


def test_auto_writes_a_plan_with_its_shapes(planned):
    plan, data = planned
    assert read_plan(plan).shapes.sizes == {"batch": "1..8"}
    assert read_plan(plan).shapes.buckets["batch"][-1] == 8
    assert any("of the expected seconds are padding" in note for note in data["notes"])
    page = plan.with_name("page.html").read_text()
    assert "of the expected seconds are padding" in page and "In flight: requests/s, p50, p99: 1: " in page
    assert {"plan", "padded to the longest"} <= data["outcomes"].keys()
    assert all(min(one["rounds_per_s"]) > 0 for one in data["outcomes"].values())
    assert 2 <= len(data["outcomes"]["plan"]["rounds_per_s"]) <= 4  # the fastest take the time of those that fall behind
    assert all(one["outputs_equal"] for one in data["outcomes"].values())
    assert [load["in_flight"] for load in data["loads"]] == [1, 4, 16, 64]
    assert all(load["per_s"] > 0 and 0 < load["p50_s"] <= load["p99_s"] for load in data["loads"])


def test_plan_with_shapes_opens_and_answers_requests_of_any_size(planned):
    loaded = autosplit.load(planned[0])
    with loaded.open() as service:
        for rows in (1, 3, 8):
            x = torch.randn(rows, 16)
            assert torch.allclose(service(x), loaded.family.at({"batch": rows}).run(x), atol=1e-6)
        with pytest.raises(UsageError, match=r"'batch' is 9.*--batch 1\.\.9"):
            service(torch.randn(9, 16))
        with pytest.raises(UsageError, match="empty"):
            service(torch.randn(0, 16))
        autosplit.observe(service, planned[0].with_name("seen.csv"))
        with pytest.raises(UsageError, match="cannot be written: Is a directory"):
            autosplit.observe(service, planned[0].parent)
    assert autosplit.read_traffic(planned[0].with_name("seen.csv"), ["batch"]).counts == {(1,): 1, (3,): 1, (8,): 1}


def test_killed_worker_costs_no_request_of_any_size(planned):
    loaded = autosplit.load(planned[0])
    with loaded.open() as service:
        asked = [torch.randn(1 + number % 8, 16) for number in range(60)]
        futures = []
        for number, x in enumerate(asked):
            futures.append(service.submit(x))
            if number == 20:
                os.kill(service.pipeline.pids[0], signal.SIGKILL)
        for x, future in zip(asked, futures, strict=True):
            assert torch.allclose(future.result(60), loaded.family.at({"batch": len(x)}).run(x), atol=1e-6)
        assert service.pipeline.restarts == 1


def test_placing_by_hand_keeps_the_sizes(planned):
    family = autosplit.trace(MLP, sizes={"batch": "1..8"})
    placed = autosplit.annotate(family, {"linear_1": "cpu:1"}, default="cpu:0", machine="cpu:0,cpu:1")
    plan = placed.plan()
    assert (plan.shapes.buckets, plan.shapes.sizes) == ({"batch": (1, 8)}, {"batch": "1..8"})
    assert autosplit.annotate(placed, {"linear_1": "cpu:0"}).plan().shapes == plan.shapes
    with autosplit.open_pipeline(family, plan) as service:
        for rows in (1, 3, 8):
            x = torch.randn(rows, 16)
            assert torch.allclose(service(x), family.at({"batch": rows}).run(x), atol=1e-6)
    loaded = autosplit.load(planned[0])
    assert loaded.placed().plan().shapes == loaded.plan.shapes


def test_run_takes_a_plan_with_shapes(planned):
    found = call("run", planned[0], "--no-baselines", "--rounds", 1)
    assert found.exit_code == 0, found.output
    assert "requests of several sizes" in found.output


def test_edited_buckets_are_refused(planned, tmp_path):
    edited = tmp_path / "plan.yaml"
    edited.write_text(planned[0].read_text().replace("    batch:\n    - ", "    batch:\n    - 99\n    - "))
    with pytest.raises(PlanError, match=r"buckets of 'batch' are \[99"):
        autosplit.load(edited)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--batch", "8..1"], "not a range"),
        (["--batch", "x"], "not a range"),
        (["--batch", "1..8", "--peers"], "leave out --peers"),
        (["--traffic", "rows.csv"], "leave out --traffic"),
        (["--seq-len", "4..8"], "takes no argument 'seq_len'"),
    ],
)
def test_flags_that_do_not_fit_are_refused(words, fault, tmp_path):
    found = call("auto", MLP, *words, *FLAGS, "-o", tmp_path / "plan.yaml")
    assert found.exit_code != 0
    assert fault in " ".join(found.output.split())


def test_range_is_for_planning_only():
    with pytest.raises(UsageError, match="give one number"):
        _ = Profile(model=MLP, batch="1..4").request
    assert Profile(model=MLP, batch="4").request == {"batch": 4, "seq_len": None}
    assert Profile(model=MLP, batch="4", seq_len="2..3").sizes == {"batch": (4,), "seq": range(2, 4)}


def test_caps_make_fewer_variants():
    family = autosplit.trace(MLP, sizes={"batch": "1..8"})
    device = parse_device("cpu:0")
    least = family.variants[0].graph.weight_bytes + BUFFER_BYTES["eager"]
    most, limit = most_variants(family, Machine.of([replace(device, memory_bytes=least + 100_000)]), "eager")
    assert 1 < most < 6
    assert "MB" in limit
    capped = Machine.of([replace(device, memory_bytes=least + 60_000)])
    setup = autosplit.Setup(backends="eager", progress=False)
    profile = autosplit.measure(replace(family, symbolic=None), capped, setup=setup)
    most = most_variants(family, capped, "eager")[0]
    assert any(f"at most {most} variants are made" in note for note in profile.notes)
    assert len(profile.shapes.buckets["batch"]) <= most


def test_weights_count_for_each_variant_where_a_backend_packs_them_for_each():
    family = autosplit.trace(f"{MLP.partition('?')[0]}?depth=2&width=2048", sizes={"batch": "1..2"})
    capped = Machine.of([replace(parse_device("cpu:0"), memory_bytes=4 * family.graph.weight_bytes)])
    shared, packed = (most_variants(family, capped, backend)[0] for backend in ("eager", "openvino"))
    assert packed < 3 < shared


def test_the_buffers_of_several_programs_count_as_the_plan_that_holds_them_counts_them():
    family, buffers = autosplit.trace(MLP, sizes={"batch": "1..8"}), BUFFER_BYTES["eager"]
    weights, device = family.graph.weight_bytes, parse_device("cpu:0")
    capped = [Machine.of([replace(device, memory_bytes=weights + size)]) for size in (buffers, 2 * buffers)]
    few, many = (most_variants(family, machine, "eager")[0] for machine in capped)
    assert few == 1 < many
    stage = Stage("all", tuple(op.name for op in family.graph.ops), ("cpu:0",))
    plan = Plan(family.variants[0].source, family.graph.hash, "", (stage,), UNKNOWN, shapes=shapes_of(family, None, None))
    free = replace(plan, shapes=replace(plan.shapes, dynamic=("eager",)))
    with Workspace() as workspace:
        for sized in (free, plan):
            assert place(family, sized, capped[1], workspace)
        assert place(family, free, capped[0], workspace)
        with pytest.raises(PlanError, match=r"3\.8 MiB beside them"):
            place(family, plan, capped[0], workspace)


def test_a_search_and_a_plan_for_fewer_devices_count_the_programs_of_all_sizes():
    family, device = autosplit.trace(MLP, sizes={"batch": "1..8"}), parse_device("null:0")
    profile = Measurements.given(family.graph, {(op.name, device.name): 1e-5 for op in family.graph.ops})
    profile = replace(profile, shapes=shapes_of(family, None, None))
    free = replace(profile, shapes=replace(profile.shapes, dynamic=("eager",)))
    low, high = (Machine.of([replace(device, memory_bytes=size)]) for size in (BUFFER_BYTES["eager"], 8_000_000))
    setup, budget = autosplit.Setup(progress=False, store=None), autosplit.Budget(explain_s=0)
    plan = autosplit.search(family, profile, high, setup=setup, budget=budget).plan
    assert plan.stages[0].memory.backend_bytes > BUFFER_BYTES["eager"]
    assert autosplit.search(family, free, low, setup=setup, budget=budget).plan.stages[0].memory.backend_bytes == 0
    with pytest.raises(InfeasibleError, match="no plan within the caps"):
        autosplit.search(family, profile, low, setup=setup, budget=budget)
    with pytest.raises(InfeasibleError, match="no plan within the caps"):
        plan_on(low, family, plan, profile)
    assert plan_on(low, family, replace(plan, shapes=free.shapes), profile).shapes == free.shapes


def test_dimension_that_cannot_be_padded_needs_its_sizes_one_by_one():
    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    family = autosplit.trace(Mean().eval(), (torch.randn(1, 8, 4),), shapes={"x": {1: "seq"}}, sizes={"seq": range(2, 65)})
    assert "op 'mean' mixes" in family.notes[0]
    with pytest.raises(UsageError, match=r"mean.*63 for seq 2\.\.64"):
        refused_at_once(replace(family, symbolic=None))


def test_a_size_with_other_ops_is_refused_before_anything_is_measured():
    class Odd(nn.Module):
        def forward(self, x):
            return x.mean(1) if x.shape[1] != 8 else x.sum(1)

    family = autosplit.trace(Odd().eval(), (torch.randn(1, 8),), shapes={"x": {1: "seq"}}, sizes={"seq": (4, 8, 16)})
    with pytest.raises(TraceError, match=r"computes with other ops at other sizes \('seq' 16 and 8\)"):
        refused_at_once(family)


def refused_at_once(family):
    """Measure, and pass the failure on; no op was measured before it."""
    steps = []
    setup = autosplit.Setup(backends="eager", progress=lambda step, share, text: steps.append(step))
    try:
        autosplit.measure(family, "cpu:0", setup=setup)
    finally:
        assert not steps


def test_an_accelerator_that_is_named_first_and_was_left_out_is_not_used():
    """Its profile has a note; a range was timed there, and a front was planned for it."""
    family, setup = autosplit.trace(MLP, sizes={"batch": "1..4"}), autosplit.Setup(backends="eager", progress=False)
    machine = Machine.of(map(parse_device, ("cuda:0", "cpu:0")))
    known = autosplit.measure(family.variants[0], "cpu:0", setup=setup)
    known = replace(known, notes=("cuda:0 is left out: no backend is left there",))
    profile = measure_sizes(family, None, machine, setup, lambda *_, **__: known)
    sized, one = (
        autosplit.search(*pair, machine, setup=setup, budget=0) for pair in ((family, profile), (family.variants[0], known))
    )
    plans = [sized.plan, one.plan, *(plan for plan, _ in one.front(machine, Constraints(), time_limit_s=1.0))]
    assert len(plans) >= 3 and {device for plan in plans for device in plan.devices} == {"cpu:0"}
    with pytest.raises(BackendError, match="cuda:0 is left out: no backend is left there"):
        autosplit.search(family.variants[0], known, machine, Constraints(pins={"*": "cuda:0"}), setup=setup, budget=0)


def test_dimension_that_cannot_be_padded_runs_dynamically_at_each_of_its_sizes():
    class Last(nn.Module):
        def forward(self, x):
            return x.flip(1)

    family = autosplit.trace(Last().eval(), (torch.randn(1, 8, 4),), shapes={"x": {1: "seq"}}, sizes={"seq": range(2, 34)})
    assert "seq" in family.unpaddable
    profile = autosplit.measure(family, "cpu:0", setup=autosplit.Setup(backends="eager", progress=False))
    assert profile.shapes.dynamic == ("eager",)
    assert profile.shapes.buckets == {"seq": tuple(range(2, 34))}


def test_shapes_without_sizes_are_refused():
    with pytest.raises(UsageError, match="sizes are not given"):
        autosplit.trace(nn.Linear(2, 2).eval(), torch.ones(1, 2), shapes={"input": {0: "batch"}})
    with pytest.raises(UsageError, match="give shapes="):
        autosplit.trace(nn.Linear(2, 2).eval(), torch.ones(1, 2), sizes={"batch": "1..2"})


def test_server_takes_requests_of_any_size(planned):
    from servedplans import LIMITS, Application, Served, listening  # needs the extra 'serve'

    traced = autosplit.trace(MLP)
    with HostManager() as host, contextlib.closing(Repository(host, {"mlp": planned[0]})) as repository:
        repository.load("mlp").result(60)
        application = Application(host, repository, LIMITS)
        with listening(application) as url:
            served = Served(traced, application, url)
            assert served.call("GET", "/v2/models/mlp")[1]["inputs"][0]["shape"] == [-1, 16]
            for rows in (1, 3, 8):
                x = torch.randn(rows, 16)
                status, answer = served.call("POST", "/v2/models/mlp/infer", _rows(x, rows))
                assert status == 200
                [output] = answer["outputs"]
                assert output["shape"] == [rows, 16]
                assert torch.allclose(torch.tensor(output["data"]).view(rows, 16), traced.program(x)[0], atol=1e-6)
            status, answer = served.call("POST", "/v2/models/mlp/infer", _rows(torch.randn(9, 16), 9))
            assert (status, "the model takes [-1, 16], at most [8, 16]" in answer["error"]) == (400, True)
            status, answer = served.call("POST", "/v2/models/mlp/infer", _rows(torch.randn(0, 16), 0))
            assert (status, "the request is empty" in answer["error"]) == (400, True)
        repository.unload("mlp").result(60)


def _rows(x, count):
    return {"inputs": [{"name": "input_1", "datatype": "FP32", "shape": [count, 16], "data": x.flatten().tolist()}]}


def test_what_holds_stages_of_one_size_refuses_a_range_and_names_the_way_out(planned, tmp_path):
    loaded = autosplit.load(planned[0])
    with pytest.raises(UsageError, match="the model is traced for one; trace it with sizes="):
        autosplit.write_bundle({"mlp": (loaded.traced, loaded.plan)}, tmp_path / "bundle")
    with pytest.raises(UsageError, match="the model is traced for one; trace it with sizes="):
        autosplit.export(loaded.traced, loaded.plan, tmp_path / "export")
    with pytest.raises(UsageError, match="the model is traced for one; trace it with sizes="):
        autosplit.open_pipeline(loaded.traced, loaded.plan)
    with pytest.raises(UsageError, match="the plan is for requests of one size, and the model is traced for several"):
        autosplit.run(loaded.family, replace(loaded.plan, shapes=None), setup=autosplit.Setup(progress=False))
    assert not list(tmp_path.iterdir())
