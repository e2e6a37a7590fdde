"""The latency of a row of blocks, compiled: annealing evaluates it a hundred thousand times.

It equals ``cost.latency_s`` where every block has one device and every value is made before it is read; all other rows are
evaluated by ``cost.latency_s`` itself.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.cost import block_of, latency_s
from autosplit.costs.problem import HOST, Block, Floats, Problem
from autosplit.planners.items import Ints, Table
from autosplit.planners.jit import compiled


class LatencyEvaluator:
    """Evaluates the latency of blocks of one problem, in seconds."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        readers = Table.of([net.consumers for net in problem.nets])
        self._nets = problem.producers, readers.start, readers.data, problem.net_bytes
        self._free = np.zeros(problem.num_devices)
        self._compute = np.ascontiguousarray(problem.compute_s)

    def latency_s(self, blocks: Sequence[Block]) -> float:
        """Equal to ``cost.latency_s`` but for rounding; infinite where an op cannot run on its device."""
        if all(len(block.devices) == 1 for block in blocks):
            home = block_of(self._problem, blocks)
            device = np.array([block.devices[0] for block in blocks], dtype=np.int64)
            t, size = self._problem.transfers, len(blocks) + 1
            tables = t.send_s, t.send_s_per_byte, t.receive_s, t.receive_s_per_byte, t.latency_s
            once, overlap = self._problem.send_once, self._problem.overlap
            rows, waits, seen = np.zeros((3, size)), np.zeros((size, size), dtype=np.bool_), np.full(size, -1)
            found = _latency_s(home, device, self._compute, *self._nets, *tables, once, overlap, rows, waits, seen, self._free)
            if found >= 0:
                return found
        return latency_s(self._problem, blocks)


@compiled
def _latency_s(
    home: Ints,
    device: Ints,
    compute: Floats,
    producers: Ints,
    start: Ints,
    readers: Ints,
    num_bytes: Floats,
    send: Floats,
    send_per_byte: Floats,
    receive: Floats,
    receive_per_byte: Floats,
    delay: Floats,
    once: bool,
    overlap: bool,
    rows: Floats,
    waits: NDArray[np.bool_],
    seen: Ints,
    free: Floats,
) -> float:
    """Seconds, or -1 where a value is read before it is made. The last four arguments are scratch: zeros, and -1 in ``seen``."""
    num_blocks, host = len(device), len(send) - 1
    work, moved, end, last = rows[0], rows[1], rows[2], 0.0
    # 1. work of each block, its transfers, and the blocks whose values it waits for
    free[:] = 0.0
    for op in range(len(home)):
        work[home[op]] += compute[op, device[home[op]]]
    for net in range(len(producers)):
        source = num_blocks if producers[net] == HOST else home[producers[net]]
        sender = host if source == num_blocks else device[source]
        size, dearest = num_bytes[net], 0.0
        for place in range(start[net], start[net + 1]):
            target = num_blocks if readers[place] == HOST else home[readers[place]]
            if target == source or seen[target] == net:
                continue
            if source < num_blocks and target < source:
                return -1.0
            seen[target] = net
            waits[target, source] = True
            receiver = host if target == num_blocks else device[target]
            if target < num_blocks:
                moved[target] += receive[sender, receiver] + size * receive_per_byte[sender, receiver]
            cost = send[sender, receiver] + size * send_per_byte[sender, receiver]
            dearest = max(dearest, cost) if once else dearest + cost
        if source < num_blocks:
            moved[source] += dearest
    # 2. a block begins when its device is free and its values have arrived
    for block in range(num_blocks):
        begin = free[device[block]]
        for source in range(num_blocks + 1):
            if waits[block, source]:
                sender = host if source == num_blocks else device[source]
                begin = max(begin, end[source] + delay[sender, device[block]])
        busy = max(work[block], moved[block]) if overlap else work[block] + moved[block]
        end[block] = free[device[block]] = begin + busy
        last = max(last, end[block])
        if waits[num_blocks, block]:
            last = max(last, end[block] + delay[device[block], host])
    return float(last)
