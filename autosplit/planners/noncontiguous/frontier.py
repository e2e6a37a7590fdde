"""The frontier: a sweep over the items of a hypergraph that keeps few nets open, and the states along it.

Items are taken one after the other, each to side 1 or side 0. A net is open between its first and its last item. The state is,
for each open net, whether its items so far are all on side 0, all on side 1, or on both:

    item      a   b   c   d   e              after c the open nets are x and y: at most 3 x 3 states
    net x     o---+-------o
    net y         o-----------o

Graphs of models are narrow: 2 to 11 nets are open at a time if the order is chosen well (``narrow_orders``). Dynamic programs
over the states price device sets exactly (``pricing``) and divide the items of two devices (``resplitting``).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import HOST, Floats
from autosplit.planners.items import Items
from autosplit.planners.jit import allocating
from autosplit.planners.loads import Ints

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
        cost_1: what side 1 pays for nets on this step, in seconds.
        cost_0: what side 0 pays.
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
    graph: Items, order: Ints, members: NDArray[np.bool_], class_1: int, class_0: int, *, max_states: int = 2_000_000
) -> Sweep | None:
    """The states along an order, or None where there are more than ``max_states``.

    Args:
        graph: items and nets.
        order: the members, in the order of the sweep.
        members: the items that are divided; all others are on a third side.
        class_1, class_0: of the devices that pay as side 1 and as side 0.
        max_states: limit over all positions.
    """
    c = graph.costs
    found: Any = _states(
        order, graph.pins.start, graph.pins.data, c.net_start, c.nets, c.producer == HOST, members,
        np.ascontiguousarray(c.send_s[:, class_1]), np.ascontiguousarray(c.send_s[:, class_0]), max_states,
    )  # fmt: skip
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
