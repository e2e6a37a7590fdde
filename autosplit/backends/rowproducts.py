"""Products of a few rows with a weight as it is stored, compiled."""

import numpy as np

from autosplit.jit import floats_at, summing

ZERO = np.float32(0)


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
