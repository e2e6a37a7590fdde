"""Orders of the items of a hypergraph along which few nets are open at a time; a net is open from its first to its last item."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosplit.planners.items import Ints
from autosplit.planners.jit import allocating, inner
from autosplit.planners.noncontiguous.hypergraph import Hypergraph

SIFTING_STEPS = 200_000_000
"""Sifting ends after this many steps."""


def narrow_order(graph: Hypergraph, members: NDArray[np.bool_], *, tries: int = 1, seed: int = 0) -> Ints:
    """The members in an order with few open nets: greedy, the best of several tries with random ties."""
    best: tuple[float, Ints] | None = None
    for number in range(tries):
        order, area = _greedy_order(
            graph.net_start, graph.net_pins, graph.item_start, graph.item_nets, members, seed + number, number > 0
        )
        if best is None or area < best[0]:
            best = float(area), order
    return best[1] if best else np.zeros(0, dtype=np.int64)


def sifted_order(graph: Hypergraph, order: Ints, *, seed: int) -> Ints:
    """An order of all items with fewer open nets: each item is moved next to items that it shares nets with while that helps.

    It follows Rudell's sifting of decision diagrams (1993). The number of states is estimated as the sum of 2 to the number of
    open nets.

    Args:
        graph: items and nets.
        order: all items.
        seed: of the sequence in which items are tried.
    """
    found: Any = _sift(order, graph.net_start, graph.net_pins, graph.item_start, graph.item_nets, SIFTING_STEPS, seed)
    return np.asarray(found)


def cheap_nets(graph: Hypergraph, order: Ints, device: int, most: float) -> NDArray[np.bool_]:
    """The nets to leave out for a narrow sweep: the cheapest at the widest place, until the estimate of the states fits.

    Nets only add to loads, so that a bound without them holds with them.
    """
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    nets = [place[graph.pins(net)] for net in range(graph.num_nets)]
    first, last = np.array([pins.min() for pins in nets]), np.array([pins.max() for pins in nets])
    num_open = np.zeros(len(order), dtype=np.int64)
    for net in range(graph.num_nets):
        num_open[first[net] : last[net]] += 1
    dropped = np.zeros(graph.num_nets, dtype=np.bool_)
    while (2.0**num_open).sum() > most:
        widest = int(num_open.argmax())
        there = np.flatnonzero(~dropped & (first <= widest) & (widest < last))
        net = int(there[graph.net_s[there, device].argmin()])
        dropped[net] = True
        num_open[first[net] : last[net]] -= 1
    return dropped


@inner
def _area(place: Ints, net_start: Ints, net_pins: Ints, change: Ints) -> float:
    """The sum over positions of 2 to the number of open nets."""
    change[:] = 0
    for net in range(len(net_start) - 1):
        low, high = len(place), -1
        for entry in range(net_start[net], net_start[net + 1]):
            low, high = min(low, place[net_pins[entry]]), max(high, place[net_pins[entry]])
        change[low] += 1
        change[high] -= 1
    area, num_open = 0.0, 0
    for position in range(len(place)):
        num_open += change[position]
        area += 2.0**num_open
    return area


@allocating
def _sift(  # noqa: C901 - one compiled loop
    start: Ints, net_start: Ints, net_pins: Ints, item_start: Ints, item_nets: Ints, work: int, seed: int
) -> Ints:
    """The sifted order; ``work`` bounds the steps."""
    np.random.seed(seed)
    count, order = len(start), start.copy()
    place = np.zeros(count, np.int64)
    for position in range(count):
        place[order[position]] = position
    trial, change = place.copy(), np.zeros(count + 1, np.int64)
    best, cost, spent = _area(place, net_start, net_pins, change), count + len(net_pins), 0
    better = True
    while better and spent < work:
        better = False
        for item in np.random.permutation(count):
            # 1. try the places before and after each neighbour
            old, goal = place[item], -1
            for spot in range(item_start[item], item_start[item + 1]):
                net = item_nets[spot]
                for entry in range(net_start[net], net_start[net + 1]):
                    for side in range(2):
                        new = place[net_pins[entry]] + side
                        if new > old:
                            new -= 1
                        if new == old or spent > work:
                            continue
                        shift = -1 if old < new else 1
                        for position in range(min(old, new), max(old, new) + 1):
                            trial[order[position]] = position + shift
                        trial[item] = new
                        area = _area(trial, net_start, net_pins, change)
                        spent += cost
                        if area < best * (1.0 - 1e-9):
                            best, goal = area, new
                        for position in range(min(old, new), max(old, new) + 1):
                            trial[order[position]] = position
            # 2. move the item to the best of them
            if goal >= 0:
                shift = 1 if old < goal else -1
                for position in range(old, goal, shift):
                    order[position] = order[position + shift]
                order[goal] = item
                for position in range(min(old, goal), max(old, goal) + 1):
                    place[order[position]] = trial[order[position]] = position
                better = True
    return order


@allocating
def _greedy_order(  # noqa: C901 - one compiled loop
    net_start: Ints, net_pins: Ints, item_start: Ints, item_nets: Ints, members: Any, seed: int, random: bool
) -> tuple[Ints, float]:
    """Take the item that opens the fewest nets less those that it closes. Returns the order and the sum of 3^(open nets)."""
    # 1. pins of each net that are members, and those still to come
    np.random.seed(seed)
    num_items, num_nets = len(item_start) - 1, len(net_start) - 1
    left, total = np.zeros(num_nets, np.int64), np.zeros(num_nets, np.int64)
    for net in range(num_nets):
        for entry in range(net_start[net], net_start[net + 1]):
            if members[net_pins[entry]]:
                total[net] += 1
        left[net] = total[net]
    waiting = members.copy()
    count = 0
    for item in range(num_items):
        count += members[item]
    order = np.zeros(count, np.int64)
    touched = np.zeros(num_items, np.bool_)
    near = np.zeros(num_items, np.int64)
    num_near, num_open, area = 0, 0, 0.0
    for position in range(count):
        # 2. of the waiting items that share an open net, the one that opens the fewest nets less those that it closes
        best, best_key, kept = -1, np.inf, 0
        for entry in range(num_near):
            item = near[entry]
            if not waiting[item]:
                continue
            near[kept] = item
            kept += 1
            key = 0.0
            for spot in range(item_start[item], item_start[item + 1]):
                net = item_nets[spot]
                if left[net] == total[net]:
                    key += 1.0 if left[net] > 1 else 0.0
                elif left[net] == 1:
                    key -= 1.0
            if random:
                key += 0.9 * np.random.random()
            if key < best_key:
                best, best_key = item, key
        num_near = kept
        # 3. where there is none, the waiting item with the fewest nets
        if best < 0:
            for item in range(num_items):
                if waiting[item]:
                    key = float(item_start[item + 1] - item_start[item])
                    if random:
                        key += 2.0 * np.random.random()
                    if key < best_key:
                        best, best_key = item, key
        # 4. take it: the other items of the nets that it opens come near
        order[position] = best
        waiting[best] = False
        for spot in range(item_start[best], item_start[best + 1]):
            net = item_nets[spot]
            if left[net] == total[net]:
                num_open += 1
                for entry in range(net_start[net], net_start[net + 1]):
                    other = net_pins[entry]
                    if waiting[other] and not touched[other]:
                        touched[other] = True
                        near[num_near] = other
                        num_near += 1
            left[net] -= 1
            if left[net] == 0:
                num_open -= 1
        area += 3.0 ** min(num_open, 40)
    return order, area
