"""Links between devices of different hosts, by hand."""

from itertools import permutations

from autosplit.clusters.hostprofile import links_of
from autosplit.values.links import Link
from autosplit.values.machine import HOST, Machine, parse_device

NETWORK_S, WAKE_S, RING_S, COLD_S = 0.5, 0.25, 0.0625, 0.125
DEVICES = [parse_device(name) for name in ("a/cpu:0", "b/cpu:1")]
NETWORK = [Link(source, target, NETWORK_S, 0, 0, 0, 0) for source, target in permutations((HOST, "a", "b"), 2)]
RINGS = [
    Link(*ends, WAKE_S, RING_S, 0.001, 2 * RING_S, 0.002, cold_send_s=COLD_S, cold_receive_s=2 * COLD_S)
    for device in DEVICES
    for ends in ((device.name, device.host), (device.host, device.name))
]


def test_a_value_passes_a_ring_the_network_and_a_ring() -> None:
    """Each device pays for its own ring; agents and network add latency alone."""
    machine = Machine.of(DEVICES, links_of(Machine.of(DEVICES, NETWORK), RINGS))
    assert machine.link("a/cpu:0", "b/cpu:1") == Link(
        "a/cpu:0", "b/cpu:1", NETWORK_S + 2 * WAKE_S, RING_S, 0.001, 2 * RING_S, 0.002, COLD_S, 2 * COLD_S
    )
    assert machine.link(HOST, "a/cpu:0") == Link(HOST, "a/cpu:0", NETWORK_S + WAKE_S, 0, 0, 2 * RING_S, 0.002, 0, 2 * COLD_S)
    assert machine.link("b/cpu:1", HOST) == Link("b/cpu:1", HOST, NETWORK_S + WAKE_S, RING_S, 0.001, 0, 0, COLD_S, 0)
    assert machine.link("a", "a") == Link("a", "a", NETWORK_S, 0, 0, 0, 0), "passing a"


def test_links_within_a_host_stay_as_they_were_measured() -> None:
    devices = [parse_device(name) for name in ("a/cpu:0", "a/cpu:1")]
    inner = Link("a/cpu:0", "a/cpu:1", WAKE_S, RING_S, 0, RING_S, 0)
    assert inner in list(links_of(Machine.of(devices, NETWORK), [inner]))
