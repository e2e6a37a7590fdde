"""Instance: the ops of a problem contracted to groups with one decision each, with costs by class of device.

Ops of one group are one item, and so is each strongly connected set of the order. A net costs a set of items ``send`` (it is made
inside and read outside) or ``receive`` (the other way round), once each: the hypergraph cost of the model of Tarnawski et al.
(2020). If the true cost depends on the other device, or on the number of them, the items have the least of it, so that a bound
on them holds for the problem; ``exact`` says whether their cost is the true one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import HOST, Floats, Problem, rows_of
from autosplit.planners.bounds import least_priced, multipliers
from autosplit.planners.clusters import clustered, row_of
from autosplit.planners.delays import by_class
from autosplit.planners.device_usage import Usage, sequence_usage, usage_of
from autosplit.planners.loads import Costs, Ints, Table
from autosplit.values.constraints import Demands

MANY_ITEMS = 5000
"""Items above which linear and integer programs are too large, and fewer orders are searched."""

Nets = dict[tuple[int, frozenset[int]], tuple[Floats, Floats]]
"""Seconds to send and to receive, by class, for each (producer, items that the net touches)."""


@dataclass(frozen=True)
class Instance:
    """A problem under demands: items in a topological order, the nets between them, and K classes of devices.

    Attributes:
        demands: the limits on a plan.
        ops: the ops of each item.
        classes: the devices of each class.
        compute_s: seconds of each item, shape (num_items, K), infinite where not allowed.
        fixed_s: transfers that an item pays wherever it stands (outputs to the host), shape (num_items, K).
        num_bytes: memory of each item, shape (num_items,).
        memory_bytes: cap of a device of each class, shape (K,).
        overlap: a device computes and transfers at the same time.
        pins: the items that each net touches, its producer among them.
        producer: the item that makes each net, HOST for inputs from the host.
        send_s, receive_s: seconds of a crossing net, shape (num_nets, K).
        weights, weight_bytes: the items that share each weight, and its bytes.
        after: the items that must not stand before each item.
        exact: the costs are the true ones for every contiguous plan with one block on a device.
    """

    demands: Demands
    ops: tuple[tuple[int, ...], ...]
    classes: tuple[tuple[int, ...], ...]
    compute_s: Floats
    fixed_s: Floats
    num_bytes: Floats
    memory_bytes: Floats
    overlap: bool
    pins: Table
    producer: Ints
    send_s: Floats
    receive_s: Floats
    weights: Table
    weight_bytes: Floats
    after: Table
    exact: bool

    @cached_property
    def costs(self) -> Costs:
        """The costs as compiled code reads them."""
        return Costs(
            self.compute_s, self.fixed_s, self.num_bytes, self.memory_bytes, self.overlap, self.pins.transposed(self.num_items),
            np.diff(self.pins.start), self.producer, self.send_s, self.receive_s, self.weights.transposed(self.num_items),
            self.weight_bytes,
        )  # fmt: skip

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
        return self.compute_s if self.overlap else self.compute_s + self.fixed_s

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
        counts, mean_s = [len(members) for members in self.classes], self.compute_s.clip(max=1e300).mean(axis=0)
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
    def reversed(self) -> "Instance":
        """The items in reverse: item i becomes item n - 1 - i, and the order is turned round."""
        last, before = self.num_items - 1, self.after.transposed(self.num_items)
        return replace(
            self,
            ops=self.ops[::-1],
            compute_s=self.compute_s[::-1].copy(),
            fixed_s=self.fixed_s[::-1].copy(),
            num_bytes=self.num_bytes[::-1].copy(),
            pins=Table(self.pins.start, last - self.pins.data),
            producer=np.where(self.producer == HOST, HOST, last - self.producer),
            weights=Table(self.weights.start, last - self.weights.data),
            after=Table.of([(last - before.row(item)).tolist() for item in range(last, -1, -1)]),
        )


def _pair_costs(problem: Problem) -> tuple[Floats, Floats, bool]:
    """The least seconds (fixed, per byte) of sending and of receiving by class, shape (K, 2); whether all pairs cost the same."""
    send, send_byte, receive, receive_byte, _ = (by_class(problem, table, alone=inf) for table in problem.transfers.arrays())
    tables = np.array([[send, send_byte], [receive.T, receive_byte.T]])
    least = tables.min(axis=3)
    equal = bool((np.isinf(tables) | (tables == least[..., None])).all())
    send, receive = np.where(np.isinf(least), 0.0, least).transpose(0, 2, 1)
    return send, receive, equal


def contract(problem: Problem, demands: Demands, limit_s: float = inf) -> Instance:
    """The items of a problem; for a plan that need not be contiguous, ops of a group only.

    Args:
        problem: the problem.
        demands: the limits on a plan.
        limit_s: only plans below it count, so that an item is barred from devices on which it alone takes as long.
    """
    classes, firsts = problem.device_classes, problem.representatives
    send, receive, equal = _pair_costs(problem)
    ordered = problem if demands.contiguous else replace(problem, order=())
    clusters = clustered(ordered, demands.contiguous, depth_first=True)
    small, count = clusters.problem, len(clusters.members)
    compute, num_bytes = np.ascontiguousarray(small.compute_s[:, firsts]), small.op_bytes
    compute[compute >= limit_s * demands.max_replicas] = np.inf
    fixed, nets, pays_once = _item_nets(small, firsts, send, receive)
    for weight in small.weights:
        if len(weight.users) == 1:
            num_bytes[weight.users[0]] += weight.num_bytes
    shared = [weight for weight in small.weights if len(weight.users) > 1]
    paid = [net for net in nets.items() if net[1][0].any() or net[1][1].any()]
    both = np.array([costs for _, costs in paid]).reshape(len(paid), 2, len(classes))
    return Instance(
        demands=demands,
        ops=clusters.members,
        classes=classes,
        compute_s=compute,
        fixed_s=fixed,
        num_bytes=num_bytes,
        memory_bytes=problem.memory_bytes[firsts],
        overlap=problem.overlap,
        pins=Table.of([sorted(touched) for (_, touched), _ in paid]),
        producer=np.array([made for (made, _), _ in paid], dtype=np.int64),
        send_s=np.ascontiguousarray(both[:, 0]),
        receive_s=np.ascontiguousarray(both[:, 1]),
        weights=Table.of([weight.users for weight in shared]),
        weight_bytes=np.array([weight.num_bytes for weight in shared], dtype=np.float64),
        after=Table.of(rows_of(small.order, count)),
        exact=equal and pays_once and not problem.pools,
    )


def _item_nets(problem: Problem, firsts: Sequence[int], send: Floats, receive: Floats) -> tuple[Floats, Nets, bool]:
    """The transfers that each op always pays, the nets by (producer, ops), and whether a sender never pays twice."""
    transfers, sizes = problem.transfers, problem.net_bytes[:, None]
    sending, receiving = send[:, 0] + sizes * send[:, 1], receive[:, 0] + sizes * receive[:, 1]
    from_host = transfers.receive_s[HOST, firsts] + sizes * transfers.receive_s_per_byte[HOST, firsts]
    to_host = transfers.send_s[firsts, HOST] + sizes * transfers.send_s_per_byte[firsts, HOST]
    fixed = np.zeros((problem.num_ops, len(firsts)))
    nets: Nets = {}
    pays_once = True
    for number, net in enumerate(problem.nets):
        producer, touched = net.producer, frozenset(op for op in net.consumers if op != HOST)
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
