"""Prove that no chain is better: searches over all orders below limits between the bound and the best plan.

A search that finds a chain has found a better plan. One that finds none and looked everywhere has raised the bound. Where they do
not meet in time, column generation raises the bound too: its bound holds for all plans, chain or not.
"""

from dataclasses import replace
from math import inf

import numpy as np

from autosplit.costs.problem import Block
from autosplit.planners.clock import halfway, now
from autosplit.planners.contiguous import downsets
from autosplit.planners.contiguous.linear import Chain
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.instance import MANY_ITEMS, Instance, contract
from autosplit.planners.noncontiguous.column_generation import rising_bound
from autosplit.planners.noncontiguous.hypergraph import hypergraph_of

STEP, NEAR, FAR, QUICK_S = 0.75, 3e-4, 1.05, 0.1
"""A search goes a ``STEP`` of the way from the bound to the best plan, because lower limits are refuted much faster. It goes all
the way where they differ by a share of ``NEAR``, after a refutation that took more processor time than ``QUICK_S``, and
at first where the plan is ``FAR`` times the bound."""
CLOSE = 0.003
"""A search that did not end is not repeated below a limit that exceeds the bound by less than this share."""


def prove_chain(incumbent: Incumbent, instance: Instance, deadline: float) -> None:
    """Find better chains over all orders, or prove that there are none.

    If the items are not exact, they cost too little. Then a chain found is only a bound, and its blocks are evaluated.

    Args:
        incumbent: the best plan and bound, kept up to date.
        instance: the items of the chain.
        deadline: second of ``now()`` after which no search goes on.
    """
    limit_s = incumbent.objective_s
    if incumbent.closed or not instance.usage.complete:
        return
    if not instance.exact:
        instance = replace(instance, demands=replace(instance.demands, min_stage_s=0.0))
    if (instance.compute_s >= limit_s * instance.demands.max_replicas).any():
        instance = contract(incumbent.problem, instance.demands, limit_s=limit_s)
    many = instance.num_items > MANY_ITEMS
    _close_in(incumbent, instance, deadline if many else halfway(deadline))
    if not incumbent.closed and not many and now() < deadline:
        _prove_by_prices(incumbent, instance, halfway(deadline))
        _close_in(incumbent, instance, deadline)


def _close_in(incumbent: Incumbent, instance: Instance, deadline: float) -> None:
    """Search below the best plan, then between it and the bound, until they meet; lower after a search that did not end in time.

    A chain may cost more than its items say. Then the bound ends at the value of the items.
    """
    high_s, unended_s = incumbent.objective_s, inf
    limit_s = _towards(incumbent.bound_s, high_s) if high_s < FAR * incumbent.bound_s else high_s
    while not incumbent.closed and incumbent.bound_s < high_s and now() < deadline:
        began = now()
        outcome = downsets.best_chain(instance, limit_s, halfway(deadline))
        incumbent.note(f"down-sets: {outcome.num_sets} reached below {limit_s:.6g} s", "down-sets")
        incumbent.offer(chain_blocks(instance, outcome.chain), "down-sets")
        if outcome.chain is not None:
            high_s = min(incumbent.objective_s, outcome.chain.value_s)
        if outcome.complete and min(limit_s, high_s) < inf:
            incumbent.prove(min(limit_s, high_s), "down-sets")
        if outcome.chain is not None:
            limit_s = _towards(incumbent.bound_s, high_s)
        elif outcome.complete:
            if limit_s >= high_s:
                return
            quick = now() - began < QUICK_S
            limit_s = high_s if high_s < unended_s and not quick else _towards(limit_s, min(high_s, unended_s))
        else:
            unended_s = limit_s
            if unended_s <= incumbent.bound_s * (1 + CLOSE):
                return
            limit_s = 0.5 * (incumbent.bound_s + unended_s) if unended_s < inf else 2.0 * incumbent.bound_s


def _towards(low_s: float, high_s: float) -> float:
    """A limit between the refuted and the known objective; the known one where both are close, or where it is infinite."""
    return high_s if high_s - low_s <= NEAR * high_s or high_s == inf else low_s + STEP * (high_s - low_s)


def _prove_by_prices(incumbent: Incumbent, instance: Instance, deadline: float) -> None:
    """Raise the bound by column generation on the items, which does not cover replicas."""
    graph = hypergraph_of(incumbent.problem, instance)
    if instance.demands.max_replicas == 1 and np.isfinite(graph.compute_s.min(axis=1)).all():
        value_s = incumbent.objective_s if incumbent.objective_s < inf else 2.0 * incumbent.bound_s
        rising_bound(graph, lambda: (value_s, None), incumbent.prove, deadline)


def chain_blocks(instance: Instance, chain: Chain | None) -> tuple[Block, ...]:
    """The blocks of a chain, none where there is no chain. Each takes the next free devices of its classes."""
    free = [list(members) for members in instance.classes]
    blocks = []
    for members, takes in chain.blocks if chain else ():
        devices = [free[k].pop(0) for k, count in enumerate(takes) for _ in range(count)]
        blocks.append(Block(instance.expand(members), tuple(sorted(devices))))
    return tuple(blocks)
