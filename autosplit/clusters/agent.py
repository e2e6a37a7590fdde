"""Agent: one process a host, which runs the host's segments, measures the host, and listens for connections.

Ray starts it and calls its methods. Requests come and go over connections of their own::

    connection -> slot -> Pipeline of the segment (workers, rings) -> connection to the next host, or to the driver

A slot is free again once the answer of its request was sent on, so as many requests are in a segment as it has slots.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch.utils import _pytree as pytree

from autosplit.clusters import hostlinks
from autosplit.clusters.frames import BROKEN, ERROR, REQUEST, Connection, Frame, Outgoing, Receiver, Slot, left_ns
from autosplit.clusters.handshake import dial, welcome
from autosplit.devices.discovering import discover
from autosplit.devices.limits import affinity, memory_limit_bytes
from autosplit.devices.processes import prepare_to_spawn
from autosplit.errors import AutosplitError, RefusedError, WorkerError
from autosplit.measuring import calibration
from autosplit.measuring.profiler import measure
from autosplit.measuring.settings import stamps_of, wanted_settings
from autosplit.reports.results import RunStats
from autosplit.running.messages import WorkerEvent
from autosplit.running.monitor import WorkerHealth
from autosplit.running.pipeline import Pipeline
from autosplit.running.request import Tensors
from autosplit.running.wiring import StagePlacement
from autosplit.scratch import scratch_folder
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import load_stage
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.graph import Graph
from autosplit.values.machine import Device, Link, Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision, Provenance

SEGMENT, PURPOSE, SENDER = "segment", "purpose", "sender"
"""Keys of the greeting of a connection."""

DRIVER = "driver"
ERROR_BYTES = 60_000
"""Most bytes of the text of an error."""

CONTROL, REQUESTS, ANSWERS, PROBE = "control", "requests", "answers", "probe"
"""Purposes of connections: they tell both ends that the other one lives, bring requests, take answers, or measure."""


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
    """What a host tells of itself: its address, where its agent listens, its devices, and what it is."""

    name: str
    address: str
    port: int
    pid: int
    devices: tuple[Device, ...]
    memory_bytes: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class SegmentOrder:
    """What an agent runs of a plan.

    Attributes:
        name: the segment's, which no other segment of any deployment has.
        next_name: that of the next segment; empty for the last one.
        stages: with the host's own devices; the folders of their modules are relative to the agent's.
        inputs, outputs: the values that come in and go on.
        num_slots: most requests in the segment.
        route: the hosts of the next segment; request ``k`` goes to ``route[k % len(route)]``. Empty for the driver.
    """

    name: str
    next_name: str
    stages: tuple[StagePlacement, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    num_slots: int
    route: tuple[str, ...]


class RunningSegment(Receiver):
    """A segment that runs: its pipeline, and the connections to the hosts behind it."""

    def __init__(self, host: str, order: SegmentOrder) -> None:
        self.order = order
        self._host = host
        names = [[spec.name for spec in specs] for specs in (order.inputs, order.outputs)]
        self.pipeline = Pipeline(order.stages, names[0], names[1])
        self._sources: list[Connection] = []
        self._targets: dict[str, Connection] = {}
        self._running: dict[int, Future[Tensors]] = {}
        self._lock = threading.Lock()
        self._control: Connection | None = None

    def report_to(self, sock: socket.socket) -> None:
        """Report lost hosts to the driver over a connection; the segment ends with it."""
        self._control = Connection(sock, DRIVER, self)

    def feed_from(self, sock: socket.socket, sender: str) -> None:
        """Take requests from a connection."""
        self._sources.append(Connection(sock, sender, self, self.order.inputs, num_slots=self.order.num_slots))

    def send_to(self, target: str, sock: socket.socket, num_credits: int) -> None:
        """Send answers to a host, or to the driver (``''``), over a connection."""
        self._targets[target] = Connection(sock, target or DRIVER, self, self.order.outputs, num_credits=num_credits)

    def request(self, connection: Connection, frame: Frame, slot: Slot) -> None:
        """Run a request."""
        deadline_ns = left_ns(frame.left_s)
        try:
            future = self.pipeline.forward(slot.tensors, priority=frame.priority, deadline_ns=deadline_ns)
        except AutosplitError as failure:
            connection.release(slot)
            self._fail(frame.number, failure)
            return
        with self._lock:
            self._running[frame.number] = future
        future.add_done_callback(lambda done: self._answer(connection, frame, slot, deadline_ns, done))

    def error(self, connection: Connection, frame: Frame, text: str) -> None:
        """Hand the failure of a request on."""
        self._target(frame.number).post(Outgoing(ERROR, frame.number, text=text.encode()))

    def cancel(self, connection: Connection, frame: Frame) -> None:
        """End a request here, or behind this segment."""
        with self._lock:
            future = self._running.get(frame.number)
        if future is None or not future.cancel():
            self._target(frame.number).post(Outgoing(frame.kind, frame.number))

    def lost(self, connection: Connection, reason: str) -> None:
        """Tell the driver which host was lost. Without the driver itself, end."""
        if connection is self._control:
            threading.Thread(target=self.close, name="autosplit-ending").start()  # close waits for this thread
        elif self._control is not None:
            self._control.post(Outgoing(BROKEN, text=f"{connection.peer}\n{reason}".encode()))

    def close(self) -> None:
        """End the connections and the workers."""
        for connection in filter(None, (self._control, *self._sources, *self._targets.values())):
            connection.close()
        self.pipeline.close(drain=False)

    def _answer(self, connection: Connection, frame: Frame, slot: Slot, deadline_ns: int, done: "Future[Tensors]") -> None:
        with self._lock:
            self._running.pop(frame.number, None)
        failure = RefusedError("the request was cancelled") if done.cancelled() else done.exception()
        if failure is not None:
            connection.release(slot)
            self._fail(frame.number, failure)
            return
        answer = done.result()
        self._target(frame.number).post(
            Outgoing(REQUEST, frame.number, frame.priority, deadline_ns, answer, sent=lambda: connection.release(slot))
        )

    def _fail(self, number: int, failure: BaseException) -> None:
        text = f"{type(failure).__name__}\nhost '{self._host}': {failure}"
        self._target(number).post(Outgoing(ERROR, number, text=text.encode()[:ERROR_BYTES]))

    def _target(self, number: int) -> Connection:
        route = self.order.route or ("",)
        return self._targets[route[number % len(route)]]


class Agent:
    """What Ray runs on a host.

    Args:
        name: the host's name in the cluster.
        address: where it listens; loopback for nodes on one machine.
        secret: each connection must prove that it knows it.
    """

    def __init__(self, name: str, address: str, secret: bytes) -> None:
        self._name, self._secret = name, secret
        self._opened = contextlib.ExitStack()
        self._folder = self._opened.enter_context(scratch_folder())
        self._segments: dict[str, RunningSegment] = {}
        self._listener = socket.create_server((address, 0))
        self._address = self._listener.getsockname()
        threading.Thread(target=self._accept, name="autosplit-listener", daemon=True).start()

    def facts(self) -> HostFacts:
        """What this host is."""
        prepare_to_spawn()
        machine = discover()
        stamp = next(iter(stamps_of(machine, wanted_settings(machine, ("eager",), None, "f32")[0], "f32").values()))
        cores = affinity()
        stamp = replace(stamp, calibration_s=calibration.kernel_s(cores[:1]))
        return HostFacts(
            self._name, self._address[0], self._address[1], os.getpid(), machine.devices, memory_limit_bytes(), stamp
        )

    def measure(
        self, subject: Subject, files: Files, devices: Sequence[Device], backends: Sequence[str], precision: Precision
    ) -> Profile:
        """Profile a model on devices of this host, with the names that the host itself uses."""
        self._lay_out(files)
        none = pytree.tree_structure(())
        program = load_stage(self._folder / "stages" / subject.folder).module
        traced = Traced(subject.graph, program, none, none, subject.example_inputs, subject.specs, (), ())
        machine = Machine.of(devices)
        threads = {device.name: sorted({1, max(1, len(device.cores))}, reverse=True) for device in machine.devices}
        return measure(traced, machine, backends, threads=threads, precision=precision)

    def link_to(self, name: str, address: tuple[str, int]) -> Link:
        """Measure the connection to another host."""
        return hostlinks.measure_link(self._name, name, dial(address, self._secret, {PURPOSE: PROBE, SENDER: self._name}))

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

    def open_segment(self, order: SegmentOrder, files: Files) -> None:
        """Start the workers of a segment.

        Args:
            order: what to run.
            files: the folders of its stages.
        Raises: BackendError, WorkerError: a stage could not be loaded.
        """
        self._lay_out(files)
        stages = tuple(
            replace(stage, module=replace(stage.module, folder=self._folder / "stages" / stage.module.folder))  # type: ignore[type-var, attr-defined]
            for stage in order.stages
        )
        self._segments[order.name] = RunningSegment(self._name, replace(order, stages=stages))

    def _lay_out(self, files: Files) -> None:
        """Make folders of the files that came here."""
        for folder, content in files.items():
            for path, content_hash in content.items():
                target = self._folder / "stages" / folder / path
                if not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.link(self._folder / "files" / content_hash, target)

    def connect(self, segment: str, targets: Mapping[str, tuple[tuple[str, int], int]]) -> None:
        """Connect a segment to the hosts behind it: by name, where their agents listen, and how many slots they have."""
        running = self._segment(segment)
        for name, (address, num_slots) in targets.items():
            sock = dial(address, self._secret, {PURPOSE: REQUESTS, SEGMENT: running.order.next_name, SENDER: self._name})
            running.send_to(name, sock, num_slots)

    def close_segment(self, segment: str) -> None:
        """End a segment, if it runs."""
        running = self._segments.pop(segment, None)
        if running is not None:
            running.close()

    def clock_ns(self) -> int:
        """This host's monotonic clock."""
        return time.monotonic_ns()

    def stats(self, segment: str, clear: bool) -> RunStats:
        """What the segment's pipeline measured."""
        return self._segment(segment).pipeline.stats(clear=clear)

    def health(self, segment: str) -> list[WorkerHealth]:
        """The state of the segment's workers."""
        return self._segment(segment).pipeline.health()

    def events(self, segment: str, clear: bool) -> list[list[WorkerEvent]]:
        """The times of the last requests in each worker of the segment, in nanoseconds of this host's clock."""
        return self._segment(segment).pipeline.events(clear=clear)

    def close(self) -> None:
        """End all segments and connections, and remove every file."""
        self._listener.close()
        for name in list(self._segments):
            self.close_segment(name)
        self._opened.close()

    def _segment(self, segment: str) -> RunningSegment:
        if segment not in self._segments:
            raise WorkerError(f"segment '{segment}' does not run here")
        return self._segments[segment]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._welcome, args=(sock,), name="autosplit-welcome", daemon=True).start()

    def _welcome(self, sock: socket.socket) -> None:
        """Let a connection in once it has proved the secret, and give it to what it is for."""
        try:
            hello = welcome(sock, self._secret)
            purpose, sender = hello[PURPOSE], str(hello[SENDER])
            if purpose == PROBE:
                hostlinks.answer_probe(sock)
            elif purpose == CONTROL:
                self._segments[hello[SEGMENT]].report_to(sock)
            elif purpose == REQUESTS:
                self._segments[hello[SEGMENT]].feed_from(sock, sender)
            elif purpose == ANSWERS:
                self._segments[hello[SEGMENT]].send_to("", sock, int(hello["num_slots"]))
        except (OSError, ValueError, KeyError, WorkerError):
            sock.close()
