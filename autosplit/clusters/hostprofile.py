"""Profile a model on all hosts of a cluster side by side, and join the profiles, and the links of all devices, to one.

Hosts with equal processors, cores, caches and versions share the measurement of one of them, unless the calibration kernel
runs at another speed there. Hosts on different cores of one machine are measured side by side instead.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from autosplit.backends.workspace import Workspace
from autosplit.clusters.agent import HostFacts, Subject
from autosplit.clusters.fleet import Fleet
from autosplit.measuring.calibration import DRIFT_LIMIT, drift
from autosplit.measuring.store import Store
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import unsplit
from autosplit.values.links import Link
from autosplit.values.machine import HOST, Machine, host_of
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision, Setting


def measure(
    traced: Traced,
    cluster: Fleet,
    backends: Sequence[str],
    precision: Precision = "f32",
    store: Store | None = None,
    remeasure: bool = False,
) -> Profile:
    """Seconds of every op on the devices of all hosts, the links between these devices, and the wires between hosts.

    Args:
        cluster: the hosts that were not lost are measured.
        backends: names, eager first if it is among them.
        store: where measurements are kept by host and device, and found again while the host and its versions are the same.
        remeasure: ignore the measurements of the store.
    Returns: a profile whose notes name the hosts that share a measurement.
    Raises: the errors of ``autosplit.measuring.measure``, with the host in front.
    """
    hosts = [facts for name, facts in cluster.hosts.items() if name not in cluster.lost]
    groups = alike(hosts)
    known = [
        Profile.empty(traced.graph, precision) if remeasure else stored(traced, group[0], precision, store) for group in groups
    ]
    missing = [tuple(b for b in backends if not _has(one, group[0], b)) for group, one in zip(groups, known, strict=True)]
    found = _measured(traced, cluster, [(group[0], names) for group, names in zip(groups, missing, strict=True)], precision)
    profile, rings, notes = Profile.empty(traced.graph, precision), list[Link](), list[str]()
    for group, old, new in zip(groups, known, found, strict=True):
        joined = old
        if new is not None:
            joined = replace(old, measured={**old.measured, **new.measured}, links=new.links)
            notes += [f"host '{group[0].name}': {note}" for note in new.notes]
            if store is not None:
                with store.noted(notes):
                    store.save(traced.graph, joined, new.measured)
                    store.save_links(group[0].provenance, new.links)
        for facts in group:
            own = _renamed(joined, _names(group[0], facts))
            profile = replace(profile, measured={**profile.measured, **own.measured}, stages=(*profile.stages, *own.stages))
            rings += own.links
        if len(group) > 1:
            others = ", ".join(f"'{facts.name}'" for facts in group[1:])
            notes.append(f"host '{group[0].name}' was measured for the equal host{'s' * (len(group) > 2)} {others} too")
    return replace(profile, notes=tuple(notes), wires=cluster.machine.wires).with_links(links_of(cluster.machine, rings))


def stored(traced: Traced, facts: HostFacts, precision: Precision, store: Store | None) -> Profile:
    """The stored measurements of a model on a host that are still valid there."""
    if store is None:
        return Profile.empty(traced.graph, precision)
    found = store.load(traced.graph, facts.stamps, precision)
    names = {device.on_host(facts.name).name for device in facts.devices}
    links = [
        one for one in store.links(facts.provenance) if host_of(one.source) == facts.name or host_of(one.target) == facts.name
    ]
    kept = {setting: one for setting, one in found.measured.items() if setting.device in names}
    return replace(found, measured=kept, stages=tuple(s for s in found.stages if s.setting in kept), links=tuple(links), notes=())


def _has(known: Profile, facts: HostFacts, backend: str) -> bool:
    wanted = [Setting(device.on_host(facts.name).name, backend, max(1, len(device.cores))) for device in facts.devices]
    return bool(known.links) and all(setting in known.measured for setting in wanted)


def _measured(
    traced: Traced, cluster: Fleet, wanted: Sequence[tuple[HostFacts, tuple[str, ...]]], precision: Precision
) -> list[Profile | None]:
    """The profile of each host with these backends, with the device names of the cluster; None for a host without backends."""
    asked = [(facts, backends) for facts, backends in wanted if backends]
    found: dict[str, Profile] = {}
    if asked:
        with Workspace() as workspace:
            program = unsplit(traced)
            folder = workspace.save(program)
            names, files = cluster.ship({facts.name: [folder] for facts, _ in asked})
        subject = Subject(traced.graph, dict(traced.specs), traced.example_inputs, names[folder])
        calls = [(facts.name, "measure", subject, files, facts.devices, backends, precision) for facts, backends in asked]
        for (facts, _), profile in zip(asked, cluster.ask(calls), strict=True):
            named = {device.name: device.on_host(facts.name).name for device in facts.devices} | {HOST: facts.name}
            found[facts.name] = _renamed(profile, named)
    return [found.get(facts.name) for facts, _ in wanted]


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
    if one.boot_id == other.boot_id and not set(one.cores) & set(other.cores):
        return False  # hosts on one machine slow each other through its caches and memory, so they are measured side by side
    kinds = [[(device.kind, len(device.cores)) for device in facts.devices] for facts in (one, other)]
    stamps = [replace(facts.provenance, calibration_s=0.0, date="") for facts in (one, other)]
    slower = drift(other.provenance.calibration_s, one.provenance.calibration_s)
    return kinds[0] == kinds[1] and stamps[0] == stamps[1] and abs(slower) <= DRIFT_LIMIT


def _names(measured: HostFacts, facts: HostFacts) -> dict[str, str]:
    """Map the device and agent names of a measured host to the names of an equal host."""
    pairs = zip(measured.devices, facts.devices, strict=True)
    return {a.on_host(measured.name).name: b.on_host(facts.name).name for a, b in pairs} | {measured.name: facts.name}


def _renamed(profile: Profile, names: Mapping[str, str]) -> Profile:
    """The profile with other names of its devices."""
    stages = (replace(one, setting=one.setting._replace(device=names[one.setting.device])) for one in profile.stages)
    return replace(
        profile,
        measured={setting._replace(device=names[setting.device]): one for setting, one in profile.measured.items()},
        stages=tuple(replace(one, busy=tuple(names.get(device, device) for device in one.busy)) for one in stages),
        links=tuple(replace(link, source=names[link.source], target=names[link.target]) for link in profile.links),
    )


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
