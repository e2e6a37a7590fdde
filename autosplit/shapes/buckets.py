"""Choose the sizes of variants, so that requests padded to the next larger one take the fewest expected seconds. No torch.

Along one dimension a dynamic program finds the best k buckets: the optimal partition of sorted values into k groups (Fisher, "On
grouping for maximum homogeneity", 1958), here with the seconds of a group's largest size as its cost. It takes O(k m^2) steps for
m sizes. With several dimensions buckets are a grid, and the program runs along one dimension at a time, the
others fixed, until nothing changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from autosplit.errors import UsageError
from autosplit.values.shapes import Sizes, Traffic, sizes_text, thinned, variants_of

LEAST_GAIN = 0.03
"""One more bucket must save at least this share of the expected seconds."""

MOST_VARIANTS = 16
"""Most variants of a stage. Each is loaded at the start, and takes memory beside the weights."""

MOST_LISTED = 16
"""Buckets of a dimension that a sentence lists."""


@dataclass(frozen=True)
class Times:
    """Seconds of a request as a function of its sizes, fitted to measurements.

    The terms are a constant, the product of all sizes (the elements of a request), and that product times each size (attention
    within a dimension). No coefficient is negative, so that a larger request never takes less time.

    Attributes:
        coefficients: one for each term.
        measured: sizes to measured seconds.
    """

    coefficients: tuple[float, ...]
    measured: Mapping[tuple[int, ...], float]

    def seconds(self, sizes: Sequence[int]) -> float:
        """Seconds of a request of these sizes."""
        return float(np.dot(_terms(sizes), self.coefficients))

    @property
    def error(self) -> float:
        """The largest error of the fit, as a share of the measured seconds."""
        return max(abs(self.seconds(sizes) / measured_s - 1) for sizes, measured_s in self.measured.items())


def fit_times(measured: Mapping[tuple[int, ...], float]) -> Times:
    """The times with the least relative squared errors and no negative coefficient: the best fit of any subset of the terms.

    >>> times = fit_times({(16,): 1.0, (32,): 2.0, (64,): 4.0})
    >>> round(times.seconds((48,)), 6)
    3.0
    """
    rows = np.array([_terms(sizes) for sizes in measured]) / np.array(list(measured.values()))[:, None]
    scale = rows.max(axis=0)
    num_terms, best, least = rows.shape[1], np.zeros(rows.shape[1]), inf
    for chosen in product([False, True], repeat=num_terms):
        found = np.zeros(num_terms)
        found[list(chosen)] = np.linalg.lstsq((rows / scale)[:, chosen], np.ones(len(measured)))[0]
        error = float(((rows / scale) @ found - 1) @ ((rows / scale) @ found - 1))
        if found.min() >= 0 and error < least:
            best, least = found, error
    return Times(tuple(map(float, best / scale)), dict(measured))


def _terms(sizes: Sequence[int]) -> list[float]:
    elements = prod(sizes)
    return [1.0, elements, *(elements * size for size in sizes)]


@dataclass(frozen=True)
class Buckets:
    """The sizes of the variants, and the cost of padding to them.

    Attributes:
        grid: dimension to the sizes of its buckets, ascending; each combination is a variant.
        expected_s: expected seconds of a request.
        exact_s: the same if each request had a variant of its own sizes.
        longest_s: the same if each request were padded to the largest sizes.
        next_gain: the share of ``expected_s`` that one more bucket would save; 0 where none can be added.
        limit: why there are no more buckets.
    """

    grid: Mapping[str, tuple[int, ...]]
    expected_s: float
    exact_s: float
    longest_s: float
    next_gain: float
    limit: str

    @property
    def variants(self) -> list[dict[str, int]]:
        """The sizes of each variant, the largest first."""
        return variants_of(self.grid)

    @property
    def waste(self) -> float:
        """The share of the expected seconds that padding takes."""
        return 1 - self.exact_s / self.expected_s

    def home(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The bucket of a request."""
        return tuple(
            min(bucket for bucket in found if bucket >= size) for found, size in zip(self.grid.values(), sizes, strict=True)
        )

    @property
    def sentence(self) -> str:
        """The buckets and their cost in words."""
        grid = "; ".join(f"{dim} {_few(found)}" for dim, found in self.grid.items())
        return (
            f"buckets: {grid}: {self.waste:.0%} of the expected seconds are padding, {1 - self.exact_s / self.longest_s:.0%} if "
            f"all requests were padded to the longest; one more bucket would save {self.next_gain:.1%} ({self.limit})"
        )


def _few(sizes: Sequence[int]) -> str:
    """All of a few sizes; of more their number, the least and the largest.

    >>> _few([8, 16]), _few(range(1, 21))
    ('8, 16', '20 sizes from 1 to 20')
    """
    return ", ".join(map(str, sizes)) if len(sizes) <= MOST_LISTED else f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}"


def choose_buckets(
    times: Times,
    traffic: Traffic,
    allowed: Mapping[str, Sizes],
    *,
    exact: Mapping[str, str] | None = None,
    most: int = MOST_VARIANTS,
    each_size: bool = False,
) -> Buckets:
    """The buckets with the fewest expected seconds, as many as each saves the share ``LEAST_GAIN`` of them.

    Args:
        times: seconds of a request.
        traffic: how often each size comes; its dimensions are those of ``allowed``, in their order.
        allowed: dimension to the sizes that requests may have: the largest is always a bucket.
        exact: dimension to the reason why it may not be padded: each of its allowed sizes is a bucket.
        most: most variants, as memory allows.
        each_size: make a bucket of each size, useful or not; of more than ``most`` combinations, of some (``thinned``).
    Raises: UsageError: sizes that may not be padded need more than ``most`` variants.
    """
    fixed = fixed_buckets(allowed, exact or {}, most)
    grid = {dim: fixed.get(dim, (sizes[-1],)) for dim, sizes in allowed.items()}
    if each_size:
        grid = {dim: tuple(sizes) for dim, sizes in thinned(allowed, most, fixed).items()}
    exact_s = sum(share * times.seconds(sizes) for sizes, share in traffic.shares.items())
    longest_s = times.seconds([sizes[-1] for sizes in allowed.values()])
    expected_s, limit, gain = _expected_s(times, traffic, grid), "", 0.0
    while not limit:
        tried = [
            _settled(times, traffic, {**grid, dim: best_along(times, traffic, grid, dim, len(grid[dim]) + 1)}, fixed)
            for dim in grid
            if dim not in fixed and not traffic.along(dim).keys() <= set(grid[dim])
        ]
        costs = [_expected_s(times, traffic, one) for one in tried]
        best_s = min(costs, default=expected_s)
        gain = 1 - best_s / expected_s
        if not tried:
            limit = "there are no more sizes"
        elif gain < LEAST_GAIN:
            limit = f"less than {100 * LEAST_GAIN:g}%"
        elif prod(map(len, tried[costs.index(best_s)].values())) > most:
            limit = f"at most {most} variants"
        else:
            grid, expected_s = tried[costs.index(best_s)], best_s
    return Buckets(grid, expected_s, exact_s, longest_s, gain, limit)


def fixed_buckets(allowed: Mapping[str, Sizes], exact: Mapping[str, str], most: int) -> dict[str, tuple[int, ...]]:
    """The buckets of dimensions with one for each size; arguments and errors as for ``choose_buckets``."""
    fixed = {dim: tuple(sizes) for dim, sizes in allowed.items() if dim in exact or len(sizes) == 1}
    needed = prod(map(len, fixed.values()))
    if needed > most:
        raise UsageError(
            f"{'; '.join(exact.values())}. So each size needs a variant of its own: {needed} for "
            f"{', '.join(f'{dim} {sizes_text(allowed[dim])}' for dim in exact)}, and at most {most} are made. "
            "Give the sizes that come, such as --seq-len 32,64,128"
        )
    return fixed


def _settled(
    times: Times, traffic: Traffic, grid: Mapping[str, tuple[int, ...]], fixed: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The grid with the best buckets along each dimension, given the others."""
    found, known_s = dict(grid), inf
    while (cost_s := _expected_s(times, traffic, found)) < known_s:
        known_s = cost_s
        for dim in found:
            if dim not in fixed and len(found) - len(fixed) > 1:
                found[dim] = best_along(times, traffic, found, dim, len(found[dim]))
    return found


def _expected_s(times: Times, traffic: Traffic, grid: Mapping[str, tuple[int, ...]]) -> float:
    """Expected seconds of a request that is padded to its bucket."""
    buckets = Buckets(grid, 1.0, 1.0, 1.0, 0.0, "")
    return sum(share * times.seconds(buckets.home(sizes)) for sizes, share in traffic.shares.items())


def best_along(
    times: Times, traffic: Traffic, grid: Mapping[str, tuple[int, ...]], dim: str, num_buckets: int
) -> tuple[int, ...]:
    """The best ``num_buckets`` buckets of a dimension, the largest kept, given the buckets of the others."""
    at = traffic.dims.index(dim)
    ends = sorted(traffic.along(dim).keys() | {grid[dim][-1]})
    place = {size: number for number, size in enumerate(ends)}
    buckets = Buckets({**grid, dim: (ends[-1],)}, 1.0, 1.0, 1.0, 0.0, "")
    homes: dict[tuple[int, ...], NDArray[np.float64]] = {}
    for sizes, share in traffic.shares.items():
        home = buckets.home(sizes)
        homes.setdefault(home, np.zeros(len(ends)))[place[sizes[at]]] += share
    # costs[first, last]: seconds of all requests from ends[first] to ends[last], each padded to ends[last]
    costs = np.zeros((len(ends), len(ends)))
    for home, shares in homes.items():
        sums = np.concatenate([[0.0], np.cumsum(shares)])
        padded_s = np.array([times.seconds((*home[:at], end, *home[at + 1 :])) for end in ends])
        costs += (sums[None, 1:] - sums[:-1, None]) * padded_s[None, :]
    costs[np.tril_indices(len(ends), -1)] = inf
    return tuple(ends[last] for last in partition(costs, num_buckets))


def partition(costs: NDArray[np.float64], num_groups: int) -> list[int]:
    """The last places of the groups of a row of values, with the least sum of costs.

    Args:
        costs: ``costs[first, last]`` of a group from place ``first`` to ``last``, both included; infinite if ``first > last``.
        num_groups: at least 1; fewer groups are made of fewer values.

    >>> partition(np.array([[0.0, 9.0, 9.0], [np.inf, 0.0, 1.0], [np.inf, np.inf, 0.0]]), 2)
    [0, 2]
    """
    num = len(costs)
    best, choices = costs[0], []
    for _ in range(min(num_groups, num) - 1):
        totals = np.full((num, num), inf)
        totals[1:] = best[:-1, None] + costs[1:]  # totals[first, last]: the last group begins at first
        choices.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
    last, ends = num - 1, []
    for choice in reversed(choices):
        ends.append(last)
        last = int(choice[last]) - 1
    return [*([last] if last >= 0 else []), *reversed(ends)]
