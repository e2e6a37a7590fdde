"""Attention of single tokens, compiled: each reads its own keys and values in place, and no more of them than it sees."""

import math
from typing import Any

import numpy as np

from autosplit.backends.rowfunctions import exp
from autosplit.backends.rowproducts import multiply, multiply_by_columns
from autosplit.jit import floats_at, summing

Array = np.ndarray[Any, Any]

SIGNATURE = (
    "int64(f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,::1], f4[:,:,:,::1], i8[:], i8[:], i8[:], i8[:], f4, i8, f4, f4[:,:], "
    "f4[:,:], f4[:,:], f4[:,:,::1], i8[::1], f4[:,::1], f4[::1], f4[:,:,:,::1])"
)


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


@summing(SIGNATURE)
def attend_rows(  # noqa: C901 - one compiled loop
    q: Array,
    k: Array,
    v: Array,
    state_keys: Array,
    state_values: Array,
    slots: Array,
    positions: Array,
    kept_slots: Array,
    kept_positions: Array,
    scale: np.float32,
    window: int,
    softcap: np.float32,
    cos: Array,
    sin: Array,
    bias: Array,
    turned: Array,
    counts: Array,
    queries: Array,
    scores: Array,
    found: Array,
) -> int:
    """Keep the keys and values of M tokens, and attend for those of N tokens that are alone of their slot.

    Args:
        q: float32 ``[1, heads, N, dim]``; k, v: ``[1, num_heads, M, dim]`` and ``[1, num_heads, M, value_dim]``. Elements of a
            row lie side by side in all arguments.
        state_keys, state_values: ``[slots, num_heads, max_length, dim]``.
        slots, positions: int64 ``[N]``; kept_slots, kept_positions: those of the keys and values, ``[M]``.
        scale: factor of the scores.
        window: places that a token sees; 0 for all.
        softcap: as for ``KVCache.forward``; 0 for none.
        cos, sin: float32 ``[M, rotary_dim]``, by which k is rotated, and q by the first N; no columns where nothing is.
        bias: as for ``KVCache.forward``; ``[heads, 0]`` for none.
        turned: float32 ``[heads, N, dim]``, becomes q after its rotation.
        counts: int64 ``[slots]``, to work in, as float32 ``queries`` ``[heads of a group, dim]``, a group's of a token, and
            ``scores`` ``[heads of a group * max_length]``.
        found: float32 ``[1, N, heads, value_dim]``; rows of other tokens become zeros.
    Returns: the number of tokens of slots with several; slot 0 counts where there is no other, for else it is padding.
    """
    num_kv, length = state_keys.shape[1:3]
    num_each, dim, value_dim, rotary_dim = q.shape[1] // num_kv, q.shape[3], v.shape[3], cos.shape[1]
    counts[:] = 0
    for row in range(len(slots)):
        counts[slots[row]] += 1
        angles = cos.ctypes.data + row * cos.strides[0], sin.ctypes.data + row * sin.strides[0]
        for head in range(q.shape[1]):
            source = q.ctypes.data + head * q.strides[1] + row * q.strides[2]
            turn(source, angles[0], angles[1], turned.ctypes.data + 4 * dim * (head * len(slots) + row), dim, rotary_dim)
    for row in range(len(kept_slots)):
        slot, place = kept_slots[row], kept_positions[row]
        if place < length:
            angles = cos.ctypes.data + row * cos.strides[0], sin.ctypes.data + row * sin.strides[0]
            for kv in range(num_kv):
                at = (slot * num_kv + kv) * length + place
                source = k.ctypes.data + kv * k.strides[1] + row * k.strides[2]
                turn(source, angles[0], angles[1], state_keys.ctypes.data + 4 * dim * at, dim, rotary_dim)
                source = v.ctypes.data + kv * v.strides[1] + row * v.strides[2]
                turn(source, source, source, state_values.ctypes.data + 4 * value_dim * at, value_dim, 0)
    num_others = 0
    for row in range(len(slots)):
        if counts[slots[row]] > 1:
            if slots[row] or counts[0] == len(slots):
                num_others += 1
            found[0, row] = 0
            continue
        end = max(min(positions[row] + 1, length), 1)  # a token of no sequence may see nothing
        start = max(0, positions[row] + 1 - window) if window else 0
        count = end - start
        for kv in range(num_kv):
            for number in range(num_each):
                for part in range(dim):
                    queries[number, part] = turned[kv * num_each + number, row, part]
            at = (slots[row] * num_kv + kv) * length + start
            keys, values = state_keys.ctypes.data + 4 * dim * at, state_values.ctypes.data + 4 * value_dim * at
            multiply(queries.ctypes.data, keys, 0, scores.ctypes.data, num_each, dim, count, 0, count)
            for place in range(num_each * count):
                scores[place] *= scale
            if bias.shape[1]:
                for number in range(num_each):
                    for place in range(count):
                        distance = min(positions[row] - start - place, bias.shape[1] - 1)
                        scores[number * count + place] += bias[kv * num_each + number, distance]
            if softcap:
                for place in range(num_each * count):
                    scores[place] = np.float32(math.tanh(scores[place] / softcap)) * softcap
            for number in range(num_each):
                soften(scores.ctypes.data + 4 * number * count, count)
            answers = found.ctypes.data + 4 * value_dim * ((row * num_kv + kv) * num_each)
            multiply_by_columns(scores.ctypes.data, values, 0, answers, num_each, count, value_dim, 0, value_dim)
    return num_others
