"""Which waiting requests to join, and at which sizes to run them: the choice that saves most of the seconds they take alone.

::

    waiting   7 tokens, 400 tokens, 12 tokens          variants   1 x 16   1 x 512   4 x 16   4 x 512
    taken     7 and 12 tokens at 4 x 16                           2 ms     60 ms     5 ms     230 ms

Two requests at 4 x 16 take 5 ms in place of 4 ms alone, and all three at 4 x 512 take 230 ms in place of 64 ms: here each runs
alone. With four short ones that wait, 4 x 16 takes 5 ms in place of 8 ms, and they are joined.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from autosplit.tracing.family import At, Family
from autosplit.tracing.padding import cut


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes of a variant, and the measured seconds of a request that fills it."""

    variant: int
    sizes: At
    seconds: float


def fitting(buckets: Sequence[Bucket], sizes: At, exact: Collection[str] = ()) -> list[Bucket]:
    """The buckets that hold a request, the fastest first.

    Args:
        buckets: the variants.
        sizes: those of the request.
        exact: dimensions that must not be padded.

    >>> found = [Bucket(0, {"seq": 64}, 0.3), Bucket(1, {"seq": 16}, 0.1), Bucket(2, {"seq": 32}, 0.2)]
    >>> [bucket.variant for bucket in fitting(found, {"seq": 20})], fitting(found, {"seq": 20}, ["seq"])
    ([2, 0], [])
    """
    holding = [
        bucket
        for bucket in buckets
        if all(size == bucket.sizes[dim] if dim in exact else size <= bucket.sizes[dim] for dim, size in sizes.items())
    ]
    return sorted(holding, key=lambda bucket: bucket.seconds)


def choose(
    waiting: Sequence[At], buckets: Sequence[Bucket], rows: str | None, exact: Collection[str] = ()
) -> tuple[Bucket, list[int]]:
    """The bucket to run next, and the positions of the waiting requests to run in it, the first one among them.

    For each bucket that holds the first request, as many of the others are taken as fit beside it, in their order. The bucket
    counts whose requests take the most seconds alone for each second that they take in it.

    Args:
        waiting: sizes of the requests, the most urgent first; each has a bucket that holds it.
        buckets: the variants.
        rows: the dimension along which requests are joined; None joins none.
        exact: dimensions that must not be padded.

    >>> small, large = Bucket(1, {"batch": 1}, 2.0), Bucket(0, {"batch": 4}, 5.0)
    >>> choose([{"batch": 1}] * 2, [large, small], "batch") == (small, [0])
    True
    >>> choose([{"batch": 1}] * 3, [large, small], "batch") == (large, [0, 1, 2])
    True
    """
    first = waiting[0]
    if rows is None or len(waiting) == 1:
        return fitting(buckets, first, exact)[0], [0]
    alone_s = [fitting(buckets, sizes, exact)[0].seconds for sizes in waiting]
    best: tuple[float, Bucket, list[int]] | None = None
    for bucket in fitting(buckets, first, exact):
        taken, num_rows = [], 0
        for position, sizes in enumerate(waiting):
            more = {**sizes, rows: num_rows + sizes[rows]}
            if fitting([bucket], more, exact):
                taken.append(position)
                num_rows = more[rows]
        saved = sum(alone_s[position] for position in taken) / bucket.seconds
        if best is None or saved > best[0]:
            best = saved, bucket, taken
    assert best is not None  # the first request has a bucket
    return best[1], best[2]


def rows_of(family: Family) -> str | None:
    """The dimension along which requests can be joined: the first axis of each input and output, and may be padded."""
    names = {axes.get(0) for places in (family.dims, family.out_dims) for axes in places.values()}
    every = set(family.variants[0].graph.inputs) <= set(family.dims) and len(names) == 1
    [dim] = names if every else {None}
    return dim if dim and dim not in family.unpaddable else None


def joined(family: Family, bucket: Bucket, requests: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The inputs of the variant with the requests behind each other along the first axis, and zeros for all else.

    One request is padded along every axis.
    """
    traced = family.variants[bucket.variant]
    found = []
    for position, name in enumerate(traced.graph.inputs):
        parts, spec = [inputs[position] for inputs in requests], traced.specs[name]
        if len(parts) == 1 and parts[0].shape == spec.shape:
            found.append(parts[0])
            continue
        whole = torch.zeros(spec.shape, dtype=spec.torch_dtype)
        start = 0
        for part in parts:
            place = whole.narrow(0, start, part.shape[0]) if part.dim() else whole
            place[tuple(map(slice, part.shape))] = part
            start += part.shape[0] if part.dim() else 0
        found.append(whole)
    return found


def separated(family: Family, outputs: Sequence[torch.Tensor], sizes: Sequence[At], rows: str | None) -> list[list[torch.Tensor]]:
    """The outputs of each of the requests that were joined, without padding; views of what the stages made."""
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
