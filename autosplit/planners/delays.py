"""Delays: the least time between two ops on different devices, and the longest path of ops, which bounds every latency."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.problem import HOST, Floats, Problem

BYTE_STEPS, MOST_CELLS = 4000, 40_000_000
"""Steps of a memory cap in the longest path; fewer where the table of ops, classes and steps would have more than ``MOST_CELLS``.

Bytes are rounded down to steps, so more steps lose less. 640 million cells took 5 GB and 5 s.
"""


@dataclass(frozen=True)
class Delays:
    """The least time from the end of an op to the start of its reader on another device.

    Every value between the two is sent, delayed and received. If a device computes and transfers at the same time, only the
    delay counts. With replicas, the cheapest pair of devices counts, for a block pays the mean over its devices.
    """

    problem: Problem
    max_replicas: int = 1

    @cached_property
    def _tables(self) -> tuple[Floats, ...]:
        """Seconds (fixed, per byte) that two ends are busy, and of delay; 0 on the same device. The host is never busy."""
        t, devices = self.problem.transfers, slice(0, self.problem.num_devices)
        send, send_byte, receive, receive_byte, delay = (table.copy() for table in t.arrays())
        send[HOST] = send_byte[HOST] = receive[:, HOST] = receive_byte[:, HOST] = 0.0
        moving = 0.0 if self.problem.overlap else 1.0
        tables = (send + receive) * moving, (send_byte + receive_byte) * moving, delay
        for table in tables:
            if self.max_replicas > 1:
                table[devices, devices] = table[devices, devices].min()
            np.fill_diagonal(table, 0.0)
        return tables

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
        (count, size), (fixed, per_byte, delay) = self.edges[maker, reader], self._tables
        rows, columns = (slice(HOST, None) if op == HOST else slice(HOST) for op in (maker, reader))
        return np.asarray(count * fixed + size * per_byte + delay)[rows, columns]

    def between_classes(self, maker: int, reader: int) -> Floats:
        """Seconds from a device of each class (rows) to another device of each class; infinite where there is no other one."""
        count, size = self.edges[maker, reader]
        fixed, per_byte, delay = self._class_tables
        return np.asarray(count * fixed + size * per_byte + delay)

    @cached_property
    def _class_tables(self) -> tuple[Floats, ...]:
        """The tables between two devices of two classes; all such pairs of devices cost the same."""
        fixed, per_byte, delay = self._tables
        return by_class(self.problem, fixed), by_class(self.problem, per_byte), by_class(self.problem, delay, alone=inf)


def by_class(problem: Problem, table: Floats, alone: float = 0.0) -> Floats:
    """A table of devices as one of classes, with two devices of one class on the diagonal; ``alone`` if a class has only one."""
    ends = [(members[0], members[-1]) for members in problem.device_classes]
    found = table[np.ix_([one for one, _ in ends], [one for one, _ in ends])]
    np.fill_diagonal(found, [table[one, other] if one != other else alone for one, other in ends])
    return found


After = Callable[[int, Floats], tuple[int, Floats] | None]
"""From an op and its least end in seconds, by class and bytes, to a later op and the least end of that."""


def critical_path_s(problem: Problem, delays: Delays, after: After = lambda op, end_s: None) -> float:
    """A bound on every latency: the longest path of ops, each on the device that is best for it and for its way there.

    For each op, each class of devices and each amount of bytes, a dynamic program holds the least time at which the op ends on
    such a device, if the ops on a path to it that are on the device with it take up to so many bytes. An op is on the device of
    an op that it reads, within the memory cap, or it waits for the transfer. So a path with more bytes than a device holds pays
    for some of its transfers. Bytes are rounded down to whole steps.

    Args:
        problem: the ops in topological order.
        delays: between ops on two devices.
        after: gives further bounds on a later op. Arrays have the shape (num_classes, steps of bytes + 1).
    """
    firsts = problem.representatives
    binds, size, most = byte_steps(problem, delays)
    ends: list[Floats] = []
    known_s, last_s = dict[int, Floats](), 0.0
    for op in range(problem.num_ops):
        begin_s = np.zeros((len(firsts), int(most.max()) + 1))
        if (HOST, op) in delays.edges:
            begin_s[:] = delays.between(HOST, op)[0, firsts, None]
        for maker in problem.makers[op]:
            moved_s = (ends[maker][:, -1:] + delays.between_classes(maker, op)).min(axis=0)
            stay_s = np.minimum(_shifted(ends[maker], size[op], binds), moved_s[:, None])
            np.maximum(begin_s, stay_s, out=begin_s)
        end_s = np.maximum(begin_s + problem.compute_s[op, firsts, None], known_s.pop(op, 0.0))
        for k in np.flatnonzero(binds):
            end_s[k, : size[op]] = inf
            end_s[k, most[k] + 1 :] = end_s[k, most[k]] if size[op] <= most[k] else inf
        ends.append(end_s)
        if (found := after(op, end_s)) is not None:
            known_s[found[0]] = np.maximum(found[1], known_s.get(found[0], 0.0))
        out_s = delays.between(op, HOST)[firsts, 0] if (op, HOST) in delays.edges else 0.0
        last_s = max(last_s, float((end_s[:, -1] + out_s).min()))
    return last_s


def byte_steps(problem: Problem, delays: Delays) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
    """Bytes as whole steps, rounded down: the classes whose cap binds, the steps of each op, and of the cap of each class.

    No cap binds where blocks may have replicas. The cap of a class whose cap does not bind is 0 steps.
    """
    caps = problem.memory_bytes[problem.representatives]
    binds = np.isfinite(caps) & (caps * (1 + TOLERANCE) < problem.op_bytes.sum()) & (delays.max_replicas == 1)
    num_steps = min(BYTE_STEPS, max(1, MOST_CELLS // (problem.num_ops * len(caps))))
    step = max(float(caps[binds].max()) / num_steps, 1e-300) if binds.any() else inf
    most = np.floor(np.where(binds, caps, 0.0) * (1 + TOLERANCE) / step)
    return binds, np.floor(problem.op_bytes / step).astype(np.int64), most.astype(np.int64)


def _shifted(ends_s: Floats, size: int, binds: NDArray[np.bool_]) -> Floats:
    """The least times by bytes after an op of ``size`` steps has joined, where a cap binds."""
    if not size or not binds.any():
        return ends_s
    found = ends_s.copy()
    found[binds, size:] = ends_s[binds, : max(0, ends_s.shape[1] - size)]
    found[binds, :size] = inf
    return found
