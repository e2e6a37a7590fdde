"""Sweeps over the items of a hypergraph that keep few nets open: the order, the states along it, and states that know bytes too.

Items are taken one after the other, each to side 1 or side 0. A net is open between its first and its last item. The state is,
for each open net, whether its items so far are all on side 0, all on side 1, or on both:

    item      a   b   c   d   e              after c the open nets are x and y: at most 3 x 3 states
    net x     o---+-------o
    net y         o-----------o

Graphs of models are narrow: 2 to 11 nets are open at a time if the order is chosen well. Dynamic programs over the states price
device sets exactly (``pricing``) and divide the items of two devices (``resplitting``).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.problem import HOST, Floats
from autosplit.jit import allocating
from autosplit.planners.instance import Instance
from autosplit.planners.loads import Ints


def narrow_order(graph: Instance, members: NDArray[np.bool_], *, tries: int = 1, seed: int = 0) -> Ints:
    """The members in an order with few open nets: greedy with random ties or, of several tries, the best; the first without."""
    rows = *graph.pins, *graph.costs.nets, members
    found = (_greedy_order(*rows, seed + number, number > 0 or tries == 1) for number in range(tries))
    return min(found, key=lambda order: order[1])[0]


def cheap_nets(graph: Instance, order: Ints, k: int, most: float) -> NDArray[np.bool_]:
    """The nets to leave out for a narrow sweep: those that cost class ``k`` least at the widest place, until all states fit.

    Nets only add to loads, so that a bound without them holds with them.
    """
    place = np.argsort(order)[graph.pins.data]
    first, last = (end.reduceat(place, graph.pins.start[:-1]) for end in (np.minimum, np.maximum))
    num_open = np.zeros(len(order), dtype=np.int64)
    for net in range(graph.pins.num_rows):
        num_open[first[net] : last[net]] += 1
    dropped = np.zeros(graph.pins.num_rows, dtype=np.bool_)
    while (2.0**num_open).sum() > most:
        widest = int(num_open.argmax())
        there = np.flatnonzero(~dropped & (first <= widest) & (widest < last))
        net = int(there[graph.send_s[there, k].argmin()])
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


BOTH = 2
"""State of an open net with items on both sides; 0 and 1 are the sides."""

MAX_OPEN = 30
"""Most open nets: states are numbers in base 3 with 64 bits, and far too many long before that."""


class Sweep(NamedTuple):
    """The states along an order of items, and the steps between them.

    Attributes:
        order: the items, in the order in which they are taken.
        layer: where the states of each position start, shape (num_steps + 2,); position 0 has one state, numbered 0.
        into: where the steps into each state start, shape (num_states + 1,). States are numbered through all positions.
        source: the state that each step comes from.
        side: the side that it gives the item.
        cost_1: seconds that side 1 pays for nets on this step.
        cost_0: seconds that side 0 pays.
    """

    order: Ints
    layer: Ints
    into: Ints
    source: Ints
    side: NDArray[np.int8]
    cost_1: Floats
    cost_0: Floats

    @property
    def num_states(self) -> int:
        """The number of states."""
        return len(self.into) - 1

    @property
    def width(self) -> int:
        """The most states of one position."""
        return int(np.diff(self.layer).max())


def sweep_of(
    graph: Instance, order: Ints, members: NDArray[np.bool_], class_1: int, class_0: int, *, max_states: int = 2_000_000
) -> Sweep | None:
    """The states along an order, or None where there are more than ``max_states``.

    Args:
        graph: items and nets.
        order: the members, in the order of the sweep.
        members: the items that are divided; all others are on a third side.
        class_1, class_0: of the devices that pay as side 1 and as side 0.
        max_states: limit over all positions.
    """
    price_1, price_0 = (np.ascontiguousarray(graph.send_s[:, k]) for k in (class_1, class_0))
    outside = graph.producer == HOST
    found: Any = _states(order, *graph.pins, *graph.costs.nets, outside, members, price_1, price_0, max_states)
    layer, into, source, side, cost_1, cost_0 = found
    return None if len(layer) < len(order) + 2 else Sweep(order, layer, into, source, side, cost_1, cost_0)


@allocating
def _states(  # noqa: C901 - one compiled loop
    order: Ints, net_start: Ints, net_pins: Ints, item_start: Ints, item_nets: Ints, net_outside: Any, members: Any,
    price_1: Floats, price_0: Floats, max_states: int,
) -> Any:  # fmt: skip
    """The arrays of the sweep; they end early where there are too many states."""
    # 1. pins of each net that are still to come; a net with a pin that is not a member has an end outside
    num_nets, num_steps = len(net_start) - 1, len(order)
    left = np.zeros(num_nets, np.int64)
    outside = net_outside.copy()
    for net in range(num_nets):
        for entry in range(net_start[net], net_start[net + 1]):
            if members[net_pins[entry]]:
                left[net] += 1
            else:
                outside[net] = True
    slot_of = np.full(num_nets, -1, np.int64)
    slots = np.zeros(MAX_OPEN, np.int64)
    num_slots = 0
    codes = np.zeros(1, np.int64)
    layer = np.zeros(num_steps + 2, np.int64)
    layer[1] = 1
    size = 1024
    into, source = np.zeros(size, np.int64), np.zeros(size, np.int64)
    side, cost_1, cost_0 = np.zeros(size, np.int8), np.zeros(size), np.zeros(size)
    num_states, num_edges = 1, 0
    digits = np.zeros(MAX_OPEN + 64, np.int64)
    for step in range(num_steps):
        item = order[step]
        # 2. give a slot, a digit of the state, to each net that the item opens
        nets = item_nets[item_start[item] : item_start[item + 1]]
        old_slots = num_slots
        for net in nets:
            if slot_of[net] < 0:
                if num_slots == MAX_OPEN:
                    return layer[: step + 1], into[:1], source[:0], side[:0], cost_1[:0], cost_0[:0]
                slot_of[net] = num_slots
                slots[num_slots] = net
                num_slots += 1
            left[net] -= 1
        # 3. from each state, the item goes to side 0 or 1: the digits of its nets turn, and a net that turns is paid
        count = len(codes)
        fresh, paid_1, paid_0 = np.zeros(2 * count, np.int64), np.zeros(2 * count), np.zeros(2 * count)
        for state in range(count):
            for choice in range(2):
                code = codes[state]
                for slot in range(old_slots):
                    digits[slot] = code % 3
                    code //= 3
                bill_1, bill_0 = 0.0, 0.0
                for net in nets:
                    slot = slot_of[net]
                    opening = slot >= old_slots
                    turning = not opening and digits[slot] != choice and digits[slot] != BOTH
                    if outside[net] and (opening or turning):
                        if choice == 1:
                            bill_1 += price_1[net]
                        else:
                            bill_0 += price_0[net]
                    elif turning:
                        bill_1 += price_1[net]
                        bill_0 += price_0[net]
                    if opening:
                        digits[slot] = choice
                    elif turning:
                        digits[slot] = BOTH
                code = 0
                for slot in range(num_slots - 1, -1, -1):
                    if left[slots[slot]] > 0:
                        code = code * 3 + digits[slot]
                fresh[2 * state + choice] = code
                paid_1[2 * state + choice], paid_0[2 * state + choice] = bill_1, bill_0
        # 4. equal codes are one state; its edges are listed together
        rank = np.argsort(fresh, kind="mergesort")
        codes = np.zeros(2 * count, np.int64)
        found = 0
        while num_edges + 2 * count + 1 > len(source):
            source, side = np.append(source, source), np.append(side, side)
            cost_1, cost_0 = np.append(cost_1, cost_1), np.append(cost_0, cost_0)
        for place in range(2 * count):
            edge = rank[place]
            if place == 0 or fresh[edge] != codes[found - 1]:
                codes[found] = fresh[edge]
                found += 1
                if num_states + found + 1 > len(into):
                    into = np.append(into, into)
                into[num_states + found - 1] = num_edges
            source[num_edges] = layer[step] + edge // 2
            side[num_edges] = edge % 2
            cost_1[num_edges], cost_0[num_edges] = paid_1[edge], paid_0[edge]
            num_edges += 1
        codes = codes[:found]
        num_states += found
        layer[step + 2] = num_states
        # 5. free the slots of the nets that the item closes
        kept = 0
        for slot in range(num_slots):
            net = slots[slot]
            if left[net] > 0:
                slots[kept] = net
                slot_of[net] = kept
                kept += 1
        num_slots = kept
        if num_states > max_states:
            return layer[: step + 1], into[:1], source[:0], side[:0], cost_1[:0], cost_0[:0]
    into[num_states] = num_edges
    return layer, into[: num_states + 1], source[:num_edges], side[:num_edges], cost_1[:num_edges], cost_0[:num_edges]


def capped_sweep(sweep: Sweep, item_bytes: Floats, room_bytes: float, num_levels: int) -> Sweep:
    """The sweep without most of the sets whose bytes on side 1 are above the cap, and with all of those below it.

    Args:
        sweep: along all items.
        item_bytes: memory of each item, shape (num_items,).
        room_bytes: most bytes of side 1.
        num_levels: levels of bytes into which a state is divided; more levels are more exact and take longer.
    """
    step_bytes, room_bytes = item_bytes[sweep.order], room_bytes * (1.0 + TOLERANCE)
    left_bytes = np.append(step_bytes[::-1].cumsum()[::-1], 0.0)
    layer, into, source, chosen, num_steps = [0, 1], [np.zeros(1, dtype=np.int64)], [], [], 0
    origin, held = np.zeros(1, dtype=np.int64), np.zeros(1)  # of each new state of a layer: the old one, and its fewest bytes
    for step, size in enumerate(step_bytes.tolist()):
        # 1. each step into the next layer, from each new state of its source
        first, last = sweep.layer[step + 1], sweep.layer[step + 2]
        edges = np.arange(sweep.into[first], sweep.into[last])
        state = np.repeat(np.arange(first, last), np.diff(sweep.into[first : last + 1]))
        begin, end = (np.searchsorted(origin, sweep.source[edges], side=side) for side in ("left", "right"))
        edge = np.repeat(np.arange(len(edges)), end - begin)
        past = np.arange(len(edge)) + (begin - np.append(0, (end - begin).cumsum()[:-1]))[edge]
        taken = held[past] + size * (sweep.side[edges[edge]] == 1)
        # 2. steps to one state and level are one new state. The last level is for paths that cannot exceed the cap any more
        kept = np.flatnonzero(taken <= room_bytes)
        level = np.minimum(num_levels - 1, taken[kept] / max(room_bytes, 1e-300) * num_levels).astype(np.int64)
        level[taken[kept] + left_bytes[step + 1] <= room_bytes] = num_levels
        key = state[edge[kept]] * (num_levels + 1) + level
        kept, key = kept[(rank := key.argsort(kind="stable"))], key[rank]
        keys, starts = np.unique(key, return_index=True)
        into.append(num_steps + starts)
        source.append(layer[-2] + past[kept])
        chosen.append(edges[edge[kept]])
        origin, held = keys // (num_levels + 1), np.minimum.reduceat(taken[kept], starts) if len(keys) else np.zeros(0)
        num_steps += len(kept)
        layer.append(layer[-1] + len(keys))
    steps = np.concatenate(chosen)
    arrays = np.concatenate([*into, [num_steps]]), np.concatenate(source), sweep.side[steps], sweep.cost_1[steps]
    return Sweep(sweep.order, np.array(layer), *arrays, sweep.cost_0[steps])
