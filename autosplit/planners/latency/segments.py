"""A bound on latency from the segments of a graph: the ops between a fork and the op at which its branches meet again.

No op of a segment begins before the fork has ended, and the meeting op begins after all of them. So a path through the segment
takes at least the shortest schedule of the segment alone on all devices. That is at least its work spread over all devices. For
small segments CP-SAT proves more: their branches run in turn if transfers cost more than running them side by side saves.
A segment may contain others; a path takes the longer of the two.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import floor, inf

import networkx
import numpy as np
from ortools.sat.python import cp_model

from autosplit.costs.cost import TOLERANCE, most_s
from autosplit.costs.problem import Net, Problem
from autosplit.planners.bounds import work_bound_s
from autosplit.planners.clock import now
from autosplit.planners.cpsat.solver import SCALE, TERMS_PER_SECOND, solve
from autosplit.planners.delays import Delays, critical_path_s
from autosplit.planners.latency.cut_vertices import CutVertices


def shortest_schedule_s(
    problem: Problem, delays: Delays, limit_s: float, bound_s: float, time_limit_s: float, seed: int
) -> float:
    """A bound on the seconds of every schedule, at most ``limit_s``.

    Args:
        problem: its groups share a device; it has no values of the host, and its memory caps do not count.
        delays: between ops on two devices.
        limit_s: schedules that are not shorter do not count.
        bound_s: a known bound.
        time_limit_s: for the solver.
        seed: of the solver.
    """
    if len(delays.edges) * problem.num_devices**2 > TERMS_PER_SECOND * time_limit_s or limit_s <= 0:
        return bound_s
    model = _Model(problem, delays, limit_s, bound_s)
    solver, status = solve(model.model, now() + time_limit_s, seed)
    return limit_s if status == cp_model.INFEASIBLE else max(bound_s, solver.BestObjectiveBound() / model.scale)


class _Model:
    """The variables of the CP-SAT model, and its constraints by kind."""

    def __init__(self, problem: Problem, delays: Delays, limit_s: float, bound_s: float) -> None:
        self.problem, self.delays = problem, delays
        self.model = cp_model.CpModel()
        self.scale = SCALE / limit_s
        horizon = int(SCALE) + 1
        self.makespan = self.model.NewIntVar(min(floor(bound_s * self.scale * (1 - TOLERANCE)), horizon), horizon, "makespan")
        self.start = [self.model.NewIntVar(0, horizon, "") for _ in range(problem.num_ops)]
        self.end = [self.model.NewIntVar(0, horizon, "") for _ in range(problem.num_ops)]
        self.on: list[dict[int, cp_model.IntVar]] = []
        self.rows: list[list[cp_model.IntervalVar]] = [[] for _ in problem.devices]
        self._place()
        for row in self.rows:
            self.model.AddNoOverlap(row)
        for maker, reader in delays.edges:
            self._delay(maker, reader)
        self.model.AddMaxEquality(self.makespan, self.end)
        self.model.Minimize(self.makespan)

    def _steps(self, seconds: float) -> int:
        """Seconds in steps, rounded down, and cut off above the horizon, since the solver's numbers are finite."""
        return floor(min(seconds * self.scale * (1 - 1e-12), SCALE + 2))

    def _place(self) -> None:
        for op, costs in enumerate(self.problem.compute_s):
            self.on.append({int(device): self.model.NewBoolVar("") for device in np.flatnonzero(np.isfinite(costs))})
            self.model.AddExactlyOne(self.on[op].values())
            for device, flag in self.on[op].items():
                size = self._steps(float(costs[device]))
                self.rows[device].append(self.model.NewOptionalIntervalVar(self.start[op], size, self.end[op], flag, ""))
        for group in self.problem.groups:
            for op in group[1:]:
                for device in range(self.problem.num_devices):
                    one, other = self.on[group[0]].get(device), self.on[op].get(device)
                    if one is not None and other is not None:
                        self.model.Add(one == other)
                    elif one is not None or other is not None:
                        self.model.Add((one if one is not None else other) == 0)

    def _delay(self, maker: int, reader: int) -> None:
        """No reader starts before its value arrives."""
        table = self.delays.between(maker, reader)
        self.model.Add(self.start[reader] >= self.end[maker])
        apart = table[~np.eye(len(table), dtype=bool)]
        if not apart.any():
            return
        if (apart == apart[0]).all():
            other = self.model.NewBoolVar("")
            for device, flag in self.on[maker].items():
                there = self.on[reader].get(device)
                self.model.AddBoolOr([flag.Not(), other] if there is None else [flag.Not(), there, other])
            self.model.Add(self.start[reader] >= self.end[maker] + self._steps(float(apart[0]))).OnlyEnforceIf(other)
            return
        for device, flag in self.on[maker].items():
            for place, there in self.on[reader].items():
                wait = self._steps(float(table[device, place]))
                if wait:
                    self.model.Add(self.start[reader] >= self.end[maker] + wait).OnlyEnforceIf(flag, there)


MOST_OPS = 2000
"""Most ops of a graph whose segments are looked at. In larger graphs only all work spread over all devices counts."""

MOST_INSIDE = 60
"""Most ops of a segment, ends included; CP-SAT proves little about larger ones."""


def segment_bound_s(problem: Problem, max_replicas: int, deadline: float, seed: int = 0, limit_s: float = inf) -> float:
    """No schedule of one sample that takes less than ``limit_s`` is shorter, in seconds.

    Args:
        problem: the ops in topological order.
        max_replicas: of a block; transfers are as cheap as the cheapest of them.
        deadline: as a second of ``now()``; segments that are not proved by then count as their work or longest path.
        seed: of the solver.
        limit_s: schedules that take longer do not count.
    """
    if problem.num_ops > MOST_OPS:
        return work_bound_s(problem)
    delays = Delays(problem, max_replicas)
    lengths: dict[int, tuple[int, float]] = {}
    parts = []
    segments = _segments(problem)
    for fork, inside in segments.items():
        goal = inside[-1]
        if len(inside) <= 3:
            continue
        lengths[fork] = goal, work_bound_s(problem, inside[1:-1]) + float(problem.compute_s[goal].min())
        if len(inside) <= MOST_INSIDE:
            part = _part(problem, inside)
            least_s, serial_s = float(part.compute_s.min(axis=1).sum()), critical_path_s(part, Delays(part))
            lengths[fork] = goal, max(lengths[fork][1], serial_s)
            if least_s > lengths[fork][1] * (1 + TOLERANCE):  # all its ops in turn take longer than its longest path
                parts.append((fork, goal, part))
    known: dict[tuple[bytes, tuple[Net, ...], tuple[tuple[int, ...], ...]], float] = {}
    for number, (fork, goal, part) in enumerate(parts):
        key, least_s = (part.compute_s.tobytes(), part.nets, part.groups), lengths[fork][1]
        if key not in known:
            left_s = (deadline - now()) / (len(parts) - number)
            one_device_s = float(part.compute_s.sum(axis=0).min())
            most_seconds = one_device_s if one_device_s < inf else most_s(part)
            bound_s = shortest_schedule_s(part, Delays(part, max_replicas), most_seconds, least_s, left_s, seed)
            known[key] = max(least_s, min(bound_s, most_seconds))
        lengths[fork] = goal, known[key]
    path_s = critical_path_s(problem, delays, CutVertices(problem, delays, segments, lengths, limit_s).after)
    return max(min(path_s, limit_s), work_bound_s(problem))


def _segments(problem: Problem) -> dict[int, list[int]]:
    """Each op to all ops from it to the one at which its branches meet, both included, in order.

    Ops after which there is no work are left out: many graphs have ends that take no time.
    """
    after = list(problem.readers)
    works = problem.compute_s.min(axis=1) > 0
    for op in reversed(range(problem.num_ops)):
        after[op] = [reader for reader in after[op] if works[reader]]
        works[op] = works[op] or bool(after[op])
    found = {}
    for fork, goal in enumerate(meeting_ops(after)):
        if goal == problem.num_ops:
            continue
        inside, waiting = {fork, goal}, [fork]
        while waiting:
            fresh = set(after[waiting.pop()]) - inside
            inside |= fresh
            waiting += fresh
        found[fork] = sorted(inside)
    return found


def meeting_ops(after: Sequence[Sequence[int]]) -> list[int]:
    """For each op, its immediate postdominator: the first op on every path from it; the number of ops where there is none.

    Args:
        after: the readers of each op.
    """
    end, backward = len(after), networkx.DiGraph()
    for op, readers in enumerate(after):
        backward.add_edges_from((reader, op) for reader in readers or [end])
    dominators = networkx.immediate_dominators(backward, end)
    return [dominators[op] for op in range(end)]


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
