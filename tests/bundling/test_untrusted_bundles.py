"""A stranger's bundle: what its parts may call, where they run, and what they may hand on."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from autosplit.bundling.bundler import write_bundle
from autosplit.bundling.openbundle import Policy, load_bundle
from autosplit.errors import BackendError, PlanError, StageError
from autosplit.files import content_hash
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage

NUM = 20_000


class Wide(nn.Module):
    """Two ops whose values are too large for ONNX Runtime to copy, so that it reads and writes them at their addresses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() * 2


class Spectrum(nn.Module):
    """An op whose kernel trusts its arguments."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).abs()


class Normed(nn.Module):
    """An op that gives way to one that checks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu()


def traced_of(module: nn.Module, *shape: int) -> Traced:
    return trace(load_model(module.eval(), inputs=(torch.randn(*shape),)))


def plan_of(traced: Traced, *backends: str) -> Plan:
    """A stage for each op in turn, the last one with all that are left."""
    ops = [op.name for op in traced.graph.ops]
    last = len(backends) - 1
    chosen = [tuple(ops[k : k + 1] if k < last else ops[k:]) for k in range(len(backends))]
    stages = tuple(
        Stage(f"stage{k}", part, ("cpu:0",), backend) for k, (part, backend) in enumerate(zip(chosen, backends, strict=True))
    )
    return Plan(Source("m"), traced.graph.hash, "", stages, UNKNOWN)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of an eager part before one of ONNX Runtime."""
    traced, path = traced_of(Wide(), NUM), tmp_path_factory.mktemp("written") / "wide.asb"
    write_bundle({"wide": (traced, plan_of(traced, "eager", "onnxruntime"))}, path)
    return path


@pytest.fixture
def wide(written: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may change."""
    return shutil.copytree(written, tmp_path / "wide.asb")


def with_table(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the manifest, and make its key fit."""
    manifest = folder / "manifest.json"
    data = json.loads(manifest.read_text())
    change(data)
    data["key"] = content_hash({name: value for name, value in data.items() if name not in ("schema", "key")})
    manifest.write_text(json.dumps(data))


def with_calls(folder: Path, *calls: tuple[str, list[Any]]) -> None:
    """Let the eager part call these operators in place of its own; ``x`` stands for its input, ``-`` for the value before."""
    program = folder / "n0p0.json"
    data = json.loads(program.read_text())
    source, output = data["nodes"][0], data["nodes"][-1]
    nodes, last = [source], source["name"]
    for number, (target, args) in enumerate(calls):
        named = {"x": {"node": source["name"]}, "-": {"node": last}}
        given = [named.get(arg, arg) if isinstance(arg, str) else arg for arg in args]
        last = f"call{number}"
        nodes.append({"op": "call_function", "name": last, "target": target, "args": given, "kwargs": {}})
    program.write_text(json.dumps({**data, "nodes": [*nodes, {**output, "args": [[{"node": last}]]}]}))

    def fit(table: Any) -> None:
        table["files"]["n0p0.json"]["num_bytes"] = program.stat().st_size

    with_table(folder, fit)


@pytest.mark.parametrize(
    ("calls", "operator"),
    [
        (
            [
                ("aten.full.default", [[1, 1], 1_200_000]),
                ("aten._sparse_coo_tensor_unsafe.default", ["-", "x", [1_000_000]]),
                ("aten._to_dense.default", ["-"]),
            ],
            "aten._to_dense.default",
        ),
        ([("aten.segment_reduce.default", ["x", "sum"])], "aten.segment_reduce.default"),
    ],
)
def test_a_part_that_calls_an_operator_which_trusts_its_arguments_is_refused(wide, calls, operator):
    with_calls(wide, *calls)
    with pytest.raises(
        BackendError, match=rf"run only if you trust its maker; give trust=True[\s\S]*'{operator}' is not allowed"
    ):
        load_bundle(wide, verify=False)


@pytest.mark.parametrize("policy", ["serial", "threads", "processes"])
def test_an_eager_part_runs_in_the_callers_process_with_trust_only(wide, policy):
    x = torch.randn(NUM)
    with load_bundle(wide, policy=cast(Policy, policy)) as bundle:
        assert os.getpid() not in bundle.engine.pids and torch.equal(bundle(x), x.relu() * 2)
    if policy != "processes":
        with load_bundle(wide, policy=cast(Policy, policy), trust=True) as bundle:
            assert set(bundle.engine.pids) == {os.getpid()} and torch.equal(bundle(x), x.relu() * 2)


@pytest.mark.parametrize(("policy", "trust"), [("serial", True), ("serial", False), ("processes", False)])
def test_a_part_that_makes_less_than_announced_fails_its_request(wide, policy, trust):
    """ONNX Runtime read 19,999 numbers behind the only one that there was."""
    with_calls(wide, ("aten.slice.Tensor", ["x", 0, 0, 1]))
    said = r"output 0 is torch.float32 \[1\], and torch.float32 \[20000\] was announced"
    with load_bundle(wide, policy=policy, trust=trust, verify=False) as bundle, pytest.raises(StageError, match=said):
        bundle(torch.ones(NUM))


def test_a_part_that_makes_another_dtype_than_announced_fails_its_request(wide):
    with_calls(wide, ("aten.gt.Scalar", ["x", 0]))
    with load_bundle(wide, trust=True, verify=False) as bundle, pytest.raises(StageError, match=r"output 0 is torch\.bool"):
        bundle(torch.ones(NUM))


def test_an_input_that_two_parts_read_in_two_shapes_is_refused(wide):
    """The request has one shape, and the part with the other one would read past its end."""

    def read_more(data: Any) -> None:
        first, second = data["networks"]["wide"]["parts"]
        second["inputs"].append({**first["inputs"][0], "shape": [2 * NUM]})
        second["input_orders"].append([0])

    with_table(wide, read_more)
    with pytest.raises(PlanError, match=r"reads 'x' as float32 \[40000\], and stage 'stage0' reads it as float32 \[20000\]"):
        load_bundle(wide, verify=False)


def test_a_bundle_that_nobody_could_open_is_not_written_unasked(tmp_path):
    traced, path = traced_of(Spectrum(), 64), tmp_path / "app.asb"
    networks = {"spectrum": (traced, plan_of(traced, "eager"))}
    with pytest.raises(PlanError, match=r"give trust=True \(--trust\) here to write it"):
        write_bundle(networks, path)
    assert not path.exists()
    write_bundle(networks, path, trust=True)
    with pytest.raises(BackendError, match="run only if you trust its maker"):
        load_bundle(path)
    [x] = traced.example_inputs
    with load_bundle(path, trust=True) as bundle:
        torch.testing.assert_close(bundle(x), torch.fft.rfft(x).abs())


def test_a_batch_norm_of_a_bundle_gives_the_same_bits_and_checks_its_sizes(tmp_path):
    traced = traced_of(Normed(), 1, 3, 8, 8)
    write_bundle({"normed": (traced, plan_of(traced, "eager"))}, tmp_path / "app.asb")
    with load_bundle(tmp_path / "app.asb") as bundle:
        assert torch.equal(bundle(*traced.example_inputs), traced.run(*traced.example_inputs))
    short = ("aten._native_batch_norm_legit_no_training.default", ["x", None, None, "-", "-", 0.1, 1e-5])
    with_calls(tmp_path / "app.asb", ("aten.ones.default", [[2]]), short, ("getitem", ["-", 0]))
    hostile = load_bundle(tmp_path / "app.asb", verify=False)
    with hostile, pytest.raises(StageError, match="running_mean should contain 3"):
        hostile(*traced.example_inputs)
