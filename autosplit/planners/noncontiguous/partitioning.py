"""Partition the hypergraph of a problem over its devices: the search and the proof run side by side and share their bounds.

If the problem is a hypergraph, descents by resplits find the plan and column generation proves it. Every other problem gets
the bound of a hypergraph that costs no more, and its plan from the true evaluator. Replicas are not considered, and the bound
does not hold for plans that have them.
"""

from math import inf
from threading import Event, Thread

import numpy as np

from autosplit.planners.clock import counts_work, halfway, now
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.instance import Instance
from autosplit.planners.loads import Ints
from autosplit.planners.noncontiguous.column_generation import rising_bound
from autosplit.planners.noncontiguous.hypergraph import blocks_at, home_of, hypergraph_of
from autosplit.planners.noncontiguous.local_search import descents
from autosplit.planners.row_annealing import anneal_rows


def partition(incumbent: Incumbent, deadline: float) -> None:
    """At most one block for each device, of any ops, and a bound on all such plans."""
    if now() < deadline:
        _Partition(incumbent, deadline).run()


def walk_once(incumbent: Incumbent, deadline: float) -> None:
    """One walk by resplits from the best plan: a search for chains ends sooner below what it finds."""
    if now() < deadline:
        _Partition(incumbent, deadline).walk(deadline, endless=False)


class _Partition:
    """One call: the hypergraph, the incumbent that search and proof share, and when they end."""

    def __init__(self, incumbent: Incumbent, deadline: float) -> None:
        self.incumbent, self.deadline = incumbent, deadline
        self.graph: Instance = hypergraph_of(incumbent.problem)
        self.interrupted = False

    def run(self) -> None:
        if counts_work():  # one thread: the order of looks at the clock decides the answer
            self._search(halfway(self.deadline))
            rising_bound(self.graph, self._best, self.incumbent.prove, self.deadline)
            return
        proof = Thread(target=self._prove, daemon=True)
        try:
            proof.start()
            self._search(self.deadline)
            proof.join()
        except BaseException:
            self.interrupted = True  # the proof ends when it next asks
            raise

    def _search(self, until: float) -> None:
        """Walks; if the hypergraph costs less than the problem, annealing by the true evaluator goes on from the last plans."""
        starts = self.walk(until if self.graph.exact else halfway(until))
        if not self.graph.exact:
            rows = [blocks_at(self.graph, home) for home in starts]
            anneal_rows(self.incumbent, until, rows, endless=True)

    def walk(self, until: float, endless: bool = True) -> list[Ints]:
        """Walk from the best plan, or from every item on its fastest device. Returns: the last assignments."""
        fastest = np.array([members[0] for members in self.graph.classes])[self.graph.compute_s.argmin(axis=1)]
        start = self._home()
        self._offer(fastest, "start")
        starts = [fastest if start is None else start]
        walks = descents(
            self.graph, starts, seed=self.incumbent.seed, halt=lambda: self._is_over() or now() > until, endless=endless
        )
        for _, home in walks:
            self._offer(home, "resplitting")
            starts = [*starts[-2:], home]
        return starts

    def _offer(self, home: Ints, method: str) -> None:
        self.incumbent.offer(blocks_at(self.graph, home), method)

    def _home(self) -> Ints | None:
        """The assignment of the best plan."""
        return home_of(self.graph, self.incumbent.blocks) if self.incumbent.blocks else None

    def _best(self) -> tuple[float, Ints | None]:
        """The load of the best plan, and its assignment where the hypergraph is exact; 0 s ends the proof."""
        if self.interrupted:
            return 0.0, None
        with self.incumbent.lock:
            return self.incumbent.objective_s, self._home() if self.graph.exact else None

    def _is_over(self) -> bool:
        return self.interrupted or self.incumbent.closed or now() >= self.deadline

    def _prove(self) -> None:
        """Raise the bound until the end; wait first for a plan."""
        while self._best()[0] == inf and not self._is_over():
            Event().wait(0.01)
        rising_bound(self.graph, self._best, self.incumbent.prove, self.deadline)
