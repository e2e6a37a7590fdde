"""Stages that run at every size in one program, on each backend that takes them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest
import torch
from fuzzing import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import autosplit
from autosplit.backends import onnxfile
from autosplit.backends import onnxruntime as onnxruntime_backend
from autosplit.backends.base import get_backend
from autosplit.backends.workspace import Workspace
from autosplit.bundling.driver import Bundle
from autosplit.deploying.replanning import devices_left
from autosplit.errors import BackendError, TraceError, UsageError
from autosplit.exporting.base import TARGETS, get_target
from autosplit.running.modules import StageFolder
from autosplit.running.swapping import with_swapped_weights
from autosplit.shapes.profiles import shapes_of
from autosplit.shapes.service import ShapedService
from autosplit.tracing.family import Family
from autosplit.tracing.freesizes import freed
from autosplit.tracing.splitting import load_stage, save_stage, split, unsplit
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Process, Stage
from autosplit.values.planfile import read_plan, write_plan
from autosplit.values.profile import Profile
from autosplit.values.shapes import Shapes, sizes_text

SIZES = [{"batch": 1, "seq": 2}, {"batch": 3, "seq": 5}, {"batch": 4, "seq": 8}]


class Mixed(nn.Module):
    """Views and a product of both sizes, as in attention and mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        heads = self.first(x).view(batch, seq, 2, 4).transpose(1, 2)
        weights = (heads @ heads.transpose(-1, -2)).softmax(-1)
        found: torch.Tensor = self.last((weights @ heads).transpose(1, 2).reshape(batch * seq, 2, 4))
        return found.view(batch, seq, 6) + torch.arange(seq)[None, :, None]


@pytest.fixture(scope="module")
def family() -> Family:
    torch.manual_seed(0)
    shapes = {"x": {0: "batch", 1: "seq"}}
    return autosplit.trace(Mixed().eval(), torch.randn(2, 4, 6), shapes=shapes, sizes={"batch": "1..4", "seq": "2..8"})


@pytest.fixture(scope="module")
def workspace() -> Iterator[Workspace]:
    with Workspace() as opened:
        yield opened


@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "openvino"])
def test_one_program_gives_the_answers_of_each_variant(family: Family, workspace: Workspace, backend: str) -> None:
    assert family.symbolic is not None
    folder = workspace.add(freed(unsplit(family.variants[0]), family.symbolic), backend, "f32")
    run = get_backend(backend).load(folder, 1, trust=True)
    for sizes in SIZES:
        traced = family.at(sizes)
        for found, wanted in zip(run(traced.example_inputs), traced.program(*traced.example_inputs), strict=True):
            assert found.shape == wanted.shape
            assert torch.allclose(found, wanted, atol=1e-5)


def test_one_program_takes_bf16_on_openvino_and_is_refused_by_onnxruntime(family: Family, workspace: Workspace) -> None:
    module, shapes = nn.Linear(6, 3).bfloat16().eval(), {"input": {0: "batch", 1: "seq"}}
    family = autosplit.trace(module, torch.randn(2, 4, 6).bfloat16(), shapes=shapes, sizes=family.allowed)
    assert family.symbolic is not None
    stage = freed(unsplit(family.variants[0]), family.symbolic)
    run = get_backend("openvino").load(folder := workspace.add(stage, "openvino", "f32"), 1, trust=True)
    for sizes in SIZES:
        traced = family.at(sizes)
        [found], [wanted] = run(traced.example_inputs), traced.program(*traced.example_inputs)
        assert (found.dtype, found.shape) == (torch.bfloat16, wanted.shape)
        torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.05)
    with pytest.raises(BackendError, match=r"cannot take 'input_1' at every size: numpy has no torch\.bfloat16"):
        onnxruntime_backend.free_runnable(None, onnxfile.open_onnx(folder))


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_one_export_serves_for_every_size(family: Family, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert family.symbolic is not None
    monkeypatch.setattr(onnxfile, "SMALL_BYTES", 16)  # so that weights stay in their file
    free = tmp_path / "free"
    save_stage(freed(unsplit(family.variants[0]), family.symbolic), free)
    onnxfile.prepare_onnx(load_stage(free, trust=True), free)
    monkeypatch.setattr(onnxfile, "write_onnx", None)
    for sizes in SIZES:
        traced = family.at(sizes)
        program = unsplit(traced)
        folder = tmp_path / str(sizes["seq"])
        save_stage(program, folder, free)
        onnxfile.fix_sizes(load_stage(folder, trust=True), free, folder)
        shape = onnxruntime.InferenceSession(onnxfile.open_onnx(folder).path).get_inputs()[0].shape
        assert shape == [sizes["batch"], sizes["seq"], 6]
        get_backend(backend).prepare(program, folder)
        run = get_backend(backend).load(folder, 1, trust=True)
        assert torch.allclose(run(traced.example_inputs)[0], traced.program(*traced.example_inputs)[0], atol=1e-5)


def test_saved_stage_keeps_its_free_axes(family: Family, workspace: Workspace) -> None:
    assert family.symbolic is not None
    program = freed(unsplit(family.variants[0]), family.symbolic)
    loaded = load_stage(workspace.save(program), trust=True)
    assert loaded.free == program.free == {"x": {0: "batch", 1: "seq"}}
    assert loaded.module.code == program.module.code


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 4), st.integers(2, 8))
def test_layouts_by_arithmetic_are_those_of_a_trace(family: Family, batch: int, seq: int) -> None:
    specs, sizes = family.make(at := {"batch": batch, "seq": seq}).specs, family.symbolic
    assert sizes is not None and sizes.layouts(list(family.variants[0].specs.values()), [at]) == [tuple(specs.values())]


def test_stage_whose_inputs_lack_a_size_names_it_and_gets_variants(family: Family) -> None:
    ops = [op.name for op in family.graph.ops]
    joined = max(place for place, op in enumerate(family.graph.ops) if "linear" in op.operator)
    assert family.symbolic is not None
    with pytest.raises(TraceError, match="does not follow from its inputs"):
        freed(split(family.variants[0], [ops[: joined + 1], ops[joined + 1 :]])[1], family.symbolic)
    plan, sizes = _plan(family, "eager", 1), {"batch": (1, 2, 3, 4), "seq": tuple(range(2, 9))}
    parts = [replace(plan.stages[0], ops=part) for part in (tuple(ops[: joined + 1]), tuple(ops[joined + 1 :]))]
    asked = Shapes({}, {}, sizes, dynamic=("eager",))
    assert shapes_of(family, plan, asked) == asked
    assert shapes_of(family, replace(plan, stages=tuple(parts)), asked).dynamic == ()
    assert shapes_of(family, replace(plan, stages=tuple(parts)), asked).buckets == {"batch": (1, 2, 3, 4), "seq": (2, 4, 6, 8)}
    names = ("null:0", "null:1")  # each takes one part a thousand times faster, so that a new plan has the same cut
    costs_s = {(op, name): 1.0 if (name == names[0]) == (n > joined) else 1e-3 for n, op in enumerate(ops) for name in names}
    machine, profile = Machine.of(map(parse_device, (*names, "null:2"))), Profile.given(family.graph, costs_s)
    with devices_left(family.only(asked.variants), plan, profile, machine) as replan:
        [stage] = replan("null:2")
    assert len({one.module for one in stage.at_each_size()}) == 1 and len(stage.variants) == 4 * 7 - 1


def _plan(family: Family, backend: str, num_stages: int, process: Process = "workers") -> Plan:
    """A plan with dynamic stages, cut at the attention weights if there are two."""
    ops = [op.name for op in family.graph.ops]
    cut = ops.index("softmax") if num_stages > 1 else len(ops)
    parts = [part for part in (ops[:cut], ops[cut:]) if part]
    stages = tuple(Stage(f"part{number}", tuple(part), ("cpu:0",), backend) for number, part in enumerate(parts))
    sizes = {dim: sizes_text(found) for dim, found in family.allowed.items()}
    buckets = {dim: tuple(found) for dim, found in family.allowed.items()}
    shapes = Shapes({}, sizes, buckets, unpaddable=family.unpaddable, dynamic=(backend,))
    return Plan(family.variants[0].source, family.graph.hash, "", stages, UNKNOWN, process=process, shapes=shapes)


@pytest.mark.parametrize(("process", "num_stages"), [("workers", 2), ("caller", 1)])
def test_plan_with_dynamic_stages_takes_each_size_unpadded(family: Family, process: Process, num_stages: int) -> None:
    with autosplit.open_pipeline(family, _plan(family, "eager", num_stages, process)) as service:
        assert isinstance(service, ShapedService)
        variants = service.pipeline.wiring.stages[0].at_each_size()
        assert (len(variants), len({one.module for one in variants})) == (4 * 7, 1)
        for sizes in SIZES:
            traced = family.at(sizes)
            assert torch.allclose(service(*traced.example_inputs), traced.run(*traced.example_inputs), atol=1e-5)


def test_export_to_onnx_has_named_axes(family: Family, tmp_path: Path) -> None:
    plan = _plan(family, "onnxruntime", 2)
    autosplit.export(family, plan, tmp_path / "out")
    assert onnxruntime.InferenceSession(tmp_path / "out" / "n0p0.onnx").get_inputs()[0].shape == ["batch", "seq", 6]
    bundle = Bundle(tmp_path / "out")
    for sizes in SIZES:
        traced = family.at(sizes)
        found = bundle.run([tensor.numpy() for tensor in traced.example_inputs])
        assert torch.allclose(torch.from_numpy(found), traced.run(*traced.example_inputs), atol=1e-5)


@pytest.mark.parametrize("target", sorted(set(TARGETS) - {"onnxruntime", "accelerate", "vllm"}))
def test_other_targets_say_that_they_take_one_size(family: Family, tmp_path: Path, target: str) -> None:
    """Maps of modules, for accelerate and vLLM, hold for every size."""
    if get_target(target).missing():
        pytest.skip(str(get_target(target).missing()))
    with pytest.raises(UsageError, match=f"{target} takes one; export it to onnxruntime, or make a plan for one size"):
        autosplit.export(family, _plan(family, "eager", 1), tmp_path / "out", target)


def test_swapped_weights_keep_one_program(family: Family, tmp_path: Path) -> None:
    weights = {name: torch.zeros(weight.shape) for name, weight in family.graph.weights.items()}
    with autosplit.open_pipeline(family, _plan(family, "eager", 1)) as service:
        swapped = with_swapped_weights(service.pipeline.wiring, ["part0"], "all", weights, tmp_path / "new")
    [module] = {one.module for one in swapped.stages[0].at_each_size()}
    assert isinstance(module, StageFolder)
    run = module.load(1, "cpu:0", shared=False)
    for batch, seq in ((3, 5), (1, 2)):
        [answer] = run([torch.randn(batch, seq, 6)])
        assert torch.equal(answer, torch.arange(float(seq))[None, :, None].expand(batch, seq, 6))


def test_plan_file_keeps_the_dynamic_backends_and_says_many_sizes_in_short(family: Family, tmp_path: Path) -> None:
    many = {"batch": (1, 2, 4), "seq": tuple(range(2, 30))}
    shapes = Shapes({}, {"batch": "1..4", "seq": "2..29"}, many, dynamic=("onnxruntime",))
    plan = replace(_plan(family, "onnxruntime", 2), shapes=shapes)
    write_plan(plan, family.graph, tmp_path / "plan.yaml")
    assert "seq: 2..29" in (tmp_path / "plan.yaml").read_text().partition("buckets:")[2]
    read = read_plan(tmp_path / "plan.yaml").resolve(family.graph)
    assert (read.shapes, read.hash) == (plan.shapes, plan.hash)
    assert read.hash != replace(plan, shapes=replace(read.shapes, dynamic=())).hash
