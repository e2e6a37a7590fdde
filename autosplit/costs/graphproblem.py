"""Make the problem of putting a graph on the devices of a machine."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from autosplit.costs.problem import HOST, Net, Pool, Problem, SharedWeight, Transfers
from autosplit.costs.wires import Wires
from autosplit.errors import UsageError, raise_faults
from autosplit.values.graph import Graph
from autosplit.values.machine import HOST as HOST_NAME
from autosplit.values.machine import Machine


def problem_from(
    graph: Graph,
    op_s: Mapping[tuple[str, str], float],
    machine: Machine,
    *,
    barred: Mapping[tuple[str, str], str] | None = None,
    colocations: Sequence[Sequence[str]] = (),
) -> Problem:
    """The problem of putting a graph on a machine.

    Args:
        graph: the model; its inputs come from the host and its outputs go there.
        op_s: seconds by (op name, device name); a pair that is missing cannot be used.
        machine: devices with their memory caps, and links.
        barred: (op name, device name) to the reason why the op must not run there, as words for a message.
        colocations: sets of op names that stay in one stage.
    Raises: UsageError: an op or device that does not exist, a time that is negative or NaN; all faults at once.
    """
    devices = tuple(device.name for device in machine.devices)
    barred = barred or {}
    faults = _unknown_names(graph, devices, barred, colocations)
    raise_faults(UsageError, f"the constraints do not fit graph '{graph.name}' and its machine", faults)
    compute_s = np.full((len(graph.ops), len(devices)), np.inf)
    reasons: dict[tuple[int, int], str] = {}
    for number, op in enumerate(graph.ops):
        for device, name in enumerate(devices):
            if (op.name, name) in barred:
                reasons[number, device] = f"op '{op.name}': {barred[op.name, name]}"
            elif (op.name, name) not in op_s:
                reasons[number, device] = f"op '{op.name}' has no time on '{name}': that device does not support it"
            else:
                compute_s[number, device] = op_s[op.name, name]
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
        devices=devices,
        compute_s=compute_s,
        nets=nets,
        order=tuple(sorted({(net.producer, op) for net in nets for op in net.consumers if HOST not in (net.producer, op)})),
        transfers=_transfers(machine),
        op_bytes=op_bytes,
        memory_bytes=np.array([np.inf if d.memory_bytes is None else float(d.memory_bytes) for d in machine.devices]),
        weights=tuple(SharedWeight(graph.weights[w].num_bytes, tuple(r)) for w, r in users.items() if len(r) > 1),
        pools=_pools(machine),
        groups=tuple(tuple(sorted(graph.index[op] for op in group)) for group in colocations if len(group) > 1),
        wires=Wires(
            machine.wires, {host: machine.links[host, host].latency_s for host in hosts if (host, host) in machine.links}
        ),
        reasons=reasons,
    ).verify()


def _pools(machine: Machine) -> tuple[Pool, ...]:
    """A pool for each capped memory that several devices share."""
    members = {
        owner: tuple(number for number, device in enumerate(machine.devices) if device.memory == owner.name)
        for owner in machine.devices
        if owner.memory_bytes is not None
    }
    return tuple(Pool(inside, float(owner.memory_bytes or 0)) for owner, inside in members.items() if len(inside) > 1)


def _unknown_names(
    graph: Graph, devices: Sequence[str], barred: Mapping[tuple[str, str], str], colocations: Sequence[Sequence[str]]
) -> list[str]:
    """Faults: the names of ops and devices that the graph and its machine do not have."""
    ops = [*(op for op, _ in barred), *(op for group in colocations for op in group)]
    named = dict.fromkeys(device for _, device in barred)
    faults = [f"op '{op}' is not in the graph" for op in dict.fromkeys(ops) if op not in graph.index]
    return faults + [f"device '{d}' is not one of the machine's: {', '.join(devices)}" for d in named if d not in devices]


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
