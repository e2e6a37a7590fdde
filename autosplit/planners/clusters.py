"""Clusters: a problem with fewer ops, each standing for ops that stay together. A plan costs the same in both problems."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import networkx
import numpy as np

from autosplit.costs.problem import HOST, Block, Net, Problem, SharedWeight
from autosplit.planners.dominance import roots
from autosplit.planners.items import components


@dataclass(frozen=True)
class Clusters:
    """A smaller problem and the ops that each of its ops stands for."""

    problem: Problem
    members: tuple[tuple[int, ...], ...]

    def expand(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Blocks of clusters as blocks of ops."""
        return tuple(Block(tuple(sorted(op for cluster in b.ops for op in self.members[cluster])), b.devices) for b in blocks)

    def shrink(self, blocks: Sequence[Block]) -> tuple[Block, ...] | None:
        """Blocks of ops as blocks of clusters; None where a cluster is in two blocks."""
        place = {op: number for number, block in enumerate(blocks) for op in block.ops}
        homes = [{place[op] for op in members} for members in self.members]
        if any(len(home) > 1 for home in homes):
            return None
        found: list[list[int]] = [[] for _ in blocks]
        for cluster, home in enumerate(homes):
            found[min(home)].append(cluster)
        return tuple(Block(tuple(clusters), block.devices) for clusters, block in zip(found, blocks, strict=True))


def net_edges(problem: Problem) -> set[tuple[int, int]]:
    """(maker, reader) of every value that an op makes and an op reads."""
    return {(net.producer, op) for net in problem.nets for op in net.consumers if HOST not in (net.producer, op)}


def forced_clusters(problem: Problem, contiguous: bool) -> Clusters:
    """A cluster for what every plan keeps together: each group and, in chains, the cycles that groups close.

    Nothing is joined where that would leave no order in which every value is made before it is read: for plans that need not be
    chains, and where the order is not that of the values.
    """
    if not contiguous or net_edges(problem) != set(problem.order):
        return Clusters(problem, tuple((op,) for op in range(problem.num_ops)))
    first: dict[int, int] = {}
    return clustered(problem, [first.setdefault(home, op) for op, home in enumerate(components(problem, contiguous).tolist())])


def fewer_clusters(clusters: Clusters, most: int) -> Clusters:
    """At most ``most`` clusters where possible: ops are joined with their only reader, or with the only op that they read.

    The lightest ops come first. No cluster grows beyond an eighth of all work or a quarter of a memory cap, and ops whose fastest
    devices differ are not joined. With groups, or an order that is not that of the values, nothing is joined.
    """
    problem = clusters.problem
    if problem.num_ops <= most or problem.groups or not net_edges(problem) >= set(problem.order):
        return clusters
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
    joined = clustered(problem, roots(home))
    return Clusters(
        joined.problem, tuple(tuple(op for cluster in lot for op in clusters.members[cluster]) for lot in joined.members)
    )


def clustered(problem: Problem, home: Sequence[int]) -> Clusters:
    """The problem with the ops of each label joined; the labels must form no cycle."""
    labels = sorted(set(home))
    graph = networkx.DiGraph((home[a], home[b]) for a, b in {*net_edges(problem), *problem.order} if home[a] != home[b])
    graph.add_nodes_from(labels)
    place = {label: number for number, label in enumerate(networkx.lexicographical_topological_sort(graph))}
    cluster = np.array([place[label] for label in home], dtype=np.int64)
    members: list[list[int]] = [[] for _ in labels]
    for op, number in enumerate(cluster.tolist()):
        members[number].append(op)
    compute, sizes = np.zeros((len(labels), problem.num_devices)), np.zeros(len(labels))
    np.add.at(compute, cluster, problem.compute_s)
    np.add.at(sizes, cluster, problem.op_bytes)
    smaller = Problem(
        name=problem.name,
        ops=tuple(problem.ops[ops[0]] for ops in members),
        devices=problem.devices,
        compute_s=compute,
        nets=_nets(problem, lambda op: op if op == HOST else int(cluster[op])),
        order=tuple(sorted({(int(cluster[a]), int(cluster[b])) for a, b in problem.order if cluster[a] != cluster[b]})),
        transfers=problem.transfers,
        op_bytes=sizes,
        memory_bytes=problem.memory_bytes,
        weights=tuple(SharedWeight(w.num_bytes, tuple(sorted({int(cluster[op]) for op in w.users}))) for w in problem.weights),
        pools=problem.pools,
        send_once=problem.send_once,
        overlap=problem.overlap,
        sync_s_per_byte=problem.sync_s_per_byte,
        reasons={(int(cluster[op]), device): reason for (op, device), reason in problem.reasons.items()},
    )
    return Clusters(smaller, tuple(map(tuple, members)))


def _nets(problem: Problem, cluster: Callable[[int], int]) -> tuple[Net, ...]:
    nets = []
    for net in problem.nets:
        producer = cluster(net.producer)
        readers = tuple(sorted({cluster(op) for op in net.consumers} - {producer}))
        if readers:
            nets.append(Net(producer, readers, net.num_bytes))
    return tuple(nets)
