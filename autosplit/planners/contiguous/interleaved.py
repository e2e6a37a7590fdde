"""Interleaved stages: chains in which several blocks share a device, and their loads add up.

A beam search along several topological orders. A label is a prefix with the load and the memory of every device. Of the labels
that end at one place, those with the least possible bottleneck are kept. The search looks first at cuts spread over the whole
order, then at all cuts near the best ones found. It proves nothing.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.judge import judge
from autosplit.costs.problem import Block, Floats
from autosplit.planners.clock import now
from autosplit.planners.contiguous.linear import topological_orders
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.items import Items
from autosplit.planners.jit import compiled
from autosplit.planners.loads import Costs, GrowingBlock, Ints, add, empty_block, price, remove, reset, shift

NUM_CUTS = 96
"""Cuts of each look; all cuts where there are no more."""
KEPT = (3, 24, 24, 24)
"""Labels kept at each cut in the first look and in those after it."""
MORE_BLOCKS = 3
"""Blocks for each device where devices are shared and no number of blocks is demanded."""


class _Labels(NamedTuple):
    """Prefixes: their ends (places among the cuts), the load and bytes of each device, and the last device and parent label."""

    end: Ints
    load: Floats
    memory: Floats
    device: Ints
    parent: Ints


def improve_interleaved(incumbent: Incumbent, items: Items, deadline: float) -> None:
    """Offer chains with the demanded number of blocks, or else with ever more blocks until the deadline."""
    demands = incumbent.demands
    most = min(items.num_items, demands.max_stages or MORE_BLOCKS * incumbent.problem.num_devices)
    counts = [demands.num_stages] if demands.num_stages else list(range(2, most + 1))
    for number, count in enumerate(counts):
        if count != demands.num_stages and now() >= deadline:
            return
        _offer_chains(incumbent, items, count, now() + (deadline - now()) / (len(counts) - number))


def _offer_chains(incumbent: Incumbent, items: Items, num_stages: int, deadline: float) -> None:
    """Offer chains of exactly ``num_stages`` blocks; the first look at each order is not ended by the deadline without a plan."""
    best_s = inf
    for order in topological_orders(items):
        cuts = _spread_cuts(items, order, num_stages)
        for kept in KEPT:
            until = inf if best_s == inf and kept == KEPT[0] else deadline
            found = _beam(incumbent, items, order, cuts, num_stages, kept, until)
            if found is None:
                continue
            blocks, value_s, used = found
            incumbent.offer(blocks, "beam search")
            best_s = min(best_s, value_s)
            if kept < KEPT[-1]:
                continue
            width = max(2, NUM_CUTS // (2 * num_stages))
            near = {cut + step for cut in used for step in range(-width, width + 1)}
            cuts = np.array(sorted({0, items.num_items, *(cut for cut in near if 0 < cut < items.num_items)}), dtype=np.int64)
        if now() > deadline:
            return


def _spread_cuts(items: Items, order: Ints, num_stages: int) -> Ints:
    """Cuts at even steps of work and of item count; all cuts where they are few."""
    if items.num_items <= NUM_CUTS:
        return np.arange(items.num_items + 1)
    work = np.cumsum(np.where(np.isfinite(items.costs.compute_s), items.costs.compute_s, 0).max(axis=1)[order])
    even = np.linspace(0, items.num_items, max(NUM_CUTS // 2, num_stages + 1)).astype(np.int64)
    by_work = np.searchsorted(work, np.linspace(0, work[-1], NUM_CUTS // 2))
    return np.unique(np.concatenate([even, by_work.clip(0, items.num_items)]))


def _beam(
    incumbent: Incumbent, items: Items, order: Ints, cuts: Ints, num_stages: int, kept: int, deadline: float
) -> tuple[tuple[Block, ...], float, list[int]] | None:
    """The best of the last labels that meet the demands: its blocks, its objective in seconds, and its cuts."""
    problem, demands = incumbent.problem, incumbent.demands
    costs = items.costs
    loads = np.full((len(cuts), len(cuts), len(items.classes)), inf)
    sizes = np.full((len(cuts), len(cuts)), inf)
    _intervals(costs, empty_block(costs), order, cuts, loads, sizes)
    columns = items.class_of
    scale = items.multipliers[columns]
    rest = np.zeros(len(cuts))
    rest[:-1] = [items.priced_work[order[cut:]].sum() for cut in cuts[:-1]]
    twin = np.array([max((d for d in items.classes[k] if d < device), default=-1) for device, k in enumerate(columns)])
    none = np.full((1, problem.num_devices), -1.0)
    layers = [_Labels(np.zeros(1, dtype=np.int64), none, none * 0, np.full(1, -1), np.full(1, -1))]
    for depth in range(num_stages):
        left = num_stages - depth - 1
        if now() > deadline and depth:
            return None
        grown = _grow(layers[-1], loads[:, :, columns], sizes, problem.memory_bytes, twin, left, demands.min_stage_s)
        borne = grown.load.clip(min=0)
        keep = _keep(grown, np.maximum(borne.max(axis=1), borne @ scale + rest[grown.end]), kept)
        end, load, memory, device, parent = grown
        layers.append(_Labels(end[keep], load[keep], memory[keep], device[keep], parent[keep]))
        if not len(keep):
            return None
    best = None
    best_s = inf
    for label in np.argsort(layers[-1].load.max(axis=1)):
        blocks, used = _trace(items, order, cuts, layers, int(label))
        judged = judge(problem, demands, blocks)
        if not judged.faults:
            value_s = judged.objective_s
            if value_s < best_s:
                best, best_s = (blocks, value_s, used), value_s
    return best


def _grow(labels: _Labels, loads: Floats, sizes: Floats, caps: Floats, twin: Ints, blocks_left: int, least: float) -> _Labels:
    """Every label extended by one block, to every later cut and on every device.

    A load of -1 marks an unused device. Of equal unused devices only the first is tried: ``twin`` is the equal device before each
    device, or -1.
    """
    num_cuts = len(loads)
    parts: list[_Labels] = []
    for device in range(loads.shape[2]):
        open_ = (labels.load[:, twin[device]] >= 0) if twin[device] >= 0 else np.ones(len(labels.end), dtype=bool)
        parent, end = np.nonzero((np.arange(num_cuts)[None, :] > labels.end[:, None]) & open_[:, None])
        if blocks_left == 0:
            parent, end = parent[end == num_cuts - 1], end[end == num_cuts - 1]
        added, size = loads[labels.end[parent], end, device], sizes[labels.end[parent], end]
        fits = np.isfinite(added) & (added >= least * (1 - TOLERANCE))
        fits &= labels.memory[parent, device] + size <= caps[device] * (1 + TOLERANCE)
        fits &= num_cuts - 1 - end >= blocks_left
        parent, end = parent[fits], end[fits]
        load, memory = labels.load[parent].copy(), labels.memory[parent].copy()
        load[:, device] = load[:, device].clip(min=0) + added[fits]
        memory[:, device] += size[fits]
        parts.append(_Labels(end, load, memory, np.full(len(end), device), parent))
    return _Labels(*map(np.concatenate, zip(*parts, strict=True)))


def _keep(labels: _Labels, promise: Floats, count: int) -> Ints:
    """The most promising labels at each cut."""
    order = np.lexsort((promise, labels.end))
    ends = labels.end[order]
    rank = np.arange(len(order)) - np.searchsorted(ends, ends)
    return np.asarray(order[rank < count])


def _trace(items: Items, order: Ints, cuts: Ints, layers: Sequence[_Labels], label: int) -> tuple[tuple[Block, ...], list[int]]:
    blocks: list[Block] = []
    used = []
    for depth in range(len(layers) - 1, 0, -1):
        layer = layers[depth]
        parent = int(layer.parent[label])
        start, end = cuts[layers[depth - 1].end[parent]], cuts[layer.end[label]]
        used.append(int(start))
        blocks.append(Block(items.expand(order[start:end].tolist()), (int(layer.device[label]),)))
        label = parent
    return tuple(reversed(blocks)), used


@compiled
def _intervals(costs: Costs, block: GrowingBlock, order: Ints, cuts: Ints, loads: Floats, sizes: Floats) -> None:
    """Fill in the loads (cut, later cut, class) and the bytes (cut, later cut) of the intervals. Memory caps are not checked."""
    for begin in range(len(cuts) - 1):
        reset(block)
        for later in range(begin + 1, len(cuts)):
            for position in range(cuts[later - 1], cuts[later]):
                add(costs, block, order[position])
            price(costs, block)
            for k in range(len(block.load)):
                loads[begin, later, k] = block.load[k]
            sizes[begin, later] = block.memory[0]
        for position in range(cuts[begin], cuts[-1]):
            remove(costs, block, order[position])
        for position in range(cuts[begin], cuts[begin + 1]):
            shift(costs, block, order[position], 1)
