"""The accelerator of another package: the example of docs/backends.md, installed and used from the profile to the answer."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autosplit import api
from autosplit.backends.base import get_backend, installed, states
from autosplit.deploying.setup import Budget
from autosplit.devices.discovering import machine_for
from autosplit.devices.limits import affinity
from autosplit.errors import DeviceError, UsageError
from autosplit.measuring import measure
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine, parse_device
from autosplit.values.samples import Setting, backends

PAGE = (Path(__file__).parents[2] / "docs" / "backends.md").read_text(encoding="utf-8")
CORE = f"cpu:{affinity()[0]}"


def block(language: str, above: str) -> str:
    [found] = re.findall(rf"{re.escape(above)}.*?```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def install(folder: Path, entry_points: str) -> None:
    """A package without a module, whose metadata is in a folder on the path."""
    info = folder / "simulated_npu-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-npu\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package of the page, installed."""
    points = re.sub(r'project\.entry-points\."(.*)"', r"\1", block("toml", "named by entry points")).replace('"', "")
    install(tmp_path, points)
    (tmp_path / "simulated_npu.py").write_text(block("python", "as the module simulated_npu -->"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("simulated_npu", None)


def test_the_example_is_short(package: Path) -> None:
    lines = (package / "simulated_npu.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) < 60


@pytest.mark.timeout(120)
def test_a_model_is_profiled_planned_and_run_on_the_device_of_another_package(package: Path) -> None:
    assert {"npu_runtime"} == set(backends()) - {"eager", "onnxruntime", "openvino", "inductor"}
    assert "npu_runtime" in installed() and states()[-1] == {"backend": "npu_runtime", "version": "1.0", "state": "installed"}
    machine = machine_for(f"{CORE},npu:0")
    assert machine["npu:0"].memory_bytes and machine["npu:0"].cores
    traced = api.trace("autosplit.examples.mlp:mlp?depth=2&width=40")
    profile = measure(traced, machine, ("eager", "npu_runtime"), budget_s=0.2, links=False)
    assert {setting[:2] for setting in profile.measured} == {(CORE, "eager"), ("npu:0", "eager"), ("npu:0", "npu_runtime")}
    assert f"'npu_runtime' does not run on '{CORE}': it runs on npu devices only" in "".join(profile.notes)
    of_vendor = profile.measured[Setting("npu:0", "npu_runtime", 1)].provenance
    assert of_vendor.accelerator["name"] == "Simulated NPU" and of_vendor.versions["simulated_npu"] == "1.0"
    wanted = Constraints(pins={traced.graph.ops[0].name: CORE, traced.graph.ops[-1].name: "npu:0"}, num_stages=2)
    plan = api.search(traced, profile, machine, wanted, budget=Budget(search_s=0, explain_s=0)).plan
    assert [stage.devices for stage in plan.stages] == [(CORE,), ("npu:0",)]
    outcome = api.run(traced, plan, machine, baselines=False, budget=Budget(num_requests=10, num_rounds=1)).best
    assert outcome.outputs_equal and outcome.max_abs_error == 0


def test_what_a_package_names_and_does_not_have_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = "[autosplit.providers]\nnpu = absent_npu:Npu\n[autosplit.backends]\nabsent = math:BACKEND\neager = math:pi\n"
    install(tmp_path, points)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeviceError, match=r"provider 'absent_npu:Npu' of npu devices cannot be imported: No module.*mend its"):
        machine_for("npu:0")
    with pytest.raises(UsageError, match=r"backend 'absent' \('math:BACKEND'\) cannot be imported: .*mend its package"):
        get_backend("absent")
    assert get_backend("eager").exact  # no package replaces one of ours


def test_a_device_that_nobody_serves_is_refused_with_the_page_to_read() -> None:
    with pytest.raises(DeviceError, match=r"'xpu:0' is not here: no package serves xpu devices \(docs/backends.md\)"):
        measure(api.trace("autosplit.examples.mlp:mlp?depth=1&width=4"), Machine.of([parse_device("xpu:0")]))
