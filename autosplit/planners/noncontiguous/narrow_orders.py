"""Orders of the items of a hypergraph along which few nets are open at a time; a net is open from its first to its last item."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosplit.planners.items import Items
from autosplit.planners.jit import allocating
from autosplit.planners.loads import Ints


def narrow_order(graph: Items, members: NDArray[np.bool_], *, tries: int = 1, seed: int = 0) -> Ints:
    """The members in an order with few open nets: greedy with random ties or, of several tries, the best; the first without."""
    rows = graph.pins.start, graph.pins.data, graph.costs.net_start, graph.costs.nets
    best: tuple[float, Ints] | None = None
    for number in range(tries):
        chance = number > 0 or tries == 1
        order, area = _greedy_order(*rows, members, seed + number, chance)
        if best is None or area < best[0]:
            best = float(area), order
    return best[1] if best else np.zeros(0, dtype=np.int64)


def cheap_nets(graph: Items, order: Ints, k: int, most: float) -> NDArray[np.bool_]:
    """The nets to leave out for a narrow sweep: those that cost class ``k`` least at the widest place, until all states fit.

    Nets only add to loads, so that a bound without them holds with them.
    """
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    nets = [place[graph.pins[net]] for net in range(len(graph.pins))]
    first, last = np.array([pins.min() for pins in nets]), np.array([pins.max() for pins in nets])
    num_open = np.zeros(len(order), dtype=np.int64)
    for net in range(len(graph.pins)):
        num_open[first[net] : last[net]] += 1
    dropped = np.zeros(len(graph.pins), dtype=np.bool_)
    while (2.0**num_open).sum() > most:
        widest = int(num_open.argmax())
        there = np.flatnonzero(~dropped & (first <= widest) & (widest < last))
        net = int(there[graph.costs.send_s[there, k].argmin()])
        dropped[net] = True
        num_open[first[net] : last[net]] -= 1
    return dropped


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
