"""Items: the ops of a problem contracted to groups with one decision each, with costs by class of device.

Ops of one group are one item, and so is each strongly connected set of the order. A net costs a set of items ``send`` (it is made
inside and read outside) or ``receive`` (the other way round), once each: the hypergraph cost of the model of Tarnawski et al.
(2020). If the true cost depends on the other device, or on the number of them, the items have the least of it, so that a bound
on them holds for the problem; ``exact`` says whether their cost is the true one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf

import networkx
import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import HOST, Floats, Problem, rows_of
from autosplit.planners.bounds import least_priced, multipliers
from autosplit.planners.device_usage import Usage, sequence_usage, usage_of
from autosplit.planners.loads import Costs, Ints, Table
from autosplit.values.constraints import Demands

MANY_ITEMS = 5000
"""Items above which linear and integer programs are too large, and fewer orders are searched."""

Nets = dict[tuple[int, frozenset[int]], tuple[Floats, Floats]]
"""Seconds to send and to receive, by class, for each (producer, items that the net touches)."""


@dataclass(frozen=True)
class Items:
    """The items and devices of a problem under demands; items are numbered in a topological order.

    Attributes:
        demands: the limits on a plan.
        ops: the ops of each item.
        classes: the devices of each class.
        costs: of the items, by class of device.
        pins: the items that each net touches, its producer among them.
        weights: items that share bytes.
        after: the items that must not stand before each item.
        exact: the costs are the true ones for every contiguous plan with one block on a device.
    """

    demands: Demands
    ops: tuple[tuple[int, ...], ...]
    classes: tuple[tuple[int, ...], ...]
    costs: Costs
    pins: Table
    weights: Table
    after: Table
    exact: bool

    @property
    def num_items(self) -> int:
        """The number of items."""
        return len(self.ops)

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return sum(map(len, self.classes))

    @cached_property
    def work_s(self) -> Floats:
        """Seconds that each item keeps a device busy wherever its neighbours are, shape (num_items, K)."""
        return self.costs.compute_s if self.costs.overlap else self.costs.compute_s + self.costs.fixed_s

    @cached_property
    def multipliers(self) -> Floats:
        """Weights of the classes that make the compute bound large, shape (K,)."""
        return multipliers(self.work_s, np.array([len(members) for members in self.classes], dtype=np.float64))

    @cached_property
    def priced_work(self) -> Floats:
        """The least compute of each item, weighted by ``multipliers``, shape (num_items,)."""
        return least_priced(self.work_s, self.multipliers)

    @property
    def compute_bound_s(self) -> float:
        """No plan has a smaller largest load, in seconds; infinite where an item fits on no device."""
        widest = min(self.demands.max_replicas, self.num_devices)
        return max(float(self.priced_work.sum()), float(self.work_s.min(axis=1).max()) / widest)

    @cached_property
    def usage(self) -> Usage:
        """The devices that a prefix of a chain takes; in one sequence, fast ones first, where there are too many ways."""
        counts, mean_s = [len(members) for members in self.classes], self.costs.compute_s.clip(max=1e300).mean(axis=0)
        return usage_of(counts, self.demands) or sequence_usage(
            len(counts), self.demands, [int(k) for k in mean_s.argsort() for _ in range(counts[k])]
        )

    @cached_property
    def reach(self) -> NDArray[np.bool_]:
        """Whether an item is another one or, directly or not, must not stand before it, shape (num_items, num_items)."""
        found = np.eye(self.num_items, dtype=np.bool_)
        for item in reversed(range(self.num_items)):
            found[item] |= found[self.after.row(item)].any(axis=0)
        return found

    @cached_property
    def item_of(self) -> Ints:
        """The item of each op, shape (num_ops,)."""
        return row_of(self.ops)

    @cached_property
    def class_of(self) -> Ints:
        """The class of each device, shape (num_devices,)."""
        return row_of(self.classes)

    def expand(self, items: Iterable[int]) -> tuple[int, ...]:
        """The ops of some items, sorted."""
        return tuple(sorted(op for item in items for op in self.ops[item]))

    @cached_property
    def reversed(self) -> "Items":
        """The items in reverse: item i becomes item n - 1 - i, and the order is turned round."""
        last, c = self.num_items - 1, self.costs
        before = self.after.transposed(self.num_items)
        pins, weights = (Table(rows.start, last - rows.data) for rows in (self.pins, self.weights))
        costs = c._replace(
            compute_s=c.compute_s[::-1].copy(),
            fixed_s=c.fixed_s[::-1].copy(),
            num_bytes=c.num_bytes[::-1].copy(),
            producer=np.where(c.producer == HOST, HOST, last - c.producer),
            nets=pins.transposed(self.num_items),
            weights=weights.transposed(self.num_items),
        )
        after = Table.of([(last - before.row(item)).tolist() for item in range(last, -1, -1)])
        return replace(self, ops=self.ops[::-1], costs=costs, pins=pins, weights=weights, after=after)


def row_of(rows: Sequence[Sequence[int]]) -> Ints:
    """The row of each entry, where every entry from 0 on is in one row."""
    found = np.zeros(sum(map(len, rows)), dtype=np.int64)
    for number, row in enumerate(rows):
        found[list(row)] = number
    return found


def kept_together(problem: Problem, contiguous: bool) -> list[tuple[int, ...]]:
    """The ops of each group and, where the order binds, of each of its cycles."""
    members: dict[int, list[int]] = {}
    for op, home in enumerate(components(problem, contiguous).tolist()):
        members.setdefault(home, []).append(op)
    return [tuple(ops) for ops in members.values()]


def components(problem: Problem, contiguous: bool) -> Ints:
    """Component of each op: joined by groups and, where the order binds, by its cycles. Shape (num_ops,)."""
    order = np.array(problem.order if contiguous else (), dtype=np.int64).reshape(-1, 2)
    home = np.arange(problem.num_ops)
    if problem.groups or (order[:, 0] > order[:, 1]).any():
        graph = networkx.DiGraph(order.tolist())
        graph.add_nodes_from(range(problem.num_ops))
        for group in problem.groups:
            networkx.add_cycle(graph, group)
        for number, ops in enumerate(networkx.strongly_connected_components(graph)):
            home[list(ops)] = number
    return home


def _pair_costs(problem: Problem, classes: Sequence[Sequence[int]]) -> tuple[Floats, Floats, bool]:
    """The least seconds (fixed, per byte) of sending and of receiving by class, shape (K, 2); whether all pairs cost the same."""
    transfers = problem.transfers
    tables = (transfers.send_s, transfers.send_s_per_byte), (transfers.receive_s.T, transfers.receive_s_per_byte.T)
    least = np.zeros((2, len(classes), 2))
    equal = True
    for side, arrays in enumerate(tables):
        for number, members in enumerate(classes):
            others = [device for device in range(problem.num_devices) if device != members[0]]
            for part, array in enumerate(arrays):
                found = array[members[0], others] if others else np.zeros(1)
                least[side, number, part] = found.min()
                equal = equal and bool((found == found[0]).all())
    return least[0], least[1], equal


def contract(problem: Problem, demands: Demands, limit_s: float = inf) -> Items:
    """The items of a problem; for a plan that need not be contiguous, ops of a group only.

    Args:
        problem: the problem.
        demands: the limits on a plan.
        limit_s: only plans below it count, so that an item is barred from devices on which it alone takes as long.
    """
    home = components(problem, demands.contiguous)
    classes = problem.device_classes
    firsts = problem.representatives
    numbers, home = np.unique(home, return_inverse=True)
    count = len(numbers)
    compute = np.zeros((count, len(classes)))
    np.add.at(compute, home, problem.compute_s[:, firsts])
    compute[compute >= limit_s * demands.max_replicas] = np.inf
    num_bytes = np.zeros(count)
    np.add.at(num_bytes, home, problem.op_bytes)
    send, receive, equal = _pair_costs(problem, classes)
    fixed, nets, pays_once = _item_nets(problem, home, count, firsts, send, receive)
    pairs = home[np.array(problem.order if demands.contiguous else (), dtype=np.int64).reshape(-1, 2)]
    after = rows_of(sorted({(a, b) for a, b in pairs.tolist() if a != b}), count)
    weights = [(weight.num_bytes, frozenset(int(home[op]) for op in weight.users)) for weight in problem.weights]
    for size, users in weights:
        if len(users) == 1:
            num_bytes[min(users)] += size
    weights = [(size, users) for size, users in weights if len(users) > 1]
    order = topological_order(after, np.arange(count), depth_first=True)
    place = np.argsort(order)
    paid = [net for net in nets.items() if net[1][0].any() or net[1][1].any()]
    both = np.array([costs for _, costs in paid]).reshape(len(paid), 2, len(classes))
    members = rows_of(zip(place[home].tolist(), range(problem.num_ops), strict=True), count)
    pins = Table.of([sorted(place[list(touched)].tolist()) for (_, touched), _ in paid])
    held = Table.of([sorted(place[list(users)].tolist()) for _, users in weights])
    costs = Costs(
        compute_s=compute[order],
        fixed_s=fixed[order],
        num_bytes=num_bytes[order],
        memory_bytes=problem.memory_bytes[firsts],
        overlap=problem.overlap,
        nets=pins.transposed(count),
        net_size=np.diff(pins.start),
        producer=np.array([HOST if made == HOST else place[made] for (made, _), _ in paid], dtype=np.int64),
        send_s=np.ascontiguousarray(both[:, 0]),
        receive_s=np.ascontiguousarray(both[:, 1]),
        weights=held.transposed(count),
        weight_bytes=np.array([size for size, _ in weights], dtype=np.float64),
    )
    later = Table.of([sorted(place[after[item]].tolist()) for item in order.tolist()])
    exact = equal and pays_once and not problem.pools
    return Items(demands, tuple(map(tuple, members)), classes, costs, pins, held, later, exact)


def _item_nets(
    problem: Problem, home: Ints, count: int, firsts: Sequence[int], send: Floats, receive: Floats
) -> tuple[Floats, Nets, bool]:
    """The transfers that each item always pays, the nets by (producer, items), and whether a sender never pays twice."""
    transfers, place = problem.transfers, home.tolist()
    sizes = np.array([net.num_bytes for net in problem.nets]).reshape(-1, 1)
    sending, receiving = send[:, 0] + sizes * send[:, 1], receive[:, 0] + sizes * receive[:, 1]
    from_host = transfers.receive_s[HOST, firsts] + sizes * transfers.receive_s_per_byte[HOST, firsts]
    to_host = transfers.send_s[firsts, HOST] + sizes * transfers.send_s_per_byte[firsts, HOST]
    fixed = np.zeros((count, len(firsts)))
    nets: Nets = {}
    pays_once = True
    for number, net in enumerate(problem.nets):
        producer = place[net.producer] if net.producer != HOST else HOST
        touched = frozenset([place[op] for op in net.consumers if op != HOST])
        costs = sending[number], receiving[number]
        if producer == HOST:
            costs = np.zeros(len(firsts)), from_host[number]
        else:
            touched |= {producer}
            if HOST in net.consumers:
                out = to_host[number]
                fixed[producer] += out
                if problem.send_once:
                    costs = np.maximum(costs[0], out) - out, costs[1]
        if len(touched) > (producer != HOST) and touched:
            crowded = len(touched) > 2 and problem.num_devices > 2 and not problem.send_once
            pays_once = pays_once and not (crowded and costs[0].any())
            before = nets.get((producer, touched))
            nets[producer, touched] = costs if before is None else (before[0] + costs[0], before[1] + costs[1])
    return fixed, nets, pays_once


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
