"""Wires in the cost of a plan: the bytes that pass each wire, and the time of a value from host to host.

The ends of a wire are hosts, or devices and the host: a bus. The two kinds of names differ, so one table of routes holds both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosplit.values.links import Wire


class Sent(NamedTuple):
    """Bytes of one sample that go from one block to another, with the hosts (or the devices) of their replicas, in turns."""

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    num_bytes: float

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The sending and the receiving host of each sample, until the replicas of both blocks are back at their first turn."""
        turns = range(lcm(len(self.senders), len(self.receivers)))
        return [(self.senders[k % len(self.senders)], self.receivers[k % len(self.receivers)]) for k in turns]


def is_device(end: str) -> bool:
    """Whether an end of a wire is a device; else it is a host."""
    return ":" in end


@dataclass(frozen=True)
class Wires:
    """The wires of a machine. Without wires, values between hosts do not slow each other.

    Attributes:
        passing_s: host to the latency that it adds to a value that only passes it, in seconds.
    """

    all: tuple[Wire, ...] = ()
    passing_s: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def routes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """Names of two ends to the numbers of the wires that a value from the first to the second passes.

        Between two stages on one device a value passes the wires of its bus; inside a host it passes none of the host's.
        """
        found: dict[tuple[str, str], tuple[int, ...]] = {}
        for number, wire in enumerate(self.all):
            for pair in product(wire.sources, wire.targets):
                if pair[0] != pair[1] or is_device(pair[0]):
                    found[pair] = (*found.get(pair, ()), number)
        return found

    @cached_property
    def has_bus(self) -> bool:
        """Whether an end of a wire is a device."""
        return any(map(is_device, {end for wire in self.all for end in (*wire.sources, *wire.targets)}))

    def alike(self, one: str, other: str) -> bool:
        """Whether two ends have the same wires."""
        return all((one in ends) == (other in ends) for wire in self.all for ends in (wire.sources, wire.targets))

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
        return sum(max(self.passing_s.get(host, 0.0) for host in place) for place in places[1:-1])


NO_WIRES = Wires()
