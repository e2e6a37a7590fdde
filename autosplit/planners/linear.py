"""The best chain along one order of the items: a dynamic program over prefixes, run on several depth-first orders.

A prefix is kept only while its value is below the limit and what is left fits the devices that are left. The limit
starts near the bound and grows until a chain is found, so little more than the useful prefixes is ever seen.
"""

from dataclasses import dataclass
from math import inf
from random import Random
from time import monotonic

import numpy as np

from autosplit.costs.problem import Floats
from autosplit.planners.bounds import item_work
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
from autosplit.planners.items import Ints, Items, Table
from autosplit.planners.request import Request
from autosplit.planners.usage import Usage, capacity

LIMITS = (1.001, 1.02, 1.1, 1.3, 2.0, 4.0, inf)
MANY_ITEMS = 5000
MANY_SHARE = 0.1
"""Of the time, after which on many items the first chain found is enough to begin with."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Items in a row of blocks, the devices of each class that every block takes, and the largest load in seconds."""

    blocks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    value_s: float


def depth_first_orders(items: Items, count: int = 6) -> list[Ints]:
    """Topological orders that finish what they began: from the sources and from the sinks, by three ways to choose the next."""
    before = items.after.transposed(items.num_items)
    orders = [np.arange(items.num_items)]
    for seed in range(count - 1):
        backwards = seed % 2 == 0
        order = _stack_order(before if backwards else items.after, seed // 2, items)
        orders.append(order[::-1].copy() if backwards else order)
    return orders


def _stack_order(after: Table, choice: int, items: Items) -> Ints:
    """A topological order by a stack of ready items; the choice breaks ties: falling index, weight, or chance."""
    count = len(after)
    waiting = np.bincount(after.data, minlength=count)
    random = Random(choice)
    work = np.where(np.isfinite(items.compute_s), items.compute_s, 0).sum(axis=1)
    keys = [-np.arange(count), work, np.array([random.random() for _ in range(count)])][choice]
    ready = sorted(np.flatnonzero(waiting == 0).tolist(), key=lambda item: float(keys[item]))
    order = []
    while ready:
        item = ready.pop()
        order.append(item)
        for goal in sorted(after[item].tolist(), key=lambda item: float(keys[item])):
            waiting[goal] -= 1
            if not waiting[goal]:
                ready.append(goal)
    return np.array(order, dtype=np.int64)


def best_chain(
    items: Items, request: Request, usage: Usage, weights: Floats, bound_s: float, limit_s: float, deadline: float
) -> Chain | None:
    """The best chain over the depth-first orders with a value below ``limit_s``, or None.

    Args:
        items: what is to be put in a row.
        request: the limits on a plan.
        usage: the devices.
        weights: multipliers of the classes, for pruning.
        bound_s: a bound on the value, from which the limit starts.
        limit_s: only chains below this count.
        deadline: monotonic seconds after which no further order is tried; on many items earlier, once there is a chain. Where no
            plan is known and items are not many, one order is looked through to the end all the same.
    """
    best: Chain | None = None
    many = items.num_items > MANY_ITEMS
    enough = monotonic() + (MANY_SHARE if many else 1.0) * (deadline - monotonic())
    orders = depth_first_orders(items, 3 if many else 6)
    for growth in LIMITS[many:]:
        limit = min(limit_s, bound_s * growth if bound_s > 0 else inf)
        for order in orders:
            found = chain_in_order(items, request, usage, weights, order, limit)
            if found is not None:
                best, limit = found, found.value_s
            if monotonic() > (deadline if best is None else enough):
                if best is None and limit_s == inf and not many:  # below no limit, one order gives a chain if it has any
                    return chain_in_order(items, request, usage, weights, orders[0], inf)
                return best
        if best is not None or limit >= limit_s:
            break
    return best


def chain_in_order(items: Items, request: Request, usage: Usage, weights: Floats, order: Ints, limit_s: float) -> Chain | None:
    """The best chain whose blocks are intervals of the order, if its value is below ``limit_s``."""
    rest = np.zeros(items.num_items + 1)
    rest[:-1] = np.cumsum(item_work(items, weights)[order][::-1])[::-1]
    costs = costs_of(items)
    room = capacity(usage, weights)
    value = np.full((items.num_items + 1, len(usage.after)), inf)
    parent = np.full((items.num_items + 1, len(usage.after), 3), -1, dtype=np.int64)
    value[0, 0] = 0.0
    _forward(
        costs, empty_filling(costs), order, usage.after, usage.takes, usage.width, room, rest, limit_s, request.min_stage_s,
        value, parent, np.zeros(len(usage.after), dtype=np.int64),
    )  # fmt: skip
    return chain_of(order, usage, value, parent, limit_s)


def chain_of(order: Ints, usage: Usage, value: Floats, parent: Ints, limit_s: float) -> Chain | None:
    """The chain that the tables of a program over prefixes end with, if its value is below ``limit_s``.

    Args:
        order: the items.
        usage: the devices.
        value: seconds of each prefix length and usage.
        parent: for each of them the prefix length, usage and move that it came from.
        limit_s: only values below this count.
    """
    last = np.where(usage.final, value[-1], inf)
    state = int(last.argmin())
    if not last[state] < limit_s:
        return None
    blocks = []
    end = len(order)
    while end > 0:
        start, before, move = parent[end, state]
        blocks.append((tuple(order[start:end].tolist()), tuple(usage.takes[move].tolist())))
        end, state = int(start), int(before)
    return Chain(tuple(reversed(blocks)), float(last.min()))


@compiled
def _forward(
    costs: Costs, filling: Filling, order: Ints, after: Ints, takes: Ints, width: Ints, room: Floats, rest: Floats,
    limit: float, least: float, value: Floats, parent: Ints, alive: Ints,
) -> None:  # fmt: skip
    """Fill in the values of (prefix length, usage), and for each the (prefix, usage, move) that it came from."""
    count = len(order)
    widest, one = 0, whole(1)
    for move in range(len(width)):
        widest = max(widest, width[move])
    strict = limit * (1 - ROUNDING)
    for start in range(count):
        num_alive, most = _alive_usages(value, after, room, start, strict, alive)
        if num_alive > 0:
            reset(filling)
            end = start
            while end < count:
                add(costs, filling, order[end])
                end += 1
                if not price(costs, filling) < strict * widest:
                    break
                left = rest[end] / (1 + ROUNDING)
                if left > most * limit:
                    continue
                for move in range(len(takes)):
                    top = widest_load(filling.load, takes, move, width)
                    if top < strict and top >= least * (1 - ROUNDING):
                        _relax(value, parent, after, room, alive, num_alive, start, end, move, top, left, limit)
            for position in range(start, end):
                remove(costs, filling, order[position])
        shift(costs, filling, order[start], one)


@inner
def _alive_usages(value: Floats, after: Ints, room: Floats, start: int, strict: float, alive: Ints) -> tuple[int, float]:
    """List the usages of a prefix with a value below the limit; how many there are, and the most room that a block leaves."""
    count, most = 0, 0.0
    for state in range(len(after)):
        if value[start, state] < strict:
            alive[count] = state
            count += 1
            for move in range(after.shape[1]):
                if after[state, move] >= 0:
                    most = max(most, room[after[state, move]])
    return count, most


@inner
def _relax(
    value: Floats, parent: Ints, after: Ints, room: Floats, alive: Ints, num_alive: int, start: int, end: int, move: int,
    top: float, rest: float, limit: float,
) -> None:  # fmt: skip
    """Extend every usage of the prefix ``start`` that is alive by one block that ends at ``end``."""
    for place in range(num_alive):
        state = alive[place]
        goal = after[state, move]
        if goal < 0 or rest > room[goal] * limit:
            continue
        new = max(top, value[start, state])
        if new < limit * (1 - ROUNDING) and new < value[end, goal]:
            value[end, goal] = new
            parent[end, goal, 0] = start
            parent[end, goal, 1] = state
            parent[end, goal, 2] = move
