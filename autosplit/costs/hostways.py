"""HostWays: the way of every value over the hosts of a plan, the bytes between hosts, and the work of hosts that values pass.

::

    blocks     on a | on a | on b | on c        blocks with the same hosts are one segment
    segments   0           | 1    | 2           a value from block 0 to block 3 passes host b
    borders  0             1      2      3      inputs come over border 0, outputs leave over the last one

Values go from segment to segment in order, as ``clusters.segments`` runs them. The calling process is before the first segment
and behind the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import HOST, Block, Floats, Problem
from autosplit.costs.wires import Sent
from autosplit.values.machine import HOST as HOST_NAME
from autosplit.values.machine import host_of


def hosts_of(problem: Problem) -> list[str]:
    """The name of the host of each device; the last name is ``host`` itself."""
    return [*map(host_of, problem.devices), HOST_NAME]


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


@dataclass(frozen=True)
class HostWays:
    """The way of each value over the segments of blocks.

    Attributes:
        problem: the problem.
        chain: the blocks in segments.
        first, last: the first and the last border that each net crosses; it crosses none if the last is before the first.
        read: the nets and the segments with a reader of them, as two arrays.
    """

    problem: Problem
    chain: Chain
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    read: tuple[NDArray[np.int64], NDArray[np.int64]]

    @staticmethod
    def of(problem: Problem, blocks: Sequence[Block], home: NDArray[np.int64]) -> "HostWays":
        """The ways over blocks in order; ``home`` is the block of each op."""
        hosts = hosts_of(problem)
        chain = Chain.of([tuple(hosts[device] for device in block.devices) for block in blocks])
        num_segments = len(chain.places)
        nets, readers = problem.pins
        segment_of_op = np.array(chain.segment)[home]
        made_in = np.where(problem.producers == HOST, -1, segment_of_op[problem.producers])
        read_in = np.where(readers == HOST, num_segments, segment_of_op[readers])
        last = np.full(len(problem.nets), -1)
        np.maximum.at(last, nets, read_in)
        width = num_segments + 1
        pairs = np.unique(nets * width + read_in)
        return HostWays(problem, chain, made_in + 1, last, (pairs // width, pairs % width))

    def sent(self) -> list[Sent]:
        """What goes over each border: every value once, however many blocks read it."""
        ends = [(HOST_NAME,), *self.chain.places, (HOST_NAME,)]
        over = self._over(self.last + 1, self.problem.net_bytes)
        return [Sent(one, other, num_bytes) for (one, other), num_bytes in zip(pairwise(ends), over.tolist(), strict=True)]

    def passing_s(self) -> dict[int, list[float]]:
        """Seconds for one sample that each replica of a block spends on values that only pass its host.

        The first block of a segment pays, and blocks that pay nothing are left out.
        """
        counts, num_bytes = self._passing(np.ones(len(self.problem.nets))), self._passing(self.problem.net_bytes)
        found = {}
        for number in np.flatnonzero(counts > 0.5).tolist():
            links = [self.problem.wires.passing.get(host) for host in self.chain.places[number]]
            found[self.chain.segment.index(number)] = [
                counts[number] * (link.receive_s + link.send_s)
                + num_bytes[number] * (link.receive_s_per_byte + link.send_s_per_byte)
                if link
                else 0.0
                for link in links
            ]
        return found

    def _passing(self, amounts: Floats) -> Floats:
        """The sum over the nets that come into each segment, are not read there, and go on, shape (num_segments,)."""
        nets, segments = self.read
        stays = (self.first[nets] <= segments) & (segments < self.last[nets])
        width = len(self.chain.places) + 1
        return (self._over(self.last, amounts) - np.bincount(segments[stays], amounts[nets[stays]], width))[:-1]

    def _over(self, end: NDArray[np.int64], amounts: Floats) -> Floats:
        """The sum over the nets whose borders from the first to before ``end`` hold each border, shape (num_segments + 1,)."""
        crosses, width = self.first < end, len(self.chain.places) + 2
        begun, ended = (np.bincount(at[crosses], amounts[crosses], width) for at in (self.first, end))
        return np.asarray(np.cumsum(begun - ended)[:-1])
