"""Processor time of a cluster without requests."""

import contextlib
import time
from collections import Counter

import psutil

IDLE_S = 20.0


def idle_s_per_min(window_s: float = IDLE_S) -> dict[str, tuple[int, float]]:
    """Kind of process to how many of them this process has, and their processor seconds per minute, the busiest kind first.

    Counted are children of this process, and theirs. A process that ends meanwhile is left out.
    """
    processes = psutil.Process().children(recursive=True)
    before_s = {process: _processor_s(process) for process in processes}
    time.sleep(window_s)
    counts: Counter[str] = Counter()
    used_s: Counter[str] = Counter()
    for process, begun_s in before_s.items():
        with contextlib.suppress(psutil.Error):
            name, now_s = process.name(), _processor_s(process)
            counts[name] += 1
            used_s[name] += now_s - begun_s
    return {name: (counts[name], one_s * 60 / window_s) for name, one_s in used_s.most_common()}


def total_s_per_min(window_s: float = IDLE_S) -> float:
    """Processor seconds per minute of all processes that this one has started."""
    return sum(one_s for _, one_s in idle_s_per_min(window_s).values())


def _processor_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
