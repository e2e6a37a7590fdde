"""Make the problem of putting a graph on the devices of a machine."""

from dataclasses import fields

import numpy as np

from autosplit.costs.problem import HOST, Floats, Net, Pool, Problem, SharedWeight, Transfers, edges_of
from autosplit.costs.wires import Wires
from autosplit.values.constraints import Placement
from autosplit.values.graph import Graph
from autosplit.values.machine import HOST as HOST_NAME
from autosplit.values.machine import Machine


def problem_from(graph: Graph, machine: Machine, compute_s: Floats, placement: Placement = Placement()) -> Problem:  # noqa: B008
    """The problem of putting a graph on a machine; the caller verifies it when it has all costs.

    Args:
        graph: the model; its inputs come from the host and its outputs go there.
        machine: devices with their memory caps, and links.
        compute_s: seconds of each op on each device.
        placement: devices where ops must not run, and ops that stay in one stage.
    """
    compute_s, reasons = compute_s.copy(), dict[tuple[int, int], str]()
    numbers = {device.name: number for number, device in enumerate(machine.devices)}
    for (barred, name), words in placement.barred.items():
        place = graph.index[barred], numbers[name]
        compute_s[place], reasons[place] = np.inf, f"op '{barred}': {words}"
    nets, hosts = _nets(graph), dict.fromkeys(device.host for device in machine.devices)
    users: dict[str, list[int]] = {}
    for number, op in enumerate(graph.ops):
        for weight in dict.fromkeys(op.weights):
            users.setdefault(weight, []).append(number)
    op_bytes = np.zeros(len(graph.ops))
    for weight, readers in users.items():
        if len(readers) == 1:
            op_bytes[readers[0]] += graph.weights[weight].num_bytes
    return Problem(
        name=graph.name,
        ops=tuple(op.name for op in graph.ops),
        devices=tuple(numbers),
        compute_s=compute_s,
        nets=nets,
        order=edges_of(nets),
        transfers=_transfers(machine),
        op_bytes=op_bytes,
        memory_bytes=np.array([np.inf if d.memory_bytes is None else float(d.memory_bytes) for d in machine.devices]),
        weights=tuple(SharedWeight(graph.weights[w].num_bytes, tuple(r)) for w, r in users.items() if len(r) > 1),
        pools=_pools(machine),
        groups=tuple(tuple(sorted(graph.index[op] for op in group)) for group in placement.groups if len(group) > 1),
        wires=Wires(
            machine.wires, {host: machine.links[host, host].latency_s for host in hosts if (host, host) in machine.links}
        ),
        reasons=reasons,
    )


def _pools(machine: Machine) -> tuple[Pool, ...]:
    """A pool for each capped memory that several devices share."""
    members = {
        owner: tuple(number for number, device in enumerate(machine.devices) if device.memory == owner.name)
        for owner in machine.devices
        if owner.memory_bytes is not None
    }
    return tuple(Pool(inside, float(owner.memory_bytes or 0)) for owner, inside in members.items() if len(inside) > 1)


def _nets(graph: Graph) -> tuple[Net, ...]:
    nets = []
    outputs = set(graph.outputs)
    for name, value in graph.values.items():
        producer = graph.index[graph.producer[name]] if name in graph.producer else HOST
        readers = tuple(graph.index[op] for op in graph.consumers[name])
        if name in outputs and producer != HOST:
            readers += (HOST,)
        if readers:
            nets.append(Net(producer, readers, float(value.num_bytes)))
    return tuple(nets)


def _transfers(machine: Machine) -> Transfers:
    ends = [*(device.name for device in machine.devices), HOST_NAME]
    links = [[machine.link(source, target) for target in ends] for source in ends]
    return Transfers(*(np.array([[getattr(link, one.name) for link in row] for row in links]) for one in fields(Transfers)))
