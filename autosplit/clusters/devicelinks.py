"""Links between devices of different hosts, made of the measured rings of each host and the network between them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

from autosplit.values.links import Link
from autosplit.values.machine import HOST, Machine, host_of


def links_of(machine: Machine, rings: Sequence[Link]) -> Iterator[Link]:
    """The link of each ordered pair of devices, between each device and the driver, and from each host to itself.

    Between hosts a tensor goes to the agent over a ring, to the other host over the network, and over a ring again. The bytes on
    the network occupy the wires. The link from a host to itself has the latency of a value that only passes the host.

    Args:
        machine: the devices, and the links between hosts.
        rings: links between devices of one host, and between these and their agent, which has the name of the host.
    """
    ring = {(link.source, link.target): link for link in rings}
    for host in dict.fromkeys(device.host for device in machine.devices):
        hop_s = max((link.latency_s for (_, target), link in machine.links.items() if target == host), default=0.0)
        yield _free(host, host, hop_s)
    for source, target in permutations((HOST, *(device.name for device in machine.devices)), 2):
        left, entered = host_of(source), host_of(target)
        if left != entered:
            there = ring.get((source, left), _free(source, left))
            back = ring.get((entered, target), _free(entered, target))
            yield replace(
                there,
                target=target,
                latency_s=there.latency_s + machine.links[left, entered].latency_s + back.latency_s,
                receive_s=back.receive_s,
                receive_s_per_byte=back.receive_s_per_byte,
                cold_receive_s=back.cold_receive_s,
            )
        elif (source, target) in ring:
            yield ring[source, target]


def _free(source: str, target: str, latency_s: float = 0.0) -> Link:
    """A link that occupies neither end."""
    return Link(source, target, latency_s, 0.0, 0.0, 0.0, 0.0)
