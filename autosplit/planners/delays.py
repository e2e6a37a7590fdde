"""Delays: the least time between two ops on different devices, and the longest path of ops, which bounds every latency."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autosplit.costs.problem import HOST, Floats, Problem
from autosplit.planners.clusters import net_edges


@dataclass(frozen=True)
class Delays:
    """The least time from the end of an op to the start of its reader on another device.

    Every value between the two is sent, delayed and received. Where a device computes and transfers at the same time, only the
    delay counts. With replicas, the cheapest pair of devices counts, for a block pays the mean over its devices.
    """

    problem: Problem
    max_replicas: int = 1

    @cached_property
    def _tables(self) -> tuple[Floats, Floats, Floats]:
        """Seconds (fixed, per byte) of sending and receiving, and of delay, between any two ends."""
        t = self.problem.transfers
        moving = 0.0 if self.problem.overlap else 1.0
        tables = [(t.send_s + t.receive_s) * moving, (t.send_s_per_byte + t.receive_s_per_byte) * moving, t.latency_s.copy()]
        if self.max_replicas > 1:
            inner = slice(0, self.problem.num_devices)
            for table in tables:
                table[inner, inner] = table[inner, inner].min()
                table[HOST, inner] = table[HOST, inner].min()
                table[inner, HOST] = table[inner, HOST].min()
        return tables[0], tables[1], tables[2]

    @cached_property
    def edges(self) -> dict[tuple[int, int], tuple[int, float]]:
        """(maker, reader) to the number of values between them and their bytes; either may be HOST."""
        found: dict[tuple[int, int], tuple[int, float]] = {}
        for net in self.problem.nets:
            for reader in set(net.consumers):
                if (net.producer, reader) != (HOST, HOST):
                    count, size = found.get((net.producer, reader), (0, 0.0))
                    found[net.producer, reader] = count + 1, size + net.num_bytes
        return found

    def between(self, maker: int, reader: int) -> Floats:
        """Seconds for each device of the maker (rows) and of the reader (columns), 0 on the same device.

        Shape (num_devices, num_devices), or (1, num_devices) from the host and (num_devices, 1) to it.
        """
        count, size = self.edges[maker, reader]
        fixed, per_byte, delay = self._tables
        table = count * fixed + size * per_byte + delay
        if maker == HOST:
            if self.problem.overlap:
                return table[HOST:, :HOST]
            t = self.problem.transfers
            paid = count * t.receive_s + size * t.receive_s_per_byte
            return np.asarray((paid + t.latency_s)[HOST:, :HOST])
        if reader == HOST:
            t = self.problem.transfers
            paid = (count * t.send_s + size * t.send_s_per_byte) * (not self.problem.overlap)
            return np.asarray((paid + t.latency_s)[:HOST, HOST:])
        table = table[:HOST, :HOST]
        np.fill_diagonal(table, 0.0)
        return table


def critical_path_s(problem: Problem, delays: Delays, lengths: Mapping[int, tuple[int, float]] | None = None) -> float:
    """The longest path with each op on its fastest device, where only transfers from and to the host are paid: a bound.

    ``lengths[op] = other, seconds`` says that at least so many seconds pass from the end of ``op`` to the end of ``other``.
    """
    fastest = problem.compute_s.min(axis=1)
    start_s, least_s, end_s = np.zeros(problem.num_ops), np.zeros(problem.num_ops), 0.0
    after = readers_of(problem)
    for op in range(problem.num_ops):
        if (HOST, op) in delays.edges:
            start_s[op] = max(start_s[op], _least(delays.between(HOST, op)))
        done_s = max(start_s[op] + fastest[op], least_s[op])
        for reader in after[op]:
            start_s[reader] = max(start_s[reader], done_s)
        if lengths and op in lengths:
            goal, seconds = lengths[op]
            least_s[goal] = max(least_s[goal], done_s + seconds)
        end_s = max(end_s, done_s + (_least(delays.between(op, HOST)) if (op, HOST) in delays.edges else 0.0))
    return float(end_s)


def _least(table: Floats) -> float:
    return float(table.min())


def readers_of(problem: Problem) -> list[list[int]]:
    """The readers of each op."""
    after: list[list[int]] = [[] for _ in range(problem.num_ops)]
    for source, target in sorted(net_edges(problem)):
        after[source].append(target)
    return after
