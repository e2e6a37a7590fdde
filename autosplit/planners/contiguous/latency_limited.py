"""Chains that hold a latency limit: along one order, the chain of least latency among those with a largest load below T.

T is found by bisection. The dynamic program takes the latency as the sum of all block times and the delays between blocks. Where
branches run side by side, the true latency is shorter. So every chain that it finds holds the limit, but it may miss some.
"""

from collections.abc import Callable, Iterator
from math import inf

from autosplit.costs.problem import Floats
from autosplit.planners.clock import now
from autosplit.planners.contiguous.device_usage import Usage
from autosplit.planners.contiguous.growing_block import ROUNDING
from autosplit.planners.contiguous.linear import Chain, chain_in_order, topological_orders
from autosplit.planners.items import Items
from autosplit.values.constraints import Demands

NUM_HALVINGS = 24
CLOSE = 1e-4
"""The bisection ends where its ends differ by this share."""


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
    """Chains that hold the latency limit, each better than the one before, along several topological orders.

    Args:
        items: the items of the chain.
        demands: the limits on a plan.
        usage: the devices.
        weights: multipliers of the classes, for pruning.
        delay_s: seconds that a value is on its way between two blocks; the largest where they differ.
        bound_s: a bound on the largest load.
        judge: the largest load of a chain, in seconds; infinite where it breaks the demands.
        deadline: second of ``now()`` after which no further chain is sought.
    """
    best_s = inf
    for order in topological_orders(items):
        low_s, high_s = bound_s, best_s
        for _ in range(NUM_HALVINGS):
            if now() > deadline:
                return
            limit_s = high_s if high_s == inf else (low_s + high_s) / 2
            chain = chain_in_order(items, demands, usage, weights, order, limit_s * (1 + 3 * ROUNDING), delay_s=delay_s)
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
