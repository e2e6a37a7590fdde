"""What blocks take, compiled: the loads of a block that grows item by item, and the latency of a row of blocks.

Loads are those of ``Instance``, on each class of device; all planners of chains share them. The latency is that of ``Problem``,
whose prices depend on both devices. Compressed rows, which all compiled code reads, stand here too.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import Floats, Problem, rows_of
from autosplit.jit import inlined, inner
from autosplit.planners.device_usage import Usage

Ints = NDArray[np.int64]

ROUNDING = 1e-9
"""``costs.cost.TOLERANCE``, written again because machine code is compiled anew only where a module of the planners changes."""


class Table(NamedTuple):
    """Rows of different length: row i is ``data[start[i]:start[i + 1]]``."""

    start: Ints
    data: Ints

    @staticmethod
    def of(rows: Sequence[Iterable[int]]) -> "Table":
        """The rows, in order."""
        lists = [list(row) for row in rows]
        start = np.zeros(len(lists) + 1, dtype=np.int64)
        start[1:] = np.cumsum([len(row) for row in lists])
        return Table(start, np.array([entry for row in lists for entry in row], dtype=np.int64))

    def row(self, number: int) -> Ints:
        """The entries of a row; compiled code calls ``entries``."""
        return self.data[self.start[number] : self.start[number + 1]]

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.start) - 1

    def transposed(self, num_columns: int) -> "Table":
        """Which rows name each column."""
        rows = np.repeat(np.arange(self.num_rows), np.diff(self.start))
        order = np.argsort(self.data, kind="stable")
        start = np.zeros(num_columns + 1, dtype=np.int64)
        start[1:] = np.cumsum(np.bincount(self.data, minlength=num_columns))
        return Table(start, rows[order])


@inlined
def entries(table: Table, number: int) -> Ints:
    """The entries of a row, for compiled code that does not allocate."""
    return table.data[table.start[number] : table.start[number + 1]]


class Costs(NamedTuple):
    """The costs of an ``Instance``, whose attributes the others are.

    Attributes:
        nets: the nets of each item.
        net_size: items of each net.
        weights: the shared weights of each item.
    """

    compute_s: Floats
    fixed_s: Floats
    num_bytes: Floats
    memory_bytes: Floats
    overlap: bool
    nets: Table
    net_size: Ints
    producer: Ints
    send_s: Floats
    receive_s: Floats
    weights: Table
    weight_bytes: Floats


class GrowingBlock(NamedTuple):
    """A block with its cost on each class of device, and the pins of each net.

    Attributes:
        work: seconds of compute, shape (K,).
        moved: seconds of transfers, shape (K,).
        surely: the part of ``moved`` that no further item can remove, shape (K,).
        memory: bytes of the block, shape (1,).
        inside: pins of each net in the block.
        made: whether the block makes the net.
        before: pins of each net in earlier blocks.
        held: items of the block that use each shared weight.
        load: seconds per sample as of the last call of ``price``, shape (K,); infinite above the memory cap.
    """

    work: Floats
    moved: Floats
    surely: Floats
    memory: Floats
    inside: Ints
    made: NDArray[np.bool_]
    before: Ints
    held: Ints
    load: Floats


def empty_block(costs: Costs, sums: Floats | None = None) -> GrowingBlock:
    """A block without items, with no items before it. Its seconds and bytes are the first 3 K + 1 of ``sums``."""
    classes, nets = costs.compute_s.shape[1], len(costs.net_size)
    sums = np.zeros(3 * classes + 1) if sums is None else sums
    return GrowingBlock(
        sums[:classes], sums[classes : 2 * classes], sums[2 * classes : 3 * classes], sums[3 * classes : 3 * classes + 1],
        np.zeros(nets, dtype=np.int64), np.zeros(nets, dtype=np.bool_), np.zeros(nets, dtype=np.int64),
        np.zeros(len(costs.weight_bytes), dtype=np.int64), np.zeros(classes),
    )  # fmt: skip


@inner
def reset(block: GrowingBlock) -> None:
    """Set the costs to zero. The caller clears the counts of the nets."""
    for k in range(len(block.work)):
        block.work[k] = block.moved[k] = block.surely[k] = 0.0
    block.memory[0] = 0.0


@inner
def moved_with(costs: Costs, block: GrowingBlock, item: int, k: int) -> float:
    """Seconds of transfers on a class if the block had one more item: each net of the item changes its price for the block."""
    moved = block.moved[k] + costs.fixed_s[item, k]
    for net in entries(costs.nets, item):
        made = block.made[net]
        if made or block.inside[net] > 0:
            moved -= costs.send_s[net, k] if made else costs.receive_s[net, k]
        if block.inside[net] + 1 < costs.net_size[net] or costs.producer[net] < 0:
            moved += costs.send_s[net, k] if made or costs.producer[net] == item else costs.receive_s[net, k]
    return float(moved)


@inner
def load_with(costs: Costs, block: GrowingBlock, item: int, k: int) -> float:
    """The load on a class if the block had one more item, in seconds; memory does not count."""
    return load_of(costs, block.work[k] + costs.compute_s[item, k], moved_with(costs, block, item, k))


@inner
def opens(costs: Costs, block: GrowingBlock, item: int) -> bool:
    """Whether the item makes the cut behind the block dearer, on any class."""
    for k in range(costs.compute_s.shape[1]):
        opened = 0.0
        for net in entries(costs.nets, item):
            pins = block.before[net] + block.inside[net]
            if pins == 0:
                opened += costs.receive_s[net, k]
            elif pins + 1 == costs.net_size[net] and costs.producer[net] >= 0:
                opened -= costs.receive_s[net, k]
        if opened > 0:
            return True
    return False


@inner
def bytes_with(costs: Costs, block: GrowingBlock, item: int) -> float:
    """The bytes of the block with one more item."""
    num_bytes = block.memory[0] + costs.num_bytes[item]
    for weight in entries(costs.weights, item):
        if block.held[weight] == 0:
            num_bytes += costs.weight_bytes[weight]
    return float(num_bytes)


@inner
def add(costs: Costs, block: GrowingBlock, item: int) -> None:
    """Put an item into the block."""
    block.memory[0] = bytes_with(costs, block, item)
    for weight in entries(costs.weights, item):
        block.held[weight] += 1
    for k in range(len(block.work)):
        block.work[k] += costs.compute_s[item, k]
        block.moved[k] = moved_with(costs, block, item, k)
        block.surely[k] += costs.fixed_s[item, k]
    for net in entries(costs.nets, item):
        if block.before[net] > 0 and block.inside[net] == 0:
            for k in range(len(block.work)):
                block.surely[k] += min(costs.send_s[net, k], costs.receive_s[net, k])
        block.inside[net] += 1
        block.made[net] = block.made[net] or costs.producer[net] == item


@inner
def remove(costs: Costs, block: GrowingBlock, item: int) -> None:
    """Take an item out of the counts. The caller restores the costs from a copy, so that rounding errors do not add up."""
    for weight in entries(costs.weights, item):
        block.held[weight] -= 1
    for net in entries(costs.nets, item):
        block.inside[net] -= 1
        if costs.producer[net] == item:
            block.made[net] = False


@inner
def shift(costs: Costs, block: GrowingBlock, item: int, change: int) -> None:
    """Add an item to those before the block (change = 1), or take it away (-1)."""
    for net in entries(costs.nets, item):
        block.before[net] += change


@inner
def price(costs: Costs, block: GrowingBlock) -> float:
    """Fill in the load on each class of device. Returns a lower bound on the load of every block that contains this one."""
    floor = np.inf
    for k in range(len(block.load)):
        block.load[k] = np.inf
        if block.memory[0] <= costs.memory_bytes[k] * (1 + 1e-12):
            block.load[k] = load_of(costs, block.work[k], block.moved[k])
            floor = min(floor, load_of(costs, block.work[k], block.surely[k]))
    return floor


@inner
def load_of(costs: Costs, work: float, moved: float) -> float:
    """Seconds that a device is busy with so many seconds of compute and of transfers."""
    return float(max(work, moved) if costs.overlap else work + moved)


@inner
def widest_load(block: GrowingBlock, usage: Usage, move: int) -> float:
    """Seconds per sample on the devices of a move: the load on the slowest class over the number of replicas."""
    top = 0.0
    for k in range(len(block.load)):
        if usage.takes[move, k] > 0:
            top = max(top, block.load[k])
    return float(top / usage.width[move])


class Times(NamedTuple):
    """The arrays of a problem for compiled code.

    Attributes:
        compute: seconds of each op on each device.
        op_bytes, caps: bytes of each op, and the cap of each device; infinite where it holds all ops.
        before, after: the ops that stand before and after each op.
        num_bytes: of each net.
        readers: the readers of each net.
        made: the nets that each op makes, and last those from the host.
        send, send_per_byte, receive, receive_per_byte, delay: as in ``Transfers``.
        once, overlap: ``send_once`` and ``overlap`` of the problem.
    """

    compute: Floats
    op_bytes: Floats
    caps: Floats
    before: Table
    after: Table
    num_bytes: Floats
    readers: Table
    made: Table
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
    made = Table.of([[net.producer % (problem.num_ops + 1)] for net in problem.nets]).transposed(problem.num_ops + 1)
    after = Table.of(rows_of(sorted({*problem.edges, *problem.order}), problem.num_ops))
    before = after.transposed(problem.num_ops)
    caps = np.where(problem.memory_bytes >= problem.op_bytes.sum(), np.inf, problem.memory_bytes) * (1 + ROUNDING)
    t = problem.transfers
    return Times(
        np.ascontiguousarray(problem.compute_s), problem.op_bytes, caps, before, after, problem.net_bytes, readers, made,
        t.send_s, t.send_s_per_byte, t.receive_s, t.receive_s_per_byte, t.latency_s, problem.send_once, problem.overlap,
    )  # fmt: skip


class OrderPlan(NamedTuple):
    """A plan of one sample, and scratch for its evaluation.

    Attributes:
        order: the ops; those of one device that stand next to each other are a block.
        device: of each op.
        place, home: place in the order and block of each op.
        block_device, ready, moved, seen: device of each block, when all that it reads is there, its seconds of transfers, and the
            last value sent to it.
        free, held: when each device is free, and the bytes on it.
        path, others: ops that a move takes along, and those around them.
    """

    order: Ints
    device: Ints
    place: Ints
    home: Ints
    block_device: Ints
    ready: Floats
    moved: Floats
    seen: Ints
    free: Floats
    held: Floats
    path: Ints
    others: Ints


def plan_of(times: Times, order: Ints, device: Ints) -> OrderPlan:
    """A plan with scratch of its own."""
    num_ops, num_devices = times.compute.shape
    place, home, block_device, seen, path, others = np.zeros((6, num_ops), dtype=np.int64)
    (free, held), (ready, moved) = np.zeros((2, num_devices)), np.zeros((2, num_ops))
    return OrderPlan(order.copy(), device.copy(), place, home, block_device, ready, moved, seen, free, held, path, others)


@inner
def row_latency_s(times: Times, plan: OrderPlan, num_blocks: int) -> float:  # noqa: C901 - one compiled loop
    """Seconds of one sample through the blocks of a plan, in which every value is made before it is read.

    It equals ``pieces.latency_s`` where every block has one device.
    """
    plan.free[:] = 0.0
    plan.seen[:num_blocks] = -1
    plan.ready[:num_blocks] = 0.0
    plan.moved[:num_blocks] = 0.0
    # ranges in place of ``entries``, which take a seventh longer here
    num_ops, host, last, place = len(plan.order), len(times.send) - 1, 0.0, 0
    for block in range(-1, num_blocks):  # the host, whose values are the last row of ``made``, comes first
        here, first, work, end, sent = host, -1, 0.0, 0.0, 0.0
        if block >= 0:
            here, first = plan.block_device[block], place
        while place < num_ops and plan.home[plan.order[place]] == block:
            work += times.compute[plan.order[place], here]
            place += 1
        # 1. the values that the block sends; each receiver is charged its own share
        for position in range(first, place):
            maker = plan.order[position] if position >= 0 else num_ops
            for slot in range(times.made.start[maker], times.made.start[maker + 1]):
                net, dearest, to_host = times.made.data[slot], 0.0, False
                for entry in range(times.readers.start[net], times.readers.start[net + 1]):
                    reader, target = times.readers.data[entry], host
                    if reader >= 0:
                        goal = plan.home[reader]
                        if goal == block or plan.seen[goal] == net:
                            continue
                        plan.seen[goal] = net
                        target = plan.block_device[goal]
                        taken = times.receive[here, target] + times.num_bytes[net] * times.receive_per_byte[here, target]
                        plan.moved[goal] += taken
                    elif to_host:
                        continue
                    else:
                        to_host = True
                    cost = times.send[here, target] + times.num_bytes[net] * times.send_per_byte[here, target]
                    dearest = max(dearest, cost) if times.once else dearest + cost
                sent += dearest
        # 2. when it ends
        if block >= 0:
            moved = plan.moved[block] + sent
            end = max(plan.free[here], plan.ready[block]) + (max(work, moved) if times.overlap else work + moved)
            plan.free[here] = end
        # 3. when its readers may begin
        for position in range(first, place):
            maker = plan.order[position] if position >= 0 else num_ops
            for slot in range(times.made.start[maker], times.made.start[maker + 1]):
                net = times.made.data[slot]
                for entry in range(times.readers.start[net], times.readers.start[net + 1]):
                    reader = times.readers.data[entry]
                    if reader < 0:
                        last = max(last, end + times.delay[here, host])
                    elif plan.home[reader] != block:
                        goal = plan.home[reader]
                        plan.ready[goal] = max(plan.ready[goal], end + times.delay[here, plan.block_device[goal]])
        last = max(last, end)
    return float(last)
