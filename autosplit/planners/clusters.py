"""Clusters: a problem with fewer ops, each standing for ops that stay together. A plan costs the same in both problems."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import networkx
import numpy as np

from autosplit.costs.problem import HOST, Block, Net, Problem, SharedWeight, rows_of
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


def forced_clusters(problem: Problem, contiguous: bool) -> Clusters:
    """A cluster for the items that every plan keeps together: each group and, in chains, the cycles that groups close.

    Nothing is joined where that would leave no order in which every value is made before it is read: for plans that need not be
    chains, and where the order is not that of the values.
    """
    labels = components(problem, contiguous).tolist()
    joins = contiguous and len(set(labels)) < problem.num_ops and set(problem.edges) == set(problem.order)
    if not joins:
        return Clusters(problem, tuple((op,) for op in range(problem.num_ops)))
    first: dict[int, int] = {}
    home = [first.setdefault(label, op) for op, label in enumerate(labels)]
    graph = networkx.DiGraph((home[a], home[b]) for a, b in problem.edges if home[a] != home[b])
    graph.add_nodes_from(home)
    place = {label: number for number, label in enumerate(networkx.lexicographical_topological_sort(graph))}
    cluster = [place[label] for label in home]
    members = rows_of(((number, op) for op, number in enumerate(cluster)), len(place))
    compute, sizes = np.zeros((len(members), problem.num_devices)), np.zeros(len(members))
    np.add.at(compute, cluster, problem.compute_s)
    np.add.at(sizes, cluster, problem.op_bytes)
    renamed = [*cluster, HOST]  # HOST is the last index
    nets = []
    for net in problem.nets:
        producer = renamed[net.producer]
        readers = tuple(sorted({renamed[op] for op in net.consumers} - {producer}))
        nets += [Net(producer, readers, net.num_bytes)] if readers else []
    smaller = replace(
        problem,
        ops=tuple(problem.ops[ops[0]] for ops in members),
        compute_s=compute,
        nets=tuple(nets),
        order=tuple(sorted({(cluster[a], cluster[b]) for a, b in problem.order if cluster[a] != cluster[b]})),
        op_bytes=sizes,
        weights=tuple(SharedWeight(w.num_bytes, tuple(sorted({cluster[op] for op in w.users}))) for w in problem.weights),
        groups=(),
        reasons={(cluster[op], device): reason for (op, device), reason in problem.reasons.items()},
    )
    return Clusters(smaller, tuple(map(tuple, members)))
