"""The best chain along one order of the items: a dynamic program over its prefixes, run on several topological orders.

A prefix is kept while its value is below a limit and its remaining items fit on its remaining devices. The limit is the value of
the best chain so far.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

import numpy as np

from autosplit.costs.problem import Floats
from autosplit.jit import compiled, inner, whole
from autosplit.planners.clock import halfway, now
from autosplit.planners.clusters import topological_order
from autosplit.planners.device_usage import Usage
from autosplit.planners.instance import MANY_ITEMS, Instance
from autosplit.planners.loads import (
    ROUNDING,
    Costs,
    GrowingBlock,
    Ints,
    add,
    empty_block,
    price,
    remove,
    reset,
    shift,
    widest_load,
)

FIRST_LOOK_S = 1.0
"""Seconds after the deadline in which one order is searched, where no plan is known."""
STEPS_OF_A_SLICE = 20_000_000
"""Steps of the dynamic program between two looks at the clock: about a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Chain:
    """For each block its items and the devices of each class that it takes; and the largest load in seconds."""

    blocks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    value_s: float


def topological_orders(instance: Instance, count: int = 8) -> list[Ints]:
    """Topological orders: the items' own, as ops were given, breadth first, and depth first from the sinks and the sources.

    Args:
        instance: the items of a chain.
        count: orders to make; fewer come back where some are equal.
    """
    after = [instance.after.row(item).tolist() for item in range(instance.num_items)]
    before = instance.after.transposed(instance.num_items)
    sooner = [before.row(item).tolist() for item in range(instance.num_items)]
    own = np.arange(instance.num_items)
    work = np.where(np.isfinite(instance.compute_s), instance.compute_s, 0).sum(axis=1)
    random = Random(2)
    chance = np.array([random.random() for _ in after])
    makers: tuple[Callable[[], Ints], ...] = (
        lambda: own,
        lambda: topological_order(after, np.array([ops[0] for ops in instance.ops], dtype=np.int64)),
        lambda: topological_order(sooner, own, depth_first=True)[::-1].copy(),
        lambda: topological_order(after, _levels(sooner, own)),
        lambda: topological_order(after, -_levels(after, own[::-1])),
        lambda: topological_order(sooner, -work, depth_first=True)[::-1].copy(),
        lambda: topological_order(after, -work, depth_first=True),
        lambda: topological_order(sooner, chance, depth_first=True)[::-1].copy(),
    )
    found = (make() for make in makers[:count])
    return list({order.tobytes(): order for order in found}.values())


def _levels(near: Sequence[Sequence[int]], order: Ints) -> Ints:
    """The most items on a path of neighbours from each item, in an order in which neighbours come first."""
    level = [0] * len(near)
    for item in order.tolist():
        level[item] = 1 + max((level[other] for other in near[item]), default=-1)
    return np.array(level, dtype=np.int64)


def best_chain(instance: Instance, limit_s: float, deadline: float) -> Chain | None:
    """The best chain over the depth-first orders with a value below ``limit_s``, or None.

    Args:
        instance: the items of the chain.
        limit_s: only chains below this count.
        deadline: second of ``now()`` after which the search ends; on many items the search ends earlier, once there is a
            chain. Where no plan is known, one order is searched for ``FIRST_LOOK_S`` seconds after it.
    """
    best: Chain | None = None
    many = instance.num_items > MANY_ITEMS
    enough = halfway(deadline) if many else deadline
    orders = topological_orders(instance, 3 if many else 8)
    for order in orders:
        best = chain_in_order(instance, order, limit_s if best is None else best.value_s, deadline) or best
        if now() > (deadline if best is None else enough):
            if best is None and limit_s == inf:  # below no limit, one order gives a chain if it has any
                return chain_in_order(instance, orders[0], inf, now() + FIRST_LOOK_S)
            break
    return best


def chain_in_order(
    instance: Instance, order: Ints, limit_s: float, deadline: float = inf, delay_s: float | None = None
) -> Chain | None:
    """The chain of intervals of the order whose largest load is the least, and below ``limit_s``; None after the deadline.

    With ``delay_s`` the value is the latency instead: the sum of all block times and of ``delay_s`` seconds after each block.
    """
    rest = np.zeros(instance.num_items + 1)
    rest[:-1] = np.cumsum(instance.priced_work[order][::-1])[::-1]
    costs, usage = instance.costs, instance.usage
    room = usage.free @ instance.multipliers
    value = np.full((instance.num_items + 1, len(usage.after)), inf)
    parent = np.full((instance.num_items + 1, len(usage.after), 3), -1, dtype=np.int64)
    value[0, 0] = 0.0
    block, alive, start = empty_block(costs), np.zeros(len(usage.after), dtype=np.int64), 0
    while start < len(order):
        if now() > deadline:
            return None
        start = _forward(
            costs, block, order, usage, room, rest, limit_s, instance.demands.min_stage_s, delay_s is not None, delay_s or 0.0,
            value, parent, alive, start, STEPS_OF_A_SLICE,
        )  # fmt: skip
    last = np.where(usage.final, value[-1], inf)
    state = int(last.argmin())
    if not last[state] < (limit_s if delay_s is None else inf):
        return None
    blocks = []
    end = len(order)
    while end > 0:
        start, before, move = parent[end, state]
        blocks.append((tuple(order[start:end].tolist()), tuple(usage.takes[move].tolist())))
        end, state = int(start), int(before)
    return Chain(tuple(reversed(blocks)), float(last.min()))


@compiled
def _forward(  # noqa: C901 - one compiled loop
    costs: Costs, block: GrowingBlock, order: Ints, usage: Usage, room: Floats, rest: Floats, limit: float, least: float,
    total: bool, delay: float, value: Floats, parent: Ints, alive: Ints, first: int, num_steps: int,
) -> int:  # fmt: skip
    """Fill in the value of each (prefix length, usage), and the (prefix, usage, move) that it comes from.

    Begins with prefixes of ``first`` items. Returns: the prefix to go on with after about ``num_steps`` steps.

    order:   a  b  c | d  e  f | g  h          value[end, usage after] = max(value[start, usage], load of the block)
                   start     end
                     +- block -+               ends move right until every longer block is above the limit
    """
    count, after, width, widest, one = len(order), usage.after, usage.width, 0, whole(1)
    for move in range(len(width)):
        widest = max(widest, width[move])
    strict = limit * (1 - ROUNDING)
    below = np.inf if total else strict
    steps = 0
    for start in range(first, count):
        if steps > num_steps:
            return start
        num_alive, most = alive_usages(value, start, below, alive), 0.0
        for place in range(num_alive):
            for move in range(len(width)):
                if after[alive[place], move] >= 0:
                    most = max(most, room[after[alive[place], move]])
        if num_alive > 0:
            reset(block)
            end = start
            while end < count:
                add(costs, block, order[end])
                end += 1
                if not price(costs, block) < strict * widest:
                    break
                left = rest[end] / (1 + ROUNDING)
                if left > most * limit:
                    continue
                steps += num_alive * len(width)
                for move in range(len(width)):
                    top = widest_load(block, usage, move)
                    if top < strict and top >= least * (1 - ROUNDING):
                        cost = top * width[move] + delay if total else top
                        for place in range(num_alive):
                            goal = after[alive[place], move]
                            if goal < 0 or left > room[goal] * limit:
                                continue
                            new = value[start, alive[place]]
                            new = new + cost if total else max(cost, new)
                            if new < below and new < value[end, goal]:
                                origin, value[end, goal] = parent[end, goal], new
                                origin[0], origin[1], origin[2] = start, alive[place], move
            for position in range(start, end):
                remove(costs, block, order[position])
        shift(costs, block, order[start], one)
    return count


@inner
def alive_usages(value: Floats, prefix: int, below: float, alive: Ints) -> int:
    """List the usages of a prefix with a value below a limit. Returns: their number."""
    count = 0
    for usage in range(value.shape[1]):
        if value[prefix, usage] < below:
            alive[count] = usage
            count += 1
    return count
