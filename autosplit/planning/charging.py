"""Transfer costs of a model on a machine: measured links, warm or cold, with the host's share if it has no core."""

from dataclasses import replace

from autosplit.values.graph import Graph
from autosplit.values.links import Link
from autosplit.values.machine import HOST, Machine
from autosplit.values.profile import Profile


def charge(graph: Graph, machine: Machine, profile: Profile) -> tuple[Machine, float]:
    """The machine with the profile's links as they are for this model, and the most seconds of the host's work on a device.

    A model that is larger than the last cache finds links cold. Where all cores are devices, the host has no core of its own:
    the core that hands over an answer wakes the host there, so for each request that device also pays for feeding the next
    one. Two stages on one device pay as much as two devices would. Links between hosts include the time of their agents.
    """
    provenances = [measured.provenance for measured in profile.measured.values()]
    last_cache_bytes = max((size for one in provenances for size in one.caches.values()), default=0)
    cold = 0 < last_cache_bytes < graph.used_bytes
    paying = machine.with_measured(link.when_cold() if cold else link for link in profile.links)
    paying = replace(paying, wires=machine.wires or profile.wires)
    cores = [device for device in machine.devices if device.kind == "cpu" and not device.host]
    own = [(device.name, paying.link(device.name, HOST), paying.link(HOST, device.name)) for device in cores]
    paying = paying.with_links(
        Link(name, name, to.latency_s, to.send_s, to.send_s_per_byte, back.receive_s, back.receive_s_per_byte)
        for name, to, back in own
        if (name, HOST) in paying.links and (name, name) not in paying.links
    )
    num_cores = max((one.num_cores for one in provenances), default=0)
    made = [graph.values[name] for name in dict.fromkeys(graph.outputs) if name in graph.producer]
    if not made or not 0 < num_cores <= sum(len(device.cores) for device in cores):
        return paying, 0.0
    fed_bytes, taken_bytes = sum(graph.values[name].num_bytes for name in graph.inputs), sum(v.num_bytes for v in made)
    charged, most_s = [], 0.0
    for _, to, back in own:
        fixed_s = to.receive_s + fed_bytes * back.send_s_per_byte
        most_s = max(most_s, fixed_s + taken_bytes * to.receive_s_per_byte)
        send_s, send_s_per_byte = to.send_s + fixed_s / len(made), to.send_s_per_byte + to.receive_s_per_byte
        charged.append(replace(to, send_s=send_s, send_s_per_byte=send_s_per_byte))
    return paying.with_links(charged), most_s
