"""The inner loop of ``order_annealing``, compiled: the latency of a row of blocks, a hundred thousand times a second.

It equals ``cost.latency_s`` where every block has one device and every value is made before it is read.
"""

from typing import NamedTuple

import numpy as np

from autosplit.costs.problem import HOST, Floats, Problem
from autosplit.planners.items import Ints, Table
from autosplit.planners.jit import inner


class Times(NamedTuple):
    """The arrays of a problem for compiled code.

    Attributes:
        compute: seconds of each op on each device.
        producers, num_bytes: of each net.
        reader_start, readers: the readers of each net.
        made_start, made: the nets that each op makes.
        read_start, read: the nets that each op reads.
        send, send_per_byte, receive, receive_per_byte, delay: as in ``Transfers``.
        once, overlap: ``send_once`` and ``overlap`` of the problem.
    """

    compute: Floats
    producers: Ints
    num_bytes: Floats
    reader_start: Ints
    readers: Ints
    made_start: Ints
    made: Ints
    read_start: Ints
    read: Ints
    send: Floats
    send_per_byte: Floats
    receive: Floats
    receive_per_byte: Floats
    delay: Floats
    once: bool
    overlap: bool


def times_of(problem: Problem) -> Times:
    """The arrays of a problem."""
    readers = Table.of([net.consumers for net in problem.nets])
    made = Table.of([[net.producer] if net.producer != HOST else [] for net in problem.nets]).transposed(problem.num_ops)
    read = Table.of([{op for op in net.consumers if op != HOST} for net in problem.nets]).transposed(problem.num_ops)
    t = problem.transfers
    return Times(
        np.ascontiguousarray(problem.compute_s), problem.producers, problem.net_bytes, readers.start, readers.data, made.start,
        made.data, read.start, read.data, t.send_s, t.send_s_per_byte, t.receive_s, t.receive_s_per_byte, t.latency_s,
        problem.send_once, problem.overlap,
    )  # fmt: skip


@inner
def row_latency_s(
    times: Times, order: Ints, home: Ints, device: Ints, num_blocks: int, free: Floats, end: Floats, seen: Ints
) -> float:
    """Seconds of a row of blocks in which every value is made before it is read.

    Args:
        times: of the problem.
        order: the ops, block after block.
        home: block of each op.
        device: of each block.
        num_blocks: how many blocks there are.
        free, end, seen: scratch of one entry for each device, block and block.
    """
    free[:] = 0.0
    seen[:num_blocks] = -1
    last, place, host = 0.0, 0, len(times.send) - 1
    for block in range(num_blocks):
        here = device[block]
        begin, work, moved, result = free[here], 0.0, 0.0, -1.0
        while place < len(order) and home[order[place]] == block:
            op = order[place]
            work += times.compute[op, here]
            begin, received = _arrival(times, op, home, device, block, end, begin)
            sent, results = _sending(times, op, home, device, block, seen)
            if results:
                result = times.delay[here, host]
            moved += received + sent
            place += 1
        end[block] = free[here] = begin + (max(work, moved) if times.overlap else work + moved)
        last = max(last, end[block] + max(result, 0.0))
    return float(last)


@inner
def _arrival(times: Times, op: int, home: Ints, device: Ints, block: int, end: Floats, begin: float) -> tuple[float, float]:
    """When the values that an op reads are there, and the seconds to receive those that no op of its block before it reads."""
    here, host, received = device[block], len(times.send) - 1, 0.0
    for slot in range(times.read_start[op], times.read_start[op + 1]):
        net = times.read[slot]
        maker = times.producers[net]
        sender = host
        if maker >= 0:
            if home[maker] == block:
                continue
            sender = device[home[maker]]
            begin = max(begin, end[home[maker]] + times.delay[sender, here])
        else:
            begin = max(begin, times.delay[host, here])
        new = True
        for entry in range(times.reader_start[net], times.reader_start[net + 1]):
            other = times.readers[entry]
            if other >= 0 and home[other] == block and other < op:
                new = False
        if new:
            received += times.receive[sender, here] + times.num_bytes[net] * times.receive_per_byte[sender, here]
    return begin, received


@inner
def _sending(times: Times, op: int, home: Ints, device: Ints, block: int, seen: Ints) -> tuple[float, bool]:
    """Seconds to send the values that an op makes to other blocks and to the host, and whether one goes to the host."""
    here, host, sent, results = device[block], len(times.send) - 1, 0.0, False
    for slot in range(times.made_start[op], times.made_start[op + 1]):
        net, dearest, to_host = times.made[slot], 0.0, False
        for entry in range(times.reader_start[net], times.reader_start[net + 1]):
            reader, target = times.readers[entry], host
            if reader >= 0:
                goal = home[reader]
                if goal == block or seen[goal] == net:
                    continue
                seen[goal] = net
                target = device[goal]
            elif to_host:
                continue
            else:
                to_host = results = True
            cost = times.send[here, target] + times.num_bytes[net] * times.send_per_byte[here, target]
            dearest = max(dearest, cost) if times.once else dearest + cost
        sent += dearest
    return sent, results
