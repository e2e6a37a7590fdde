"""A plan as a service: answers that nobody wants any more, and that keep their order."""

from concurrent.futures import Future
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
