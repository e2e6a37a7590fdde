"""The hypergraph of a problem without order: items, devices, and nets that a device pays for when they cross its border.

If a transfer costs the same whichever device is at the other end, the load of a device is the compute of its items plus the
cost of every net with some but not all of its pins there. Then moving one item changes two loads only, and the load is
submodular. For every other problem there is such a hypergraph that costs no more, which gives a bound.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import HOST, Block, Floats, Problem
from autosplit.planners.items import Items, Table, contract
from autosplit.planners.loads import Ints
from autosplit.values.constraints import Demands


@dataclass(frozen=True)
class Hypergraph:
    """Items, devices and nets.

    Attributes:
        item_of: item of each op of the problem, shape (num_ops,). Ops of one group are one item.
        compute_s: seconds of each item on each device, shape (num_items, num_devices); infinite where it may not run.
        pins: the items of each net.
        nets: the nets of each item.
        net_s: what each device pays when the net crosses its border, shape (num_nets, num_devices).
        net_outside: the net has an end at the host, so that no device holds all of it, shape (num_nets,).
        item_bytes: what each item keeps in memory, shape (num_items,).
        memory_bytes: what each device may hold, shape (num_devices,).
        classes: devices that may change places.
        exact: loads and caps are those of the problem; otherwise loads are at most those of the problem.
    """

    item_of: Ints
    compute_s: Floats
    pins: Table
    nets: Table
    net_s: Floats
    net_outside: NDArray[np.bool_]
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
        return int(self.compute_s.shape[1])

    @property
    def num_nets(self) -> int:
        """How many nets there are."""
        return len(self.net_s)

    def loads_s(self, home: Sequence[int] | Ints) -> Floats:
        """Load of each device under an assignment of items, shape (num_devices,)."""
        place = np.asarray(home)
        return np.array([self.load_s(place == device, device) for device in range(self.num_devices)])

    def load_s(self, members: NDArray[np.bool_], device: int) -> float:
        """Load of one device that holds the given items, shape (num_items,)."""
        inside = np.add.reduceat(members[self.pins.data], self.pins.start[:-1]) if self.num_nets else np.zeros(0)
        cut = (inside > 0) & ((inside < np.diff(self.pins.start)) | self.net_outside)
        return float(self.compute_s[members, device].sum() + self.net_s[cut, device].sum())

    def fits(self, home: Sequence[int] | Ints) -> bool:
        """Whether every item may run where it is, and no device holds more than its cap."""
        place = np.asarray(home)
        held = np.bincount(place, weights=self.item_bytes, minlength=self.num_devices)
        allowed = np.isfinite(self.compute_s[np.arange(self.num_items), place]).all()
        return bool(allowed and (held <= self.memory_bytes).all())

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


def net_fields(nets: Iterable[tuple[Ints, bool, Floats]], compute_s: Floats) -> dict[str, Any]:
    """The fields of a hypergraph with these nets. Nets with the same items become one, and a net of one item becomes compute.

    Args:
        nets: the items of each net, whether it has an end at the host, and what each device pays if it crosses a border.
        compute_s: seconds of each item on each device; changed in place.
    """
    merged: dict[tuple[tuple[int, ...], bool], Floats] = {}
    for items, outside, price_s in nets:
        key = tuple(np.unique(items).tolist()), outside
        if len(key[0]) == 1:
            compute_s[key[0][0]] += price_s * outside
        else:
            merged[key] = merged[key] + price_s if key in merged else price_s
    pins = Table.of([row for row, _ in merged])
    return {
        "compute_s": compute_s,
        "pins": pins,
        "nets": pins.transposed(len(compute_s)),
        "net_s": np.array(list(merged.values())).reshape(len(merged), compute_s.shape[1]),
        "net_outside": np.array([outside for _, outside in merged], dtype=np.bool_),
    }


def hypergraph_of(problem: Problem, items: Items | None = None) -> Hypergraph:
    """The hypergraph of a problem; where it is not exact, its loads are at most those of the problem.

    A net whose sender and receiver pay differently is charged at the lower price. Transfers that run beside compute are left out.

    Args:
        problem: what is asked.
        items: of a chain, for a hypergraph that bounds chains; by default any op may go anywhere.
    """
    items = items or contract(problem, Demands(contiguous=False))
    c = items.costs
    outside = c.producer == HOST
    costs_s = np.where(outside[:, None], c.receive_s, np.minimum(c.send_s, c.receive_s))[:, items.class_of]
    paid = [] if c.overlap else np.flatnonzero(costs_s.any(axis=1)).tolist()
    exact = items.exact and not len(items.weights) and not (c.overlap and bool(len(items.pins) or c.fixed_s.any()))
    even = np.array_equal(c.send_s[~outside], c.receive_s[~outside])
    nets = ((items.pins[net], bool(outside[net]), costs_s[net]) for net in paid)
    return Hypergraph(
        item_of=items.item_of,
        item_bytes=c.num_bytes,
        memory_bytes=np.where(problem.memory_bytes >= c.num_bytes.sum(), np.inf, problem.memory_bytes),
        classes=items.classes,
        exact=exact and (c.overlap or even),
        **net_fields(nets, np.ascontiguousarray(items.work_s[:, items.class_of])),
    )
