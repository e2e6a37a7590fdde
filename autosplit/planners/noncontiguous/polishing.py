"""Polishing: annealing by the true evaluator, where a hypergraph is not exact.

That is so for costs that depend on the device at the other end, a price for each destination, transfers beside compute, shared
weights, and pools of memory. Each try evaluates the whole assignment, so this is for small problems and last steps.
"""

from collections.abc import Callable, Sequence

import numpy as np

from autosplit.costs.cost import evaluate
from autosplit.costs.faults import find_faults
from autosplit.costs.problem import Problem
from autosplit.planners.items import Ints
from autosplit.planners.noncontiguous.hypergraph import Hypergraph


def polish(
    problem: Problem,
    graph: Hypergraph,
    starts: Sequence[Ints],
    *,
    seed: int,
    halt: Callable[[], bool],
    max_tries: int,
) -> tuple[float, Ints | None]:
    """The best assignment on walks from the starts, taken in turn, and its largest load in seconds.

    Every rule that an assignment breaks costs a penalty, which leads walks back to plans.

    Args:
        problem: what assignments are evaluated on.
        graph: its items are moved, along its nets.
        starts: assignments of items.
        seed: of the walk.
        halt: asked before each try.
        max_tries: evaluations at most.
    """
    rng = np.random.default_rng(seed)
    states = [_State(problem, graph, start.copy()) for start in starts]
    best_s, best = min(((state.value_s, state.home.copy()) for state in states if not state.faults), default=(np.inf, None),
                       key=lambda found: found[0])  # fmt: skip
    scale = max(min((state.value_s for state in states), default=0.0), 1e-300)
    for number in range(max_tries):
        if halt() or not states:
            break
        state = states[number // 50 % len(states)]
        heat = scale * 0.02 * 0.001 ** ((number % 4000) / 4000)
        item = int(rng.integers(graph.num_items))
        nets = graph.nets(item)
        moved = [item]
        if len(nets) and rng.random() < 0.5:
            pins = graph.pins(int(rng.choice(nets)))
            goal = int(state.home[rng.choice(pins)])
            if rng.random() < 0.3:
                moved = [int(other) for other in pins if state.home[other] == state.home[item]]
        else:
            goal = int(rng.integers(graph.num_devices))
        home = state.home.copy()
        home[moved] = goal
        if np.array_equal(home, state.home) or not np.isfinite(graph.compute_s[moved, goal]).all():
            continue
        fresh = _State(problem, graph, home)
        change = fresh.value_s - state.value_s + scale * (fresh.faults - state.faults)
        if change <= 0 or rng.random() < np.exp(-change / heat):
            states[number // 50 % len(states)] = fresh
            if not fresh.faults and fresh.value_s < best_s:
                best_s, best = fresh.value_s, home.copy()
    return best_s, best


class _State:
    """An assignment with its largest load and the number of rules it breaks."""

    __slots__ = ("faults", "home", "value_s")

    def __init__(self, problem: Problem, graph: Hypergraph, home: Ints) -> None:
        blocks = graph.blocks(home)
        self.home = home
        self.faults = len(find_faults(problem, blocks, contiguous=False))
        self.value_s = evaluate(problem, blocks).bottleneck_s
