"""Commands that run in a folder of a stranger: no module there runs, in the host or in its children."""

import getpass
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import autosplit
from autosplit.backends.base import installed
from autosplit.bundling.bundler import write_bundle
from autosplit.children import extend_path, python_running, user_folders
from autosplit.devices.limits import affinity
from autosplit.errors import ModelError, UsageError
from autosplit.shapes.pipelines import open_pipeline
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Stage
from autosplit.values.planfile import write_plan

SPEC = "autosplit.examples.mlp:mlp?depth=2&width=8"
CORE = f"cpu:{affinity()[0]}"
PYTHON = Path(sys.executable)

TRAP = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\nraise ImportError('a trap')\n"
"""A module that leaves a file when it runs."""

MODEL = """
import torch

@torch.library.custom_op("of_a_folder::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x

@triple.register_fake
def _(x):
    return torch.empty_like(x)

class Net(torch.nn.Module):
    def forward(self, x):
        return triple(x) + 1

def build():
    return Net().eval(), (torch.ones(4),)
"""
"""A model of a user with an operator that workers must import."""


def whole(traced: Traced, backend: str = "eager") -> Plan:
    """The plan that runs a model on one core."""
    stage = Stage("all", tuple(op.name for op in traced.graph.ops), (CORE,), backend)
    return Plan(traced.source, traced.graph.hash, "", (stage,), UNKNOWN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a plan and a bundle of one of autosplit's examples, and traps under the name of every installed module."""
    traced = trace(load_model(SPEC))
    write_plan(whole(traced, "inductor"), traced.graph, tmp_path / "plan.yaml")
    write_bundle({"mlp": (traced, whole(traced))}, tmp_path / "mlp.asb")
    installed = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), "sitecustomize", "usercustomize"}
    for name in installed - {"autosplit"}:
        (tmp_path / f"{name}.py").write_text(TRAP)
    return tmp_path


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of imports that the test may extend."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def num_bytes(folder: Path) -> int:
    """Bytes of all files beneath a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def ran(folder: Path) -> list[str]:
    """The traps that ran."""
    return sorted(path.stem for path in folder.glob("*.ran"))


@pytest.mark.timeout(400)
@pytest.mark.skipif("inductor" not in installed(), reason="there is no C++ compiler")
def test_a_plan_of_a_trusted_model_runs_no_module_of_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``run --report`` imported ``plotly`` from there, torch's compiler ``ctypes``, and the fork server all others.

    What is compiled gives the numbers of the model, and leaves no more in torch's cache than what it found of the compiler.
    """
    cache = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    before_bytes = num_bytes(cache)
    run = ["run", "plan.yaml", "--report", "page.html", "--no-baselines", "--requests", "4", "--rounds", "1", "--json"]
    commands = [
        [PYTHON.with_name("autosplit"), "bundle", "show", "mlp.asb"],
        [PYTHON, "-P", "-m", "autosplit", "--help"],
        [PYTHON, "-m", "autosplit", *run],
    ]
    for command in commands:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert (done.returncode, ran(folder)) == (0, []), done.stderr
    told = json.loads(done.stdout)
    assert told["stages"][0]["backend"] == "inductor" and told["outputs_equal"] and told["max_relative_error"] < 1e-5
    assert (folder / "page.html").exists()
    assert cache.is_dir() and num_bytes(cache) - before_bytes < 2_000_000


def test_a_child_gets_neither_the_current_folder_nor_those_of_models(folder: Path, own_path: None) -> None:
    """``sitecustomize`` ran when Python started, and ``random`` in place of Python's own."""
    extend_path(str(folder))
    assert sys.path[-1] == str(folder) in user_folders()
    code = "import random, autosplit.parsing; print(sys.path)"
    done = subprocess.run(python_running(code), cwd=folder, capture_output=True, text=True, check=True)
    assert ran(folder) == [] and str(folder) not in done.stdout


def test_a_model_of_the_current_folder_runs_in_workers_too(
    tmp_path: Path, own_path: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder comes last, so that its ``random`` does not stand in for Python's."""
    (tmp_path / "model_of_a_user.py").write_text(MODEL)
    (tmp_path / "random.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    traced = trace(load_model("model_of_a_user:build"))
    with open_pipeline(traced, whole(traced), Machine.of([parse_device(CORE)])) as model:
        assert torch.equal(model(torch.ones(4)), torch.full((4,), 4.0))
    write_plan(whole(traced), traced.graph, tmp_path / "plan.yaml")
    assert autosplit.load("plan.yaml", "model_of_a_user:build").traced.graph.hash == traced.graph.hash
    assert sys.path[-1] == str(tmp_path) and ran(tmp_path) == []


def test_an_installed_model_does_not_put_the_current_folder_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json").mkdir()
    load_model(SPEC)
    with pytest.raises(ModelError, match=r"has no function 'build'; '.*json/__init__.py' comes before 'json' of this folder"):
        load_model("json:build")
    assert str(tmp_path) not in sys.path


def test_a_plan_beside_a_module_does_not_name_the_code_that_is_traced_again(tmp_path: Path) -> None:
    """``predict`` imported the spec of the file, which nobody had named."""
    module, inputs = torch.nn.Linear(4, 4).eval(), (torch.ones(1, 4),)
    traced = trace(load_model(module, inputs=inputs))
    write_plan(whole(traced), traced.graph, tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    (tmp_path / "plan.yaml").write_text(text.replace("spec: ''", "spec: somebody.net:make"))
    assert "somebody.net:make" in (tmp_path / "plan.yaml").read_text()
    plan = autosplit.load(tmp_path / "plan.yaml", module, inputs=inputs).plan
    profile = autosplit.Profile.given(traced.graph, {(op.name, CORE): 1.0 for op in traced.graph.ops})
    with pytest.raises(UsageError, match="made for a Python object"):
        autosplit.predict(plan, profile)


def test_the_planner_takes_no_cache_from_the_current_folder(tmp_path: Path) -> None:
    """numba unpickles its cache, and a file in the current folder can name one."""
    (tmp_path / ".numba_config.yaml").write_text(f"cache_dir: {tmp_path / 'cache'}\ncache_locator_classes: 'evil.Locator'\n")
    code = "import autosplit.jit, numba; print([numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "['', '']\n"
