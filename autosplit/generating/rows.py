"""Attention of single tokens, compiled: each reads its own keys and values in place, and no more of them than it sees."""

import math
from typing import Any

import numpy as np

from autosplit.backends.rowfunctions import ZERO, exp
from autosplit.backends.rowproducts import multiply, multiply_by_columns
from autosplit.jit import floats_at, from_bits, ints_at, summing

Array = np.ndarray[Any, Any]


@summing("void(i8, i8, i8, i8, i8, i8)")
def turn(row_address: int, cos_address: int, sin_address: int, turned_address: int, dim: int, rotary_dim: int) -> None:
    """Rotate pairs of elements, which are half of ``rotary_dim`` apart, by the angles of a position (Su et al., RoFormer, 2021).

    Args: addresses of ``row [dim]``, of which the elements from rotary_dim on stay as they are, of ``cos`` and ``sin
        [rotary_dim]``, and of the answer ``turned [dim]``; and the sizes.
    """
    row, cos, sin, turned = floats_at(row_address), floats_at(cos_address), floats_at(sin_address), floats_at(turned_address)
    half = rotary_dim // 2
    for part in range(half):
        first, second = row[part], row[half + part]
        turned[part] = first * cos[part] - second * sin[part]
        turned[half + part] = second * cos[half + part] + first * sin[half + part]
    for part in range(2 * half, dim):
        turned[part] = row[part]


@summing("void(i8, i8)")
def soften(address: int, count: int) -> None:
    """The softmax of scores, in their place. Four maxima at once, for the processor waits for one."""
    scores = floats_at(address)
    first = second = third = fourth = np.float32(-np.inf)
    in_fours = count - count % 4
    for place in range(0, in_fours, 4):
        first, second = max(first, scores[place]), max(second, scores[place + 1])
        third, fourth = max(third, scores[place + 2]), max(fourth, scores[place + 3])
    for place in range(in_fours, count):
        first = max(first, scores[place])
    top, total = max(max(first, second), max(third, fourth)), np.float32(0)
    for place in range(count):
        scores[place] = exp(scores[place] - top)
    for place in range(count):
        total += scores[place]
    for place in range(count):
        scores[place] /= total


@summing("i8(i8[::1])")
def attend_rows(words: Array) -> int:  # noqa: C901 - one compiled loop
    """Keep the keys and values of M tokens, and attend for those of N tokens that are alone of their slot.

    Args: one int64 for each of these. A call with arrays takes 50 us where the processor's caches are full of weights, because
        numba looks at each of them.

        q, k, v: addresses of float32 ``[heads, N, dim]``, ``[num_kv, M, dim]`` and ``[num_kv, M, value_dim]``, each with the
            bytes from one head and from one token to the next.
        state_keys, state_values: addresses of ``[slots, num_kv, length, dim]``.
        slots, positions: addresses of int64 ``[N]``; kept_slots, kept_positions: those of the keys and values, ``[M]``.
        cos, sin: addresses of float32 ``[M, rotary_dim]``, each with the bytes from one row to the next; k is rotated by them,
            and q by the first N. rotary_dim is 0 where they are as they should be.
        bias: address as for ``KVCache.forward``, ``[heads, bias_length]``; bias_length is 0 for none.
        turned: address of float32 ``[heads, N, dim]``, becomes q after its rotation.
        counts, queries, scores: addresses of int64 ``[slots]``, float32 ``[heads of a group, dim]`` and ``[heads of a group *
            length]``, to work in.
        found: address of float32 ``[N, heads, value_dim]``; rows of other tokens become zeros.
        num_rows, num_kept, num_slots, num_heads, num_kv, length, dim, value_dim, rotary_dim, bias_length: sizes.
        scale: factor of the scores, the bits of a float32.
        window: places that a token sees; 0 for all.
        softcap: as for ``KVCache.forward``, the bits of a float32; 0 for none.
    Returns: the number of tokens of slots with several; slot 0 counts where there is no other, for else it is padding.
    """
    q, q_head, q_row, k, k_head, k_row, v, v_head, v_row = (
        words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7], words[8],
    )  # fmt: skip
    state_keys, state_values = words[9], words[10]
    slots, positions, kept_slots, kept_positions = ints_at(words[11]), ints_at(words[12]), ints_at(words[13]), ints_at(words[14])
    cos, cos_row, sin, sin_row = words[15], words[16], words[17], words[18]
    bias, turned, counts, queries = floats_at(words[19]), words[20], ints_at(words[21]), words[22]
    scores, found = floats_at(words[23]), words[24]
    num_rows, num_kept, num_slots, num_heads, num_kv = words[25], words[26], words[27], words[28], words[29]
    length, dim, value_dim, rotary_dim, bias_length = words[30], words[31], words[32], words[33], words[34]
    scale, window, softcap = from_bits(np.int32(words[35])), words[36], from_bits(np.int32(words[37]))
    num_each, num_others = num_heads // num_kv, 0
    for slot in range(num_slots):
        counts[slot] = 0
    for row in range(num_rows):
        counts[slots[row]] += 1
        for head in range(num_heads):
            source, target = q + head * q_head + row * q_row, turned + 4 * dim * (head * num_rows + row)
            turn(source, cos + row * cos_row, sin + row * sin_row, target, dim, rotary_dim)
    for row in range(num_kept):
        slot, place = kept_slots[row], kept_positions[row]
        if place < length:
            for kv in range(num_kv):
                at = (slot * num_kv + kv) * length + place
                source = k + kv * k_head + row * k_row
                turn(source, cos + row * cos_row, sin + row * sin_row, state_keys + 4 * dim * at, dim, rotary_dim)
                source = v + kv * v_head + row * v_row
                turn(source, source, source, state_values + 4 * value_dim * at, value_dim, 0)
    for row in range(num_rows):
        if counts[slots[row]] > 1:
            if slots[row] or counts[0] == num_rows:
                num_others += 1
            others = floats_at(found + 4 * value_dim * num_heads * row)
            for part in range(value_dim * num_heads):
                others[part] = ZERO
            continue
        end = max(min(positions[row] + 1, length), 1)  # a token of no sequence may see nothing
        start = max(0, positions[row] + 1 - window) if window else 0
        count = end - start
        for kv in range(num_kv):
            for number in range(num_each):
                source, target = turned + 4 * dim * ((kv * num_each + number) * num_rows + row), queries + 4 * dim * number
                turn(source, source, source, target, dim, 0)
            at = (slots[row] * num_kv + kv) * length + start
            keys, values = state_keys + 4 * dim * at, state_values + 4 * value_dim * at
            multiply(queries, keys, 0, words[23], num_each, dim, count, 0, count)
            for place in range(num_each * count):
                scores[place] *= scale
            if bias_length:
                for number in range(num_each):
                    for place in range(count):
                        distance = min(positions[row] - start - place, bias_length - 1)
                        scores[number * count + place] += bias[(kv * num_each + number) * bias_length + distance]
            if softcap:
                for place in range(num_each * count):
                    scores[place] = np.float32(math.tanh(scores[place] / softcap)) * softcap
            for number in range(num_each):
                soften(words[23] + 4 * number * count, count)
            answers = found + 4 * value_dim * ((row * num_kv + kv) * num_each)
            multiply_by_columns(words[23], values, 0, answers, num_each, count, value_dim, 0, value_dim)
    return num_others
