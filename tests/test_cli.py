"""The commands as a person runs them: results on stdout, one clear message on stderr, nothing left behind."""

import contextlib
import errno
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import typer
import yaml
from pipelines import abandoned_since
from typer.testing import CliRunner, Result

from autosplit import cli
from autosplit.commands import console
from autosplit.commands.options import Output
from autosplit.deploying.footprints import Footprints
from autosplit.devices.limits import affinity
from autosplit.errors import TraceError, UsageError
from autosplit.measuring import store
from autosplit.progress import stopped
from autosplit.terminal import Terminal
from autosplit.tracing import capturing
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage
from autosplit.values.profile import Profile

MLP = "autosplit.examples.mlp:mlp?depth=6&width=256"
CORES = affinity()[:2]
DEVICES = ",".join(f"cpu:{core}" for core in CORES)
WORKLOAD = Path(__file__).parent / "data" / "workloads" / "layer-bert24_inference.json"


def inside(*words: str, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    """The command in this process: a new one takes seconds to load torch."""
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(console, "err", Terminal(stderr=True, width=200))
    monkeypatch.setattr(store, "user_root", lambda: Path("profiles"))
    return CliRunner().invoke(cli.app, list(words))


def whole_bytes(device: str) -> int:
    """The memory of a worker that holds the whole model."""
    traced = trace(load_model(MLP))
    stage = Stage("stage0", tuple(op.name for op in traced.graph.ops), (device,))
    plan = Plan(Source(MLP), traced.graph.hash, "", (stage,), UNKNOWN)
    profile = Profile.given(traced.graph, {(op.name, device): 1.0 for op in traced.graph.ops})
    [stage] = Footprints(Machine.of([parse_device(device)])).account(traced, profile).measured(plan).stages
    assert stage.memory is not None
    return stage.memory.weight_bytes + stage.memory.beside_bytes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder in which ``auto`` made a two-stage plan of a small model that one device may not hold."""
    if len(CORES) < 2:
        pytest.skip("needs two cores")
    folder = tmp_path_factory.mktemp("made")
    options = {"devices": DEVICES.split(","), "backend": ["eager"], "stages": 2, "budget": "300ms"}
    options["memory"] = dict.fromkeys(DEVICES.split(","), whole_bytes(DEVICES.split(",")[0]) + 60_000_000)
    (folder / "options.yaml").write_text(yaml.safe_dump(options))
    words = ["auto", MLP, "--config", "options.yaml", "--requests", "40", "--rounds", "2", "--json"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        done = inside(*words, cwd=folder, monkeypatch=monkeypatch)
    assert done.exit_code == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.timeout(300)
def test_auto_gives_what_machines_read(made: tuple[Path, dict[str, Any]]) -> None:
    folder, result = made
    assert result["outputs_equal"] and result["max_abs_error"] == 0
    assert result["throughput_per_s"] > 0 and result["predicted_throughput_per_s"] > 0
    assert set(result["latency_s"]) == {"p50", "p90", "p99"}
    assert result["chosen"] in ("plan", "even split (eager)")  # both have the two stages that are asked for
    assert (folder / result["plan"]).exists()
    for stage in result["stages"]:
        assert {"device", "backend", "ops", "busy_s", "wait_s", "transfer_s", "resident_bytes"} <= set(stage)


def test_a_plan_keeps_its_caps_with_all_that_its_stages_hold(made: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = made
    plan = yaml.safe_load((folder / "plan.yaml").read_text())
    [cap] = set(yaml.safe_load((folder / "options.yaml").read_text())["memory"].values())
    sizes = [sum(size for name, size in stage["memory"].items() if name.endswith("_bytes")) for stage in plan["stages"]]
    assert len(sizes) == 2 and max(sizes) <= cap
    assert all(stage["memory"]["measured"] for stage in plan["stages"])


def test_runs_are_shown_beside_their_predictions(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, result = made
    shown = json.loads(inside("profile", "--accuracy", "--json", cwd=folder, monkeypatch=monkeypatch).stdout)
    ran = next(run for run in shown["runs"] if (run["kind"], run["way"]) == ("run", "plan"))
    assert ran["measured_per_s"] == result["plan_throughput_per_s"] and len(ran["stages"]) == 2
    assert {run["kind"] for run in shown["runs"]} == {"run", "searched"}
    assert shown["summary"][0]["runs"] == len(shown["runs"]) and shown["summary"][0]["median_error"] >= 0
    table = inside("profile", "--accuracy", cwd=folder, monkeypatch=monkeypatch).stdout
    assert "worst error" in table and " %" in table
    empty = inside("profile", "--accuracy", cwd=tmp_path, monkeypatch=monkeypatch)
    assert empty.exit_code == 1 and "holds no run yet" in empty.stderr
    nothing = inside("profile", cwd=tmp_path, monkeypatch=monkeypatch)
    assert nothing.exit_code == 1 and "autosplit profile MODEL measures one" in nothing.stderr


@pytest.mark.timeout(300)
def test_a_plan_runs_again_and_is_exported(made: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = made
    few = ["--requests", "20", "--rounds", "1", "--no-baselines"]
    written = ["--trace", "t.json", "--picture", "ways.svg", "--dot", "plan.dot"]
    ran = inside("run", "plan.yaml", *few, *written, "--watch", "--json", cwd=folder, monkeypatch=monkeypatch)
    assert ran.exit_code == 0, ran.stderr
    assert json.loads(ran.stdout)["outputs_equal"]
    lanes = {event["pid"] for event in json.loads((folder / "t.json").read_text())["traceEvents"]}
    assert len(lanes) == 2
    assert (folder / "ways.svg").read_text().startswith("<?xml") and "wrote ways.svg" in ran.stderr
    assert (folder / "plan.dot").read_text().count("subgraph cluster_") == 2 and "wrote plan.dot" in ran.stderr
    drawn = inside("run", "plan.yaml", "--picture", "ways.pdf", cwd=folder, monkeypatch=monkeypatch)
    assert drawn.exit_code == 1 and "--picture writes SVG, not 'ways.pdf'" in drawn.stderr
    exported = inside("export", "plan.yaml", "exported", "--json", cwd=folder, monkeypatch=monkeypatch)
    assert exported.exit_code == 0, exported.stderr
    assert {"manifest.json", "driver.py"} <= set(json.loads(exported.stdout)["files"])
    assert exported.stderr.startswith("load …\nexport …\n"), "tracing and writing take a while, and bars show it"


@pytest.mark.timeout(120)
def test_faults_of_a_plan_file_are_named(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = made
    text = (folder / "plan.yaml").read_text()
    (tmp_path / "cut.yaml").write_text(text[: len(text) // 2])
    (tmp_path / "other.yaml").write_text(text.replace("depth=6", "depth=5"))
    (tmp_path / "foreign.yaml").write_text(text.replace("autosplit.examples.mlp:mlp", "os.path:join"))
    for name, message in [("cut", "truncated"), ("other", "another model"), ("foreign", "--model 'os.path:join")]:
        done = inside("run", f"{name}.yaml", cwd=tmp_path, monkeypatch=monkeypatch)
        assert done.exit_code == 1 and message in done.stderr and not done.stdout, done.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "words,message",
    [
        (["auto", "transformers:BertModle"], "BertModel"),
        (["auto", "autosplit.examples.mlp:nothing"], "no function 'nothing'"),
        (["auto", MLP, "--devices", "cpu:4000"], "core 4000"),
        (["auto", MLP, "--devices", ""], "it has no devices; name one, such as cpu:0"),
        (["auto", MLP, "--backend", "tensorflow"], "the backends are eager"),
        (["auto", "transformers:GPT2Model?n_layer=1&use_cache=true"], "use_cache=false"),
        (["search", MLP, "--objective", "speed"], "valid: throughput"),
        (["report", "absent.json"], "autosplit: run file 'absent.json' does not exist"),
        (["serve", "p.yaml", "--drain-time", "3sec", "--max-body", "x"], "--drain-time: '3sec' is not a duration"),
        (["search", MLP, "--max-latency", "0ms"], "--max-latency must be above 0 s"),
        (["search", MLP, "--bandwidth", "1e9", "--num-devices", "2"], "leave out --num-devices, --bandwidth"),
        (["search", MLP, "--front", "plans"], "what --objective pareto finds; leave out --front"),
        (
            ["search", str(WORKLOAD), "--format", "dnn-partitioning", "--batch", "2", "--budget", "1s"],
            "leave out --batch, --budget",
        ),
        (["profile", MLP, "--accuracy"], "leave out 'autosplit.examples.mlp"),
        (["profile", "--accuracy", "--devices", "cpu:0", "--remeasure"], "leave out --devices, --remeasure"),
        (
            ["search", str(WORKLOAD), "--format", "dnn-partitioning", "--num-devices", "3"],
            "names its own devices; leave out --num",
        ),
        (["search", MLP, "--backend", "eager,eagr,x"], "backend 'eagr', 'x' does not exist, the backends are eager"),
        (["profile", MLP, "--backend", ","], "--backend names none, the backends are eager"),
        (
            ["search", MLP, "--max-latency", "0s", "--budget", "-1s", "--time-limit", "nan"],
            "these flags cannot be used (3 faults)",
        ),
        (["search", MLP, "--budget", "9" * 400], "--budget: '999"),
        (["search", MLP, "--arrival-rate", "inf"], "--arrival-rate must be a number above 0 requests a second, but is inf"),
        (["auto", MLP, "-o", ".", "--trace", "."], "--trace '.' is a folder; name a file"),
        (["profile", MLP, "--profiles", sys.executable], "is a file; name a folder"),
        (
            ["auto", MLP, "-o", f"{sys.executable}/[p].yaml"],
            "[p].yaml' cannot be written: Not a directory; name another place",
        ),
        (
            ["search", MLP, "--trace", "/proc/t.json", "--front", f"{sys.executable}/front", "--objective", "pareto"],
            "these flags cannot be used (2 faults)",
        ),
        (["export", "absent.yaml", sys.prefix], "holds something already: give another one"),
        (["export", "absent.yaml", f"{sys.executable}/folder"], "folder' cannot be written: Not a directory; give another one"),
        (["bundle", "app.asb"], "'app.asb' alone says too little; write: autosplit bundle show app.asb"),
        (["bundle", "plan.yaml"], "'plan.yaml' alone says too little; write: autosplit bundle plan.yaml app.asb"),
        (["export", "absent.yaml", "folder", "--to", "tvm"], "runtime 'tvm' is not one that autosplit exports to"),
        (["search", MLP, "--pin", "fc*=cpu:0", "--pin", "fc*=cpu:1"], "'fc*' is given with 'cpu:0' and with 'cpu:1'"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = inside(*words, cwd=tmp_path, monkeypatch=monkeypatch)
    assert done.exit_code == 1, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not done.stdout and not (tmp_path / "plan.yaml").exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "words,message",
    [
        (["auto", MLP, "--stages", "3", "--max-stages", "2"], "--stages 3 is above --max-stages 2; leave one of them out"),
        (["search", MLP, "--pin", "relu*=cpu:77"], "'relu*' names device 'cpu:77', which is not one of"),
        (["auto", MLP, "--memory", "1kB"], "' is 1000 B, and each worker alone takes more than 976.6 KiB there; raise it, or"),
        (["auto", "nosuch.py:net"], "there is no file 'nosuch.py' here"),
        (["auto", "nosuch:net"], "No module named 'nosuch'"),
        (["auto", f"{MLP}&colour=3"], "it has no field 'colour'"),
        (["auto", "nosuch.pt2", "--trust"], "'nosuch.pt2' does not exist"),
        (["auto", "transformers:NoSuchModel"], "no model class 'NoSuchModel'"),
        (["evaluate", MLP, "--split", "a.onnx,b.onnx"], "split file 'a.onnx' does not exist; numbers of layers are written as"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_traced_or_foretold(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "trace", None)
    done = inside(*words, "--json", cwd=tmp_path, monkeypatch=monkeypatch)
    assert done.exit_code == 1 and message in json.loads(done.stdout)["message"]
    assert done.stderr.count("autosplit: ") == 1 and message in done.stderr and "this takes about" not in done.stderr


@pytest.mark.timeout(120)
def test_demands_that_cannot_be_met_are_named(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = made
    known = ["search", MLP, "--devices", DEVICES, "--backend", "eager", "--budget", "0s", "--profiles", str(folder / "profiles")]
    pinned = inside(*known, "--pin", f"nothing=cpu:{CORES[0]}", cwd=tmp_path, monkeypatch=monkeypatch)
    assert pinned.exit_code == 1 and "'nothing' matches no op" in pinned.stderr
    capped = inside(*known, "--memory", "1.1MB", cwd=tmp_path, monkeypatch=monkeypatch)
    assert "no plan fits: a worker takes " in capped.stderr and "and its cap is 1.0 MiB. Raise a cap." in capped.stderr
    assert capped.exit_code == 1 and not (tmp_path / "plan.yaml").exists()


@pytest.mark.timeout(120)
def test_an_answer_that_cannot_be_written_is_shown_all_the_same(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = made
    known = ["search", MLP, "--devices", DEVICES, "--backend", "eager", "--budget", "0s", "--profiles", str(folder / "profiles")]
    done = inside(*known, "-o", "/dev/full", "--json", cwd=tmp_path, monkeypatch=monkeypatch)
    assert done.exit_code == 1 and "'/dev/full': No space left" in done.stderr and "Traceback" not in done.stderr
    assert json.loads(done.stdout)["stages"]


@pytest.mark.timeout(120)
def test_an_answer_is_kept_where_what_goes_beside_it_cannot_be_written(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = made
    shutil.copytree(folder / "profiles", tmp_path / "profiles")
    (tmp_path / "profiles" / "runs.jsonl").unlink()
    (tmp_path / "profiles" / "runs.jsonl").mkdir()
    known = ["--devices", DEVICES, "--backend", "eager", "--budget", "0s", "--trace", "/dev/full", "--simulate", "5", "--json"]
    done = inside("search", MLP, *known, "--stages", "2", cwd=tmp_path, monkeypatch=monkeypatch)
    assert done.exit_code == 1 and "'/dev/full': No space left" in done.stderr
    simulated = json.loads(done.stdout)["simulated"]
    assert [*simulated] == ["requests", "arrivals_per_s", "requests_per_s", "makespan_s", "latency_s", "busy"]
    assert simulated["requests"] == 5
    few = ["--requests", "4", "--rounds", "1", "--no-baselines", "--json"]
    ran = inside("run", "plan.yaml", *few, cwd=tmp_path, monkeypatch=monkeypatch)
    assert ran.exit_code == 0, ran.stderr
    assert "store 'profiles' could not keep what was measured: 'profiles/runs.jsonl': Is a directory" in ran.stderr
    assert json.loads(ran.stdout)["outputs_equal"] and len(json.loads(ran.stdout)["notes"]) == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_plan_is_written_also_where_nobody_reads_what_is_shown(
    made: tuple[Path, dict[str, Any]], words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: Any, **__: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    folder, _ = made
    known = ["--devices", DEVICES, "--backend", "eager", "--budget", "0s", "--profiles", str(folder / "profiles")]
    importlib.import_module("autosplit.jit")  # its numba takes the print that is there for the real one
    monkeypatch.setattr(console.out, "print", closed)
    monkeypatch.setattr("builtins.print", closed)
    done = inside("search", MLP, *known, *words, cwd=tmp_path, monkeypatch=monkeypatch)
    assert done.exit_code == 1 and "'standard output': Broken pipe" in done.stderr
    assert (tmp_path / "plan.yaml").exists()


def test_a_command_runs_with_its_outputs_closed(tmp_path: Path) -> None:
    command = f"{sys.executable} -m autosplit.cli"
    done = subprocess.run(
        f"{command} status --json >&- && {command} status >&- 2>&-", shell=True, cwd=tmp_path, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.timeout(120)
def test_a_simulation_of_a_model_is_shown_in_units(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = made
    known = ["--devices", DEVICES, "--backend", "eager", "--budget", "0s", "--profiles", str(folder / "profiles")]
    done = inside("search", MLP, *known, "--simulate", "5", "--explain", cwd=tmp_path, monkeypatch=monkeypatch)
    shown = done.stdout.split("simulated")[1]
    assert "requests/s" in shown and re.search(r"\d [mu]?s +[\d.]+ [mu]?s", shown), shown
    assert re.search(r"compute share .*\d %", done.stdout, re.DOTALL)


@pytest.mark.timeout(120)
def test_what_is_reused_is_said_and_nothing_of_what_was_not(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made[0] / "profiles", tmp_path / "moved")
    known = ["profile", MLP, "--devices", DEVICES, "--backend", "eager", "--profiles", "moved"]
    assert "2 of 2 measurements are from 'moved', of 20" in inside(*known, cwd=tmp_path, monkeypatch=monkeypatch).stderr
    anew = inside(*known, "--remeasure", cwd=tmp_path, monkeypatch=monkeypatch)
    assert anew.exit_code == 0 and "measurements are from" not in anew.stderr


def test_a_failure_is_json_too_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = inside("run", "absent.yaml", "--json", cwd=tmp_path, monkeypatch=monkeypatch)
    assert json.loads(done.stdout) == {"error": "PlanError", "message": "plan file 'absent.yaml' does not exist"}
    assert done.exit_code == 1 and "autosplit: plan file 'absent.yaml' does not exist" in done.stderr
    for words in (["auto", MLP, "--bugdet", "1s"], ["auto", MLP, "--stages", "two"], ["auto"], ["atuo", MLP]):
        wrong = inside(*words, "--json", cwd=tmp_path, monkeypatch=monkeypatch)
        assert wrong.exit_code == 2 and json.loads(wrong.stdout)["error"] == "UsageError"
        assert wrong.stderr.count("Error") == 1 and not inside(*words, cwd=tmp_path, monkeypatch=monkeypatch).stdout
    limits = ["--format", "dnn-partitioning", "--max-latency", "1ms", "--json"]
    answered = inside("search", str(WORKLOAD), *limits, cwd=tmp_path, monkeypatch=monkeypatch)
    assert answered.exit_code == 1 and json.loads(answered.stdout)["status"] == "infeasible"


@pytest.mark.timeout(120)
def test_an_edited_plan_is_predicted_from_the_store(made: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = made
    (folder / "edited.yaml").write_text((folder / "plan.yaml").read_text().replace("queue_depth: 4", "queue_depth: 2"))
    [device, _], [cap] = DEVICES.split(","), set(yaml.safe_load((folder / "options.yaml").read_text())["memory"].values())
    capped = ["--memory", f"{device}={cap}", "--trace", "edited.json"]  # the devices are those of the plan
    words = ["run", "edited.yaml", "--requests", "20", "--rounds", "1", "--no-baselines", "--json", *capped]
    ran = inside(*words, cwd=folder, monkeypatch=monkeypatch)
    assert ran.exit_code == 0, ran.stderr
    shown = json.loads(ran.stdout)
    assert shown["predicted_throughput_per_s"] > 0 and all(stage["predicted_s"] > 0 for stage in shown["stages"])
    spans = [event for event in json.loads((folder / "edited.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert len({event["pid"] for event in spans}) == 2
    unknown = inside(*words, "--profiles", "none", cwd=folder, monkeypatch=monkeypatch)
    assert json.loads(unknown.stdout)["predicted_throughput_per_s"] is None
    runs = json.loads(inside("profile", "--accuracy", "--json", cwd=folder, monkeypatch=monkeypatch).stdout)["runs"]
    assert all(run["predicted_per_s"] for run in runs)


def test_an_options_file_names_no_code_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sly.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plan.yaml").write_text(
        "schema: 1\nmodel: {spec: 'sly:make'}\nmade_from: {graph: ''}\nstages: [{name: a, devices: [cpu:0], ops: [x]}]\n"
    )
    (tmp_path / "options.yaml").write_text("model: sly:make")
    done = inside("run", "plan.yaml", "--config", "options.yaml", cwd=tmp_path, monkeypatch=monkeypatch)
    assert done.exit_code == 1 and "'model' names code that may run, so give it on the command line" in str(done.exception)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "TMPDIR names another folder"),
        (errno.EDQUOT, "TMPDIR names another"),
        (errno.EMFILE, "'ulimit -n'"),
        (errno.EFBIG, "'ulimit -f"),
    ],
)
def test_what_the_machine_is_short_of_is_said_with_the_way_out(
    number: int, way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("autosplit.loadedplan.load", short)
    done = inside("export", "plan.yaml", "folder", cwd=tmp_path, monkeypatch=monkeypatch)
    assert done.exit_code == 1 and way_out in done.stderr


@pytest.mark.parametrize(
    ("missing", "stage", "said"),
    [
        ("openvino", "{name: a, devices: [cpu:0], backend: openvino, ops: [x]}", "pip install openvino"),
        ("", "{name: a, devices: ['cpu:999'], ops: [x]}", "cpu:999"),
    ],
)
def test_a_plan_that_cannot_run_here_is_refused_before_its_model_is_traced(
    missing: str, stage: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def traced(*_: Any) -> None:
        raise AssertionError("the model was traced")

    made = f"schema: 1\nmodel: {{spec: '{MLP}'}}\nmade_from: {{graph: ''}}\nstages: [{stage}]\n"
    (tmp_path / "plan.yaml").write_text(made)
    monkeypatch.setattr("autosplit.api.trace", traced)
    backend = type("Absent", (), {"missing": lambda _: f"backend '{missing}' needs {missing}: pip install {missing}"})()
    if missing:
        monkeypatch.setattr(f"autosplit.backends.{missing}.BACKEND", backend)
    done = inside("run", "plan.yaml", cwd=tmp_path, monkeypatch=monkeypatch)
    assert done.exit_code == 1 and said in done.stderr, done.stderr


def test_a_command_may_open_more_files_than_the_shell_allows_at_first(tmp_path: Path) -> None:
    """A network takes eight descriptors a core, and those of all ways to run a model were too many for the 1024 of a shell."""
    code = "import resource; from autosplit import cli; cli.app = lambda: None; cli.main(); "
    code += "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    command = f"ulimit -Sn 64; ulimit -Hn 300; exec {shlex.quote(sys.executable)} -c '{code}'"
    assert subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, check=True, text=True).stdout == "300 300\n"


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (
            "bugdet: 3s\nzzz: 1\nconfig: x",
            ["(3 faults)", "'bugdet' is not a flag of 'search'; close names: 'budget'", "'zzz' is not", "'config' is not"],
        ),
        (
            "batch: 0\nstages: two\nseed: true",
            ["(3 faults)", "a size is at least 1", "but is 'two'", "'seed': takes no true"],
        ),
        ("devices: [[cpu:0], cpu:1]", ["'devices': takes one value"]),
        ("memory: {cpu:0: {most: 300MB}}", ["'memory': takes one value"]),
        ("pin: fc*=cpu:1", ["'pin': takes a list, so write [fc*=cpu:1]"]),
        ("stags: 2", ["'stags' is not a flag of 'search'; close names: 'stages'"]),
        ("budget: 2026-13-45", ["is truncated or not valid YAML"]),
        ("max-stages: 1\nmax_stages: 2", ["'max_stages' is given twice"]),
        ("budget: 1s\nbudget: 2s", ["given twice: 'budget' (line 2)"]),
        ("- budget", ["holds list, not a mapping"]),
    ],
)
def test_all_faults_of_an_options_file_are_named(
    text: str, faults: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    done = inside("search", MLP, "--config", "wrong.yaml", cwd=tmp_path, monkeypatch=monkeypatch)
    assert isinstance(done.exception, UsageError), done.output
    for fault in ["'wrong.yaml'", *faults]:
        assert fault in str(done.exception)


@pytest.mark.parametrize("command", ["", *sorted(one.name or "" for one in cli.app.registered_commands)])
def test_help_fits_a_screen_and_80_columns_and_says_how_to_see_the_rest(command: str) -> None:
    """``search --help`` had 125 lines. A word that is too long for its column ends in dots: ``cpu:0=300MB,cpu:1…``."""
    words = [command] if command else []
    shown = CliRunner().invoke(cli.app, [*words, "--help"], env={"COLUMNS": "80"}).output.rstrip()
    assert len(shown.splitlines()) <= 30 and "``" not in shown
    if command:
        whole = CliRunner().invoke(cli.app, [command, "--help-all"], env={"COLUMNS": "80"})
        assert whole.exit_code == 0 and "--help" in whole.output and "…" not in whole.output
    if "more flags" in shown:
        flags, first = set(re.findall(r"--[a-z-]+", whole.output)), set(re.findall(r"--[a-z-]+", shown))
        assert first < flags and f"{command} --help-all" in shown


def test_flags_stand_in_groups_and_those_of_many_commands_come_last() -> None:
    shown = CliRunner().invoke(cli.app, ["auto", "--help-all"], env={"COLUMNS": "80"}).output
    groups = ["Arguments", "Options", "Devices", "Model and measurement", "Plan and search", "Run and report", "Hosts", "Output"]
    assert re.findall(r"╭─ (.*?) ─", shown) == groups
    shared = CliRunner().invoke(cli.app, ["run", "--help-all"], env={"COLUMNS": "80"}).output
    assert "--model" in shared.partition("─ Plan to run ─")[2], "each command has its own copy of a flag that several share"
    assert "─ Bundle ─" not in shared


def test_an_exported_program_is_read_with_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = torch.export.export(torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),))
    torch.export.save(program, tmp_path / "net.pt2")
    words = ("profile", "net.pt2", "--devices", f"cpu:{CORES[0]}")
    assert "give --trust" in inside(*words, cwd=tmp_path, monkeypatch=monkeypatch).stderr

    def measure(traced: Traced, *others: object, **options: object) -> None:
        raise UsageError(f"'{traced.graph.name}' was traced")

    monkeypatch.setattr("autosplit.api.measure", measure)
    assert "'net' was traced" in inside(*words, "--trust", cwd=tmp_path, monkeypatch=monkeypatch).stderr


def test_the_version_is_shown() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0 and re.fullmatch(r"autosplit \S+ with torch \S+\n", result.output)


def test_a_model_function_that_fails_is_shown_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing.py").write_text("def build():\n    return {}['weights']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = inside("profile", "failing:build", cwd=tmp_path, monkeypatch=monkeypatch)
    words = "failed: KeyError: 'weights' (at ", "failing.py:2: return {}['weights']; -v shows the whole traceback)"
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize("words", [["profile", "m", "--config", "/none.yaml"], ["status"]], ids=["before it runs", "unexpected"])
def test_every_failure_is_one_json_document_too(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("a fault of autosplit")

    monkeypatch.setattr("autosplit.reports.status.running_hosts", broken)
    done = CliRunner().invoke(cli.app, [*words, "--json"])
    assert done.exit_code == 1 and set(json.loads(done.stdout)) == {"error", "message"}


def test_ctrl_c_before_anything_is_loaded_ends_in_silence(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "autosplit", "devices"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    "age_s,said", [(0.5, []), (5.0, ["autosplit: stopped; what was measured is kept, and no worker is left"])]
)
def test_ctrl_c_is_answered_only_after_the_first_second(age_s: float, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    told: list[str] = []
    monkeypatch.setattr(cli, "say", told.append)
    monkeypatch.setattr(cli, "BEGAN_S", time.monotonic() - age_s)
    with pytest.raises(typer.Exit) as ended:
        cli._guarded(interrupted)(Output())
    assert (ended.value.exit_code, told) == (130, said)


@pytest.mark.timeout(120)
def test_a_front_is_written_and_one_of_its_plans_can_be_picked(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ["--devices", DEVICES, "--backend", "eager", "--budget", "0s", "--profiles", str(made[0] / "profiles")]
    words = ["search", MLP, *known, "--objective", "pareto", "--time-limit", "1s", "--pick"]
    done = inside(*words, "0", "--json", cwd=tmp_path, monkeypatch=monkeypatch)
    assert done.exit_code == 0, done.stderr
    front = json.loads(done.stdout)["front"]
    assert [row["plan"] for row in front] == [f"plan-front/front-{number}.yaml" for number in range(len(front))]
    assert (tmp_path / "plan.yaml").read_text() == (tmp_path / "plan-front" / "front-0.yaml").read_text()
    beyond = inside(*words, "99", cwd=tmp_path, monkeypatch=monkeypatch)
    # the second search may measure again and find another front
    assert beyond.exit_code == 1 and re.search("has plans 0 to [0-9]+; the plan file", beyond.stderr), beyond.stderr
    assert (tmp_path / "plan.yaml").exists()


@pytest.mark.timeout(120)
def test_a_plan_file_is_judged_by_the_store(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = made
    (folder / "shallow.yaml").write_text((folder / "plan.yaml").read_text().replace("queue_depth: 4", "queue_depth: 3"))
    done = inside("evaluate", "shallow.yaml", "--json", cwd=folder, monkeypatch=monkeypatch)
    assert done.exit_code == 0 and json.loads(done.stdout)["throughput_per_s"] > 0, done.stderr
    assert done.stderr.startswith("load …\n")
    empty = inside("evaluate", str(folder / "plan.yaml"), cwd=tmp_path, monkeypatch=monkeypatch)
    assert empty.exit_code == 1 and "holds no measurement of this model" in empty.stderr


def test_devices_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = inside("devices", "--json", cwd=tmp_path, monkeypatch=monkeypatch)
    assert {"machine", "devices", "backends"} == set(json.loads(done.stdout))


def test_what_backends_compute_otherwise_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.loads(inside("devices", "--conformance", "--json", cwd=tmp_path, monkeypatch=monkeypatch).stdout)
    assert [row["backend"] for row in told["tried"]] == ["onnxruntime", "openvino", "inductor"]
    [fault] = [row for row in told["faults"] if row["backend"] == "onnxruntime" and row["case"].startswith("aten.gelu.default")][
        :1
    ]
    assert fault["values"] == "nonfinite" and fault["fault"] == "torch gives nan for inf, and it gives inf"


def test_a_workload_is_planned_and_its_answer_evaluates_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = inside("search", str(WORKLOAD), "--format", "dnn-partitioning", "--json", cwd=tmp_path, monkeypatch=monkeypatch)
    assert done.stderr.startswith("search …\n")
    assert done.exit_code == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["objective"] == pytest.approx(17.7899, abs=1e-4) and answer["status"] == "optimal"
    words = ["search", str(WORKLOAD), "--format", "dnn-partitioning", "-o", "split.json"]
    assert inside(*words, cwd=tmp_path, monkeypatch=monkeypatch).exit_code == 0
    unknown = inside("evaluate", str(WORKLOAD), cwd=tmp_path, monkeypatch=monkeypatch)
    assert unknown.exit_code == 1 and "one of acc0, acc1" in unknown.stderr
    shown = inside("evaluate", str(WORKLOAD), "--split", "split.json", cwd=tmp_path, monkeypatch=monkeypatch)
    assert shown.stdout.startswith("layer-bert24_inference: 17.7899\n")
    judged = inside("evaluate", str(WORKLOAD), "--split", "split.json", "--json", cwd=tmp_path, monkeypatch=monkeypatch)
    assert json.loads(judged.stdout)["loads"] == pytest.approx(answer["loads"])


CAUGHT = """
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        pass
"""
FREED = """
    class Freed:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)
    Freed()
"""
STUBBORN = """
import signal, sys
from autosplit.examples.mlp import mlp

def build():
{swallow}
    print("swallowed", file=sys.stderr)
    return mlp()
"""


@pytest.fixture
def stoppable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Signals are handled as in a process that began 5 s ago, and afterwards as before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "BEGAN_S", time.monotonic() - 5)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    yield
    stopped.clear()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_ctrl_c_while_a_string_is_executed_ends_with_the_exit_code_of_the_command() -> None:
    """As torch's imports execute some. Python ended by the signal."""
    code = (
        "import signal; from autosplit import cli; cli.app = lambda: exec('signal.raise_signal(2)', {'signal': signal}); "
        "signal.signal(2, signal.default_int_handler); cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", f"exec({code!r})"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("swallow", [CAUGHT, FREED], ids=["caught", "while an object is freed"])
def test_ctrl_c_that_code_of_others_swallows_ends_the_command_at_the_next_step(
    swallow: str, stoppable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"stubborn{len(swallow)}"
    (tmp_path / f"{name}.py").write_text(STUBBORN.format(swallow=swallow))
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["autosplit", "profile", f"{name}:build", "--backend", "eager", "--devices", "null:0"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capfd.readouterr().err
    assert ended.value.code == 130 and "Traceback" not in said, said
    assert "stopped" in said.partition("swallowed")[2], said


@pytest.mark.parametrize("is_cause", [True, False])
def test_ctrl_c_is_known_in_the_errors_that_were_made_of_it(
    is_cause: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It came while ortools was imported, too, and the ImportError of that has no cause."""

    def interrupted(*_: Any, **__: Any) -> None:
        if not is_cause:
            stopped.set()
            raise ImportError("initialization failed")
        stop = RuntimeError("Error calling __set_name__")
        stop.__cause__ = KeyboardInterrupt()
        raise TraceError("the model cannot be traced") from stop

    monkeypatch.setattr("autosplit.api.trace", interrupted)
    try:
        result = inside("profile", "autosplit.examples.mlp:mlp", cwd=tmp_path, monkeypatch=monkeypatch)
    finally:
        stopped.clear()
    assert (result.exit_code, "stopped" in result.output) == (130, True), result.output


@pytest.mark.parametrize(("command", "code"), [(["env", "--default-signal=HUP"], 0), (["nohup"], -signal.SIGKILL)])
def test_a_terminal_that_is_closed_ends_a_command_as_ctrl_c_does(command: list[str], code: int, tmp_path: Path) -> None:
    """The signal ended it at once, and the stages that it had written stayed in the folder for temporary files."""
    words = [*command, sys.executable, "-m", "autosplit.cli", "status", "--watch"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        if code:
            assert all(process.stdout.readline() for _ in range(2))
            process.kill()
        process.stdout.read()  # a pipe that is closed at this end would end it too
    assert process.returncode == code


def grandchildren(pid: int) -> list[psutil.Process]:
    """Workers are those: what the process starts itself is the one that they are forked from."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [worker for child in psutil.Process(pid).children() for worker in child.children()]
    return []


AUTO = ["auto", MLP, "--backend", "eager", "--requests", "400000", "--devices", DEVICES]


@pytest.fixture
def nothing_left(tmp_path: Path) -> Callable[[Iterable[psutil.Process]], None]:
    """A function that requires that processes have ended, with all that they had in ``temporary`` and in shared memory."""
    (tmp_path / "temporary").mkdir()
    shared = set(Path("/dev/shm").iterdir())

    def require(processes: Iterable[psutil.Process]) -> None:
        assert not psutil.wait_procs(list(processes), timeout=30)[1]
        assert not list((tmp_path / "temporary").glob("autosplit-*"))
        assert not abandoned_since(shared)

    return require


@pytest.mark.timeout(300)
def test_ctrl_c_ends_the_process_at_its_first_step_and_leaves_nothing(tmp_path: Path, nothing_left: Any) -> None:
    command = [sys.executable, "-u", "-m", "autosplit.cli", *AUTO, "--budget", "8s"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("trace"):
                break
        time.sleep(0.3)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        process.wait(120)
    assert process.returncode == 130, rest
    assert "Traceback" not in rest and "wrote plan.yaml" not in rest and not (tmp_path / "plan.yaml").exists()
    nothing_left(family)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("stoppable")
@pytest.mark.parametrize(("step", "budget", "wait_s"), [("profile", "8s", 0.0), ("search", "8s", 0.5), ("run", "0s", 0.5)])
def test_ctrl_c_while_workers_measure_or_run_plans_leaves_nothing(
    made: tuple[Path, Any], step: str, budget: str, wait_s: float, tmp_path: Path, nothing_left: Any, monkeypatch: Any, capfd: Any
) -> None:
    """In this process, which outlives the command. Search and run begin with what was measured for the plan above."""
    before, family, ended = set(grandchildren(os.getpid())), set[psutil.Process](), threading.Event()

    def stop() -> None:
        while not ended.is_set() and len(family) < len(CORES):
            family.update(set(grandchildren(os.getpid())) - before)
            time.sleep(0.01)
        if not ended.wait(wait_s):
            family.update(set(grandchildren(os.getpid())) - before)
            os.kill(os.getpid(), signal.SIGINT)

    known = tmp_path / "profiles" if step == "profile" else made[0] / "profiles"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(sys, "argv", ["autosplit", *AUTO, "--budget", budget, "--profiles", str(known)])
    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(SystemExit) as stop_code:
        cli.main()
    ended.set()
    stopper.join()
    said = capfd.readouterr().err
    assert stop_code.value.code == 130 and f"{step} …" in said and "Traceback" not in said, said
    is_planned = (tmp_path / "plan.yaml").exists()
    assert is_planned == ("wrote plan.yaml: the best plan so far" in said) and (is_planned or step != "run"), said
    nothing_left(family)


def test_ctrl_c_before_a_command_began_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While typer read the flags, Ctrl-C showed a traceback."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    monkeypatch.setattr(cli.signal, "signal", lambda *handler: None)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130 and capfd.readouterr() == ("", "")


def test_the_end_of_a_command_walks_no_objects() -> None:
    """After Ctrl-C of ``serve`` on a busy machine the interpreter collected garbage of torch for 9 to 15 s."""
    code = (
        "import atexit, gc, sys; atexit.register(lambda: print(len(gc.get_objects()))); sys.argv = ['autosplit', '--version']; "
        "from autosplit.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert int(done.stdout.split()[-1]) < 1000
