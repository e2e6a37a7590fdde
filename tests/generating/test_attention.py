"""The operator ``attend`` against plain attention over the keys and values of each sequence; slots stay apart."""

import pytest
import torch

from autosplit.generating.attention import KVCache, prepare_attend

SEQUENCES, LENGTH, HEADS, KV_HEADS, DIM = 16, 32, 6, 2, 8
MANY = [1, 2, 3, 5, 6, 7, 8, 9, 10, 12, 13, 14]
"""Slots of so many sequences that one call computes them."""


def filled(value=None):
    """A cache with random contents, or with one value everywhere."""
    cache = KVCache(SEQUENCES, LENGTH, KV_HEADS, DIM, value_dim=5)
    for state in (cache.keys, cache.values):
        state.normal_() if value is None else state.fill_(value)
    return cache


def tokens(count):
    torch.manual_seed(count)
    return torch.randn(1, HEADS, count, DIM), torch.randn(1, KV_HEADS, count, DIM), torch.randn(1, KV_HEADS, count, 5)


def plain(cache, q, slots, positions, window, softcap):
    """One token after the other, in one formula."""
    found = torch.empty(1, len(slots), HEADS, 5)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
        keys, values = (state[slot, :, seen].repeat_interleave(HEADS // KV_HEADS, 0) for state in (cache.keys, cache.values))
        scores = (keys @ q[0, :, row, :, None])[..., 0] * 0.3
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        found[0, row] = (torch.softmax(scores, -1)[:, None] @ values)[:, 0]
    return found


@pytest.mark.parametrize(
    ("slots", "positions"),
    [
        ([3], [7]),
        ([1, 2, 4], [0, 9, 31]),
        ([4, 1, 3], [9, 8, 7]),
        (MANY, [20, 21, 19, 31, 20, 18, 20, 22, 23, 20, 21, 20]),
        ([*MANY, 15, 15, 0, 0], [20, 21, 19, 31, 20, 18, 20, 22, 23, 20, 21, 20, 5, 4, 0, 0]),
        (MANY, [0, 1, 2, 31, 3, 1, 2, 4, 5, 3, 1, 2]),
        ([2] * 6, [4, 5, 6, 7, 8, 9]),
        ([1, 3, 1, 2, 1, 1], [11, 3, 8, 20, 9, 10]),
    ],
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 0.5), (3, 0.5)])
def test_a_step_of_any_tokens_equals_plain_attention(slots, positions, window, softcap):
    cache = filled()
    before = cache.keys.clone()
    q, k, v = tokens(len(slots))
    places = torch.tensor(slots), torch.tensor(positions)
    found = cache(q, k, v, *places, scale=0.3, window=window, softcap=softcap)
    read = [row for row, slot in enumerate(slots) if slot]  # the others are padding
    torch.testing.assert_close(found[:, read], plain(cache, q, slots, positions, window, softcap)[:, read])
    before[places[0], :, places[1]] = k[0].transpose(0, 1)
    assert torch.equal(cache.keys[1:], before[1:])
    assert torch.equal(cache.values[places[0], :, places[1]][read], v[0].transpose(0, 1)[read])
    assert torch.equal(cache(q, k, v, *places, scale=0.3, window=window, softcap=softcap), found)


def test_a_sequence_reads_nothing_that_it_did_not_write():
    """All that other sequences and earlier owners of a slot left is NaN; single tokens of many run in one call."""
    cache = filled(float("nan"))
    for start, end in ((0, 5), (5, 6), (6, 9), (9, 10)):
        for window in (None, 4):
            slots = torch.tensor(MANY).repeat(end - start)
            made = cache(*tokens(len(slots)), slots, torch.arange(start, end).repeat_interleave(len(MANY)), window=window)
            assert made.isfinite().all()
    made = cache(*tokens(len(MANY)), torch.tensor(MANY), torch.tensor([10, 7, 8, 9] * 3))
    assert made.isfinite().all()


def test_tokens_beyond_the_length_are_not_kept():
    cache = filled()
    before = cache.keys.clone()
    for slots in ([1], [1, 2]):
        cache(*tokens(len(slots)), torch.tensor(slots), torch.full((len(slots),), LENGTH))
    assert torch.equal(cache.keys, before)


@pytest.mark.parametrize("rotary_dim", [DIM, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_queries_and_keys_are_rotated(rotary_dim, dtype):
    """A chunk and single tokens, all elements or the first ones alone, in machine code and in torch."""
    slots, positions = torch.tensor([1, 2, 2, 2]), torch.tensor([5, 0, 1, 2])
    q, k, v = (tensor.to(dtype) for tensor in tokens(4))
    angles = (positions[:, None] * torch.tensor([1.0, 0.1])[: rotary_dim // 4].repeat_interleave(2)).repeat(1, 2).to(dtype)

    def rotated(x):
        first, second = x[..., :rotary_dim].chunk(2, -1)
        part = x[..., :rotary_dim] * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
        return torch.cat([part, x[..., rotary_dim:]], -1)

    def attended(q, k, *tables):
        torch.manual_seed(0)
        states = [torch.randn(3, KV_HEADS, LENGTH, dim, dtype=dtype) for dim in (DIM, 5)]
        found = torch.ops.autosplit.attend(q, k, v, *states, slots, positions, 0.3, None, None, *tables)
        return found, *states

    made = attended(q, k, angles.cos()[None, None], angles.sin()[None, None])
    for value, expected in zip(made, attended(rotated(q), rotated(k)), strict=True):
        torch.testing.assert_close(value, expected)


def test_a_prepared_call_reads_the_same_memory_anew():
    """Tokens alone of their slots, then a chunk, then padding, in one memory: what an earlier call left there is not read."""
    cache, other = filled(), KVCache(SEQUENCES, LENGTH, KV_HEADS, DIM, value_dim=5)
    other.keys.copy_(cache.keys)
    other.values.copy_(cache.values)
    q, k, v = tokens(3)
    places = torch.tensor([1, 2, 4]), torch.tensor([3, 9, 2])
    found, run = prepare_attend(q, k, v, cache.keys, cache.values, *places, 0.3, 5)
    for slots, positions in (([1, 2, 4], [3, 9, 2]), ([2, 2, 2], [10, 11, 12]), ([3, 0, 0], [4, 0, 0])):
        for target, value in ((places[0], slots), (places[1], positions)):
            target.copy_(torch.tensor(value))
        q.normal_()
        run()
        torch.testing.assert_close(found, other(q, k, v, *places, scale=0.3, window=5))
    torch.testing.assert_close(cache.keys[1:], other.keys[1:])


def test_places_may_lie_apart_and_be_of_another_type():
    """The compiled call reads addresses: what does not lie as it reads goes another way."""
    q, k, v = tokens(3)
    slots, positions = torch.tensor([[1, 7], [2, 7], [4, 7]])[:, 0], torch.tensor([[3, 1], [9, 1], [2, 1]])[:, 0]
    cache = filled()
    expected = cache(q, k, v, slots.clone(), positions.clone(), scale=0.3)
    for places in ((slots, positions), (slots.int(), positions.int())):
        torch.testing.assert_close(cache(q, k, v, *places, scale=0.3), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_is_added_by_distance(dtype):
    """Single tokens and a chunk, in machine code and in torch."""
    slots, positions = torch.tensor([1, 2, 2, 3]), torch.tensor([7, 3, 4, 0])
    cache, (q, k, v) = filled().to(dtype), (one.to(dtype) for one in tokens(4))
    bias = torch.randn(HEADS, LENGTH, dtype=dtype)
    found = cache(q, k, v, slots, positions, scale=0.3, bias=bias)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        keys, values = (
            one[slot, :, : position + 1].repeat_interleave(HEADS // KV_HEADS, 0) for one in (cache.keys, cache.values)
        )
        scores = (keys @ q[0, :, row, :, None])[..., 0] * 0.3 + bias[:, : position + 1].flip(1)
        torch.testing.assert_close(found[0, row], (torch.softmax(scores, -1)[:, None] @ values)[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_read_what_was_kept_of_a_source(dtype):
    """More rows of sources than tokens, and later none; what an earlier owner left in a slot is not read."""
    cache, (q, _, _), (_, k, v) = filled(float("nan")).to(dtype), tokens(4), tokens(7)
    q, k, v = (one.to(dtype) for one in (q, k, v))
    slots, last = torch.tensor([2, 1, 1, 0]), torch.tensor([3, 2, 2, -1])  # padding sees nothing
    kept = torch.tensor([1, 1, 1, 2, 2, 2, 2]), torch.tensor([0, 1, 2, 0, 1, 2, 3])
    found = cache(q, k, v, slots, last, scale=0.3, kept=kept)[:, :3]
    rows = {1: slice(0, 3), 2: slice(3, 7)}
    for row, slot in enumerate(slots[:3].tolist()):
        keys, values = (one[0, :, rows[slot]].repeat_interleave(HEADS // KV_HEADS, 0) for one in (k, v))
        chances = torch.softmax((keys @ q[0, :, row, :, None])[..., 0] * 0.3, -1)
        torch.testing.assert_close(found[0, row], (chances[:, None] @ values)[:, 0])
    nothing = torch.zeros(1, dtype=torch.int64)
    again = cache(q, k[:, :, :1], v[:, :, :1], slots, last, scale=0.3, kept=(nothing, nothing))
    assert torch.equal(again[:, :3], found)
