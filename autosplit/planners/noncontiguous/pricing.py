"""Pricing: the most valuable set of items that one device can hold within a load, exactly.

It is a dynamic program: for each state of a narrow sweep and each value, the least load. Values are whole numbers, which the
caller chooses; loads are floats and not rounded. With compute as the value, it gives the cut profile of a graph: the least load
of a device for each amount of work.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import Floats
from autosplit.jit import allocating
from autosplit.planners.loads import Ints
from autosplit.planners.noncontiguous.sweeps import Sweep

ROOM = 1.3
"""The table covers values up to this many times the even share of a device; it grows only where a set reaches its end."""


@dataclass(frozen=True)
class Pricer:
    """One class of devices.

    Attributes:
        sweep: along all items, over the nets that this class pays for.
        work_s: compute of each item on a device of the class, shape (num_items,).
        count: devices in the class.
        scratch: memory that is used again by each pricing, in one thread.
    """

    sweep: Sweep
    work_s: Floats
    count: int
    scratch: list[Floats] = field(default_factory=lambda: [np.zeros(0)])

    def profile(self, values: Ints, limit_s: float) -> Floats:
        """The least load of a set of value v or more, for v from 0 to the most that fits into the limit; seconds."""
        loads, _ = self._run(values, limit_s, 0, keep=False)
        return np.asarray(np.minimum.accumulate(loads[::-1])[::-1])

    def best_set(self, values: Ints, limit_s: float, floor: int = 0) -> NDArray[np.bool_]:
        """The set of most value within the limit, shape (num_items,); a value of ``floor`` is known to be possible."""
        loads, table = self._run(values, limit_s, floor, keep=True)
        return np.asarray(_trace(self.sweep, self.work_s, values, table[0], table[1], table[2], len(loads) - 1))

    def _run(self, values: Ints, limit_s: float, floor: int, keep: bool) -> tuple[Floats, Any]:
        sweep, total = self.sweep, int(values.sum())
        most, slope, ahead = min(total, int(ROOM * total / self.count)), 0.0, np.zeros(sweep.num_states)
        if floor:
            slope, ahead = self._outlook(values, limit_s)
            most = min(total, int(slope * limit_s + ahead[0]) + 1)  # no set within the limit is worth more
        while True:
            cells = (sweep.num_states if keep else 2 * sweep.width) * (most + 1)
            if len(self.scratch[0]) < cells:
                self.scratch[0] = np.empty(cells)
            loads, table, cropped = _price(
                sweep, self.work_s, values, limit_s, most, floor - 0.5, slope, ahead, keep, sweep.width, self.scratch[0]
            )
            if floor and loads[-1] == np.inf:  # the known set is over the limit by a rounding of sums
                return self._run(values, limit_s, 0, keep)
            if not cropped or floor:
                return loads, table
            most = min(total, 2 * most + 1)

    def _outlook(self, values: Ints, limit_s: float) -> tuple[float, Floats]:
        """The price on load with the tightest Lagrangian bound, and the most that each state can still earn at that price."""
        low, high = 0.0, float(values.sum()) / limit_s  # above that, the limit alone is worth more than all items
        best: tuple[float, float, Floats] = np.inf, 0.0, np.zeros(0)
        for _ in range(24):
            slopes = low + (high - low) * 0.382, low + (high - low) * 0.618
            tops = []
            for slope in slopes:
                ahead = _earnings(self.sweep, self.work_s, values, slope)
                tops.append(slope * limit_s + float(ahead[0]))
                if tops[-1] < best[0]:
                    best = tops[-1], slope, ahead
            low, high = (low, slopes[1]) if tops[0] < tops[1] else (slopes[0], high)
        return best[1:]


@allocating
def _earnings(sweep: Sweep, work_s: Any, values: Ints, slope: float) -> Floats:
    """For each state, the most that the remaining steps can add to value - ``slope`` x load."""
    order, layer, into, source, side, cost_1, _ = sweep
    ahead = np.full(len(into) - 1, -np.inf)
    ahead[layer[len(order)]] = 0.0
    for step in range(len(order) - 1, -1, -1):
        item = order[step]
        for state in range(layer[step + 1], layer[step + 2]):
            for edge in range(into[state], into[state + 1]):
                earned = ahead[state] - slope * cost_1[edge]
                if side[edge] == 1:
                    earned += values[item] - slope * work_s[item]
                if earned > ahead[source[edge]]:
                    ahead[source[edge]] = earned
    return ahead


@allocating
def _price(  # noqa: C901 - one compiled loop
    sweep: Sweep, work_s: Any, values: Ints, limit_s: float, most: int, floor: float, slope: float, ahead: Floats, keep: bool,
    width: int, scratch: Floats,
) -> Any:  # fmt: skip
    """The least load for each value (infinite where no set has it), the table, and whether values above ``most`` were left out.

        state     value 0   1   2   3  ...  most
          s0         .      x   x   .                  a cell: the least load of a path to the state with that value
          s1         x      .   x   .                  only cells from lowest[state] to highest[state] are set

    Cells that cannot reach ``floor`` are dropped: no state earns more than ``ahead`` at the price ``slope`` for load, which is a
    Lagrangian bound. Unless ``keep``, the table has rows for two layers only.
    """
    order, layer, into, source, side, cost_1, _ = sweep
    num_steps, num_states = len(order), len(into) - 1
    num_rows = num_states if keep else 2 * width
    table = scratch[: num_rows * (most + 1)].reshape((num_rows, most + 1))
    lowest, highest = np.zeros(num_states, np.int64), np.full(num_states, -1, np.int64)
    table[0, 0], highest[0] = 0.0, 0
    cropped = False
    for step in range(num_steps):
        item = order[step]
        value, work = values[item], work_s[item]
        old_row = 0 if keep else step % 2 * width - layer[step]
        new_row = 0 if keep else (step + 1) % 2 * width - layer[step + 1]
        for state in range(layer[step + 1], layer[step + 2]):
            row = table[new_row + state]
            # 1. the range of values that the edges into the state bring
            low, high = most + 1, -1
            for edge in range(into[state], into[state + 1]):
                parent, shift = source[edge], value if side[edge] == 1 else 0
                if highest[parent] >= 0:
                    low, high = min(low, lowest[parent] + shift), max(high, highest[parent] + shift)
            high = min(high, most)
            row[low : high + 1] = np.inf
            # 2. shift the row of each source by the value of the item, and keep the smaller load of each cell
            for edge in range(into[state], into[state + 1]):
                parent, add, shift = source[edge], cost_1[edge], 0
                if side[edge] == 1:
                    add, shift = add + work, value
                if add > limit_s or highest[parent] < 0:
                    continue
                past = table[old_row + parent]
                top = min(highest[parent], most - shift)
                for amount in range(max(top + 1, lowest[parent]), highest[parent] + 1):
                    cropped = cropped or past[amount] + add <= limit_s
                first, count = lowest[parent], top + 1 - lowest[parent]
                if count > 0:
                    before, after = past[first : first + count], row[first + shift : first + shift + count]
                    for spot in range(count):
                        load = before[spot] + add
                        after[spot] = load if load < after[spot] else after[spot]
            # 3. drop cells above the limit, or without hope of reaching the floor
            lowest[state] = most + 1
            hope = ahead[state] + slope * limit_s
            for amount in range(low, high + 1):
                if row[amount] > limit_s or amount + hope - slope * row[amount] < floor:
                    row[amount] = np.inf
                else:
                    highest[state] = amount
                    if lowest[state] > most:
                        lowest[state] = amount
    last = num_states - 1
    loads = np.full(max(highest[last], 0) + 1, np.inf)
    row = table[last if keep else num_steps % 2 * width]
    for amount in range(lowest[last], highest[last] + 1):
        loads[amount] = row[amount]
    return loads, (table, lowest, highest), cropped


@allocating
def _trace(sweep: Sweep, work_s: Any, values: Ints, table: Any, lowest: Ints, highest: Ints, amount: int) -> NDArray[np.bool_]:
    """The set with the value ``amount`` and the least load, found by going back through the kept table."""
    order, layer, into, source, side, cost_1, _ = sweep
    chosen = np.zeros(len(values), np.bool_)
    state = layer[len(order)]
    for step in range(len(order) - 1, -1, -1):
        item = order[step]
        for edge in range(into[state], into[state + 1]):
            parent, add, left = source[edge], cost_1[edge], amount
            if side[edge] == 1:
                add, left = add + work_s[item], amount - values[item]
            inside = lowest[parent] <= left <= highest[parent]
            if inside and table[parent, left] + add == table[state, amount]:
                chosen[item] = side[edge] == 1
                state, amount = parent, left
                break
    return chosen
