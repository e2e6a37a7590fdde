"""The passes of a stage before its first request."""

import itertools
import time

import pytest
import torch

from autosplit.running.modules import warm_up


def test_a_stage_has_equally_many_passes_before_its_first_request_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit in seconds left a busy machine with fewer passes, and equal stages with heaps of 112 or of 158 MiB."""
    monkeypatch.setattr(time, "monotonic", itertools.count(step=10.0).__next__)
    passes: list[int] = []
    warm_up(lambda inputs: passes.append(len(inputs)) or inputs, [torch.zeros(1)])
    assert passes == [1, 1]


def test_a_stage_that_raises_is_left_for_its_first_request() -> None:
    passes: list[int] = []

    def broken(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        passes.append(len(inputs))
        raise ValueError

    warm_up(broken, [torch.zeros(1)])
    assert passes == [1]
