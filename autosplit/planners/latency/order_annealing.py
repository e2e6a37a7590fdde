"""Annealing of one sample's schedule (Kirkpatrick et al., 1983), compiled: a hundred thousand plans a second are evaluated.

A plan is an order of the ops and a device for each of them; ops of one device that stand next to each other are a block. A move
gives a stretch of the order to another device, or takes an op or a whole branch to another place that the order allows.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from autosplit.costs.problem import Block, Problem
from autosplit.jit import allocating, inner
from autosplit.planners.clock import now, spend
from autosplit.planners.loads import Ints, OrderPlan, Times, entries, plan_of, row_latency_s, times_of

MOVE_S = 2e-7
"""Seconds of a move for each op."""

LONGEST_PATH = 16
"""Most ops that one move takes along."""

NUM_WALKERS = 2
"""Walks that run beside each other, each from the best plan so far."""

HEATS = (0.01, 0.03, 0.005, 0.02)
"""Temperatures at which walks begin, as shares of the latency of their start; each ends at a hundredth of it."""
WALK_S, LONGER = 1.0, 1.3
"""Seconds of the second walk unless the caller says otherwise, and the factor for each walk after it. The first one takes a
tenth of it, by ``MOVE_S``, and measures the rate of moves."""


def is_plain(problem: Problem) -> bool:
    """Whether plans are no more than an order and devices: no groups, shared weights, pools, or order against the values."""
    return not (problem.groups or problem.weights or problem.pools or any(a >= b for a, b in problem.order))


def anneal_order(
    problem: Problem, row: Sequence[Block], *, seed: int, deadline: float, enough_s: float, walk_s: float = WALK_S
) -> tuple[Block, ...]:
    """The blocks of least latency on several walks, each from the best plan so far.

    Args:
        problem: a plain one, see ``is_plain``.
        row: the blocks to start from, each on one device, in an order in which every value is made before it is read.
        seed: of the walks.
        deadline: second of ``now()`` after which no walk begins; the last one ends about then.
        enough_s: no latency is below this.
        walk_s: seconds of the second walk; each later one is longer.
    """
    times = times_of(problem)
    order = np.array([op for block in row for op in block.ops], dtype=np.int64)
    device = np.array([block.devices[0] for block in row for _ in block.ops], dtype=np.int64)[np.argsort(order)]
    num_moves, number, best_s = 1 + int(0.1 * WALK_S / (MOVE_S * problem.num_ops)), 0, np.inf

    def walk(walker: int) -> tuple[Ints, Ints, float]:
        plans = plan_of(times, order, device), plan_of(times, order, device)
        return _walk(times, *plans, seed + number + walker, num_moves, HEATS[number // NUM_WALKERS % len(HEATS)])

    with ThreadPoolExecutor(NUM_WALKERS) as walkers:
        while now() < deadline and best_s > enough_s:
            began = now()
            order, device, best_s = min(walkers.map(walk, range(NUM_WALKERS)), key=lambda found: found[2])
            spend(num_moves * problem.num_ops * MOVE_S)
            rate = num_moves / max(now() - began, 1e-4)
            num_moves = max(1, int(rate * min(walk_s, deadline - now())))
            number, walk_s = number + NUM_WALKERS, walk_s * LONGER
    cuts = np.flatnonzero(np.diff(device[order])) + 1
    return tuple(Block(tuple(sorted(ops.tolist())), (int(device[ops[0]]),)) for ops in np.split(order, cuts))


@allocating
def _walk(times: Times, plan: OrderPlan, new: OrderPlan, seed: int, num_moves: int, heat: float) -> tuple[Ints, Ints, float]:
    """The order, the devices and the latency of the best plan of a walk, which begins at two equal plans and changes both."""
    np.random.seed(seed)
    best_order, best_device = plan.order.copy(), plan.device.copy()
    best = value = _cost(times, plan, np.inf, np.inf)[0]
    hot = max(heat * value, 1e-300)
    for move in range(num_moves):
        # 1. a move on a copy of the plan
        temperature = hot * 0.01 ** (move / num_moves)
        new.order[:] = plan.order
        new.device[:] = plan.device
        if np.random.random() < 0.7:
            changed = _give_stretch(times, new)
        else:
            for position in range(len(new.order)):
                new.place[new.order[position]] = position
            changed = _take_elsewhere(times, new)
        if not changed:
            continue
        # 2. take it if it is quicker, or by chance
        most = value - temperature * np.log(np.random.random())
        seconds, fits = _cost(times, new, best, most)
        if seconds > most:
            continue
        value = seconds
        plan.order[:] = new.order
        plan.device[:] = new.device
        # 3. keep the best plan within the caps
        if fits and value < best * (1.0 - 1e-12):
            best = value
            best_order[:] = new.order
            best_device[:] = new.device
    return best_order, best_device, best


@inner
def _cost(times: Times, plan: OrderPlan, best: float, most: float) -> tuple[float, bool]:
    """The latency, and whether the caps hold. Where they do not, it counts as more than ``best`` the more they are exceeded.

    A cost above ``most`` need not be exact.
    """
    block, last, held, caps = -1, -1, plan.held, times.caps
    held[:] = 0.0
    for op in plan.order:
        if plan.device[op] != last:
            block += 1
            last = plan.device[op]
            plan.block_device[block] = last
        plan.home[op] = block
        held[last] += times.op_bytes[op]
    over = 0.0
    for k in range(len(caps)):
        if held[k] > caps[k]:
            over += 0.005 + held[k] / max(caps[k], 1.0) - 1.0
    if over > 0.0 and best + 0.5 * over * best > most:
        return np.inf, False
    seconds = row_latency_s(times, plan, block + 1)
    if over > 0.0 and best < np.inf:
        seconds = max(seconds, best) + 0.5 * over * best
    return seconds, over == 0.0


@inner
def _give_stretch(times: Times, plan: OrderPlan) -> bool:
    """Give ops that stand next to each other to one device: that of the ops before or behind them, or any."""
    order, device, num_ops, num_devices = plan.order, plan.device, len(plan.order), len(plan.free)
    first = np.random.randint(num_ops)
    here, kind = device[order[first]], np.random.random()
    last, goal = first, np.random.randint(num_devices)
    if kind < 0.4:  # the rest of the block to the device of the next block
        while last + 1 < num_ops and device[order[last + 1]] == here:
            last += 1
        if last + 1 < num_ops and np.random.random() < 0.8:
            goal = device[order[last + 1]]
    elif kind < 0.8:  # the beginning of the block to the device of the block before
        while first > 0 and device[order[first - 1]] == here:
            first -= 1
        if first > 0 and np.random.random() < 0.8:
            goal = device[order[first - 1]]
    else:
        last = min(num_ops - 1, first + int(np.exp(np.random.random() * np.log(num_ops))) - 1)
    changed = False
    for position in range(first, last + 1):
        op = order[position]
        if not np.isfinite(times.compute[op, goal]):
            return False
        changed = changed or device[op] != goal
        device[op] = goal
    return changed


@inner
def _take_elsewhere(times: Times, plan: OrderPlan) -> bool:
    """Move a path to another place between its sources and its readers; often it joins the ops there."""
    order, device, place, path, others = plan.order, plan.device, plan.place, plan.path, plan.others
    count = _draw_path(times, path)
    last = path[count - 1]
    # 1. the places between its sources and its readers
    num_ops = len(order)
    low, high = 0, num_ops
    for op in entries(times.before, path[0]):
        low = max(low, place[op] + 1)
    for op in entries(times.after, last):
        high = min(high, place[op])
    # 2. the other ops there keep their order, and the path goes in between
    for number in range(count):
        place[path[number]] = -1
    num_others = 0
    for position in range(low, high):
        if place[order[position]] >= 0:
            others[num_others] = order[position]
            num_others += 1
    goal = np.random.randint(num_others + 1)
    for number in range(num_others):
        order[low + number + (count if number >= goal else 0)] = others[number]
    for number in range(count):
        order[low + goal + number] = path[number]
    # 3. the path often takes the device of the op before or behind it
    first, end = low + goal - 1, low + goal + count
    if np.random.random() < 0.7:
        near = device[order[first if end == num_ops or (first >= 0 and np.random.random() < 0.5) else end]]
        for number in range(count):
            if not np.isfinite(times.compute[path[number], near]):
                return True
        for number in range(count):
            device[path[number]] = near
    return True


@inner
def _draw_path(times: Times, path: Ints) -> int:
    """Write to ``path`` a random op, or several, each the only reader of the one before it, which reads nothing else.

    Returns: their number.
    """
    count, most = 1, 1
    if np.random.random() < 0.5:
        most += np.random.randint(LONGEST_PATH)
    last = path[0] = np.random.randint(len(times.op_bytes))
    while count < most and len(entries(times.after, last)) == 1:
        reader = entries(times.after, last)[0]
        if len(entries(times.before, reader)) != 1:
            break
        last = path[count] = reader
        count += 1
    return count
