"""Correct a profile by the seconds that workers took of their devices while a plan ran."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median

import numpy as np

from autosplit.deploying.bench import Contender
from autosplit.running.messages import WorkerEvent
from autosplit.values.machine import places
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.samples import SLOW_RATIO, Samples

MOST_SAMPLES = 5
"""Number of samples of each worker that go into the profile. Each is the mean of an equal part of the requests."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Seen:
    """The measured seconds of a plan that ran.

    Attributes:
        taken: seconds that a request took of each worker's device (``taken_s``).
        beside_s: device to the seconds that a request of the first plan took there, in the same rounds.
        expected_s: seconds of a request for each worker, as predicted before anything ran.
    """

    plan: Plan
    taken: tuple[Samples, ...]
    beside_s: Mapping[str, float]
    expected_s: Sequence[float]


def corrected(profile: Profile, plan: Plan, taken: Sequence[Samples], moves_s: Sequence[float]) -> Profile:
    """The profile with a plan's stages as they ran, with busy neighbours.

    A stage takes all seconds of its worker for a request, less those predicted for transfers, so that the prediction of the plan
    then equals its measurement. The seconds of a streamed stage depend on its cap, and say nothing of its ops elsewhere.

    Args:
        taken: seconds that a request took of each worker's device (``taken_s``).
        moves_s: for each worker the predicted seconds of a request for transfers.
    """
    workers = plan.workers
    devices = {setting.device for _, setting in workers}
    for (stage, setting), own, moved in zip(workers, taken, moves_s, strict=True):
        if own.samples_s and stage.resident_bytes is None:
            samples = Samples(tuple(max(0.0, seconds - moved) for seconds in own.samples_s))
            profile = profile.with_stage(stage.ops, setting, samples, sorted(devices - {setting.device}))
    return profile


def at_usual_speed(seen: Sequence[Seen]) -> list[Seen]:
    """The measurements as they would be if no device had been slow meanwhile.

    Cores of a virtual machine are slow for seconds at a time, as long as a candidate runs. The first plan runs beside every
    candidate: a device was slow if that plan took over ``SLOW_RATIO`` times its usual seconds there (the median of times within
    that ratio of the fastest). A device that it does not use counts with the geometric mean of the others. A slow time may end
    between the two plans, so only samples above the prediction by that ratio are corrected, and not below it.

    >>> from autosplit.values.plan import Prediction, Source, Stage
    >>> plan = Plan(Source("m", 1), "g", "p", (Stage("s", ("op",), ("cpu:0",)),), Prediction(1.0, 1.0, 1.0, 0.0, 1.0))
    >>> taken, beside = (6.0, 3.0, 3.0), (2.0, 1.1, 1.0)
    >>> seen = [Seen(plan, (Samples((s,)),), {"cpu:0": other}, [2.5]) for s, other in zip(taken, beside)]
    >>> [round(one.taken[0].median_s, 9) for one in at_usual_speed(seen)]
    [3.15, 3.0, 3.0]
    """
    devices = dict.fromkeys(device for one in seen for device in one.beside_s)
    usual_s = {device: _usual_s([one.beside_s[device] for one in seen if device in one.beside_s]) for device in devices}
    found = []
    for one in seen:
        slowed = {device: seconds / usual_s[device] for device, seconds in one.beside_s.items()}
        common = geometric_mean(slowed.values()) if slowed else 1.0
        workers = zip(one.plan.workers, one.taken, one.expected_s, strict=True)
        right = (_put_right(own, slowed.get(setting.device, common), expected_s) for (_, setting), own, expected_s in workers)
        found.append(replace(one, taken=tuple(right)))
    return found


def _put_right(taken: Samples, slowed: float, expected_s: float) -> Samples:
    """The samples divided by the slowdown of the device, if they show it; their median stays at or above ``expected_s``."""
    if slowed <= SLOW_RATIO or not taken.samples_s or taken.median_s <= SLOW_RATIO * expected_s:
        return taken
    by = min(slowed, taken.median_s / expected_s) if expected_s > 0 else slowed
    return Samples(tuple(seconds / by for seconds in taken.samples_s))


def _usual_s(seconds: Sequence[float]) -> float:
    return median(one for one in seconds if one <= SLOW_RATIO * min(seconds))


def beside_s(plan: Plan, taken: Sequence[Samples]) -> dict[str, float]:
    """Device to the seconds that a request of the plan took there; devices with a worker that did not answer are left out."""
    workers = [(setting.device, own) for (_, setting), own in zip(plan.workers, taken, strict=True)]
    silent = {device for device, own in workers if not own.samples_s or own.median_s <= 0}
    found: dict[str, float] = {}
    for device, own in workers:
        if device not in silent:
            found[device] = found.get(device, 0.0) + own.median_s
    return found


def spans_of(events: Sequence[WorkerEvent]) -> list[Span]:
    """Begin and end of a worker's time with each request, from the arrival of its inputs until the worker asks for the next ones.

    The last request ends when its outputs are sent. Waits for room in a ring are left out.
    """
    ends = [*(after.asked_ns for after in events[1:]), *(last.sent_ns for last in events[-1:])]
    return [(one.got_ns, end - one.blocked_ns) for one, end in zip(events, ends, strict=True)]


def taken_s(plan: Plan, spans: Sequence[Sequence[Span]]) -> tuple[Samples, ...]:
    """Seconds of each worker's device that a request took. Workers that run at once on a device get equal shares.

    A sample is the mean over consecutive requests, not one request, because occasional delays (the host above all) cost
    throughput too. A worker that did not answer, or was just started again, has no samples.
    """
    devices = [setting.device for _, setting in plan.workers]
    found: dict[int, Samples] = {}
    for device in dict.fromkeys(devices):
        there = [number for number, name in enumerate(devices) if name == device]
        for number, seconds in zip(there, shares_s([spans[number] for number in there]), strict=True):
            parts = np.array_split(np.array(seconds), min(MOST_SAMPLES, len(seconds))) if seconds else []
            found[number] = Samples(tuple(float(part.mean()) for part in parts))
    return tuple(found[number] for number in range(len(devices)))


def slowdowns(plans: Sequence[Plan], spans: Sequence[Sequence[Sequence[Span]]]) -> list[float]:
    """Seconds of cores that a request of each plan took while the plans ran beside each other, over those predicted.

    Args:
        plans: with their predicted loads.
        spans: for each plan and each of its workers the begin and end of its runs, in nanoseconds.
    Returns: a number for each plan; 1.0 for a plan without runs or without a load.
    """
    workers = [(number, setting.device) for number, plan in enumerate(plans) for _, setting in plan.workers]
    runs = [worker for plan_spans in spans for worker in plan_spans]
    taken_s = [0.0] * len(plans)
    for place in dict.fromkeys(place for _, device in workers for place in places(device)):
        there = [k for k, (_, device) in enumerate(workers) if place in places(device)]
        for k, seconds in zip(there, shares_s([runs[k] for k in there]), strict=True):
            taken_s[workers[k][0]] += sum(seconds)
    found = []
    for plan, own_s, plan_spans in zip(plans, taken_s, spans, strict=True):
        num_requests = sum(map(len, plan_spans)) / len(plan.stages)
        expected_s = num_requests * sum(load_s * len(places(name)) for name, load_s in plan.loads_s.items())
        found.append(own_s / expected_s if expected_s > 0 else 1.0)
    return found


def shares_s(spans: Sequence[Sequence[Span]]) -> list[list[float]]:
    """Seconds of one device that each run of its workers took. Workers that run at once get equal shares.

    Args:
        spans: for each worker the begin and end of its runs, in nanoseconds.
    Returns: for each worker seconds of each run.

    >>> shares_s([[(0, 4_000_000_000)], [(2_000_000_000, 6_000_000_000)]])
    [[3.0], [3.0]]
    """
    if len(spans) == 1 or not any(spans):
        return [[(end - begin) / 1e9 for begin, end in worker] for worker in spans]
    begins, ends = np.array([span for worker in spans for span in worker], np.int64).reshape(-1, 2).T
    edges = np.unique(np.concatenate([begins, ends]))
    running = np.searchsorted(np.sort(begins), edges[:-1], "right") - np.searchsorted(np.sort(ends), edges[:-1], "right")
    clock_ns = np.concatenate([[0.0], np.cumsum(np.diff(edges) / np.maximum(1, running))])
    shares_ns = iter(clock_ns[np.searchsorted(edges, ends)] - clock_ns[np.searchsorted(edges, begins)])
    return [[float(next(shares_ns)) / 1e9 for _ in worker] for worker in spans]


def taken_of(entry: Contender, since_ns: int = 0) -> tuple[Samples, ...]:
    """``taken_s`` of a plan on a bench, for requests that began after ``since_ns``."""
    told = [spans_of(events) for events in entry.pipeline.events()]
    return taken_s(entry.plan, [[span for span in spans if span[0] >= since_ns] for spans in told])
