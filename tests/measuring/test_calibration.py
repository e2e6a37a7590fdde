import os

import pytest

from autosplit.measuring import calibration
from autosplit.measuring.calibration import drift, kernel_s


def test_the_kernel_leaves_the_affinity_of_the_caller_alone() -> None:
    before = os.sched_getaffinity(0)
    assert 0 < kernel_s([min(before)]) < 1
    assert os.sched_getaffinity(0) == before


def test_drift_is_the_share_by_which_the_kernel_is_off() -> None:
    assert drift(1.5e-3, 1e-3) == pytest.approx(0.5) and drift(1.5e-3, 3e-3) == pytest.approx(-0.5)
    assert drift(1.5e-3, 0.0) == 0


def test_operands_lie_the_same_way_always() -> None:
    places = [[array.ctypes.data % 4096 for array in calibration._operands()] for _ in range(5)]
    assert all(place == places[0] for place in places)


def test_a_core_that_is_slow_for_a_while_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(calibration.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(calibration, "_REPEATS", 1)

    def clock() -> float:
        now_s[0] += 1.0 if now_s[0] < 40 else 0.5
        return now_s[0]

    monkeypatch.setattr(calibration.time, "perf_counter", clock)
    assert kernel_s(()) == 1.0
    now_s[0] = 0.0
    assert kernel_s((), enough_s=0.6, patience_s=1000.0) == 0.5
    now_s[0] = 0.0
    assert kernel_s((), enough_s=0.6, patience_s=20.0) == 1.0
