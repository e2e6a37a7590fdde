"""Plans where values between hosts share wires, or those of accelerators a bus.

Solvers know no wires, so they are asked about problems without them.

``unwired``       bytes on wires cost nothing: no plan costs less with wires, so its bound holds
``paid_beside``   the sender pays, beside its compute: exact for hosts of one device that send to one host at a time

The evaluator ranks their answers with the wires, and annealing goes on from the best one.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.hostways import hosts_of
from autosplit.costs.judge import Solution, judge
from autosplit.costs.problem import HOST, Problem
from autosplit.costs.wires import NO_WIRES
from autosplit.errors import InfeasibleError
from autosplit.planners.bounds import work_bound_s
from autosplit.planners.clock import halfway, now
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.row_annealing import anneal_rows
from autosplit.values.machine import HOST as HOST_NAME


def plan_with_wires(incumbent: Incumbent, solve: Callable[[Problem, float], Solution], deadline: float) -> Solution:
    """The best plan found for a problem with wires, and a bound on all plans.

    Args:
        incumbent: a new one for the problem.
        solve: answers a problem without wires within a number of seconds.
        deadline: second of ``now()`` after which nothing is tried.
    Raises: InfeasibleError: no plan meets all this, or none was found.
    """
    problem, demands = incumbent.problem, incumbent.demands
    relaxed = solve(replace(problem, wires=NO_WIRES), halfway(deadline) - now())
    found = [relaxed]
    if judge(problem, demands, relaxed.blocks).objective_s > relaxed.bound_s * (1 + TOLERANCE):
        try:
            found.append(solve(paid_beside(problem), halfway(deadline) - now()))
        except InfeasibleError as failure:  # only in time, or within a limit on latency
            incumbent.remark = str(failure)
    alone = [one for one in found if one.status != "shared"]
    incumbent.shared = not alone
    incumbent.demands = replace(demands, reuse=demands.reuse or not alone)
    for one in alone or found:
        incumbent.offer(one.blocks, one.method)
    if not incumbent.blocks:
        fault = (judge(problem, incumbent.demands, relaxed.blocks).faults or [incumbent.remark])[0]
        raise InfeasibleError(f"no plan was found for '{problem.name}' over its hosts: {fault}")
    if relaxed in (alone or found):
        incumbent.prove(relaxed.bound_s, "without wires")
    if demands.objective == "throughput":
        incumbent.prove(work_bound_s(problem), "compute bound")
    if not incumbent.closed:
        anneal_rows(incumbent, deadline)
    return incumbent.solution()


def paid_beside(problem: Problem) -> Problem:
    """The problem in which the sender is busy, beside its compute, while its bytes are on the slowest wire to another host."""
    rows = hosts_of(problem), [*map(problem.place, range(problem.num_devices)), HOST_NAME]
    cards, buses = (np.array([[problem.wires.s_per_byte(one, other) for other in ends] for one in ends]) for ends in rows)
    t, wires = problem.transfers, cards + buses
    receive = t.receive_s_per_byte.copy()
    receive[HOST] += wires[HOST]  # the time of the host is not planned, so the receiver pays for it
    paid = replace(t, send_s_per_byte=t.send_s_per_byte + wires, receive_s_per_byte=receive)
    return replace(problem, wires=NO_WIRES, transfers=paid, overlap=True)
