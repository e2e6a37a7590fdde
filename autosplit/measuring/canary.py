"""A fixed small piece of work that tells whether a device still is what it was when a profile was made."""

import os
import threading
import time
from collections.abc import Sequence

import numpy as np

CANARY_LIMIT = 0.15
"""A canary that differs by more than this share means that the profile no longer matches the device."""

_ELEMENTS = 32 * 1024
_PASSES = 40
_ROUNDS = 25
_ATTEMPTS = 4


def canary_s(cores: Sequence[int]) -> float:
    """Seconds of the canary on the first of these cores: the fastest of 25 rounds of float32 arithmetic in the L2 cache.

    The fastest, not the median: a passing load on the core is no change of the core. It runs in a thread of its own, so the
    affinity of the caller stays.

    Args:
        cores: the device's cores; empty leaves the thread where it is.
    """
    fastest = [float("inf")]

    def work() -> None:
        if cores:
            os.sched_setaffinity(0, cores[:1])
        one, two = np.full(_ELEMENTS, 1.0001, np.float32), np.full(_ELEMENTS, 0.5, np.float32)
        result = np.empty(_ELEMENTS, np.float32)
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            for _ in range(_PASSES):
                np.multiply(one, two, out=result)
                np.add(result, two, out=result)
            fastest[0] = min(fastest[0], time.perf_counter() - start)

    thread = threading.Thread(target=work, name="autosplit-canary")
    thread.start()
    thread.join()
    return fastest[0]


def drift(cores: Sequence[int], then_s: float) -> float:
    """How far the canary is off, as a share of what it took then: positive is slower now. 0 if it was never measured.

    A canary that looks off is tried again, up to four times in all, and the least difference counts.
    """
    if then_s <= 0:
        return 0.0
    least = float("inf")
    for _ in range(_ATTEMPTS):
        off = canary_s(cores) / then_s - 1
        least = off if abs(off) < abs(least) else least
        if abs(least) <= CANARY_LIMIT / 2:
            break
    return least
