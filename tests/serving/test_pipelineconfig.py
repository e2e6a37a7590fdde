"""A config connects by name, refuses each misuse in its own words, prints without a trace, and survives its file."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pipelines
import pytest
import torch
import yaml
from pipelines import CORES, NULL, Wobbling, spec
from torch import nn

from autosplit.errors import AutosplitError, BackendError, DeviceError, ModelError, PlanError, UsageError
from autosplit.files import content_hash
from autosplit.measuring import measure
from autosplit.running.modules import StageFolder
from autosplit.running.pipeline import InProcess, Pipeline
from autosplit.serving.connections import ModulePorts
from autosplit.serving.hostmanager import HostManager
from autosplit.serving.pipelineconfig import PipelineConfig
from autosplit.serving.pipelinefile import FILE, load_config, save_config
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.programs import packages
from autosplit.tracing.splitting import DESCRIBED, StageProgram, split
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine, parse_device

pytestmark = pytest.mark.timeout(100)


def add(config: PipelineConfig, name: str, function: str, reads: str, makes: str = "out", width: int = 4) -> ModulePorts:
    """A function of tests/pipelines.py on a null device."""
    inputs, outputs = ([spec(one, width) for one in side.split()] for side in (reads, makes))
    return config.add_function(name, f"pipelines:{function}", ["pipelines"], inputs, outputs, [NULL])


@pytest.fixture
def config() -> PipelineConfig:
    """x -> a -> b(a, a, twice) -> y, and a skip of a to the output; c waits unconnected, d has another shape."""
    config = PipelineConfig()
    add(config, "b", "add", "one other")
    add(config, "a", "increment", "value")
    config.input("x").connect(config["a"].input("value"))
    config["a"].output(0).connect(config["b"].input("one"))
    config["a"].output("out").connect(config["b"].input("other"))
    config["b"].output(0).connect(config.output("y"))
    config["a"].output(0).connect(config.output("early"))
    return config


SHOWN = """\
inputs
  x -> a.value
modules
  a (pipelines:increment) on null:0
  b (pipelines:add) on null:0
connections
  a.out -> b.one
  a.out -> b.other
outputs
  y <- b.out
  early <- a.out"""


def test_a_config_runs(config: PipelineConfig, tmp_path: Path) -> None:
    assert config.order() == ["a", "b"]
    with config.build(tmp_path) as pipeline:
        assert [float(value[0]) for value in pipeline.run([torch.full((4,), 3.0)])] == [8, 4]


def shop(**settings: Any) -> PipelineConfig:
    """One function from input to output."""
    config = PipelineConfig()
    config.add_function("f", "pipelines:double", ["pipelines"], [spec("x", 4)], [spec("y", 4)], [NULL], **settings)
    config.input("x").connect(config["f"].input("x"))
    config["f"].output("y").connect(config.output("y"))
    return config


def test_a_function_on_a_device_with_a_cap_says_what_it_holds(tmp_path: Path) -> None:
    """It was taken to hold nothing: one of 481 MB ran under a cap of 1 MB."""
    with HostManager(Machine.of([NULL]).with_memory({"null:0": 1_000_000})) as host:
        with pytest.raises(DeviceError, match=r"'f' of network 'shop' is a function.*has a memory cap.*memory='500MB'"):
            host.add_network("shop", **shop().network(tmp_path))
        with pytest.raises(DeviceError, match=r"needs 458.7 MiB on device 'null:0', and 976.6 KiB of 976.6 KiB are free"):
            host.add_network("shop", **shop(memory="481MB").network(tmp_path))
        host.add_network("shop", **shop(memory="800KB").network(tmp_path))
        assert host.devices["null:0"].free_bytes == 200_000
    with HostManager() as host:
        host.add_network("shop", **shop().network(tmp_path))  # without a cap it may hold anything
    save_config(shop(memory="800KB"), tmp_path / "saved")
    assert load_config(tmp_path / "saved", ["pipelines"])["f"].stage.memory_bytes == {"null:0": 800_000}
    with pytest.raises(PlanError, match="memory 'much' is not a size"):
        shop(memory="much")


def test_printing_shows_it_and_changes_nothing(config: PipelineConfig) -> None:
    assert str(config) == SHOWN == str(config)


def test_one_input_feeds_several_modules_and_an_output_skips_some(tmp_path: Path) -> None:
    config = PipelineConfig()
    for name, function, reads in [("a", "increment", "v"), ("b", "double", "v"), ("c", "add", "v w"), ("d", "add", "v w")]:
        add(config, name, function, reads)
    for source, target in [("a", "b"), ("b", "c"), ("c", "d")]:
        config[source].output(0).connect(config[target].input("v"))
    for name, reads in [("a", "v"), ("c", "w")]:
        config.input("x").connect(config[name].input(reads))
    config["a"].output(0).connect(config["d"].input("w"))
    for name in "cd":
        config[name].output(0).connect(config.output(f"{name}_out"))
    with config.build(tmp_path) as pipeline:
        assert [float(value[0]) for value in pipeline.run([torch.full((4,), 3.0)])] == [8 + 3, 11 + 4]


def test_a_graph_module_is_a_module_like_others(tmp_path: Path) -> None:
    torch.manual_seed(0)
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval())
    config = PipelineConfig()
    with pytest.raises(ModelError, match="inputs"):
        config.add_model("net", graph, [NULL])
    net = config.add_model("net", graph, [NULL], inputs=torch.ones(1, 4))
    config.input("x").connect(net.input(net.stage.inputs[0].name))
    net.output(0).connect(config.output("y"))
    with HostManager() as host, torch.inference_mode():
        host.add_network("shop", **config.network(tmp_path))
        assert torch.equal(host.run("shop", [torch.ones(1, 4)])[0], graph(torch.ones(1, 4)))


def test_workers_know_an_operator_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They import the module that defines it, which the host tells them; no file does."""
    traced = trace(load_model(Wobbling().eval(), inputs=torch.ones(1, 4)))
    [program] = split(traced, [[op.name for op in traced.graph.ops]])
    assert measure(traced, Machine.of(CORES[:1]), links=False, budget_s=0.1).measured
    config = PipelineConfig()
    net = config.add_stage("net", program, CORES[:1])
    config.input("x").connect(net.input(program.inputs[0].name))
    net.output(0).connect(config.output("y"))
    with config.build(tmp_path) as pipeline, torch.inference_mode():
        assert torch.allclose(pipeline.run([torch.ones(1, 4)])[0], traced.run(torch.ones(1, 4)))
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == pipelines.__file__]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(PlanError, match=r"'pipelines.wobble.default' is defined in .*, which workers cannot import"):
        packages(program.module.graph)


def test_a_cycle_is_refused_with_its_path() -> None:
    config = PipelineConfig()
    for name in "abc":
        add(config, name, "increment", "value")
    config["a"].output(0).connect(config["b"].input("value"))
    config["b"].output(0).connect(config["c"].input("value"))
    with pytest.raises(PlanError, match=r"module output 'c.out' to module input 'a.value': that makes a cycle: a -> b -> c -> a"):
        config["c"].output(0).connect(config["a"].input("value"))
    config.input("x").connect(config["a"].input("value"))


@pytest.mark.parametrize(
    "misuse,fault",
    [
        (lambda c: c["none"], "there is no module 'none'; the modules are: b, a"),
        (lambda c: c["a"].input("none"), "module 'a' has no input 'none'; its inputs are: value"),
        (lambda c: c["a"].output("none"), "module 'a' has no output 'none'; its outputs are: out"),
        (lambda c: c["a"].output(1), "module 'a' has no output 1; it has 1"),
        (lambda c: c.input("a.b"), "input name 'a.b' is not understood"),
        (lambda c: add(c, "a", "double", "value"), "there is a module 'a' already"),
        (lambda c: c["a"].output(0).connect(c["a"].input("value")), "a module cannot feed itself"),
        (lambda c: c["a"].input("value").connect(c["b"].input("one")), "connect the source of the first to the second as well"),
        (lambda c: c["a"].output(0).connect(c["b"].output(0)), "connect an output to an input"),
        (lambda c: c.input("x").connect("a.value"), "to 'a.value': a port is expected, such as config['net'].input('x')"),
        (
            lambda c: c.add_function("f", "pipelines:double", ["pipelines"], [], [], [NULL], precision="fp8"),
            "precision 'fp8' does not exist, the precisions are f32, tf32, bf16, f16",
        ),
        (
            lambda c: c.add_function("f", "pipelines:double", ["pipelines"], [], [], [NULL], backend="openvivo"),
            "backend 'openvivo' does not exist",
        ),
        (
            lambda c: c.add_function("f", lambda x: x, ["pipelines"], [], [], [NULL]),
            "workers import a function by its name, 'package.module:function', but here it is <function",
        ),
        (
            lambda c: c.add_function("f", "pipelines:double", ["pipelines"], [], [], [NULL], thread=2),
            "'thread' is not a setting; close names: 'threads'",
        ),
        (
            lambda c: c.add_function(
                "f", "pipelines:double", ["pipelines"], [replace(spec("v"), dtype=torch.float32)], [], [NULL]
            ),
            "'v' has dtype torch.float32, which is not the name of a dtype of torch, such as 'float32'",
        ),
        (
            lambda c: c.add_function("f", "pipelines:double", ["pipelines"], [], [], [parse_device("cpu:0")], threads=8),
            "stage 'f' has threads=8, and 'cpu:0' has 1 core",
        ),
        (
            lambda c: c.add_function("f", "pipelines:double", ["pipelines"], [], [], [NULL], threads=0),
            "stage 'f' has threads=0; it must be more than 0",
        ),
        (lambda c: c.input(None), "input name None is not understood"),
        (lambda c: c.output("y").connect(c["a"].input("value")), "an output of the pipeline feeds nothing"),
        (lambda c: c.input("x").connect(c.output("z")), "pass it around the pipeline instead"),
        (lambda c: c.input("x").connect(c.input("z")), "input 'x' feeds module inputs"),
        (lambda c: c.group("g").connect(c["a"].input("value")), "parameter group 'g' feeds module parameters"),
        (lambda c: c.group("g").connect(c["a"].parameters), "module 'a' is a function and has no parameters"),
        (lambda c: c.input("x").connect(c["a"].parameters), "input 'x' feeds module inputs"),
        (lambda c: c["a"].input("value").connect(c.output("z")), "module input 'a.value' feeds nothing"),
        (lambda c: c.input("z").connect(c["a"].input("value")), "module input 'a.value' is fed by input 'x' already"),
        (lambda c: c["a"].output(0).connect(c.output("y")), "output 'y' is fed by module output 'b.out' already"),
        (
            lambda c: add(c, "twice", "add", "v v"),
            "module 'twice' cannot be added (1 fault):\n  * it has two inputs that are called 'v'",
        ),
        (lambda c: c["b"].output(0).connect(PipelineConfig().output("z")), "they belong to two configs"),
        (lambda c: c.add_function("f", "os:remove", ["pipelines"], [], [], [NULL]), "is not in an allowed module (pipelines)"),
        (lambda c: add(c, "open", "double", "v") and c.verify(), "module input 'open.v' is left open"),
        (lambda c: PipelineConfig().verify(), "it has no outputs"),
    ],
)
def test_each_misuse_has_its_own_error_and_changes_nothing(
    config: PipelineConfig, misuse: Callable[[PipelineConfig], object], fault: str
) -> None:
    before = dict(config.fed), dict(config.outputs), list(config.inputs)
    with pytest.raises((PlanError, UsageError)) as caught:
        misuse(config)
    assert fault in str(caught.value)
    assert (config.fed, config.outputs, config.inputs) == before


def test_all_that_is_wrong_with_a_config_is_said_at_once(config: PipelineConfig) -> None:
    config["a"].output(0).connect(add(config, "wide", "double", "v", width=5).input("v"))
    config.input("x").connect(add(config, "late", "add", "v w", width=5).input("v"))
    with pytest.raises(PlanError, match="the pipeline is not complete") as caught:
        config.verify()
    assert str(caught.value).splitlines()[1:] == [
        "  * module input 'late.w' is left open",
        "  * stage 'late' reads 'x' as float32 [5], and stage 'a' reads it as float32 [4]",
        "  * stage 'wide' reads 'a.out' as float32 [5], and stage 'a' makes it as float32 [4]",
    ]


def test_many_replicas_on_a_device_are_refused_before_any_starts(saved: Path) -> None:
    """400 copies of one core in a stranger's file started 400 workers there, one after the other."""
    path = saved / FILE
    data = yaml.safe_load(path.read_text())
    name, module = next(iter(data["modules"].items()))
    module["devices"] = ["cpu:0"] * 400 + ["null:0"] * 16
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError, match=f"stage '{name}' has 400 replicas on 'cpu:0', and at most 16 are allowed"):
        load_config(saved, ["pipelines"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_module_on_a_device_that_is_not_here_is_refused_in_a_sentence(tmp_path: Path) -> None:
    config = PipelineConfig()
    net = config.add_model("net", torch.nn.Linear(4, 4).eval(), [parse_device("cuda:0")], inputs=(torch.zeros(1, 4),))
    config.input("x").connect(net.input(net.stage.inputs[0].name))
    net.output(0).connect(config.output("y"))
    with pytest.raises(AutosplitError, match=r"device 'cuda:0' is not here: this machine has 0 CUDA devices") as caught:
        config.build(tmp_path)
    assert "Traceback" not in str(caught.value)


def test_one_name_is_no_list_of_names(config: PipelineConfig) -> None:
    """Python would take every letter for a name."""
    asked = {"path": "math:pi", "allowed": ["math"], "inputs": [], "outputs": [], "devices": [NULL]}
    for wrong, fault in [
        ({"devices": "null:0"}, "devices of 'f' must be a list of Device, in brackets, but is 'null:0'; machine.parse_device"),
        ({"devices": ["null:0"]}, "devices of 'f' must be a list of Device, in brackets, but is ['null:0']"),
        ({"inputs": spec("v")}, "inputs of 'f' must be a list of TensorSpec, in brackets, but is TensorSpec"),
        ({"outputs": "v"}, "outputs of 'f' must be a list of TensorSpec, in brackets, but is 'v'"),
        ({"allowed": "math"}, "allowed must be a list of str, in brackets, but is 'math'"),
    ]:
        with pytest.raises(UsageError) as caught:
            config.add_function("f", **{**asked, **wrong})  # type: ignore[arg-type]
        assert fault in str(caught.value) and "f" not in config.stages
    with pytest.raises(UsageError, match="inputs must be a list of str, in brackets, but is 'image'"):
        Pipeline([], "image", [])
    for demand in (Constraints(together="op"), Constraints(forbids={"op": "cpu:0"})):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="must be a list of str"):
            demand.verify(Graph("none", (), (), (), {}, {}), Machine.of([NULL]))
    with pytest.raises(UsageError, match="devices must be a list of Device"):
        Machine.of("cpu:0")  # type: ignore[arg-type]


def test_a_file_round_trips_and_the_folder_moves(tmp_path: Path) -> None:
    config = PipelineConfig()
    config.add_model("net", load_model("autosplit.examples.mlp:mlp?depth=2&width=8"), [CORES[0]], threads=1)
    wide = TensorSpec("v", (1, 8), (8, 1), "float32")
    config.add_function("after", "pipelines:double", ["pipelines"], [wide], [wide], [NULL], queue_depth=2)
    config.input("x").connect(config["net"].input(config["net"].stage.inputs[0].name))
    config["net"].output(0).connect(config["after"].input("v"))
    config["after"].output(0).connect(config.output("y"))
    config.group("weights").connect(config["net"].parameters)
    with pytest.raises(PlanError, match="they are in group 'weights' already"):
        config.group("more").connect(config["net"].parameters)
    save_config(config, tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    again = load_config(tmp_path / "there", ["pipelines"])
    assert str(again) == str(config) and again.groups == {"weights": ["net"]}
    save_config(again, tmp_path / "there")
    model = load_model("autosplit.examples.mlp:mlp?depth=2&width=8")
    with again.build(tmp_path / "work") as pipeline, torch.inference_mode():
        assert torch.allclose(pipeline.run(model.args)[0], 2 * model.module(*model.args))
    with pytest.raises(UsageError, match="allow its module if you trust it"):
        load_config(tmp_path / "there")


@pytest.mark.parametrize(
    "change,fault",
    [
        (lambda data: data.update(schema=9), "has schema version 9, and this autosplit reads version 1"),
        (lambda data: data.update(extra=1), "extra: Extra inputs are not permitted"),
        (lambda data: data["modules"]["a"].update(stage="s"), "module 'a' must name a stage or a function, one of the two"),
        (
            lambda data: data["modules"]["a"]["inputs"][0].update(dtype="load"),
            "has dtype 'load', which is not the name",
        ),
        (lambda data: data["modules"]["a"]["inputs"][0].update(shape=[-4]), "has shape [-4] and strides [1], as no tensor has"),
        (lambda data: data["modules"]["a"]["inputs"][0].update(stride=[1, 1]), "strides [1, 1], as no tensor has"),
        (lambda data: data["modules"]["a"]["inputs"][0].update(shape=[2**42]), "strides [1], and at most 1 TiB are allowed"),
        (lambda data: data["modules"]["a"]["outputs"][0].update(stride=[2**40]), "and at most 1 TiB are allowed"),
        (lambda data: data["modules"]["a"]["outputs"][0].update(offset_bytes=2), "a multiple of 4 below 64 is needed"),
        (lambda data: data["modules"]["a"]["outputs"][0].update(offset_bytes=-4), "starts -4 bytes past"),
        (
            lambda data: data["modules"]["a"].update(queue_depth=10**9),
            "a queue depth of 1000000000; it must be at least 1 and at most 1024",
        ),
        (lambda data: data["connections"].append(["a.out", "b.none"]), "module 'b' has no input 'none'"),
        (lambda data: data["connections"].pop(), "module input 'b.other' is left open"),
        (lambda data: data["modules"]["a"].update(devices=["tpu:0"]), "device 'tpu:0' is not understood"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(
    config: PipelineConfig, tmp_path: Path, change: Callable[[dict[str, object]], object], fault: str
) -> None:
    save_config(config, tmp_path)
    data = yaml.safe_load((tmp_path / FILE).read_text())
    change(data)
    (tmp_path / FILE).write_text(yaml.safe_dump(data))
    with pytest.raises(AutosplitError) as caught:
        load_config(tmp_path, ["pipelines"])
    assert fault in str(caught.value)


def test_reading_a_config_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even code that is allowed, which is for workers to import; and no tag of YAML makes an object."""
    marker = tmp_path / "ran"
    (tmp_path / "sly.py").write_text(f"open({str(marker)!r}, 'w')\ndef f(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = PipelineConfig()
    sly = config.add_function("a", "sly:f", ["sly"], [spec("v")], [spec("out")], [NULL])
    config.input("x").connect(sly.input("v"))
    sly.output(0).connect(config.output("y"))
    save_config(config, tmp_path)
    with pytest.raises(UsageError, match="not in an allowed module"):
        load_config(tmp_path, ["pipelines"])
    again = load_config(tmp_path, ["sly"])
    assert str(again) == str(config) and not marker.exists()
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(f"{text}more: !!python/object/apply:os.mkdir ['{marker}']\n")
    with pytest.raises(PlanError, match="not valid"):
        load_config(tmp_path, ["sly"])
    assert not marker.exists()
    with again.build(tmp_path / "work") as pipeline:
        assert pipeline.run([torch.ones(4)])[0][0] == 1 and marker.exists()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A pipeline folder with one stage, as a stranger may have sent it."""
    config = PipelineConfig()
    config.add_model("net", load_model("autosplit.examples.mlp:mlp?depth=2&width=8"), [NULL])
    config.input("x").connect(config["net"].input(config["net"].stage.inputs[0].name))
    config["net"].output(0).connect(config.output("y"))
    save_config(config, tmp_path / "pipeline")
    return tmp_path / "pipeline"


def changed(folder: Path, **fields: object) -> None:
    """Change fields of the only module."""
    data = yaml.safe_load((folder / FILE).read_text())
    data["modules"]["net"].update(fields)
    (folder / FILE).write_text(yaml.safe_dump(data))


@pytest.mark.parametrize("place", ["../elsewhere", "net/../../elsewhere", "absolute", "link"])
def test_a_stage_outside_the_folder_is_refused_and_nothing_is_written_there(saved: Path, place: str) -> None:
    elsewhere = saved.parent / "elsewhere"
    shutil.copytree(saved / "net", elsewhere)
    (saved / "link").symlink_to(elsewhere)
    before = sorted(path.name for path in elsewhere.iterdir())
    changed(saved, stage=str(elsewhere) if place == "absolute" else place, backend="onnxruntime")
    with pytest.raises(PlanError, match=r"leads out of it, to '.*elsewhere'"):
        load_config(saved)
    assert sorted(path.name for path in elsewhere.iterdir()) == before


def test_a_link_in_a_stage_folder_that_leads_outside_is_refused(saved: Path) -> None:
    (saved / "net" / "onnx.json").symlink_to(saved.parent / "target")
    with pytest.raises(PlanError, match=r"leads out of it, to '.*target'"):
        load_config(saved)


def test_native_code_of_a_folder_is_loaded_only_if_it_is_allowed(saved: Path) -> None:
    changed(saved, backend="inductor")
    (saved / "net" / "inductor.so").write_bytes(b"a stranger's library")
    with pytest.raises(BackendError, match="loads native code from the folder; give trust=True if you trust its maker"):
        load_config(saved)
    with pytest.raises(BackendError, match="native code"):
        StageFolder(saved / "net", "inductor").load(1, "cpu:0", shared=False)
    allowed = load_config(saved, trust=True)["net"].stage.module
    assert isinstance(allowed, StageFolder) and allowed.trust


def test_a_stage_that_names_an_operator_which_writes_files_is_refused(saved: Path, tmp_path: Path) -> None:
    """The folder is consistent: whoever changes the nodes can compute the hash anew."""
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(16))
    data = json.loads((saved / "net" / "stage.json").read_text())
    data["nodes"][-1:-1] = [
        {
            "op": "call_function",
            "name": "mapped",
            "target": "aten.from_file.default",
            "args": [str(victim), True, 4],
            "kwargs": {},
        },
        {"op": "call_function", "name": "w", "target": "aten.fill_.Scalar", "args": [{"node": "mapped"}, 7], "kwargs": {}},
    ]
    old = data["key"]
    data["key"] = data["weights_key"] = content_hash({field: data[field] for field in DESCRIBED})
    weights = saved / "net" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes().replace(old.encode(), data["key"].encode()))
    (saved / "net" / "stage.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"operator 'aten.from_file.default' is not allowed"):
        load_config(saved)
    assert victim.read_bytes() == bytes(16)


class Spectrum(nn.Module):
    """An op whose kernel trusts its arguments."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).abs()


def test_a_stage_in_memory_calls_every_operator_and_one_in_a_folder_those_that_its_maker_is_trusted_for(tmp_path: Path) -> None:
    x = torch.randn(16)
    config = PipelineConfig()
    config.add_model("net", Spectrum().eval(), [parse_device("cpu:0")], inputs=(x,))
    config.input("x").connect(config["net"].input("x"))
    config["net"].output(0).connect(config.output("y"))
    with config.build(tmp_path / "own") as pipeline:
        torch.testing.assert_close(pipeline.run([x])[0], torch.fft.rfft(x).abs())
    with pytest.raises(PlanError, match=r"stage 'net' is not for everybody.*give trust=True"):
        save_config(config, tmp_path / "sent")
    save_config(config, tmp_path / "sent", trust=True)
    with pytest.raises(PlanError, match="run only if you trust its maker; give trust=True"):
        load_config(tmp_path / "sent")
    assert load_config(tmp_path / "sent", trust=True)["net"]


def test_a_stage_of_a_folder_runs_in_the_callers_process_with_trust_only(saved: Path, tmp_path: Path) -> None:
    """The worker of a null device is a thread of the caller."""
    with pytest.raises(PlanError, match=r"stage 'net' comes from a file and runs in torch: .* give trust=True"):
        load_config(saved).build(tmp_path / "work")
    with pytest.raises(PlanError, match="stage 'net' comes from a file"):
        InProcess(load_config(saved).placements(tmp_path / "work"), ["x"], ["net.linear_1"])
    with load_config(saved, trust=True).build(tmp_path / "work") as pipeline:
        assert pipeline.run([torch.ones(1, 8)])[0].shape == (1, 8)


def test_a_custom_operator_of_a_folder_must_be_in_an_allowed_module(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageProgram, "packages", ("dangerous.module",))
    with pytest.raises(UsageError, match="is not in an allowed module"):
        load_config(saved)
    assert load_config(saved, ["dangerous"]).stages
