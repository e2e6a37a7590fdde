"""The sizes that the requests of a service may have, and how often each comes. No torch.

A *dimension* has a name, such as ``seq``; its *sizes* are a ``range`` or a tuple of single numbers.
"""

import csv
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from math import prod
from pathlib import Path

from autosplit.arguments import checked
from autosplit.errors import SHOWN_FAULTS, UsageError, raise_faults
from autosplit.files import read_data, write_atomic

Sizes = Sequence[int]
"""The sizes of a dimension, ascending: a ``range``, or a tuple of single numbers."""

COUNT = "count"
"""The column of a file of traffic that says how often the sizes of a row came."""

MAX_SIZE, MAX_LISTED, MAX_ROWS = 1 << 24, 1 << 12, 1 << 20
"""The largest size, most sizes in a list, and most rows of a file of traffic."""

MAX_EVEN = 1 << 12
"""Most combinations of sizes that stand for traffic with all sizes alike; of more, some are taken at equal distances."""


def parse_sizes(text: str | Sizes) -> Sizes:
    """The sizes in ``16..512`` (all from 16 to 512), ``8,16,32`` or ``128``; a range or a sequence is checked and kept.

    Raises: UsageError: a number is missing, below 1 or above ``MAX_SIZE``, or the numbers do not ascend.

    >>> parse_sizes("16..512"), parse_sizes("8,16,32"), parse_sizes([4, 5])
    (range(16, 513), (8, 16, 32), (4, 5))
    """
    fault = f"sizes {text!r:.60} are not a range such as 16..512, and not ascending numbers such as 8,16,32"
    if not isinstance(text, str):
        found = text if isinstance(text, range) else tuple(text)
    else:
        first, dots, last = text.partition("..")
        try:
            found = range(int(first), int(last) + 1) if dots else tuple(int(part) for part in text.split(","))
        except ValueError:
            raise UsageError(fault) from None
    if isinstance(found, range) and not found:
        raise UsageError(f"{fault}; the first number is above the last one")
    if not found or (not isinstance(found, range) and len(found) > MAX_LISTED):
        raise UsageError(f"{fault}; at least 1 and at most {MAX_LISTED} single numbers are needed")
    if not all(type(size) is int for size in (found[:1] if isinstance(found, range) else found)):
        raise UsageError(fault)
    ascends = found.step > 0 if isinstance(found, range) else all(a < b for a, b in pairwise(found))
    if not ascends or found[0] < 1 or found[-1] > MAX_SIZE:
        raise UsageError(f"{fault}; a size is at least 1 and at most {MAX_SIZE}")
    return found


def sizes_text(sizes: Sizes) -> str:
    """The inverse of ``parse_sizes``.

    >>> sizes_text(range(16, 513)), sizes_text((8, 16)), sizes_text(range(4, 5))
    ('16..512', '8,16', '4')
    """
    is_range = isinstance(sizes, range) and sizes.step == 1 and len(sizes) > 1
    return f"{sizes[0]}..{sizes[-1]}" if is_range else ",".join(map(str, sizes))


def size_fault(name: str, size: int, sizes: Sizes) -> str:
    """Why a request of this size is refused, '' if it is not.

    >>> size_fault("seq", 600, range(16, 513))
    "'seq' is 600, and sizes are 16..512; trace or search again with --seq-len 16..600 (sizes={'seq': '16..600'})"
    >>> size_fault("batch", 0, range(1, 17)), size_fault("seq", 16, range(16, 513))
    ("the request is empty: 'batch' is 0, and sizes are 1..16", '')
    >>> size_fault("x", 5, (4, 8))
    "'x' is 5, and sizes are 4,8; trace or search again with sizes={'x': '4,5,8'}"
    """
    if size in sizes:
        return ""
    if size < 1:
        return f"the request is empty: '{name}' is {size}, and sizes are {sizes_text(sizes)}"
    within = sizes[0] <= size <= sizes[-1]
    wider = sizes_text(sorted([*sizes, size])) if within else f"{min(size, sizes[0])}..{max(size, sizes[-1])}"
    flag = {"seq": "--seq-len", "batch": "--batch"}.get(name, "")
    way_out = f"with {flag} {wider} (sizes={{'{name}': '{wider}'}})" if flag else f"with sizes={{'{name}': '{wider}'}}"
    return f"'{name}' is {size}, and sizes are {sizes_text(sizes)}; trace or search again {way_out}"


@checked
@dataclass(frozen=True)
class Traffic:
    """How often requests of each size come.

    Attributes:
        dims: the names of the dimensions.
        counts: one size for each dimension to the number of requests, in any unit.

    >>> Traffic(("seq",), {(7,): 3, (20,): 1}).shares
    {(7,): 0.75, (20,): 0.25}
    """

    dims: tuple[str, ...]
    counts: Mapping[tuple[int, ...], float]

    @cached_property
    def shares(self) -> dict[tuple[int, ...], float]:
        """The share of the requests with each size."""
        total = sum(self.counts.values())
        return {sizes: count / total for sizes, count in self.counts.items() if count}

    def along(self, dim: str) -> dict[int, float]:
        """The share of the requests by their size in one dimension, ascending."""
        at, found = self.dims.index(dim), dict[int, float]()
        for sizes, share in self.shares.items():
            found[sizes[at]] = found.get(sizes[at], 0.0) + share
        return dict(sorted(found.items()))

    def verify(self, allowed: Mapping[str, Sizes]) -> "Traffic":
        """Return the traffic by all dimensions of ``allowed``, in their order; by those that it lacks, all sizes are alike.

        Raises: UsageError: with every fault: unknown dimensions, sizes that are not allowed, counts below 0, no requests.
        """
        if not set(self.dims) <= set(allowed):
            raise UsageError(f"traffic is by {', '.join(self.dims)}, and the dimensions are {', '.join(allowed)}")
        faults = [
            f"requests of {sizes} are counted {count} times" for sizes, count in self.counts.items() if not 0 <= count < 1e18
        ]
        if not any(count > 0 for count in self.counts.values()):
            faults.append("it holds no requests")
        wrong = {
            (name, size)
            for sizes in self.counts
            for name, size in zip(self.dims, sizes, strict=True)
            if size not in allowed[name]
        }
        listed = sorted(wrong)[: SHOWN_FAULTS + 1]
        faults += [size_fault(name, size, allowed[name]) for name, size in listed]
        raise_faults(UsageError, "traffic does not fit the sizes", faults)
        absent = {name: sizes for name, sizes in allowed.items() if name not in self.dims}
        order = [(*self.dims, *absent).index(name) for name in allowed]
        rest = even_traffic(absent, MAX_EVEN // len(self.counts)).counts
        both = ((sizes + others, count) for sizes, count in self.counts.items() for others in rest)
        return Traffic(tuple(allowed), {tuple(sizes[at] for at in order): count for sizes, count in both})


def even_traffic(allowed: Mapping[str, Sizes], most: int = MAX_EVEN) -> Traffic:
    """Traffic with all sizes alike; of more than ``most`` combinations, some (see ``thinned``)."""
    return Traffic(tuple(allowed), dict.fromkeys(product(*thinned(allowed, most).values()), 1.0))


def thinned(allowed: Mapping[str, Sizes], most: int, kept: Collection[str] = ()) -> dict[str, Sizes]:
    """Sizes at equal distances, the largest among them, of which there are at most ``most`` combinations.

    The dimensions ``kept`` keep all of their sizes, even if these alone have more combinations.

    >>> thinned({"batch": (1, 2), "seq": range(2, 9)}, 8)
    {'batch': (1, 2), 'seq': range(2, 10, 2)}
    """
    found = dict(allowed)
    while prod(map(len, found.values())) > most:
        longest = max((name for name in found if name not in kept), key=lambda name: len(found[name]), default=None)
        if longest is None or len(found[longest]) == 1:
            break
        found[longest] = found[longest][::-2][::-1]
    return found


@checked
def read_traffic(path: str | Path, dims: Sequence[str]) -> Traffic:
    """Read a file of traffic: comma-separated numbers, a row for each request or each size.

    The first row may name the columns: dimensions, and ``count``. Without it a row is one size in each of ``dims``, with an
    optional count behind; a lone number is a size in the last of ``dims``.

    Raises: UsageError: the file cannot be read, or with every row that is wrong.
    """
    path = Path(path)
    text = read_data(path, "traffic", UsageError, str)
    rows = [row for row in csv.reader(text.splitlines()) if any(map(str.strip, row))]
    if not rows or len(rows) > MAX_ROWS:
        raise UsageError(f"traffic file '{path}' has {len(rows)} rows, and 1 to {MAX_ROWS} are needed")
    columns = [cell.strip() for cell in rows[0]]
    if all(cell.replace(".", "", 1).isdigit() for cell in columns):
        columns = [*dims, COUNT] if len(columns) > len(dims) else list(dims)[-len(columns) :]
    else:
        rows = rows[1:]
    known = [name for name in dims if name in columns]
    if not known or set(columns) - {*dims, COUNT} or len(set(columns)) < len(columns):
        raise UsageError(f"traffic file '{path}' has columns {', '.join(columns)}, and may have {', '.join([*dims, COUNT])}")
    counts, faults = dict[tuple[int, ...], float](), []
    for number, row in enumerate(rows, 1):
        try:
            named = dict(zip(columns, row, strict=True))
            sizes = tuple(int(named[name]) for name in known)
            counts[sizes] = counts.get(sizes, 0.0) + float(named.get(COUNT, 1))
        except ValueError:
            faults.append(f"row {number} of numbers is {','.join(row)!r:.60}; {len(columns)} numbers are needed")
    raise_faults(UsageError, f"traffic file '{path}' is wrong", faults)
    return Traffic(tuple(known), counts)


def write_traffic(traffic: Traffic, path: Path) -> None:
    """Write a file for ``read_traffic``: a row for each size, with its count."""
    rows = [",".join(map(str, (*sizes, f"{count:g}"))) for sizes, count in sorted(traffic.counts.items())]
    write_atomic(path, "\n".join([",".join((*traffic.dims, COUNT)), *rows]) + "\n")


def variants_of(grid: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """The sizes of each combination of buckets, the largest first. ``grid``: dimension to its buckets, ascending.

    >>> variants_of({"batch": [1, 4], "seq": [16]})
    [{'batch': 4, 'seq': 16}, {'batch': 1, 'seq': 16}]
    """
    return [dict(zip(grid, sizes, strict=True)) for sizes in product(*(found[::-1] for found in grid.values()))]


@dataclass(frozen=True)
class Shapes:
    """The part of a plan that says which sizes its requests have.

    Attributes:
        dims: parameter of the model to axis to dimension.
        sizes: dimension to its sizes, as in ``parse_sizes``.
        buckets: dimension to the sizes of its buckets, ascending; each combination is a variant of every stage.
        expected_s: expected seconds of a request on one device, padded to its bucket.
        exact_s, longest_s: the same at its own sizes, and padded to the largest ones.
        unpaddable: dimension to the reason why padding along it changes answers.
        dynamic: the backends whose stages take every size in one program, in place of a program for each variant.
    """

    dims: Mapping[str, Mapping[int, str]]
    sizes: Mapping[str, str]
    buckets: Mapping[str, tuple[int, ...]]
    expected_s: float = 0.0
    exact_s: float = 0.0
    longest_s: float = 0.0
    unpaddable: Mapping[str, str] = field(default_factory=dict)
    dynamic: tuple[str, ...] = ()

    @property
    def variants(self) -> list[dict[str, int]]:
        """The sizes of each variant, the largest first."""
        return variants_of(self.buckets)

    @property
    def longest(self) -> "Shapes":
        """The same with one bucket, to which every request is padded."""
        return replace(
            self, buckets={dim: found[-1:] for dim, found in self.buckets.items()}, expected_s=self.longest_s, dynamic=()
        )

    @property
    def faults(self) -> list[str]:
        """A sentence for each dimension whose sizes cannot be parsed, or whose buckets do not cover its sizes."""
        found = []
        for dim, text in self.sizes.items():
            try:
                sizes = parse_sizes(text)
            except UsageError as failure:
                found.append(f"shapes: '{dim}': {failure}")
                continue
            buckets = self.buckets.get(dim, ())
            if not buckets or list(buckets) != sorted(set(buckets)) or buckets[-1] != sizes[-1] or not set(buckets) <= set(sizes):
                wanted = f"ascending sizes of {text}, and the largest of them"
                found.append(f"shapes: the buckets of '{dim}' are {list(buckets)}, and they must be {wanted}")
        if unknown := {*self.buckets, *(dim for axes in self.dims.values() for dim in axes.values())} - set(self.sizes):
            found.append(f"shapes: no sizes are given for {', '.join(sorted(unknown))}")
        return found
