"""Memory caps: a sweep whose states also know the bytes of side 1, so that most sets above a memory cap are left out.

It is a relaxed decision diagram (Bergman, Cire, van Hoeve and Hooker, "Discrete optimization with decision diagrams", 2016).
Paths to one state with about equal bytes become one state, which keeps the fewest bytes among them. So no set below the cap is
lost, and a bound on the remaining sets holds for the sets below the cap.
"""

from typing import Any

import numpy as np

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.problem import Floats
from autosplit.planners.jit import allocating
from autosplit.planners.noncontiguous.frontier import Sweep


def capped_sweep(sweep: Sweep, item_bytes: Floats, room_bytes: float, num_levels: int) -> Sweep:
    """The sweep without most of the sets whose bytes on side 1 are above the cap, and with all of those below it.

    Args:
        sweep: along all items.
        item_bytes: what each item keeps in memory, shape (num_items,).
        room_bytes: what side 1 may hold.
        num_levels: levels of bytes into which a state is divided; more levels are more exact and take longer.
    """
    found: Any = _capped(sweep, np.ascontiguousarray(item_bytes[sweep.order]), room_bytes * (1.0 + TOLERANCE), num_levels)
    return Sweep(sweep.order, *found)


@allocating
def _capped(sweep: Sweep, step_bytes: Floats, room_bytes: float, num_levels: int) -> Any:
    """The arrays of the new sweep. The last level of a state is for paths that the remaining items cannot bring above the cap."""
    _, layer, into, source, side, cost_1, cost_0 = sweep
    # 1. the bytes of all items from each step on
    num_steps = len(step_bytes)
    left = np.zeros(num_steps + 1)
    for step in range(num_steps - 1, -1, -1):
        left[step] = left[step + 1] + step_bytes[step]
    size = 2 * len(source) + 1024
    new_layer, new_into, new_source = np.zeros(num_steps + 2, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
    new_side, new_1, new_0 = np.zeros(size, np.int8), np.zeros(size), np.zeros(size)
    new_layer[1], num_states, num_edges = 1, 1, 0
    old_number, old_bytes = np.zeros((1, num_levels + 1), np.int64), np.zeros((1, num_levels + 1))
    old_number[:] = -1
    old_number[0, 0] = 0
    for step in range(num_steps):
        base, first, after = layer[step], layer[step + 1], layer[step + 2]
        number = np.full((after - first, num_levels + 1), -1, np.int64)
        least = np.full((after - first, num_levels + 1), np.inf)
        for state in range(first, after):
            # 2. make room for all steps into the state
            most = 2 * (num_levels + 1) * (into[state + 1] - into[state])
            while num_edges + most + num_levels + 2 > len(new_source) or num_states + num_levels + 2 > len(new_into):
                new_into, new_source = np.append(new_into, new_into), np.append(new_source, new_source)
                new_side, new_1, new_0 = np.append(new_side, new_side), np.append(new_1, new_1), np.append(new_0, new_0)
            # 3. for each level, list the steps that end in it; they are one state, with the fewest of their bytes
            for level in range(num_levels + 1):
                begun = num_edges
                for edge in range(into[state], into[state + 1]):
                    parent, add = source[edge] - base, step_bytes[step] if side[edge] == 1 else 0.0
                    for past in range(num_levels + 1):
                        if old_number[parent, past] < 0:
                            continue
                        held = old_bytes[parent, past] + add
                        goal = num_levels
                        if held + left[step + 1] > room_bytes:
                            share = held / max(room_bytes, 1e-300)  # a device may hold nothing but ops without weights
                            goal = min(num_levels - 1, int(share * num_levels)) if held <= room_bytes else -1
                        if goal != level:
                            continue
                        new_source[num_edges], new_side[num_edges] = old_number[parent, past], side[edge]
                        new_1[num_edges], new_0[num_edges] = cost_1[edge], cost_0[edge]
                        num_edges += 1
                        least[state - first, level] = min(least[state - first, level], held)
                if num_edges > begun:
                    number[state - first, level] = num_states
                    new_into[num_states] = begun
                    num_states += 1
        new_layer[step + 2] = num_states
        old_number, old_bytes = number, least
    new_into[num_states] = num_edges
    return (
        new_layer, new_into[: num_states + 1], new_source[:num_edges], new_side[:num_edges], new_1[:num_edges],
        new_0[:num_edges],
    )  # fmt: skip
