"""A fixed small piece of work that tells whether a device still is what it was when a profile was made."""

import os
import threading
import time
from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

CANARY_LIMIT = 0.15
"""A canary that differs by more than this share means that the profile no longer matches the device."""

PATIENCE_S = 3.0
"""A core that seems slower than then is looked at for so long: the clock falls for seconds while a neighbour is busy."""

Array = NDArray[np.float32]

_ELEMENTS = 16 * 1024
_SKEW = 1024 + 16
_PAGE = 4096
_PASSES = 80
_ROUNDS = 25
_ATTEMPTS = 30
_AGREE = 3
_AGREEMENT = 0.02
_PAUSE_S = 0.01


def canary_s(cores: Sequence[int], enough_s: float = inf, patience_s: float = 0.0) -> float:
    """Seconds of the canary on the first of these cores: what float32 arithmetic in the L2 cache takes at its fastest.

    The fastest, not the median: a passing load on the core is no change of the core. Attempts go on, with pauses, until three
    agree within 2 % of the fastest. The work runs in a thread of its own, so the affinity of the caller stays.

    Args:
        cores: the device's cores; empty leaves the thread where it is.
        enough_s: attempts also go on until one takes no longer than this,
        patience_s: but for no longer than this because of it.
    """
    found: list[float] = []
    thread = threading.Thread(target=_attempts, args=(cores, enough_s, patience_s, found), name="autosplit-canary")
    thread.start()
    thread.join()
    return min(found)


def now_s(cores: Sequence[int], then_s: float) -> float:
    """Seconds of the canary now, after some patience with a core that is slower than ``then_s`` and the limit allow."""
    return canary_s(cores, then_s * (1 + CANARY_LIMIT), PATIENCE_S)


def drift(seconds: float, then_s: float) -> float:
    """How far the canary is off, as a share of what it took then: positive is slower now. 0 if it was never measured."""
    return seconds / then_s - 1 if then_s > 0 else 0.0


def _attempts(cores: Sequence[int], enough_s: float, patience_s: float, found: list[float]) -> None:
    if cores:
        os.sched_setaffinity(0, cores[:1])
    one, two, result = _operands()
    begun_s = time.perf_counter()
    while True:
        rounds = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            for _ in range(_PASSES):
                np.multiply(one, two, out=result)
                np.add(result, two, out=result)
            rounds.append(time.perf_counter() - start)
        found.append(min(rounds))
        agree = sum(seconds <= min(found) * (1 + _AGREEMENT) for seconds in found) >= _AGREE
        enough = min(found) <= enough_s or time.perf_counter() - begun_s > patience_s
        if enough and (agree or len(found) >= _ATTEMPTS):
            return
        time.sleep(_PAUSE_S)


def _operands() -> tuple[Array, Array, Array]:
    """Three arrays that lie the same way in every process: the time of a pass depends on how they are aligned to pages."""
    memory = np.zeros(3 * (_ELEMENTS + _SKEW) + _PAGE // 4, np.float32)
    start = -memory.ctypes.data % _PAGE // 4
    places = [start + place * (_ELEMENTS + _SKEW) for place in range(3)]
    one, two, result = (memory[place : place + _ELEMENTS] for place in places)
    one += 1.0001
    two += 0.5
    return one, two, result
