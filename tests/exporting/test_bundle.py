import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from autosplit.errors import BackendError, PlanError, UsageError
from autosplit.exporting import onnxruntime_loader
from autosplit.exporting.bundle import describe, export
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import split


class Skips(nn.Module):
    """A value that skips a stage, an output made early, an input read late, and a transposed value across a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        early = self.first(x).transpose(1, 2)
        middle = self.second(early.transpose(1, 2)).relu()
        return {"early": early.argmax(), "late": self.third(middle + early.transpose(1, 2)) * scale}


@pytest.fixture(scope="module")
def skips():
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 8), torch.full((1,), 3.0))
    return trace(load_model(Skips().eval(), inputs=inputs, name="skips"))


@pytest.fixture(scope="module")
def thirds(skips):
    ops = [op.name for op in skips.graph.ops]
    step = len(ops) // 3
    return split(skips, [ops[:step], ops[step : 2 * step], ops[2 * step :]])


@pytest.fixture(scope="module")
def exported(skips, thirds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "model"
    return export(skips, thirds, folder)


def expected_of(traced, inputs):
    with torch.inference_mode():
        return traced.unflatten_outputs(traced.program(*inputs))


def test_the_loader_runs_without_torch_in_a_folder_that_was_moved(skips, exported, tmp_path):
    moved = exported.rename(tmp_path / "moved")
    requests = [[torch.randn(2, 3, 8), torch.full((1,), float(i))] for i in range(5)]
    arrays = {f"{i}.{j}": value.numpy() for i, request in enumerate(requests) for j, value in enumerate(request)}
    np.savez(tmp_path / "requests.npz", **arrays)
    script = """
import sys
from dataclasses import replace
for name in ("torch", "onnx", "onnxscript", "autosplit"):
    sys.modules[name] = None
import numpy as np
from loader import Pipeline
stored = np.load(sys.argv[1])
requests = [[stored[f"{i}.{j}"] for j in range(2)] for i in range(5)]
pipeline = Pipeline()
single = [pipeline.run(request) for request in requests]
many = pipeline.run_pipelined(requests)
assert all(np.array_equal(a[k], b[k]) for a, b in zip(single, many, strict=True) for k in a)
np.savez(sys.argv[2], **{f"{i}.{k}": v for i, result in enumerate(many) for k, v in result.items()})
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "requests.npz"), str(tmp_path / "results.npz")],
        cwd=moved,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    moved.rename(exported)
    assert (done.returncode, done.stderr) == (0, "")
    results = np.load(tmp_path / "results.npz")
    for position, request in enumerate(requests):
        for name, value in expected_of(skips, request).items():
            np.testing.assert_allclose(results[f"{position}.{name}"], value.numpy(), rtol=1e-5, atol=1e-6)


def test_the_manifest_names_values_connections_and_versions(skips, thirds, exported):
    manifest = json.loads((exported / "manifest.json").read_text())
    assert manifest["model"] == "skips"
    assert [value["name"] for value in manifest["inputs"]] == ["x", "scale"]
    assert manifest["inputs"][0] == {"name": "x", "shape": [2, 3, 8], "dtype": "float32"}
    assert [value["name"] for value in manifest["outputs"]] == list(skips.graph.outputs)
    maker = {spec.name: program.name for program in thirds for spec in program.outputs}
    for entry, program in zip(manifest["stages"], thirds, strict=True):
        assert entry["name"] == program.name
        assert {value["name"]: value["from"] for value in entry["inputs"]} == {s.name: maker.get(s.name) for s in program.inputs}
        assert (exported / entry["file"]).exists()
    dropped = [name for entry in manifest["stages"] for name in entry["drop"]]
    assert len(dropped) == len(set(dropped))
    assert set(dropped) | set(skips.graph.outputs) == {"x", "scale", *maker}
    assert {"torch", "onnxruntime", "numpy"} <= set(manifest["versions"])


ONE_STAGE = '{"schema": 2, "inputs": [], "stages": [{"name": "s", "file": "%s", "inputs": [], "outputs": [], "drop": [%s]}]}'
NO_STAGE = '{"schema": 2, "inputs": [], "outputs": [], "stages": [], "answer": {%s}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 2, "mo', "truncated or not JSON"),
        ("{}", "schema version None"),
        ('{"schema": 1}', "version 1, and this loader reads"),
        ("[" * 100_000, "truncated or not JSON"),
        ('{"schema": 2, "inputs": []}', "is damaged: KeyError 'stages'"),
        ('{"schema": 2, "inputs": [3], "stages": []}', "is damaged: TypeError"),
        ('{"schema": 2, "inputs": [{"name": "x", "shape": [1], "dtype": "f99"}], "stages": []}', "dtype that numpy does not"),
        (ONE_STAGE % ("/x", ""), "a file outside of the folder"),
        (NO_STAGE % '"value": "y"', "is damaged: KeyError 'y'"),
        (NO_STAGE % '"object": "y"', "the answer has a container of kind 'object'"),
        (NO_STAGE % '"namedtuple": ["a b", []]', "identifiers"),
        (NO_STAGE % ('"list": [{' * 600 + "}]" * 600), "recursion depth exceeded"),
        (ONE_STAGE % ("x", '"y"'), "stage 's' reads or drops a value that is not there"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(tmp_path, text, message):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=message) as failure:
        onnxruntime_loader.Pipeline(tmp_path)
    assert str(tmp_path / "manifest.json") in str(failure.value)


def test_inputs_come_by_name_too_and_wrong_ones_are_explained(skips, exported):
    pipeline = onnxruntime_loader.Pipeline(exported)
    x, scale = (value.numpy() for value in skips.example_inputs)
    by_name = pipeline.run({"scale": scale, "x": x.transpose(0, 2, 1).copy().transpose(0, 2, 1)})
    assert all(np.array_equal(value, by_name[name]) for name, value in pipeline.run([x, scale]).items())
    with pytest.raises(ValueError, match=r"the inputs are \['x', 'scale'\], and \['x'\] were given"):
        pipeline.run({"x": x})
    with pytest.raises(ValueError, match=r"input 'x' is float64\[2, 3, 8\], and float32\[2, 3, 8\] is expected"):
        pipeline.run([x.astype("float64"), scale])


class Pair(NamedTuple):
    kept: torch.Tensor
    scale: float


@dataclass
class Named:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


torch.export.register_dataclass(Named)


def test_an_export_returns_the_containers_and_names_of_the_module(tmp_path):
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
            y, z = x.relu(), x.sum()
            return {"a": [y, None], 3: (z, "text")}, Pair(y, 2.0), Named(logits=z)

    traced = trace(load_model(Nested().eval(), inputs=(torch.ones(2),), name="nested"))
    programs = split(traced, [[op.name for op in traced.graph.ops]])
    mapped, pair, named = onnxruntime_loader.Pipeline(export(traced, programs, tmp_path / "out")).run([np.ones(2, "float32")])
    assert mapped["a"][0].tolist() == [1.0, 1.0]
    assert (mapped["a"][1], float(mapped[3][0]), mapped[3][1]) == (None, 2.0, "text")
    assert (type(pair).__name__, pair.kept.tolist(), pair.scale) == ("Pair", [1.0, 1.0], 2.0)
    assert (list(named), float(named["logits"])) == (["logits", "loss"], 2.0)


def test_an_error_in_a_stage_ends_the_pipelined_run(skips, exported):
    pipeline = onnxruntime_loader.Pipeline(exported)
    inputs = [value.numpy() for value in skips.example_inputs]
    pipeline.stages[1].outputs = ["none"]
    with pytest.raises(Exception, match="none"):
        pipeline.run_pipelined([inputs] * 20)
    with pytest.raises(ValueError, match="the inputs are"):
        pipeline.run_pipelined([inputs, {}])


def test_an_export_that_fails_leaves_nothing(tmp_path):
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.bessel_j0(x.relu())

    traced = trace(load_model(Odd().eval(), inputs=(torch.ones(2),), name="odd"))
    programs = split(traced, [["relu"], ["special_bessel_j0"]])
    with pytest.raises(BackendError, match="op 'special_bessel_j0'"):
        export(traced, programs, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(thirds, skips, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds something already"):
        export(skips, thirds, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", [".", "link"])
def test_an_empty_folder_is_filled_also_where_it_cannot_be_replaced(thirds, skips, tmp_path, monkeypatch, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "link").symlink_to(tmp_path / "linked")
    (tmp_path / "linked").mkdir()
    monkeypatch.chdir(tmp_path / "linked" if name == "." else tmp_path / "empty")
    folder = export(skips, thirds, Path(name))
    assert {"loader.py", "manifest.json", "stage0.onnx"} <= {file.name for file in (tmp_path / "linked").iterdir()}
    inputs = [value.numpy() for value in skips.example_inputs]
    assert set(onnxruntime_loader.Pipeline(folder).run(inputs)) == {"early", "late"}
    assert [file.name for file in folder.iterdir() if file.name.startswith(".")] == []


def test_what_is_exported_keeps_to_the_umask(thirds, skips, tmp_path):
    old = os.umask(0o077)
    try:
        folder = export(skips, thirds, tmp_path / "out")
    finally:
        os.umask(old)
    assert [path for path in (folder, *folder.iterdir()) if path.stat().st_mode & 0o077] == []


def test_stages_that_do_not_fit_together_are_refused_with_every_fault(skips, thirds):
    specs = [skips.specs[name] for name in skips.graph.inputs]
    with pytest.raises(PlanError) as refused:
        describe(thirds[1:] + thirds[1:], specs, ["nothing"], "skips")
    assert "reads '" in str(refused.value)
    assert "which is there before it runs" in str(refused.value)
    assert "output 'nothing' is made by no stage" in str(refused.value)


def test_a_dtype_that_numpy_learnt_from_another_package_is_refused(skips, thirds):
    specs = [replace(skips.specs[name], dtype="bfloat16") for name in skips.graph.inputs]
    assert importlib.import_module("onnx")  # teaches it bfloat16, and is not there where the folder runs
    with pytest.raises(PlanError, match="'x' is bfloat16, which numpy does not have"):
        describe(thirds, specs, skips.graph.outputs, "skips")


def test_a_turned_value_with_gaps_goes_over_a_cut(tmp_path):
    class Heads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.relu()[:, :8].unflatten(1, (2, 4)).transpose(1, 2)
            return heads.transpose(1, 2).reshape(2, 8) * 2  # a view in the trace

    traced = trace(load_model(Heads().eval(), inputs=(torch.randn(2, 16),), name="heads"))
    ops = [op.name for op in traced.graph.ops]
    cut = ops.index("transpose") + 1
    programs = split(traced, [ops[:cut], ops[cut:]])
    folder = export(traced, programs, tmp_path / "out")
    found = onnxruntime_loader.Pipeline(folder).run([value.numpy() for value in traced.example_inputs])
    np.testing.assert_allclose(found, expected_of(traced, traced.example_inputs).numpy(), rtol=1e-5)
