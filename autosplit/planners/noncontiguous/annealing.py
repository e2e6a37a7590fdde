"""Simulated annealing of a hypergraph (Kirkpatrick, Gelatt and Vecchi, 1983). Compiled.

A move takes an item, or a patch of items that share nets, from one device to another, so that two loads change. The energy is the
sum of the seconds by which devices exceed a target load. When it reaches zero, the target is lowered below the load found.
With a ``Precedence`` all assignments are chains: an item takes along what must not stay behind it.
"""

from dataclasses import dataclass

import numpy as np

from autosplit.costs.problem import Floats
from autosplit.planners.items import Ints, Table
from autosplit.planners.jit import allocating, inner
from autosplit.planners.noncontiguous.hypergraph import Hypergraph

PATCH = 24
"""Most items that one move takes along."""

MOST_FINES = 40
"""While no assignment keeps the memory caps, the penalty for breaking them is doubled; so often in a walk."""

STEP = 0.002
"""The target is below the load found by this share of it."""


@dataclass(frozen=True)
class Annealed:
    """A device for each item, and the largest load in seconds, infinite where the assignment breaks a memory cap."""

    home: Ints
    value_s: float


@dataclass(frozen=True)
class Precedence:
    """The order that makes an assignment a chain.

    Attributes:
        before, after: the items that must not stand after, and before, each item.
        rank: place of each device in the chain, shape (num_devices,).
    """

    before: Table
    after: Table
    rank: Ints


def anneal(
    graph: Hypergraph,
    home: Ints,
    *,
    seed: int,
    num_moves: int,
    heat: float = 0.02,
    precedence: Precedence | None = None,
) -> Annealed:
    """The best assignment on a walk of ``num_moves`` proposals from ``home``.

    Args:
        graph: items, nets and devices.
        home: device of each item to start from, shape (num_items,); every item must be allowed there.
        seed: of the walk.
        num_moves: proposals.
        heat: temperature at the start, as a share of the largest load of `home`; it falls to a thousandth of that.
        precedence: ``home`` is a chain, and so are all assignments of the walk; None for any sets.
    """
    none = Table(np.zeros(graph.num_items + 1, dtype=np.int64), np.zeros(0, dtype=np.int64))
    order = precedence or Precedence(none, none, np.zeros(0, dtype=np.int64))
    best, value_s = _walk(
        graph.compute_s, graph.net_start, graph.net_pins, graph.net_s, graph.net_outside, graph.item_start, graph.item_nets,
        graph.item_bytes, graph.memory_bytes, home.astype(np.int64), seed, num_moves, heat,
        order.before.start, order.before.data, order.after.start, order.after.data, order.rank, np.argsort(order.rank),
    )  # fmt: skip
    return Annealed(best, float(value_s))


def random_home(graph: Hypergraph, seed: int) -> Ints:
    """A device for each item, drawn from those allowed; items that share nets are drawn together, in patches."""
    rng = np.random.default_rng(seed)
    home = np.full(graph.num_items, -1, dtype=np.int64)
    fast = np.isfinite(graph.compute_s) & (graph.compute_s <= 3.0 * graph.compute_s.min(axis=1, keepdims=True))
    size = max(1, graph.num_items // (3 * graph.num_devices))
    for seed_item in rng.permutation(graph.num_items):
        if home[seed_item] >= 0:
            continue
        device = int(rng.choice(np.flatnonzero(fast[seed_item])))
        queue, taken = [int(seed_item)], 0
        while queue and taken < size:
            item = queue.pop(int(rng.integers(len(queue))))
            if home[item] >= 0 or not fast[item, device]:
                continue
            home[item], taken = device, taken + 1
            queue += [int(other) for net in graph.nets(item) for other in graph.pins(net) if home[other] < 0]
    return home


@inner
def _relocate(
    item: int, goal: int, home: Ints, inside: Ints, loads: Floats, held: Floats, compute_s: Floats, net_start: Ints,
    net_s: Floats, net_outside: np.ndarray, item_start: Ints, item_nets: Ints, item_bytes: Floats,
) -> None:  # fmt: skip
    """Move an item, and update the loads and the bytes of both devices."""
    source = home[item]
    loads[source] -= compute_s[item, source]
    loads[goal] += compute_s[item, goal]
    held[source] -= item_bytes[item]
    held[goal] += item_bytes[item]
    for entry in range(item_start[item], item_start[item + 1]):
        net = item_nets[entry]
        whole = net_start[net + 1] - net_start[net]
        if net_outside[net]:
            whole += 1
        before, after = inside[net, source], inside[net, goal]
        if before == whole:
            loads[source] += net_s[net, source]
        elif before == 1:
            loads[source] -= net_s[net, source]
        if after == 0:
            loads[goal] += net_s[net, goal]
        elif after + 1 == whole:
            loads[goal] -= net_s[net, goal]
        inside[net, source] = before - 1
        inside[net, goal] = after + 1
    home[item] = goal


@inner
def _patch(
    root: int, limit: int, home: Ints, net_start: Ints, net_pins: Ints, item_start: Ints, item_nets: Ints, mark: Ints,
    stamp: int, patch: Ints,
) -> int:  # fmt: skip
    """Write to ``patch`` up to ``limit`` items of the root's device that are connected through nets. Returns: their number."""
    patch[0] = root
    mark[root] = stamp
    count, head = 1, 0
    while head < count and count < limit:
        item = patch[head]
        head += 1
        degree = item_start[item + 1] - item_start[item]
        turn = np.random.randint(degree) if degree else 0
        for step in range(degree):
            net = item_nets[item_start[item] + (step + turn) % degree]
            for entry in range(net_start[net], net_start[net + 1]):
                other = net_pins[entry]
                if count < limit and mark[other] != stamp and home[other] == home[root]:
                    mark[other] = stamp
                    patch[count] = other
                    count += 1
    return count


@inner
def _train(
    root: int, goal: int, home: Ints, rank: Ints, before_start: Ints, before: Ints, after_start: Ints, after: Ints, mark: Ints,
    stamp: int, patch: Ints,
) -> int:  # fmt: skip
    """Write to ``patch`` the root and the items of its device that must move with it for the assignment to stay a chain.

    Returns: their number; 0 where they are too many, or where items of other devices are in the way.
    """
    patch[0] = root
    mark[root] = stamp
    count, head = 1, 0
    forward = rank[goal] > rank[home[root]]
    start, near = (after_start, after) if forward else (before_start, before)
    while head < count:
        item = patch[head]
        head += 1
        for entry in range(start[item], start[item + 1]):
            other = near[entry]
            if mark[other] == stamp:
                continue
            place = rank[home[other]]
            if home[other] == home[root]:
                if count == PATCH:
                    return 0
                mark[other] = stamp
                patch[count] = other
                count += 1
            elif (place < rank[goal]) if forward else (place > rank[goal]):
                return 0
    return count


@inner
def _energy(loads: Floats, held: Floats, memory_bytes: Floats, target_s: float, fine_s: float) -> float:
    """The sum of the seconds above the target, and ``fine_s`` for each share by which a device exceeds its memory cap."""
    total = 0.0
    for device in range(len(loads)):
        total += max(0.0, loads[device] - target_s)
        if held[device] > memory_bytes[device]:
            total += fine_s * (0.05 + held[device] / max(memory_bytes[device], 1.0) - 1.0)
    return total


@allocating
def _walk(  # noqa: C901 - one compiled loop
    compute_s: Floats, net_start: Ints, net_pins: Ints, net_s: Floats, net_outside: np.ndarray, item_start: Ints,
    item_nets: Ints, item_bytes: Floats, memory_bytes: Floats, start: Ints, seed: int, num_moves: int, heat: float,
    before_start: Ints, before: Ints, after_start: Ints, after: Ints, rank: Ints, device_at: Ints,
) -> tuple[Ints, float]:  # fmt: skip
    """The best assignment of the walk and its load."""
    # 1. loads, bytes and the pins of each net on each device at the start
    np.random.seed(seed)
    num_items, num_devices = compute_s.shape
    home = start.copy()
    inside = np.zeros((len(net_s), num_devices), np.int64)
    loads, held = np.zeros(num_devices), np.zeros(num_devices)
    for item in range(num_items):
        loads[home[item]] += compute_s[item, home[item]]
        held[home[item]] += item_bytes[item]
        for entry in range(item_start[item], item_start[item + 1]):
            inside[item_nets[entry], home[item]] += 1
    for net in range(len(net_s)):
        for device in range(num_devices):
            cut = inside[net, device] < net_start[net + 1] - net_start[net] or net_outside[net]
            if inside[net, device] and cut:
                loads[device] += net_s[net, device]
    # 2. the best so far, the target and the penalty
    peak_s = loads.max()
    best, best_s = home.copy(), np.inf
    if (held <= memory_bytes).all():
        best_s = peak_s
    target_s = peak_s * (1.0 - STEP)
    fine_s, patience = target_s, max(1, num_moves // MOST_FINES)
    energy = _energy(loads, held, memory_bytes, target_s, fine_s)
    hot = max(heat * peak_s, 1e-300)
    mark, patch = np.full(num_items, -1, np.int64), np.zeros(PATCH + 1, np.int64)
    allowed = np.isfinite(compute_s)
    for move in range(num_moves):
        temperature = hot * 0.001 ** (move / num_moves)
        if best_s == np.inf and move % patience == patience - 1:
            fine_s *= 2.0
            energy = _energy(loads, held, memory_bytes, target_s, fine_s)
        # 3. propose: a random item or patch, to a random device or to that of a neighbour
        item = np.random.randint(num_items)
        source = home[item]
        degree = item_start[item + 1] - item_start[item]
        goal = np.random.randint(num_devices)
        if degree and np.random.random() < 0.75:
            net = item_nets[item_start[item] + np.random.randint(degree)]
            goal = home[net_pins[net_start[net] + np.random.randint(net_start[net + 1] - net_start[net])]]
        if len(rank) and np.random.random() < 0.7:
            goal = device_at[min(max(rank[source] + 2 * np.random.randint(2) - 1, 0), num_devices - 1)]
        if goal == source or not allowed[item, goal]:
            continue
        if len(rank):
            count = _train(item, goal, home, rank, before_start, before, after_start, after, mark, move, patch)
        else:
            limit = 1
            if np.random.random() < 0.3:
                limit = 2 + np.random.randint(PATCH - 1) if np.random.random() < 0.5 else 2 + np.random.randint(3)
            count = _patch(item, limit, home, net_start, net_pins, item_start, item_nets, mark, move, patch)
        fits = count > 0
        for entry in range(count):
            fits = fits and allowed[patch[entry], goal]
        if not fits:
            continue
        # 4. move, and take it back if the energy rises too much for the temperature
        load_a, load_b, held_a, held_b = loads[source], loads[goal], held[source], held[goal]
        for entry in range(count):
            _relocate(patch[entry], goal, home, inside, loads, held, compute_s, net_start, net_s, net_outside, item_start,
                      item_nets, item_bytes)  # fmt: skip
        moved = _energy(loads, held, memory_bytes, target_s, fine_s)
        if moved > energy and np.random.random() >= np.exp((energy - moved) / temperature):
            for entry in range(count):
                _relocate(patch[entry], source, home, inside, loads, held, compute_s, net_start, net_s, net_outside,
                          item_start, item_nets, item_bytes)  # fmt: skip
            loads[source], loads[goal], held[source], held[goal] = load_a, load_b, held_a, held_b
            continue
        # 5. keep a better assignment, and lower the target once no device is above it
        energy = moved
        if loads.max() < best_s * (1.0 - 1e-12) and (held <= memory_bytes).all():
            best_s = loads.max()
            best = home.copy()
            if energy == 0.0:
                target_s = best_s * (1.0 - STEP)
                energy = _energy(loads, held, memory_bytes, target_s, fine_s)
    return best, best_s
