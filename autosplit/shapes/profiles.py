"""Few sizes of a model are measured, buckets are chosen, and ops get their mean seconds under the traffic.

So the planner cuts for the traffic, and not for the longest request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import psutil

from autosplit.backends.workspace import Workspace
from autosplit.deploying.setup import Setup
from autosplit.errors import UsageError
from autosplit.memory.stages import count
from autosplit.planning.baselines import baseline_plan
from autosplit.progress import shown
from autosplit.shapes.buckets import MOST_VARIANTS, Buckets, Times, choose_buckets, fit_times
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.family import At, Family
from autosplit.values.machine import Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Samples, Setting
from autosplit.values.shapes import Shapes, Traffic, even_traffic, sizes_text

HOPELESS = 3.0
"""A backend that takes this many times as long as the fastest one at the largest sizes is not measured at others."""

ERROR = 0.15
"""A size whose seconds the fit misses by more than this share is added to it, and the buckets are chosen anew."""

MOST_REFINED = 2
"""Most sizes that are measured to check the fit."""

MEMORY_SHARE = 0.5
"""Share of the free memory, where no device has a cap, that the variants of all stages may take beside the weights."""


def measure_sizes(
    family: Family, traffic: Traffic | None, machine: Machine, setup: Setup, measure: Callable[..., Profile]
) -> Profile:
    """The mean seconds of each op under the traffic, with the buckets in ``shapes``.

    Few sizes are measured, and the others fitted; the fit is checked at the bucket that counts most, and refined.

    Args:
        family: the model.
        traffic: how often each size comes; None for all sizes alike.
        machine: the devices.
        setup: as for ``measure``, which is called for each size.
        measure: ``api.measure``.
    Raises: UsageError: sizes of the traffic that are not allowed, too many that may not be padded, or several hosts.
    """
    if setup.hosts is not None:
        raise UsageError("requests of several sizes run on one machine; leave out the hosts, or give one size")
    flow = (traffic or even_traffic(family.allowed)).verify(family.allowed)
    with shown(setup.progress) as progress, Workspace() as own:
        setup = replace(setup, progress=progress, workspace=setup.workspace or own)
        profiles, times, buckets, notes = _bucketed(family, flow, machine, setup, measure)
    points = list(times.measured)
    num_bytes = [sum(value.num_bytes for value in family.at(_named(family, at)).graph.values.values()) for at in points]
    found = mixed([profiles[at] for at in points], weights_of(buckets, times, flow, points), num_bytes)
    return replace(found, shapes=_section(family, buckets), notes=(*found.notes, *notes))


def _named(family: Family, sizes: tuple[int, ...]) -> At:
    return dict(zip(family.allowed, sizes, strict=True))


def _bucketed(
    family: Family, traffic: Traffic, machine: Machine, setup: Setup, measure: Callable[..., Profile]
) -> tuple[dict[tuple[int, ...], Profile], Times, Buckets, list[str]]:
    """Measure few sizes, fit, choose buckets; then check the fit at the bucket that counts most, and refine it."""
    largest = tuple(family.largest.values())
    profiles = {largest: measure(family.variants[0], machine, setup=setup)}
    best_s = fastest_s(profiles[largest])
    kept = {setting.backend for setting in profiles[largest].measured if profiles[largest].whole_s(*setting) < HOPELESS * best_s}
    setup = replace(setup, backends=sorted(kept))
    most, limit = _most_variants(family, machine)

    def profiled(sizes: tuple[int, ...]) -> float:
        if sizes not in profiles:
            profiles[sizes] = measure(family.at(_named(family, sizes)), machine, setup=setup)
        return fastest_s(profiles[sizes])

    measured = {largest: best_s}
    for sizes in _first_sizes(family, traffic):
        measured[sizes] = profiled(sizes)
    exact = family.unpaddable
    times = fit_times(measured)
    buckets = choose_buckets(times, traffic, family.allowed, exact=exact, most=most)
    for _ in range(MOST_REFINED):
        homes = _seconds_by_home(buckets, times, traffic)
        unknown = [home for home in sorted(homes, key=lambda home: -homes[home]) if home not in measured]
        if not unknown:
            break
        told_s, measured[unknown[0]] = times.seconds(unknown[0]), profiled(unknown[0])
        times = fit_times(measured)
        if abs(told_s / measured[unknown[0]] - 1) <= ERROR:
            break
        buckets = choose_buckets(times, traffic, family.allowed, exact=exact, most=most)
    notes = [buckets.sentence]
    if most < MOST_VARIANTS:
        notes.append(f"{limit}, so that at most {most} variants are made")
    return profiles, times, buckets, notes


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
    ops = tuple(op.name for op in largest.graph.ops)
    whole = baseline_plan(largest.graph, largest.source, "whole", "eager", [(ops, machine.devices[:1])])
    memory = count(largest.graph, whole, values_of(largest)).stages[0].memory
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


def mixed(profiles: Sequence[Profile], weights: Sequence[float], num_bytes: Sequence[int]) -> Profile:
    """The profile of the first graph with the weighted mean seconds of each op.

    Args:
        profiles: one for each size, of graphs with the same ops by name; that of the largest size first.
        weights: the share of the requests that each stands for.
        num_bytes: bytes of all values at each size. A planner takes the bytes of the largest graph, so that seconds per byte of
            links and of cuts are scaled to the mean.
    """
    first = profiles[0]
    share = sum(weight * size for weight, size in zip(weights, num_bytes, strict=True)) / num_bytes[0]
    common = [setting for setting in first.measured if all(setting in one.measured for one in profiles)]
    links = tuple(
        replace(
            link,
            send_s_per_byte=link.send_s_per_byte * share,
            receive_s_per_byte=link.receive_s_per_byte * share,
        )
        for link in first.links
    )
    wires = tuple(replace(wire, s_per_byte=wire.s_per_byte * share) for wire in first.wires)
    measured = {setting: _mixed_in(profiles, weights, setting, share) for setting in common}
    return replace(first, measured=measured, stages=(), links=links, wires=wires).verify()


def _mixed_in(profiles: Sequence[Profile], weights: Sequence[float], setting: Setting, share: float) -> Measured:
    """The mean of one setting; an op that the backend refuses at one size is refused."""
    parts = [profile.measured[setting] for profile in profiles]
    refused: Mapping[str, str] = {op: reason for part in parts for op, reason in part.refused.items()}
    ops = [op for op in profiles[0].signatures if op not in refused]

    def mean(values: Sequence[float]) -> Samples:
        return Samples((sum(weight * value for weight, value in zip(weights, values, strict=True)),))

    whole = [part.whole.median_s for part in parts if part.whole]
    alone = [part.alone.median_s for part in parts if part.alone]
    cut = parts[0].cut_s_per_byte
    return replace(
        parts[0],
        ops={op: mean([profile.op_s(op, *setting) for profile in profiles]) for op in ops},
        per="op",
        whole=mean(whole) if len(whole) == len(parts) and not refused else None,
        alone=mean(alone) if len(alone) == len(parts) and not refused else None,
        refused=refused,
        cut_s_per_byte=None if cut is None else cut * share,
        error=max((part.error for part in parts if part.error is not None), default=None),
        footprints={},
    )


def fastest_s(profile: Profile) -> float:
    """Seconds of the whole model in the fastest setting that takes all of it."""
    return min(profile.whole_s(*setting) for setting in profile.measured)
