"""The calibration kernel: a fixed small computation that shows whether a core is as fast as when a profile was made."""

import os
import threading
import time
from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from autosplit.devices.limits import refusals_named

DRIFT_LIMIT = 0.15
"""A profile no longer matches its device when the kernel's time differs by more than this share."""

PATIENCE_S = 3.0
"""Seconds to wait for a core that seems slower than before: its clock falls for seconds while a neighbour is busy."""

Array = NDArray[np.float32]

_ELEMENTS = 16 * 1024
_SKEW = 1024 + 16
_PAGE = 4096
_PASSES = 80
_REPEATS = 25
_ATTEMPTS = 30
_NUM_AGREEING = 3
_AGREEMENT = 0.02
_PAUSE_S = 0.01


def kernel_s(cores: Sequence[int], enough_s: float = inf, patience_s: float = 0.0) -> float:
    """Fastest time of the kernel (float32 arithmetic in the L2 cache) on the first of the cores, in seconds.

    The minimum ignores a passing load on the core. Attempts repeat, with pauses, until three lie within 2 % of the fastest.
    They run in a thread of their own, so the caller's affinity stays.

    Args:
        cores: the device's cores; empty leaves the thread where it is.
        enough_s: attempts also repeat until one is this fast, for at most ``patience_s`` seconds.
        patience_s: see ``enough_s``.
    """
    found: list[float] = []
    thread = threading.Thread(target=_attempts, args=(cores, enough_s, patience_s, found), name="autosplit-calibration")
    with refusals_named():
        thread.start()
    thread.join()
    return min(found)


def kernel_now_s(cores: Sequence[int], then_s: float) -> float:
    """Seconds of the kernel now. A core slower than ``then_s`` and the limit allow gets ``PATIENCE_S`` to recover."""
    return kernel_s(cores, then_s * (1 + DRIFT_LIMIT), PATIENCE_S)


def drift(seconds: float, then_s: float) -> float:
    """Relative change of the kernel's time since ``then_s``: positive is slower now. 0 if it was never measured."""
    return seconds / then_s - 1 if then_s > 0 else 0.0


def _attempts(cores: Sequence[int], enough_s: float, patience_s: float, found: list[float]) -> None:
    if cores:
        os.sched_setaffinity(0, cores[:1])
    one, two, result = _operands()
    begun_s = time.perf_counter()
    while True:
        repeats = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            for _ in range(_PASSES):
                np.multiply(one, two, out=result)
                np.add(result, two, out=result)
            repeats.append(time.perf_counter() - start)
        found.append(min(repeats))
        agree = sum(seconds <= min(found) * (1 + _AGREEMENT) for seconds in found) >= _NUM_AGREEING
        enough = min(found) <= enough_s or time.perf_counter() - begun_s > patience_s
        if enough and (agree or len(found) >= _ATTEMPTS):
            return
        time.sleep(_PAUSE_S)


def _operands() -> tuple[Array, Array, Array]:
    """Three arrays at the same offsets to pages in every process: the time of a pass depends on their alignment."""
    memory = np.zeros(3 * (_ELEMENTS + _SKEW) + _PAGE // 4, np.float32)
    start = -memory.ctypes.data % _PAGE // 4
    places = [start + place * (_ELEMENTS + _SKEW) for place in range(3)]
    one, two, result = (memory[place : place + _ELEMENTS] for place in places)
    one += 1.0001
    two += 0.5
    return one, two, result
