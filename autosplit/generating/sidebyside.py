"""SideBySide: several generators with the same weights as one; a sequence goes to the one with the fewest, and stays there."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from autosplit.generating.generators import Generator
from autosplit.generating.sequences import Generation
from autosplit.generating.tallies import Tally
from autosplit.values.plan import Plan


class SideBySide(Generator):
    """Generators whose pipelines are the replicas of a plan. Keys and values of a sequence are in the caches of one.

    Args:
        generators: at least one; they are closed with this one.
        plan: the stages with their replicas.
    """

    def __init__(self, generators: Sequence[Generator], plan: Plan) -> None:
        # no thread and no scheduler of its own: each generator has them
        self.generators, self.plan, self.pipeline = tuple(generators), plan, generators[0].pipeline
        self.graph, self.texts = generators[0].graph, generators[0].texts
        most = sum(one.capacity.max_sequences for one in generators)
        self.capacity = replace(generators[0].capacity, max_sequences=most)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return sum(one.num_waiting for one in self.generators)

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return sum(one.num_running for one in self.generators)

    @contextmanager
    def tallies(self) -> Iterator[Sequence[Tally]]:
        """The counts of all generators; as ``Generator.tallies``."""
        with ExitStack() as held:
            yield [tally for one in self.generators for tally in held.enter_context(one.tallies())]

    def close(self, *, drain: bool = True) -> None:
        """Close all generators; as ``Generator.close``."""
        with ExitStack() as closing:
            for one in self.generators:
                closing.callback(one.close, drain=drain)

    def submit_all(self, generations: Sequence[Generation], timeout_s: float | None = None) -> None:
        """Take in sequences, each in the generator with the fewest; as ``Generator.submit_all``."""
        counts = [one.num_running + one.num_waiting for one in self.generators]
        shares: list[list[Generation]] = [[] for _ in counts]
        for generation in generations:
            number = counts.index(min(counts))
            counts[number] += 1
            shares[number].append(generation)
        for one, share in zip(self.generators, shares, strict=True):
            one.submit_all(share, timeout_s)
