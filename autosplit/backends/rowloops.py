"""The loop that computes ``instructions``, compiled."""

from typing import Any

import numpy as np

from autosplit.backends.rowfunctions import DIV, ELEMENTWISE, MEAN, look_up, normalise, of_one, of_two
from autosplit.backends.rowproducts import multiply, multiply_by_columns
from autosplit.jit import summing

Array = np.ndarray[Any, Any]

FUNCTIONS = (*ELEMENTWISE, "norm", "lookup", "product", "product_by_columns")
"""What an instruction computes, by its code."""

NORM, LOOKUP, PRODUCT, BY_COLUMNS = map(np.int64, range(len(ELEMENTWISE), len(FUNCTIONS)))


@summing("i8(i8[:,::1])")
def play(tape: Array) -> int:
    """Compute instructions, one a row.

    Args:
        tape: int64 ``[instructions, 10]``, each the code of a function, addresses, sizes and strides: see ``instructions``.
    Returns: the number of the instruction that was given an id outside its table, and ended the call; -1 if none was.
    """
    for line in range(len(tape)):
        code, x, y, found = tape[line, 0], tape[line, 1], tape[line, 2], tape[line, 3]
        if code == PRODUCT:
            multiply(x, y, tape[line, 4], found, tape[line, 5], tape[line, 6], tape[line, 7], tape[line, 8], tape[line, 9])
            continue
        if code == BY_COLUMNS:
            multiply_by_columns(
                x, y, tape[line, 4], found, tape[line, 5], tape[line, 6], tape[line, 7], tape[line, 8], tape[line, 9]
            )
            continue
        if code == NORM:
            normalise(x, y, found, tape[line, 4], tape[line, 5], tape[line, 6], tape[line, 7])
            continue
        if code == LOOKUP:
            if not look_up(x, y, found, tape[line, 4], tape[line, 5], tape[line, 6]):
                return line
            continue
        rows, cols, x_stride, y_stride, is_each = tape[line, 4], tape[line, 5], tape[line, 6], tape[line, 7], tape[line, 8] == 1
        for row in range(rows):
            if code <= DIV:
                of_two(code, x + 4 * row * x_stride, y + 4 * row * y_stride, found + 4 * row * cols, cols, is_each)
            elif code == MEAN:
                of_one(code, x + 4 * row * x_stride, found + 4 * row, cols)
            else:
                of_one(code, x + 4 * row * x_stride, found + 4 * row * cols, cols)
    return -1
