"""Time a model at few sizes, by a program for each variant and by one that takes every size, and choose buckets for each way."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import psutil

from autosplit.backends.checking import model_reference, worst
from autosplit.deploying.networks import deploy
from autosplit.deploying.setup import Setup
from autosplit.errors import AutosplitError, BackendError, ProfileError, UsageError
from autosplit.memory.account import Account
from autosplit.memory.stages import uncapped
from autosplit.planning.baselines import UNCERTAIN, baseline_plan
from autosplit.running.pipeline import Pipeline
from autosplit.running.request import Tensors
from autosplit.serving.hostmanager import HostManager
from autosplit.shapes.buckets import MOST_VARIANTS, Buckets, Times, choose_buckets, fit_times, fixed_buckets
from autosplit.shapes.service import measured
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import At, Family
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision
from autosplit.values.shapes import Shapes, Traffic

ERROR = 0.15
"""A size whose seconds the fit misses by more than this share is added to it, and the buckets are chosen anew."""

MEMORY_SHARE = 0.5
"""Share of the free memory, where no device has a cap, that the variants of all stages and replicas may take."""

MOST_DYNAMIC = 1 << 12
"""As ``MOST_VARIANTS``, where one program takes every size, and a variant is only the layouts of a few tensors."""

Seconds = dict[tuple[int, ...], float]
"""Sizes to the seconds of a request."""


@dataclass(frozen=True)
class Way:
    """One way in which stages take several sizes.

    Attributes:
        dynamic: whether a stage is one program for every size, and not one for each variant.
        curves: backend to its measured seconds.
        times: the seconds of the fastest backend at each size, fitted.
        buckets: the buckets with the fewest expected seconds.
    """

    dynamic: bool
    curves: Mapping[str, Seconds]
    times: Times
    buckets: Buckets


def named(family: Family, sizes: tuple[int, ...]) -> At:
    """The sizes by the names of their dimensions."""
    return dict(zip(family.allowed, sizes, strict=True))


def require_early(family: Family, traffic: Traffic, setup: Setup) -> None:
    """Raise what ``choose_way`` would raise after all was measured: a size that cannot be traced, or too many exact sizes."""
    fixed_buckets(family.allowed, family.unpaddable, MOST_DYNAMIC if _is_free(family, setup) else MOST_VARIANTS)
    for at in _first_sizes(family, traffic, 2) if family.symbolic is None else ():
        family.at(named(family, at))


def _is_free(family: Family, setup: Setup) -> bool:
    """Whether stages may take every size in one program."""
    return family.symbolic is not None and setup.precision == "f32"


def choose_way(family: Family, traffic: Traffic, profile: Profile, machine: Machine, setup: Setup) -> tuple[Way, list[str]]:
    """The way with the fewest expected seconds, with its buckets; and notes on the other one and on backends that are left out.

    Each backend that may win is timed at few sizes in both ways, programs for variants at the ends first: where one program for
    every size is faster than they are by interpolation, no further one is made. One program for every size counts as better if it
    is as fast: it takes the memory of one.

    Raises: AutosplitError: no backend runs the model at all of these sizes. UsageError: too many sizes that may not be padded.
    """
    sizes, notes = _first_sizes(family, traffic, 2), list[str]()
    ranked, free = _ranked(profile), None
    most, limit = most_variants(family, machine, next(iter(ranked)))
    both = _is_free(family, setup)
    curves = _curves(family, ranked, sizes[:1] if both else sizes, machine, setup, notes)
    if both:
        with suppress(AutosplitError):
            more = _first_sizes(family, traffic, 4)  # which cost no program each
            timed = _curves(family, {name: ranked[name] for name in curves}, more, machine, setup, notes, dynamic=True)
            free = _bucketed(family, traffic, timed, machine, setup, MOST_DYNAMIC, dynamic=True)
    if most < MOST_VARIANTS:
        notes.append(f"{limit}, so that at most {most} variants are made")
    try:
        variants_s = 0.0 if free is None else _interpolated_s(family, traffic, curves, free, most)
        if free is not None and free.buckets.expected_s <= variants_s:
            return free, [*notes, _comparison(free, variants_s, "about ", "first")]
        if both and sizes[1:]:
            timed = _curves(family, {name: ranked[name] for name in curves}, sizes[1:], machine, setup, notes)
            curves = {name: {**curves[name], **found} for name, found in timed.items()}
        variants = _bucketed(family, traffic, curves, machine, setup, most)
    except UsageError:  # one program for every size may take requests that variants refuse
        if free is None:
            raise
        return free, notes
    if free is None:
        return variants, notes
    is_free = free.buckets.expected_s <= variants.buckets.expected_s
    told = _comparison(free, variants.buckets.expected_s, "", "first" if is_free else "second")
    return free if is_free else variants, [*notes, told]


def _comparison(free: Way, variants_s: float, how: str, taken: str) -> str:
    return (
        f"{1e3 * free.buckets.expected_s:.4g} ms a request by one program for every size, {how}{1e3 * variants_s:.4g} ms by a "
        f"program for each variant: the {taken} is taken"
    )


def _interpolated_s(family: Family, traffic: Traffic, curves: Mapping[str, Seconds], free: Way, most: int) -> float:
    """Expected seconds of a request by a program for each variant, of which ``curves`` has the smallest and the largest sizes.

    Between these, its gain over one program for every size is interpolated along the seconds of that program.
    Raises: UsageError: too many sizes that may not be padded.
    """
    own_s, free_s = _fastest(curves), _fastest(free.curves)
    low, high = (choose(own_s, key=own_s.__getitem__) for choose in (min, max))
    shares = {at: max(0.0, seconds - free_s[low]) / max(free_s[high] - free_s[low], 1e-12) for at, seconds in free_s.items()}
    times = fit_times({at: own_s[low] + share * (own_s[high] - own_s[low]) for at, share in shares.items()})
    return choose_buckets(times, traffic, family.allowed, exact=family.unpaddable, most=most).expected_s


def _fastest(curves: Mapping[str, Seconds]) -> Seconds:
    """The seconds of the fastest backend at each size."""
    return {at: min(curve[at] for curve in curves.values()) for at in next(iter(curves.values()))}


def _ranked(profile: Profile) -> dict[str, float]:
    """Backend to the seconds of the largest request on its fastest device, the fastest first.

    Raises: ProfileError: no backend takes all ops.
    """
    whole_s: dict[str, float] = {}
    for setting in profile.measured:
        whole_s[setting.backend] = min(whole_s.get(setting.backend, inf), profile.whole_s(*setting))
    found = {name: whole_s[name] for name in sorted(whole_s, key=whole_s.__getitem__) if whole_s[name] < inf}
    if not found:
        raise ProfileError(f"no backend takes all ops of '{profile.graph_name}'; add eager to the backends")
    return found


def _curves(
    family: Family,
    ranked: Mapping[str, float],
    sizes: Sequence[tuple[int, ...]],
    machine: Machine,
    setup: Setup,
    notes: list[str],
    dynamic: bool = False,
) -> dict[str, Seconds]:
    """Backend to the seconds of requests at these sizes and the largest ones; ``notes`` gets why backends are left out.

    Raises: AutosplitError: no backend runs the model at all of these sizes.
    """
    found, failures = dict[str, Seconds](), list[AutosplitError]()
    for backend, whole_s in ranked.items():
        if found and whole_s >= UNCERTAIN * ranked[next(iter(found))]:
            break
        try:
            found[backend] = _timed(family, backend, sizes, machine, setup, dynamic)
        except AutosplitError as failure:
            failures.append(failure)
            how = "in one program" if dynamic else "by a program for each"
            notes.append(f"{backend} does not run the model at all sizes {how}: {failure}")
    if not found:
        raise failures[0]
    return found


def _timed(
    family: Family, backend: str, sizes: Sequence[tuple[int, ...]], machine: Machine, setup: Setup, dynamic: bool
) -> Seconds:
    """Seconds of requests at these sizes and the largest ones, on the whole model on the first device.

    Raises: AutosplitError: the backend does not run it. BackendError: one program for every size gives wrong numbers.
    """
    one = family.only([named(family, at) for at in sizes])
    plan = replace(_whole(one.variants[0], backend, machine), precision=setup.precision)
    if dynamic:
        plan = replace(plan, shapes=Shapes({}, {}, {}, dynamic=(backend,)))
    assert setup.workspace is not None
    with HostManager(engine_factory=Pipeline if setup.hosts is None else setup.hosts.engine_factory()) as host:
        engine = deploy(host, backend, one, plan, uncapped(machine), setup.workspace)
        checked = {"check": partial(_require_right, setup.precision)} if dynamic else {}
        return {tuple(bucket.sizes.values()): bucket.seconds for bucket in measured(one, engine, **checked)}


def _require_right(precision: Precision, traced: Traced, sizes: At, answer: Tensors) -> None:
    """Raises: BackendError: an answer differs from the model's by more than is allowed."""
    reference = model_reference(traced, traced.example_inputs)
    error, limit = worst(reference.program, [answer], reference.outputs), reference.tolerance(precision)
    if not error.relative <= limit:
        at = ", ".join(f"{dim} {size}" for dim, size in sizes.items())
        raise BackendError(f"output '{error.output}' at {at} is off by {error.relative:.2g}, and {limit:.2g} is allowed")


def _whole(traced: Traced, backend: str, machine: Machine) -> Plan:
    ops = tuple(op.name for op in traced.graph.ops)
    return baseline_plan(traced.graph, traced.source, "whole", backend, [(ops, machine.devices[:1])])


def _bucketed(
    family: Family,
    traffic: Traffic,
    curves: Mapping[str, Seconds],
    machine: Machine,
    setup: Setup,
    most: int,
    dynamic: bool = False,
) -> Way:
    """Fit the seconds, and choose buckets; then check the fit at the bucket that counts most, and refine it.

    A fit to more sizes than it has terms is checked by these.
    """
    choose = partial(
        choose_buckets, traffic=traffic, allowed=family.allowed, exact=family.unpaddable, most=most, each_size=dynamic
    )
    known_s = _fastest(curves)
    times = fit_times(known_s)
    buckets = choose(times)
    homes = _seconds_by_home(buckets, times, traffic)
    home = max(homes, key=homes.__getitem__)
    is_checked = len(known_s) > len(times.coefficients) and times.error <= ERROR
    if home not in known_s and not is_checked:
        backend = min(curves, key=lambda name: sum(curves[name].values()))
        fitted_s, known_s[home] = times.seconds(home), _timed(family, backend, [home], machine, setup, dynamic)[home]
        times = fit_times(known_s)
        if abs(fitted_s / known_s[home] - 1) > ERROR:
            buckets = choose(times)
    return Way(dynamic, curves, times, buckets)


def _first_sizes(family: Family, traffic: Traffic, count: int) -> list[tuple[int, ...]]:
    """Sizes to measure beside the largest ones: ``count`` in each dimension, at equal ratios from the smallest that come."""
    found, largest = list[tuple[int, ...]](), tuple(family.largest.values())
    for number in range(count):
        sizes = []
        for dim, allowed in family.allowed.items():
            least = next(iter(traffic.along(dim)))
            wanted = least * (allowed[-1] / least) ** (number / count)
            sizes.append(next(size for size in allowed if size >= wanted * (1 - 1e-9)))
        found.append(tuple(sizes))
    return [sizes for sizes in dict.fromkeys(found) if sizes != largest]


def _seconds_by_home(buckets: Buckets, times: Times, traffic: Traffic) -> dict[tuple[int, ...], float]:
    """The share of the expected seconds that each bucket takes."""
    found: dict[tuple[int, ...], float] = {}
    for sizes, share in traffic.shares.items():
        home = buckets.home(sizes)
        found[home] = found.get(home, 0.0) + share * times.seconds(home)
    return found


def most_variants(family: Family, machine: Machine, backend: str) -> tuple[int, str]:
    """How many variants memory allows on a backend, counted as if each took as much as the largest one; and the limit.

    A variant takes its values and its program, with the weights on a backend that packs them for each. Several programs share the
    buffers of their backend. Without caps there is a replica of all on each device.
    """
    largest = family.variants[0]
    values, plan = values_of(largest), _whole(largest, backend, machine)
    counts = [Account(largest.graph, replace(values, others=(values.num_bytes,) * more)).counted(plan) for more in (1, 2)]
    two, three = (found.stages[0].memory for found in counts)
    assert two is not None and three is not None
    program_bytes = three.backend_bytes - two.backend_bytes
    capped = [device for device in machine.devices if device.memory_bytes is not None]
    free = min((device.memory_bytes or 0 for device in capped), default=0) * len(capped)
    if not capped:
        free = round(MEMORY_SHARE * psutil.virtual_memory().available / len(machine.devices))
    own_bytes = program_bytes + two.arena_bytes + two.ring_bytes
    most = (free - two.weight_bytes - max(1, len(capped)) * (two.backend_bytes - 2 * program_bytes)) // max(own_bytes, 1)
    return max(1, min(MOST_VARIANTS, most)), f"a variant takes {own_bytes / 1e6:.0f} MB on {backend}"
