"""Chains with a latency limit: of all chains along one order with a largest load below T, the one that a sample passes soonest.

T is bisected. The dynamic program takes latency as the sum over the blocks and the delays between them: the truth where every
block waits for the one before, and never less than it. So a plan that it finds holds the limit; another may hold it that it
does not find, where branches run side by side.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from time import monotonic

import numpy as np

from autosplit.costs.problem import Floats
from autosplit.planners.compiled import compiled, inner, whole
from autosplit.planners.filling import (
    ROUNDING,
    Costs,
    Filling,
    add,
    costs_of,
    empty_filling,
    price,
    remove,
    reset,
    shift,
    widest_load,
)
from autosplit.planners.items import Ints, Items
from autosplit.planners.linear import Chain, chain_of, depth_first_orders
from autosplit.planners.request import Request
from autosplit.planners.usage import Usage

NUM_HALVINGS = 24
CLOSE = 1e-4
"""Loads this near to each other need no halving between them."""


def quick_chains(
    items: Items, request: Request, usage: Usage, delay_s: float, bound_s: float, judge: Callable[[Chain], float], deadline: float
) -> Iterator[Chain]:
    """Chains that hold the latency limit, each better than the one before; along one depth-first order after the other.

    Args:
        items: what is to be put in a row.
        request: the limits on a plan.
        usage: the devices.
        delay_s: what a value is under way between two blocks, in seconds; the largest such, where they differ.
        bound_s: a bound on the largest load.
        judge: the largest load of a chain, in seconds; infinite where it breaks the request.
        deadline: monotonic seconds after which no further chain is sought.
    """
    best_s = inf
    for order in depth_first_orders(items):
        low_s, high_s = bound_s, best_s
        for _ in range(NUM_HALVINGS):
            if monotonic() > deadline:
                return
            limit_s = high_s if high_s == inf else (low_s + high_s) / 2
            chain = soonest_chain(items, request, usage, order, limit_s, delay_s)
            value_s = inf if chain is None else judge(chain)
            if value_s < best_s and chain is not None:
                best_s = value_s
                yield chain
            if value_s < high_s:
                high_s = value_s
            elif limit_s == inf:
                break
            else:
                low_s = limit_s
            if high_s - low_s <= CLOSE * high_s:
                break


def soonest_chain(
    items: Items, request: Request, usage: Usage, order: Ints, limit_s: float, delay_s: float = 0.0
) -> Chain | None:
    """The chain of intervals of the order with loads up to ``limit_s`` and the least sum of block times and delays.

    Its ``value_s`` is that sum, without what the first block waits for the host and the host for the last.
    """
    costs = costs_of(items)
    value = np.full((items.num_items + 1, len(usage.after)), inf)
    parent = np.full((items.num_items + 1, len(usage.after), 3), -1, dtype=np.int64)
    value[0, 0] = 0.0
    _forward(
        costs, empty_filling(costs), order, usage.after, usage.takes, usage.width, limit_s, request.min_stage_s, delay_s, value,
        parent,
    )  # fmt: skip
    chain = chain_of(order, usage, value, parent, inf)
    return None if chain is None else replace(chain, value_s=chain.value_s - delay_s)


@compiled
def _forward(
    costs: Costs, filling: Filling, order: Ints, after: Ints, takes: Ints, width: Ints, limit: float, least: float, delay: float,
    value: Floats, parent: Ints,
) -> None:  # fmt: skip
    """Fill in the sums of (prefix length, usage), and for each the (prefix, usage, move) that it came from."""
    count, widest, one = len(order), 0, whole(1)
    for move in range(len(width)):
        widest = max(widest, width[move])
    for start in range(count):
        if _lowest(value, start) < np.inf:
            reset(filling)
            end = start
            while end < count:
                add(costs, filling, order[end])
                end += 1
                if not price(costs, filling) <= limit * (1 + ROUNDING) * widest:
                    break
                for move in range(len(takes)):
                    load = widest_load(filling.load, takes, move, width)
                    if load <= limit * (1 + ROUNDING) and load >= least * (1 - ROUNDING) and load < np.inf:
                        _relax(value, parent, after, start, end, move, load * width[move] + delay)
            for position in range(start, end):
                remove(costs, filling, order[position])
        shift(costs, filling, order[start], one)


@inner
def _relax(value: Floats, parent: Ints, after: Ints, start: int, end: int, move: int, seconds: float) -> None:
    """Extend every usage of the prefix ``start`` by one block that ends at ``end``."""
    for state in range(len(after)):
        goal = after[state, move]
        if goal >= 0 and value[start, state] + seconds < value[end, goal]:
            value[end, goal] = value[start, state] + seconds
            parent[end, goal, 0] = start
            parent[end, goal, 1] = state
            parent[end, goal, 2] = move


@inner
def _lowest(value: Floats, row: int) -> float:
    """The least entry of a row."""
    least = np.inf
    for column in range(value.shape[1]):
        least = min(least, value[row, column])
    return least
