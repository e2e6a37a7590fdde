"""Wires in the cost of a plan: the bytes that pass each wire, and the time of a value from host to host."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosplit.values.links import Link, Wire
from autosplit.values.machine import HOST as HOST_NAME

HOST = -1
"""The calling process, which feeds and drains: an op in nets, a block, a device in transfer matrices (there the last index)."""


class Sent(NamedTuple):
    """Bytes of one sample that go from one block to another, with the hosts of their replicas, which take turns."""

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    num_bytes: float

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The sending and the receiving host of each sample, until the replicas of both blocks are back at their first turn."""
        turns = range(lcm(len(self.senders), len(self.receivers)))
        return [(self.senders[k % len(self.senders)], self.receivers[k % len(self.receivers)]) for k in turns]


@dataclass(frozen=True)
class Wires:
    """The wires of a machine. Without wires, values between hosts do not slow each other.

    Attributes:
        all: the wires.
        passing: host to the link for a value that only passes it; the device that pays there sends and receives.
    """

    all: tuple[Wire, ...] = ()
    passing: Mapping[str, Link] = field(default_factory=dict)

    @cached_property
    def routes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """Names of two hosts to the numbers of the wires that a value from the first to the second passes."""
        found: dict[tuple[str, str], tuple[int, ...]] = {}
        for number, wire in enumerate(self.all):
            for pair in product(wire.sources, wire.targets):
                if pair[0] != pair[1]:
                    found[pair] = (*found.get(pair, ()), number)
        return found

    def loads_s(self, sent: Iterable[Sent]) -> NDArray[np.float64]:
        """Seconds per sample that each wire is busy, shape (num_wires,)."""
        passed_bytes: NDArray[np.float64] = np.zeros(len(self.all))
        for one in sent:
            pairs = one.pairs
            for pair in pairs:
                passed_bytes[list(self.routes.get(pair, ()))] += one.num_bytes / len(pairs)
        return passed_bytes * np.array([wire.s_per_byte for wire in self.all], dtype=np.float64)

    def s_per_byte(self, source: str, target: str) -> float:
        """Seconds per byte from one host to another on idle wires: the figure of the slowest wire between them."""
        return max((self.all[number].s_per_byte for number in self.routes.get((source, target), ())), default=0.0)

    def way_s_per_byte(self, places: Sequence[Sequence[str]]) -> float:
        """Seconds per byte on idle wires from place to place; each place is the hosts of which a sample visits one."""
        return sum(max(self.s_per_byte(*pair) for pair in product(*hop)) for hop in pairwise(places))

    def passing_latency_s(self, places: Sequence[Sequence[str]]) -> float:
        """Seconds of latency that the hosts between the first and the last place add."""
        return sum(max(self.passing[host].latency_s if host in self.passing else 0.0 for host in place) for place in places[1:-1])


NO_WIRES = Wires()


@dataclass(frozen=True)
class Chain:
    """Blocks in order, cut where the hosts of their replicas change, as ``clusters.segments`` cuts stages.

    Attributes:
        segment: the segment of each block.
        places: the hosts of each segment, one for each replica.

    >>> chain = Chain.of([("a",), ("a",), ("b",), ("c",)])
    >>> chain.segment, chain.way(0, 3), chain.way(HOST, 1)
    ((0, 0, 1, 2), (('a',), ('b',), ('c',)), (('host',), ('a',)))
    """

    segment: tuple[int, ...]
    places: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(places: Sequence[tuple[str, ...]]) -> "Chain":
        """The chain of blocks with these hosts."""
        changes = [number > 0 and place != places[number - 1] for number, place in enumerate(places)]
        kept = tuple(place for number, place in enumerate(places) if not number or changes[number])
        return Chain(tuple(accumulate(map(int, changes))), kept)

    def way(self, source: int, target: int) -> tuple[tuple[str, ...], ...]:
        """The hosts from one block to a later one, place by place; HOST is before all blocks and behind them."""
        start = -1 if source == HOST else self.segment[source]
        end = len(self.places) if target == HOST else self.segment[target]
        if end < start:  # blocks that are no chain
            return self.places[start], self.places[end]
        ends = ((HOST_NAME,), *self.places, (HOST_NAME,))
        return ends[start + 1 : end + 2]
