"""What transfers cost a model on a machine: measured links, warm or cold, and what they are charged for others."""

from collections.abc import Mapping
from dataclasses import replace

from autosplit.values.graph import Graph
from autosplit.values.machine import HOST, Link, Machine
from autosplit.values.profile import Profile


def charge(
    graph: Graph, machine: Machine, profile: Profile, chosen: Mapping[str, tuple[str, int | None]]
) -> tuple[Machine, float]:
    """The machine with the profile's links, as they are for this model, and the most that the host costs a device.

    Args:
        graph: the model.
        machine: the devices, and links that the user gave.
        profile: what was measured.
        chosen: device name to its backend and threads; who receives a value pays what a cut costs that backend.
    """
    fed, host_s = _fed(graph, machine, profile)
    cuts = {device: profile.measured[profile.setting(device, *how)].cut_s_per_byte or 0.0 for device, how in chosen.items()}
    links = [fed.link(source, target) for source in cuts for target in cuts if cuts[target] > 0]
    cut = [replace(link, receive_s_per_byte=link.receive_s_per_byte + cuts[link.target]) for link in links]
    return fed.with_links(cut), host_s


def _fed(graph: Graph, machine: Machine, profile: Profile) -> tuple[Machine, float]:
    """The same without what cuts cost.

    A model that is larger than the last cache finds links cold. Where all cores are devices, the host has none of its own: the
    core that hands it an answer wakes it there, so for each request that device pays for feeding the next one too. Of two
    stages on one device, each costs what it would on two.
    """
    provenances = [measured.provenance for measured in profile.measured.values()]
    last_cache_bytes = max((size for one in provenances for size in one.caches.values()), default=0)
    swept_bytes = graph.weight_bytes + sum(v.num_bytes for v in graph.values.values())
    cold = 0 < last_cache_bytes < swept_bytes
    paying = machine.with_measured(link.when_cold() if cold else link for link in profile.links)
    cores = [device for device in machine.devices if device.kind == "cpu"]
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
