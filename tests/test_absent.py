"""Plans for machines that are not here, by the command that the documents name; each answer says what it rests on."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from autosplit import cli
from autosplit.measuring import store as stores
from autosplit.measuring.store import Store
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.values.planfile import read_plan
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Provenance, Samples, Setting

MLP = "autosplit.examples.mlp:mlp?depth=8&width=64"
ROOFLINE = {"flops": 8.0e13, "bytes_per_s": 9.0e11}
WIDE = """
import torch

def net():
    parts = [part for _ in range(10) for part in (torch.nn.Linear(32768, 32768), torch.nn.ReLU())]
    return torch.nn.Sequential(*parts).eval(), (torch.zeros(8, 32768),)
"""


def search(folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, machine: Any, *flags: str) -> tuple[Any, str]:
    """The answer of a search for a machine file as JSON, and what it says on stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(stores, "user_root", lambda: Path("profiles"))
    (folder / "machine.yaml").write_text(yaml.safe_dump(machine))
    words = ["search", model, "--machine", "machine.yaml", "--budget", "0s", "--backend", "eager", "--json", *flags]
    done = CliRunner().invoke(cli.app, words)
    return json.loads(done.stdout), done.stderr


def follow_up(*words: str) -> Any:
    """The answer of a command after a search, as JSON."""
    done = CliRunner().invoke(cli.app, [*words, "--json"])
    assert done.exit_code == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(300)
def test_eight_cores_are_planned_where_there_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"devices": [{"name": "cpu:0", "count": 8, "speed": "1 x cpu:0"}]}
    found, said = search(tmp_path, monkeypatch, MLP, machine, "--stages", "8", "--simulate", "20", "--explain", "-v")
    assert len(found["stages"]) == 8 and found["simulated"]["requests_per_s"] > 0 and found["explanation"]
    assert "ESTIMATE: the times on 'cpu:1', 'cpu:2', " in said and "'cpu:7' were not measured; they are those of 'cpu:0'" in said
    assert "estimated" in found["summary"] and "predicted" not in found["summary"]
    assert "on estimates of" in read_plan(tmp_path / "plan.yaml").resolve(trace(load_model(MLP)).graph).method
    again = follow_up("evaluate", "plan.yaml", "--machine", "machine.yaml", "--simulate", "20")
    assert again["throughput_per_s"] == pytest.approx(found["throughput_per_s"], rel=0.02)
    assert again["simulated"]["requests_per_s"] > 0
    assert "on estimates of cpu:1, " in again["method"]
    judged = follow_up("evaluate", MLP, "--split", "2,2,2,2,2,2,2,1", "--machine", "machine.yaml")
    assert judged["plans"][0]["items_per_s"] > 0
    assert len(follow_up("memory", "plan.yaml")["stages"]) == 8


@pytest.mark.timeout(300)
def test_two_gpus_of_24_gb_hold_40_gb_of_weights_as_a_laptop_can_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    gpus = {"devices": [{"name": "cuda:0", "count": 2, "memory": "24GB", "speed": ROOFLINE}]}
    found, said = search(tmp_path, monkeypatch, "wide.py:net", gpus)
    held = [stage["weight_bytes"] for stage in yaml.safe_load((tmp_path / "plan.yaml").read_text())["stages"]]
    assert sum(held) > 40e9 and max(held) < 24e9 and found["throughput_per_s"] > 0
    assert "a roofline of 8e+13 operations and 9e+11 bytes a second" in said and "no weights were loaded" in said
    named = ("plan.yaml", "--model", "wide.py:net")
    told = follow_up("memory", *named)["stages"]
    assert [stage["weight_bytes"] for stage in told] == held
    follow_up("export", "plan.yaml", "map", "--to", "accelerate", "--model", "wide.py:net")
    assert set(json.loads((tmp_path / "map" / "device_map.json").read_text()).values()) == {0, 1}
    gpus["devices"][0]["speed"] = {key: 2 * value for key, value in ROOFLINE.items()}
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(gpus))
    faster = follow_up("evaluate", *named, "--machine", "machine.yaml")
    assert 1.5 < faster["throughput_per_s"] / found["throughput_per_s"] <= 2.01
    gpus["devices"][0]["memory"] = "20GB"
    refused, _ = search(tmp_path, monkeypatch, "wide.py:net", gpus)
    assert refused["error"] == "InfeasibleError" and "no plan fits" in refused["message"]


@pytest.mark.timeout(300)
def test_a_core_and_an_npu_with_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npu = {"name": "npu:0", "shares": "cpu:0", "operators": ["aten.linear*"], "dtypes": ["float32"], "backends": ["eager"]}
    machine = {"devices": [{"name": "cpu:0"}, {**npu, "speed": "50 x cpu:0", "min_ops": 4}]}
    model = "autosplit.examples.mlp:mlp?depth=2&width=256"
    found, said = search(tmp_path, monkeypatch, model, machine, "--stages", "2")
    assert "ESTIMATE: the times on 'npu:0'" in said and len(found["stages"]) == 2
    assert "too small for npu:0, which takes 4 or more; 'autosplit annotate --default auto' keeps this rule" in said
    plan = read_plan(tmp_path / "plan.yaml").resolve(trace(load_model(model)).graph)
    [on_npu] = [stage for stage in plan.stages if stage.devices == ("npu:0",)]
    assert all(op.startswith("linear") for op in on_npu.ops)
    again = follow_up("evaluate", "plan.yaml", "--machine", "machine.yaml")
    assert again["throughput_per_s"] == pytest.approx(found["throughput_per_s"], rel=0.02) and "npu:0" in again["method"]
    assert len(follow_up("memory", "plan.yaml")["stages"]) == 2
    placed = follow_up("annotate", model, "--machine", "machine.yaml", "--place", "aten.*=npu:0", "--fallback", "cpu:0")
    assert "is not supported on npu:0 (operator aten.relu" in placed["why"]["relu"]
    refused = CliRunner().invoke(cli.app, ["run", "plan.yaml", "--json"])
    assert "device 'npu:0' is not here: no package serves npu devices" in json.loads(refused.stdout)["message"]


@pytest.mark.timeout(300)
def test_another_machines_profile_counts_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace(load_model(MLP)).graph
    h100 = Provenance("AMD EPYC", 16, accelerator={"name": "NVIDIA H100 80GB"}, date="2026-11-01T00:00:00+00:00")
    times = Measured({op.name: Samples((1e-5,)) for op in graph.ops}, per="op", provenance=h100)
    profile = Profile.empty(graph).with_measured(Setting("cuda:0", "eager", 1), times)
    Store(tmp_path / "profiles").save(graph, profile)
    gpus = {"devices": [{"name": "cuda:0", "count": 2, "memory": "1GB"}]}
    found, said = search(tmp_path, monkeypatch, MLP, gpus, "--profile-of", "h100")
    assert found["throughput_per_s"] > 0 and "those of 'cuda:0' on another machine (NVIDIA H100 80GB, 2026-11-01" in said
    for flags, words in (((), "its times are not known"), (("--profile-of", "B200"), "'B200' has one (stored: NVIDIA H100 ")):
        refused, _ = search(tmp_path, monkeypatch, MLP, gpus, *flags)
        assert refused["error"] == "ProfileError" and words in refused["message"] and "state its speed" in refused["message"]
