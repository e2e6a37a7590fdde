"""Which waiting requests to join, and at which sizes to run them: the choice that saves most of the seconds they take alone.

::

    waiting   7 tokens, 400 tokens, 12 tokens          variants   1 x 16   1 x 512   4 x 16   4 x 512
    taken     7 and 12 tokens at 4 x 16                           2 ms     60 ms     5 ms     230 ms

Two requests at 4 x 16 take 5 ms in place of 4 ms alone, and all three at 4 x 512 take 230 ms in place of 64 ms: here each runs
alone. With four short ones that wait, 4 x 16 takes 5 ms in place of 8 ms, and they are joined.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from autosplit.arguments import checked
from autosplit.errors import UsageError
from autosplit.running.request import Tensors
from autosplit.shapes.rowcheck import require_independent_rows
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import At, Family
from autosplit.tracing.padding import cut
from autosplit.tracing.verifying import distinct_inputs

MOST_LOOKED = 64
"""Waiting requests that are looked at for one batch."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes of a variant, and the measured seconds of a request that fills it."""

    variant: int
    sizes: At
    seconds: float


class Asked(NamedTuple):
    """The sizes of a request, and its seconds in the fastest bucket that holds it."""

    sizes: At
    alone_s: float


@dataclass(frozen=True)
class Grid:
    """The buckets of a service as arrays, as every choice looks at all of them.

    Attributes:
        buckets: the variants.
        dims: the names of the dimensions.
        sizes: bucket and dimension to its size.
        steps: for each dimension its different sizes, ascending, and the place among them of each bucket's.
        seconds: bucket to the seconds of a request that fills it.
        is_exact: dimension to whether it must not be padded.
        rows: the dimension along which requests are joined; None joins none.
    """

    buckets: Sequence[Bucket]
    dims: tuple[str, ...]
    sizes: NDArray[np.int64]
    steps: Sequence[tuple[NDArray[np.int64], NDArray[np.intp]]]
    seconds: NDArray[np.float64]
    is_exact: NDArray[np.bool_]
    rows: str | None

    @classmethod
    def of(cls, buckets: Sequence[Bucket], rows: str | None = None, exact: Collection[str] = ()) -> "Grid":
        """The arrays of some buckets, which have the same dimensions."""
        dims = tuple(buckets[0].sizes)
        sizes = np.array([[bucket.sizes[dim] for dim in dims] for bucket in buckets])
        seconds, is_exact = np.array([bucket.seconds for bucket in buckets]), np.array([dim in exact for dim in dims], bool)
        return cls(buckets, dims, sizes, [np.unique(one, return_inverse=True) for one in sizes.T], seconds, is_exact, rows)

    def holding(self, requests: Sequence[At]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """The places of buckets that hold the first request, and for each request and place whether that holds the request alone.

        Of thousands of buckets only few are taken: along each dimension but that of rows, those of the largest size and of the
        next one to each request.
        """
        wanted = np.array([[sizes[dim] for dim in self.dims] for sizes in requests])
        near = np.ones(len(self.buckets), bool)
        for dim, (steps, places), sizes in zip(self.dims, self.steps, wanted.T, strict=True):
            if dim != self.rows:
                next_to = np.zeros(len(steps), bool)
                next_to[steps[:-1].searchsorted(sizes)] = next_to[-1] = True
                near &= next_to[places]
        places = np.flatnonzero(near)
        there, wanted = self.sizes[places], wanted[:, None, :]
        held = np.all(np.where(self.is_exact, wanted == there, wanted <= there), axis=2)
        return places[held[0]], held[:, held[0]]


def asked(grid: Grid, sizes: At) -> Asked | None:
    """A request of these sizes; None if no bucket holds it.

    >>> found = [Bucket(0, {"seq": 64}, 0.3), Bucket(1, {"seq": 16}, 0.1), Bucket(2, {"seq": 32}, 0.2)]
    >>> asked(Grid.of(found), {"seq": 20}), asked(Grid.of(found, exact=["seq"]), {"seq": 20})
    (Asked(sizes={'seq': 20}, alone_s=0.2), None)
    """
    places, _ = grid.holding([sizes])
    return Asked(sizes, float(grid.seconds[places].min())) if len(places) else None


def choose(waiting: Sequence[Asked], grid: Grid) -> tuple[Bucket, list[int]]:
    """The bucket to run next, and the positions of the waiting requests to run in it, the first one among them.

    For each bucket that holds the first request, as many of the others are taken as fit beside it, in their order. The bucket
    counts whose requests take the most seconds alone for each second that they take in it; of equal ones the fastest.

    Args:
        waiting: the requests, the most urgent first; each has a bucket that holds it. The first ``MOST_LOOKED`` are looked at.
        grid: the variants, and the dimension along which requests are joined.

    >>> small, large = Bucket(1, {"batch": 1}, 2.0), Bucket(0, {"batch": 4}, 5.0)
    >>> one, grid = Asked({"batch": 1}, 2.0), Grid.of([large, small], "batch")
    >>> choose([one] * 2, grid) == (small, [0])
    True
    >>> choose([one] * 3, grid) == (large, [0, 1, 2])
    True
    """
    looked = waiting[: MOST_LOOKED if grid.rows is not None else 1]
    places, taken = grid.holding([one.sizes for one in looked])
    alone_s = np.zeros(len(places))
    left = grid.sizes[places, grid.dims.index(grid.rows)] if grid.rows is not None else np.zeros(len(places), int)
    for fits, one in zip(taken, looked, strict=True):
        num_rows = one.sizes[grid.rows] if grid.rows is not None else 0
        fits[:] = fits & (num_rows <= left)
        left = left - fits * num_rows
        alone_s += fits * one.alone_s
    best = np.lexsort((-grid.seconds[places], alone_s / grid.seconds[places]))[-1]
    return grid.buckets[places[best]], np.flatnonzero(taken[:, best]).tolist()


def rows_of(family: Family) -> str | None:
    """The dimension along which requests can be joined: the first axis of each input and output, and may be padded."""
    names = {axes.get(0) for places in (family.dims, family.out_dims) for axes in places.values()}
    every = set(family.variants[0].graph.inputs) <= set(family.dims) and len(names) == 1
    [dim] = names if every else {None}
    return dim if dim and dim not in family.unpaddable else None


@checked
def rows_family(traced: Traced) -> Family:
    """A model of one size as a family of one variant, for requests of 1 to all of its rows.

    Raises: UsageError: inputs and outputs differ in their rows, or rows depend on each other or on their places.
    """
    names = (*traced.graph.inputs, *traced.graph.outputs)
    rows = {name: traced.specs[name].shape[0] if traced.specs[name].shape else 0 for name in names}
    if len(set(rows.values())) > 1 or not all(rows.values()):
        listed = ", ".join(f"'{name}' {count}" for name, count in rows.items())
        raise UsageError(f"all inputs and outputs of '{traced.graph.name}' must have one number of rows, and have: {listed}")

    def run(inputs: Sequence[torch.Tensor]) -> Tensors:
        with torch.inference_mode():
            found: Tensors = traced.program(*inputs)
            return found

    require_independent_rows(run, traced.graph.outputs, distinct_inputs(traced.example_inputs, 2)[1])
    [most], axes = set(rows.values()), {0: "batch"}
    places = (dict.fromkeys(traced.graph.inputs, axes), dict.fromkeys(traced.graph.outputs, axes))
    return Family((traced,), ({"batch": most},), {"batch": range(1, most + 1)}, *places)


def joined(family: Family, bucket: Bucket, requests: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The inputs of the variant with the requests behind each other along the first axis, and zeros for all else.

    One request is padded along every axis.
    """
    largest = family.variants[0]
    found = []
    for position, name in enumerate(largest.graph.inputs):
        parts, spec, axes = [inputs[position] for inputs in requests], largest.specs[name], family.dims.get(name, {})
        shape = torch.Size([bucket.sizes[axes[axis]] if axis in axes else size for axis, size in enumerate(spec.shape)])
        if len(parts) == 1 and parts[0].shape == shape:
            found.append(parts[0])
            continue
        whole = torch.zeros(shape, dtype=spec.torch_dtype)
        start = 0
        for part in parts:
            place = whole.narrow(0, start, part.shape[0]) if part.dim() else whole
            place[tuple(map(slice, part.shape))] = part
            start += part.shape[0] if part.dim() else 0
        found.append(whole)
    return found


def separated(family: Family, outputs: Sequence[torch.Tensor], sizes: Sequence[At], rows: str | None) -> list[list[torch.Tensor]]:
    """The outputs of each of the requests that were joined, without padding; views of the outputs of the stages."""
    names, start = family.variants[0].graph.outputs, 0
    found = []
    for own in sizes:
        mine = []
        for name, value in zip(names, outputs, strict=True):
            axes = family.out_dims[name]
            mine.append(cut(value if rows is None else value[start:], axes, own))
        found.append(mine)
        start += own[rows] if rows is not None else 0
    return found
