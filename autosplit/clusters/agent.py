"""Agent: one process a host, which runs the host's segments, measures the host, and listens for connections.

Ray starts it and calls its methods. Requests come and go over connections of their own: see ``runningsegment``.
"""

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autosplit.backends.base import installed
from autosplit.children import extend_path
from autosplit.clusters import hostlinks
from autosplit.clusters.handshake import dial
from autosplit.clusters.listener import Listener
from autosplit.clusters.runningsegment import RunningSegment
from autosplit.clusters.segments import Segment
from autosplit.compat.torchparts import pytree
from autosplit.devices.discovering import discover
from autosplit.devices.limits import affinity, boot_id, memory_limit_bytes
from autosplit.devices.processes import prepare_to_spawn
from autosplit.errors import WorkerError
from autosplit.measuring import calibration
from autosplit.measuring.profiler import measure
from autosplit.measuring.settings import stamps_of
from autosplit.parsing import shown
from autosplit.running.monitor import WorkerHealth, WorkerReport
from autosplit.scratch import scratch_folder, sweep_at_death
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import load_stage
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.graph import Graph
from autosplit.values.links import Link, Wire
from autosplit.values.machine import Device, Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision, Provenance, Setting

SEGMENT, PURPOSE, SENDER, NUM_SLOTS = "segment", "purpose", "sender", "num_slots"
"""Keys of the greeting of a connection."""

CONTROL, REQUESTS, ANSWERS, PROBE = "control", "requests", "answers", "probe"
"""Purposes of connections: signs of life of both ends, requests, answers, or measurements."""


Files = dict[str, dict[str, str]]
"""Name of a folder to the path and the content hash of each file in it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A traced model on its way to hosts; ``folder`` is the name of the folder that holds all of it as one stage."""

    graph: Graph
    specs: Mapping[str, TensorSpec]
    example_inputs: tuple[torch.Tensor, ...]
    folder: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts of a host: its address, the port of its agent, its devices, and each backend's provenance.

    Its agent may use ``cores`` of the machine that ``boot_id`` names. Hosts on one machine have the same ``boot_id``.
    """

    name: str
    address: str
    port: int
    pid: int
    devices: tuple[Device, ...]
    memory_bytes: int
    stamps: Mapping[str, Provenance]
    cores: tuple[int, ...]
    boot_id: str

    @property
    def provenance(self) -> Provenance:
        """The conditions of a measurement made here, beside its backend."""
        return next(iter(self.stamps.values()))


class Agent:
    """The actor that Ray runs on a host.

    Args:
        name: the host's name in the cluster.
        address: where it listens; loopback for nodes on one machine.
        secret: each connection must prove that it knows it.
    """

    def __init__(self, name: str, address: str, secret: bytes) -> None:
        self._name, self._secret = name, secret
        self._opened = contextlib.ExitStack()
        self._folder = self._opened.enter_context(scratch_folder())
        self._opened.enter_context(sweep_at_death())  # Ray kills an agent whose driver is gone
        self._segments: dict[str, RunningSegment] = {}
        self._listener = Listener(address, secret, self._welcome)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port at which it listens."""
        return self._listener.address

    def facts(self) -> HostFacts:
        """The facts of this host."""
        prepare_to_spawn()
        machine = discover()
        kernel_s = calibration.kernel_s(affinity()[:1])
        settings = [Setting(machine.devices[0].name, backend, 1) for backend in installed()]
        stamps = {
            one.backend: replace(stamp, calibration_s=kernel_s) for one, stamp in stamps_of(machine, settings, "f32").items()
        }
        return HostFacts(
            self._name,
            *self.address,
            os.getpid(),
            machine.devices,
            memory_limit_bytes(),
            stamps,
            affinity(),
            boot_id(),
        )

    def measure(
        self, subject: Subject, files: Files, devices: Sequence[Device], backends: Sequence[str], precision: Precision
    ) -> Profile:
        """Profile a model on devices of this host, with the names that the host itself uses."""
        self._lay_out(files)
        none = pytree.tree_structure(())
        program = load_stage(self._folder / "stages" / subject.folder, trust=True).module
        traced = Traced(subject.graph, program, none, none, subject.example_inputs, subject.specs, (), ())
        return measure(traced, Machine.of(devices), backends, precision=precision)

    def link_to(self, name: str, address: tuple[str, int]) -> tuple[Link, Wire]:
        """Measure the connection to another host."""
        return hostlinks.measure_link(self._name, name, dial(address, self._secret, {PURPOSE: PROBE, SENDER: self._name}))

    def flood(self, address: tuple[str, int]) -> float:
        """Bytes a second to another host."""
        return hostlinks.flood(dial(address, self._secret, {PURPOSE: PROBE, SENDER: self._name}))

    def extend_path(self, folders: Sequence[str]) -> None:
        """Import the user's modules from the folders of the driver, after all others."""
        for folder in folders:
            extend_path(folder)

    def missing(self, hashes: Sequence[str]) -> list[str]:
        """The files that did not come here yet, by content hash."""
        return [one for one in hashes if not (self._folder / "files" / one).exists()]

    def take(self, content_hash: str, content: bytes) -> None:
        """Keep a file for the segments of this run."""
        folder = self._folder / "files"
        folder.mkdir(exist_ok=True)
        new = folder / f"{content_hash}.new"
        new.write_bytes(content)
        new.rename(folder / content_hash)

    def open_segment(self, segment: Segment, files: Files) -> None:
        """Start the workers of a segment.

        Args:
            segment: with the host's own devices, and folders relative to the agent's.
            files: the folders of its stages.
        Raises: BackendError, WorkerError: a stage could not be loaded.
        """
        self._lay_out(files)
        self._segments[segment.name] = RunningSegment(self._name, segment.moved(lambda folder: self._folder / "stages" / folder))

    def _lay_out(self, files: Files) -> None:
        """Make folders of the files that came here."""
        for folder, content in files.items():
            for path, content_hash in content.items():
                target = self._folder / "stages" / folder / path
                if not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.link(self._folder / "files" / content_hash, target)

    def connect(self, segment: str, targets: Mapping[str, tuple[tuple[str, int], int]]) -> None:
        """Connect a segment to the hosts behind it: by name, where their agents listen, and how many slots they have.

        Raises: WorkerError: no connection, or the segment does not run here or does not send there.
        """
        running = self._segment(segment)
        for name, (address, num_slots) in targets.items():
            sock = dial(address, self._secret, {PURPOSE: REQUESTS, SEGMENT: running.order.next_name, SENDER: self._name})
            try:
                running.send_to(name, sock, num_slots)
            except WorkerError:
                sock.close()
                raise

    def close_segment(self, segment: str) -> None:
        """End a segment, if it runs."""
        running = self._segments.pop(segment, None)
        if running is not None:
            running.close()

    def clock_ns(self) -> int:
        """This host's monotonic clock."""
        return time.monotonic_ns()

    def health(self, segment: str) -> list[WorkerHealth]:
        """The state of the segment's workers."""
        return self._segment(segment).pipeline.health()

    def reports(self, segment: str, clear: bool) -> tuple[list[WorkerReport], int]:
        """The work of each worker of the segment, in nanoseconds of this host's clock; how many were started anew so far."""
        running = self._segment(segment)
        return running.pipeline.reports(clear=clear), running.pipeline.restarts

    def close(self) -> None:
        """End all segments and connections, and remove every file."""
        self._listener.close()
        for name in list(self._segments):
            self.close_segment(name)
        self._opened.close()

    def _segment(self, segment: Any) -> RunningSegment:
        running = self._segments.get(segment) if isinstance(segment, str) else None
        if running is None:
            raise WorkerError(f"segment {shown(segment)} does not run here")
        return running

    def _welcome(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        """Give a connection that has proved the secret to its purpose.

        Raises: WorkerError: its greeting is malformed, its segment does not run here, or the segment does not expect it.
        """
        purpose, sender = hello.get(PURPOSE), hello.get(SENDER)
        if not isinstance(sender, str):
            raise WorkerError(f"the name of the sender is {shown(sender)}")
        if purpose == PROBE:
            hostlinks.answer_probe(sock)
        elif purpose == CONTROL:
            self._segment(hello.get(SEGMENT)).report_to(sock)
        elif purpose == REQUESTS:
            self._segment(hello.get(SEGMENT)).feed_from(sock, sender)
        elif purpose == ANSWERS:
            self._segment(hello.get(SEGMENT)).answer_to(sock, hello.get(NUM_SLOTS))
        else:
            raise WorkerError(f"a connection cannot be for {shown(purpose)}")
