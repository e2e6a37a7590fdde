"""Pricing: of all sets of items that one device can hold within a load, how much value is in the best; exactly.

Values are whole numbers, loads stay floats: for each state of a narrow sweep and each value, the least load. Nothing is rounded
that the answer depends on, for the values may be chosen freely. With compute as the value this is the cut profile of a
graph: the least that a device pays for each amount of work.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosplit.planners.compiled import allocating
from autosplit.planners.frontier import Sweep
from autosplit.planners.items import Ints
from autosplit.problem import Floats

ROOM = 1.3
"""Values are followed up to this many times the even share of a device, and beyond only where a set reaches that."""


@dataclass(frozen=True)
class Pricer:
    """One class of devices.

    Attributes:
        sweep: along all items, over the nets that this class pays for.
        work_s: compute of each item on a device of the class, shape (num_items,).
        count: devices in the class.
    """

    sweep: Sweep
    work_s: Floats
    count: int

    def profile(self, values: Ints, limit_s: float) -> Floats:
        """Least load of a set worth at least v, for v from 0 up to the most that fits the limit."""
        loads, _ = self._run(values, limit_s, 0, keep=False)
        return np.asarray(np.minimum.accumulate(loads[::-1])[::-1])

    def best_set(self, values: Ints, limit_s: float, floor: int = 0) -> NDArray[np.bool_]:
        """The set of most value within the limit, shape (num_items,); at least `floor` is known to be possible."""
        loads, back = self._run(values, limit_s, floor, keep=True)
        sweep = self.sweep
        found: Any = _trace(sweep.order, sweep.layer, sweep.into, sweep.source, sweep.side, values, back, len(loads) - 1)
        return np.asarray(found)

    def _run(self, values: Ints, limit_s: float, floor: int, keep: bool) -> tuple[Floats, Any]:
        sweep, total = self.sweep, int(values.sum())
        most, slope, ahead = min(total, int(ROOM * total / self.count)), 0.0, np.zeros(sweep.num_states)
        if floor:
            slope, ahead = self._outlook(values, limit_s)
            most = min(total, int(slope * limit_s + ahead[0]) + 1)
        while True:
            loads, back, cropped = _price(
                sweep.order, sweep.layer, sweep.into, sweep.source, sweep.side, sweep.cost_1, self.work_s, values, limit_s, most,
                floor - 0.5, slope, ahead, keep,
            )  # fmt: skip
            if not cropped:
                return loads, back
            most = min(total, 2 * most + 1)

    def _outlook(self, values: Ints, limit_s: float) -> tuple[float, Floats]:
        """A price on load for which load and value together are least optimistic, and what each state can still earn at it."""
        sweep = self.sweep
        finite = self.work_s[np.isfinite(self.work_s)].sum()
        low, high = 0.0, 4.0 * values.sum() / max(float(finite), 1e-300)
        best: tuple[float, float, Floats] | None = None
        for _ in range(24):
            slopes = low + (high - low) * 0.382, low + (high - low) * 0.618
            tops = []
            for slope in slopes:
                ahead = _earnings(sweep.order, sweep.layer, sweep.into, sweep.source, sweep.side, sweep.cost_1, self.work_s,
                                  values, slope)  # fmt: skip
                tops.append(slope * limit_s + float(ahead[0]))
                if best is None or tops[-1] < best[0]:
                    best = tops[-1], slope, ahead
            low, high = (low, slopes[1]) if tops[0] < tops[1] else (slopes[0], high)
        return (best[1], best[2]) if best else (0.0, np.zeros(0))


@allocating
def _earnings(
    order: Ints, layer: Ints, into: Ints, source: Ints, side: Any, cost_1: Any, work_s: Any, values: Ints, slope: float
) -> Floats:
    """The most value less `slope` times load that the steps after each state can bring."""
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
    order: Ints, layer: Ints, into: Ints, source: Ints, side: Any, cost_1: Any, work_s: Any, values: Ints, limit_s: float,
    most: int, floor: float, slope: float, ahead: Floats, keep: bool,
) -> Any:  # fmt: skip
    """Least load for each value (infinite where no set has it), the step that led to each state and value, and whether values
    above `most` were left out.

    What cannot reach `floor` is dropped: no state earns more than `ahead` at the price `slope` for load (a Lagrangian bound).
    """
    num_steps = len(order)
    width = 0
    for position in range(num_steps + 1):
        width = max(width, layer[position + 1] - layer[position])
    old, new = np.full((width, most + 1), np.inf), np.full((width, most + 1), np.inf)
    old_low, old_high = np.zeros(width, np.int64), np.full(width, -1, np.int64)
    new_low, new_high = np.zeros(width, np.int64), np.full(width, -1, np.int64)
    back = np.empty((len(into) - 1 if keep else 1, most + 1), np.uint16)
    old[0, 0], old_high[0] = 0.0, 0
    cropped = False
    for step in range(num_steps):
        item = order[step]
        value, work = values[item], work_s[item]
        base, first, after = layer[step], layer[step + 1], layer[step + 2]
        for state in range(first, after):
            row = new[state - first]
            low, high = most + 1, -1
            for edge in range(into[state], into[state + 1]):
                parent, shift = source[edge] - base, value if side[edge] == 1 else 0
                if old_high[parent] >= 0:
                    low, high = min(low, old_low[parent] + shift), max(high, old_high[parent] + shift)
            high = min(high, most)
            for amount in range(low, high + 1):
                row[amount] = np.inf
            for edge in range(into[state], into[state + 1]):
                parent, add, shift = source[edge] - base, cost_1[edge], 0
                if side[edge] == 1:
                    add, shift = add + work, value
                if add > limit_s or old_high[parent] < 0:
                    continue
                past = old[parent]
                top = min(old_high[parent], most - shift)
                for amount in range(top + 1, old_high[parent] + 1):
                    cropped = cropped or past[amount] + add <= limit_s
                for amount in range(old_low[parent], top + 1):
                    load = past[amount] + add
                    if load < row[amount + shift]:
                        row[amount + shift] = load
                        if keep:
                            back[state, amount + shift] = edge - into[state]
            new_low[state - first], new_high[state - first] = most + 1, -1
            hope = ahead[state] + slope * limit_s
            for amount in range(low, high + 1):
                if row[amount] > limit_s or amount + hope - slope * row[amount] < floor:
                    row[amount] = np.inf
                else:
                    new_high[state - first] = amount
                    if new_low[state - first] > most:
                        new_low[state - first] = amount
        old, new = new, old
        old_low, new_low = new_low, old_low
        old_high, new_high = new_high, old_high
    loads = np.full(max(old_high[0], 0) + 1, np.inf)
    for amount in range(old_low[0], old_high[0] + 1):
        loads[amount] = old[0, amount]
    return loads, back, cropped


@allocating
def _trace(
    order: Ints, layer: Ints, into: Ints, source: Ints, side: Any, values: Ints, back: Any, amount: int
) -> NDArray[np.bool_]:
    """The set that has the value `amount` and the least load, by the steps that led there."""
    chosen = np.zeros(len(values), np.bool_)
    state = layer[len(order)]
    for step in range(len(order) - 1, -1, -1):
        edge = into[state] + back[state, amount]
        if side[edge] == 1:
            chosen[order[step]] = True
            amount -= values[order[step]]
        state = source[edge]
    return chosen
