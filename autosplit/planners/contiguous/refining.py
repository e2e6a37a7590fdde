"""Chains of large graphs: a first one that takes milliseconds, and better ones by moving items between blocks.

Annealing moves items between neighbouring blocks (Kirkpatrick et al., 1983).
"""

from collections.abc import Sequence

import numpy as np

from autosplit.costs.problem import Block, Problem
from autosplit.planners.clock import now
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.items import Ints, Items
from autosplit.planners.noncontiguous.annealing import Precedence, anneal
from autosplit.planners.noncontiguous.hypergraph import Hypergraph

MOVES_OF_AN_ITEM, FIRST_MOVES = 50, 100_000
"""Proposals for each item, and at most, in the first walk; later walks take about ``WALK_S`` seconds."""
WALK_S = 1.0
MOST_WALKS = 1000
CLOSE = 1e-4
"""The bisection of a load ends where its ends differ by this share."""
HEATS = (0.003, 0.001, 0.01)
"""Temperatures at which walks begin, as shares of the largest load."""


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


def refine_chain(incumbent: Incumbent, items: Items, graph: Hypergraph, deadline: float) -> None:
    """Better chains near the best one, by walks that move items between its blocks.

    Args:
        incumbent: the best plan, kept up to date; nothing is done where a block of it has replicas.
        items, graph: the items of the chain, and their hypergraph.
        deadline: second of ``now()`` after which no walk begins; a walk that has begun ends a little after it at the latest.
    """
    before = items.after.transposed(items.num_items)
    num_moves, rate = min(MOVES_OF_AN_ITEM * items.num_items, FIRST_MOVES), 0.0
    for number in range(MOST_WALKS):
        left_s = deadline - now()
        home = graph.home(incumbent.problem, incumbent.blocks) if incumbent.blocks else None
        if home is None or incumbent.closed or left_s <= 0:
            return
        if rate:
            num_moves = int(rate * min(left_s, WALK_S))
        rank = _ranks(incumbent.blocks, graph.num_devices)
        began = now()
        found = anneal(
            graph,
            home,
            seed=incumbent.seed + number,
            num_moves=max(1, num_moves),
            heat=HEATS[number % len(HEATS)],
            precedence=Precedence(before, items.after, rank),
        )
        rate = num_moves / max(now() - began, 1e-3)
        blocks = sorted(graph.blocks(found.home), key=lambda block: rank[block.devices[0]])
        incumbent.offer(tuple(blocks), "moves between blocks")


def _ranks(blocks: tuple[Block, ...], num_devices: int) -> Ints:
    """The place of each device in the chain; unused devices come last."""
    used = [block.devices[0] for block in blocks]
    rank = np.empty(num_devices, dtype=np.int64)
    rank[[*used, *(device for device in range(num_devices) if device not in used)]] = np.arange(num_devices)
    return rank
