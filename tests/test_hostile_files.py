"""Every kind of file is mutated at random: what is wrong is refused in a sentence, within a second and 200 MB.

Each kind is tried 100 times, or AUTOSPLIT_FUZZ_CASES times (``make fuzz``).
"""

import contextlib
import copy
import json
import math
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from autosplit import cli
from autosplit.backends.onnxfile import PORTS, open_onnx
from autosplit.bundling import driver
from autosplit.bundling.bundler import write_bundle
from autosplit.bundling.dumps import example_inputs, read_dump, write_dump
from autosplit.bundling.manifest import read_manifest
from autosplit.bundling.openbundle import load_bundle, place_parts
from autosplit.commands.configfile import read_config
from autosplit.costs.workloads import read_split, read_workload
from autosplit.errors import AutosplitError, PlanError, ProfileError, UsageError
from autosplit.files import content_hash, read_data, read_mapping
from autosplit.measuring.store import RUNS, Store, machine_hash
from autosplit.pages.contents import SCHEMA as RUN_SCHEMA
from autosplit.pages.contents import Contents, write_contents
from autosplit.pages.writing import draw_run
from autosplit.parsing import parse_json
from autosplit.planning.givensplits import read_given
from autosplit.planning.question import Question
from autosplit.reports.accuracy import Run, StageRun
from autosplit.reports.judging import Verdict
from autosplit.reports.outcomes import Outcome
from autosplit.reports.results import LatencyStats, RunStats, StageStats
from autosplit.reports.runreport import RunReport
from autosplit.scratch import private_folder, sweep
from autosplit.searching.tuning import open_study, space
from autosplit.serving.pipelineconfig import PipelineConfig
from autosplit.serving.pipelinefile import FILE, load_config, save_config
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import DESCRIBED, load_stage
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.links import shared_memory_link
from autosplit.values.machine import Machine, parse_device
from autosplit.values.machinefile import read_machine
from autosplit.values.plan import UNKNOWN, Plan, Prediction, Source, Stage
from autosplit.values.planfile import read_plan, write_plan
from autosplit.values.profile import Profile
from autosplit.values.samples import Provenance
from autosplit.values.timeline import Action

NUM_CASES = int(os.environ.get("AUTOSPLIT_FUZZ_CASES", "100"))
MOST_S, DRAWN_S = 1.0, 6.0
"""Most processor seconds to read a file, and to draw the charts of a report, which take 2 s."""
MOST_BYTES = 200 << 20
MOST_MESSAGE = 22_000
BINARY = (".safetensors", ".pt2")
SLOWER = {"exported program": 20, "report": 10, "status": 2, "journal": 2}
"""Kinds with a reader that takes long, and the share of the cases that they get."""

ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 2**31, 2**53 + 1, 2**61 - 1, 2**63, 10**299, 0.5, -0.0, 1e-310, 1e308, math.nan, math.inf,
    "", " ", "x", "x" * 50_000, "\0", "\ud800", "..", "../../..", "/", "a0 .. a5", "a5 .. a0", "*", "*" * 300, "aten.*",
    "cpu:0", "cpu:0-9999", "cpu:0" + "+0-9999" * 1500, "cuda:9999", "null:1", "1e400MB", "9" * 5000, "2026-13-45",
    "0x" + "f" * 5000, "1" + ":59" * 3000, "os:system", [], [[]], ["x"] * 2000,
    [-1], [2**62, 2**62], {}, {"x": 1}, {"name": "x"}, [{}] * 2000,
)  # fmt: skip
"""Values that stand in for others."""

PIECES = (
    "&a ", "*a", "<<: *a", "[", "]", "{", "}", ": ", "- ", "\n", "\t", "\0", "'", '"', "\\ud800", "\\",
    "!!python/object/apply:os.getcwd []",
    "!!timestamp x", "!!int ", "0x" + "f" * 5000, "1" + ":59" * 3000, "9" * 5000, "[" * 500,
    "\x80", "\ufeff", "%YAML 9.9\n---\n", "#", "? ",
)  # fmt: skip
"""Pieces of text that are put in anywhere."""


def paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from paths(value, (*path, key))


def mutate_data(data: Any, chance: random.Random) -> Any:
    """The data with one value replaced, removed, doubled or renamed."""
    *above, last = chance.choice([path for path in paths(data) if path] or [("",)])
    holder = data
    for key in above:
        holder = holder[key]
    way = chance.randrange(6)
    if way == 0:
        del holder[last]
    elif way == 1 and isinstance(holder, list):
        holder += [copy.deepcopy(holder[last])] * chance.choice([1, 300])
    elif way == 2 and isinstance(holder, dict):
        holder[chance.choice(["", "x", "y" * 5000, "\ud800", "schema"])] = holder.pop(last)
    elif way == 3 and holder:
        others = list(holder) if isinstance(holder, dict) else range(len(holder))
        holder[last] = copy.deepcopy(holder[chance.choice(others)])
    else:
        holder[last] = copy.deepcopy(chance.choice(ODD))
    return data


def mutate_text(text: str, chance: random.Random) -> str:
    """The text with a piece put in, cut out, doubled, or cut off."""
    first, second = sorted(chance.choices(range(len(text) + 1), k=2))
    way = chance.randrange(4)
    if way == 0:
        return text[:first]
    if way == 1:
        return text[:first] + text[second:]
    if way == 2:
        return text[:second] + text[first:second] * 2 + text[second:]
    return text[:first] + chance.choice(PIECES) + text[first:]


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """The bytes with some of them changed, cut out, doubled, or cut off."""
    first, second = sorted(chance.choices(range(len(data) + 1), k=2))
    way = chance.randrange(5)
    if way == 0:
        return data[:first]
    if way == 1:
        return data[:first] + data[second:]
    if way == 2:
        return data[:second] + data[first:second] * 2 + data[second:]
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 4, 64]) if data else 0):
        changed[chance.randrange(min(len(data), chance.choice([64, len(data)])))] = chance.choice([0, 1, 127, 128, 255, 91, 34])
    return bytes(changed)


def as_yaml(data: Any) -> str:
    """The data as YAML; as JSON, which YAML includes, where a text holds half of a surrogate pair."""
    try:
        return str(yaml.dump(data, Dumper=yaml.CSafeDumper, sort_keys=False))
    except UnicodeEncodeError:
        return json.dumps(data)


def mutated(text: str, chance: random.Random) -> str:
    """One or more mutations of a file, of its values or of its text."""
    data: Any = None
    if chance.random() < 0.75 and text[0] in "{[":
        data = json.loads(text)
    elif chance.random() < 0.75 and ":" in text:
        data = yaml.load(text, yaml.CSafeLoader)
    if not isinstance(data, dict | list):
        return mutate_text(text, chance)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        data = mutate_data(data, chance) or {"x": [1]}
    out = json.dumps(data) if text[0] in "{[" else as_yaml(data)
    return mutate_text(out, chance) if chance.random() < 0.1 else out


def mutated_line(text: str, chance: random.Random) -> str:
    """One or more mutations of a line of a file with a JSON value on each line, or of the text of the whole file."""
    lines = text.splitlines(keepends=True)
    number = chance.randrange(len(lines))
    lines[number] = mutated(lines[number].strip(), chance) + "\n"
    return "".join(lines) if chance.random() < 0.9 else mutate_text(text, chance)


def chain(num_ops: int = 6) -> Graph:
    """x -> a0 -> a1 -> ..., with a weight for each op."""
    values = {name: Value(name, (1, 8), "float32", 32) for name in ["x", *[f"a{i}" for i in range(num_ops)]]}
    ops = tuple(
        Op(f"a{i}", "aten.linear.default", f"b{i // 3}.fc{i}", (f"a{i - 1}" if i else "x",), (f"a{i}",), (f"w{i}",), f"s{i}")
        for i in range(num_ops)
    )
    weights = {f"w{i}": Value(f"w{i}", (8, 8), "float32", 256) for i in range(num_ops)}
    return Graph("chain", ("x",), (f"a{num_ops - 1}",), ops, values, weights).verify()


GRAPH = chain()
HERE = Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])

MACHINE = """\
devices:
- {name: 'cpu:0-1', memory: 300MB, backends: [eager, openvino]}
- {name: 'cpu:2', operators: ['aten.conv*']}
- {name: 'null:0', count: 2}
links:
- {source: 'cpu:0-1', target: 'null:0', bytes_per_s: 1.0e9, latency_s: 1.0e-6}
"""
OPTIONS = """\
budget: 3s
batch: 4
stages: 2
pin: ['fc*=cpu:1']
memory: 300MB
any_sets: true
"""
WORKLOAD = json.dumps(
    {
        "maxSizePerFPGA": 10.0,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [
            {"id": i, "supportedOnFpga": i % 2, "cpuLatency": 1.0 + i, "fpgaLatency": 0.5, "size": 2.0, "colorClass": i // 4}
            for i in range(5)
        ],
        "edges": [{"sourceId": i, "destId": i + 1, "cost": 0.25} for i in range(4)],
    }
)
TIMES = "forward_compute_time=1.5, backward_compute_time=2.0"
NODE = "node{} -- Conv2d(3, 64) -- " + TIMES + ", activation_size=[6.0; 5.0], parameter_size=9.0\n"
PIPEDREAM = "".join(NODE.format(i) for i in range(4)) + "".join(f"\tnode{i} -- node{i + 1}\n" for i in range(3))
DEVICE_MAP = json.dumps({"b0": 0, "b1": "cpu"})
SPLIT_SPEC = "b1: beginning\n"
TVM_SPLIT = json.dumps([{"op_name": "aten.linear", "op_index": 2}])
STATUS = json.dumps(
    {
        "pid": 1,
        "command": "auto",
        "started_unix_s": 1.0,
        "beat_unix_s": 2.0,
        "devices": {
            "cpu:0": {"state": "busy", "used_bytes": 1, "free_bytes": None, "resident_bytes": 2, "stages": ["net/first"]}
        },
        "networks": {"net": {"state": "starting"}},
        "workers": [],
    }
)
SPLIT = json.dumps({"assignment": {str(i): "cpu0" for i in range(5)}})
PROFILE = json.dumps(
    {"schema": 1}
    | Profile.given(GRAPH, {(op.name, name): 1.0 for op in GRAPH.ops for name in ("cpu:0", "cpu:1")})
    .with_links([shared_memory_link("cpu:0", "cpu:1")])
    .to_dict()
)
RUN = Run("run", "m", "plan", "p", "f32", 2.0, 1.5, 0.1, (StageRun("s0", "cpu:0", "eager", 1, 3, 0.5, 0.4),), "2026-01-01")
QUESTION = Question(GRAPH, Profile.empty(GRAPH), Source("m", 4), HERE, ("eager", "onnxruntime"))
PROVENANCE = Provenance("a processor", 2)
MARKER = json.dumps({"made_by": "autosplit", "version": "0", "uid": os.getuid(), "pid": 1})
ALONE = LatencyStats.of([0.5])
WORKER = StageStats("s0", "cpu:0", 0, "eager", 1, 3, 0, 0, ALONE, ALONE, ALONE, ALONE, 0, 9, 9, 0.1)
CHOSEN = Plan(Source("m"), GRAPH.hash, "p", (Stage("s0", tuple(op.name for op in GRAPH.ops), ("cpu:0",)),), UNKNOWN)
RAN = Outcome(CHOSEN, (2.0, 2.1), (0.5,), ALONE, ALONE, True, 0.0, 0.0, RunStats(3, 1.0, ALONE, ALONE, (WORKER,), 0))
REPORT = Contents(
    header={"model": "m"},
    details={"precision": "f32"},
    report=RunReport("m", 1, {"plan": RAN}, Verdict("plan", "use it", True), {"even": "it failed"}, ("a note",)),
    graph=GRAPH,
    caps_bytes={"cpu:0": 9},
    seconds={"a0": {"cpu:0": 0.2}},
    demands={"a1": ["it is pinned"]},
    schedules={"predicted": [Action("s0", 0, 0, 0.0, 0.5, "compute")], "measured": []},
    candidates=[{"plan": "p", "items_per_s": 2.0}],
    front=[{"chosen": "*", "number": 0, "items_per_s": 2.0, "latency_s": 0.5, "peak_bytes": 9, "stages": "6 on cpu:0"}],
    runs=[RUN],
)
NOTES = json.dumps(
    {
        "file": "stage.onnx",
        "inputs": [asdict(TensorSpec("x", (2, 8), (8, 1), "float32"))],
        "outputs": [asdict(TensorSpec("y", (2, 1), (1, 2), "int64", 8))],
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one valid file of each kind that this project writes."""
    place = tmp_path_factory.mktemp("files")
    stages = (Stage("s0", ("a0", "a1", "a2"), ("cpu:0",)), Stage("s1", ("a3", "a4", "a5"), ("cpu:1",), "openvino"))
    write_plan(
        Plan(Source("m:f", 4, 16), GRAPH.hash, "p", stages, Prediction(0.5, 1.0, 0.4, 0.2, 8.0), microbatch=2),
        GRAPH,
        place / "plan.yaml",
    )
    config, null = PipelineConfig(), [parse_device("null:0")]
    config.add_model("net", load_model("autosplit.examples.mlp:mlp?depth=2&width=8"), null)
    wide = TensorSpec("v", (4,), (1,), "float32")
    config.add_function("f", "pipelines:increment", ["pipelines"], [wide], [wide], null)
    config.input("x").connect(config["net"].input(config["net"].stage.inputs[0].name))
    config.input("v").connect(config["f"].input("v"))
    config["net"].output(0).connect(config.output("y"))
    config["f"].output(0).connect(config.output("w"))
    save_config(config, place / "pipeline")
    mlp = trace(load_model("autosplit.examples.mlp:mlp?depth=2&width=8"))
    whole = Stage("s0", tuple(op.name for op in mlp.graph.ops), ("cpu:0",))
    write_bundle({"mlp": (mlp, Plan(mlp.source, mlp.graph.hash, "", (whole,), UNKNOWN))}, place / "bundle")
    with load_bundle(place / "bundle", cuts=True) as bundle:
        write_dump(bundle, "serial", example_inputs(bundle.network), place / "dump")
    (place / "notes").mkdir()
    study = open_study(QUESTION, place / "journal.log")
    for _ in range(8):
        study.tell(study.ask(space(QUESTION)), 1.0)
    store, profile = Store(place / "store"), Profile.from_dict(json.loads(PROFILE))
    store.save(GRAPH, profile)
    store.save_links(PROVENANCE, [shared_memory_link("cpu:0", "cpu:1")])
    for parent, name in (("scratch", "left"), ("hosts", "1")):
        (private_folder(place, parent) / name).mkdir(exist_ok=True)
    module = torch.nn.Linear(4, 4).eval()
    torch.export.save(torch.export.export(module, (torch.zeros(1, 4),), strict=False), place / "net.pt2")
    return place


@pytest.fixture(autouse=True)
def temporary_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch folders and the status of hosts lie beside the other files."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


def resolve_plan(path: Path) -> None:
    read_plan(path).resolve(GRAPH).verify(GRAPH, HERE)


def read_options(path: Path) -> None:
    read_config(typer.Context(SEARCH), path)


def read_split_file(path: Path) -> None:
    read_split(read_workload(path.with_name("workload.json")), read_data(path, "split", PlanError, parse_json))


def read_stage(path: Path) -> None:
    """A stage whose key fits what it says: whoever changes a file may change its key too."""
    try:
        data = json.loads(path.read_text())
        data["key"] = content_hash({field: data[field] for field in DESCRIBED})
        path.write_text(json.dumps(data))
    except Exception:  # the mutated file is read as it is
        pass
    load_stage(path.parent)


def with_key(path: Path) -> None:
    """Give a mutated manifest the key that fits it."""
    try:
        data = json.loads(path.read_text())
        data["key"] = content_hash({name: value for name, value in data.items() if name not in ("schema", "key")})
        path.write_text(json.dumps(data))
    except Exception:  # the mutated file is read as it is
        pass


def read_bundle(path: Path) -> None:
    with_key(path)
    with load_bundle(path.parent, verify=False, trust=True) as bundle:  # without a worker for each case
        assert bundle.network.parts


def read_bundle_in_driver(path: Path) -> None:
    with_key(path)
    driver.read_manifest(path.parent)


def read_runs(path: Path) -> None:
    accuracy = Store(path.parent).accuracy()
    accuracy.rows(), accuracy.summary(), accuracy._repr_html_()


def read_store(path: Path) -> None:
    Store(path.parents[1]).load(GRAPH)
    clear_broken(path)


def read_links(path: Path) -> None:
    Store(path.parents[1]).links(PROVENANCE)
    clear_broken(path)


def clear_broken(path: Path) -> None:
    """Remove what was set aside: each further one gets the next free number."""
    for broken in path.parent.glob("*.broken*"):
        broken.unlink()


def read_marker(path: Path) -> None:
    """The folder is removed if the marker names autosplit and this user, and stays otherwise."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        is_ours = found["made_by"] == "autosplit" and found["uid"] == os.getuid() and path.stat().st_size <= 4096
    except Exception:  # the mutated file is no marker
        is_ours = False
    sweep()
    assert path.exists() is not is_ours
    (private_folder(path.parents[2], "scratch") / path.parent.name).mkdir(exist_ok=True)


def read_status(path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["status"])
    if done.exception is not None:
        raise done.exception


def read_part(path: Path) -> None:
    [part] = place_parts(path.parent, read_manifest(path.parent), "mlp", None, trust=False)
    part.module.program()


def read_given_split(path: Path) -> None:
    read_given(str(path), GRAPH, HERE)


SEARCH = typer.main.get_command(cli.app).commands["search"]  # type: ignore[attr-defined]

KINDS: dict[str, tuple[str, str | None, Callable[[Path], Any]]] = {
    "machine": ("machine.yaml", MACHINE, read_machine),
    "plan": ("plan.yaml", None, resolve_plan),
    "options": ("options.yaml", OPTIONS, read_options),
    "pipeline": (f"pipeline/{FILE}", None, lambda path: load_config(path.parent, ["pipelines"])),
    "workload": ("hostile.json", WORKLOAD, read_workload),
    "pipedream": ("graph.txt", PIPEDREAM, lambda path: read_workload(path, "pipedream")),
    "split": ("split.json", SPLIT, read_split_file),
    "profile": ("profile.json", PROFILE, lambda path: Profile.from_dict(read_mapping(path, "profile", 1, ProfileError))),
    "graph": (
        "graph.json",
        json.dumps(GRAPH.to_dict()),
        lambda path: Graph.from_dict(read_mapping(path, "graph", 1, ProfileError)),
    ),
    "runs": (f"store/{RUNS}", json.dumps(asdict(RUN)), read_runs),
    "stage": ("pipeline/net/stage.json", None, read_stage),
    "ONNX notes": (f"notes/{PORTS}", NOTES, lambda path: open_onnx(path.parent)),
    "bundle": ("bundle/manifest.json", None, read_bundle),
    "bundle for the driver": ("bundle/manifest.json", None, read_bundle_in_driver),
    "eager part": ("bundle/n0p0.json", None, read_part),
    "dump": ("dump/dump.json", None, lambda path: read_dump(path.parent)),
    "values of a dump": ("dump/values.safetensors", None, lambda path: read_dump(path.parent)),
    "weights": ("pipeline/net/weights.safetensors", None, lambda path: load_stage(path.parent)),
    "journal": ("journal.log", None, lambda path: open_study(QUESTION, path)),
    "store": (f"store/chain-{GRAPH.hash[:8]}/cpu-0.json", None, read_store),
    "links": (f"store/links/{machine_hash(PROVENANCE)[:8]}.json", None, read_links),
    "device map": ("device_map.json", DEVICE_MAP, read_given_split),
    "split spec": ("split_spec.yaml", SPLIT_SPEC, read_given_split),
    "TVM split": ("tvm.json", TVM_SPLIT, read_given_split),
    "last ops": ("stages.txt", "a2\na5\n", read_given_split),
    "report": (
        "run.json",
        json.dumps({"schema": RUN_SCHEMA, **REPORT.model_dump(mode="json")}),
        lambda path: draw_run(path, path.with_name("report.html")),
    ),
    "status": (f"autosplit-{os.getuid()}-hosts/1/health.json", STATUS, read_status),
    "scratch marker": (f"autosplit-{os.getuid()}-scratch/left/.autosplit-scratch", MARKER, read_marker),
    "exported program": ("net.pt2", None, lambda path: load_model(path, trust=True)),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_read_or_refused_in_a_sentence(kind: str, folder: Path) -> None:
    name, text, read = KINDS[kind]
    path = folder / name
    valid = text.encode() if text is not None else path.read_bytes()
    (folder / "workload.json").write_text(WORKLOAD)
    path.write_bytes(valid)
    read(path)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    most_s = DRAWN_S if kind == "report" else MOST_S
    refusal = ValueError if kind == "bundle for the driver" else AutosplitError

    @settings(
        max_examples=NUM_CASES // SLOWER.get(kind, 1),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**64))
    def try_one(seed: int) -> None:
        chance = random.Random(seed)
        if path.suffix in BINARY:
            path.write_bytes(mutate_bytes(valid, chance))
        else:
            change = mutated_line if path.suffix == ".log" else mutated
            path.write_text(change(valid.decode(), chance), encoding="utf-8", errors="surrogatepass")
        started_s = time.process_time()
        try:
            read(path)
        except refusal as failure:
            assert 0 < len(str(failure)) < MOST_MESSAGE
        taken_s = time.process_time() - started_s
        if taken_s >= most_s:  # the first call of a library may import more of it
            started_s = time.process_time()
            with contextlib.suppress(refusal):
                read(path)
            taken_s = time.process_time() - started_s
        assert taken_s < most_s

    try:
        try_one()
    finally:
        path.write_bytes(valid)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024 < MOST_BYTES


def test_a_run_file_without_stages_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    stageless = replace(RAN, plan=replace(CHOSEN, stages=()))
    write_contents(REPORT.model_copy(update={"report": replace(REPORT.report, outcomes={"plan": stageless})}), path)
    with pytest.raises(UsageError, match=r"run file '.*run.json' cannot be drawn, because its parts do not fit together"):
        draw_run(path, tmp_path / "page.html")


def test_a_report_that_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_contents(REPORT, path)
    with pytest.raises(UsageError, match=r"report '.*' cannot be written: Is a directory; give the path of another file"):
        draw_run(path, tmp_path)
