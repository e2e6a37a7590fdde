"""Functions of the elements of rows, of the rows, and lookups of rows, compiled."""

import math
from enum import IntEnum
from typing import Any

import numpy as np

from autosplit.jit import floats_at, from_bits, inner, ints_at, summing

Function = IntEnum(
    "Function",
    "ADD SUB MUL DIV ADD_INTS CAT "
    "NEG RELU SQRT RSQRT CUBE SIGMOID SILU TANH GELU GELU_ERF MEAN COS SIN FLOAT "
    "NORM LOOKUP PRODUCT",
)
"""What an instruction computes: of two values, up to ``CAT``, which puts their rows side by side; of one (``GELU`` with tanh,
``FLOAT`` of int64); and of more, from ``NORM`` on."""

LOG2_E = np.float32(math.log2(math.e))
LEAST, MOST = np.float32(-126), np.float32(128)
"""The smallest power of two of a float32, and the one whose bits are infinity."""

EXP2 = tuple(map(np.float32, (0.9999999251, 0.6931530726, 0.2401536223, 0.0558263026, 0.0089893585, 0.0018775691)))
"""A polynomial for powers of two from 0 to 1: least squares, weighted to equal relative errors, of 1.6e-7 at most.

``math.exp`` is compiled to a call for each number: with it 16 tokens take 1.1 to 1.2 times as long, and one token 0.93 times.
"""

ONE, TWO, ZERO = np.float32(1), np.float32(2), np.float32(0)
ERF = tuple(map(np.float32, (0.3275911, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)))
"""erf to 1.5e-7 (Abramowitz and Stegun, Handbook of Mathematical Functions, 1964, 7.1.26)."""

HALF, ROOT_HALF, FAR = np.float32(0.5), np.float32(math.sqrt(0.5)), np.float32(16)
GELU_FACTOR, GELU_CUBE = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)


@inner
def exp(value: Any) -> Any:
    """The exponential of a float32, at least e**-87; NaN stays."""
    exponent = value * LOG2_E
    exponent = LEAST if exponent < LEAST else exponent
    exponent = MOST if exponent > MOST else exponent
    whole = np.floor(exponent)
    rest = exponent - whole
    found = EXP2[5]
    found = found * rest + EXP2[4]
    found = found * rest + EXP2[3]
    found = found * rest + EXP2[2]
    found = found * rest + EXP2[1]
    found = found * rest + EXP2[0]
    return found * from_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


@summing("void(i8, i8, i8, i8, i8, i8)")
def of_two(  # noqa: C901 - a loop for each function
    code: int, x_address: int, y_address: int, found_address: int, count: int, y_count: int
) -> None:
    """A function of each of ``count`` elements of x and of y, or of all elements of x and the one of y."""
    x, y, found = floats_at(x_address), floats_at(y_address), floats_at(found_address)
    if code == Function.CAT:
        for k in range(count):
            found[k] = x[k]
        for k in range(y_count):
            found[count + k] = y[k]
        return
    if code == Function.ADD_INTS:
        whole, other, made = ints_at(x_address), ints_at(y_address), ints_at(found_address)
        for k in range(count):
            made[k] = whole[k] + other[k if y_count == count else 0]
        return
    if y_count == count:
        if code == Function.ADD:
            for k in range(count):
                found[k] = x[k] + y[k]
        elif code == Function.SUB:
            for k in range(count):
                found[k] = x[k] - y[k]
        elif code == Function.MUL:
            for k in range(count):
                found[k] = x[k] * y[k]
        else:
            for k in range(count):
                found[k] = x[k] / y[k]
        return
    one = y[0]
    if code == Function.ADD:
        for k in range(count):
            found[k] = x[k] + one
    elif code == Function.SUB:
        for k in range(count):
            found[k] = x[k] - one
    elif code == Function.MUL:
        for k in range(count):
            found[k] = x[k] * one
    else:
        for k in range(count):
            found[k] = x[k] / one


@summing("void(i8, i8, i8, i8)")
def of_one(code: int, x_address: int, found_address: int, count: int) -> None:  # noqa: C901 - a loop for each function
    """A function of each element of x, or the mean of all."""
    x, found = floats_at(x_address), floats_at(found_address)
    if code == Function.MEAN:
        total = ZERO
        for k in range(count):
            total += x[k]
        found[0] = total / np.float32(count)
    elif code == Function.NEG:
        for k in range(count):
            found[k] = -x[k]
    elif code == Function.RELU:
        for k in range(count):
            found[k] = ZERO if x[k] < ZERO else x[k]
    elif code == Function.SQRT:
        for k in range(count):
            found[k] = np.sqrt(x[k])
    elif code == Function.RSQRT:
        for k in range(count):
            found[k] = ONE / np.sqrt(x[k])
    elif code == Function.CUBE:
        for k in range(count):
            found[k] = x[k] * x[k] * x[k]
    elif code == Function.SIGMOID:
        for k in range(count):
            found[k] = ONE / (ONE + exp(-x[k]))
    elif code == Function.SILU:
        for k in range(count):
            found[k] = x[k] / (ONE + exp(-x[k]))
    elif code == Function.TANH:
        for k in range(count):
            found[k] = ONE - TWO / (ONE + exp(TWO * x[k]))
    elif code == Function.GELU_ERF:
        for k in range(count):
            size = abs(x[k])
            near = FAR if size > FAR else size
            far = near * ROOT_HALF
            part = ONE / (ONE + ERF[0] * far)
            tail = ((((ERF[5] * part + ERF[4]) * part + ERF[3]) * part + ERF[2]) * part + ERF[1]) * part * exp(-far * far)
            found[k] = HALF * x[k] + HALF * size - HALF * near * tail
    elif code == Function.COS:
        for k in range(count):
            found[k] = math.cos(x[k])
    elif code == Function.SIN:
        for k in range(count):
            found[k] = math.sin(x[k])
    elif code == Function.FLOAT:
        whole = ints_at(x_address)
        for k in range(count):
            found[k] = np.float32(whole[k])
    else:
        for k in range(count):
            inside = GELU_FACTOR * (x[k] + GELU_CUBE * x[k] * x[k] * x[k])
            found[k] = x[k] / (ONE + exp(-TWO * inside))


@summing("void(i8, i8, i8, i8, i8, i8, i8)")
def normalise(
    x_address: int, weight_address: int, found_address: int, bias_address: int, rows: int, cols: int, eps_bits: int
) -> None:
    """Layer norm (Ba et al., 2016) of dense rows; addresses of weight and bias are 0 for none."""
    weight, bias, eps = floats_at(weight_address), floats_at(bias_address), from_bits(np.int32(eps_bits))
    for row in range(rows):
        x, found = floats_at(x_address + 4 * row * cols), floats_at(found_address + 4 * row * cols)
        total = spread = ZERO
        for k in range(cols):
            total += x[k]
        mean = total / np.float32(cols)
        for k in range(cols):
            spread += (x[k] - mean) * (x[k] - mean)
        factor = ONE / np.sqrt(spread / np.float32(cols) + eps)
        for k in range(cols):
            found[k] = (x[k] - mean) * factor
        if weight_address:
            for k in range(cols):
                found[k] *= weight[k]
        if bias_address:
            for k in range(cols):
                found[k] += bias[k]


@summing("b1(i8, i8, i8, i8, i8, i8)")
def look_up(table_address: int, ids_address: int, found_address: int, count: int, cols: int, rows: int) -> bool:
    """Copy the rows of int64 ids from a dense table; whether it has all of them."""
    ids = ints_at(ids_address)
    for place in range(count):
        if ids[place] < 0 or ids[place] >= rows:
            return False
        row, found = floats_at(table_address + 4 * ids[place] * cols), floats_at(found_address + 4 * place * cols)
        for k in range(cols):
            found[k] = row[k]
    return True
