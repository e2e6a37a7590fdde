"""A model is timed at few sizes, buckets are chosen, and ops get their mean seconds under the traffic.

So the planner cuts for the traffic, and not for the longest request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np
import psutil

from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import deploy
from autosplit.deploying.setup import Setup
from autosplit.errors import AutosplitError, ProfileError, UsageError
from autosplit.memory.stages import count
from autosplit.planning.baselines import baseline_plan
from autosplit.progress import progress_shown
from autosplit.running.pipeline import Pipeline
from autosplit.serving.hostmanager import HostManager
from autosplit.shapes.buckets import MOST_VARIANTS, Buckets, Times, choose_buckets, fit_times
from autosplit.shapes.service import measured
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import At, Family
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Samples, Setting
from autosplit.values.shapes import Shapes, Traffic, even_traffic, sizes_text

HOPELESS = 1.5
"""A backend that takes this many times as long as the fastest one at the largest sizes is not timed at others."""

ERROR = 0.15
"""A size whose seconds the fit misses by more than this share is added to it, and the buckets are chosen anew."""

MEMORY_SHARE = 0.5
"""Share of the free memory, where no device has a cap, that the variants of all stages may take beside the weights."""


def measure_sizes(
    family: Family, traffic: Traffic | None, machine: Machine, setup: Setup, measure: Callable[..., Profile]
) -> Profile:
    """The mean seconds of each op under the traffic, with the buckets in ``shapes``.

    Ops are measured at the largest sizes. At few others the whole model is timed, and the rest is fitted; the fit is checked at
    the bucket that counts most, and refined.

    Args:
        family: the model.
        traffic: how often each size comes; None for all sizes alike.
        machine: the devices.
        setup: as for ``measure``.
        measure: ``api.measure``.
    Raises: UsageError: sizes of the traffic that are not allowed, too many that may not be padded, or several hosts.
    """
    if setup.hosts is not None:
        raise UsageError("requests of several sizes run on one machine; leave out the hosts, or give one size")
    flow = (traffic or even_traffic(family.allowed)).verify(family.allowed)
    with progress_shown(setup.progress) as progress, Workspace() as own:
        setup = replace(setup, progress=progress, workspace=setup.workspace or own)
        profile = measure(family.variants[0], machine, setup=setup)
        curves, notes = _curves(family, profile, _first_sizes(family, flow), machine, setup)
        times, buckets = _bucketed(family, flow, curves, machine, setup)
    points = list(next(iter(curves.values())))
    weights = weights_of(buckets, times, flow, points)
    shares = [_point(family, at, weight, curves) for at, weight in zip(points, weights, strict=True)]
    if (most := _most_variants(family, machine))[0] < MOST_VARIANTS:
        notes.append(f"{most[1]}, so that at most {most[0]} variants are made")
    found = mixed(profile, shares)
    return replace(found, shapes=_section(family, buckets), notes=(*found.notes, buckets.sentence, *notes))


def _named(family: Family, sizes: tuple[int, ...]) -> At:
    return dict(zip(family.allowed, sizes, strict=True))


Seconds = dict[tuple[int, ...], float]
"""Sizes to the seconds of a request."""


def _curves(
    family: Family, profile: Profile, sizes: Sequence[tuple[int, ...]], machine: Machine, setup: Setup
) -> tuple[dict[str, Seconds], list[str]]:
    """Backend to the seconds of requests at these sizes and the largest ones; and why backends are left out.

    Raises: AutosplitError: no backend runs the model at all of these sizes.
    """
    whole_s: dict[str, float] = {}
    for setting in profile.measured:
        whole_s[setting.backend] = min(whole_s.get(setting.backend, inf), profile.whole_s(*setting))
    ranked = [backend for backend in sorted(whole_s, key=whole_s.__getitem__) if whole_s[backend] < inf]
    found, notes, failures = dict[str, Seconds](), list[str](), list[AutosplitError]()
    for backend in ranked:
        if found and whole_s[backend] >= HOPELESS * whole_s[next(iter(found))]:
            break
        try:
            found[backend] = _timed(family, backend, sizes, machine, setup)
        except AutosplitError as failure:
            failures.append(failure)
            notes.append(f"{backend} is left out: it does not run the model at all sizes: {failure}")
    if not found:
        raise failures[0] if failures else ProfileError(f"no backend takes all ops of '{profile.graph_name}'")
    return found, notes


def _timed(family: Family, backend: str, sizes: Sequence[tuple[int, ...]], machine: Machine, setup: Setup) -> Seconds:
    """Seconds of requests at these sizes and the largest ones, on the whole model on the first device."""
    one = family.only([_named(family, at) for at in sizes])
    plan = replace(_whole(one.variants[0], backend, machine), precision=setup.precision)
    assert setup.workspace is not None
    with HostManager(engine_factory=Pipeline) as host:
        engine = deploy(host, backend, one.variants[0], plan, machine, setup.workspace, one.variants[1:])
        return {tuple(bucket.sizes.values()): bucket.seconds for bucket in measured(one, engine)}


def _whole(traced: Traced, backend: str, machine: Machine) -> Plan:
    ops = tuple(op.name for op in traced.graph.ops)
    return baseline_plan(traced.graph, traced.source, "whole", backend, [(ops, machine.devices[:1])])


def _bucketed(
    family: Family, traffic: Traffic, curves: Mapping[str, Seconds], machine: Machine, setup: Setup
) -> tuple[Times, Buckets]:
    """Fit the seconds, and choose buckets; then check the fit at the bucket that counts most, and refine it."""
    most, exact = _most_variants(family, machine)[0], family.unpaddable
    known_s = {at: min(curve[at] for curve in curves.values()) for at in next(iter(curves.values()))}
    times = fit_times(known_s)
    buckets = choose_buckets(times, traffic, family.allowed, exact=exact, most=most)
    homes = _seconds_by_home(buckets, times, traffic)
    home = max(homes, key=homes.__getitem__)
    if home not in known_s:
        backend = min(curves, key=lambda name: sum(curves[name].values()))
        told_s, known_s[home] = times.seconds(home), _timed(family, backend, [home], machine, setup)[home]
        times = fit_times(known_s)
        if abs(told_s / known_s[home] - 1) > ERROR:
            buckets = choose_buckets(times, traffic, family.allowed, exact=exact, most=most)
    return times, buckets


def _first_sizes(family: Family, traffic: Traffic) -> list[tuple[int, ...]]:
    """Sizes to measure beside the largest ones: the smallest that come, and the geometric mean of both in each dimension."""
    low = [next(iter(traffic.along(dim))) for dim in family.allowed]
    middle = []
    for least, sizes in zip(low, family.allowed.values(), strict=True):
        between = [size for size in sizes if size >= (least * sizes[-1]) ** 0.5]
        middle.append(between[0])
    largest = tuple(family.largest.values())
    return [sizes for sizes in dict.fromkeys([tuple(low), tuple(middle)]) if sizes != largest]


def _seconds_by_home(buckets: Buckets, times: Times, traffic: Traffic) -> dict[tuple[int, ...], float]:
    """The share of the expected seconds that each bucket takes."""
    found: dict[tuple[int, ...], float] = {}
    for sizes, share in traffic.shares.items():
        home = buckets.home(sizes)
        found[home] = found.get(home, 0.0) + share * times.seconds(home)
    return found


def _most_variants(family: Family, machine: Machine) -> tuple[int, str]:
    """How many variants memory allows, counted as if each took what the largest one takes beside the weights; and the limit."""
    largest = family.variants[0]
    memory = count(largest.graph, _whole(largest, "eager", machine), values_of(largest)).stages[0].memory
    assert memory is not None
    capped = [device for device in machine.devices if device.memory_bytes is not None]
    free = min((device.memory_bytes or 0 for device in capped), default=0) * len(capped)
    if not capped:
        free = round(MEMORY_SHARE * psutil.virtual_memory().available)
    most = (free - memory.weight_bytes) // max(memory.arena_bytes + memory.ring_bytes, 1)
    return max(1, min(MOST_VARIANTS, most)), f"a variant takes {(memory.arena_bytes + memory.ring_bytes) / 1e6:.0f} MB"


def _section(family: Family, buckets: Buckets) -> Shapes:
    return Shapes(
        {name: dict(axes) for name, axes in family.shapes.items()},
        {dim: sizes_text(sizes) for dim, sizes in family.allowed.items()},
        dict(buckets.grid),
        buckets.expected_s,
        buckets.exact_s,
        buckets.longest_s,
        dict(family.unpaddable),
    )


def weights_of(buckets: Buckets, times: Times, traffic: Traffic, profiled: Sequence[tuple[int, ...]]) -> list[float]:
    """The share of the requests that each profiled size stands for; they sum to 1.

    A bucket between two profiled sizes, by its seconds, counts for both, so that the weighted seconds are those of the bucket.
    """
    order = np.argsort([times.seconds(sizes) for sizes in profiled])
    known_s = [times.seconds(profiled[at]) for at in order]
    found = [0.0] * len(profiled)
    for sizes, share in traffic.shares.items():
        seconds = times.seconds(buckets.home(sizes))
        at = next((n for n, (_, high) in enumerate(pairwise(known_s)) if seconds <= high), max(len(known_s) - 2, 0))
        low, high = known_s[at], known_s[min(at + 1, len(known_s) - 1)]
        upper = min(max((seconds - low) / (high - low), 0.0), 1.0) if high > low else 0.0
        found[order[at]] += share * (1 - upper)
        found[order[min(at + 1, len(known_s) - 1)]] += share * upper
    return found


@dataclass(frozen=True)
class Point:
    """Sizes at which the model was timed, relative to the largest ones.

    Attributes:
        weight: the share of the requests that it stands for.
        num_bytes: bytes of all values.
        op_bytes: op to the bytes of the values that it reads and makes.
        seconds: backend to the seconds of a request.
    """

    weight: float
    num_bytes: float
    op_bytes: Mapping[str, float]
    seconds: Mapping[str, float]


def _point(family: Family, at: tuple[int, ...], weight: float, curves: Mapping[str, Seconds]) -> Point:
    graph, largest, ends = family.at(_named(family, at)).graph, family.variants[0].graph, tuple(family.largest.values())
    own, most = _op_bytes(graph), _op_bytes(largest)
    total, total_most = (sum(value.num_bytes for value in one.values.values()) for one in (graph, largest))
    return Point(
        weight,
        total / total_most,
        {op: num_bytes / max(most[op], 1) for op, num_bytes in own.items()},
        {backend: curve[at] / curve[ends] for backend, curve in curves.items()},
    )


def _op_bytes(graph: Graph) -> dict[str, int]:
    return {op.name: sum(graph.values[name].num_bytes for name in (*op.inputs, *op.outputs)) for op in graph.ops}


def mixed(profile: Profile, points: Sequence[Point]) -> Profile:
    """The profile of the largest sizes with the mean seconds of each op under the traffic.

    The seconds of an op follow the bytes of its values, scaled so that all ops take the seconds that were measured of the whole.
    A planner takes the bytes of the largest graph, so that seconds per byte of links and of cuts are scaled to the mean.

    Args:
        profile: the measurements at the largest sizes.
        points: the sizes that were timed. Backends without times are left out.
    """
    share = sum(point.weight * point.num_bytes for point in points)
    links = tuple(
        replace(
            link,
            send_s_per_byte=link.send_s_per_byte * share,
            receive_s_per_byte=link.receive_s_per_byte * share,
        )
        for link in profile.links
    )
    wires = tuple(replace(wire, s_per_byte=wire.s_per_byte * share) for wire in profile.wires)
    kept = [setting for setting in profile.measured if setting.backend in points[0].seconds]
    mean = {setting: _mixed_in(profile, setting, points, share) for setting in kept}
    return replace(profile, measured=mean, stages=(), links=links, wires=wires).verify()


def _mixed_in(profile: Profile, setting: Setting, points: Sequence[Point], share: float) -> Measured:
    """The means in one setting."""
    largest, found = profile.measured[setting], dict[str, float]()
    op_s = {op: profile.op_s(op, *setting) for op in profile.accepted(setting)}
    for point in points:
        shrunk = {op: seconds * point.op_bytes[op] for op, seconds in op_s.items()}
        scale = point.weight * point.seconds[setting.backend] * sum(op_s.values()) / (sum(shrunk.values()) or 1.0)
        found = {op: found.get(op, 0.0) + scale * seconds for op, seconds in shrunk.items()}
    ratio, cut = sum(point.weight * point.seconds[setting.backend] for point in points), largest.cut_s_per_byte
    return replace(
        largest,
        ops={op: Samples((seconds,)) for op, seconds in found.items()},
        per="op",
        whole=None if largest.whole is None else Samples((largest.whole.median_s * ratio,)),
        alone=None if largest.alone is None else Samples((largest.alone.median_s * ratio,)),
        cut_s_per_byte=None if cut is None else cut * share,
        footprints={},
    )
