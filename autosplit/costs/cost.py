"""The one evaluator: the cost of any solution of a problem, in float64, and every rule that it breaks.

Each block pays its compute, each value that it sends (once for each destination block, or once in all with ``send_once``) and
each value that it receives from outside. A block on r devices gives each of them every r-th sample, so each pays 1/r of that.
The load of a device is the sum over its blocks. The model with ``send_once`` and transfers paid by accelerators only is the one
of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import HOST, Block, Floats, Problem, Solution
from autosplit.errors import PlanError, raise_faults
from autosplit.tables import bytes_text

TOLERANCE = 1e-9
"""Share by which sums differ that are rounded in another order: a limit is broken, and a plan is better, by more than that."""

CLOSED = 1e-6
"""A gap below this share of the objective is rounding: the plan is optimal."""


@dataclass(frozen=True)
class Loads:
    """The cost of a solution.

    Attributes:
        device_s: seconds per sample that each device is busy, or its processor where devices share one, shape (num_devices,).
        compute_s: the part of it spent in ops.
        transfer_s: the part of it spent in sending and receiving.
        block_s: seconds that one sample takes in each block on its slowest device, shape (num_blocks,).
        stage_s: seconds per sample of each block: block_s over its number of devices.
        memory_bytes: bytes that each device holds, shape (num_devices,).
    """

    device_s: Floats
    compute_s: Floats
    transfer_s: Floats
    block_s: Floats
    stage_s: Floats
    memory_bytes: Floats

    @property
    def bottleneck_s(self) -> float:
        """The largest device load: seconds per sample of the whole, once every device is busy."""
        return float(self.device_s.max(initial=0.0))


def block_of(problem: Problem, blocks: Sequence[Block]) -> NDArray[np.int64]:
    """The block of each op, shape (num_ops,); -2 where an op is in none."""
    home = [-2] * problem.num_ops
    for number, block in enumerate(blocks):
        for op in block.ops:
            home[op] = number
    return np.array(home, dtype=np.int64)


@dataclass(frozen=True)
class _Crossings:
    """Every (net, destination block) pair that crosses, as parallel arrays; HOST is the block of the host."""

    net: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    num_bytes: Floats


def _crossings(problem: Problem, blocks: Sequence[Block]) -> _Crossings:
    home = np.append(block_of(problem, blocks), HOST)
    nets, readers = problem.pins
    width = len(blocks) + 1
    source, target = home[problem.producers[nets]], home[readers]
    pairs = np.unique((nets * width + target + 1)[source != target])
    net, target = pairs // width, pairs % width - 1
    return _Crossings(net, home[problem.producers[net]], target, problem.net_bytes[net])


def evaluate(problem: Problem, blocks: Sequence[Block]) -> Loads:
    """The cost of blocks, allowed or not. Every op is in exactly one block.

    Returns: loads in seconds; an op on a device that cannot run it gives an infinite load.
    """
    compute_s, transfer_s = np.zeros(problem.num_devices), np.zeros(problem.num_devices)
    block_s = np.zeros(len(blocks))
    for number, (block, moves) in enumerate(zip(blocks, moves_s(problem, blocks), strict=True)):
        for device, moved_s in zip(block.devices, moves, strict=True):
            work_s = float(problem.compute_s[list(block.ops), device].sum())
            compute_s[device] += work_s / len(block.devices)
            transfer_s[device] += moved_s / len(block.devices)
            block_s[number] = max(block_s[number], max(work_s, moved_s) if problem.overlap else work_s + moved_s)
    compute_s, transfer_s = problem.summed(compute_s), problem.summed(transfer_s)
    device_s = np.maximum(compute_s, transfer_s) if problem.overlap else compute_s + transfer_s
    replicas = np.array([len(block.devices) for block in blocks])
    return Loads(device_s, compute_s, transfer_s, block_s, block_s / replicas, memory_bytes(problem, blocks))


def moves_s(problem: Problem, blocks: Sequence[Block]) -> list[list[float]]:
    """Seconds that each device of each block moves values of one sample, and weights to its replicas.

    Replicas that train synchronise their weights as in PipeDream (Narayanan et al., SOSP 2019).
    """
    crossings = _crossings(problem, blocks)
    found = []
    for number in range(len(blocks)):
        sends = _share(problem, blocks, crossings, number, sending=True)
        receives = _share(problem, blocks, crossings, number, sending=False)
        sync_s = 2.0 * (len(sends) - 1) * problem.sync_s_per_byte * _block_bytes(problem, blocks[number])
        found.append([send_s + receive_s + sync_s for send_s, receive_s in zip(sends, receives, strict=True)])
    return found


def _share(problem: Problem, blocks: Sequence[Block], crossings: _Crossings, number: int, sending: bool) -> list[float]:
    """Seconds for one sample that each device of a block spends sending, or receiving."""
    transfers = problem.transfers
    mine, others = (crossings.source, crossings.target) if sending else (crossings.target, crossings.source)
    fixed_s, per_byte = (
        (transfers.send_s, transfers.send_s_per_byte) if sending else (transfers.receive_s, transfers.receive_s_per_byte)
    )
    chosen = np.flatnonzero(mine == number)
    if not len(chosen):
        return [0.0] * len(blocks[number].devices)
    peers, sizes = others[chosen], crossings.num_bytes[chosen]
    shares = []
    for device in blocks[number].devices:
        line = (fixed_s[device], per_byte[device]) if sending else (fixed_s[:, device], per_byte[:, device])
        table = np.zeros((len(blocks) + 1, 2))
        for peer in np.unique(peers):
            where = [HOST] if peer == HOST else list(blocks[peer].devices)
            table[peer] = line[0][where].mean(), line[1][where].mean()
        seconds = table[peers, 0] + sizes * table[peers, 1]
        if sending and problem.send_once:
            dearest = np.zeros(len(problem.nets))
            np.maximum.at(dearest, crossings.net[chosen], seconds)
            seconds = dearest
        shares.append(float(seconds.sum()))
    return shares


def most_s(problem: Problem) -> float:
    """An upper bound on the seconds of all blocks together: every op where it is slowest, every value sent to every reader."""
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
    for block in blocks:
        held[list(block.devices)] += _block_bytes(problem, block)
    return problem.summed(held)


def _block_bytes(problem: Problem, block: Block) -> float:
    """The bytes of the weights of a block, each once."""
    ops = set(block.ops)
    shared = sum(weight.num_bytes for weight in problem.weights if not ops.isdisjoint(weight.users))
    return float(problem.op_bytes[list(block.ops)].sum()) + shared


def _holders(problem: Problem, blocks: Sequence[Block]) -> NDArray[np.bool_]:
    """Whether each op is on each device, shape (num_ops, num_devices)."""
    holds = np.zeros((problem.num_ops, problem.num_devices), dtype=bool)
    for block in blocks:
        holds[np.ix_(np.array(block.ops), np.array(block.devices))] = True
    return holds


def pool_bytes(problem: Problem, blocks: Sequence[Block]) -> list[float]:
    """The bytes that the devices of each pool hold together; bytes that several of them hold count once."""
    holds = _holders(problem, blocks)
    totals = []
    for pool in problem.pools:
        inside = holds[:, list(pool.devices)].sum(axis=1) > 0
        shared = sum(weight.num_bytes for weight in problem.weights if inside[list(weight.users)].any())
        totals.append(float(problem.op_bytes[inside].sum()) + shared)
    return totals


def pieces(problem: Problem, blocks: Sequence[Block]) -> list[Block]:
    """The blocks cut into convex pieces, in an order in which every value is made before it is read.

    Blocks that stand in such an order are returned as they are. Otherwise an op's level is the largest number of
    crossings on a path to it, and the ops of one block and one level make a piece.
    """
    home = block_of(problem, blocks)
    nets, readers = problem.pins
    inner = (problem.producers[nets] != HOST) & (readers != HOST)
    if (home[problem.producers[nets[inner]]] <= home[readers[inner]]).all():
        return list(blocks)
    level = np.zeros(problem.num_ops, dtype=np.int64)
    made: list[list[int]] = [[] for _ in range(problem.num_ops)]
    for net in problem.nets:
        if net.producer != HOST:
            made[net.producer] += [reader for reader in net.consumers if reader != HOST]
    for op in range(problem.num_ops):
        for reader in made[op]:
            level[reader] = max(level[reader], level[op] + int(home[op] != home[reader]))
    parts: dict[tuple[int, int], list[int]] = {}
    for op in range(problem.num_ops):
        parts.setdefault((int(level[op]), int(home[op])), []).append(op)
    return [Block(tuple(ops), blocks[number].devices) for (_, number), ops in sorted(parts.items())]


@dataclass(frozen=True, slots=True)
class TimedPiece:
    """A piece and its cost of one sample.

    Attributes:
        block: number of the block that it is a part of.
        devices: the block's; a sample is on one of them.
        work_s: seconds of compute on each device, shape (num_replicas,).
        moved_s: seconds of sending and receiving on each device, shape (num_replicas,).
        sources: the pieces that it reads, HOST for the host, to the seconds that their values are on the way.
    """

    block: int
    devices: tuple[int, ...]
    work_s: Floats
    moved_s: Floats
    sources: Mapping[int, float]


def timed_pieces(problem: Problem, blocks: Sequence[Block]) -> tuple[list[TimedPiece], dict[int, float]]:
    """The pieces of the blocks with their times, and those that make results, to the seconds until the host has these."""
    parts = pieces(problem, blocks)
    home = block_of(problem, blocks)
    part_home = np.append(block_of(problem, parts), HOST)
    owner = [int(home[part.ops[0]]) for part in parts]
    moved = _piece_transfers(problem, blocks, parts, part_home, owner)
    delay = problem.transfers.latency_s

    def devices_of(part: int) -> list[int]:
        return [HOST] if part == HOST else list(parts[part].devices)

    reads: dict[int, dict[int, float]] = {number: {} for number in range(-1, len(parts))}
    nets, readers = problem.pins
    for net, reader in zip(nets.tolist(), readers.tolist(), strict=True):
        source, target = int(part_home[problem.producers[net]]), int(part_home[reader])
        if source != target and source not in reads[target]:
            same = HOST not in (source, target) and owner[source] == owner[target]
            slowest_s = 0.0 if same else max(delay[a, b] for a in devices_of(source) for b in devices_of(target))
            reads[target][source] = float(slowest_s)
    made = [
        TimedPiece(
            owner[number],
            part.devices,
            problem.compute_s[np.ix_(list(part.ops), list(part.devices))].sum(axis=0),
            moved[number],
            reads[number],
        )
        for number, part in enumerate(parts)
    ]
    return made, reads[HOST]


def latency_s(problem: Problem, blocks: Sequence[Block]) -> float:
    """Seconds for one sample through an idle system.

    A piece of a block starts when its inputs are there and its device is free, receives, computes, sends, and its
    readers see the values ``latency_s`` later. Pieces of different devices run side by side.
    """
    parts, results = timed_pieces(problem, blocks)
    end_s = {HOST: 0.0}
    free_s = np.zeros(problem.num_devices)
    for number, part in enumerate(parts):
        busy = np.maximum(part.work_s, part.moved_s) if problem.overlap else part.work_s + part.moved_s
        ready_s = max((end_s[source] + delay for source, delay in part.sources.items()), default=0.0)
        mine = problem.processor_of[list(part.devices)]
        end_s[number] = max(ready_s, float(free_s[mine].max())) + float(busy.max())
        free_s[mine] = end_s[number]
    last_s = max((end_s[source] + delay for source, delay in results.items()), default=0.0)
    return max(last_s, *end_s.values())


def _piece_transfers(
    problem: Problem, blocks: Sequence[Block], parts: Sequence[Block], part_home: NDArray[np.int64], owner: Sequence[int]
) -> list[Floats]:
    """Seconds that each device of a piece moves values of one sample. The piece that makes a value and the first one that reads
    it pay for the value."""
    crossings = _crossings(problem, blocks)
    first_reader: dict[tuple[int, int], int] = {}
    nets, readers = problem.pins
    for net, reader in zip(nets.tolist(), readers.tolist(), strict=True):
        part = int(part_home[reader])
        block = HOST if part == HOST else owner[part]
        key = (net, block)
        first_reader[key] = min(first_reader.get(key, part), part)
    moved = [np.zeros(len(part.devices)) for part in parts]
    sent: dict[tuple[int, int], Floats] = {}
    transfers = problem.transfers

    for net, source, target, size in zip(
        crossings.net.tolist(), crossings.source.tolist(), crossings.target.tolist(), crossings.num_bytes.tolist(), strict=True
    ):
        senders = [HOST] if source == HOST else list(blocks[source].devices)
        receivers = [HOST] if target == HOST else list(blocks[target].devices)
        if source != HOST:
            part = int(part_home[problem.producers[net]])
            cost = _mean_s(transfers.send_s, transfers.send_s_per_byte, size, senders, receivers, 1)
            before = sent.get((net, part), np.zeros(len(senders)))
            after = np.maximum(before, cost) if problem.send_once else before + cost
            moved[part] += after - before
            sent[net, part] = after
        if target != HOST:
            reader = first_reader[net, target]
            moved[reader] += _mean_s(transfers.receive_s, transfers.receive_s_per_byte, size, senders, receivers, 0)
    return moved


def _mean_s(
    fixed_s: Floats, per_byte: Floats, size: float, senders: Sequence[int], receivers: Sequence[int], axis: int
) -> Floats | float:
    """Seconds that a value costs each device of one side, the mean over the other side; one number for a pair of devices."""
    if len(senders) == len(receivers) == 1:
        return float(fixed_s[senders[0], receivers[0]] + size * per_byte[senders[0], receivers[0]])
    pairs = np.ix_(senders, receivers)
    return np.asarray((fixed_s[pairs] + size * per_byte[pairs]).mean(axis=axis))


def find_faults(problem: Problem, blocks: Sequence[Block], *, contiguous: bool = True) -> list[str]:
    """Every way in which the blocks break the problem's rules, a sentence each; empty when there is none."""
    faults = _shape_faults(problem, blocks)
    if faults:
        return faults
    home = block_of(problem, blocks)
    for block in blocks:
        for device in block.devices:
            for op in np.array(block.ops)[np.isinf(problem.compute_s[list(block.ops), device])]:
                reason = problem.reasons.get((int(op), device), "it cannot run there")
                faults.append(f"op '{problem.ops[op]}' is on '{problem.devices[device]}', but {reason}")
    for group in problem.groups:
        for one, other in pairwise(group):
            if home[one] != home[other]:
                faults.append(f"ops '{problem.ops[one]}' and '{problem.ops[other]}' must stay together, but are in two blocks")
    if contiguous:
        for before, after in problem.order:
            if home[before] > home[after]:
                names = f"op '{problem.ops[after]}' in block {home[after]} reads '{problem.ops[before]}' in block {home[before]}"
                faults.append(f"{names}; a value goes to the same block or a later one")
    return faults + _memory_faults(problem, blocks)


def _shape_faults(problem: Problem, blocks: Sequence[Block]) -> list[str]:
    """Every reason why the blocks are not a partition of the ops over existing devices."""
    faults = []
    counts = np.zeros(problem.num_ops, dtype=np.int64)
    for number, block in enumerate(blocks):
        if any(not 0 <= op < problem.num_ops for op in block.ops):
            return [f"block {number} holds an op that does not exist"]
        if any(not 0 <= device < problem.num_devices for device in block.devices):
            return [f"block {number} is on a device that does not exist"]
        if not block.ops or not block.devices or len(set(block.devices)) < len(block.devices):
            faults.append(f"block {number} has no ops, no devices, or one device twice")
        np.add.at(counts, list(block.ops), 1)
    return faults + [f"op '{problem.ops[op]}' is in {counts[op]} blocks, and must be in 1" for op in np.flatnonzero(counts != 1)]


def _memory_faults(problem: Problem, blocks: Sequence[Block]) -> list[str]:
    faults = []
    for device, (held, cap) in enumerate(zip(memory_bytes(problem, blocks), problem.memory_bytes, strict=True)):
        if held > cap * (1 + TOLERANCE):
            faults.append(f"device '{problem.devices[device]}' holds {bytes_text(held)}, and its cap is {bytes_text(cap)}")
    for pool, held in zip(problem.pools, pool_bytes(problem, blocks), strict=True):
        if held > pool.num_bytes * (1 + TOLERANCE):
            names = ", ".join(f"'{problem.devices[device]}'" for device in pool.devices)
            faults.append(f"devices {names} hold {bytes_text(held)} together, and their cap is {bytes_text(pool.num_bytes)}")
    return faults


def verify(problem: Problem, solution: Solution, *, contiguous: bool = True, objective: str = "throughput") -> Solution:
    """Return the solution, or raise PlanError with every fault: broken rules, a wrong objective, a bound above it."""
    faults = find_faults(problem, solution.blocks, contiguous=contiguous)
    if not faults:
        latency = objective == "latency"
        true_s = latency_s(problem, solution.blocks) if latency else evaluate(problem, solution.blocks).bottleneck_s
        if not np.isclose(true_s, solution.objective_s, rtol=TOLERANCE, atol=1e-15):
            faults.append(f"it claims an objective of {solution.objective_s:.9g} s, but it evaluates to {true_s:.9g} s")
        if solution.bound_s > true_s * (1 + TOLERANCE):
            faults.append(f"it claims a bound of {solution.bound_s:.9g} s, which is above its own objective of {true_s:.9g} s")
    raise_faults(PlanError, f"the solution does not fit problem '{problem.name}'", faults)
    return solution
