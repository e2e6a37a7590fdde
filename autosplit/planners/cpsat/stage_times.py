"""The duration and the start of each block in a CP-SAT model of slots: the shortest stage, and the latency of one sample.

The constraints follow ``cost.evaluate`` and ``cost.latency_s`` where linear constraints can. If they cannot, they are weaker,
so that a refutation by the solver holds.
"""

from collections.abc import Iterator, Sequence
from math import floor
from typing import Any

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.problem import HOST
from autosplit.planners.cpsat.slots import Slots
from autosplit.planners.cpsat.solver import MOST_STEPS

Moved = list[list[Any]]


class TimedSlots(Slots):
    """Slots whose times are known.

    Attributes:
        work: ``work[slot][type]``, compute of the slot there, in steps.
        moved: ``moved[slot][type]``, its transfers, in steps.
        scale: steps in a second.
    """

    work: Moved
    moved: Moved
    scale: float

    def _parts(self, work: Any, moved: Any) -> list[Any]:
        """The times whose maximum keeps a device busy, of steps of compute and of transfers."""
        return [work, moved] if self.problem.overlap else [work + moved]

    def least_stage(self, least_s: float) -> None:
        """Every used slot takes at least ``least_s`` seconds for a sample. Slots have one device each."""
        num_rounded = self.instance.num_items + 2 * len(self.problem.pins[0]) * (self.num_slots + 1)
        least = floor(min(least_s * self.scale * (1 - TOLERANCE), MOST_STEPS)) - num_rounded
        for s in range(self.num_slots):
            reasons = [self.used[s].Not()]
            for k, chosen in enumerate(self.chosen[s]):
                for part in self._parts(self.work[s][k], self.moved[s][k]):
                    reasons.append(self.model.NewBoolVar(""))
                    self.model.AddImplication(reasons[-1], chosen)
                    self.model.Add(part >= least).OnlyEnforceIf(reasons[-1])
            self.model.AddBoolOr(reasons)

    def makespan(self, most_s: float) -> Any:
        """A variable that is at least the steps of one sample through the slots, and at most ``most_s``."""
        total = self.model.NewIntVar(0, int(min(most_s * self.scale * (1 + TOLERANCE) + 1, MOST_STEPS)), "makespan")
        busy = []
        for s in range(self.num_slots):
            seconds = self.model.NewIntVar(0, int(MOST_STEPS), "")
            for k, chosen in enumerate(self.chosen[s]):
                for part in self._parts(self.work[s][k], self.moved[s][k]):
                    self.model.Add(seconds >= part).OnlyEnforceIf(chosen)
            busy.append(seconds)
        begin = [self.model.NewIntVar(0, int(MOST_STEPS), "") for _ in busy]
        end = [start + seconds for start, seconds in zip(begin, busy, strict=True)]
        for last in end:
            self.model.Add(total >= last)
        if self.demands.contiguous and set(self.problem.edges) <= set(self.problem.order):  # other blocks run in pieces
            self._waits(begin, end, total)
        return total

    def _waits(self, begin: Sequence[Any], end: Sequence[Any], total: Any) -> None:
        """A slot begins after the slots that it reads from, with a delay between them, and once its devices are free."""
        for s in range(self.num_slots):
            arrives, leaves = self._host(s)
            for k, chosen in enumerate(self.chosen[s]):
                there = self._delay_of(HOST, self.types[k][0])
                back = self._delay_of(self.types[k][0], HOST)
                if arrives is not None and there:
                    self.model.Add(begin[s] >= there).OnlyEnforceIf(arrives, chosen)
                if leaves is not None and back:
                    self.model.Add(total >= end[s] + back).OnlyEnforceIf(leaves, chosen)
            for t in range(s + 1, self.num_slots):
                reads = self._reads(s, t)
                self.model.Add(begin[t] >= end[s]).OnlyEnforceIf(reads)
                for wait, flags in self._delays(s, t):
                    self.model.Add(begin[t] >= end[s] + wait).OnlyEnforceIf(reads, *flags)
                if self.demands.reuse:
                    for one, other in zip(self.chosen[s], self.chosen[t], strict=True):
                        self.model.Add(begin[t] >= end[s]).OnlyEnforceIf(one, other)

    def _floor(self, seconds: float) -> int:
        return floor(min(seconds * self.scale * (1 - 1e-12), MOST_STEPS / 10))

    def _delay_of(self, sender: int, receiver: int) -> int:
        return self._floor(float(self.problem.transfers.latency_s[sender, receiver]))

    def _delays(self, s: int, t: int) -> Iterator[tuple[int, list[Any]]]:
        """The delay in steps from slot s to slot t, with the types for which it holds."""
        cases = [(self._delay_of(*pair), [self.chosen[s][k], self.chosen[t][j]]) for k, j, pair in self.pairs]
        if len({wait for wait, _ in cases}) == 1:
            cases = [(cases[0][0], [])]
        yield from ((wait, flags) for wait, flags in cases if wait)

    def _host(self, s: int) -> tuple[Any, Any]:
        """Whether slot s reads from the host, and whether it sends there; None where no op does."""
        home = self.item_of
        flags: list[Any] = []
        for ops in (
            {op for net in self.problem.nets if net.producer == HOST for op in net.consumers if op != HOST},
            {net.producer for net in self.problem.nets if HOST in net.consumers and net.producer != HOST},
        ):
            flags.append(self.model.NewBoolVar("") if ops else None)
            for item in {home[op] for op in ops}:
                self.model.Add(flags[-1] >= self.inside[item][s])
        return flags[0], flags[1]

    def _reads(self, s: int, t: int) -> Any:
        """Whether slot t reads anything that slot s makes."""
        home, inside = self.item_of, self.inside
        reads = self.model.NewBoolVar("")
        for maker, reader in {(home[a], home[b]) for a, b in self.problem.edges if home[a] != home[b]}:
            self.model.Add(reads >= inside[maker][s] + inside[reader][t] - 1)
        return reads
