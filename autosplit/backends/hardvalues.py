"""Hard values for one argument of an op: values on which runtimes differ from torch."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch

from autosplit.tracing.indexlimits import Limits

Values = Literal["finite", "signed", "large", "masked", "nonfinite", "wide", "outside"]
"""Kinds of values:

* ``finite``: floats with zeros of both signs, exact multiples, halves, and in float64 small differences of large numbers;
  integers of 21 bits, which wrap round in shorter types; indices that repeat; rows that a mask of booleans leaves out.
* ``signed``: floats of which half are zeros, where zeros of the result need the sign that eager gives them.
* ``large``: integers of 30 bits.
* ``masked``: rows in which a mask of floats leaves one element, or makes all the least number of a type.
* ``nonfinite``: NaN, infinite and huge floats.
* ``wide``: integers that leave 32 bits or wrap round.
* ``outside``: indices beyond a table and divisors of 0, which torch refuses.

Shapes and layouts are those of the op in the model: empty, of size 1, transposed."""

VALUES: tuple[Values, ...] = get_args(Values)

NUM_DRAWS = 4
"""Draws of each kind: the first one as in a network, the others of hard values."""

FINITE = (0.0, -0.0, 0.1, 0.3, 0.5, 0.6, 0.7, 0.9, 1.0, 1.1, 1.5, 2.0, 2.5, 3.0, 7.0, 0.001, 0.25, 9.5)
SPECIAL = (math.nan, -math.inf, math.inf, 1e25)
"""The special floats of each draw."""

SMALL, LARGE, WIDE = 1 << 20, 1 << 29, 1 << 40
EDGES = (1, -1, 5, -7, (1 << 24) + 1, -(1 << 24) - 1, (1 << 31) + 1, 1 << 32)
"""Sizes of integers of the kinds 'finite', 'large' and 'wide', and integers at which formats end."""


def draw(
    shape: Sequence[int],
    dtype: torch.dtype,
    values: Values,
    number: int,
    level: int = SMALL,
    limits: Limits | None = None,
    scalars: Sequence[float] = (),
) -> torch.Tensor:
    """A tensor of hard values.

    Args:
        number: seeds the draw; modulo ``NUM_DRAWS`` it chooses the values.
        level: the size of the largest integer.
        limits: the indices that torch takes, if it is an index.
        scalars: numbers among the op's arguments, whose multiples are hard.
    """
    generator = torch.Generator().manual_seed(number)
    if dtype == torch.bool:
        return _with_whole_rows(torch.rand(tuple(shape), generator=generator) > 0.4, False, True)
    if dtype.is_complex:
        return torch.complex(*(draw(shape, torch.float64, values, number + place) for place in (0, 100))).to(dtype)
    if dtype.is_floating_point:
        return _floats(tuple(shape), dtype, values, number % NUM_DRAWS, scalars, generator)
    if limits is not None:
        return torch.randint(limits[0], max(limits) + 1, tuple(shape), generator=generator, dtype=dtype)
    return _integers(tuple(shape), dtype, level, scalars, generator)


def distinct(shape: Sequence[int], dtype: torch.dtype, number: int) -> torch.Tensor:
    """A tensor without equal values, for ops that may order equal values in any way."""
    size = math.prod(shape)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(number)) - size // 2
    return order.reshape(tuple(shape)).to(dtype)


def _floats(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    values: Values,
    number: int,
    scalars: Sequence[float],
    generator: torch.Generator,
) -> torch.Tensor:
    multiples = [scalar * count for scalar in scalars if 0 < abs(scalar) < 1e3 for count in range(1, 11)]
    pool = torch.tensor([sign * value for value in (*FINITE, *multiples) for sign in (1, -1)], dtype=torch.float64)
    made = torch.randn(shape, generator=generator, dtype=torch.float64)
    some, least = torch.rand(shape, generator=generator) < 0.3, torch.finfo(dtype).min
    if number:
        made = pool[torch.randint(len(pool), shape, generator=generator)]
    if dtype == torch.float64 and number == 3:
        made = made + 1.75e9  # large numbers with small differences
    if values == "nonfinite":
        made = torch.where(some, SPECIAL[number], made)
        return (_with_whole_rows(made, -math.inf) if number == 1 else made).to(dtype)
    if values == "signed":
        zeros = torch.where(torch.rand(shape, generator=generator) < 0.5, 0.0, -0.0)
        return _with_whole_rows(torch.where(made < 0.5, zeros, made), -0.0, 0.0).to(dtype)
    if values == "masked":
        made = torch.where(some, -math.inf if number % 2 else least, made)
        if shape and shape[-1]:
            made[..., number % shape[-1]] = 0.5  # a mask leaves an element of each row
        return (made if number % 2 else _with_whole_rows(made, least)).to(dtype)
    return (made * 1e12 if values == "wide" and number else made).to(dtype)


def _integers(
    shape: tuple[int, ...], dtype: torch.dtype, level: int, scalars: Sequence[float], generator: torch.Generator
) -> torch.Tensor:
    info = torch.iinfo(dtype)
    low, high = max(info.min, -level), min(info.max, level)
    made = torch.randint(low, high + 1, shape, generator=generator)
    edges = torch.tensor([low, high, *EDGES, *(int(3 * scalar) for scalar in scalars if abs(scalar) < LARGE)])
    edges = edges[(low <= edges) & (edges <= high)]
    chosen = edges[torch.randint(len(edges), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 0.5, made, chosen).to(dtype)


def _with_whole_rows(made: torch.Tensor, *fills: float) -> torch.Tensor:
    """The tensor with its first rows filled, if it has more rows than that."""
    if made.dim() > 1 and made.numel():
        for row, fill in zip(made.reshape(-1, made.shape[-1])[:-1], fills, strict=False):
            row.fill_(fill)
    return made
