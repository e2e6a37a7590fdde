"""Fleet: the hosts of a Ray cluster, an agent on each of them, and the one machine that they are together."""

import contextlib
import secrets
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

from autosplit.children import user_folders
from autosplit.closing import Closing
from autosplit.clusters import hostlinks
from autosplit.clusters.agent import PROBE, PURPOSE, SENDER, Agent, Files, HostFacts
from autosplit.clusters.handshake import dial
from autosplit.clusters.raynodes import ASK_S, Agents, connected, living_nodes
from autosplit.errors import AutosplitError, DeviceError, WorkerError
from autosplit.files import content_hash, file_hash
from autosplit.values.links import Link, Wire
from autosplit.values.machine import HOST, Machine

ENDING_S = 5.0
JOIN_S = 60.0
"""Seconds that a host has for each step of coming back: a processor for its agent, and the agent's start."""

NUM_READINGS = 5
"""Readings of another host's clock; the one with the shortest way counts."""


class ClockOffset(NamedTuple):
    """Nanoseconds by which a host's clock is ahead, wrong by at most ``error_ns``, which is half of the call that read it."""

    error_ns: int
    ahead_ns: int


class Fleet(Closing):
    """The hosts of a Ray cluster; open until ``close``, best used in a ``with`` block.

    Agents, their workers and local nodes end with it, and with this process, however that ends.

    Args:
        cluster: ``auto``, ``HOST:PORT``, or ``local:N`` for N nodes on this machine.
    Raises: MissingExtraError: Ray is not installed. UsageError: another text. DeviceError: no cluster answers, or its hosts have
        different versions of torch.

    Attributes:
        secret: every connection of this run must prove that it knows it.
        hosts: by name.
    """

    def __init__(self, cluster: str) -> None:
        self.name = cluster
        self.secret = secrets.token_bytes(32)
        self.hosts: dict[str, HostFacts] = {}
        self._lost: dict[str, str] = {}
        with ExitStack() as opened:
            nodes = opened.enter_context(connected(cluster))
            if not nodes:
                raise DeviceError(f"cluster '{cluster}' has no node with a processor; start one with `ray start`")
            self._agents = Agents(nodes, Agent, self.secret)
            opened.callback(self._agents.kill)
            opened.callback(self._end_agents)
            self._join([node.name for node in nodes], ASK_S)
            self._links, self._wires = self._measure_network()
            self._opened = opened.pop_all()

    @property
    def machine(self) -> Machine:
        """The devices of the hosts that were not lost. Each has an even share of its host's memory. Links join hosts."""
        alive = [self.hosts[name] for name in self._alive]
        devices = [
            replace(device, memory_bytes=device.memory_bytes or facts.memory_bytes // len(facts.devices)).on_host(facts.name)
            for facts in alive
            for device in facts.devices
        ]
        names = {HOST, *(facts.name for facts in alive)}
        return Machine.of(devices, [link for link in self._links if {link.source, link.target} <= names], self._wires)

    @property
    def _alive(self) -> list[str]:
        return [name for name in self.hosts if name not in self._lost]

    @property
    def lost(self) -> Mapping[str, str]:
        """The hosts that were lost, and how."""
        return dict(self._lost)

    def lose(self, host: str, reason: str) -> None:
        """Count a host as lost: it is asked nothing more, and its devices leave the machine."""
        self._lost.setdefault(host, reason)

    def refresh(self) -> list[str]:
        """Use hosts again that were lost and came back, and use hosts that joined. Pipelines that run stay where they are.

        A host that Ray calls alive stays lost if it has no free processor or no answer within ``JOIN_S``, or another torch.

        Returns: the names of the hosts that are used from now on. Their devices are in ``machine`` again, under the same names,
            so a profile of them still holds. ``lost`` says why a host is not among them.
        """
        found = []
        for node in living_nodes():
            if node.name in self._lost or node.name not in self.hosts:
                try:
                    self._agents.start([node], JOIN_S)
                    self._join([node.name], JOIN_S)
                except (DeviceError, WorkerError) as failure:
                    self._lost[node.name] = str(failure)
                else:
                    found.append(node.name)
        if found:
            self._links, self._wires = self._measure_network()
        return found

    def ask(self, calls: Sequence[tuple[Any, ...]], timeout_s: float = ASK_S) -> list[Any]:
        """Call agents: see ``Agents.ask``."""
        return self._agents.ask(calls, timeout_s)

    def address(self, host: str) -> tuple[str, int]:
        """Where the agent of a host listens."""
        return self.hosts[host].address, self.hosts[host].port

    def clock_offset(self, host: str) -> "ClockOffset":
        """How far a host's monotonic clock is ahead of this one's, from the shortest of ``NUM_READINGS`` calls.

        Raises: WorkerError: the agent does not answer.
        """
        readings: list[ClockOffset] = []
        for _ in range(NUM_READINGS):
            begun_ns = time.monotonic_ns()
            [there_ns] = self.ask([(host, "clock_ns")])
            way_ns = (time.monotonic_ns() - begun_ns) // 2
            readings.append(ClockOffset(way_ns, there_ns - begun_ns - way_ns))
        return min(readings)

    def ship(self, folders: Mapping[str, Collection[Path]]) -> tuple[dict[Path, str], Files]:
        """Bring folders to hosts, each file once to each host, and let them import the user's modules from the same places.

        Args:
            folders: by host, those that it needs.
        Returns: the name of each folder on the hosts, which is a hash of its content; and its files there.
        """
        self.ask([(host, "extend_path", user_folders()) for host in folders])
        names: dict[Path, str] = {}
        listing: Files = {}
        content: dict[str, Path] = {}
        for folder in set[Path]().union(*folders.values()):
            files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
            hashes = {name: file_hash(path) for name, path in files.items()}
            content |= {hashes[name]: path for name, path in files.items()}
            names[folder] = content_hash(sorted(hashes.items()))
            listing[names[folder]] = hashes
        needed = {host: sorted({one for f in mine for one in listing[names[f]].values()}) for host, mine in folders.items()}
        missing = dict(zip(needed, self.ask([(host, "missing", hashes) for host, hashes in needed.items()]), strict=True))
        for one in sorted({one for hashes in missing.values() for one in hashes}):
            shared = self._agents.share(content[one].read_bytes())
            self.ask([(host, "take", one, shared) for host, hashes in missing.items() if one in hashes])
        return names, listing

    def close(self) -> None:
        """End the agents with their workers, and the nodes if they were started for this cluster."""
        self._opened.close()

    def __repr__(self) -> str:
        num_devices = sum(len(facts.devices) for facts in self.hosts.values())
        return f"{type(self).__name__}({self.name!r}, {len(self.hosts)} hosts, {num_devices} devices)"

    def rows(self) -> list[dict[str, Any]]:
        """One row a host."""
        return [
            {
                "host": facts.name,
                "address": f"{facts.address}:{facts.port}",
                "devices": len(facts.devices),
                "cpu": facts.provenance.cpu,
                "memory_bytes": facts.memory_bytes,
                "calibration_s": facts.provenance.calibration_s,
                "state": "lost" if facts.name in self._lost else "ready",
            }
            for facts in self.hosts.values()
        ]

    def _end_agents(self) -> None:
        """Let the agents remove their files. Those of killed agents are swept by a process that outlives the agent."""
        for host in self._alive:
            with contextlib.suppress(AutosplitError):
                self.ask([(host, "close")], timeout_s=ENDING_S)

    def _join(self, names: Sequence[str], timeout_s: float) -> None:
        """Count hosts in whose agents run. Raises: DeviceError: versions of torch differ; then none is counted in."""
        facts = self._agents.ask([(name, "facts") for name in names], timeout_s)
        joined = {**{name: self.hosts[name] for name in self._alive}, **dict(zip(names, facts, strict=True))}
        versions = {name: one.provenance.versions.get("torch", "") for name, one in joined.items()}
        if len(set(versions.values())) > 1:
            found = ", ".join(f"{version} on '{name}'" for name, version in versions.items())
            raise DeviceError(
                f"the hosts have different versions of torch: {found}. Stages of one model need one version everywhere."
            )
        self.hosts |= joined
        for name in names:
            self._lost.pop(name, None)

    def _measure_network(self) -> tuple[list[Link], list[Wire]]:
        """The latency of each ordered pair of hosts, one after the other, and the wires: each host sends to all others at once.

        Nothing listens here, so values from a host are taken to need as long as values to it.
        """
        links, pairs = list[Link](), dict[tuple[str, str], Wire]()
        for name in self._alive:
            link, wire = hostlinks.measure_link(HOST, name, self._probe(name))
            links += [link, replace(link, source=name, target=HOST)]
            pairs |= {(HOST, name): wire, (name, HOST): Wire(f"{name} to {HOST}", (name,), (HOST,), wire.s_per_byte)}
        for source, target in permutations(self._alive, 2):
            [(link, pairs[source, target])] = self.ask([(source, "link_to", target, self.address(target))])
            links.append(link)
        sent_per_s, taken_per_s = dict[str, float](), dict[str, float]()
        if len(self._alive) > 1:
            with ThreadPoolExecutor(len(self._alive)) as pool:
                sent_per_s[HOST] = taken_per_s[HOST] = sum(pool.map(lambda name: hostlinks.flood(self._probe(name)), self._alive))
        for name in self._alive if len(self._alive) > 2 else ():
            others = [other for other in self._alive if other != name]
            sent_per_s[name] = sum(self.ask([(name, "flood", self.address(other)) for other in others]))
            taken_per_s[name] = sum(self.ask([(other, "flood", self.address(name)) for other in others]))
        return links, hostlinks.cards(pairs, sent_per_s, taken_per_s)

    def _probe(self, host: str) -> socket.socket:
        return dial(self.address(host), self.secret, {PURPOSE: PROBE, SENDER: HOST})
