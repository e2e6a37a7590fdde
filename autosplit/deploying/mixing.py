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
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from typing import Any, NamedTuple

from autosplit.costs.schedule import poisson_arrivals
from autosplit.deploying.bench import Bench
from autosplit.reports.results import LatencyStats

LEADS = 6
"""Least length of a mix, in times of the most that a model may be ahead."""


class _Pace:
    """How far each model is, in seconds at its rate, and the wait of those that are too far ahead."""

    def __init__(self, names: Iterable[str], lead_s: float) -> None:
        self._at_s, self._lead_s, self._moved = dict.fromkeys(names, 0.0), lead_s, threading.Condition()

    def advance(self, name: str, at_s: float) -> None:
        """Note how far a model is; wait while it is too far ahead."""
        with self._moved:
            before_s, self._at_s[name] = min(self._at_s.values()), at_s
            if min(self._at_s.values()) > before_s:
                self._moved.notify_all()
            if at_s < inf:
                self._moved.wait_for(lambda: at_s <= min(self._at_s.values()) + self._lead_s)


class Mix(NamedTuple):
    """A mix that ran as fast as it went.

    Attributes:
        factor: by how much the rates were exceeded, 1 for exactly the rates.
        begun_s, ended_s: the monotonic times between which it was timed. All models ran then: a model that is ahead ends up to a
            lead before the others, which have its cores too from then on.
    """

    factor: float
    begun_s: float
    ended_s: float


def run_mix(bench: Bench, rates: Mapping[str, float], seconds: float) -> Mix:
    """Run the mix as fast as it goes.

    Args:
        bench: where the models are loaded, by name.
        rates: requests a second of each.
        seconds: how long the mix takes at its rates, if that is ``LEADS`` leads or more. In a lead, each worker of each model has
            two requests.
    """
    entries = {name: bench.loaded[name] for name in rates}
    lead_s = max(2 * len(entry.plan.workers) / rates[name] for name, entry in entries.items())
    end_s = max(seconds, LEADS * lead_s)
    pace, firsts = _Pace(entries, lead_s), {name: round(rate * lead_s) for name, rate in rates.items()}

    def feed(name: str) -> list[float]:
        """Send the requests of a model. Returns: the times of the answers."""
        entry, rate, under_way, times_s = entries[name], rates[name], deque[Future[Any]](), list[float]()
        most = min(entry.in_flight, firsts[name])  # answered requests, not sent ones, put a model ahead
        try:
            for number in range(round(rate * end_s)):
                if len(under_way) == most:
                    under_way.popleft().result()
                pace.advance(name, number / rate)
                under_way.append(entry.calls[number % len(entry.calls)]())
                under_way[-1].add_done_callback(functools.partial(_note, times_s, 0.0))
        finally:
            pace.advance(name, inf)
        for future in under_way:
            future.result()
        return sorted(times_s)

    with ThreadPoolExecutor(len(entries)) as threads:
        answers = dict(zip(entries, threads.map(feed, entries), strict=True))
    return timed(answers, rates, firsts, {name: sum(entry.plan.loads_s.values()) for name, entry in entries.items()})


def timed(
    answers: Mapping[str, Sequence[float]], rates: Mapping[str, float], firsts: Mapping[str, int], load_s: Mapping[str, float]
) -> Mix:
    """The mix from the last answer of the first lead until a model has all its answers.

    Its factor is the mean progress of the models, weighted by the predicted seconds of devices of each.

    Args:
        answers: the times of each model's answers, in order.
        rates: requests a second of each.
        firsts: how many requests of each are its first lead.
        load_s: predicted seconds of devices for a request of each.

    >>> halves = {"a": [1.0, 2.0, 3.0, 4.0], "b": [2.0, 4.0, 6.0]}  # after 4 s b is alone
    >>> timed(halves, {"a": 2.0, "b": 1.0}, {"a": 1, "b": 1}, {"a": 0.1, "b": 0.1})
    Mix(factor=0.5, begun_s=2.0, ended_s=4.0)
    """
    begun_s = max(times_s[firsts[name] - 1] for name, times_s in answers.items())
    ended_s = min(times_s[-1] for times_s in answers.values())
    made = {name: bisect_right(times_s, ended_s) - bisect_right(times_s, begun_s) for name, times_s in answers.items()}
    taken_s, asked_s = (sum(load_s[name] * count[name] for name in rates) for count in (made, rates))
    return Mix(taken_s / asked_s / (ended_s - begun_s), begun_s, ended_s)


def run_paced(bench: Bench, rates: Mapping[str, float], seconds: float, seed: int) -> dict[str, LatencyStats]:
    """Seconds of requests that come at random at these rates, from arrival to answer; arguments as for ``run_mix``."""
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
