import os

import pytest

from autosplit.measuring import canary
from autosplit.measuring.canary import canary_s, drift


def test_canary_leaves_the_affinity_of_the_caller_alone() -> None:
    before = os.sched_getaffinity(0)
    assert 0 < canary_s([min(before)]) < 1
    assert os.sched_getaffinity(0) == before


def test_drift_is_the_share_by_which_the_canary_is_off() -> None:
    assert drift(1.5e-3, 1e-3) == pytest.approx(0.5) and drift(1.5e-3, 3e-3) == pytest.approx(-0.5)
    assert drift(1.5e-3, 0.0) == 0


def test_operands_lie_the_same_way_always() -> None:
    places = [[array.ctypes.data % 4096 for array in canary._operands()] for _ in range(5)]
    assert all(place == places[0] for place in places)


def test_a_core_that_is_slow_for_a_while_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(canary.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(canary, "_ROUNDS", 1)

    def clock() -> float:
        now_s[0] += 1.0 if now_s[0] < 40 else 0.5
        return now_s[0]

    monkeypatch.setattr(canary.time, "perf_counter", clock)
    assert canary_s(()) == 1.0
    now_s[0] = 0.0
    assert canary_s((), enough_s=0.6, patience_s=1000.0) == 0.5
    now_s[0] = 0.0
    assert canary_s((), enough_s=0.6, patience_s=20.0) == 1.0
