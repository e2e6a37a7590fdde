"""Simulation: the event loop under ``schedule.simulate``: workers, rings and devices in simulated time. No torch."""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from autosplit.costs.hostways import Chain
from autosplit.costs.problem import HOST as CALLER
from autosplit.costs.wires import Wires
from autosplit.values.links import Link
from autosplit.values.machine import HOST, host_of
from autosplit.values.timeline import Action, ActionKind

LinkOf = Callable[[str, str], Link]
"""The link from one device to another, by name: ``Machine.link``."""


def free_link(source: str, target: str) -> Link:
    """A link that costs nothing."""
    return Link(source, target, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class SimStage:
    """A stage as the simulation sees it.

    Attributes:
        name: for reports; not ``host``.
        devices: one device name for each replica; request k goes to replica k mod their number.
        seconds: seconds of computing one request, one figure for each replica; transfers are not part of it.
        sources: each earlier stage, or ``host``, that it reads, to the bytes of each value of one request from there.
        results: bytes of each value of one request that it returns to the host; None for a stage that returns nothing.
        moved_s: seconds of copying for one request in addition to those of the links, one figure for each replica; or empty.
        streamed_bytes: bytes of weights that come from the host for one request, whose waits are part of ``seconds``.
    """

    name: str
    devices: tuple[str, ...]
    seconds: tuple[float, ...]
    sources: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: {HOST: ()})
    results: tuple[float, ...] | None = None
    moved_s: tuple[float, ...] = ()
    streamed_bytes: float = 0.0


class StageTimes(NamedTuple):
    """The time of one replica of a stage, in seconds, divided by its use.

    It waited ``starved_s`` for inputs, ``blocked_s`` for a free slot, and ``queued_s`` for its device while another stage had
    it. The rest of the makespan is before its first and after its last request.
    """

    stage: str
    replica: int
    device: str
    requests: int
    compute_s: float
    transfer_s: float
    starved_s: float
    blocked_s: float
    queued_s: float

    @property
    def busy_s(self) -> float:
        """Seconds during which the replica held its device."""
        return self.compute_s + self.transfer_s


@dataclass(slots=True, eq=False)
class _Device:
    """A device that one worker holds at a time. The others queue, the older request first ("longest in system", Andrews et al.,
    2001), so that no device starves for long."""

    held: bool = False
    queue: list[tuple[int, float, int, "_Worker"]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Ring:
    """The slots between one replica of a stage and one of a stage that reads it; every value pays the link's fixed shares.

    ``way`` is the hosts from the sender to the receiver, place by place; a request visits one host of each place.
    """

    sender: "_Worker"
    receiver: "_Worker"
    free: int
    latency_s: float
    send_s: float
    receive_s: float
    num_bytes: float
    way: tuple[tuple[str, ...], ...]
    sender_waits: bool = False


@dataclass(slots=True, eq=False)
class _Worker:
    """A stage replica, or one end of the host: computes its next request, then sends it through each port in turn."""

    stage: str
    replica: int
    step: int
    device_name: str
    device: _Device
    seconds: float
    order: int
    request: int
    moved_s: float = 0.0
    streamed_bytes: float = 0.0
    missing: list[int] = field(default_factory=list)
    sources: list[list[_Ring]] = field(default_factory=list)
    targets: list[list[_Ring]] = field(default_factory=list)
    port: int = 0
    sending: bool = False
    since_s: float | None = None
    requests: int = 0
    compute_s: float = 0.0
    transfer_s: float = 0.0
    starved_s: float = 0.0
    blocked_s: float = 0.0
    queued_s: float = 0.0

    def ring(self) -> _Ring:
        """The ring that the request goes through at the current port."""
        rings = self.targets[self.port]
        return rings[self.request % len(rings)]


class Simulation:
    """One run of ``units`` microbatches through the stages; the arguments are checked by ``schedule.simulate``.

    ``actions``, ``admitted_s``, ``finished_s`` and ``times()`` hold the answer after ``run()``. The host's own shares of a
    transfer delay requests, but the host is not listed among the devices.
    """

    def __init__(
        self,
        stages: Sequence[SimStage],
        units: int,
        link: LinkOf,
        slots: int,
        arrivals_s: Sequence[float],
        delays_s: Mapping[tuple[str, str], float],
        wires: Wires,
    ) -> None:
        self._wires, self._wire_free_s = wires, [0.0] * len(wires.all)
        self._link, self._slots, self._delays_s = link, slots, delays_s
        self.units = units
        self.actions: list[Action] = []
        self.admitted_s: list[float] = []
        self.finished_s: list[float] = []
        self._events: list[tuple[float, int, _Worker, int]] = []
        self._sequence = 0
        self._build(stages)
        for request, time in enumerate(arrivals_s):
            self._feed.missing[request] += time > 0
            if time > 0:
                self._push(time, self._feed, request)

    def _build(self, stages: Sequence[SimStage]) -> None:
        devices = {name: _Device() for stage in stages for name in stage.devices}
        self._feed = _Worker(HOST, 0, 1, HOST, _Device(), 0.0, -2, 0)
        self._drain = _Worker(HOST, 0, 1, HOST, _Device(), 0.0, -1, 0)
        self._feed.missing = [0] * self.units
        workers: dict[str, list[_Worker]] = {HOST: [self._feed]}
        self._workers: list[_Worker] = []
        read = {source for stage in stages for source in stage.sources}
        results: dict[str, tuple[float, ...]] = {}
        chain = Chain.of([tuple(map(host_of, stage.devices)) for stage in stages])
        place = {HOST: CALLER} | {stage.name: number for number, stage in enumerate(stages)}
        for stage in stages:
            step, order, streamed = len(stage.devices), len(self._workers), stage.streamed_bytes
            made = [
                _Worker(stage.name, k, step, name, devices[name], stage.seconds[k], order + k, k, moved_s, streamed)
                for k, (name, moved_s) in enumerate(zip(stage.devices, stage.moved_s or (0.0,) * step, strict=True))
            ]
            ways = {source: chain.way(place[source], place[stage.name]) for source in stage.sources}
            self._connect(workers, made, stage.sources, ways)
            workers[stage.name] = made
            self._workers += made
            if stage.results is not None or stage.name not in read:
                results[stage.name] = stage.results or ()
        ways = {source: chain.way(place[source], CALLER) for source in results}
        self._connect(workers, [self._drain], results, ways)

    def _connect(
        self,
        workers: Mapping[str, Sequence[_Worker]],
        readers: Sequence[_Worker],
        sources: Mapping[str, tuple[float, ...]],
        ways: Mapping[str, tuple[tuple[str, ...], ...]],
    ) -> None:
        """Make a ring between each replica of each source and each reader; ``ways`` are the hosts from each source."""
        missing = [len(sources)] * self.units
        for name, sizes in sources.items():
            rings = [[self._ring(sender, reader, sizes, ways[name]) for reader in readers] for sender in workers[name]]
            for sender, row in zip(workers[name], rings, strict=True):
                sender.targets.append(row)
            for reader, column in zip(readers, zip(*rings, strict=True), strict=True):
                reader.sources.append(list(column))
        for reader in readers:
            reader.missing = missing

    def _ring(self, sender: _Worker, receiver: _Worker, sizes: tuple[float, ...], way: tuple[tuple[str, ...], ...]) -> _Ring:
        taken, num_bytes = self._link(sender.device_name, receiver.device_name), sum(sizes)
        latency_s = taken.latency_s + self._delays_s.get((sender.stage, receiver.stage), 0.0)
        send_s = len(sizes) * taken.send_s + num_bytes * taken.send_s_per_byte
        receive_s = len(sizes) * taken.receive_s + num_bytes * taken.receive_s_per_byte
        return _Ring(sender, receiver, self._slots, latency_s, send_s, receive_s, num_bytes, way if num_bytes else ())

    def run(self) -> None:
        """Process events until none is left."""
        if not self._feed.missing[0]:
            self._ready(self._feed, 0.0)
        events = self._events
        while events:
            now, _, worker, request = heapq.heappop(events)
            if request < 0:
                self._done(worker, now)
            else:
                self._deliver(worker, request, now)

    def times(self) -> Iterator[StageTimes]:
        """The time of each stage replica by use."""
        for w in self._workers:
            waits = (w.starved_s, w.blocked_s, w.queued_s)
            yield StageTimes(w.stage, w.replica, w.device_name, w.requests, w.compute_s, w.transfer_s, *waits)

    def _push(self, time: float, worker: _Worker, request: int = -1) -> None:
        """Add an event: ``request`` reaches ``worker``, or, without a request, ``worker`` ends a computation or a copy."""
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, worker, request))

    def _deliver(self, worker: _Worker, request: int, now: float) -> None:
        worker.missing[request] -= 1
        if worker.request == request and not worker.missing[request]:
            self._ready(worker, now)

    def _ready(self, worker: _Worker, now: float) -> None:
        """The inputs of the next request of an idle worker are there: let it wait for its device."""
        if worker.since_s is not None:
            worker.starved_s += now - worker.since_s
        worker.since_s = now
        self._acquire(worker, now)

    def _acquire(self, worker: _Worker, now: float) -> None:
        device = worker.device
        if device.held:
            heapq.heappush(device.queue, (worker.request, now, worker.order, worker))
        else:
            device.held = True
            self._begin(worker, now)

    def _release(self, device: _Device, now: float) -> None:
        if device.queue:
            self._begin(heapq.heappop(device.queue)[3], now)
        else:
            device.held = False

    def _begin(self, worker: _Worker, now: float) -> None:
        """The worker got its device: continue to send, or copy the inputs in and compute."""
        worker.queued_s += now - (worker.since_s or 0.0)
        if worker.sending:
            self._send(worker, worker.ring(), now)
            return
        receive_s = worker.moved_s
        for rings in worker.sources:
            receive_s += rings[worker.request % len(rings)].receive_s
        begin = now + receive_s
        end = max(begin + worker.seconds, self._carried((HOST, worker.device_name), worker.streamed_bytes, begin))
        if worker is self._feed:
            self.admitted_s.append(now)
        elif worker is not self._drain:
            if receive_s:
                self._note(worker, now, begin, "receive")
            self._note(worker, begin, end, "compute")
            worker.transfer_s += receive_s
            worker.compute_s += end - begin
            worker.requests += 1
        self._push(end, worker)

    def _send(self, worker: _Worker, ring: _Ring, now: float) -> None:
        if worker is not self._feed:
            self._note(worker, now, now + ring.send_s, "send")
            worker.transfer_s += ring.send_s
        self._push(now + ring.send_s, worker)

    def _note(self, worker: _Worker, start_s: float, end_s: float, kind: ActionKind) -> None:
        host = host_of(worker.device_name)
        self.actions.append(Action(worker.stage, worker.replica, worker.request, start_s, end_s, kind, host))

    def _done(self, worker: _Worker, now: float) -> None:
        """A computation or a copy has ended; the worker holds its device."""
        if worker.sending:
            self._sent(worker.ring(), worker.request, now)
            worker.port += 1
        else:
            worker.sending, worker.port = True, 0
            for rings in worker.sources:
                self._free_slot(rings[worker.request % len(rings)], now)
            if worker is self._drain:
                self.finished_s.append(now)
        self._send_remaining(worker, now, holds_device=True)

    def _sent(self, ring: _Ring, request: int, now: float) -> None:
        there_s = max(now, self._carried((ring.sender.device_name, ring.receiver.device_name), ring.num_bytes, now - ring.send_s))
        for hop in pairwise(place[request % len(place)] for place in ring.way):
            there_s = self._carried(hop, ring.num_bytes, there_s)
        there_s += ring.latency_s
        if there_s > now:
            self._push(there_s, ring.receiver, request)
        else:
            self._deliver(ring.receiver, request, now)

    def _carried(self, hop: tuple[str, str], num_bytes: float, now: float) -> float:
        """Seconds at which the last byte arrives. A wire carries one value at a time, from the arrival of its first byte on."""
        head_s = tail_s = now if num_bytes else 0.0
        for wire in self._wires.routes.get(hop, ()):
            head_s = max(head_s, self._wire_free_s[wire])
            self._wire_free_s[wire] = head_s + num_bytes * self._wires.all[wire].s_per_byte
            tail_s = max(tail_s, self._wire_free_s[wire])
        return tail_s

    def _free_slot(self, ring: _Ring, now: float) -> None:
        ring.free += 1
        if ring.sender_waits:
            sender = ring.sender
            ring.sender_waits = False
            sender.blocked_s += now - (sender.since_s or 0.0)
            self._send_remaining(sender, now, holds_device=False)

    def _send_remaining(self, worker: _Worker, now: float, holds_device: bool) -> None:
        """Send through the remaining ports until one has no free slot; after the last port, turn to the next request."""
        while worker.port < len(worker.targets):
            ring = worker.ring()
            if not ring.free:
                ring.sender_waits = True
                worker.since_s = now
                break
            ring.free -= 1
            if ring.send_s:
                worker.since_s = now
                if holds_device:
                    self._send(worker, ring, now)
                else:
                    self._acquire(worker, now)
                return
            self._sent(ring, worker.request, now)
            worker.port += 1
        else:
            worker.sending = False
            worker.request += worker.step
            worker.since_s = now
        if holds_device:
            self._release(worker.device, now)
        if not worker.sending and worker.request < self.units and not worker.missing[worker.request]:
            self._ready(worker, now)
