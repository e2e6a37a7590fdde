"""What workers took of their devices while a plan ran goes back into the profile, as measured stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median

import numpy as np

from autosplit.measuring.rounds import SLOW_RATIO
from autosplit.running.messages import WorkerEvent
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.samples import Samples

MOST_SAMPLES = 5
"""Of each worker that go into the profile; each is the mean over as many requests."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Seen:
    """What a plan was seen to take.

    Attributes:
        plan: what ran.
        taken: what a request took each worker of its device (``taken_s``).
        beside_s: device to the seconds that a request of another plan took there, which runs by turns with each one.
        expected_s: seconds of a request for each worker, as they were predicted before anything ran.
    """

    plan: Plan
    taken: tuple[Samples, ...]
    beside_s: Mapping[str, float]
    expected_s: Sequence[float]


def corrected(profile: Profile, plan: Plan, taken: Sequence[Samples], moves_s: Sequence[float]) -> Profile:
    """The profile with a plan's stages as they were seen to run, their neighbours busy.

    All that a worker did for a request counts, less what is predicted for its transfers, so that a plan is predicted as it
    was seen.

    Args:
        profile: what is known.
        plan: what ran.
        taken: what a request took each worker of its device (``taken_s``).
        moves_s: for each worker the seconds of a request that transfers are predicted to take.
    """
    workers = plan.workers
    devices = {setting.device for _, setting in workers}
    for (stage, setting), own, moved in zip(workers, taken, moves_s, strict=True):
        if own.samples_s:
            samples = Samples(tuple(max(0.0, seconds - moved) for seconds in own.samples_s))
            profile = profile.with_stage(stage.ops, setting, samples, sorted(devices - {setting.device}))
    return profile


def at_usual_speed(seen: Sequence[Seen]) -> list[Seen]:
    """What plans would have been seen to take, had no device been slow meanwhile.

    Cores of a virtual machine are slow for seconds at a time, one alone or all together, and a candidate runs for two or three.
    What ran beside every plan tells: a device is slow where it took over ``SLOW_RATIO`` times as long as usual, and usual is the
    median of the times that are no further from the fastest one. Of a device where it did not run, the others together tell.
    A slow time may have begun or ended between the two, so only what took that much longer than expected is put right, and to
    no less than that.

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
    """The samples without what a device was slowed by, if they show it, but in the median not below what was expected."""
    if slowed <= SLOW_RATIO or not taken.samples_s or taken.median_s <= SLOW_RATIO * expected_s:
        return taken
    by = min(slowed, taken.median_s / expected_s) if expected_s > 0 else slowed
    return Samples(tuple(seconds / by for seconds in taken.samples_s))


def _usual_s(seconds: Sequence[float]) -> float:
    return median(one for one in seconds if one <= SLOW_RATIO * min(seconds))


def beside_s(plan: Plan, taken: Sequence[Samples]) -> dict[str, float]:
    """Device to the seconds that a request of the plan took there, for ``Seen``; not where a worker could not be asked."""
    workers = [(setting.device, own) for (_, setting), own in zip(plan.workers, taken, strict=True)]
    silent = {device for device, own in workers if not own.samples_s or own.median_s <= 0}
    found: dict[str, float] = {}
    for device, own in workers:
        if device not in silent:
            found[device] = found.get(device, 0.0) + own.median_s
    return found


def spans_of(events: Sequence[WorkerEvent]) -> list[Span]:
    """When a worker had each request: from its inputs' arrival to when it asked for the next ones, or had sent the last ones.

    They are in the order of the events. Waits for room in a ring are left out.
    """
    ends = [*(after.asked_ns for after in events[1:]), *(last.sent_ns for last in events[-1:])]
    return [(one.got_ns, end - one.blocked_ns) for one, end in zip(events, ends, strict=True)]


def taken_s(plan: Plan, spans: Sequence[Sequence[Span]]) -> tuple[Samples, ...]:
    """What a request took each worker of its device, where those that run at once get equal shares.

    A sample is the mean over requests that follow each other, not one request: what stands in a worker's way now and then, the
    host above all, costs throughput too. There are none of a worker that could not be asked, or was just started anew.
    """
    devices = [setting.device for _, setting in plan.workers]
    found: dict[int, Samples] = {}
    for device in dict.fromkeys(devices):
        there = [number for number, name in enumerate(devices) if name == device]
        for number, seconds in zip(there, shares_s([spans[number] for number in there]), strict=True):
            parts = np.array_split(np.array(seconds), min(MOST_SAMPLES, len(seconds))) if seconds else []
            found[number] = Samples(tuple(float(part.mean()) for part in parts))
    return tuple(found[number] for number in range(len(devices)))


def shares_s(spans: Sequence[Sequence[Span]]) -> list[list[float]]:
    """What each run of the workers of one device took of it, where those that run at once get equal shares.

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
