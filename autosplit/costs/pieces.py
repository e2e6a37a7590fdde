"""The latency of one sample: blocks run as convex pieces, each as soon as its inputs are there and its device is free."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from autosplit.costs.cost import block_of, crossings_of, moves_s
from autosplit.costs.hostways import Chain, hosts_of
from autosplit.costs.problem import HOST, Block, Floats, Problem
from autosplit.costs.streaming import waits_s
from autosplit.values.graph import few_runs


def pieces(problem: Problem, blocks: Sequence[Block]) -> list[Block]:
    """The blocks cut into few convex pieces, in an order in which every value is made before it is read.

    Blocks that stand in such an order are returned as they are.
    """
    home = block_of(problem, blocks)
    nets, readers = problem.pins
    inner = (problem.producers[nets] != HOST) & (readers != HOST)
    made, read = problem.producers[nets[inner]], readers[inner]
    if (home[made] <= home[read]).all():
        return list(blocks)
    later: list[list[int]] = [[] for _ in range(problem.num_ops)]
    for op, reader in zip(made.tolist(), read.tolist(), strict=True):
        later[op].append(reader)
    return [Block(tuple(run), blocks[int(home[run[0]])].devices) for run in few_runs(home.tolist(), later)]


class PieceTransfer(NamedTuple):
    """The transfer of the values of one sample from a piece to one that reads them: delay, bytes, and seconds on idle wires."""

    delay_s: float
    num_bytes: float
    wired_s: float

    @property
    def seconds(self) -> float:
        """Seconds from the end of sending until the values are there, if nothing else is on the wires."""
        return self.delay_s + self.wired_s


@dataclass(frozen=True, slots=True)
class TimedPiece:
    """A piece and its cost of one sample.

    Attributes:
        block: number of the block that it is a part of.
        devices: the devices of the block; a sample is on one of them.
        work_s: seconds of compute on each device, with a share of the block's waits for streamed weights, shape (num_replicas,).
        moved_s: seconds of sending and receiving on each device, shape (num_replicas,).
        sources: the pieces that it reads, HOST for the host, to the way of their values.
    """

    block: int
    devices: tuple[int, ...]
    work_s: Floats
    moved_s: Floats
    sources: Mapping[int, PieceTransfer]


def timed_pieces(problem: Problem, blocks: Sequence[Block]) -> tuple[list[TimedPiece], dict[int, PieceTransfer]]:
    """The pieces of the blocks with their times; and, for each piece that makes results, their transfer to the host."""
    parts = pieces(problem, blocks)
    home = block_of(problem, blocks)
    part_home = np.append(block_of(problem, parts), HOST)
    owner = [int(home[part.ops[0]]) for part in parts]
    moved = moves_s(problem, blocks, crossings_of(problem, blocks, parts), owner)
    delay = problem.transfers.latency_s

    def pairs(source: int, target: int) -> Iterable[tuple[int, int]]:
        one, other = ((HOST,) if part == HOST else parts[part].devices for part in (source, target))
        return product(one, other)

    hosts = hosts_of(problem)
    chain = Chain.of([tuple(hosts[device] for device in part.devices) for part in parts])
    reads: dict[int, dict[int, PieceTransfer]] = {number: {} for number in range(-1, len(parts))}
    seen = set[tuple[int, int]]()
    nets, readers = problem.pins
    for net, reader in zip(nets.tolist(), readers.tolist(), strict=True):
        source, target = int(part_home[problem.producers[net]]), int(part_home[reader])
        if source == target:
            continue
        block = HOST if target == HOST else owner[target]
        inside = HOST not in (source, target) and owner[source] == block
        if source not in reads[target]:
            slowest_s = max(float(delay[pair]) for pair in pairs(source, target))
            slowest_s += problem.wires.passing_latency_s(chain.way(source, target))
            reads[target][source] = PieceTransfer(0.0 if inside else slowest_s, 0.0, 0.0)
        if problem.wires.all and not inside and (net, block) not in seen:
            seen.add((net, block))
            way, size = reads[target][source], float(problem.net_bytes[net])
            s_per_byte = problem.wires.way_s_per_byte(chain.way(source, target))
            reads[target][source] = PieceTransfer(way.delay_s, way.num_bytes + size, way.wired_s + size * s_per_byte)
    waits = [np.array([waits_s(problem, block, k) for k in block.devices]) / len(block.ops) for block in blocks]
    made = [
        TimedPiece(
            owner[number],
            part.devices,
            problem.compute_s[list(part.ops)][:, list(part.devices)].sum(axis=0) + len(part.ops) * waits[owner[number]],
            np.array(moved[number]),
            reads[number],
        )
        for number, part in enumerate(parts)
    ]
    return made, reads[HOST]


def latency_s(problem: Problem, blocks: Sequence[Block]) -> float:
    """Seconds for one sample through an idle system.

    A piece of a block starts when its inputs are there and its device is free, receives, computes, sends, and its
    readers see the values ``latency_s`` later, and after their time on the slowest wire between hosts. Pieces of different
    devices run side by side.
    """
    parts, results = timed_pieces(problem, blocks)
    end_s = {HOST: 0.0}
    free_s = np.zeros(problem.num_devices)
    for number, part in enumerate(parts):
        busy = np.maximum(part.work_s, part.moved_s) if problem.overlap else part.work_s + part.moved_s
        ready_s = max((end_s[source] + way.seconds for source, way in part.sources.items()), default=0.0)
        mine = problem.processor_of[list(part.devices)]
        end_s[number] = max(ready_s, float(free_s[mine].max())) + float(busy.max())
        free_s[mine] = end_s[number]
    last_s = max((end_s[source] + way.seconds for source, way in results.items()), default=0.0)
    return max(last_s, *end_s.values())
