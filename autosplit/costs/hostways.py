"""The way of every value over the hosts of a plan, and the bytes between hosts.

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

from autosplit.costs.problem import HOST, Block, Problem
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


def sent_forward(problem: Problem, blocks: Sequence[Block], home: NDArray[np.int64]) -> list[Sent]:
    """The bytes over each border of blocks in order: every value once, however many blocks read it."""
    hosts = hosts_of(problem)
    chain = Chain.of([tuple(hosts[device] for device in block.devices) for block in blocks])
    num_segments = len(chain.places)
    nets, readers = problem.pins
    segment_of_op = np.array(chain.segment)[home]
    first = np.where(problem.producers == HOST, 0, segment_of_op[problem.producers] + 1)
    last = np.full(len(problem.nets), -1)
    np.maximum.at(last, nets, np.where(readers == HOST, num_segments, segment_of_op[readers]))
    crosses, num_borders = first <= last, num_segments + 1
    begun, ended = (np.bincount(at[crosses], problem.net_bytes[crosses], num_borders + 1) for at in (first, last + 1))
    over = np.cumsum(begun - ended)[:num_borders]
    ends = [(HOST_NAME,), *chain.places, (HOST_NAME,)]
    return [Sent(one, other, num_bytes) for (one, other), num_bytes in zip(pairwise(ends), over.tolist(), strict=True)]
