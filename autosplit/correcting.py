"""What workers took of their devices while a plan ran goes back into the profile, as measured stages."""

from collections.abc import Sequence

import numpy as np

from autosplit.plan import Plan, Stage
from autosplit.profile import Profile
from autosplit.running.messages import Event
from autosplit.samples import Samples, Setting

MOST_SAMPLES = 5
"""Of each worker that go into the profile; each is the mean over as many requests."""

Span = tuple[int, int]


def corrected(profile: Profile, plan: Plan, spans: Sequence[Sequence[Span]], moves_s: Sequence[float]) -> Profile:
    """The profile with the plan's stages as they were seen to run, their neighbours busy.

    All that a worker did for a request counts, less what is predicted for its transfers, so that a plan is predicted as it
    was seen.

    Args:
        profile: what is known.
        plan: what ran.
        spans: for each worker begin and end of its requests (``spans_of``), in nanoseconds.
        moves_s: for each worker the seconds of a request that transfers are predicted to take.
    """
    workers = settings_of(plan)
    devices = {setting.device for _, setting in workers}
    for (stage, setting), moved, taken in zip(workers, moves_s, taken_s(plan, spans), strict=True):
        if taken.samples_s:
            samples = Samples(tuple(max(0.0, seconds - moved) for seconds in taken.samples_s))
            profile = profile.with_stage(stage.ops, setting, samples, sorted(devices - {setting.device}))
    return profile


def spans_of(events: Sequence[Event]) -> dict[int, Span]:
    """When a worker had each request: from its inputs' arrival to when it asked for the next ones, or had sent the last ones.

    Waits for room in a ring are left out.
    """
    ends = [*(after.asked_ns for after in events[1:]), *(last.sent_ns for last in events[-1:])]
    return {one.sequence: (one.got_ns, end - one.blocked_ns) for one, end in zip(events, ends, strict=True)}


def taken_s(plan: Plan, spans: Sequence[Sequence[Span]]) -> list[Samples]:
    """What a request took each worker of its device, where those that run at once get equal shares.

    A sample is the mean over requests that follow each other, not one request: what stands in a worker's way now and then, the
    host above all, costs throughput too. There are none of a worker that could not be asked, or was just started anew.
    """
    devices = [setting.device for _, setting in settings_of(plan)]
    found: dict[int, Samples] = {}
    for device in dict.fromkeys(devices):
        there = [number for number, name in enumerate(devices) if name == device]
        for number, seconds in zip(there, shares_s([spans[number] for number in there]), strict=True):
            parts = np.array_split(np.array(seconds), min(MOST_SAMPLES, len(seconds))) if seconds else []
            found[number] = Samples(tuple(float(part.mean()) for part in parts))
    return [found[number] for number in range(len(devices))]


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


def settings_of(plan: Plan) -> list[tuple[Stage, Setting]]:
    """Each worker of a plan: its stage, and where and how it runs."""
    return [(stage, Setting(name, stage.backend, stage.threads)) for stage in plan.stages for name in stage.devices]
