"""Chains: the planners of this folder, from the quickest to the one that proves. Their answer also starts plans of any sets."""

from dataclasses import replace
from math import inf, isfinite

from autosplit.costs.judge import judge
from autosplit.costs.problem import HOST
from autosplit.planners import clock
from autosplit.planners.clock import now
from autosplit.planners.contiguous import linear
from autosplit.planners.contiguous.interleaved import improve_interleaved
from autosplit.planners.contiguous.proving import chain_blocks, prove_chain
from autosplit.planners.incumbent import CLOSE, Incumbent
from autosplit.planners.items import Items, contract
from autosplit.planners.loads import ROUNDING

SECONDS_TO_CONTRACT, SECONDS_FOR_SOONEST = 1e-4, 1e-3
"""Seconds for each op: with less time left, a known plan is the answer; the second number is for latency.

Contraction takes half of the first number and looks at no clock.
"""
START_LEAST_S = 5.0
"""Least seconds, if that many are left, for the best chain if a plan need not be a chain.

Within a short limit the chain gets all the time that it would get alone, so the answer is not worse than a chain. With less, one
of six dense graphs of 60 ops ended 0.01 % above the chain that 2 s find.
"""


def improve_chains(incumbent: Incumbent, deadline: float) -> None:
    """Chains along single orders, then over all orders with proof.

    If a plan need not be a chain of one block on each device, such chains are its start.
    """
    problem, demands = incumbent.problem, incumbent.demands
    throughput = demands.objective == "throughput"
    shares = throughput and bool(demands.reuse) and demands.num_stages is None and not incumbent.shared
    if not demands.contiguous or shares:
        if throughput:
            _prove_compute(incumbent, contract(problem, demands))
        alone = replace(demands, contiguous=True, reuse=demands.reuse and not shares)
        chain = Incumbent(problem, alone, incumbent.seed)
        chain.offer(incumbent.blocks, "start")
        until = clock.halfway(deadline)
        improve_chains(chain, until if shares else max(until, min(now() + START_LEAST_S, deadline)))
        incumbent.offer(chain.blocks, "chains")
    if not demands.contiguous:
        return
    least_s = SECONDS_FOR_SOONEST if demands.objective == "latency" else SECONDS_TO_CONTRACT
    if incumbent.blocks and deadline - now() < least_s * problem.num_ops:
        return
    _improve(incumbent, contract(problem, demands), deadline)


def _improve(incumbent: Incumbent, items: Items, deadline: float) -> None:
    demands = incumbent.demands
    if demands.objective == "throughput":
        _prove_compute(incumbent, items)
    if demands.reuse and demands.objective == "throughput":
        until = clock.halfway(deadline) if demands.num_stages is None else deadline  # any sets of ops may follow
        improve_interleaved(incumbent, items, until)
        return
    if demands.objective == "latency":
        _offer_soonest(incumbent, items, clock.halfway(deadline))
        return
    chain = linear.best_chain(items, incumbent.objective_s, deadline)
    if chain is not None:
        incumbent.offer(chain_blocks(items, chain), "linear orders")
    if demands.max_latency_s < inf and not incumbent.closed:
        _hold_latency_limit(incumbent, items, deadline)
    if incumbent.closed or (incumbent.blocks and now() >= deadline):
        return
    complete = items.exact and incumbent.blocks  # otherwise CP-SAT may find or prove what orders of items do not say
    prove_chain(incumbent, items, deadline if complete else clock.halfway(deadline))


def _prove_compute(incumbent: Incumbent, items: Items) -> None:
    if isfinite(items.compute_bound_s):
        incumbent.prove(items.compute_bound_s, "compute bound")


def _offer_soonest(incumbent: Incumbent, items: Items, deadline: float) -> None:
    """Chains along single orders through which a sample passes in the least time, its blocks one after the other."""
    delay_s = float(incumbent.problem.transfers.latency_s[:HOST, :HOST].max())
    for order in linear.topological_orders(items):
        found = linear.chain_in_order(items, order, inf, deadline, delay_s)
        if found is not None:
            incumbent.offer(chain_blocks(items, found), "soonest chains")


def _hold_latency_limit(incumbent: Incumbent, items: Items, deadline: float) -> None:
    """Offer chains that hold the latency limit: on each order, the soonest chain among those with a largest load below T.

    T is found by bisection. The latency of a chain counts as the sum of all block times and of the delays between blocks. Where
    branches run side by side, the true latency is shorter. So every chain that is found holds the limit, but some may be missed.
    """
    problem, demands, best_s, until = incumbent.problem, incumbent.demands, inf, clock.halfway(deadline)
    delay_s = float(problem.transfers.latency_s[:HOST, :HOST].max())
    for order in linear.topological_orders(items):
        low_s, high_s = incumbent.bound_s, best_s
        while now() <= until:
            limit_s = high_s if high_s == inf else (low_s + high_s) / 2
            chain = linear.chain_in_order(items, order, limit_s * (1 + 3 * ROUNDING), delay_s=delay_s)
            judged = None if chain is None else judge(problem, demands, chain_blocks(items, chain))
            value_s = inf if judged is None or judged.faults else judged.objective_s
            if judged is not None and value_s < best_s:
                best_s = value_s
                incumbent.offer(judged.blocks, "quick chains")
            if value_s >= high_s and limit_s == inf:
                break
            low_s, high_s = (low_s, value_s) if value_s < high_s else (limit_s, high_s)
            if high_s - low_s <= CLOSE * high_s:
                break
