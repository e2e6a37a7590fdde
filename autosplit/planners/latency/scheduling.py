"""Schedule one sample: blocks that bring it through as soon as possible, branches side by side on several devices.

Everything on one device, list schedules (HEFT, Topcuoglu et al., 2002) and the best plan known are the starts. Annealing moves
ops and blocks of them. The bound is the longest path, with bounds on the parts between forks and joins.
"""

from bisect import bisect, insort
from collections.abc import Sequence
from math import inf

import numpy as np

from autosplit.costs.cost import block_of
from autosplit.costs.problem import HOST, Block, Floats, Problem, rows_of
from autosplit.planners.clock import halfway, now
from autosplit.planners.clusters import Clusters, forced_clusters, topological_order
from autosplit.planners.delays import Delays, critical_path_s
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.latency.order_annealing import anneal_order, is_plain
from autosplit.planners.latency.segments import segment_bound_s
from autosplit.planners.loads import Ints
from autosplit.planners.row_annealing import anneal_rows


def list_schedule(problem: Problem, delays: Delays, caution: float = 1.0, deadline: float = inf) -> tuple[Block, ...]:
    """The blocks of HEFT; none if an op can run on no device, or after the deadline.

    A full device takes no more ops while another one can.

    Args:
        problem: the ops in topological order.
        delays: between ops on two devices.
        caution: factor of the delays while a device is chosen.
        deadline: as a second of ``now()``.
    """
    allowed = np.isfinite(problem.compute_s)
    if not allowed.any(axis=1).all():
        return ()
    dear_s = np.where(allowed, problem.compute_s, 10 * problem.compute_s[allowed].sum())
    devices = dear_s.sum(axis=0).argsort(kind="stable").tolist()  # of equal ends the fastest device gets an op
    mean = np.where(allowed, problem.compute_s, 0).sum(axis=1) / allowed.sum(axis=1)
    rank = np.zeros(problem.num_ops)
    for op in reversed(range(problem.num_ops)):
        rank[op] = mean[op] + max((rank[goal] + delays.between(op, goal).mean() for goal in problem.readers[op]), default=0.0)
    busy: list[list[tuple[float, float]]] = [[] for _ in devices]
    compute_s, sizes, caps = problem.compute_s.tolist(), problem.op_bytes.tolist(), problem.memory_bytes.tolist()
    held = [0.0] * problem.num_devices
    place, start_s, end_s = np.full(problem.num_ops, -1), np.zeros(problem.num_ops), np.zeros(problem.num_ops)
    for op in sorted(range(problem.num_ops), key=lambda op: (-rank[op], op)):
        if now() > deadline:
            return ()
        best_s, chosen = inf, (-1, 0.0)
        ready_s = delays.between(HOST, op)[0].copy() if (HOST, op) in delays.edges else np.zeros(problem.num_devices)
        for maker in problem.makers[op]:
            np.maximum(ready_s, end_s[maker] + caution * delays.between(maker, op)[place[maker]], out=ready_s)
        waits_s, own_s = ready_s.tolist(), compute_s[op]
        able = [device for device in devices if own_s[device] < inf]
        roomy = [device for device in able if held[device] + sizes[op] <= caps[device]]
        for device in roomy or able:
            begin_s = _gap(busy[device], waits_s[device], own_s[device])
            if begin_s + own_s[device] < best_s:
                best_s, chosen = begin_s + own_s[device], (device, begin_s)
        place[op], start_s[op], end_s[op] = *chosen, best_s
        held[chosen[0]] += sizes[op]
        insort(busy[chosen[0]], (chosen[1], best_s))
    return _blocks_of(problem, place, start_s)


def _gap(busy: Sequence[tuple[float, float]], ready_s: float, work_s: float) -> float:
    """The first time from ``ready_s`` on at which the device is idle for ``work_s``."""
    begin_s = ready_s
    for place in range(max(0, bisect(busy, (ready_s, inf)) - 1), len(busy)):
        from_s, to_s = busy[place]
        if begin_s + work_s <= from_s:
            return begin_s
        begin_s = max(begin_s, to_s)
    return begin_s


def _blocks_of(problem: Problem, place: Ints, start_s: Floats) -> tuple[Block, ...]:
    """Ops with their devices and starts as blocks in a legal order.

    An op joins the last block of its device where that is legal and neither has to wait for the other's transfers.
    """
    pairs = {*problem.edges, *problem.order}
    before = rows_of(((target, source) for source, target in pairs), problem.num_ops)
    sends, receives = np.zeros((2, problem.num_ops), dtype=bool)
    for maker, op in pairs:
        if place[maker] != place[op]:
            sends[maker] = receives[op] = True
    home = np.full(problem.num_ops, -1)
    blocks: list[tuple[int, list[int]]] = []
    last: dict[int, int] = {}
    for op in topological_order(rows_of(pairs, problem.num_ops), start_s).tolist():
        device = int(place[op])
        block = last.get(device, -1)
        waits = block >= 0 and (receives[op] or sends[blocks[block][1][-1]])
        if block < 0 or waits or any(home[maker] > block for maker in before[op]):
            block = last[device] = len(blocks)
            blocks.append((device, []))
        blocks[block][1].append(op)
        home[op] = block
    return tuple(Block(tuple(sorted(ops)), (device,)) for device, ops in blocks)


SECONDS_TO_VERIFY = 1.5e-4
"""Seconds for each op that are kept free to evaluate and verify the answer."""


def schedule_sample(incumbent: Incumbent, deadline: float) -> None:
    """The blocks with the smallest latency, and a bound on all blocks."""
    deadline -= SECONDS_TO_VERIFY * incumbent.problem.num_ops
    forced = forced_clusters(incumbent.problem, incumbent.demands.contiguous)
    delays = Delays(forced.problem, incumbent.demands.max_replicas)
    incumbent.offer_one_device()
    for caution, until in ((1.0, deadline), (2.0, halfway(deadline))):
        incumbent.offer(forced.expand(list_schedule(forced.problem, delays, caution, until)), "list scheduling")
    incumbent.prove(critical_path_s(forced.problem, delays), "critical path")
    if not incumbent.closed:
        bound_s = segment_bound_s(forced.problem, incumbent.demands.max_replicas, halfway(deadline), incumbent.objective_s)
        incumbent.prove(bound_s, "parts between forks and joins")
    if not incumbent.closed and now() < deadline:
        _anneal(incumbent, forced, deadline)


def _anneal(incumbent: Incumbent, forced: Clusters, deadline: float) -> None:
    """Anneal the order and the devices of the best plan. Rules that an order cannot express need annealing of rows of blocks."""
    row = forced.shrink(incumbent.blocks) if incumbent.blocks else None
    demands = incumbent.demands
    free = demands.reuse and demands.num_stages is None and demands.max_stages is None and demands.min_stage_s == 0
    if row is not None and free and is_plain(forced.problem) and all(len(block.devices) == 1 for block in row):
        home = block_of(forced.problem, row)
        in_order = all(home[a] <= home[b] for a, b in {*forced.problem.edges, *forced.problem.order})
        if in_order and forced.problem.num_ops > 1:
            found = anneal_order(forced.problem, row, seed=incumbent.seed, deadline=deadline, enough_s=incumbent.bound_s)
            incumbent.offer(forced.expand(found), "annealing")
            return
    anneal_rows(incumbent, deadline)
