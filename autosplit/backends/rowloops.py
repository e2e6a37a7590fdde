"""The compiled loops of ``instructions``: products of a few rows with a weight, and functions of their elements."""

import math
from typing import Any

import numpy as np

from autosplit.jit import floats_at, from_bits, inner, ints_at, summing

Array = np.ndarray[Any, Any]

FUNCTIONS = (
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "relu",
    "sqrt",
    "rsqrt",
    "cube",
    "sigmoid",
    "silu",
    "tanh",
    "gelu",
    "gelu_erf",
    "mean",
    "norm",
    "lookup",
    "product",
    "product_by_columns",
)
"""What an instruction computes, by its code: of two elements, of one (``gelu`` with tanh), of a row, or of rows and a weight."""

LOG2_E = np.float32(math.log2(math.e))
LEAST, MOST = np.float32(-126), np.float32(128)
"""The smallest power of two of a float32, and the one whose bits are infinity."""

EXP2 = tuple(map(np.float32, (0.9999999251, 0.6931530726, 0.2401536223, 0.0558263026, 0.0089893585, 0.0018775691)))
"""A polynomial for powers of two from 0 to 1: least squares, weighted to equal relative errors, of 1.6e-7 at most.

``math.exp`` is compiled to a call for each number: with it 16 tokens take 1.1 to 1.2 times as long, and one token 0.93 times.
"""

ADD, SUB, MUL, DIV, NEG, RELU, SQRT, RSQRT, CUBE, SIGMOID, SILU, TANH, GELU, GELU_ERF, MEAN = map(np.int64, range(15))
NORM, LOOKUP, PRODUCT, BY_COLUMNS = map(np.int64, range(15, len(FUNCTIONS)))
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

    Four rows of the weight that lie far apart are read at a time: with neighbours, whose bytes share a page, memory gives a
    fifth less for 9 MB. One, two or four rows of x go with them; the last one counts twice where there are three.

    Args: addresses of float32 ``x [rows, size]``, ``weight [features, size]``, ``bias [features]`` (0 for none) and
        ``found [rows, features]``, and the features.
    """
    x, weight, bias, found = floats_at(x_address), floats_at(weight_address), floats_at(bias_address), floats_at(found_address)
    quarter, last = (end - start + 3) // 4, rows - 1
    for n0 in range(start, start + quarter):
        n1, n2, n3 = min(n0 + quarter, end - 1), min(n0 + 2 * quarter, end - 1), min(n0 + 3 * quarter, end - 1)
        b0, b1, b2, b3 = (bias[n0], bias[n1], bias[n2], bias[n3]) if bias_address else (ZERO, ZERO, ZERO, ZERO)
        w0, w1, w2, w3 = n0 * size, n1 * size, n2 * size, n3 * size
        for m0 in range(0, last + 1, 4):
            m1 = min(m0 + 1, last)
            x0, x1 = m0 * size, m1 * size
            s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = ZERO
            if m0 == last:
                for part in range(size):
                    value = x[x0 + part]
                    s00 += value * weight[w0 + part]
                    s01 += value * weight[w1 + part]
                    s02 += value * weight[w2 + part]
                    s03 += value * weight[w3 + part]
                s10, s11, s12, s13 = s00, s01, s02, s03
            elif m1 == last:
                for part in range(size):
                    first, second, third, fourth = weight[w0 + part], weight[w1 + part], weight[w2 + part], weight[w3 + part]
                    value = x[x0 + part]
                    s00 += value * first
                    s01 += value * second
                    s02 += value * third
                    s03 += value * fourth
                    value = x[x1 + part]
                    s10 += value * first
                    s11 += value * second
                    s12 += value * third
                    s13 += value * fourth
            else:
                m2, m3 = m0 + 2, min(m0 + 3, last)
                x2, x3 = m2 * size, m3 * size
                s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = ZERO
                for part in range(size):
                    first, second, third, fourth = weight[w0 + part], weight[w1 + part], weight[w2 + part], weight[w3 + part]
                    value = x[x0 + part]
                    s00 += value * first
                    s01 += value * second
                    s02 += value * third
                    s03 += value * fourth
                    value = x[x1 + part]
                    s10 += value * first
                    s11 += value * second
                    s12 += value * third
                    s13 += value * fourth
                    value = x[x2 + part]
                    s20 += value * first
                    s21 += value * second
                    s22 += value * third
                    s23 += value * fourth
                    value = x[x3 + part]
                    s30 += value * first
                    s31 += value * second
                    s32 += value * third
                    s33 += value * fourth
                y2, y3 = m2 * features, m3 * features
                found[y2 + n0], found[y2 + n1], found[y2 + n2], found[y2 + n3] = s20 + b0, s21 + b1, s22 + b2, s23 + b3
                found[y3 + n0], found[y3 + n1], found[y3 + n2], found[y3 + n3] = s30 + b0, s31 + b1, s32 + b2, s33 + b3
            y0, y1 = m0 * features, m1 * features
            found[y0 + n0], found[y0 + n1], found[y0 + n2], found[y0 + n3] = s00 + b0, s01 + b1, s02 + b2, s03 + b3
            found[y1 + n0], found[y1 + n1], found[y1 + n2], found[y1 + n3] = s10 + b0, s11 + b1, s12 + b2, s13 + b3


@summing("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def multiply_by_columns(  # noqa: C901 - a loop for each number of rows
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
    """As ``multiply`` of ``found = x @ weight + bias``, of a weight ``[size, features]``: its rows are summed, four at a time.

    Four or two rows of x go with them, where there are so many: one at a time, four rows read weights at 7 GB/s in place of 10.
    """
    x, bias = floats_at(x_address), floats_at(bias_address + 4 * start)
    count, in_fours = end - start, size - size % 4
    for row in range(rows):
        found = floats_at(found_address + 4 * (row * features + start))
        for n in range(count):
            found[n] = bias[n] if bias_address else ZERO
    for part in range(0, in_fours, 4):
        address = weight_address + 4 * (part * features + start)
        w0, w1 = floats_at(address), floats_at(address + 4 * features)
        w2, w3 = floats_at(address + 8 * features), floats_at(address + 12 * features)
        row = 0
        while row < rows:
            f0, at0 = floats_at(found_address + 4 * (row * features + start)), row * size + part
            if row + 4 <= rows:
                f1, at1 = floats_at(found_address + 4 * ((row + 1) * features + start)), at0 + 1 * size
                f2, at2 = floats_at(found_address + 4 * ((row + 2) * features + start)), at0 + 2 * size
                f3, at3 = floats_at(found_address + 4 * ((row + 3) * features + start)), at0 + 3 * size
                x00, x01, x02, x03 = x[at0], x[at0 + 1], x[at0 + 2], x[at0 + 3]
                x10, x11, x12, x13 = x[at1], x[at1 + 1], x[at1 + 2], x[at1 + 3]
                x20, x21, x22, x23 = x[at2], x[at2 + 1], x[at2 + 2], x[at2 + 3]
                x30, x31, x32, x33 = x[at3], x[at3 + 1], x[at3 + 2], x[at3 + 3]
                for n in range(count):
                    v0, v1, v2, v3 = w0[n], w1[n], w2[n], w3[n]
                    f0[n] += x00 * v0 + x01 * v1 + x02 * v2 + x03 * v3
                    f1[n] += x10 * v0 + x11 * v1 + x12 * v2 + x13 * v3
                    f2[n] += x20 * v0 + x21 * v1 + x22 * v2 + x23 * v3
                    f3[n] += x30 * v0 + x31 * v1 + x32 * v2 + x33 * v3
                row += 4
            elif row + 2 <= rows:
                f1, at1 = floats_at(found_address + 4 * ((row + 1) * features + start)), at0 + 1 * size
                x00, x01, x02, x03 = x[at0], x[at0 + 1], x[at0 + 2], x[at0 + 3]
                x10, x11, x12, x13 = x[at1], x[at1 + 1], x[at1 + 2], x[at1 + 3]
                for n in range(count):
                    v0, v1, v2, v3 = w0[n], w1[n], w2[n], w3[n]
                    f0[n] += x00 * v0 + x01 * v1 + x02 * v2 + x03 * v3
                    f1[n] += x10 * v0 + x11 * v1 + x12 * v2 + x13 * v3
                row += 2
            else:
                x00, x01, x02, x03 = x[at0], x[at0 + 1], x[at0 + 2], x[at0 + 3]
                for n in range(count):
                    v0, v1, v2, v3 = w0[n], w1[n], w2[n], w3[n]
                    f0[n] += x00 * v0 + x01 * v1 + x02 * v2 + x03 * v3
                row += 1
    for part in range(in_fours, size):
        w0 = floats_at(weight_address + 4 * (part * features + start))
        for row in range(rows):
            found, factor = floats_at(found_address + 4 * (row * features + start)), x[row * size + part]
            for n in range(count):
                found[n] += factor * w0[n]


@summing("void(i8, i8, i8, i8, i8, b1)")
def of_two(  # noqa: C901 - a loop for each function
    code: int, x_address: int, y_address: int, found_address: int, count: int, each: bool
) -> None:
    """A function of each element of x and y, or with ``each`` off, of all elements of x and one of y."""
    x, y, found = floats_at(x_address), floats_at(y_address), floats_at(found_address)
    if each:
        if code == ADD:
            for k in range(count):
                found[k] = x[k] + y[k]
        elif code == SUB:
            for k in range(count):
                found[k] = x[k] - y[k]
        elif code == MUL:
            for k in range(count):
                found[k] = x[k] * y[k]
        else:
            for k in range(count):
                found[k] = x[k] / y[k]
        return
    one = y[0]
    if code == ADD:
        for k in range(count):
            found[k] = x[k] + one
    elif code == SUB:
        for k in range(count):
            found[k] = x[k] - one
    elif code == MUL:
        for k in range(count):
            found[k] = x[k] * one
    else:
        for k in range(count):
            found[k] = x[k] / one


@summing("void(i8, i8, i8, i8)")
def of_one(code: int, x_address: int, found_address: int, count: int) -> None:  # noqa: C901 - a loop for each function
    """A function of each element of x, or the mean of all."""
    x, found = floats_at(x_address), floats_at(found_address)
    if code == MEAN:
        total = ZERO
        for k in range(count):
            total += x[k]
        found[0] = total / np.float32(count)
    elif code == NEG:
        for k in range(count):
            found[k] = -x[k]
    elif code == RELU:
        for k in range(count):
            found[k] = ZERO if x[k] < ZERO else x[k]
    elif code == SQRT:
        for k in range(count):
            found[k] = np.sqrt(x[k])
    elif code == RSQRT:
        for k in range(count):
            found[k] = ONE / np.sqrt(x[k])
    elif code == CUBE:
        for k in range(count):
            found[k] = x[k] * x[k] * x[k]
    elif code == SIGMOID:
        for k in range(count):
            found[k] = ONE / (ONE + exp(-x[k]))
    elif code == SILU:
        for k in range(count):
            found[k] = x[k] / (ONE + exp(-x[k]))
    elif code == TANH:
        for k in range(count):
            found[k] = ONE - TWO / (ONE + exp(TWO * x[k]))
    elif code == GELU_ERF:
        for k in range(count):
            size = abs(x[k])
            near = FAR if size > FAR else size
            far = near * ROOT_HALF
            part = ONE / (ONE + ERF[0] * far)
            tail = ((((ERF[5] * part + ERF[4]) * part + ERF[3]) * part + ERF[2]) * part + ERF[1]) * part * exp(-far * far)
            found[k] = HALF * x[k] + HALF * size - HALF * near * tail
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
