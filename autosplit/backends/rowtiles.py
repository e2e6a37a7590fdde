"""Tiles of products in vector code: a vector of a weight is used for several rows of x while it is in a register.

LLVM takes half the width for its own vectors on processors with 512 bits, and does not prefetch. Here each pass over rows of a
weight prefetches a share of their next ones: memory waited for the second pass where x has more rows than a tile.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import register_jitable

from autosplit.jit import intrinsic

WIDTH = 16 if "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2] else 8
"""Floats of a vector. A processor with 512 bits has twice as many registers."""

MOST_COLUMNS = 4
"""Most rows of a weight that are read at a time: eight are read no faster."""

FLOAT, INT, SHORT, BYTE = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8)
VECTOR = ir.VectorType(FLOAT, WIDTH)
FUSED = ("contract",)
NEAREST = 3

ints: Any = types.int64  # numba has no types for the checker
nothing: Any = types.void


@register_jitable  # type: ignore[untyped-decorator]
def columns_beside(rows: int) -> int:
    """How many rows of a weight make a tile with rows of x: its sums, a vector of each and one of x lie in registers.

    >>> columns_beside(1), columns_beside(2)
    (4, 4)
    """
    return min(MOST_COLUMNS, (2 * WIDTH - 1) // (rows + 1))


def dots(rows: int) -> Callable[..., None]:
    """In compiled code: rows of x times rows of a weight.

    Its arguments, all int64: addresses of float32 ``x [rows, size]``, of the first row of the weight, of its bias (0 for none)
    and of its element of ``found [rows, features]``; size, features, rows of the weight from one to the next, and where to
    prefetch: bytes behind the weights, and bytes from one vector to the next.
    """
    columns = columns_beside(rows)

    @intrinsic  # type: ignore[untyped-decorator]
    def call(_: Any, x: Any, weight: Any, bias: Any, y: Any, size: Any, features: Any, far: Any, ahead: Any, step: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, weight, bias, found, size, features, far, ahead, step = arguments
            xs = places(builder, x, size, rows)
            weights = places(builder, weight, builder.mul(size, far), columns)
            zero = builder.ptrtoint(cgutils.alloca_once_value(builder, FLOAT(0)), INT)
            has_none = builder.icmp_signed("==", bias, INT(0))
            biases = [builder.select(has_none, zero, one) for one in places(builder, bias, far, columns)]
            first = [builder.insert_element(VECTOR([0] * WIDTH), load(builder, one, FLOAT), SHORT(0)) for one in biases]
            sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(rows * columns)]
            for number, one in enumerate(sums):
                builder.store(first[number % columns], one)
            whole = builder.sub(size, builder.srem(size, INT(WIDTH)))
            with _vectors(builder, weights, INT(0), whole, VECTOR, ahead, step) as (offset, parts):
                for number, one in enumerate(sums):
                    value = load(builder, builder.add(xs[number // columns], offset), VECTOR)
                    builder.store(fused(builder, value, parts[number % columns], builder.load(one)), one)
            with _vectors(builder, weights, whole, size, FLOAT) as (offset, parts):
                for number, one in enumerate(sums):
                    value, before = load(builder, builder.add(xs[number // columns], offset), FLOAT), builder.load(one)
                    after = fused(builder, value, parts[number % columns], builder.extract_element(before, SHORT(0)))
                    builder.store(builder.insert_element(before, after, SHORT(0)), one)
            ends = [one for row in places(builder, found, features, rows) for one in places(builder, row, far, columns)]
            for start in range(0, len(sums), WIDTH):
                made = _totals(builder, [builder.load(one) for one in sums[start : start + WIDTH]])
                for number, place in enumerate(ends[start : start + WIDTH]):
                    store(builder, builder.extract_element(made, SHORT(number)), place)
            return context.get_dummy_value()

        return nothing(*[ints] * 9), code

    found: Callable[..., None] = call
    return found


def steps(rows: int, parts: int) -> Callable[..., None]:
    """In compiled code: add to rows of ``found`` some elements of rows of x times as many rows of a weight.

    Its arguments, all int64: addresses of the first of these elements of float32 ``x [rows, size]``, of the rows of the weight
    and of ``found [rows, features]``; size, features, how many columns, and where to prefetch, as for ``dots``.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def call(_: Any, x: Any, weight: Any, found: Any, size: Any, features: Any, count: Any, ahead: Any, step: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, weight, found, size, features, count, ahead, step = arguments
            weights, sums = places(builder, weight, features, parts), places(builder, found, features, rows)
            factors = [
                [load(builder, place, FLOAT) for place in places(builder, row, INT(1), parts)]
                for row in places(builder, x, size, rows)
            ]

            def add(kind: Any, start: Any, end: Any, *where: Any) -> None:
                wide = [[one if kind is FLOAT else spread(builder, one) for one in row] for row in factors]
                with _vectors(builder, weights, start, end, kind, *where) as (offset, vectors):
                    for row, place in zip(wide, sums, strict=True):
                        at = builder.add(place, offset)
                        value = load(builder, at, kind)
                        for factor, vector in zip(row, vectors, strict=True):
                            value = fused(builder, factor, vector, value)
                        store(builder, value, at)

            whole = builder.sub(count, builder.srem(count, INT(WIDTH)))
            add(VECTOR, INT(0), whole, ahead, step)
            add(FLOAT, whole, count)
            return context.get_dummy_value()

        return nothing(*[ints] * 8), code

    found: Callable[..., None] = call
    return found


@contextmanager
def _vectors(
    builder: Any, rows: Sequence[Any], start: Any, end: Any, kind: Any, ahead: Any = None, step: Any = None
) -> Iterator[tuple[Any, list[Any]]]:
    """The code for each vector (or number) of rows: its offset in bytes, and the vectors. It prefetches where ``ahead`` says."""
    width = INT(1 if kind is FLOAT else WIDTH)
    with cgutils.for_range_slice(builder, start, end, width, INT) as (index, count):
        offset = builder.mul(index, INT(4))
        if ahead is not None:
            bytes_ahead = builder.add(ahead, builder.mul(count, step))
            for row in rows:
                prefetch(builder, builder.add(row, bytes_ahead), NEAREST)
        yield offset, [load(builder, builder.add(row, offset), kind) for row in rows]


def prefetch(builder: Any, address: Any, cache: int) -> None:
    """Read ahead of data at an address, into a cache of the processor: ``NEAREST``, or a larger one by a lower number."""
    type_ = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), SHORT, SHORT, SHORT])
    function = cgutils.get_or_insert_function(builder.module, type_, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, BYTE.as_pointer()), SHORT(0), SHORT(cache), SHORT(1)])


def _totals(builder: Any, vectors: Sequence[Any]) -> Any:
    """A vector with the sum of each of at most as many vectors, in their order: neighbours in two vectors at a time are added."""
    found = [vectors[number % len(vectors)] for number in range(WIDTH)]
    while len(found) > 1:
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [builder.fadd(*(picked(builder, one, other, range(k, 2 * WIDTH, 2)) for k in (0, 1))) for one, other in pairs]
    return found[0]


def picked(builder: Any, one: Any, other: Any, numbers: Sequence[int]) -> Any:
    """The numbered elements of two vectors, one behind the other."""
    return builder.shuffle_vector(one, other, ir.VectorType(SHORT, WIDTH)(list(numbers)))


def spread(builder: Any, value: Any) -> Any:
    """A vector of equal elements."""
    one = builder.insert_element(VECTOR(ir.Undefined), value, SHORT(0))
    return picked(builder, one, one, [0] * WIDTH)


def fused(builder: Any, one: Any, other: Any, added: Any) -> Any:
    """``added + one * other``, rounded once where the processor can."""
    return builder.fadd(added, builder.fmul(one, other, flags=FUSED), flags=FUSED)


def places(builder: Any, address: Any, spacing: Any, count: int) -> list[Any]:
    """Addresses so many float32 apart."""
    return [builder.add(address, builder.mul(spacing, INT(4 * number))) for number in range(count)]


def load(builder: Any, address: Any, kind: Any) -> Any:
    """A float, or a vector of them, at an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def store(builder: Any, value: Any, address: Any) -> None:
    """Write a float, or a vector of them, to an address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)
