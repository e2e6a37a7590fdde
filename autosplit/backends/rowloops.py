"""The loop that computes ``instructions``, compiled."""

from typing import Any

import numpy as np

from autosplit.backends.rowfunctions import Function, look_up, normalise, of_one, of_two
from autosplit.backends.rowproducts import multiply
from autosplit.jit import summing

Array = np.ndarray[Any, Any]


@summing("i8(i8[:,::1])")
def play(tape: Array) -> int:
    """Compute instructions, one a row.

    Args:
        tape: int64 ``[instructions, 10]``, each the code of a ``Function``, addresses, sizes, and bytes from a row to the next:
            see ``instructions``.
    Returns: the number of the instruction that was given an id outside its table, and ended the call; -1 if none was.
    """
    for line in range(len(tape)):
        code, x, y, found = tape[line, 0], tape[line, 1], tape[line, 2], tape[line, 3]
        if code == Function.PRODUCT:
            multiply(x, y, tape[line, 4], found, tape[line, 5], tape[line, 6], tape[line, 7], tape[line, 8], tape[line, 9])
            continue
        if code == Function.NORM:
            normalise(x, y, found, tape[line, 4], tape[line, 5], tape[line, 6], tape[line, 7])
            continue
        if code == Function.LOOKUP:
            if not look_up(x, y, found, tape[line, 4], tape[line, 5], tape[line, 6]):
                return line
            continue
        rows, cols, y_cols = tape[line, 4], tape[line, 5], tape[line, 6]
        x_step, y_step, found_step = tape[line, 7], tape[line, 8], tape[line, 9]
        for row in range(rows):
            if code <= Function.CAT:
                of_two(code, x + row * x_step, y + row * y_step, found + row * found_step, cols, y_cols)
            else:
                of_one(code, x + row * x_step, found + row * found_step, cols)
    return -1
