"""Profiles of a model at several sizes become one, for a planner that cuts for the traffic and not for the longest request."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autosplit.shapes.buckets import Buckets, Times
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Samples, Setting
from autosplit.values.shapes import Traffic


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
