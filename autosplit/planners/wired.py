"""Plans where values between hosts share wires. Solvers know no wires, so they are asked about problems without them.

``unwired``       nobody pays for bytes between hosts: no plan costs less with wires, so its bound holds
``paid_beside``   the sender pays, beside its compute: exact for hosts of one device that send to one host at a time
``paid``          the sender pays after its compute: what a single sample sees

The evaluator ranks their answers with the wires, and the best one is improved by small moves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.judge import Solution, judge
from autosplit.costs.problem import HOST, Block, Floats, Problem
from autosplit.costs.wires import NO_WIRES
from autosplit.errors import InfeasibleError
from autosplit.planners.bounds import work_bound_s
from autosplit.planners.clock import now
from autosplit.planners.incumbent import Incumbent
from autosplit.values.machine import HOST as HOST_NAME
from autosplit.values.machine import host_of

SHARES = (0.25, 0.4, 0.6)
"""Shares of the time left for each of the three problems; the rest is for small moves."""

STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Ops by which a border between two blocks is moved."""


def plan_with_wires(incumbent: Incumbent, solve: Callable[[Problem, float], Solution], deadline: float) -> Solution:
    """The best plan found for a problem with wires, and a bound on all plans.

    Args:
        incumbent: a new one for the problem.
        solve: answers a problem without wires within a number of seconds.
        deadline: second of ``now()`` after which nothing is tried.
    Raises: InfeasibleError: no plan meets all this, or none was found.
    """
    problem, demands = incumbent.problem, incumbent.demands
    relaxed = solve(replace(problem, wires=NO_WIRES), SHARES[0] * (deadline - now()))
    found = [relaxed]
    if judge(problem, demands, relaxed.blocks).objective_s > relaxed.bound_s * (1 + TOLERANCE):
        for share, surrogate in zip(SHARES[1:], (paid_beside(problem), paid(problem)), strict=True):
            try:
                found.append(solve(surrogate, share * (deadline - now())))
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
        members = problem.device_classes
        work_s = problem.compute_s[:, [devices[0] for devices in members]]
        incumbent.prove(work_bound_s(work_s, np.array([float(len(devices)) for devices in members])), "compute bound")
    while not incumbent.closed and now() < deadline and _improve(incumbent, deadline):
        pass
    return incumbent.solution()


def _improve(incumbent: Incumbent, deadline: float) -> bool:
    """Take the first small move that makes the plan better; whether there was one before the deadline."""
    before_s = incumbent.objective_s
    for blocks in neighbours(incumbent.problem, incumbent.blocks):
        incumbent.offer(blocks, "small moves")
        if incumbent.objective_s < before_s:
            return True
        if now() > deadline:
            return False
    return False


def paid(problem: Problem) -> Problem:
    """The problem in which the sender is busy while its bytes are on the slowest wire to another host."""
    hosts = [*map(host_of, problem.devices), HOST_NAME]
    names = list(dict.fromkeys(hosts))
    place = np.array([names.index(host) for host in hosts])
    between = np.array([[problem.wires.s_per_byte(one, other) for other in names] for one in names])
    t = problem.transfers
    send: Floats = t.send_s_per_byte + between[np.ix_(place, place)]
    receive = t.receive_s_per_byte.copy()
    receive[HOST] += between[names.index(HOST_NAME)][place]  # nobody plans the host's time, so the receiver pays for the host
    return replace(problem, wires=NO_WIRES, transfers=replace(t, send_s_per_byte=send, receive_s_per_byte=receive))


def paid_beside(problem: Problem) -> Problem:
    """The problem in which devices pay for wires while they compute."""
    return replace(paid(problem), overlap=True)


def neighbours(problem: Problem, blocks: Sequence[Block]) -> Iterator[tuple[Block, ...]]:
    """Plans near a plan: a border moved, two blocks joined, their devices exchanged, a free device put in, a replica left out."""
    rows = list(blocks)
    used = {device for block in rows for device in block.devices}
    free = [min(left) for left in (set(group) - used for group in problem.device_classes) if left]
    for number, (one, other) in enumerate(pairwise(rows)):
        if max(one.ops) < min(other.ops):
            for both in _recut(one, other):
                yield (*rows[:number], *both, *rows[number + 2 :])
    for first, second in combinations(range(len(rows)), 2):
        swapped = list(rows)
        swapped[first], swapped[second] = (
            Block(rows[first].ops, rows[second].devices),
            Block(rows[second].ops, rows[first].devices),
        )
        yield tuple(swapped)
    for number, block in enumerate(rows):
        sets = [kept for device in free for kept in ((device,), (*block.devices, device))]
        sets += [left for left in combinations(block.devices, len(block.devices) - 1) if left]
        yield from ((*rows[:number], Block(block.ops, devices), *rows[number + 1 :]) for devices in sets)


def _recut(one: Block, other: Block) -> Iterator[tuple[Block, ...]]:
    """Two blocks whose ops follow each other, joined on the devices of either, and cut elsewhere."""
    ops = (*sorted(one.ops), *sorted(other.ops))
    yield from ((Block(ops, devices),) for devices in (one.devices, other.devices))
    for border in sorted({len(one.ops) + sign * step for step in STEPS for sign in (-1, 1)}):
        if 0 < border < len(ops):
            yield Block(ops[:border], one.devices), Block(ops[border:], other.devices)
