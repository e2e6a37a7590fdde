"""Lumps: the same problem with fewer ops, each standing for ops that stay together. What a plan costs is the same in both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from autosplit.costs.problem import HOST, Block, Net, Problem, SharedWeight
from autosplit.planners.dominance import roots
from autosplit.planners.items import components


@dataclass(frozen=True)
class Lumps:
    """A smaller problem and the ops that each of its ops stands for."""

    problem: Problem
    members: tuple[tuple[int, ...], ...]

    def expand(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Blocks of lumps as blocks of ops."""
        return tuple(Block(tuple(sorted(op for lump in b.ops for op in self.members[lump])), b.devices) for b in blocks)

    def shrink(self, blocks: Sequence[Block]) -> tuple[Block, ...] | None:
        """Blocks of ops as blocks of lumps, or None where a lump is in two blocks."""
        place = {op: number for number, block in enumerate(blocks) for op in block.ops}
        homes = [{place[op] for op in members} for members in self.members]
        if any(len(home) > 1 for home in homes):
            return None
        found: list[list[int]] = [[] for _ in blocks]
        for lump, home in enumerate(homes):
            found[min(home)].append(lump)
        return tuple(Block(tuple(lumps), block.devices) for lumps, block in zip(found, blocks, strict=True))


def net_edges(problem: Problem) -> set[tuple[int, int]]:
    """(maker, reader) of every value that an op makes and an op reads."""
    return {(net.producer, op) for net in problem.nets for op in net.consumers if HOST not in (net.producer, op)}


def forced_lumps(problem: Problem, contiguous: bool) -> Lumps:
    """What every plan keeps together, as one op each: groups and, in a chain, the cycles that they close.

    Where that would not leave an order in which every value is made before it is read (groups of a plan that is no chain, or
    an order that is not the values' own), nothing is joined: the groups stay groups.
    """
    if not contiguous or net_edges(problem) != set(problem.order):
        return Lumps(problem, tuple((op,) for op in range(problem.num_ops)))
    return lumped(problem, components(problem, contiguous).tolist())


def fewer_lumps(lumps: Lumps, most: int) -> Lumps:
    """At most ``most`` lumps, if joining an op with its only reader, or with the only one that it reads, goes so far.

    The lightest go first. No lump grows beyond an eighth of all work or a quarter of a memory cap, and ops whose fastest
    devices differ are not joined. With groups that stayed groups, or an order that is not the values' own, none is.
    """
    problem = lumps.problem
    if problem.num_ops <= most or problem.groups or not net_edges(problem) >= set(problem.order):
        return lumps
    finite = np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0)
    work, size = finite.max(axis=1), problem.op_bytes.copy()
    most_work, most_bytes = work.sum() / 8, problem.memory_bytes.min() / 4
    fastest, allowed = problem.compute_s.argmin(axis=1), np.isfinite(problem.compute_s)
    alike = [(int(fastest[op]), allowed[op].tobytes()) for op in range(problem.num_ops)]
    shared = {op for weight in problem.weights for op in weight.users}
    after: list[set[int]] = [set() for _ in range(problem.num_ops)]
    before: list[set[int]] = [set() for _ in range(problem.num_ops)]
    for source, target in net_edges(problem):
        after[source].add(target)
        before[target].add(source)
    home = list(range(problem.num_ops))
    left = problem.num_ops

    def partner(op: int) -> int | None:
        near = (after[op] if len(after[op]) == 1 else set()) | (before[op] if len(before[op]) == 1 else set())
        fits = [
            other
            for other in near
            if alike[other] == alike[op] and work[other] + work[op] <= most_work and size[other] + size[op] <= most_bytes
        ]
        return min(fits, key=lambda other: float(work[other]), default=None)

    queue = sorted((op for op in range(problem.num_ops) if op not in shared), key=lambda op: float(work[op]))
    while queue and left > most:
        again = []
        for op in queue:
            other = partner(op) if left > most and home[op] == op else None
            if other is None or other in shared:
                continue
            home[op] = other
            left -= 1
            work[other] += work[op]
            size[other] += size[op]
            for side, back in ((after, before), (before, after)):
                for neighbour in side[op]:
                    back[neighbour].discard(op)
                    if neighbour != other:
                        back[neighbour].add(other)
                        side[other].add(neighbour)
            again.append(other)
        queue = sorted({op for op in again if home[op] == op}, key=lambda op: float(work[op]))
    joined = lumped(problem, roots(home))
    return Lumps(joined.problem, tuple(tuple(op for lump in lot for op in lumps.members[lump]) for lot in joined.members))


def lumped(problem: Problem, home: Sequence[int]) -> Lumps:
    """The problem with the ops of one label joined; the labels' own order must have no cycle."""
    labels = sorted(set(home))
    place = _sorted_places(labels, {(home[a], home[b]) for a, b in {*net_edges(problem), *problem.order} if home[a] != home[b]})
    lump = np.array([place[label] for label in home], dtype=np.int64)
    members: list[list[int]] = [[] for _ in labels]
    for op, number in enumerate(lump.tolist()):
        members[number].append(op)
    compute, sizes = np.zeros((len(labels), problem.num_devices)), np.zeros(len(labels))
    np.add.at(compute, lump, problem.compute_s)
    np.add.at(sizes, lump, problem.op_bytes)
    smaller = Problem(
        name=problem.name,
        ops=tuple(problem.ops[ops[0]] for ops in members),
        devices=problem.devices,
        compute_s=compute,
        nets=_nets(problem, lambda op: op if op == HOST else int(lump[op])),
        order=tuple(sorted({(int(lump[a]), int(lump[b])) for a, b in problem.order if lump[a] != lump[b]})),
        transfers=problem.transfers,
        op_bytes=sizes,
        memory_bytes=problem.memory_bytes,
        weights=tuple(SharedWeight(w.num_bytes, tuple(sorted({int(lump[op]) for op in w.users}))) for w in problem.weights),
        pools=problem.pools,
        send_once=problem.send_once,
        overlap=problem.overlap,
        reasons={(int(lump[op]), device): reason for (op, device), reason in problem.reasons.items()},
    )
    return Lumps(smaller, tuple(map(tuple, members)))


def _nets(problem: Problem, lump: Callable[[int], int]) -> tuple[Net, ...]:
    nets = []
    for net in problem.nets:
        producer = lump(net.producer)
        readers = tuple(sorted({lump(op) for op in net.consumers} - {producer}))
        if readers:
            nets.append(Net(producer, readers, net.num_bytes))
    return tuple(nets)


def _sorted_places(labels: Sequence[int], edges: set[tuple[int, int]]) -> dict[int, int]:
    """A topological order of the labels, smallest first, as label to place."""
    after: dict[int, list[int]] = {label: [] for label in labels}
    waiting = dict.fromkeys(labels, 0)
    for source, target in edges:
        after[source].append(target)
        waiting[target] += 1
    ready = [label for label in labels if not waiting[label]]
    heapify(ready)
    place: dict[int, int] = {}
    while ready:
        label = heappop(ready)
        place[label] = len(place)
        for target in after[label]:
            waiting[target] -= 1
            if not waiting[target]:
                heappush(ready, target)
    return place
