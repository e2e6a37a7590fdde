"""Attention of single tokens, compiled: each reads its own keys and values in place, and no more of them than it sees."""

import math
from typing import Any

import numpy as np

from autosplit.backends.rowloops import exp
from autosplit.jit import summing

Array = np.ndarray[Any, Any]

SIGNATURE = (
    "int64(f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,::1], f4[:,:,:,::1], i8[:], i8[:], i8[:], i8[:], f4, i8, f4, f4[:,:], "
    "f4[:,:], f4[:,:], f4[:,:,::1], i8[::1], f4[::1], f4[:,:,:,::1])"
)


@summing("void(f4[:], f4[:], f4[:], f4[::1])")
def turn(row: Array, cos: Array, sin: Array, turned: Array) -> None:
    """Rotate pairs of elements, which are half of ``rotary_dim`` apart, by the angles of a position (Su et al., RoFormer, 2021).

    Args:
        row: ``[dim]``, of which the elements from rotary_dim on stay as they are.
        cos, sin: ``[rotary_dim]``.
        turned: ``[dim]``, the answer.
    """
    half = len(cos) // 2
    for part in range(half):
        first, second = row[part], row[half + part]
        turned[part] = first * cos[part] - second * sin[part]
        turned[half + part] = second * cos[half + part] + first * sin[half + part]
    for part in range(2 * half, len(row)):
        turned[part] = row[part]


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
    scores: Array,
    found: Array,
) -> int:
    """Keep the keys and values of M tokens, and attend for those of N tokens that are alone of their slot.

    Args:
        q: float32 ``[1, heads, N, dim]``; k, v: ``[1, num_heads, M, dim]`` and ``[1, num_heads, M, value_dim]``.
        state_keys, state_values: ``[slots, num_heads, max_length, dim]``.
        slots, positions: int64 ``[N]``; kept_slots, kept_positions: those of the keys and values, ``[M]``.
        scale: factor of the scores.
        window: places that a token sees; 0 for all.
        softcap: as for ``KVCache.forward``; 0 for none.
        cos, sin: float32 ``[N, rotary_dim]``, by which q and k are rotated; rotary_dim is 0 where they are as they should be.
        bias: as for ``KVCache.forward``; ``[heads, 0]`` for none.
        turned: float32 ``[heads, N, dim]``, becomes q after its rotation.
        counts: int64 ``[slots]``, to work in, as float32 ``scores`` ``[max_length]``.
        found: float32 ``[1, N, heads, value_dim]``; rows of other tokens become zeros.
    Returns: the number of tokens of slots with several; slot 0 counts where there is no other, for else it is padding.
    """
    num_kv, length = state_keys.shape[1:3]
    num_each, dim, value_dim = q.shape[1] // num_kv, q.shape[3], v.shape[3]
    counts[:] = 0
    for row in range(len(slots)):
        counts[slots[row]] += 1
        for head in range(q.shape[1]):
            turn(q[0, head, row], cos[row], sin[row], turned[head, row])
    for row in range(len(kept_slots)):
        slot, place = kept_slots[row], kept_positions[row]
        if place < length:
            for kv in range(num_kv):
                turn(k[0, kv, row], cos[row], sin[row], state_keys[slot, kv, place])
                for part in range(value_dim):
                    state_values[slot, kv, place, part] = v[0, kv, row, part]
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
        for head in range(q.shape[1]):
            answer = found[0, row, head]
            query = turned[head, row]
            keys, values = state_keys[slots[row], head // num_each], state_values[slots[row], head // num_each]
            top = np.float32(-np.inf)
            in_fours = count - count % 4
            for place in range(0, in_fours, 4):  # several sums at once, for the processor waits for one
                first = second = third = fourth = np.float32(0)
                at = start + place
                for part in range(dim):
                    value = query[part]
                    first += value * keys[at, part]
                    second += value * keys[at + 1, part]
                    third += value * keys[at + 2, part]
                    fourth += value * keys[at + 3, part]
                scores[place], scores[place + 1], scores[place + 2], scores[place + 3] = first, second, third, fourth
            for place in range(in_fours, count):
                score = np.float32(0)
                for part in range(dim):
                    score += query[part] * keys[start + place, part]
                scores[place] = score
            for place in range(count):
                scores[place] *= scale
            if bias.shape[1]:
                for place in range(count):
                    scores[place] += bias[head, min(positions[row] - start - place, bias.shape[1] - 1)]
            if softcap:
                for place in range(count):
                    scores[place] = np.float32(math.tanh(scores[place] / softcap)) * softcap
            for place in range(count):
                top = max(top, scores[place])
            total = np.float32(0)
            for place in range(count):
                scores[place] = exp(scores[place] - top)
                total += scores[place]
            answer[:] = 0
            for place in range(0, in_fours, 4):
                first, second, third, fourth = scores[place], scores[place + 1], scores[place + 2], scores[place + 3]
                at = start + place
                for part in range(value_dim):
                    answer[part] += (
                        first * values[at, part]
                        + second * values[at + 1, part]
                        + third * values[at + 2, part]
                        + fourth * values[at + 3, part]
                    )
            for place in range(in_fours, count):
                for part in range(value_dim):
                    answer[part] += scores[place] * values[start + place, part]
            for part in range(value_dim):
                answer[part] /= total
    return num_others
