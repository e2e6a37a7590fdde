"""Chains: the planners of this folder, from the quickest to the one that proves. Their answer also starts plans of any sets."""

from dataclasses import replace
from math import inf, isfinite

from autosplit.costs.judge import judge
from autosplit.costs.problem import HOST, Floats
from autosplit.planners import bounds
from autosplit.planners.clock import now
from autosplit.planners.contiguous import latency_limited, linear
from autosplit.planners.contiguous.device_usage import Usage, sequence_usage, usage_of
from autosplit.planners.contiguous.interleaved import improve_interleaved
from autosplit.planners.contiguous.proving import chain_blocks, prove_chain
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.items import Items, contract

MANY_OPS = 5000
"""Problems of more ops are too large for CP-SAT."""
PROOF_SHARE = 0.8
"""Share of the time left for chains over all orders; CP-SAT gets the rest where there are not too many ops for it."""
SOONEST_SHARE = 0.1
"""Share of the time left for chains if latency is the objective. Plans that are not chains get the rest."""
PROOF_SHARE_WITHOUT_PLAN = 0.2
SECONDS_TO_CONTRACT, SECONDS_FOR_SOONEST = 1e-4, 1e-3
"""Seconds for each op: with less time left, a known plan is the answer; the second number is for latency.

Contraction takes half of the first number and looks at no clock.
"""
START_SHARE, START_LEAST_S = 0.4, 5.0
"""Share of the time left, and least seconds if that many are left, for the best chain if a plan need not be a chain.

Within a short limit the chain gets all the time that it would get alone, so the answer is not worse than a chain.
"""
INTERLEAVED_SHARE = 0.2
"""Share of the time left for chains with several blocks on a device, if their number is free. Any sets of ops get the rest."""


def improve_chains(incumbent: Incumbent, deadline: float) -> None:
    """Chains along single orders, then over all orders with proof.

    If a plan need not be a chain of one block on each device, such chains are its start.
    """
    problem, demands = incumbent.problem, incumbent.demands
    throughput = demands.objective == "throughput"
    shares = throughput and bool(demands.reuse) and demands.num_stages is None and not incumbent.shared
    if not demands.contiguous or shares:
        if throughput:
            items = contract(problem, demands)
            _prove_compute(incumbent, items, bounds.multipliers(items))
        alone = replace(demands, contiguous=True, reuse=demands.reuse and not shares)
        chain = Incumbent(problem, alone, incumbent.seed)
        chain.offer(incumbent.blocks, "start")
        left_s = deadline - now()
        least_s = 0.0 if shares else min(START_LEAST_S, left_s)
        improve_chains(chain, now() + max(START_SHARE * left_s, least_s))
        incumbent.offer(chain.blocks, "chains")
    if not demands.contiguous:
        return
    least_s = SECONDS_FOR_SOONEST if demands.objective == "latency" else SECONDS_TO_CONTRACT
    if incumbent.blocks and deadline - now() < least_s * problem.num_ops:
        return
    _improve(incumbent, contract(problem, demands), deadline)


def _improve(incumbent: Incumbent, items: Items, deadline: float) -> None:
    demands, weights = incumbent.demands, bounds.multipliers(items)
    if demands.objective == "throughput":
        _prove_compute(incumbent, items, weights)
    if demands.reuse and demands.objective == "throughput":
        share = INTERLEAVED_SHARE if demands.num_stages is None else 1.0
        improve_interleaved(incumbent, items, weights, now() + share * (deadline - now()))
        return
    usage = usage_of(items, demands) or sequence_usage(items, demands, _by_speed(items))
    if demands.objective == "latency":
        _offer_soonest(incumbent, items, usage, weights, now() + SOONEST_SHARE * (deadline - now()))
        return
    bound_s = bounds.compute_bound_s(items, demands, weights)
    chain = linear.best_chain(items, demands, usage, weights, bound_s, incumbent.objective_s, deadline)
    if chain is not None:
        incumbent.offer(chain_blocks(items, chain), "linear orders")
    if demands.max_latency_s < inf and not incumbent.closed:
        _hold_latency_limit(incumbent, items, usage, weights, deadline)
    if incumbent.closed or (incumbent.blocks and now() >= deadline):
        return
    share = PROOF_SHARE if incumbent.blocks else PROOF_SHARE_WITHOUT_PLAN
    prove_chain(incumbent, items, weights, now() + share * (deadline - now()))


def _prove_compute(incumbent: Incumbent, items: Items, weights: Floats) -> None:
    bound_s = bounds.compute_bound_s(items, incumbent.demands, weights)
    if isfinite(bound_s):
        incumbent.prove(bound_s, "compute bound")


def _offer_soonest(incumbent: Incumbent, items: Items, usage: Usage, weights: Floats, deadline: float) -> None:
    """Chains along single orders through which a sample passes in the least time, its blocks one after the other."""
    delay_s = float(incumbent.problem.transfers.latency_s[:HOST, :HOST].max())
    for order in linear.topological_orders(items):
        found = linear.chain_in_order(items, incumbent.demands, usage, weights, order, inf, deadline, delay_s)
        if found is not None:
            incumbent.offer(chain_blocks(items, found), "soonest chains")


def _hold_latency_limit(incumbent: Incumbent, items: Items, usage: Usage, weights: Floats, deadline: float) -> None:
    """Chains along single orders that hold the latency limit."""
    problem, demands = incumbent.problem, incumbent.demands

    def value_s(chain: linear.Chain) -> float:
        judged = judge(problem, demands, chain_blocks(items, chain))
        return inf if judged.faults else judged.objective_s

    delay_s = float(problem.transfers.latency_s[:HOST, :HOST].max())
    until = now() + 0.3 * (deadline - now())
    for chain in latency_limited.quick_chains(items, demands, usage, weights, delay_s, incumbent.bound_s, value_s, until):
        incumbent.offer(chain_blocks(items, chain), "quick chains")


def _by_speed(items: Items) -> list[int]:
    """The class of each device, fast ones first."""
    mean = items.compute_s.clip(max=1e300).mean(axis=0)
    return [int(k) for k in mean.argsort() for _ in items.classes[k]]
