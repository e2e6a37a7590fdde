"""A model is timed at few sizes, buckets are chosen, and ops get their mean seconds under the traffic.

So the planner cuts for the traffic, and not for the longest request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autosplit.backends.workspace import Workspace
from autosplit.deploying.setup import Setup
from autosplit.errors import TraceError
from autosplit.progress import progress_shown
from autosplit.shapes.buckets import MOST_VARIANTS, Buckets, Times
from autosplit.shapes.timing import Seconds, Way, choose_way, named, require_early
from autosplit.tracing.family import Family
from autosplit.tracing.freesizes import freed
from autosplit.tracing.splitting import split
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Samples, Setting
from autosplit.values.shapes import Shapes, Traffic, even_traffic, sizes_text, thinned


def measure_sizes(
    family: Family, traffic: Traffic | None, machine: Machine, setup: Setup, measure: Callable[..., Profile]
) -> Profile:
    """The mean seconds of each op under the traffic, with the buckets in ``shapes``.

    Ops are measured at the largest sizes. At few others the whole model is timed, and the rest is fitted; the fit is checked at
    the bucket that counts most, and refined.

    Args:
        traffic: how often each size comes; None for all sizes alike.
        setup: as for ``measure``.
        measure: ``api.measure``.
    Raises: UsageError: sizes of the traffic that are not allowed, or too many that may not be padded; ``max_error``.
    """
    setup.require_one_precision()
    flow = (traffic or even_traffic(family.allowed)).verify(family.allowed)
    require_early(family, flow, setup)
    with progress_shown(setup.progress) as progress, Workspace() as own:
        setup = replace(setup, progress=progress, workspace=setup.workspace or own)
        profile = measure(family.variants[0], machine, setup=setup)
        way, notes = choose_way(family, flow, profile, profile.usable(machine), setup)
    points = list(next(iter(way.curves.values())))
    weights = weights_of(way.buckets, way.times, flow, points)
    shares = [_point(family, at, weight, way.curves) for at, weight in zip(points, weights, strict=True)]
    found = mixed(profile, shares)
    return replace(found, shapes=_section(family, way), notes=(*found.notes, way.buckets.sentence, *notes))


def _section(family: Family, way: Way) -> Shapes:
    buckets = way.buckets
    return replace(
        _with_buckets(family, buckets.grid),
        expected_s=buckets.expected_s,
        exact_s=buckets.exact_s,
        longest_s=buckets.longest_s,
        dynamic=tuple(way.curves) if way.dynamic else (),
    )


def _with_buckets(family: Family, buckets: Mapping[str, tuple[int, ...]]) -> Shapes:
    dims = {name: dict(axes) for name, axes in family.shapes.items()}
    sizes = {dim: sizes_text(found) for dim, found in family.allowed.items()}
    return Shapes(dims, sizes, dict(buckets), unpaddable=dict(family.unpaddable))


def shapes_of(family: Family, plan: Plan, shapes: Shapes | None) -> Shapes:
    """The sizes of a plan: with a program for each of fewer variants, where one of its stages cannot take every size.

    Without ``shapes``, from times, there is a bucket of each size of the family's variants.
    """
    if shapes is None:
        return _with_buckets(family, {dim: tuple(sorted({at[dim] for at in family.sizes})) for dim in family.allowed})
    if not shapes.dynamic or family.symbolic is None:
        return shapes
    try:
        for program in split(family.variants[0], [stage.ops for stage in plan.stages]):
            freed(program, family.symbolic)
    except TraceError:
        few = thinned(shapes.buckets, MOST_VARIANTS, shapes.unpaddable)
        return replace(shapes, buckets={dim: tuple(found) for dim, found in few.items()}, dynamic=())
    return shapes


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
    graph, largest, ends = family.at(named(family, at)).graph, family.variants[0].graph, tuple(family.largest.values())
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
    kept = [setting for setting in profile.measured if setting.backend in points[0].seconds]
    mean = {setting: _mixed_in(profile, setting, points, share) for setting in kept}
    return replace(with_fewer_bytes(profile, share), measured=mean, stages=()).verify()


def with_fewer_bytes(profile: Profile, share: float) -> Profile:
    """The profile whose links and wires take the seconds of this share of the bytes of the largest graph."""
    links = tuple(
        replace(
            link,
            send_s_per_byte=link.send_s_per_byte * share,
            receive_s_per_byte=link.receive_s_per_byte * share,
        )
        for link in profile.links
    )
    return replace(profile, links=links, wires=tuple(replace(wire, s_per_byte=wire.s_per_byte * share) for wire in profile.wires))


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
