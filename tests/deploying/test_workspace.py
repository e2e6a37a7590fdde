"""A plan as a service: answers that nobody wants any more, and that keep their order."""

import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import autosplit
from autosplit.devices.limits import affinity
from autosplit.shapes import pipelines
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan

ONE = Machine.of([parse_device(f"cpu:{affinity()[0]}")])
pytestmark = pytest.mark.timeout(60)


class Later:
    """A pipeline whose answers are given by the test."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def submit(self, inputs: Any, **settings: Any) -> "Future[Any]":
        return self.future


@pytest.fixture(scope="module")
def traced() -> Traced:
    return autosplit.trace("autosplit.examples.mlp:mlp?depth=1&width=4")


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    pipeline = Later()
    monkeypatch.setattr(pipelines, "deploy", lambda *_: pipeline)
    return pipeline


def test_cancelling_an_answer_cancels_its_request(traced: Traced, later: Later) -> None:
    with autosplit.open_pipeline(traced, Plan(traced.source, traced.graph.hash, "", (), UNKNOWN), ONE) as model:
        assert model.submit(*traced.example_inputs).cancel()
    assert later.future.cancelled()


NEVER_LEFT = """
import tempfile
import autosplit
from autosplit.values.plan import UNKNOWN, Plan, Stage

traced = autosplit.trace("autosplit.examples.tied:tied")
stages = (Stage("all", tuple(op.name for op in traced.graph.ops), ("{device}",)),)
block = autosplit.open_pipeline(traced, Plan(traced.source, traced.graph.hash, "", stages, UNKNOWN), "{device}")
model = block.__enter__()
model(*traced.example_inputs)
print(tempfile.gettempdir())
"""


@pytest.mark.timeout(120)
def test_a_program_may_end_without_leaving_the_block(tmp_path: Path) -> None:
    script = NEVER_LEFT.format(device=f"cpu:{affinity()[0]}")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n"), done.stderr
    assert not list(tmp_path.glob("autosplit-*"))
