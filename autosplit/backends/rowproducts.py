"""Products with a weight as it is stored, compiled."""

from autosplit.backends.rowpanels import COLUMNS, ZERO, multiply_many
from autosplit.backends.rowtiles import WIDTH, columns_beside, dots, steps
from autosplit.jit import floats_at, summing

ONE, TWO, THREE, FOUR, EIGHT = map(dots, (1, 2, 3, 4, 8))
"""Tiles by their rows of x."""

ONE_ROW, TWO_ROWS, FOUR_ROWS, REST = steps(1, 4), steps(2, 4), steps(4, 4), steps(1, 1)
"""By their rows of x, with four rows of the weight, and one row of both."""

MANY = 32
"""Fewest rows for which it pays to turn parts of a weight: with 24 it takes a tenth longer, with 32 a tenth less."""


@summing("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def multiply(
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
    """Multiply rows with a part of a weight: columns ``start`` to ``end`` of ``found = x @ weight.T + bias``.

    Rows of the weight that lie far apart are read at a time: with neighbours, whose bytes share a page, memory gives a fifth less
    for 9 MB. Up to four rows of x go with them, or eight with AVX-512. The last tile of an axis overlaps with the one before.
    Of ``MANY`` rows of x, panels are made.

    Args: addresses of float32 ``x [rows, size]``, ``weight [features, size]``, ``bias [features]`` (0 for none) and
        ``found [rows, features]``, and the features.
    """
    if rows >= MANY and end - start >= COLUMNS:
        multiply_many(x_address, weight_address, bias_address, found_address, rows, size, features, start, end)
        return
    at_once = 8 if rows >= 8 and WIDTH == 16 else min(rows, 4)
    columns = columns_beside(at_once)
    spacing, groups = (end - start) // columns, (rows + at_once - 1) // at_once
    share, step = 4 * size // groups, 4 * WIDTH // groups
    for n in range(start, end - (columns - 1) * spacing):
        weight, bias = weight_address + 4 * n * size, bias_address + 4 * n if bias_address else 0
        for group in range(groups):
            row, ahead = min(group * at_once, rows - at_once), 4 * size + group * share
            x, found = x_address + 4 * row * size, found_address + 4 * (row * features + n)
            if at_once == 1:
                ONE(x, weight, bias, found, size, features, spacing, ahead, step)
            elif at_once == 2:
                TWO(x, weight, bias, found, size, features, spacing, ahead, step)
            elif at_once == 3:
                THREE(x, weight, bias, found, size, features, spacing, ahead, step)
            elif at_once == 4:
                FOUR(x, weight, bias, found, size, features, spacing, ahead, step)
            else:
                EIGHT(x, weight, bias, found, size, features, spacing, ahead, step)


@summing("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def multiply_by_columns(
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
    """As ``multiply`` of ``found = x @ weight + bias``, of a weight ``[size, features]``: its rows are summed, four at a time."""
    bias, count, in_fours = floats_at(bias_address + 4 * start), end - start, size - size % 4
    for row in range(rows):
        found = floats_at(found_address + 4 * (row * features + start))
        for n in range(count):
            found[n] = bias[n] if bias_address else ZERO
    groups = rows // 4 + rows % 4 // 2 + rows % 2
    share, step = 4 * count // groups, 4 * WIDTH // groups
    for part in range(0, in_fours, 4):
        weight, row, ahead = weight_address + 4 * (part * features + start), 0, 16 * features
        while row < rows:
            x, y = x_address + 4 * (row * size + part), found_address + 4 * (row * features + start)
            if row + 4 <= rows:
                FOUR_ROWS(x, weight, y, size, features, count, ahead, step)
                row += 4
            elif row + 2 <= rows:
                TWO_ROWS(x, weight, y, size, features, count, ahead, step)
                row += 2
            else:
                ONE_ROW(x, weight, y, size, features, count, ahead, step)
                row += 1
            ahead += share
    for part in range(in_fours, size):
        weight = weight_address + 4 * (part * features + start)
        for row in range(rows):
            x, y = x_address + 4 * (row * size + part), found_address + 4 * (row * features + start)
            REST(x, weight, y, size, features, count, 16 * features, 4 * WIDTH)
