"""Exporters and compilers run in the process apart: where one crashes, the user gets an error and no folder."""

from pathlib import Path

import pytest
import torch
from crashing_libraries import Opening
from crashing_operators import Ending

from autosplit.bundling.bundler import write_bundle
from autosplit.deploying import networks
from autosplit.errors import BackendError
from autosplit.exporting.base import Job, write_export
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def ending() -> Traced:
    return trace(load_model(Ending().eval(), inputs=(torch.randn(2, 3),)))


def plan_of(traced: Traced, backend: str) -> Plan:
    return Plan(Source(""), traced.graph.hash, "", (Stage("stage0", tuple(traced.graph.index), ("cpu:0",), backend),), UNKNOWN)


@pytest.mark.parametrize("target", ["onnxruntime", "onnxruntime-layers", "openvino", "triton", "ray-serve", "torch-pipelining"])
def test_a_crash_in_an_export_leaves_no_folder(ending: Traced, target: str, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="was killed by SIGSEGV while"):
        write_export(target, Job(ending, plan_of(ending, "eager")), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "inductor"])
def test_a_crash_in_a_bundle_leaves_no_folder(ending: Traced, backend: str, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="was killed by SIGSEGV while"):
        write_bundle({"ending": (ending, plan_of(ending, backend))}, tmp_path / "out", trust=True)
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_crashes_when_it_is_opened_costs_its_backend_only(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(networks, "require_right", lambda traced, plan: None)  # it would try the ops, and refuse them already
    traced = trace(load_model(Opening().eval(), inputs=(torch.randn(2, 3),)))
    with pytest.raises(BackendError, match="was killed by SIGSEGV while inductor compiled stage 'stage0' for a bundle"):
        write_bundle({"opening": (traced, plan_of(traced, "inductor"))}, tmp_path / "out", trust=True)
    assert list(tmp_path.iterdir()) == []
    write_bundle({"opening": (traced, plan_of(traced, "eager"))}, tmp_path / "out", trust=True)
