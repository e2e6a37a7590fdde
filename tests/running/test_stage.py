"""A stage is warmed up on zeros before its first request."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import NULL, local, spec

from autosplit.running.modules import StageFolder
from autosplit.running.stage import StagePlacement

STAGE = StagePlacement("a", StageFolder(Path("folder")), (spec("x"),), (spec("y"),), (NULL,))


def test_a_stage_has_equally_many_passes_before_its_first_request_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit in seconds left a busy machine with fewer passes, and equal stages with heaps of 112 or of 158 MiB."""
    monkeypatch.setattr(time, "monotonic", itertools.count(step=10.0).__next__)
    passes: list[Any] = []
    STAGE.warm_up(lambda inputs: passes.append(inputs[0].tolist()) or inputs)
    local("a", torch.neg, "x", "y").warm_up(lambda inputs: passes.append("of the user") or inputs)
    assert passes == [[0.0] * 4] * 2, "a function of the user runs on requests alone"


def test_a_stage_that_raises_is_left_for_its_first_request() -> None:
    passes: list[int] = []

    def broken(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        passes.append(len(inputs))
        raise ValueError

    STAGE.warm_up(broken)
    assert passes == [1]
