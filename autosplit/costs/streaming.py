"""The time of a streamed block: weights are copied into two buffers while the ops before them compute (``values.residency``)."""

from collections.abc import Sequence

import numpy as np

from autosplit.costs.problem import Block, Problem
from autosplit.values.residency import NUM_BUFFERS, Parts, parts_of

NUM_PASSES = 4
"""Passes that are followed until they repeat; with two buffers a pass depends on the one before it only."""


def parts_on(problem: Problem, block: Block) -> Parts | None:
    """The streamed parts of a block; None if its ``resident_bytes`` have no room for two buffers."""
    ops = sorted(block.ops)
    shared = sum(weight.num_bytes for weight in problem.weights if not set(ops).isdisjoint(weight.users))
    return parts_of(problem.op_bytes[ops].astype(int).tolist(), int(shared), block.resident_bytes)


def streamed_bytes(problem: Problem, block: Block) -> float:
    """Bytes of weights that come to a device for one sample; 0 if all stay, or if there is no room for two buffers."""
    parts = parts_on(problem, block) if block.resident_bytes < np.inf else None
    return float(problem.op_bytes[np.sort(block.ops)[list(parts.streamed)]].sum()) if parts and parts.streamed else 0.0


def waits_s(problem: Problem, block: Block, device: int) -> float:
    """Seconds of one sample in which the ops of a block wait for streamed weights on a device; 0 where none are streamed.

    Infinite if the device cannot hold two buffers.
    """
    ops = sorted(block.ops)
    compute_s = problem.compute_s[ops, device]
    if block.resident_bytes == np.inf or not np.isfinite(compute_s).all():
        return 0.0
    parts = parts_on(problem, block)
    if parts is None:
        return np.inf
    copy_s = problem.op_bytes[ops] * problem.pinned_s_per_byte[device]
    return pass_s(compute_s.tolist(), copy_s.tolist(), parts) - float(compute_s.sum())


def pass_s(compute_s: Sequence[float], copy_s: Sequence[float], parts: Parts) -> float:
    """Seconds of a pass among others without a gap between them.

    An op of a part waits for its weights. After it, the copy of the next part into its buffer may begin, when the copies before
    that one are done.

    Args:
        compute_s: seconds of each op of the block, in order.
        copy_s: seconds of the copy of the weights of each op.

    >>> pass_s([1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0], Parts((0, 1, 2, 3), 4)), pass_s([1.0, 2.0], [9.0, 9.0], Parts())
    (12.0, 3.0)
    """
    if not parts.streamed:
        return sum(compute_s)
    ends = [*parts.streamed[1:], len(compute_s)]
    rest_s = [sum(compute_s[place + 1 : end]) for place, end in zip(parts.streamed, ends, strict=True)]
    rest_s[-1] += sum(compute_s[: parts.streamed[0]])
    copy_s = [copy_s[place] for place in parts.streamed]
    there_s, copied_s, now_s, before_s = [0.0] * len(ends), 0.0, 0.0, 0.0
    for part in range(min(NUM_BUFFERS, len(ends))):
        there_s[part] = copied_s = copied_s + copy_s[part]
    for _ in range(NUM_PASSES):
        before_s = now_s
        for part, place in enumerate(parts.streamed):
            now_s = max(now_s, there_s[part]) + compute_s[place]
            following = parts.next_in_buffer(part)
            there_s[following] = copied_s = max(copied_s, now_s) + copy_s[following]
            now_s += rest_s[part]
    return now_s - before_s
