"""Make the problem of putting a graph on the devices of a machine."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from autosplit.costs.problem import HOST, Net, Pool, Problem, SharedWeight, Transfers, edges_of
from autosplit.costs.wires import Wires
from autosplit.values.constraints import Placement
from autosplit.values.graph import Graph
from autosplit.values.machine import HOST as HOST_NAME
from autosplit.values.machine import Device, Machine


def problem_from(graph: Graph, machine: Machine, placement: Placement, devices: Sequence[Device]) -> Problem:
    """The problem of putting a graph on devices, where ops cost no time; the caller verifies it when it has all costs.

    Args:
        graph: the model; its inputs come from the host and its outputs go there.
        machine: the links of the devices.
        placement: devices where ops must not run, and ops that stay in one stage.
        devices: the device of the machine for each device of the problem.
    """
    compute_s, reasons = np.zeros((len(graph.ops), len(devices))), dict[tuple[int, int], str]()
    for (barred, name), words in placement.barred.items():
        for number, device in enumerate(devices):
            if device.name == name:
                place = graph.index[barred], number
                compute_s[place], reasons[place] = np.inf, f"op '{barred}': {words}"
    nets, hosts = _nets(graph), dict.fromkeys(device.host for device in devices)
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
        devices=tuple(device.name for device in devices),
        compute_s=compute_s,
        nets=nets,
        order=edges_of(nets),
        transfers=_transfers(machine, devices),
        op_bytes=op_bytes,
        memory_bytes=np.array([np.inf if d.memory_bytes is None else float(d.memory_bytes) for d in devices]),
        weights=tuple(SharedWeight(graph.weights[w].num_bytes, tuple(r)) for w, r in users.items() if len(r) > 1),
        pools=_pools(machine, devices),
        groups=tuple(tuple(sorted(graph.index[op] for op in group)) for group in placement.groups if len(group) > 1),
        wires=Wires(
            machine.wires, {host: machine.links[host, host].latency_s for host in hosts if (host, host) in machine.links}
        ),
        reasons=reasons,
    )


def _pools(machine: Machine, devices: Sequence[Device]) -> tuple[Pool, ...]:
    """A pool for each capped memory that several devices share."""
    pools = list[Pool]()
    for owner in machine.devices:
        inside = tuple(number for number, device in enumerate(devices) if device.memory == owner.name)
        if owner.memory_bytes is not None and len({devices[number].name for number in inside}) > 1:
            pools.append(Pool(inside, float(owner.memory_bytes)))
    return tuple(pools)


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


def _transfers(machine: Machine, devices: Sequence[Device]) -> Transfers:
    ends = [*(device.name for device in devices), HOST_NAME]
    links = [[machine.link(source, target) for target in ends] for source in ends]
    return Transfers(*(np.array([[getattr(link, one.name) for link in row] for row in links]) for one in fields(Transfers)))
