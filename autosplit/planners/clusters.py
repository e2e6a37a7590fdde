"""Clusters: a problem with fewer ops, each standing for ops that stay together. A plan costs the same in both problems."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import networkx
import numpy as np

from autosplit.costs.problem import HOST, Block, Floats, Net, Problem, SharedWeight, rows_of
from autosplit.planners.loads import Ints


def kept_together(problem: Problem, contiguous: bool) -> list[tuple[int, ...]]:
    """The ops of each group and, where the order binds, of each of its cycles; those with the first op come first."""
    order = np.array(problem.order if contiguous else (), dtype=np.int64).reshape(-1, 2)
    if not problem.groups and not (order[:, 0] > order[:, 1]).any():
        return [(op,) for op in range(problem.num_ops)]
    graph = networkx.DiGraph(order.tolist())
    graph.add_nodes_from(range(problem.num_ops))
    for group in problem.groups:
        networkx.add_cycle(graph, group)
    return sorted(tuple(sorted(ops)) for ops in networkx.strongly_connected_components(graph))


def row_of(rows: Sequence[Sequence[int]]) -> Ints:
    """The row of each entry, where every entry from 0 on is in one row."""
    found = np.zeros(sum(map(len, rows)), dtype=np.int64)
    for number, row in enumerate(rows):
        found[list(row)] = number
    return found


def gathered(home: Ints, group: Ints) -> Ints:
    """The entry in ``home`` of each group; of one of its members, where they differ."""
    found = np.zeros(int(group.max()) + 1, dtype=np.int64)
    found[group] = home
    return found


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
        home, cluster = row_of([block.ops for block in blocks]), row_of(self.members)
        place = gathered(home, cluster)
        if (place[cluster] != home).any():
            return None
        return tuple(Block(tuple(np.flatnonzero(place == n).tolist()), block.devices) for n, block in enumerate(blocks))


def contracted(problem: Problem, home: Ints) -> Clusters:
    """The clusters of all ops with one number in ``home``, in the order of the numbers; the problem has no groups.

    It verifies only where the numbers are in an order in which every value is made before it is read.
    """
    members = rows_of(zip(home.tolist(), range(problem.num_ops), strict=True), int(home.max()) + 1)
    compute, sizes = np.zeros((len(members), problem.num_devices)), np.zeros(len(members))
    np.add.at(compute, home, problem.compute_s)
    np.add.at(sizes, home, problem.op_bytes)
    renamed = [*home.tolist(), HOST]  # HOST is the last index
    nets = []
    for net in problem.nets:
        producer = renamed[net.producer]
        readers = tuple(sorted({renamed[op] for op in net.consumers} - {producer}))
        nets += [Net(producer, readers, net.num_bytes)] if readers else []
    small = replace(
        problem,
        ops=tuple(problem.ops[ops[0]] for ops in members),
        compute_s=compute,
        nets=tuple(nets),
        order=order_of(problem, home),
        op_bytes=sizes,
        weights=tuple(SharedWeight(w.num_bytes, tuple(sorted({renamed[op] for op in w.users}))) for w in problem.weights),
        groups=(),
        reasons={(renamed[op], device): reason for (op, device), reason in problem.reasons.items()},
    )
    return Clusters(small, tuple(map(tuple, members)))


def order_of(problem: Problem, home: Ints) -> tuple[tuple[int, int], ...]:
    """The order of the ops after which the ops of a problem are renamed, each pair once, sorted."""
    pairs = home[np.array(problem.order, dtype=np.int64).reshape(-1, 2)].tolist()
    return tuple(sorted({(before, after) for before, after in pairs if before != after}))


def topological_order(after: Sequence[Iterable[int]], keys: Ints | Floats, depth_first: bool = False) -> Ints:
    """An order in which the ready item with the smallest key comes next.

    Args:
        after: the items that must not stand before each item.
        keys: of each item.
        depth_first: of the ready items only those that became ready last are looked at.
    """
    waiting = np.bincount([goal for goals in after for goal in goals], minlength=len(after)).tolist()
    rank = keys.tolist()
    ready = [(0, rank[item], item) for item, count in enumerate(waiting) if not count]
    heapify(ready)
    order = []
    while ready:
        item = heappop(ready)[-1]
        order.append(item)
        for goal in after[item]:
            waiting[goal] -= 1
            if not waiting[goal]:
                heappush(ready, (-len(order) * depth_first, rank[goal], goal))
    return np.array(order, dtype=np.int64)


def clustered(problem: Problem, contiguous: bool, depth_first: bool = False) -> Clusters:
    """A cluster for the ops that every plan keeps together, in a topological order."""
    home = row_of(kept_together(problem, contiguous))
    count = int(home.max()) + 1
    order = topological_order(rows_of(order_of(problem, home), count), np.arange(count), depth_first)
    return contracted(problem, np.argsort(order)[home])


def forced_clusters(problem: Problem, contiguous: bool) -> Clusters:
    """A cluster for the ops that every plan keeps together: each group and, in chains, the cycles that groups close.

    Nothing is joined where that would leave no order in which every value is made before it is read: for plans that need not be
    chains, and where the order is not that of the values.
    """
    if contiguous and set(problem.edges) == set(problem.order) and len(kept_together(problem, contiguous)) < problem.num_ops:
        return clustered(problem, contiguous)
    return Clusters(problem, tuple((op,) for op in range(problem.num_ops)))
