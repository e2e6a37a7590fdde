import os

import pytest

from autosplit.measuring import canary
from autosplit.measuring.canary import canary_s, drift


def test_canary_leaves_the_affinity_of_the_caller_alone() -> None:
    before = os.sched_getaffinity(0)
    assert 0 < canary_s([min(before)]) < 1
    assert os.sched_getaffinity(0) == before


def test_drift_is_the_share_by_which_the_canary_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "canary_s", lambda cores: 1.5e-3)
    assert drift((0,), 1e-3) == pytest.approx(0.5) and drift((0,), 3e-3) == pytest.approx(-0.5)
    assert drift((0,), 0.0) == 0


def test_operands_lie_the_same_way_always() -> None:
    places = [[array.ctypes.data % 4096 for array in canary._operands()] for _ in range(5)]
    assert all(place == places[0] for place in places)
