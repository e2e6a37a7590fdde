"""Schedule one sample: blocks that bring it through as soon as possible, branches side by side on several devices.

Everything on one device, list schedules and the best plan known are the starts. Annealing moves ops and blocks of them. The bound
is the longest path, with what CP-SAT proves of the parts between forks and joins.
"""

from collections.abc import Iterator

import numpy as np

from autosplit.costs.cost import block_of
from autosplit.costs.problem import Problem
from autosplit.planners.clock import halfway, now
from autosplit.planners.clusters import Clusters, forced_clusters
from autosplit.planners.delays import Delays, critical_path_s
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.latency.list_scheduling import Timetable, blocks_of, list_schedule
from autosplit.planners.latency.order_annealing import anneal_order, is_plain
from autosplit.planners.latency.segments import segment_bound_s
from autosplit.planners.row_annealing import anneal_rows

SECONDS_TO_VERIFY = 1.5e-4
"""Seconds for each op that are kept free to evaluate and verify the answer."""


def schedule_sample(incumbent: Incumbent, deadline: float) -> None:
    """The blocks with the smallest latency, and a bound on all blocks."""
    deadline -= SECONDS_TO_VERIFY * incumbent.problem.num_ops
    forced = forced_clusters(incumbent.problem, incumbent.demands.contiguous)
    delays = Delays(forced.problem, incumbent.demands.max_replicas)
    incumbent.offer_one_device()
    for table in _list_schedules(forced.problem, delays, halfway(deadline), deadline):
        incumbent.offer(forced.expand(blocks_of(forced.problem, table)), "list scheduling")
    incumbent.prove(critical_path_s(forced.problem, delays), "critical path")
    if not incumbent.closed:
        bound_s = segment_bound_s(
            forced.problem, incumbent.demands.max_replicas, halfway(deadline), incumbent.seed, incumbent.objective_s
        )
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


def _list_schedules(problem: Problem, delays: Delays, soft_deadline: float, deadline: float) -> Iterator[Timetable]:
    """HEFT on all devices, then on the fastest eight, four, two and one of them; each with the true delays and with double ones.

    The first one may take until the deadline, the others until ``soft_deadline``, both seconds of ``now()``.
    """
    speed = np.where(
        np.isfinite(problem.compute_s), problem.compute_s, 10 * problem.compute_s[np.isfinite(problem.compute_s)].sum()
    )
    order = [int(device) for device in np.argsort(speed.sum(axis=0), kind="stable")]
    powers = [2**power for power in range(problem.num_devices.bit_length()) if 2**power < problem.num_devices]
    for count in (problem.num_devices, *reversed(powers)):
        for caution in (1.0, 2.0) if count > 1 else (1.0,):
            first = count == problem.num_devices and caution == 1.0
            table = list_schedule(problem, delays, order[:count], caution, deadline if first else soft_deadline)
            if table is not None:
                yield table
            if now() > soft_deadline:
                return
