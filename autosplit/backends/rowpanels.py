"""Products of many rows: a part of a weight is turned once, within the nearest caches, and used for all rows of x.

::

    rows of the weight          panel                     found, a tile of rows of x at a time
    n    a0 a1 a2 ...           a0 b0 c0 ...              x[0] * panel
    n+1  b0 b1 b2 ...     ->    a1 b1 c1 ...        ->    x[1] * panel
    n+2  c0 c1 c2 ...           a2 b2 c2 ...              ...

Each element of x is multiplied with a vector of the panel, whose sums stay in registers (Goto and van de Geijn, Anatomy of
High-Performance Matrix Multiplication, 2008). No copy of the weights stays in memory. While one part is used, the next one is
prefetched.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from autosplit.backends.rowtiles import (
    FLOAT,
    INT,
    VECTOR,
    WIDTH,
    fused,
    ints,
    load,
    nothing,
    picked,
    places,
    prefetch,
    spread,
    store,
)
from autosplit.jit import floats_at, intrinsic, summing

ROWS, VECTORS = WIDTH // 2, 3
"""Rows of x and vectors of a panel in a tile, whose sums, vectors and one element of x lie in registers."""

COLUMNS, DEPTH = VECTORS * WIDTH, 512
"""Columns of a panel, and its most rows: 96 KB with AVX-512, in the cache of a core."""

UNROLLED = 4
"""Elements of each row of x between two prefetches."""

LINE, LARGER = 64, 2
"""Bytes of a line of a cache, and the cache that is prefetched into."""

ZERO = np.float32(0)


@intrinsic  # type: ignore[untyped-decorator]
def panel_memory(_: Any) -> Any:
    """In compiled code: the address of memory for a panel, a row, and a tile, which its function has until it returns."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():
            found = builder.alloca(ir.ArrayType(FLOAT, COLUMNS * (DEPTH + 1 + ROWS)))
            found.align = 4 * WIDTH
        return builder.ptrtoint(found, INT)

    return ints(), code


@intrinsic  # type: ignore[untyped-decorator]
def turn(_: Any, source: Any, spacing: Any, found: Any) -> Any:
    """In compiled code: a vector from each of ``WIDTH`` rows, ``spacing`` float32 apart, becomes a column of as many vectors.

    In each step, halves of blocks change places across the diagonal (Eklundh, A Fast Computer Method for Matrix Transposing,
    1972).
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, spacing, found = arguments
        rows = [load(builder, place, VECTOR) for place in places(builder, source, spacing, WIDTH)]
        half = WIDTH // 2
        while half:
            for number in (one for one in range(WIDTH) if not one & half):
                pair = rows[number], rows[number + half]
                first = [k if not k & half else WIDTH + k - half for k in range(WIDTH)]
                second = [k + half if not k & half else WIDTH + k for k in range(WIDTH)]
                rows[number], rows[number + half] = picked(builder, *pair, first), picked(builder, *pair, second)
            half //= 2
        for row, place in zip(rows, places(builder, found, INT(COLUMNS), WIDTH), strict=True):
            store(builder, row, place)
        return context.get_dummy_value()

    return nothing(ints, ints, ints), code


@intrinsic  # type: ignore[untyped-decorator]
def tile(_: Any, x: Any, size: Any, panel: Any, begin: Any, apart: Any, found: Any, features: Any, depth: Any, ahead: Any) -> Any:
    """In compiled code: ``ROWS`` rows of x times a panel.

    Its arguments, all int64: addresses of the first used element of float32 ``x [rows, size]``, of the panel ``[depth,
    COLUMNS]``, of what the sums begin with, ``apart`` float32 from one row to the next, of ``found [rows, features]``, and
    of what is prefetched, a line at a time.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, size, panel, begin, apart, found, features, depth, ahead = arguments
        rows = places(builder, x, size, ROWS)
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(ROWS * VECTORS)]
        starts, ends = (
            [one for row in places(builder, first, spacing, ROWS) for one in places(builder, row, INT(WIDTH), VECTORS)]
            for first, spacing in ((begin, apart), (found, features))
        )
        for one, place in zip(sums, starts, strict=True):
            builder.store(load(builder, place, VECTOR), one)

        def add(number: Any) -> None:
            of_panel = builder.add(panel, builder.mul(number, INT(4 * COLUMNS)))
            vectors = [load(builder, one, VECTOR) for one in places(builder, of_panel, INT(WIDTH), VECTORS)]
            for row, place in enumerate(rows):
                factor = spread(builder, load(builder, builder.add(place, builder.mul(number, INT(4))), FLOAT))
                for one, vector in zip(sums[row * VECTORS :], vectors, strict=False):
                    builder.store(fused(builder, factor, vector, builder.load(one)), one)

        whole = builder.sub(depth, builder.srem(depth, INT(UNROLLED)))
        with cgutils.for_range_slice(builder, INT(0), whole, INT(UNROLLED), INT) as (number, count):
            prefetch(builder, builder.add(ahead, builder.mul(count, INT(LINE))), LARGER)
            for further in range(UNROLLED):
                add(builder.add(number, INT(further)))
        with cgutils.for_range_slice(builder, whole, depth, INT(1), INT) as (number, _count):
            add(number)
        for one, place in zip(sums, ends, strict=True):
            store(builder, builder.load(one), place)
        return context.get_dummy_value()

    return nothing(*[ints] * 9), code


@summing("void(i8, i8, i8, i8)")
def fill(weight_address: int, panel: int, size: int, depth: int) -> None:
    """Fill a panel from elements of ``COLUMNS`` rows of a weight, ``size`` float32 apart."""
    whole = depth - depth % WIDTH
    for row in range(0, COLUMNS, WIDTH):
        for k in range(0, whole, WIDTH):
            turn(weight_address + 4 * (row * size + k), size, panel + 4 * (k * COLUMNS + row))
    weight, found = floats_at(weight_address), floats_at(panel)
    for row in range(COLUMNS):
        for k in range(whole, depth):
            found[k * COLUMNS + row] = weight[row * size + k]


@summing("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def multiply_many(
    x_address: int,
    weight_address: int,
    bias_address: int,
    found_address: int,
    rows: int,
    size: int,
    features: int,
    start: int,
    end: int,
) -> None:
    """Multiply at least ``ROWS`` rows with a part of a weight: columns ``start`` to ``end``, at least ``COLUMNS``.

    The last panel overlaps with the one before. Where the last rows overlap with the tile before, their sums are apart, as those
    of the rows before must not grow twice.

    Args: as for ``rowproducts.multiply``.
    """
    panel = panel_memory()
    begin, apart = panel + 4 * COLUMNS * DEPTH, panel + 4 * COLUMNS * (DEPTH + 1)
    groups, whole, bias = (rows + ROWS - 1) // ROWS, rows // ROWS, floats_at(bias_address)
    for first in range(start, end, COLUMNS):
        n, ahead = min(first, end - COLUMNS), weight_address + 4 * min(first + COLUMNS, end - COLUMNS) * size
        for column in range(COLUMNS):
            floats_at(begin)[column] = bias[n + column] if bias_address else ZERO
        for k in range(0, size, DEPTH):
            depth = min(DEPTH, size - k)
            fill(weight_address + 4 * (n * size + k), panel, size, depth)
            for group in range(groups):
                x = x_address + 4 * (min(group * ROWS, rows - ROWS) * size + k)
                found, spacing = found_address + 4 * (group * ROWS * features + n), features
                if group == whole:
                    found, spacing = apart, COLUMNS
                if k:
                    tile(x, size, panel, found, spacing, found, spacing, depth, ahead)
                else:
                    tile(x, size, panel, begin, 0, found, spacing, depth, ahead)
                ahead += depth // UNROLLED * LINE
        for row in range(whole * ROWS, rows):
            found = floats_at(found_address + 4 * (row * features + n))
            for column in range(COLUMNS):
                found[column] = floats_at(apart)[(row - rows + ROWS) * COLUMNS + column]
