"""Attention over keys and values of earlier steps: the operator ``autosplit::attend``, and ``KVCache``, the memory it writes.

A step runs N tokens of any sequences. Each token has a slot, the place of its sequence in the cache, and a position in it::

    slots       3  3  3  1  5          slot 1   [ k0 k1 k2 k3 .. ]    a token at position 4 sees k0 to k4
    positions   0  1  2  4  9          slot 3   [ .. .. .. .. .. ]    a chunk of a prompt: each token sees those before it

Slot 0 is scratch: no sequence has it, so that a step may be padded with zeros and a worker may warm up on zeros.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from autosplit.arguments import checked
from autosplit.devices.limits import memory_limit_bytes
from autosplit.errors import UsageError
from autosplit.tables import bytes_text
from autosplit.tracing.programs import PREPARED

_library: Any = torch.library  # its functions have no types
_operators = _library.Library("autosplit", "FRAGMENT")
_operators.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor state_keys, Tensor state_values, Tensor slots, Tensor positions, float scale, "
    "int? window=None, float? softcap=None, Tensor? cos=None, Tensor? sin=None, Tensor? bias=None, Tensor? kept_slots=None, "
    "Tensor? kept_positions=None) -> Tensor"
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
    Raises: UsageError: a number is below 1, or this machine has too little memory.
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
        require_memory(math.prod(shape) * (head_dim + value_dim) * dtype.itemsize, max_sequences, max_length)
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
        bias: torch.Tensor | None = None,
        kept: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Keep the keys and values of N tokens, and attend from each token to those of its sequence, up to its own position.

        Args:
            q: ``[1, heads, N, head_dim]``; heads is a multiple of the number of heads of keys and values.
            k, v: ``[1, num_heads, N, head_dim]`` and ``[1, num_heads, N, value_dim]``; M in place of N where ``kept`` is given.
            slots, positions: ``[N]``, int64.
            scale: factor of the scores; by default the inverse square root of head_dim.
            window: a token sees this many positions, its own among them; None for all.
            softcap: scores s become ``softcap * tanh(s / softcap)``.
            bias: ``[heads, max_length]``, added to the score of a position so many places before the token's own. It goes with no
                softcap.
            kept: slots and positions ``[M]`` of the keys and values, where they are of other tokens than the queries: a decoder
                attends to the outputs of the encoder.
        Returns: ``[1, N, heads, value_dim]``.
        """
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        places = (slots, positions, factor, window, softcap)
        found: torch.Tensor = torch.ops.autosplit.attend(
            q, k, v, self.keys, self.values, *places, None, None, bias, *(kept or (None, None))
        )
        return found


def require_memory(num_bytes: int, max_sequences: int, max_length: int) -> None:
    """Raises: UsageError: caches of so many bytes are larger than the memory of this machine, which fills as sequences come."""
    most = memory_limit_bytes()
    if num_bytes > most:
        raise UsageError(
            f"caches for {max_sequences} sequences of {max_length} tokens take {bytes_text(num_bytes)}, and this machine has "
            f"{bytes_text(most)} of memory; give fewer sequences (max_sequences) or shorter ones (max_length)"
        )


def _attended_shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """An empty answer of the operator."""
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


_library.register_fake("autosplit::attend", _attended_shape)


class _Call(NamedTuple):
    """The arguments of the operator; see ``KVCache.forward``. States are ``[slots, num_heads, max_length, dim]``.

    ``cos`` and ``sin`` have a row for each key. By them it rotates k, and q by their first rows, before it attends (see
    ``backends.simplifying``).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    state_keys: torch.Tensor
    state_values: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    scale: float
    window: int | None = None
    softcap: float | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    kept_slots: torch.Tensor | None = None
    kept_positions: torch.Tensor | None = None

    @property
    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots and the positions of the keys and values."""
        own = self.kept_slots is None or self.kept_positions is None
        return (self.slots, self.positions) if own else (self.kept_slots, self.kept_positions)  # type: ignore[return-value]


def attend(*arguments: Any, **options: Any) -> torch.Tensor:
    """The operator ``autosplit::attend``.

    It writes the states, and its schema hides that, because passes of torch might otherwise copy them at each call of a graph.
    That is safe because no other op reads a state, and because a step that runs again writes the same rows again. Tokens at
    positions from max_length on are not kept. Only places that the sequence has written are read, never rows of an earlier one
    in the slot: a mask would not hide its NaN.
    """
    found, run = prepare_attend(*arguments, **options)
    run()
    return found


_operators.impl("attend", attend, "CompositeExplicitAutograd")


def prepare_attend(
    *arguments: Any, empty: Callable[..., torch.Tensor] | None = None, **options: Any
) -> tuple[torch.Tensor, Callable[[], object]]:
    """The memory of the answer of ``attend``, and a function that computes it from the contents of the arguments at its call."""
    given = _Call(*arguments, **options)
    empty, dtype = empty or given.q.new_empty, given.q.dtype
    found = empty((1, given.q.shape[2], given.q.shape[1], given.v.shape[3]), dtype=dtype)
    rows = [one for one in (given.q, given.k, given.v, given.cos, given.sin) if one is not None]
    whole, places = [given.state_keys, given.state_values], [given.slots, given.positions, *given.kept]
    whole += [] if given.bias is None else [given.bias]
    in_rows = all(one.shape[-1] == 1 or one.stride(-1) == 1 for one in rows)
    is_whole = all(one.is_contiguous() for one in (*whole, *places))
    kinds = {one.dtype for one in (*rows, *whole)}, {one.dtype for one in places}
    if given.q.is_cpu and in_rows and is_whole and kinds == ({torch.float32}, {torch.int64}):
        turned = given._replace(q=empty(given.q.shape, dtype=dtype))
        attend_alone = _alone(given, turned.q, found)

        def run() -> None:
            if attend_alone():
                _attend_slots(turned, found, least=2)
    else:

        def run() -> None:
            found.zero_()
            turned = given if given.cos is None else given._replace(q=_turned(given, given.q), k=_turned(given, given.k))
            _keep(turned)
            _attend_slots(turned, found, least=1)

    return found, run


PREPARED[torch.ops.autosplit.attend.default] = prepare_attend


def _alone(given: _Call, turned: torch.Tensor, found: torch.Tensor) -> Callable[[], int]:
    """A call of ``attend_rows``, which keeps the keys and values, too, and rotates the queries into ``turned``."""
    from autosplit.generating.rows import attend_rows  # loads numba

    (num_slots, num_kv, length, dim), value_dim = given.state_keys.shape, given.state_values.shape[3]
    count, num_heads, kept = len(given.slots), given.q.shape[1], given.kept
    num_each = num_heads // num_kv
    nothing = torch.empty(len(kept[0]), 0)
    cos, sin = (nothing if one is None else one.view(len(kept[0]), -1) for one in (given.cos, given.sin))
    bias = torch.empty(num_heads, 0) if given.bias is None else given.bias
    work = torch.empty(num_slots, dtype=torch.int64), torch.empty(num_each, dim), torch.empty(num_each * length)
    in_rows = [(one, *(4 * stride for stride in one.stride()[1:3])) for one in (given.q, given.k, given.v)]
    tables = [(one, 4 * one.stride(0)) for one in (cos, sin)]
    held = [*in_rows, *given[3:7], *kept, *tables, bias, turned, *work, found]
    flat = [part for one in held for part in (one if isinstance(one, tuple) else (one,))]
    sizes = count, len(kept[0]), num_slots, num_heads, num_kv, length, dim, value_dim, cos.shape[1], bias.shape[1]
    scale, softcap = (int(np.float32(one).view(np.int32)) for one in (given.scale, given.softcap or 0))
    addresses = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in flat]
    words = np.array([*addresses, *sizes, scale, given.window or 0, softcap], np.int64)
    call: Callable[..., int] = attend_rows

    def run(_: object = held) -> int:  # which keeps the tensors as long as this call lives
        return call(words)

    return run


class _Chunk(NamedTuple):
    """Tokens of one slot, which attend in one call: their places among the tokens of the step, and what they see.

    ``mask``: ``[times * N, end - start]``, N tokens for each query head: 0 where a token sees a place, else -infinity.
    """

    slot: int
    rows: slice | torch.Tensor
    num_rows: int
    start: int
    end: int
    mask: torch.Tensor


def _attend_slots(given: _Call, found: torch.Tensor, least: int) -> None:
    """Attend for the tokens of slots with at least ``least`` of them, in a call for each slot."""
    q = given.q
    (_, num_kv, length, _), dim = given.state_keys.shape, given.state_values.shape[3]
    num_each, count = q.shape[1] // num_kv, len(given.slots)
    grouped, answers = q[0].reshape(num_kv, num_each, count, -1), found.view(count, num_kv, num_each, dim)
    places = tuple(given.slots.tolist()), tuple(given.positions.tolist())
    for slot, some, num_rows, start, end, mask in _chunks(*places, least, given.window, length, num_each, q.dtype, q.device):
        keys, values = given.state_keys[None, slot, :, start:end], given.state_values[None, slot, :, start:end]
        if given.bias is not None:
            mask = mask + _bias_of(given.bias, given.positions[some], start, end).reshape(num_kv, *mask.shape)
        made = _attention(grouped[None, :, :, some].flatten(2, 3), keys, values, mask, given.scale, given.softcap)
        answers[some] = made.view(num_kv, num_each, num_rows, dim).permute(2, 0, 1, 3)


@lru_cache(maxsize=2)  # full attention and a window; all layers of a step ask for the same ones
def _chunks(
    slot_of: tuple[int, ...],
    position_of: tuple[int, ...],
    least: int,
    window: int | None,
    length: int,
    times: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[_Chunk]:
    """The tokens of slots with at least ``least`` of them; slot 0 beside others is padding, whose answers nobody reads."""
    rows_of: dict[int, list[int]] = {}
    for row, slot in enumerate(slot_of):
        rows_of.setdefault(slot, []).append(row)
    if len(rows_of) > 1:
        rows_of.pop(0, None)
    found = []
    for slot, rows in rows_of.items():
        if len(rows) < least:
            continue
        positions = [position_of[row] for row in rows]
        start = 0 if window is None else max(0, min(positions) + 1 - window)
        end = max(min(max(positions) + 1, length), 1)
        own, places = torch.tensor(positions, device=device)[:, None].clamp(min=0), torch.arange(start, end, device=device)
        seen = places <= own if window is None else (places <= own) & (places > own - window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, float("-inf")).repeat(times, 1)
        some = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else torch.tensor(rows)
        found.append(_Chunk(slot, some, len(rows), start, end, mask))
    return found


def _turned(given: _Call, rows: torch.Tensor) -> torch.Tensor:
    """Queries or keys after their rotation; see ``rows.turn``."""
    assert given.cos is not None and given.sin is not None
    cos, sin = (one.view(len(given.kept[0]), -1)[: rows.shape[2]] for one in (given.cos, given.sin))
    part, rest = rows[..., : cos.shape[1]], rows[..., cos.shape[1] :]
    first, second = part.chunk(2, -1)
    return torch.cat([part * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def _keep(given: _Call) -> None:
    """Write the keys and values of tokens to their places in the states."""
    slots, positions = given.kept
    rows = positions < given.state_keys.shape[2]
    places = slots[rows], positions[rows]
    given.state_keys[places[0], :, places[1]] = given.k[0, :, rows].transpose(0, 1)
    given.state_values[places[0], :, places[1]] = given.v[0, :, rows].transpose(0, 1)


def _bias_of(bias: torch.Tensor, positions: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """The summands ``[heads, N, end - start]`` of scores by the distance of a place from a token."""
    distances = positions[:, None] - torch.arange(start, end, device=positions.device)
    return bias[:, distances.clamp(0, bias.shape[1] - 1)]


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """Softmax attention of ``[sequences, num_heads, queries, dim]`` to ``[sequences, num_heads, places, dim]``."""
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap
    return torch.softmax(scores + mask, -1) @ v
