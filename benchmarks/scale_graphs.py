"""Graphs of simple shapes for the scale benchmark, each with or without memory caps that bind."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

import numpy as np

from autosplit.costs.problem import Net, Problem, Transfers
from autosplit.costs.wires import Wires
from autosplit.values.links import Wire
from autosplit.values.machine import HOST as HOST_NAME

Edge = tuple[int, int]

FAMILIES: dict[str, Callable[[int, Random], Iterator[Edge]]] = {}
"""Name of a family to a function that yields the edges of a graph with a given number of ops."""


def family(name: str) -> Callable[[Callable[[int, Random], Iterator[Edge]]], Callable[[int, Random], Iterator[Edge]]]:
    """Enter a function into ``FAMILIES``."""

    def enter(edges: Callable[[int, Random], Iterator[Edge]]) -> Callable[[int, Random], Iterator[Edge]]:
        FAMILIES[name] = edges
        return edges

    return enter


@family("layered")
def layered_edges(num_ops: int, random: Random) -> Iterator[Edge]:
    """Layers of 1 to 12 ops; an op reads one to three ops of the layer before."""
    before: list[int] = []
    first = 0
    while first < num_ops:
        layer = list(range(first, min(num_ops, first + random.randint(1, 12))))
        for op in layer if before else ():
            yield from ((source, op) for source in random.sample(before, min(len(before), random.randint(1, 3))))
        before, first = layer, layer[-1] + 1


@family("inception-like")
def inception_edges(num_ops: int, random: Random) -> Iterator[Edge]:
    """Modules of four branches of 1 to 5 ops, whose ends one op joins."""
    joint, first = 0, 1
    while first < num_ops:
        ends = []
        for _ in range(4):
            before = joint
            for op in range(first, min(num_ops, first + random.randint(1, 5))):
                yield before, op
                before, first = op, op + 1
            ends.append(before)
        if first < num_ops:
            yield from ((end, first) for end in ends if end != joint)
            joint, first = first, first + 1


@family("transformer-like")
def transformer_edges(num_ops: int, random: Random) -> Iterator[Edge]:
    """Blocks of 12 ops: three projections, four heads, their join, a residual sum, two layers and a second residual sum."""
    block = [(0, 1), (0, 2), (0, 3), *((p, h) for p in (1, 2, 3) for h in (4, 5, 6, 7)), (4, 8), (5, 8), (6, 8), (7, 8),
             (8, 9), (0, 9), (9, 10), (10, 11), (11, 12), (9, 12)]  # fmt: skip
    for base in range(0, num_ops, 12):
        yield from ((base + a, base + b) for a, b in block if base + b < num_ops)


@family("star")
def star_edges(num_ops: int, random: Random) -> Iterator[Edge]:
    """All ops read the first one."""
    yield from ((0, op) for op in range(1, num_ops))


@family("bipartite")
def bipartite_edges(num_ops: int, random: Random) -> Iterator[Edge]:
    """Each op of the second half reads one to three ops of the first half."""
    half = num_ops // 2
    for op in range(half, num_ops):
        yield from ((source, op) for source in random.sample(range(half), random.randint(1, 3)))


@family("grid")
def grid_edges(num_ops: int, random: Random) -> Iterator[Edge]:
    """Rows of 20 ops; an op reads its left and its upper neighbour."""
    for op in range(num_ops):
        if op % 20 and op:
            yield op - 1, op
        if op >= 20:
            yield op - 20, op


@family("chains side by side")
def chain_edges(num_ops: int, random: Random) -> Iterator[Edge]:
    """Sixteen chains of equal length, numbered in turn."""
    yield from ((op - 16, op) for op in range(16, num_ops))


@family("independent ops")
def no_edges(num_ops: int, random: Random) -> Iterator[Edge]:
    """No op reads another one."""
    yield from ()


def graph_problem(
    name: str,
    edges: Sequence[Edge],
    num_ops: int,
    num_devices: int,
    *,
    seed: int = 0,
    cut_s: tuple[float, float] = (0.01, 0.1),
    caps: tuple[float, float] | None = None,
    speeds: tuple[float, float] = (1.0, 1.0),
) -> Problem:
    """Ops of 0.2 to 2 s with weights of 0 to 1 byte; each range below is drawn from evenly.

    Args:
        name: of the problem.
        edges: (maker, reader), each maker numbered before its readers.
        num_ops: number of ops.
        num_devices: number of devices.
        seed: of all that is drawn.
        cut_s: what a value costs each end that it crosses to, in seconds.
        caps: memory of a device over an equal share of all weights; None for no caps.
        speeds: how many times as long as given an op takes on a device.
    """
    random = Random(seed)
    readers: list[list[int]] = [[] for _ in range(num_ops)]
    for source, target in edges:
        readers[source].append(target)
    transfers = Transfers.free(num_devices)
    for array in (transfers.send_s_per_byte, transfers.receive_s_per_byte):
        array[:num_devices, :num_devices] = 1.0
        np.fill_diagonal(array, 0.0)
    work = np.array([random.uniform(0.2, 2.0) for _ in range(num_ops)])
    speed = np.array([random.uniform(*speeds) for _ in range(num_devices)])
    op_bytes = np.array([random.random() for _ in range(num_ops)])
    memory = np.full(num_devices, np.inf)
    if caps is not None:
        memory = np.array([random.uniform(*caps) for _ in range(num_devices)]) * op_bytes.sum() / num_devices
    return Problem(
        name=name,
        ops=tuple(f"op{op}" for op in range(num_ops)),
        devices=tuple(f"acc{device}" for device in range(num_devices)),
        compute_s=work[:, None] * speed[None, :],
        nets=tuple(Net(op, tuple(sorted(found)), random.uniform(*cut_s)) for op, found in enumerate(readers) if found),
        order=tuple((op, reader) for op, found in enumerate(readers) for reader in sorted(found)),
        transfers=transfers,
        op_bytes=op_bytes,
        memory_bytes=memory,
        send_once=True,
    ).verify()


RACKS, HOSTS_OF_RACK, DEVICES_OF_HOST = 4, 8, 8
"""A cluster of 32 hosts with 256 devices."""


def cluster_problem(num_ops: int, card_s: float = 10.0, uplink_s: float = 60.0, within_s: float = 1.0) -> Problem:
    """A layered graph on equal devices of hosts in racks, with three kinds of links.

    Args:
        num_ops: number of ops.
        card_s: seconds that the card of a host is busy for the bytes of one unit, in each direction.
        uplink_s: the same for what joins a rack to the others.
        within_s: seconds that the sender within a host is busy for one unit.
    """
    racks = [[f"rack{rack}-host{host}" for host in range(HOSTS_OF_RACK)] for rack in range(RACKS)]
    hosts = tuple(name for rack in racks for name in rack)
    ends = (HOST_NAME, *hosts)
    wires = [Wire(f"{name} sends", (name,), ends, card_s) for name in hosts]
    wires += [Wire(f"{name} receives", ends, (name,), card_s) for name in hosts]
    for number, rack in enumerate(racks):
        others = tuple(name for name in ends if name not in rack)
        wires.append(Wire(f"rack{number} sends", tuple(rack), others, uplink_s))
        wires.append(Wire(f"rack{number} receives", others, tuple(rack), uplink_s))
    num_devices = len(hosts) * DEVICES_OF_HOST
    plain = graph_problem("racks", list(layered_edges(num_ops, Random(1))), num_ops, num_devices)
    place = np.arange(num_devices) // DEVICES_OF_HOST
    transfers = Transfers.free(num_devices)
    transfers.send_s_per_byte[:num_devices, :num_devices] = np.where(place[:, None] == place[None, :], within_s, 0.0)
    np.fill_diagonal(transfers.send_s_per_byte, 0.0)
    names = tuple(f"{hosts[place[number]]}/cpu:{number % DEVICES_OF_HOST}" for number in range(num_devices))
    return replace(plain, devices=names, transfers=transfers, wires=Wires(tuple(wires))).verify()


def simple_graphs(num_ops: int = 1000, num_devices: int = 8) -> Iterator[Problem]:
    """Every family, with and without caps; and layered graphs on unequal devices."""
    for caps, said in ((None, ""), ((1.1, 1.1), ", caps")):
        for name, edges in FAMILIES.items():
            yield graph_problem(name + said, list(edges(num_ops, Random(1))), num_ops, num_devices, caps=caps)
        found = list(layered_edges(num_ops, Random(1)))
        yield graph_problem("unequal devices" + said, found, num_ops, num_devices, speeds=(1.0, 4.0), caps=caps and (1.6, 2.5))
