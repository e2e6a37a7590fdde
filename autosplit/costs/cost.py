"""The one evaluator: the cost of any solution of a problem, in float64.

Each block pays its compute, each value that it sends (once for each destination block, or once in all with ``send_once``) and
each value that it receives from outside. A streamed block pays the waits for its weights as transfers. A block on r devices gives
each of them every r-th sample, so each pays 1/r of that. The load of a device is the sum over its blocks. The model with
``send_once`` and transfers paid by accelerators only is the one of Tarnawski et al., "Efficient Algorithms for Device Placement
of DNN Graph Operators" (NeurIPS 2020).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.hostways import hosts_of, sent_forward
from autosplit.costs.problem import HOST, Block, Floats, Problem
from autosplit.costs.streaming import streamed_bytes, waits_s
from autosplit.costs.wires import Sent
from autosplit.values.machine import HOST as HOST_NAME

TOLERANCE = 1e-9
"""Share by which sums may differ if they are added in another order. Only a larger one breaks a limit or betters a plan."""

CLOSED = 1e-6
"""A gap below this share of the objective is rounding: the plan is optimal."""


@dataclass(frozen=True)
class Loads:
    """The cost of a solution.

    Attributes:
        device_s: seconds per sample that each device (or the processor that devices share) is busy, shape (num_devices,).
        wire_s: seconds per sample that each wire is busy, shape (num_wires,).
        compute_s: the part of ``device_s`` spent in ops.
        transfer_s: the part of ``device_s`` spent in sending and receiving.
        block_s: seconds that one sample takes in each block on its slowest device, shape (num_blocks,).
        stage_s: seconds per sample of each block: block_s over its number of devices.
        memory_bytes: bytes that each device holds, shape (num_devices,).
    """

    device_s: Floats
    wire_s: Floats
    compute_s: Floats
    transfer_s: Floats
    block_s: Floats
    stage_s: Floats
    memory_bytes: Floats

    @property
    def bottleneck_s(self) -> float:
        """The largest load of a device or wire: seconds per sample of the whole plan at full load."""
        return float(max(self.device_s.max(initial=0.0), self.wire_s.max(initial=0.0)))


def block_of(problem: Problem, blocks: Sequence[Block]) -> NDArray[np.int64]:
    """The block of each op, shape (num_ops,); -2 where an op is in none."""
    home = [-2] * problem.num_ops
    for number, block in enumerate(blocks):
        for op in block.ops:
            home[op] = number
    return np.array(home, dtype=np.int64)


@dataclass(frozen=True)
class Crossings:
    """Every (net, destination block) pair that crosses, as parallel arrays sorted by net; HOST is the block of the host.

    Attributes:
        net, source, target, num_bytes: the value, the block that makes it, a block that reads it, and its bytes.
        sender, receiver: the payers: these blocks, or their pieces that make the value and read it first.
    """

    net: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    num_bytes: Floats
    sender: NDArray[np.int64]
    receiver: NDArray[np.int64]


def crossings_of(problem: Problem, blocks: Sequence[Block], parts: Sequence[Block] | None = None) -> Crossings:
    """The values that cross from one block to another, or to or from the host; the parts of blocks pay for them if given."""
    home = np.append(block_of(problem, blocks), HOST)
    nets, readers = problem.pins
    width = len(blocks) + 1
    target = home[readers]
    crosses = home[problem.producers[nets]] != target
    pairs, which = np.unique((nets * width + target + 1)[crosses], return_inverse=True)
    net, target = pairs // width, pairs % width - 1
    maker = problem.producers[net]
    source = sender = home[maker]
    receiver = target
    if parts is not None:
        place = np.append(block_of(problem, parts), HOST)
        sender, receiver = place[maker], np.full(len(pairs), len(parts))
        np.minimum.at(receiver, which, place[readers[crosses]])
    return Crossings(net, source, target, problem.net_bytes[net], sender, receiver)


def evaluate(problem: Problem, blocks: Sequence[Block]) -> Loads:
    """The cost of blocks, allowed or not. Every op is in exactly one block.

    Returns: loads in seconds; an op on a device that cannot run it gives an infinite load.
    """
    compute_s, transfer_s = np.zeros(problem.num_devices), np.zeros(problem.num_devices)
    block_s = np.zeros(len(blocks))
    for number, (block, moves) in enumerate(zip(blocks, moves_s(problem, blocks), strict=True)):
        for device, moved_s in zip(block.devices, moves, strict=True):
            work_s = float(problem.compute_s[list(block.ops), device].sum())
            moved_s += waits_s(problem, block, device)
            compute_s[device] += work_s / len(block.devices)
            transfer_s[device] += moved_s / len(block.devices)
            block_s[number] = max(block_s[number], max(work_s, moved_s) if problem.overlap else work_s + moved_s)
    compute_s, transfer_s = problem.summed(compute_s), problem.summed(transfer_s)
    device_s = np.maximum(compute_s, transfer_s) if problem.overlap else compute_s + transfer_s
    replicas = np.array([len(block.devices) for block in blocks])
    wire_s = problem.wires.loads_s([*sent_between_hosts(problem, blocks), *sent_over_buses(problem, blocks)])
    return Loads(device_s, wire_s, compute_s, transfer_s, block_s, block_s / replicas, memory_bytes(problem, blocks))


def sent_between_hosts(problem: Problem, blocks: Sequence[Block]) -> list[Sent]:
    """The values from each segment to the next one, and those back to an earlier block; none without wires in the problem."""
    if not problem.wires.all:
        return []
    sent = sent_forward(problem, blocks, block_of(problem, blocks))
    crossings, hosts = crossings_of(problem, blocks), hosts_of(problem)
    places = [tuple(hosts[device] for device in block.devices) for block in blocks]
    back = (crossings.target != HOST) & (crossings.target < crossings.source)
    rows = zip(crossings.source[back], crossings.target[back], crossings.num_bytes[back].tolist(), strict=True)
    return [*sent, *(Sent(places[source], places[target], num_bytes) for source, target, num_bytes in rows)]


def sent_over_buses(problem: Problem, blocks: Sequence[Block]) -> list[Sent]:
    """The values from each block to each other one and to the host, and streamed weights; none unless a device has a bus."""
    if not problem.wires.has_bus:
        return []
    crossings = crossings_of(problem, blocks)
    places = [*(tuple(problem.place(device) for device in block.devices) for block in blocks), (HOST_NAME,)]
    rows = zip(crossings.source, crossings.target, crossings.num_bytes.tolist(), strict=True)
    sent = [Sent(places[source], places[target], num_bytes) for source, target, num_bytes in rows]
    weights = [(place, streamed_bytes(problem, block)) for place, block in zip(places[:-1], blocks, strict=True)]
    return sent + [Sent((HOST_NAME,), place, num_bytes) for place, num_bytes in weights if num_bytes]


def moves_s(
    problem: Problem, blocks: Sequence[Block], crossings: Crossings | None = None, owner: Sequence[int] | None = None
) -> list[list[float]]:
    """Seconds that each device of each block moves values of one sample.

    Args:
        crossings, owner: if pieces of blocks pay: the values that cross, and the block of each piece.
    """
    crossings, owner = crossings or crossings_of(problem, blocks), range(len(blocks)) if owner is None else owner
    t, num_parts = problem.transfers, len(owner)
    sent = _shares(problem, blocks, crossings, t.send_s, t.send_s_per_byte, num_parts, sending=True)
    received = _shares(problem, blocks, crossings, t.receive_s.T, t.receive_s_per_byte.T, num_parts, sending=False)
    return [row[: len(blocks[block].devices)] for row, block in zip((sent + received).T.tolist(), owner, strict=True)]


def _shares(
    problem: Problem, blocks: Sequence[Block], crossings: Crossings, fixed_s: Floats, per_byte: Floats, num_parts: int,
    sending: bool,
) -> Floats:  # fmt: skip
    """Seconds for one sample that each replica of each part spends sending, or receiving, shape (most replicas, num_parts).

    Args:
        crossings: the values that cross, sorted by value.
        fixed_s, per_byte: tables whose rows are the devices that pay, and whose columns are those at the other end.
        num_parts: the blocks, or the pieces of them that pay.
    """
    c = crossings
    paying, others, payers = (c.source, c.target, c.sender) if sending else (c.target, c.source, c.receiver)
    part = np.zeros((len(blocks) + 1, problem.num_devices + 1))
    part[HOST, HOST] = 1.0
    device = np.full((max((len(block.devices) for block in blocks), default=1), len(blocks) + 1), HOST)
    for number, block in enumerate(blocks):
        part[number, list(block.devices)] = 1.0 / len(block.devices)
        device[: len(block.devices), number] = block.devices
    fixed_s, per_byte = fixed_s @ part.T, per_byte @ part.T
    values = np.flatnonzero(np.diff(c.net, prepend=-1))
    shares = np.zeros((len(device), num_parts))
    for replica, own in enumerate(device):
        seconds, payer = fixed_s[own[paying], others] + c.num_bytes * per_byte[own[paying], others], payers
        if sending and problem.send_once and len(values):
            seconds, payer = np.maximum.reduceat(seconds, values), payers[values]
        shares[replica] = np.bincount(payer + 1, seconds, num_parts + 1)[1:]
    return shares


def most_s(problem: Problem) -> float:
    """An upper bound on the seconds of all blocks together: every op on its slowest device, every value sent to every reader."""
    t = problem.transfers
    finite = np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0)
    fixed_s = float(t.send_s.max() + t.receive_s.max() + t.latency_s.max())
    per_byte = float(t.send_s_per_byte.max() + t.receive_s_per_byte.max())
    moves_s = sum(len(net.consumers) * (fixed_s + per_byte * net.num_bytes) for net in problem.nets)
    return float(finite.max(axis=1).sum()) + moves_s


def memory_bytes(problem: Problem, blocks: Sequence[Block]) -> Floats:
    """The bytes that each device holds, shape (num_devices,): those of its ops, and in each block each shared weight once.

    Every block is a process of its own, so two blocks on one device each hold a weight that both read.
    """
    held = np.zeros(problem.num_devices)
    for block, num_bytes in zip(blocks, _block_bytes(problem, blocks).tolist(), strict=True):
        held[list(block.devices)] += num_bytes
    return problem.summed(held)


def _block_bytes(problem: Problem, blocks: Sequence[Block]) -> Floats:
    """The bytes of the weights of each block on a device, each once, shape (num_blocks,)."""
    home = block_of(problem, blocks)
    held = np.bincount(home, problem.op_bytes, len(blocks)).astype(np.float64)
    for weight in problem.weights:
        held[np.unique(home[list(weight.users)])] += weight.num_bytes
    return np.minimum(held, [block.resident_bytes for block in blocks])


def streamed(problem: Problem, blocks: Sequence[Block]) -> list[Block]:
    """The blocks, of which those that do not fit their devices are streamed where that is possible.

    Several blocks on a device have room in proportion to their weights.
    """
    if not any(problem.pinned_s_per_byte):
        return list(blocks)
    found, full = [], problem.memory_bytes / np.maximum(memory_bytes(problem, blocks), 1.0)
    for block, num_bytes in zip(blocks, _block_bytes(problem, blocks).tolist(), strict=True):
        share = float(full[list(block.devices)].min())
        streams = share < 1 and num_bytes and all(problem.pinned_s_per_byte[device] for device in block.devices)
        found.append(replace(block, resident_bytes=int(share * num_bytes)) if streams else block)
    return found


def pool_bytes(problem: Problem, blocks: Sequence[Block]) -> list[float]:
    """The bytes that the devices of each pool hold together; bytes that several of them hold count once."""
    home, totals = block_of(problem, blocks), []
    for pool in problem.pools:
        inside = np.array([not set(pool.devices).isdisjoint(block.devices) for block in blocks])[home]
        shared = sum(weight.num_bytes for weight in problem.weights if inside[list(weight.users)].any())
        totals.append(float(problem.op_bytes[inside].sum()) + shared)
    return totals
