"""Several models in one mix of requests on a bench: the factor of all rates that the host reaches, and latencies at a load.

Each model has a thread, as it would have callers of its own. A thread that is ahead of the others in the time that its requests
would take at their rates waits, so all models advance at the pace of the one on the fullest device. ::

    rates 4 and 2 a second, at most 1 s ahead
    A  #### #### ####....####      . waits for B
    B  #    #         #    #
"""

import functools
import heapq
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from typing import Any

from autosplit.costs.schedule import poisson_arrivals
from autosplit.deploying.bench import Bench
from autosplit.reports.results import LatencyStats

LEADS = 6
"""Least length of a mix, in times of the most that a model may be ahead; the first of them is not timed."""


class _Pace:
    """How far each model is, in seconds at its rate, and the wait of those that are too far ahead."""

    def __init__(self, names: Iterable[str], lead_s: float) -> None:
        self._at_s, self._lead_s, self._moved = dict.fromkeys(names, 0.0), lead_s, threading.Condition()

    def go_on(self, name: str, at_s: float) -> None:
        """Note how far a model is; wait while it is too far ahead."""
        with self._moved:
            before_s, self._at_s[name] = min(self._at_s.values()), at_s
            if min(self._at_s.values()) > before_s:
                self._moved.notify_all()
            if at_s < inf:
                self._moved.wait_for(lambda: at_s <= min(self._at_s.values()) + self._lead_s)


def run_mix(bench: Bench, rates: Mapping[str, float], seconds: float) -> float:
    """Run the mix as fast as it goes. Returns: by how much the rates were exceeded, 1 for exactly the rates.

    Args:
        bench: where the models are loaded, by name.
        rates: requests a second of each.
        seconds: how long the mix takes at its rates, if that is ``LEADS`` leads or more. In a lead, each worker of each model has
            two requests.
    """
    entries = {name: bench.loaded[name] for name in rates}
    lead_s = max(2 * len(entry.plan.workers) / rates[name] for name, entry in entries.items())
    end_s = max(seconds, LEADS * lead_s)
    pace = _Pace(entries, lead_s)

    def feed(name: str) -> tuple[float, float]:
        """Send the requests of a model. Returns: the times of the answers that end the first lead, and the mix."""
        entry, rate, under_way, times_s = entries[name], rates[name], deque[Future[Any]](), list[float]()
        try:
            for number in range(round(rate * end_s)):
                if len(under_way) == entry.in_flight:
                    under_way.popleft().result()
                pace.go_on(name, number / rate)
                under_way.append(entry.calls[number % len(entry.calls)]())
                under_way[-1].add_done_callback(functools.partial(_note, times_s, 0.0))
        finally:
            pace.go_on(name, inf)
        for future in under_way:
            future.result()
        return times_s[round(rate * lead_s) - 1], times_s[-1]

    with ThreadPoolExecutor(len(entries)) as threads:
        begun, ended = zip(*threads.map(feed, entries), strict=True)
    return (end_s - lead_s) / float(max(ended) - max(begun))


def run_paced(bench: Bench, rates: Mapping[str, float], seconds: float, seed: int) -> dict[str, LatencyStats]:
    """Seconds of requests that come at random at these rates, from their arrival to their answer; arguments as there."""
    arrivals: list[Sequence[tuple[float, str]]] = []
    for number, (name, rate) in enumerate(rates.items()):
        count = max(2, round(rate * seconds))
        arrivals.append([(due_s, name) for due_s in poisson_arrivals(rate, count, seed + number)])
    taken_s: dict[str, list[float]] = {name: [] for name in rates}
    futures, begun_s = list[Future[Any]](), time.monotonic()
    for number, (due_s, name) in enumerate(heapq.merge(*arrivals)):
        time.sleep(max(0.0, begun_s + due_s - time.monotonic()))
        calls, arrived_s = bench.loaded[name].calls, begun_s + due_s
        future = calls[number % len(calls)]()
        future.add_done_callback(functools.partial(_note, taken_s[name], arrived_s))
        futures.append(future)
    for future in futures:
        future.result()
    return {name: LatencyStats.of(seconds) for name, seconds in taken_s.items()}


def _note(taken_s: list[float], since_s: float, _: Future[Any]) -> None:
    taken_s.append(time.monotonic() - since_s)
