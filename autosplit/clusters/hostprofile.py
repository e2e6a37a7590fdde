"""Profile a model on all hosts of a cluster side by side, and join the profiles to one.

Hosts with equal processors, cores, caches and versions share the measurement of one of them, unless the calibration kernel
runs at another speed there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

from autosplit.clusters.agent import HostFacts, Subject
from autosplit.clusters.fleet import Fleet
from autosplit.deploying.workspace import Workspace
from autosplit.measuring.calibration import DRIFT_LIMIT, drift
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import unsplit
from autosplit.values.machine import HOST, Link, Machine, host_of
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision


def measure(traced: Traced, cluster: Fleet, backends: Sequence[str], precision: Precision = "f32") -> Profile:
    """Seconds of every op on the devices of all hosts, and the links between these devices.

    Args:
        traced: the model.
        cluster: the hosts that were not lost are measured.
        backends: names, eager first if it is among them.
        precision: what the backends compute in.
    Returns: a profile whose notes name the hosts that share a measurement.
    Raises: the errors of ``autosplit.measuring.measure``, with the host in front.
    """
    hosts = [facts for name, facts in cluster.hosts.items() if name not in cluster.lost]
    groups = alike(hosts)
    with Workspace() as workspace:
        program = unsplit(traced)
        folder = workspace.save(program, program.ops)
        names, files = cluster.ship({group[0].name: [folder] for group in groups})
    subject = Subject(traced.graph, dict(traced.specs), traced.example_inputs, names[folder])
    calls = [(group[0].name, "measure", subject, files, group[0].devices, tuple(backends), precision) for group in groups]
    found: list[Profile] = cluster.ask(calls)
    profile, own = Profile.empty(traced.graph, precision), {}
    notes = [
        note for group, one in zip(groups, found, strict=True) for note in (f"host '{group[0].name}': {n}" for n in one.notes)
    ]
    for group, measured in zip(groups, found, strict=True):
        for facts in group:
            own[facts.name] = _renamed(measured, group[0], facts)
            profile = replace(
                profile,
                measured={**profile.measured, **own[facts.name].measured},
                stages=(*profile.stages, *own[facts.name].stages),
            )
        if len(group) > 1:
            others = ", ".join(f"'{facts.name}'" for facts in group[1:])
            notes.append(f"host '{group[0].name}' was measured for the equal host{'s' * (len(group) > 2)} {others} too")
    links = list(_links(cluster.machine, own))
    return replace(profile, notes=tuple(notes)).with_links(links)


def alike(hosts: Sequence[HostFacts]) -> list[list[HostFacts]]:
    """The hosts in groups that share one measurement, the one to be measured first."""
    groups: list[list[HostFacts]] = []
    for facts in hosts:
        home = next((group for group in groups if _same(group[0], facts)), None)
        if home is None:
            groups.append([facts])
        else:
            home.append(facts)
    return groups


def _same(one: HostFacts, other: HostFacts) -> bool:
    kinds = [[(device.kind, len(device.cores)) for device in facts.devices] for facts in (one, other)]
    stamps = [replace(facts.provenance, calibration_s=0.0, date="") for facts in (one, other)]
    slower = drift(other.provenance.calibration_s, one.provenance.calibration_s)
    return kinds[0] == kinds[1] and stamps[0] == stamps[1] and abs(slower) <= DRIFT_LIMIT


def _renamed(profile: Profile, measured: HostFacts, facts: HostFacts) -> Profile:
    """The profile of one host with the devices of an equal one, as the cluster names them; the agent stands for ``host``."""
    names = {a.name: b.on_host(facts.name).name for a, b in zip(measured.devices, facts.devices, strict=True)} | {
        HOST: facts.name
    }
    stages = (replace(one, setting=one.setting._replace(device=names[one.setting.device])) for one in profile.stages)
    return replace(
        profile,
        measured={setting._replace(device=names[setting.device]): one for setting, one in profile.measured.items()},
        stages=tuple(replace(one, busy=tuple(names[device] for device in one.busy)) for one in stages),
        links=tuple(replace(link, source=names[link.source], target=names[link.target]) for link in profile.links),
    )


def _links(machine: Machine, own: dict[str, Profile]) -> Iterator[Link]:
    """The link of each ordered pair of devices, and between each device and the driver.

    Between hosts a tensor goes to the agent over a ring, to the other host over the network, and over a ring again. The agents
    are not devices: their shares count as latency. The bytes on the network occupy the sending device.
    """
    within = {(link.source, link.target): link for profile in own.values() for link in profile.links}
    names = [HOST, *(device.name for device in machine.devices)]
    for source, target in permutations(names, 2):
        hosts = host_of(source), host_of(target)
        if hosts[0] == hosts[1]:
            if (source, target) in within:
                yield within[source, target]
            continue
        net = machine.links[hosts]
        there = within.get((source, hosts[0]), Link(source, hosts[0], 0.0, 0.0, 0.0, 0.0, 0.0))
        back = within.get((hosts[1], target), Link(hosts[1], target, 0.0, 0.0, 0.0, 0.0, 0.0))
        latency_s = there.latency_s + there.receive_s + net.latency_s + back.send_s + back.latency_s
        send_s_per_byte = there.send_s_per_byte + net.send_s_per_byte
        yield Link(source, target, latency_s, there.send_s, send_s_per_byte, back.receive_s, back.receive_s_per_byte)
