"""A first chain, which takes milliseconds on large graphs too: it fills one device after the other."""

from collections.abc import Sequence

import numpy as np

from autosplit.costs.problem import Block, Problem
from autosplit.planners.incumbent import CLOSE, Incumbent


def offer_first_chain(incumbent: Incumbent) -> None:
    """Offer chains that fill one device after the other, along the order in which ops were given; transfers are not looked at.

    Devices are taken as they are numbered, or the roomiest, fastest or slowest first. If groups or the order forbid some
    intervals of ops, none is offered.
    """
    problem = incumbent.problem
    if problem.groups or any(before > after for before, after in problem.order):
        return
    work = np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0).sum(axis=0)
    keys = (np.arange(problem.num_devices), -problem.memory_bytes, work, -work)
    sequences = {tuple(np.argsort(key, kind="stable").tolist()) for key in keys}
    filled = [fill for sequence in sorted(sequences) if (fill := _filled(problem, sequence)) is not None]
    if filled:
        incumbent.offer(min(filled, key=lambda fill: fill[0])[1], "one device after the other")


def _filled(problem: Problem, sequence: Sequence[int]) -> tuple[float, tuple[Block, ...]] | None:
    """The least seconds of compute below which intervals of ops fill the devices in turn, by bisection, and the blocks."""
    size = problem.op_bytes.copy()
    for weight in problem.weights:
        size[list(weight.users)] += weight.num_bytes
    held = np.append(0.0, np.cumsum(size))
    compute = np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0)
    work = np.vstack([np.zeros(problem.num_devices), np.cumsum(compute, axis=0)])
    bars = [np.append(np.flatnonzero(np.isinf(column)), problem.num_ops) for column in problem.compute_s.T]
    low_s, high_s, best = 0.0, float(work[-1].max()) * (1 + CLOSE), None
    limit_s = high_s
    while best is None or high_s - low_s > CLOSE * high_s:
        begin, blocks = 0, []
        for device in sequence:
            fits = np.searchsorted(work[:, device], work[begin, device] + limit_s, side="right") - 1
            room = np.searchsorted(held, held[begin] + problem.memory_bytes[device], side="right") - 1
            end = int(min(fits, room, bars[device][np.searchsorted(bars[device], begin)]))
            if end > begin:
                blocks.append(Block(tuple(range(begin, end)), (device,)))
                begin = end
        if begin == problem.num_ops:
            high_s, best = limit_s, tuple(blocks)
        elif best is None:
            return None
        else:
            low_s = limit_s
        limit_s = (low_s + high_s) / 2
    return high_s, best
