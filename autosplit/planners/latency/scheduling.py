"""Latency: blocks that bring one sample through soonest, branches side by side on several devices.

Starts are one device, list schedules and the plans of others. Annealing moves what stands in them; CP-SAT gives a timetable to
start from again, and a bound.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from random import Random
from time import monotonic

import numpy as np

from autosplit.costs.cost import CLOSED, most_s
from autosplit.costs.problem import Block, Problem
from autosplit.planners.clusters import fewer_lumps, forced_lumps
from autosplit.planners.delays import Delays, critical_path_s
from autosplit.planners.latency.list_scheduling import Timetable, blocks_of, list_schedule
from autosplit.planners.latency.row_annealing import Row, RowSearch
from autosplit.planners.latency.segments import segment_bound_s
from autosplit.planners.latency.timetable import best_timetable
from autosplit.values.constraints import Demands

MAX_LUMPS = 160
"""Ops that the search moves one by one; larger problems are joined to about so many."""

PROOF_SHARE = 0.3
"""Of the time, for a bound from the parts of the graph."""


@dataclass(frozen=True)
class Answer:
    """The best blocks found (empty if none meets the demands), who found them, a bound in seconds, and who proved it."""

    blocks: Row
    method: str
    bound_s: float
    bound_method: str


def with_reuse(demands: Demands) -> Demands:
    """The demands with several blocks on one device allowed, unless it counts stages."""
    return replace(demands, reuse=demands.reuse or (demands.objective == "latency" and demands.num_stages is None))


def best_latency(problem: Problem, demands: Demands, starts: Sequence[Row], deadline: float, seed: int = 0) -> Answer:
    """The blocks with the smallest latency found until the deadline, and a bound on all blocks.

    Args:
        problem: what is asked.
        demands: the limits on a plan; a latency limit is the caller's to check.
        starts: known plans.
        deadline: as ``time.monotonic`` counts.
        seed: of everything random.
    """
    demands = replace(demands, max_latency_s=inf)
    forced = forced_lumps(problem, demands.contiguous)
    delays = Delays(forced.problem, demands.max_replicas)
    proof = (critical_path_s(forced.problem, delays), "critical path")
    search = RowSearch(fewer_lumps(forced, MAX_LUMPS), demands, Random(seed), deadline)
    everything = tuple(range(problem.num_ops))
    for device in range(problem.num_devices):
        search.offer([Block(everything, (device,))], "one device")
    for row in starts:
        search.offer(row, "start")
    for table in _list_schedules(search.lumps.problem, deadline):
        search.offer_timetable(table, "list scheduling")
    if search.value_s - proof[0] > CLOSED * search.value_s:
        bound_s = segment_bound_s(
            forced.problem, demands.max_replicas, monotonic() + PROOF_SHARE * (deadline - monotonic()), seed
        )
        if bound_s > proof[0] * (1 + CLOSED):
            proof = (bound_s, "parts between forks and joins")
    if search.value_s - proof[0] > CLOSED * search.value_s:
        search.anneal(monotonic() + 0.3 * (deadline - monotonic()), proof[0])
    if search.value_s - proof[0] > CLOSED * search.value_s:
        answer = best_timetable(
            forced.problem,
            delays,
            search.value_s if isfinite(search.value_s) else most_s(forced.problem),
            proof[0],
            0.6 * (deadline - monotonic()),
            seed,
        )
        if answer.bound_s > proof[0]:
            proof = (answer.bound_s, "CP-SAT schedule")
        if answer.table is not None:
            search.offer(forced.expand(blocks_of(forced.problem, answer.table)), "CP-SAT schedule")
            search.anneal(deadline, proof[0])
    search.tidy()
    blocks = () if search.row is None else search.lumps.expand(search.row)
    return Answer(blocks, search.method, min(proof[0], search.value_s), proof[1])


def _list_schedules(problem: Problem, deadline: float) -> Iterator[Timetable]:
    """HEFT on the fastest one, two, ... devices, with delays taken as they are and as twice as dear."""
    delays = Delays(problem)
    speed = np.where(
        np.isfinite(problem.compute_s), problem.compute_s, 10 * problem.compute_s[np.isfinite(problem.compute_s)].sum()
    )
    order = [int(device) for device in np.argsort(speed.sum(axis=0), kind="stable")]
    for count in range(1, problem.num_devices + 1):
        for caution in (1.0, 2.0) if count > 1 else (1.0,):
            if count > 1 and monotonic() > deadline:
                return
            table = list_schedule(problem, delays, order[:count], caution)
            if table is not None:
                yield table
