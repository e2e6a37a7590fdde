"""Resplitting: divide the items of two devices anew, as well as possible, with all other items fixed.

It is a dynamic program over a narrow sweep: for each state and each load of one device, the least load of the other. Loads fall
into buckets, so an answer may miss the optimum by about one bucket; the loads returned are exact. This neighbourhood is far
larger than moves and swaps: all 2^n divisions of n items.
"""

from typing import Any

import numpy as np

from autosplit.costs.problem import Floats
from autosplit.jit import allocating
from autosplit.planners.clock import CELL_S, spend
from autosplit.planners.instance import Instance
from autosplit.planners.loads import Ints
from autosplit.planners.noncontiguous.sweeps import Sweep, narrow_order, sweep_of

NUM_BUCKETS = 1000
"""Buckets of the load of one device; the loads in them are exact."""

MAX_CELLS = 30_000_000
"""Most states times buckets; 6 bytes each."""


def resplit(graph: Instance, home: Ints, one: int, other: int, *, limit_s: float, seed: int) -> tuple[Ints, float, float] | None:
    """Divide the items of two devices so that the larger load is as small as possible, and at most a limit.

    Args:
        graph: items, nets and devices.
        home: device of each item.
        one, other: the two devices.
        limit_s: largest load of either, in seconds.
        seed: of the order of the sweep.
    Returns: the new devices of all items and the two loads; None where no division keeps the limit.
    """
    kinds = graph.class_of[[one, other]]
    members = (home == one) | (home == other)
    order = narrow_order(graph, members, seed=seed, tries=2)
    sweep = sweep_of(graph, order, members, *kinds, max_states=MAX_CELLS // NUM_BUCKETS)
    if sweep is None or not len(order) or limit_s <= 0.0:
        return None
    room = np.minimum(graph.memory_bytes[kinds], graph.num_bytes[order].sum())
    spend(sweep.num_states * NUM_BUCKETS * CELL_S)
    sides, load_1, load_0 = _divide(
        sweep, np.ascontiguousarray(graph.compute_s[order, kinds[0]]), np.ascontiguousarray(graph.compute_s[order, kinds[1]]),
        np.ascontiguousarray(graph.num_bytes[order]), room[0], room[1], limit_s, NUM_BUCKETS,
    )  # fmt: skip
    if not np.isfinite(load_1):
        return None
    fresh = home.copy()
    fresh[order] = np.where(sides == 1, one, other)
    held = [graph.num_bytes[fresh == device].sum() for device in (one, other)]
    return None if (held > graph.memory_bytes[kinds]).any() else (fresh, float(load_1), float(load_0))


@allocating
def _divide(  # noqa: C901 - one compiled loop
    sweep: Sweep, work_1: Any, work_0: Any, step_bytes: Floats, room_1: float, room_0: float, limit_s: float, num_buckets: int
) -> Any:  # fmt: skip
    """Sides of the items and the two loads, infinite where no division keeps the limit.

                bucket of load 1
    state       0    1    2   ...        a cell holds the least load of side 0, with the exact load of side 1,
      s0        .    x    .              and remembers the edge and the bucket that it came from
      s1        x    .    x
    """
    # 1. the widest layer, the least work still to come after each step, and empty tables for two layers
    _, layer, into, source, side, cost_1, cost_0 = sweep
    num_steps, num_states = len(work_1), len(into) - 1
    width = 0
    for position in range(num_steps + 1):
        width = max(width, layer[position + 1] - layer[position])
    capped = min(room_1, room_0) < step_bytes.sum()
    rest = np.zeros(num_steps + 1)
    for step in range(num_steps - 1, -1, -1):
        rest[step] = rest[step + 1] + min(work_1[step], work_0[step])
    scale = num_buckets / limit_s
    shape = (width, num_buckets + 1)
    old_1, old_0 = np.full(shape, np.inf), np.full(shape, np.inf)
    new_1, new_0 = np.full(shape, np.inf), np.full(shape, np.inf)
    old_bytes = np.zeros(shape if capped else (1, 1))
    new_bytes, taken = old_bytes.copy(), 0.0
    step_of = np.zeros((num_states, num_buckets + 1), np.uint32)
    from_of = np.zeros((num_states, num_buckets + 1), np.uint16)
    old_1[0, 0] = old_0[0, 0] = 0.0
    # 2. one layer after another: every edge carries the cells of its source to the next state
    for step in range(num_steps):
        base, first, after = layer[step], layer[step + 1], layer[step + 2]
        most = 2.0 * limit_s - rest[step + 1]
        taken += step_bytes[step]
        for state in range(first, after):
            row_1, row_0 = new_1[state - first], new_0[state - first]
            row_1[:] = np.inf
            row_0[:] = np.inf
            for edge in range(into[state], into[state + 1]):
                add_1, add_0 = cost_1[edge], cost_0[edge]
                if side[edge] == 1:
                    add_1 += work_1[step]
                else:
                    add_0 += work_0[step]
                if add_1 > limit_s or add_0 > limit_s:
                    continue
                past_1, past_0 = old_1[source[edge] - base], old_0[source[edge] - base]
                for bucket in range(num_buckets + 1):
                    load_0 = past_0[bucket] + add_0
                    if load_0 > limit_s:
                        continue
                    load_1 = past_1[bucket] + add_1
                    if load_1 > limit_s or load_1 + load_0 > most:
                        continue
                    held = 0.0
                    if capped:
                        held = old_bytes[source[edge] - base, bucket] + side[edge] * step_bytes[step]
                        if held > room_1 or taken - held > room_0:
                            continue
                    place = int(load_1 * scale)
                    if load_0 < row_0[place] or (load_0 == row_0[place] and load_1 < row_1[place]):
                        row_0[place], row_1[place] = load_0, load_1
                        step_of[state, place] = edge - into[state]
                        from_of[state, place] = bucket
                        if capped:
                            new_bytes[state - first, place] = held
        old_1, new_1 = new_1, old_1
        old_0, new_0 = new_0, old_0
        old_bytes, new_bytes = new_bytes, old_bytes
    # 3. the best cell of the last layer
    best, best_key = -1, np.inf
    for bucket in range(num_buckets + 1):
        if old_0[0, bucket] < np.inf:
            high, low = max(old_1[0, bucket], old_0[0, bucket]), min(old_1[0, bucket], old_0[0, bucket])
            if high + 1e-3 * low < best_key:
                best, best_key = bucket, high + 1e-3 * low
    sides = np.zeros(num_steps, np.int8)
    if best < 0:
        return sides, np.inf, np.inf
    # 4. back along the remembered edges
    load_1, load_0 = old_1[0, best], old_0[0, best]
    state, bucket = layer[num_steps], best
    for step in range(num_steps - 1, -1, -1):
        edge = into[state] + step_of[state, bucket]
        bucket = from_of[state, bucket]
        sides[step] = side[edge]
        state = source[edge]
    return sides, load_1, load_0
