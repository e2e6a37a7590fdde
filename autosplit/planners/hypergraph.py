"""Hypergraph: a problem without order, as items on devices and nets that a device pays for when they cross its border.

With transfers that cost the same whoever is at the other end, the load of a device is the compute of its items plus the
cost of every net that has some but not all of its pins there. Moving one item then changes two loads only, and the load is
submodular. Every other problem is at least bounded by such a hypergraph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosplit.problem import HOST, Block, Floats, Problem

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Hypergraph:
    """Items, devices and nets.

    Attributes:
        item_of: item of each op of the problem, shape (num_ops,). Ops of one group are one item.
        compute_s: seconds of each item on each device, shape (num_items, num_devices); infinite where it may not run.
        net_start: where each net's pins start in `net_pins`, shape (num_nets + 1,).
        net_pins: items of all nets, net after net.
        net_s: what each device pays when the net crosses its border, shape (num_nets, num_devices).
        net_outside: the net has an end at the host, so that no device holds all of it, shape (num_nets,).
        item_start: where each item's nets start in `item_nets`, shape (num_items + 1,).
        item_nets: nets of all items, item after item.
        item_bytes: what each item keeps in memory, shape (num_items,).
        memory_bytes: what each device may hold, shape (num_devices,).
        classes: devices that may change places.
        exact: loads and caps are those of the problem; else loads are at most those of the problem.
    """

    item_of: Ints
    compute_s: Floats
    net_start: Ints
    net_pins: Ints
    net_s: Floats
    net_outside: NDArray[np.bool_]
    item_start: Ints
    item_nets: Ints
    item_bytes: Floats
    memory_bytes: Floats
    classes: tuple[tuple[int, ...], ...]
    exact: bool

    @property
    def num_items(self) -> int:
        """How many items there are."""
        return len(self.compute_s)

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return self.compute_s.shape[1]

    @property
    def num_nets(self) -> int:
        """How many nets there are."""
        return len(self.net_s)

    def pins(self, net: int) -> Ints:
        """Items of one net."""
        return self.net_pins[self.net_start[net] : self.net_start[net + 1]]

    def nets(self, item: int) -> Ints:
        """Nets of one item."""
        return self.item_nets[self.item_start[item] : self.item_start[item + 1]]

    def loads_s(self, home: Sequence[int] | Ints) -> Floats:
        """Load of each device under an assignment of items, shape (num_devices,)."""
        place = np.asarray(home)
        loads = np.zeros(self.num_devices)
        np.add.at(loads, place, self.compute_s[np.arange(self.num_items), place])
        for net in range(self.num_nets):
            touched = np.unique(place[self.pins(net)])
            if len(touched) > 1 or self.net_outside[net]:
                loads[touched] += self.net_s[net, touched]
        return loads

    def load_s(self, members: NDArray[np.bool_], device: int) -> float:
        """Load of one device that holds the given items, shape (num_items,)."""
        inside = np.add.reduceat(members[self.net_pins], self.net_start[:-1]) if self.num_nets else np.zeros(0)
        cut = (inside > 0) & ((inside < np.diff(self.net_start)) | self.net_outside)
        return float(self.compute_s[members, device].sum() + self.net_s[cut, device].sum())

    def blocks(self, home: Sequence[int] | Ints) -> tuple[Block, ...]:
        """One block for each device that is used."""
        place = np.asarray(home)[self.item_of]
        return tuple(Block(tuple(np.flatnonzero(place == device).tolist()), (int(device),)) for device in np.unique(place))

    def home(self, problem: Problem, blocks: Sequence[Block]) -> Ints | None:
        """Device of each item under the given blocks; None where an item is on several devices."""
        place = np.full(problem.num_ops, -1, dtype=np.int64)
        for block in blocks:
            if len(block.devices) > 1:
                return None
            place[list(block.ops)] = block.devices[0]
        found = np.zeros(self.num_items, dtype=np.int64)
        found[self.item_of] = place
        return found if np.array_equal(found[self.item_of], place) else None


def hypergraph_of(problem: Problem) -> Hypergraph:
    """The hypergraph of a problem: its own where transfers allow, else one whose loads are at most the problem's."""
    item_of = _items(problem)
    num_items = int(item_of.max()) + 1
    compute_s = np.zeros((num_items, problem.num_devices))
    np.add.at(compute_s, item_of, problem.compute_s)
    item_bytes = np.zeros(num_items)
    np.add.at(item_bytes, item_of, problem.op_bytes)
    send_s, receive_s, uniform = _ends(problem)
    exact = uniform and not problem.weights and not problem.pools and not (problem.overlap and len(problem.nets))
    merged: dict[tuple[tuple[int, ...], bool], Floats] = {}
    for number, net in enumerate(problem.nets):
        ends = {HOST if op == HOST else int(item_of[op]) for op in (net.producer, *net.consumers)}
        outside, pins = HOST in ends, tuple(sorted(ends - {HOST}))
        if len(pins) + outside < 2 or not pins:
            continue
        exact = exact and bool((send_s[number] == receive_s[number]).all() or (outside and len(pins) == 1))
        exact = exact and (problem.send_once or len(ends) == 2)
        cost = np.minimum(send_s[number], receive_s[number])
        if outside and len(pins) == 1:
            compute_s[pins[0]] += 0.0 if problem.overlap else (receive_s if net.producer == HOST else send_s)[number]
        else:
            merged[pins, outside] = merged.get((pins, outside), np.zeros(problem.num_devices)) + cost
    kept = [(pins, outside, cost) for (pins, outside), cost in merged.items() if cost.any() and not problem.overlap]
    holders: list[list[int]] = [[] for _ in range(num_items)]
    for number, (pins, _, _) in enumerate(kept):
        for item in pins:
            holders[item].append(number)
    return Hypergraph(
        item_of=item_of,
        compute_s=compute_s,
        net_start=np.cumsum([0] + [len(pins) for pins, _, _ in kept], dtype=np.int64),
        net_pins=np.array([item for pins, _, _ in kept for item in pins], dtype=np.int64),
        net_s=np.array([cost for _, _, cost in kept]).reshape(len(kept), problem.num_devices),
        net_outside=np.array([outside for _, outside, _ in kept], dtype=np.bool_),
        item_start=np.cumsum([0] + [len(nets) for nets in holders], dtype=np.int64),
        item_nets=np.array([net for nets in holders for net in nets], dtype=np.int64),
        item_bytes=item_bytes,
        memory_bytes=np.where(problem.memory_bytes >= item_bytes.sum(), np.inf, problem.memory_bytes),
        classes=problem.device_classes,
        exact=exact,
    )


def _items(problem: Problem) -> Ints:
    """Item of each op: its group, or itself; numbered by first op."""
    root = list(range(problem.num_ops))

    def find(op: int) -> int:
        while root[op] != op:
            root[op] = root[root[op]]
            op = root[op]
        return op

    for group in problem.groups:
        for op in group[1:]:
            low, high = sorted((find(group[0]), find(op)))
            root[high] = low
    return np.unique([find(op) for op in range(problem.num_ops)], return_inverse=True)[1].astype(np.int64)


def _ends(problem: Problem) -> tuple[Floats, Floats, bool]:
    """The least that sending and receiving each net costs each device, shape (num_nets, num_devices); whether it is all."""
    count = problem.num_devices
    transfers, size = problem.transfers, problem.net_bytes[:, None, None]
    others = ~np.eye(count + 1, dtype=bool)[:count]
    to_host = np.array([HOST in net.consumers for net in problem.nets], dtype=bool)
    from_host = problem.producers == HOST
    send, receive, uniform = np.zeros((len(problem.nets), count)), np.zeros((len(problem.nets), count)), True
    for device in range(count):
        peers = others[device]
        out = (transfers.send_s[device] + size[:, 0] * transfers.send_s_per_byte[device])[:, peers]
        back = (transfers.receive_s[:, device] + size[:, 0] * transfers.receive_s_per_byte[:, device])[:, peers]
        for costs, found, at_host in ((out, send, to_host), (back, receive, from_host)):
            if not len(problem.nets):
                continue
            devices = costs[:, :-1] if count > 1 else costs
            low = np.where(at_host, costs[:, -1], devices.min(axis=1))
            high = np.where(at_host, np.maximum(costs[:, -1], devices.max(axis=1)), devices.max(axis=1))
            if costs is back:
                high = np.where(at_host, costs[:, -1], high)
            found[:, device] = np.minimum(low, devices.min(axis=1)) if costs is out else low
            uniform = uniform and bool((high == found[:, device]).all())
    return send, receive, uniform
