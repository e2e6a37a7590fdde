"""Exports that another runtime runs: each gives the numbers of the model."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.export.pt2_archive._package import load_pt2

from autosplit.exporting import aotinductor_package, triton_repository
from autosplit.exporting.aotinductor_package import compiled_files
from autosplit.exporting.base import Job, get_target, write_export
from autosplit.exporting.triton_repository import pbtxt
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import StageProgram
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage

BATCH = 2


class Skips(nn.Module):
    """A value that skips a stage, an output made early, and an input that only the last stage reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        early = self.first(x)
        middle = self.second(early.relu()).relu()
        return early, self.third(middle + early) * scale


@pytest.fixture(scope="module")
def traced() -> Traced:
    torch.manual_seed(0)
    inputs = (torch.randn(BATCH, 8), torch.full((BATCH, 1), 3.0))
    return trace(load_model(Skips().eval(), inputs=inputs))


@pytest.fixture(scope="module")
def plan(traced: Traced) -> Plan:
    """Three stages on two cores: the first and the last share one."""
    ops = tuple(op.name for op in traced.graph.ops)
    parts = (ops[:1], ops[1:4], ops[4:])
    stages = tuple(Stage(f"stage{n}", part, (f"cpu:{n % 2}",)) for n, part in enumerate(parts))
    return Plan(Source(""), traced.graph.hash, "", stages, UNKNOWN)


def requests(count: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(count)
    return [torch.randn(count * BATCH, 8), torch.full((count * BATCH, 1), 2.0)]


def load_file(name: str, path: Path):
    """A Python file as a module, without a place in ``sys.modules``."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected(traced: Traced, inputs: list[torch.Tensor]) -> list[np.ndarray]:
    with torch.inference_mode():
        return [value.numpy() for value in traced.program(*inputs)]


@pytest.mark.timeout(200)
def test_the_ranks_run_over_gloo(traced: Traced, plan: Plan, tmp_path: Path) -> None:
    """Each rank gets the variables that torchrun sets. Forks of one process have torch there, which each rank would import."""
    folder = tmp_path / "ranks"
    [note] = write_export("torch-pipelining", Job(traced, plan), folder)
    assert "torchrun --nproc-per-node 3 run.py" in note
    assert set(torch.load(folder / "inputs.pt")) == {"x", "scale"}
    x, scale = requests(3)
    torch.save({"x": x, "scale": scale}, tmp_path / "requests.pt")
    words = [str(folder / "run.py"), "--inputs", str(tmp_path / "requests.pt"), "--outputs", str(tmp_path / "outputs.pt")]
    command = [sys.executable, "-c", RANKS, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "outputs.pt", weights_only=True)
    parts = [expected(traced, [x[n : n + BATCH], scale[n : n + BATCH]]) for n in range(0, 3 * BATCH, BATCH)]
    for name, values in zip(traced.graph.outputs, zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(found[name].numpy(), np.concatenate(values))


RANKS = """
import os, runpy, socket, sys
import torch.distributed.pipelining, torch.export.pt2_archive
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
sys.argv = sys.argv[1:]
pids = []
for rank in range(3):
    pids.append(os.fork())
    if not pids[-1]:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
"""


def test_a_transposed_value_travels_between_ranks_row_major_and_is_read_with_these_strides(tmp_path: Path) -> None:
    """torch.distributed sends no other tensors, and ended with "input tensor has to be contiguous"."""

    class Turning(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1).transpose(1, 2).relu().transpose(1, 2).reshape(2, 12)

    x = torch.randn(2, 3, 4)
    turning = trace(load_model(Turning().eval(), inputs=(x,)))
    names = tuple(op.name for op in turning.graph.ops)
    for cut in range(1, len(names)):
        parts = names[:cut], names[cut:]
        stages = tuple(Stage(f"stage{n}", part, (f"cpu:{n}",)) for n, part in enumerate(parts))
        write_export(
            "torch-pipelining",
            Job(turning, Plan(Source(""), turning.graph.hash, "", stages, UNKNOWN)),
            folder := tmp_path / str(cut),
        )
        [first, last] = json.loads((folder / "ranks.json").read_text())["ranks"]
        assert first["outputs"] == last["inputs"]
        sent = torch.export.load(folder / "rank0.pt2").module()(x)
        assert all(value.is_contiguous() for value in sent)
        assert [list(value.stride()) for value in sent] == [entry["stride"] for entry in last["inputs"]]
        [found] = torch.export.load(folder / "rank1.pt2").module()(*sent)
        assert torch.equal(found, turning.run(x))


def test_openvino_runs_the_stages_and_the_whole_model(traced: Traced, plan: Plan, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    job = Job(traced, plan)
    [note] = write_export("openvino", job, tmp_path / "ir")
    assert "HETERO:CPU" in note and "one CPU device" in note
    core, exact = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    inputs = requests()
    values = {name: tensor.numpy() for name, tensor in zip(traced.graph.inputs, inputs, strict=True)}
    for number, program in enumerate(job.programs):
        stage = core.compile_model(core.read_model(tmp_path / "ir" / f"stage{number}.xml"), "CPU", exact)
        found = stage({spec.name: values[spec.name] for spec in program.inputs})
        values |= {spec.name: found[spec.name] for spec in program.outputs}
    table = json.loads(core.read_model(tmp_path / "ir" / "model.xml").get_rt_info(["affinity"]).astype(str))
    assert set(table.values()) == {"CPU"} and any(name.startswith("stage2/") for name in table)
    hetero = load_file("hetero", tmp_path / "ir" / "hetero.py")
    joined = hetero.compile_whole()(dict(zip(traced.graph.inputs, [tensor.numpy() for tensor in inputs], strict=True)))
    for name, value in zip(traced.graph.outputs, expected(traced, inputs), strict=True):
        np.testing.assert_allclose(values[name], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(joined[name], value, rtol=1e-5, atol=1e-6)


@pytest.fixture
def wide(plan: Plan) -> Plan:
    """The plan with two replicas of its second stage and two streams in its third."""
    first, second, third = plan.stages
    return replace(plan, stages=(first, replace(second, devices=("cpu:0", "cpu:1")), replace(third, threads=2, streams=2)))


def test_the_ensemble_that_triton_gets_runs(traced: Traced, wide: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: dict[str, dict] = {}

    def kept(config: dict, indent: str = "") -> str:
        configs.setdefault(config.get("name", ""), config)
        return pbtxt(config, indent)

    monkeypatch.setattr(triton_repository, "pbtxt", kept)
    [note] = write_export("triton", Job(traced, wide), tmp_path / "repository")
    assert note == "start it: tritonserver --model-repository FOLDER; clients call the model 'Skips'"
    import onnxruntime

    inputs = requests()
    values = {name: tensor.numpy() for name, tensor in zip(traced.graph.inputs, inputs, strict=True)}
    for step in configs["Skips"]["ensemble_scheduling"]["step"]:
        sources, targets = ({link["key"]: link["value"] for link in step[side]} for side in ("input_map", "output_map"))
        session = onnxruntime.InferenceSession(str(tmp_path / "repository" / step["model_name"] / "1" / "model.onnx"))
        made = session.run(list(targets), {key: values[value] for key, value in sources.items()})
        values |= dict(zip(targets.values(), made, strict=True))
    for port, value in zip(configs["Skips"]["output"], expected(traced, inputs), strict=True):
        np.testing.assert_allclose(values[port["name"]], value, rtol=1e-5, atol=1e-6)
        assert (port["data_type"], port["dims"]) == ("TYPE_FP32", list(value.shape))


def test_tritons_protobuf_reads_the_repository(traced: Traced, wide: Plan, tmp_path: Path) -> None:
    """tritonclient's package asks for grpc, which its one file with the messages of configs does not need."""
    found = importlib.util.find_spec("tritonclient")
    if found is None:
        pytest.skip("tritonclient is not installed: pip install --no-deps tritonclient")
    messages = load_file("model_config_pb2", Path(found.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py")
    from google.protobuf import text_format

    write_export("triton", Job(traced, wide), tmp_path / "repository")
    texts = {path.parent.name: path.read_text() for path in (tmp_path / "repository").glob("*/config.pbtxt")}
    configs = {name: text_format.Parse(text, messages.ModelConfig()) for name, text in texts.items()}
    assert set(configs) == {"Skips", "Skips_stage0", "Skips_stage1", "Skips_stage2"}
    assert [configs[f"Skips_stage{n}"].instance_group[0].count for n in range(3)] == [1, 2, 2]
    assert [step.model_name for step in configs["Skips"].ensemble_scheduling.step] == [f"Skips_stage{n}" for n in range(3)]
    ports = configs["Skips"].output
    assert [(port.name, messages.DataType.Name(port.data_type)) for port in ports] == [
        (n, "TYPE_FP32") for n in traced.graph.outputs
    ]


@pytest.mark.timeout(300)
@pytest.mark.skipif(get_target("aotinductor").missing() is not None, reason="there is no C++ compiler")
@pytest.mark.timeout(240)
def test_a_package_has_a_compiled_model_for_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages do the same, so that one compilation is enough: it takes 10 s and more."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp().exp()

    made: list[list[str]] = []

    def once(program: StageProgram, folder: Path) -> list[str]:
        made[:] = made or [compiled_files(program, folder)]
        return made[0]

    monkeypatch.setattr(aotinductor_package, "compiled_files", once)
    small = trace(load_model(Two().eval(), inputs=(torch.randn(2, 4),)))
    stages = tuple(Stage(f"stage{n}", (op.name,), ("cpu:0",)) for n, op in enumerate(small.graph.ops))
    write_export("aotinductor", Job(small, Plan(Source(""), small.graph.hash, "", stages, UNKNOWN)), tmp_path / "aoti")
    table = json.loads((tmp_path / "aoti" / "stages.json").read_text())
    models = load_pt2(str(tmp_path / "aoti" / "model.pt2")).aoti_runners
    values = {"x": torch.randn(2, 4)}
    for stage in table["stages"]:
        found = models[stage["model"]](*(values[name] for name in stage["inputs"]))
        values |= zip(stage["outputs"], found if isinstance(found, list | tuple) else [found], strict=True)
    torch.testing.assert_close(values[table["outputs"][0]], values["x"].exp().exp())


def test_the_deployments_of_ray_serve_have_the_plans_replicas_and_give_its_numbers(
    traced: Traced, plan: Plan, tmp_path: Path
) -> None:
    """The deployments' own code runs in this process, in the order of the ingress; Ray itself has a test below."""
    wide = replace(plan, stages=(replace(plan.stages[0], devices=("cpu:0", "cpu:1")), *plan.stages[1:]))
    assert write_export("ray-serve", Job(traced, wide), tmp_path / "app") == [
        "serve it, in this folder: serve run serve_config.yaml"
    ]
    config = yaml.safe_load((tmp_path / "app" / "serve_config.yaml").read_text())
    [application] = config["applications"]
    replicas = {entry["name"]: entry.get("num_replicas") for entry in application["deployments"]}
    assert replicas == {"ingress": None, "stage0": 2, "stage1": 1, "stage2": 1}
    app = load_file("app", tmp_path / "app" / "app.py")

    class Handle:
        def __init__(self, number: int) -> None:
            self.stage, self.run = app.Stage(number), self

        async def remote(self, values: dict) -> dict:
            return self.stage.run(values)

    class Request:
        async def json(self) -> dict:
            return {name: tensor.tolist() for name, tensor in zip(traced.graph.inputs, inputs, strict=True)}

    inputs = requests()
    found = asyncio.run(app.Ingress(*map(Handle, range(3)))(Request()))
    for name, value in zip(traced.graph.outputs, expected(traced, inputs), strict=True):
        np.testing.assert_allclose(np.array(found[name]), value, rtol=1e-5, atol=1e-6)


def test_the_annotated_model_says_the_stage_of_each_node_and_runs_with_its_setting(
    traced: Traced, plan: Plan, tmp_path: Path
) -> None:
    import onnx
    import onnxruntime

    [note] = write_export("onnxruntime-layers", Job(traced, plan), tmp_path / "files")
    model = onnx.load(tmp_path / "files" / "model.onnx")
    onnx.checker.check_model(model)
    marks = [entry.value for node in model.graph.node for entry in node.metadata_props if entry.key == "layer_ann"]
    assert len(marks) == len(model.graph.node) and list(dict.fromkeys(marks)) == ["stage0", "stage1", "stage2"]
    [(name, setting)] = json.loads((tmp_path / "files" / "session_options.json").read_text()).items()
    assert setting == "cpu(=stage0, =stage1, =stage2)" and f"{name}={setting}" in note
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(name, setting)
    session = onnxruntime.InferenceSession(str(tmp_path / "files" / "model.onnx"), options, providers=["CPUExecutionProvider"])
    inputs = requests()
    values = {name: tensor.numpy() for name, tensor in zip(traced.graph.inputs, inputs, strict=True)}
    for found, value in zip(session.run(list(traced.graph.outputs), values), expected(traced, inputs), strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)


def test_executorch_runs_the_programs(traced: Traced, plan: Plan, tmp_path: Path) -> None:
    if (missing := get_target("executorch").missing()) is not None:
        pytest.skip(missing)
    write_export("executorch", Job(traced, plan), tmp_path / "et")
    table = json.loads((tmp_path / "et" / "delegation_tags.json").read_text())
    assert table["tags"] == {op: stage.name for stage in plan.stages for op in stage.ops}
    runtime = importlib.import_module("executorch.runtime").Runtime.get()
    inputs = requests()
    values = dict(zip(traced.graph.inputs, inputs, strict=True))
    for entry in table["programs"]:
        method = runtime.load_program(tmp_path / "et" / entry["file"]).load_method("forward")
        found = method.execute([values[name] for name in entry["inputs"]])
        values |= zip(entry["outputs"], [tensor.clone() for tensor in found], strict=True)
    for name, value in zip(traced.graph.outputs, expected(traced, inputs), strict=True):
        np.testing.assert_allclose(values[name].numpy(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.timeout(300)
def test_ray_serves_the_app_over_http(traced: Traced, plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed: pip install 'ray[serve]'", exc_type=ImportError)
    folder = tmp_path / "app"
    write_export("ray-serve", Job(traced, plan), folder)
    inputs = requests()
    body = json.dumps({name: tensor.tolist() for name, tensor in zip(traced.graph.inputs, inputs, strict=True)})
    done = subprocess.run(
        [sys.executable, "-c", SERVE, body], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    for name, value in zip(traced.graph.outputs, expected(traced, inputs), strict=True):
        np.testing.assert_allclose(np.array(found[name]), value, rtol=1e-5, atol=1e-6)


SERVE = """
import os, socket, sys, urllib.request
sys.path.insert(0, os.getcwd())
os.environ["PYTHONPATH"] = os.getcwd() + os.pathsep + os.environ.get("PYTHONPATH", "")
import ray
from ray import serve
import app
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(app.build({}), route_prefix="/")
import yaml
from ray.serve.schema import ServeDeploySchema
ServeDeploySchema.model_validate(yaml.safe_load(open("serve_config.yaml")))
request = urllib.request.Request(f"http://127.0.0.1:{port}/", data=sys.argv[1].encode())
text = urllib.request.urlopen(request, timeout=60).read().decode()
serve.shutdown()
ray.shutdown()
print(text)
"""
