"""The driver that lies in each bundle, in exports for ONNX Runtime: it runs them without torch and without autosplit."""

import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from autosplit.bundling import driver
from autosplit.errors import BackendError, PlanError, UsageError
from autosplit.exporting.base import Job, write_export
from autosplit.files import content_hash
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage


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
    return trace(load_model(Skips().eval(), inputs=inputs))


def export(traced, cuts, folder):
    """Write the parts between the cuts (numbers of ops) for ONNX Runtime."""
    ops = tuple(op.name for op in traced.graph.ops)
    ends = [*cuts, len(ops)]
    stages = tuple(Stage(f"stage{k}", ops[a:b], ("cpu:0",)) for k, (a, b) in enumerate(zip([0, *cuts], ends, strict=True)))
    write_export("onnxruntime", Job(traced, Plan(Source("m"), traced.graph.hash, "", stages, UNKNOWN)), folder)
    return folder


@pytest.fixture(scope="module")
def thirds(skips):
    step = len(skips.graph.ops) // 3
    return [step, 2 * step]


@pytest.fixture(scope="module")
def exported(skips, thirds, tmp_path_factory):
    return export(skips, thirds, tmp_path_factory.mktemp("export") / "model")


def expected_of(traced, inputs):
    with torch.inference_mode():
        return traced.unflatten_outputs(traced.program(*inputs))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 2, "mo', "truncated or not JSON"),
        ("{}", "schema version None"),
        ('{"schema": 1}', "version 1, and this driver reads"),
        ("[" * 100_000, "truncated or not JSON"),
        ('{"schema": 2, "key": "x"}', "it was changed after it was written"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(tmp_path, text, message):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=message) as failure:
        driver.Bundle(tmp_path)
    assert str(tmp_path / "manifest.json") in str(failure.value)


@pytest.mark.timeout(10)
def test_a_pipe_in_place_of_the_manifest_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(ValueError, match=r"manifest.json' is missing, truncated or not JSON: it is not a file of at most"):
        driver.Bundle(tmp_path)


def nested(depth):
    return {"list": [nested(depth - 1)]} if depth else {"constant": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda network: network.pop("parts"), "manifest.networks.Skips lacks 'parts'"),
        (lambda network: network.update(parts=[3]), "manifest.networks.Skips.parts.0 must be an object, but is 3"),
        (lambda network: network["parts"].pop(0), "part 'stage1', which reads value '[a-z0-9_]+', which is not there yet"),
        (lambda network: network["parts"][0]["files"].update(onnx="/x"), "names file '/x', which is not in the bundle"),
        (lambda network: network["parts"][0].update(files={}), "part 'stage0', which has no file for onnxruntime"),
        (lambda network: network["parts"][0].update(threads=0), "has 1 devices, 0 threads and 1 streams; each is at least 1"),
        (lambda network: network["parts"][0].update(threads="2"), "threads must be an integer from 0 to [0-9]+, but is '2'"),
        (lambda network: network["parts"][0]["outputs"][0].update(dtype="int8"), "with another shape or dtype"),
        (lambda network: network["parts"][0]["input_orders"].pop(), "do not put in order"),
        (lambda network: network.update(inputs=["x", "x"]), "an input twice"),
        (lambda network: network.update(outputs=["y"]), "has output 'y', which nothing makes"),
        (lambda network: network.update(source={}, graph=7), "graph must be a printable text, but is 7"),
        (lambda network: network.update(plan="\x1b[2J"), "plan must be a printable text"),
        (lambda network: network.update(answer={"value": "y"}), "has an answer that cannot be built: KeyError 'y'"),
        (lambda network: network.update(answer={"object": "y"}), "the answer has a container of kind 'object'"),
        (lambda network: network.update(answer={"namedtuple": ["a b", []]}), "identifiers"),
        (lambda network: network.update(answer=nested(60)), "more than 50 containers are inside each other"),
    ],
)
def test_a_table_that_does_not_fit_together_is_refused(exported, tmp_path, change, message):
    data = json.loads((exported / "manifest.json").read_text())
    change(data["networks"]["Skips"])
    data["key"] = content_hash({name: value for name, value in data.items() if name not in ("schema", "key")})
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        driver.Bundle(tmp_path)


def test_inputs_come_by_name_too_and_wrong_ones_are_explained(skips, exported):
    pipeline = driver.Bundle(exported)
    x, scale = (value.numpy() for value in skips.example_inputs)
    by_name = pipeline.run({"scale": scale, "x": x.transpose(0, 2, 1).copy().transpose(0, 2, 1)})
    assert all(np.array_equal(value, by_name[name]) for name, value in pipeline.run([x, scale]).items())
    for name, value in expected_of(skips, skips.example_inputs).items():
        np.testing.assert_allclose(by_name[name], value.numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="the inputs are x, scale, and given are x"):
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

    traced = trace(load_model(Nested().eval(), inputs=(torch.ones(2),)))
    mapped, pair, named = driver.Bundle(export(traced, [], tmp_path / "out")).run([np.ones(2, "float32")])
    assert mapped["a"][0].tolist() == [1.0, 1.0]
    assert (mapped["a"][1], float(mapped[3][0]), mapped[3][1]) == (None, 2.0, "text")
    assert (type(pair).__name__, pair.kept.tolist(), pair.scale) == ("Pair", [1.0, 1.0], 2.0)
    assert (list(named), float(named["logits"])) == (["logits", "loss"], 2.0)


def test_an_error_in_a_part_ends_the_run(skips, exported, monkeypatch):
    pipeline = driver.Bundle(exported)
    inputs = [value.numpy() for value in skips.example_inputs]
    with pytest.raises(ValueError, match="the inputs are"):
        pipeline.run_many([inputs, {}], policy="pipelined")
    monkeypatch.setattr(pipeline._runs[1][0], "_call", lambda values: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipeline.run_many([inputs] * 20, policy="pipelined")


def test_an_export_that_fails_leaves_nothing(tmp_path):
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.bessel_j0(x.relu())

    traced = trace(load_model(Odd().eval(), inputs=(torch.ones(2),)))
    with pytest.raises(BackendError, match="op 'special_bessel_j0'"):
        export(traced, [1], tmp_path / "out")
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
    assert {"bundlecheck.py", "driver.py", "n0p0.onnx"} <= {file.name for file in (tmp_path / "linked").iterdir()}
    inputs = [value.numpy() for value in skips.example_inputs]
    assert set(driver.Bundle(folder).run(inputs)) == {"early", "late"}
    assert [file.name for file in folder.iterdir() if file.name.startswith(".")] == []


def test_what_is_exported_keeps_to_the_umask(thirds, skips, tmp_path):
    old = os.umask(0o077)
    try:
        folder = export(skips, thirds, tmp_path / "out")
    finally:
        os.umask(old)
    assert [path for path in (folder, *folder.iterdir()) if path.stat().st_mode & 0o077] == []


def test_a_dtype_that_numpy_learnt_from_another_package_is_refused(tmp_path):
    assert importlib.import_module("onnx")  # teaches it bfloat16, and is not there where the folder runs
    traced = trace(load_model(nn.Linear(8, 8, dtype=torch.bfloat16).eval(), inputs=(torch.zeros(2, 8, dtype=torch.bfloat16),)))
    with pytest.raises(PlanError, match=r"'input_1' is bfloat16, which numpy does not have"):
        export(traced, [], tmp_path / "out")


def test_a_turned_value_with_gaps_goes_over_a_cut(tmp_path):
    class Heads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.relu()[:, :8].unflatten(1, (2, 4)).transpose(1, 2)
            return heads.transpose(1, 2).reshape(2, 8) * 2  # a view in the trace

    traced = trace(load_model(Heads().eval(), inputs=(torch.randn(2, 16),)))
    ops = [op.name for op in traced.graph.ops]
    cut = ops.index("transpose") + 1
    folder = export(traced, [cut], tmp_path / "out")
    found = driver.Bundle(folder).run([value.numpy() for value in traced.example_inputs])
    np.testing.assert_allclose(found, expected_of(traced, traced.example_inputs).numpy(), rtol=1e-5)
