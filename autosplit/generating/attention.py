"""Attention over keys and values of earlier steps: the operator ``autosplit::attend``, and ``KVCache``, the memory it writes.

A step runs N tokens of any sequences. Each token has a slot, the place of its sequence in the cache, and a position in it::

    slots       3  3  3  1  5          slot 1   [ k0 k1 k2 k3 .. ]    a token at position 4 sees k0 to k4
    positions   0  1  2  4  9          slot 3   [ .. .. .. .. .. ]    a chunk of a prompt: each token sees those before it

Slot 0 is scratch: no sequence has it, so that a step may be padded with zeros and a worker may warm up on zeros.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from autosplit.arguments import checked
from autosplit.errors import UsageError

LEAST_TOGETHER, MOST_WASTE = 12, 1.5
"""Single tokens of so many sequences run in one call, if it reads at most this many times the places that they see.

One call in place of 16 took 0.6 to 1.0 of the time (2 to 12 heads of keys, 128 and 512 places, one thread), and 0.9 to 1.1 in
place of 8."""

_library: Any = torch.library  # its functions have no types
_operators = _library.Library("autosplit", "FRAGMENT")
_operators.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor state_keys, Tensor state_values, Tensor slots, Tensor positions, float scale, "
    "int? window=None, float? softcap=None) -> Tensor"
)


@checked
class KVCache(nn.Module):
    """Keys and values of the tokens of all sequences, for one layer of attention.

    Args:
        max_sequences: sequences side by side; slot 0 comes on top.
        max_length: tokens of a sequence.
        num_heads: heads of keys and values.
        head_dim: elements of a key.
        value_dim: elements of a value; those of a key by default.
        dtype: of keys and values.
    Raises: UsageError: a number is below 1.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(
        self,
        max_sequences: int,
        max_length: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        shape = (max_sequences + 1, num_heads, max_length)
        if min(max_sequences, num_heads, max_length, head_dim, value_dim) < 1:
            raise UsageError(
                f"a cache of {max_sequences} sequences, {max_length} tokens, {num_heads} heads, {head_dim} elements of a key and "
                f"{value_dim} of a value cannot be made; each must be at least 1"
            )
        self.register_buffer("keys", torch.zeros(*shape, head_dim, dtype=dtype), persistent=False)
        self.register_buffer("values", torch.zeros(*shape, value_dim, dtype=dtype), persistent=False)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Keep the keys and values of N tokens, and attend from each token to those of its sequence, up to its own position.

        Args:
            q: ``[1, heads, N, head_dim]``; heads is a multiple of the number of heads of keys and values.
            k, v: ``[1, num_heads, N, head_dim]`` and ``[1, num_heads, N, value_dim]``.
            slots, positions: ``[N]``, int64.
            scale: factor of the scores; by default the inverse square root of head_dim.
            window: a token sees this many positions, its own among them; None for all.
            softcap: scores s become ``softcap * tanh(s / softcap)``.
        Returns: ``[1, N, heads, value_dim]``.
        """
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        found: torch.Tensor = torch.ops.autosplit.attend(
            q, k, v, self.keys, self.values, slots, positions, factor, window, softcap
        )
        return found


def _attended_shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """An empty answer of the operator."""
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


_library.register_fake("autosplit::attend", _attended_shape)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state_keys: torch.Tensor,
    state_values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The operator ``autosplit::attend``; arguments as for ``KVCache.forward``.

    The states ``[slots, num_heads, max_length, dim]`` are written, and the schema does not say so: torch would copy them at each
    call of a graph, or not, as its passes decide. It is safe because no other op reads a state, and because a step that runs
    again writes the same rows again. Tokens at positions from max_length on are not kept. A token at position 0 begins a
    sequence: what another one left in the slot becomes zeros first, because a mask does not hide NaN.
    """
    num_kv, (length, dim) = k.shape[1], state_values.shape[2:]
    num_each, count = q.shape[1] // num_kv, len(slots)
    slot_of, position_of = slots.tolist(), positions.tolist()
    if 0 in position_of:
        for slot in {slot for slot, position in zip(slot_of, position_of, strict=True) if slot and not position}:
            state_keys[slot], state_values[slot] = 0, 0
    _keep(k, v, state_keys, state_values, slots, positions, slot_of, position_of)
    first_seen = [0 if window is None else max(0, position + 1 - window) for position in position_of]
    ends = [min(position + 1, length) for position in position_of]
    found = q.new_zeros(1, count, q.shape[1], dim)
    grouped, answers = q[0].view(num_kv, num_each, count, -1), found.view(count, num_kv, num_each, dim)
    together = _num_together(slot_of, first_seen, ends) if count >= LEAST_TOGETHER else 0
    if together:
        own, places = slice(slot_of[0], slot_of[together - 1] + 1), slice(min(first_seen[:together]), max(ends[:together]))
        at = slots[:together] - own.start, positions[:together]
        queries = grouped[:, :, :together].permute(2, 0, 1, 3)
        states = state_keys[own, :, places], state_values[own, :, places]
        answers[:together] = _attend_together(queries, *states, *at, places, window, scale, softcap)
    for slot, rows in _rows_by_slot(slot_of, together).items():
        start, end = min(first_seen[row] for row in rows), max(ends[row] for row in rows)
        keys, values = state_keys[None, slot, :, start:end], state_values[None, slot, :, start:end]
        if len(rows) == 1:
            answers[rows[0]] = _attention(grouped[None, :, :, rows[0]], keys, values, None, scale, softcap)[0]
            continue
        some = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else torch.tensor(rows)
        mask = _visible(positions[some], start, end, window).repeat(num_each, 1)
        made = _attention(grouped[None, :, :, some].flatten(2, 3), keys, values, mask, scale, softcap)
        answers[some] = made.view(num_kv, num_each, len(rows), dim).permute(2, 0, 1, 3)
    return found


_operators.impl("attend", attend, "CompositeExplicitAutograd")


def _num_together(slot_of: Sequence[int], first_seen: Sequence[int], ends: Sequence[int]) -> int:
    """The leading tokens that one call computes, each alone of its sequence, with slots that ascend; 0 if that wastes time.

    The call reads the places of all slots between the first and the last, up to the last place that one of them sees.
    """
    counts = Counter(slot_of)
    num = 0
    while num < len(slot_of) and slot_of[num] and counts[slot_of[num]] == 1 and slot_of[num] > max(slot_of[num - 1 : num] or [0]):
        num += 1
    if num < LEAST_TOGETHER:
        return 0
    read = (slot_of[num - 1] + 1 - slot_of[0]) * (max(ends[:num]) - min(first_seen[:num]))
    return num if read <= MOST_WASTE * (sum(ends[:num]) - sum(first_seen[:num])) else 0


def _attend_together(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    places: slice,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of one token each of many sequences; ``rows`` are their places among the slots that ``keys`` hold.

    A slot between them, of which no token is in this step, gets a query of zeros, whose answer is left out.
    """
    all_queries = queries.new_zeros(len(keys), *queries.shape[1:])
    all_queries[rows] = queries
    at = positions.new_zeros(len(keys)).index_copy_(0, rows, positions)
    mask = _visible(at, places.start, places.stop, window)[:, None, None]
    return _attention(all_queries, keys, values, mask, scale, softcap)[rows]


def _rows_by_slot(slot_of: Sequence[int], start: int) -> dict[int, list[int]]:
    """Slot to its tokens from ``start`` on. Where there are sequences, slot 0 is padding, whose answers nobody reads."""
    found: dict[int, list[int]] = {}
    has_sequences = any(slot_of)
    for row in range(start, len(slot_of)):
        if slot_of[row] or not has_sequences:
            found.setdefault(slot_of[row], []).append(row)
    return found


def _keep(
    k: torch.Tensor,
    v: torch.Tensor,
    state_keys: torch.Tensor,
    state_values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    slot_of: Sequence[int],
    position_of: Sequence[int],
) -> None:
    """Write the keys and values of tokens to their places in the states."""
    length = state_keys.shape[2]
    if len(slot_of) == 1:
        if position_of[0] < length:
            state_keys[slot_of[0], :, position_of[0]] = k[0, :, 0]
            state_values[slot_of[0], :, position_of[0]] = v[0, :, 0]
        return
    rows: slice | torch.Tensor = slice(None)
    if max(position_of) >= length:
        rows = torch.tensor([row for row, position in enumerate(position_of) if position < length], dtype=torch.int64)
    places = slots[rows], positions[rows]
    state_keys[places[0], :, places[1]] = k[0, :, rows].transpose(0, 1)
    state_values[places[0], :, places[1]] = v[0, :, rows].transpose(0, 1)


def _visible(positions: torch.Tensor, start: int, end: int, window: int | None) -> torch.Tensor:
    """``[N, end - start]``: whether a token at a position sees each of these places."""
    own, places = positions[:, None], torch.arange(start, end, device=positions.device)
    return places <= own if window is None else (places <= own) & (places > own - window)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float | None
) -> torch.Tensor:
    """Softmax attention of ``[sequences, num_heads, queries, dim]`` to ``[sequences, num_heads, places, dim]``."""
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1) @ v
