"""solve_noncontiguous(): any op on any device; the search and the proof run side by side and tell each other.

Where the problem is a hypergraph, descents by resplits find the plan and column generation proves it. Every other problem gets
the bound of the hypergraph below it, and its plan from the true evaluator.
"""

import threading
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic

import numpy as np

from autosplit.costs.problem import Block, Problem, Solution
from autosplit.errors import InfeasibleError
from autosplit.planners import jit
from autosplit.planners.incumbent import Search
from autosplit.planners.items import Ints
from autosplit.planners.noncontiguous.column_generation import rising_bound
from autosplit.planners.noncontiguous.hypergraph import Hypergraph, hypergraph_of
from autosplit.planners.noncontiguous.local_search import descents
from autosplit.planners.noncontiguous.polishing import polish
from autosplit.values.constraints import Demands

HEAD_START = 0.1
"""Share of the time that the search has for itself before the proof begins, at most a few seconds."""


class _Search(Search):
    """The best plan and bound known, shared by two threads; plans are assignments of the graph's items."""

    def __init__(self, problem: Problem, graph: Hypergraph, started: float, deadline: float, say: Callable[[str], None]) -> None:
        super().__init__(problem, Demands(contiguous=False), started, deadline, say)
        self.graph, self.lock = graph, threading.Lock()

    def offer_home(self, home: Ints, method: str) -> None:
        """Keep an assignment if its true cost is lower."""
        with self.lock:
            self.offer(self.graph.blocks(home), method)

    def prove(self, bound_s: float, method: str) -> None:
        """Keep a bound if it is higher."""
        with self.lock:
            super().prove(bound_s, method)

    @property
    def home(self) -> Ints | None:
        """The best assignment."""
        return self.graph.home(self.problem, self.blocks) if self.blocks else None

    def best(self) -> tuple[float, Ints | None]:
        """The load of the best plan, and its assignment where that is also the hypergraph's."""
        with self.lock:
            return self.objective_s, self.home if self.graph.exact else None

    def over(self) -> bool:
        """Whether there is nothing left to do, or no time."""
        return self.closed or self.left_s <= 0


@jit.interruptible()
def solve_noncontiguous(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    log: Callable[[str], None] | None = None,
    starts: Sequence[Sequence[Block]] = (),
) -> Solution:
    """The best assignment of ops to devices found within the time limit, with a bound on all of them.

    A device may hold any set of ops, so that the blocks need not be convex. Replicas are not considered, and the bound does
    not hold for plans that have them.

    Args:
        problem: ops, devices, costs and rules.
        time_limit_s: seconds after which the best plan so far is returned.
        seed: of everything random.
        log: called with a line for each step.
        starts: plans known already, one device a block; contiguous ones are good starts.
    Returns: at most one block for each device, by device; status ``optimal`` when bound and objective meet.
    Raises: InfeasibleError: no plan that keeps all rules was found.
    """
    started = monotonic()
    graph = hypergraph_of(problem)
    search = _Search(problem, graph, started, started + time_limit_s, log or (lambda line: None))
    homes = [home for blocks in starts if (home := graph.home(problem, blocks)) is not None]
    homes += [np.full(graph.num_items, device, dtype=np.int64) for device in range(problem.num_devices)]
    homes.append(np.where(np.isfinite(graph.compute_s), graph.compute_s, np.inf).argmin(axis=1))
    for home in homes:
        search.offer_home(home, "start")
    refused = [op for op in range(problem.num_ops) if not np.isfinite(graph.compute_s[graph.item_of[op]]).any()]
    if refused:
        raise InfeasibleError(f"no plan fits: op '{problem.ops[refused[0]]}' cannot run on any device. Allow it on one.")
    proof = threading.Thread(target=_prove, args=(search, min(3.0, HEAD_START * time_limit_s)), daemon=True)
    starting = homes[: len(starts)]
    try:
        proof.start()
        if graph.exact:
            for _, home in descents(graph, starting, seed=seed, halt=search.over):
                search.offer_home(home, "resplitting")
        else:
            _search_beyond(search, starting or homes[-1:], seed, time_limit_s)
        proof.join()
    except BaseException:
        search.objective_s = search.deadline = 0.0  # nothing is better, so the proof ends when it next asks
        raise
    if not search.blocks:
        raise InfeasibleError(
            "no plan fits: no assignment was found that keeps all memory caps and rules together. Relax one of them."
        )
    return search.solution()


def _prove(search: _Search, delay_s: float) -> None:
    """Raise the bound until all is over; wait first for a plan worth proving."""
    begin = monotonic() + delay_s
    while (monotonic() < begin or search.best()[0] == inf) and not search.over():
        threading.Event().wait(0.01)
    rising_bound(search.graph, search.best, search.prove, search.deadline)


def _search_beyond(search: _Search, starts: list[Ints], seed: int, time_limit_s: float) -> None:
    """Look on the hypergraph below the problem for good starts, then walk from them by the true evaluator."""
    begin = monotonic()
    for _, home in descents(
        search.graph, starts, seed=seed, halt=lambda: search.over() or monotonic() > begin + 0.2 * time_limit_s, num_moves=50_000
    ):
        search.offer_home(home, "resplitting")
        starts = [*starts[-2:], home]
    if (known := search.home) is not None:
        starts = [*starts, known]
    number = 0
    while not search.over():
        number += 1
        _, found = polish(search.problem, search.graph, starts, seed=seed + number, halt=search.over, max_tries=4000)
        if found is not None:
            search.offer_home(found, "polishing")
            starts = [found, *([known] if (known := search.home) is not None else [])]
