"""A bound on latency from the segments of a graph: the ops between a fork and the op at which its branches meet again.

No op of a segment begins before the fork has ended, and the meeting op begins after all of them. So a path through the segment
takes at least the shortest schedule of the segment alone on all devices. A segment is small enough for CP-SAT to prove that:
side by side where this pays for the transfers, one after the other where it does not. Segments may contain others; a path takes
the dearer one.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from time import monotonic

import networkx
import numpy as np

from autosplit.costs.cost import most_s
from autosplit.costs.problem import Net, Problem
from autosplit.planners.delays import Delays, critical_path_s, readers_of
from autosplit.planners.latency.timetable import best_timetable

MOST_OPS = 2000
MOST_INSIDE = 60
"""Most ops of a segment, ends included; CP-SAT proves little about larger ones."""

LONGER = 1.001
"""A segment counts if all its ops in turn take at least this many times as long as its longest path."""


def segment_bound_s(problem: Problem, max_replicas: int, deadline: float, seed: int = 0) -> float:
    """No schedule of one sample is shorter, in seconds.

    Args:
        problem: the ops in topological order.
        max_replicas: of a block; transfers are as cheap as the cheapest of them.
        deadline: in seconds of ``time.monotonic``; segments that are not proved by then count as their longest path.
        seed: of the solver.
    """
    delays = Delays(problem, max_replicas)
    if problem.num_ops > MOST_OPS:
        return critical_path_s(problem, delays)
    meets, after = meeting_ops(problem), readers_of(problem)
    parts = []
    for fork, goal in enumerate(meets):
        inside = _between(after, fork, goal) if goal < problem.num_ops else []
        if 3 < len(inside) <= MOST_INSIDE:
            part = _part(problem, inside)
            least_s, serial_s = float(part.compute_s.min(axis=1).sum()), critical_path_s(part, Delays(part))
            if least_s > LONGER * serial_s:
                parts.append((fork, goal, part, serial_s))
    known: dict[tuple[bytes, tuple[Net, ...], tuple[tuple[int, ...], ...]], float] = {}
    lengths: dict[int, tuple[int, float]] = {}
    for number, (fork, goal, part, least_s) in enumerate(parts):
        key = part.compute_s.tobytes(), part.nets, part.groups
        if key not in known:
            left_s = (deadline - monotonic()) / (len(parts) - number)
            one_device_s = float(part.compute_s.sum(axis=0).min())
            limit_s = one_device_s if one_device_s < inf else most_s(part)
            whole = max_replicas == 1 and not problem.overlap
            _, bound_s = best_timetable(part, Delays(part, max_replicas), limit_s, least_s, left_s, seed, busy=whole)
            known[key] = max(least_s, min(bound_s, limit_s))
        lengths[fork] = goal, known[key]
    return critical_path_s(problem, delays, lengths)


def meeting_ops(problem: Problem) -> list[int]:
    """For each op, its immediate postdominator: the first op on every path from it; num_ops where there is none."""
    backward = networkx.DiGraph()
    for op, readers in enumerate(readers_of(problem)):
        backward.add_edges_from((reader, op) for reader in readers or [problem.num_ops])
    dominators = networkx.immediate_dominators(backward, problem.num_ops)
    return [dominators[op] for op in range(problem.num_ops)]


def _between(after: Sequence[Sequence[int]], fork: int, goal: int) -> list[int]:
    """The two ops and all ops on paths between them; only the first ones where they are too many."""
    inside, waiting = {fork, goal}, [fork]
    while waiting and len(inside) <= MOST_INSIDE:
        for reader in after[waiting.pop()]:
            if reader not in inside:
                inside.add(reader)
                waiting.append(reader)
    return sorted(inside)


def _part(problem: Problem, inside: Sequence[int]) -> Problem:
    """The ops as a problem without limits on memory, in which the first op takes no time.

    Of equal devices, the i-th op may run on the first i only, which removes symmetric schedules.
    """
    place = {op: number for number, op in enumerate(inside)}
    compute = problem.compute_s[list(inside)].copy()
    compute[0][np.isfinite(compute[0])] = 0.0
    nets = []
    for net in problem.nets:
        readers = tuple(sorted(place[op] for op in net.consumers if op in place))
        if net.producer in place and readers:
            nets.append(Net(place[net.producer], readers, net.num_bytes))
    groups = [tuple(place[op] for op in group if op in place) for group in problem.groups]
    part = replace(
        problem,
        ops=tuple(problem.ops[op] for op in inside),
        compute_s=compute,
        nets=tuple(nets),
        order=(),
        op_bytes=np.zeros(len(inside)),
        memory_bytes=np.full(problem.num_devices, inf),
        weights=(),
        pools=(),
        groups=tuple(group for group in groups if len(group) > 1),
        reasons={},
    )
    for devices in part.device_classes:
        for position in range(len(inside)):
            compute[position, list(devices[position + 1 :])] = inf
    return part
