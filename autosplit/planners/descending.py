"""Descending: resplit two devices after another, from many starts, until nothing gives any more.

An iterated local search (Lourenco, Martin and Stuetzle 2003). The devices above the target are resplit with others; between
times any two devices are resplit so that one of them becomes as light as the other allows, which carries slack to where
it is needed.
"""

from collections.abc import Callable, Iterator

import numpy as np

from autosplit.planners.annealing import anneal, random_home
from autosplit.planners.hypergraph import Hypergraph
from autosplit.planners.items import Ints
from autosplit.planners.resplitting import resplit

STEPS = (0.01, 0.003, 0.001, 0.0003, 0.0001)
"""By how much of the best value the target is below it; drawn anew for each try."""


def descend(graph: Hypergraph, home: Ints, *, seed: int, patience: int, halt: Callable[[], bool]) -> tuple[float, Ints]:
    """The best load and assignment met on a walk by resplits from `home`, after `patience` of them in vain.

    Args:
        graph: items, nets and devices.
        home: device of each item, within the memory caps.
        seed: of the walk.
        patience: resplits without a better value after which the walk ends.
        halt: asked before each resplit.
    """
    rng = np.random.default_rng(seed)
    loads = graph.loads_s(home)
    best_s, best, vain = float(loads.max()), home, 0
    while vain < patience and not halt() and graph.num_devices > 1:
        target_s = best_s * (1.0 - STEPS[int(rng.integers(len(STEPS)))])
        above = np.flatnonzero(loads > target_s)
        one = int(rng.choice(above)) if len(above) and rng.random() < 0.6 else int(rng.integers(graph.num_devices))
        other = int(rng.integers(graph.num_devices - 1))
        other += other >= one
        highest_s = max(loads[one], loads[other])
        lean = 0.5 if highest_s > target_s else float(rng.integers(2))
        limit_s = max(highest_s, target_s) * (1.0 + 1e-12)
        vain += 1
        found = resplit(graph, home, one, other, limit_s=limit_s, lean=lean, seed=int(rng.integers(1 << 30)))
        if found is None:
            continue
        home, loads[one], loads[other] = found
        if loads.max() < best_s * (1.0 - 1e-9):
            best_s, best, vain = float(loads.max()), home, 0
    return best_s, best


def descents(
    graph: Hypergraph, starts: list[Ints], *, seed: int, halt: Callable[[], bool], num_moves: int = 300_000
) -> Iterator[tuple[float, Ints]]:
    """Better and better assignments: from the starts, from random ones, and from the best one shaken.

    Args:
        graph: items, nets and devices.
        starts: assignments to begin with.
        seed: of everything random.
        halt: asked often; the iteration ends when it says so.
        num_moves: proposals of the annealing that precedes each walk.
    """
    rng = np.random.default_rng(seed)
    best_s, best = np.inf, None
    patience = 30 * graph.num_devices * max(1, graph.num_devices - 1) // 2
    for number in range(1 << 30):
        if halt():
            return
        fresh_seed = int(rng.integers(1 << 30))
        if number < len(starts):
            home = starts[number]
        elif best is None or number % 2:
            home = anneal(graph, random_home(graph, fresh_seed), seed=fresh_seed, num_moves=num_moves).home
        else:
            heat = float(rng.choice([0.001, 0.003, 0.01, 0.03]))
            home = anneal(graph, best, seed=fresh_seed, num_moves=num_moves // 10, heat=heat).home
        if not graph.fits(home):
            continue
        value_s, home = descend(graph, home, seed=fresh_seed, patience=patience, halt=halt)
        if value_s < best_s:
            best_s, best = value_s, home
            yield value_s, home
