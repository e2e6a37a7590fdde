"""Chains with a latency limit: of all chains along one order with a largest load below T, the one that a sample passes soonest.

T is bisected. The dynamic program takes latency as the sum over the blocks and the delays between them: the truth where every
block waits for the one before, and never less than it. So a plan that it finds holds the limit; another may hold it that it
does not find, where branches run side by side.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from time import monotonic

from autosplit.costs.problem import Floats
from autosplit.planners.contiguous.device_usage import Usage
from autosplit.planners.contiguous.growing_block import ROUNDING
from autosplit.planners.contiguous.linear import Chain, chain_in_order, depth_first_orders
from autosplit.planners.items import Ints, Items
from autosplit.values.constraints import Demands

NUM_HALVINGS = 24
CLOSE = 1e-4
"""Loads this near to each other need no halving between them."""


def quick_chains(
    items: Items,
    demands: Demands,
    usage: Usage,
    weights: Floats,
    delay_s: float,
    bound_s: float,
    judge: Callable[[Chain], float],
    deadline: float,
) -> Iterator[Chain]:
    """Chains that hold the latency limit, each better than the one before; along one depth-first order after the other.

    Args:
        items: what is to be put in a row.
        demands: the limits on a plan.
        usage: the devices.
        weights: multipliers of the classes, for pruning.
        delay_s: what a value is under way between two blocks, in seconds; the largest such, where they differ.
        bound_s: a bound on the largest load.
        judge: the largest load of a chain, in seconds; infinite where it breaks the demands.
        deadline: monotonic seconds after which no further chain is sought.
    """
    best_s = inf
    for order in depth_first_orders(items):
        low_s, high_s = bound_s, best_s
        for _ in range(NUM_HALVINGS):
            if monotonic() > deadline:
                return
            limit_s = high_s if high_s == inf else (low_s + high_s) / 2
            chain = soonest_chain(items, demands, usage, weights, order, limit_s, delay_s)
            value_s = inf if chain is None else judge(chain)
            if value_s < best_s and chain is not None:
                best_s = value_s
                yield chain
            if value_s < high_s:
                high_s = value_s
            elif limit_s == inf:
                break
            else:
                low_s = limit_s
            if high_s - low_s <= CLOSE * high_s:
                break


def soonest_chain(
    items: Items, demands: Demands, usage: Usage, weights: Floats, order: Ints, limit_s: float, delay_s: float = 0.0
) -> Chain | None:
    """The chain of intervals of the order with loads up to ``limit_s`` and the least sum of block times and delays.

    Its ``value_s`` is that sum, without what the first block waits for the host and the host for the last.
    """
    chain = chain_in_order(items, demands, usage, weights, order, limit_s * (1 + 3 * ROUNDING), delay_s)
    return None if chain is None else replace(chain, value_s=chain.value_s - delay_s)
