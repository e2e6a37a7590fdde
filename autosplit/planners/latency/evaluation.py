"""The inner loop of ``order_annealing``, compiled: the latency of a row of blocks, a hundred thousand times a second.

It equals ``cost.latency_s`` where every block has one device and every value is made before it is read.
"""

from typing import NamedTuple

import numpy as np

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.problem import HOST, Floats, Problem, rows_of
from autosplit.planners.items import Table
from autosplit.planners.jit import inner
from autosplit.planners.loads import Ints


class Times(NamedTuple):
    """The arrays of a problem for compiled code.

    Attributes:
        compute: seconds of each op on each device.
        op_bytes, caps: bytes of each op, and what each device holds; infinite where it holds all.
        before_start, before, after_start, after: the ops that stand before and after each op.
        producers, num_bytes: of each net.
        reader_start, readers: the readers of each net.
        made_start, made: the nets that each op makes.
        read_start, read: the nets that each op reads.
        send, send_per_byte, receive, receive_per_byte, delay: as in ``Transfers``.
        once, overlap: ``send_once`` and ``overlap`` of the problem.
    """

    compute: Floats
    op_bytes: Floats
    caps: Floats
    before_start: Ints
    before: Ints
    after_start: Ints
    after: Ints
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
    after = Table.of(rows_of(sorted({*problem.edges, *problem.order}), problem.num_ops))
    before = after.transposed(problem.num_ops)
    caps = np.where(problem.memory_bytes >= problem.op_bytes.sum(), np.inf, problem.memory_bytes) * (1 + TOLERANCE)
    t = problem.transfers
    return Times(
        np.ascontiguousarray(problem.compute_s), problem.op_bytes, caps, before.start, before.data, after.start, after.data,
        problem.producers, problem.net_bytes, readers.start, readers.data, made.start, made.data, read.start, read.data,
        t.send_s, t.send_s_per_byte, t.receive_s, t.receive_s_per_byte, t.latency_s, problem.send_once, problem.overlap,
    )  # fmt: skip


class OrderPlan(NamedTuple):
    """A plan of one sample, and scratch for its evaluation.

    Attributes:
        order: the ops; those of one device that stand next to each other are a block.
        device: of each op.
        place, home: place in the order and block of each op.
        block_device, end, seen: device of each block, when it ends, and the last value sent to it.
        free, held: when each device is free, and the bytes on it.
        path, others: ops that a move takes along, and those around them.
    """

    order: Ints
    device: Ints
    place: Ints
    home: Ints
    block_device: Ints
    end: Floats
    seen: Ints
    free: Floats
    held: Floats
    path: Ints
    others: Ints


def plan_of(times: Times, order: Ints, device: Ints) -> OrderPlan:
    """A plan with scratch of its own."""
    num_ops, num_devices = times.compute.shape
    place, home, block_device, seen, path, others = np.zeros((6, num_ops), dtype=np.int64)
    free, held = np.zeros((2, num_devices))
    return OrderPlan(order.copy(), device.copy(), place, home, block_device, np.zeros(num_ops), seen, free, held, path, others)


@inner
def row_latency_s(times: Times, plan: OrderPlan, num_blocks: int) -> float:
    """Seconds of a plan whose blocks are known, in which every value is made before it is read."""
    plan.free[:] = 0.0
    plan.seen[:num_blocks] = -1
    last, place, host = 0.0, 0, len(times.send) - 1
    for block in range(num_blocks):
        here = plan.block_device[block]
        begin, work, moved, result = plan.free[here], 0.0, 0.0, -1.0
        while place < len(plan.order) and plan.home[plan.order[place]] == block:
            op = plan.order[place]
            work += times.compute[op, here]
            begin, received = _arrival(times, plan, op, block, begin)
            sent, results = _sending(times, plan, op, block)
            if results:
                result = times.delay[here, host]
            moved += received + sent
            place += 1
        plan.end[block] = plan.free[here] = begin + (max(work, moved) if times.overlap else work + moved)
        last = max(last, plan.end[block] + max(result, 0.0))
    return float(last)


@inner
def _arrival(times: Times, plan: OrderPlan, op: int, block: int, begin: float) -> tuple[float, float]:
    """When the values that an op reads are there, and the seconds to receive those that no op of its block before it reads."""
    home, here, host, received = plan.home, plan.block_device[block], len(times.send) - 1, 0.0
    for slot in range(times.read_start[op], times.read_start[op + 1]):
        net = times.read[slot]
        maker = times.producers[net]
        sender = host
        if maker >= 0:
            if home[maker] == block:
                continue
            sender = plan.block_device[home[maker]]
            begin = max(begin, plan.end[home[maker]] + times.delay[sender, here])
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
def _sending(times: Times, plan: OrderPlan, op: int, block: int) -> tuple[float, bool]:
    """Seconds to send the values that an op makes to other blocks and to the host, and whether one goes to the host."""
    here, host, sent, results = plan.block_device[block], len(times.send) - 1, 0.0, False
    for slot in range(times.made_start[op], times.made_start[op + 1]):
        net, dearest, to_host = times.made[slot], 0.0, False
        for entry in range(times.reader_start[net], times.reader_start[net + 1]):
            reader, target = times.readers[entry], host
            if reader >= 0:
                goal = plan.home[reader]
                if goal == block or plan.seen[goal] == net:
                    continue
                plan.seen[goal] = net
                target = plan.block_device[goal]
            elif to_host:
                continue
            else:
                to_host = results = True
            cost = times.send[here, target] + times.num_bytes[net] * times.send_per_byte[here, target]
            dearest = max(dearest, cost) if times.once else dearest + cost
        sent += dearest
    return sent, results
