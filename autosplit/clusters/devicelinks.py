"""Links between devices of different hosts, made of what was measured: rings, the network, and relaying processes."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, permutations
from statistics import median
from typing import NamedTuple

from autosplit.clusters.agent import HostFacts
from autosplit.devices.limits import affinity, boot_id
from autosplit.values.graph import Graph
from autosplit.values.links import Link
from autosplit.values.machine import HOST, Machine, host_of


class Payers(NamedTuple):
    """The hosts whose devices pay for the processor time of their own agents, and those whose devices pay for the driver's.

    A process is paid for if each core on which it may run is a device. A process with a core to spare costs latency alone.
    """

    agents: frozenset[str]
    driver: frozenset[str]

    @staticmethod
    def of(hosts: Sequence[HostFacts]) -> "Payers":
        """Those among hosts. Hosts on one machine share its cores; the driver is paid for by the hosts on its machine."""
        devices: dict[str, set[int]] = {}
        for facts in hosts:
            devices.setdefault(facts.boot_id, set()).update(core for device in facts.devices for core in device.cores)
        here = boot_id()
        driver_pays = devices.get(here, set()).issuperset(affinity())
        return Payers(
            agents=frozenset(facts.name for facts in hosts if devices[facts.boot_id].issuperset(facts.cores)),
            driver=frozenset(facts.name for facts in hosts if driver_pays and facts.boot_id == here),
        )


class FrameSizes(NamedTuple):
    """Values that share a frame: the inputs of a request, what goes from stage to stage, and the outputs."""

    inputs: int
    between: int
    outputs: int

    @staticmethod
    def of(graph: Graph) -> "FrameSizes":
        """Those of a graph; ``between`` is the median over all cuts of the op order, as the cuts of a plan are not known."""
        fed = sum(1 for name in graph.inputs if graph.consumers[name])
        last = {name: max((graph.index[op] for op in graph.consumers[name]), default=-1) for name in graph.producer}
        change = [0] * (len(graph.ops) + 1)
        for name, op in graph.producer.items():
            change[graph.index[op]] += 1
            change[max(last[name], graph.index[op])] -= 1
        alive = list(accumulate(change))[: len(graph.ops) - 1]
        return FrameSizes(max(1, fed), max(1, round(median(alive or [1]))), max(1, len(set(graph.outputs))))


class _End(NamedTuple):
    """The cost of relaying a value at one end: what the device there pays, fixed and for each byte, and what only delays it."""

    paid_s: float
    paid_s_per_byte: float
    delay_s: float


def links_of(
    machine: Machine, within: Sequence[Link], relays: Mapping[str, Link], payers: Payers, sizes: FrameSizes
) -> Iterator[Link]:
    """The link of each ordered pair of devices, between each device and the driver, and from each host to itself.

    Between hosts a tensor goes to the agent over a ring, to the other host over the network, and over a ring again. The bytes on
    the network occupy the wires. Values that go the same way share a frame, so each pays for its part of the fixed cost.
    The link from a host to itself is for a value that only passes it: its agent takes the value and sends it on.

    Args:
        machine: the devices, and the links between hosts.
        within: links between devices of one host, and between these and their agent, which has the name of the host.
        relays: host to what one way of a request costs the driver (as sender) and the host's agent (as receiver).
        payers: whose devices pay for that.
        sizes: how many values share a frame.
    """
    rings = {(link.source, link.target): link for link in within}
    for host in dict.fromkeys(device.host for device in machine.devices):
        end = _end(host, host, relays, payers, sizes.between)
        hop_s = max((link.latency_s for (_, target), link in machine.links.items() if target == host), default=0.0)
        paid_s, per_byte = end.paid_s, end.paid_s_per_byte
        yield Link(host, host, hop_s + 2 * end.delay_s, paid_s, per_byte, paid_s, per_byte)
    for source, target in permutations((HOST, *(device.name for device in machine.devices)), 2):
        left, entered = host_of(source), host_of(target)
        if left == entered:
            if (source, target) in rings:
                yield rings[source, target]
            continue
        there = rings.get((source, left), Link(source, left, 0.0, 0.0, 0.0, 0.0, 0.0))
        back = rings.get((entered, target), Link(entered, target, 0.0, 0.0, 0.0, 0.0, 0.0))
        num_values = sizes.inputs if left == HOST else sizes.outputs if entered == HOST else sizes.between
        sent, taken = _end(left, entered, relays, payers, num_values), _end(entered, left, relays, payers, num_values)
        yield Link(
            source,
            target,
            latency_s=there.latency_s + sent.delay_s + machine.links[left, entered].latency_s + taken.delay_s + back.latency_s,
            send_s=there.send_s + sent.paid_s,
            send_s_per_byte=there.send_s_per_byte + sent.paid_s_per_byte,
            receive_s=back.receive_s + taken.paid_s,
            receive_s_per_byte=back.receive_s_per_byte + taken.paid_s_per_byte,
            cold_send_s=there.cold_send_s and there.cold_send_s + sent.paid_s,
            cold_receive_s=back.cold_receive_s and back.cold_receive_s + taken.paid_s,
        )


def _end(host: str, other: str, relays: Mapping[str, Link], payers: Payers, num_values: int) -> _End:
    """The end at ``host`` of a link between it and another host: its agent, and the driver if that is the other end."""
    if host == HOST:
        return _End(0.0, 0.0, 0.0)  # no device is here; the one at the other end pays for the driver
    relay = relays[host]
    costs = [(relay.receive_s, relay.receive_s_per_byte, host in payers.agents)]
    if other == HOST:
        costs.append((relay.send_s, relay.send_s_per_byte, host in payers.driver))
    return _End(
        sum(fixed_s for fixed_s, _, pays in costs if pays) / num_values,
        sum(s_per_byte for _, s_per_byte, pays in costs if pays),
        sum(fixed_s for fixed_s, _, pays in costs if not pays),
    )
