"""Chains: the planners of this folder, from the quickest to the one that proves. Their answer also starts plans of any sets."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite

import numpy as np

from autosplit.costs.judge import judge
from autosplit.costs.problem import HOST, Block, Problem
from autosplit.planners import clock
from autosplit.planners.clock import now
from autosplit.planners.contiguous import linear
from autosplit.planners.contiguous.proving import chain_blocks, prove_chain
from autosplit.planners.incumbent import CLOSE, Incumbent
from autosplit.planners.instance import Instance, contract
from autosplit.planners.loads import ROUNDING
from autosplit.planners.row_annealing import anneal_rows


def offer_first_chain(incumbent: Incumbent) -> None:
    """Offer chains that fill one device after the other, along the order in which ops were given; transfers are not looked at.

    Devices are taken as they are numbered, or the roomiest, fastest or slowest first. If groups or the order forbid some
    intervals of ops, none is offered.
    """
    problem = incumbent.problem
    if problem.groups or any(before > after for before, after in problem.order):
        return
    work = np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0).sum(axis=0)
    keys = (np.arange(problem.num_devices), -problem.memory_bytes, work, -work)
    sequences = {tuple(np.argsort(key, kind="stable").tolist()) for key in keys}
    filled = [fill for sequence in sorted(sequences) if (fill := _filled(problem, sequence)) is not None]
    if filled:
        incumbent.offer(min(filled, key=lambda fill: fill[0])[1], "one device after the other")


def _filled(problem: Problem, sequence: Sequence[int]) -> tuple[float, tuple[Block, ...]] | None:
    """The least seconds of compute below which intervals of ops fill the devices in turn, by bisection, and the blocks."""
    size = problem.op_bytes.copy()
    for weight in problem.weights:
        size[list(weight.users)] += weight.num_bytes
    held = np.append(0.0, np.cumsum(size))
    compute = np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0)
    work = np.vstack([np.zeros(problem.num_devices), np.cumsum(compute, axis=0)])
    bars = [np.append(np.flatnonzero(np.isinf(column)), problem.num_ops) for column in problem.compute_s.T]
    low_s, high_s, best = 0.0, float(work[-1].max()) * (1 + CLOSE), None
    limit_s = high_s
    while best is None or high_s - low_s > CLOSE * high_s:
        begin, blocks = 0, []
        for device in sequence:
            fits = np.searchsorted(work[:, device], work[begin, device] + limit_s, side="right") - 1
            room = np.searchsorted(held, held[begin] + problem.memory_bytes[device], side="right") - 1
            end = int(min(fits, room, bars[device][np.searchsorted(bars[device], begin)]))
            if end > begin:
                blocks.append(Block(tuple(range(begin, end)), (device,)))
                begin = end
        if begin == problem.num_ops:
            high_s, best = limit_s, tuple(blocks)
        elif best is None:
            return None
        else:
            low_s = limit_s
        limit_s = (low_s + high_s) / 2
    return high_s, best


SECONDS_TO_CONTRACT, SECONDS_FOR_SOONEST = 1e-4, 1e-3
"""Seconds for each op: with less time left, a known plan is the answer; the second number is for latency.

Contraction takes half of the first number and looks at no clock.
"""


def start_with_chain(incumbent: Incumbent, deadline: float) -> None:
    """A chain along single orders as the start of any sets of ops."""
    _prove_compute(incumbent, contract(incumbent.problem, incumbent.demands))
    instance = contract(incumbent.problem, replace(incumbent.demands, contiguous=True))
    _offer_linear(incumbent, instance, deadline)


def improve_chains(incumbent: Incumbent, deadline: float) -> None:
    """Chains along single orders, then over all orders with proof.

    If a plan need not be a chain of one block on each device, only such chains count that are better than the best plan.
    """
    problem, demands = incumbent.problem, incumbent.demands
    throughput = demands.objective == "throughput"
    shares = throughput and bool(demands.reuse) and demands.num_stages is None and not incumbent.shared
    if not demands.contiguous or shares:
        if throughput:
            _prove_compute(incumbent, contract(problem, demands))
        alone = replace(demands, contiguous=True, reuse=demands.reuse and not shares)
        chain = Incumbent(problem, alone, incumbent.seed, objective_s=incumbent.objective_s)
        improve_chains(chain, deadline if demands.any_sets else clock.halfway(deadline))
        incumbent.offer(chain.blocks, "chains")
    if not demands.contiguous:
        return
    least_s = SECONDS_FOR_SOONEST if demands.objective == "latency" else SECONDS_TO_CONTRACT
    if incumbent.objective_s < inf and deadline - now() < least_s * problem.num_ops:
        return
    _improve(incumbent, contract(problem, demands), deadline)


def _improve(incumbent: Incumbent, instance: Instance, deadline: float) -> None:
    demands = incumbent.demands
    if demands.objective == "throughput":
        _prove_compute(incumbent, instance)
    if demands.reuse and demands.objective == "throughput":
        if demands.num_stages is not None:  # if not, any sets of ops follow
            _cut_chain(incumbent, demands.num_stages, deadline)
        return
    if demands.objective == "latency":
        _offer_soonest(incumbent, instance, clock.halfway(deadline))
        return
    _offer_linear(incumbent, instance, deadline)
    if demands.max_latency_s < inf and not incumbent.closed:
        _hold_latency_limit(incumbent, instance, deadline)
    known = incumbent.objective_s < inf
    if incumbent.closed or (known and now() >= deadline):
        return
    complete = instance.exact and known  # otherwise CP-SAT may find or prove what orders of items do not say
    prove_chain(incumbent, instance, deadline if complete else clock.halfway(deadline))


def _cut_chain(incumbent: Incumbent, num_stages: int, deadline: float) -> None:
    """Offer the best chain, its largest blocks cut in two until there are as many as demanded; so devices hold several."""
    problem, most = incumbent.problem, min(num_stages, incumbent.problem.num_devices)
    instance = contract(problem, replace(incumbent.demands, reuse=False, num_stages=None, max_stages=most, min_stage_s=0.0))
    chain = linear.best_chain(instance, inf, clock.halfway(deadline))
    if chain is None:
        return
    rows = [(members, block.devices) for (members, _), block in zip(chain.blocks, chain_blocks(instance, chain), strict=True)]
    while len(rows) < num_stages:
        place = max(range(len(rows)), key=lambda number: len(rows[number][0]))
        members, devices = rows[place]
        if len(members) < 2:
            return
        half = len(members) // 2
        rows[place : place + 1] = (members[:half], devices), (members[half:], devices)
    blocks = tuple(Block(instance.expand(members), devices) for members, devices in rows)
    incumbent.offer(blocks, "cut chain")
    if problem.num_ops * problem.num_devices > clock.SMALL_PLACES:  # CP-SAT places fewer ops better
        anneal_rows(incumbent, deadline, [blocks])


def _offer_linear(incumbent: Incumbent, instance: Instance, deadline: float) -> None:
    incumbent.offer(chain_blocks(instance, linear.best_chain(instance, incumbent.objective_s, deadline)), "linear orders")


def _prove_compute(incumbent: Incumbent, instance: Instance) -> None:
    if isfinite(instance.compute_bound_s):
        incumbent.prove(instance.compute_bound_s, "compute bound")


def _offer_soonest(incumbent: Incumbent, instance: Instance, deadline: float) -> None:
    """Chains along single orders through which a sample passes in the least time, its blocks one after the other."""
    delay_s = float(incumbent.problem.transfers.latency_s[:HOST, :HOST].max())
    for order in linear.topological_orders(instance):
        incumbent.offer(chain_blocks(instance, linear.chain_in_order(instance, order, inf, deadline, delay_s)), "soonest chains")


def _hold_latency_limit(incumbent: Incumbent, instance: Instance, deadline: float) -> None:
    """Offer chains that hold the latency limit: on each order, the soonest chain among those with a largest load below T.

    T is found by bisection. The latency of a chain counts as the sum of all block times and of the delays between blocks. Where
    branches run side by side, the true latency is shorter. So every chain that is found holds the limit, but some may be missed.
    """
    problem, demands, best_s, until = incumbent.problem, incumbent.demands, inf, clock.halfway(deadline)
    delay_s = float(problem.transfers.latency_s[:HOST, :HOST].max())
    for order in linear.topological_orders(instance):
        low_s, high_s = incumbent.bound_s, best_s
        while now() <= until:
            limit_s = high_s if high_s == inf else (low_s + high_s) / 2
            chain = linear.chain_in_order(instance, order, limit_s * (1 + 3 * ROUNDING), delay_s=delay_s)
            judged = judge(problem, demands, chain_blocks(instance, chain))
            value_s = inf if judged.faults else judged.objective_s
            if value_s < best_s:
                best_s = value_s
                incumbent.offer(judged.blocks, "quick chains")
            if value_s >= high_s and limit_s == inf:
                break
            low_s, high_s = (low_s, value_s) if value_s < high_s else (limit_s, high_s)
            if high_s - low_s <= CLOSE * high_s:
                break
