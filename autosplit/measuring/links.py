"""Measure the links between devices: the runtime's own ring between two pinned workers, and between the host and each.

One message goes forth and one token comes back, over four sizes. The sender's share is the time of its copy into the slot
and of the hand-over; the receiver's share is what its first read of the data takes longer than a second one, and its
hand-over; the rest of half a round trip is latency, the time to wake a process that waits.

That tells what bytes cost. What a request costs beside them, in the host and in a worker, a pipeline tells (``hops``).
"""

import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations
from types import TracebackType
from typing import Literal, Protocol

import numpy as np
import torch

from autosplit.backends.placing import Berth
from autosplit.devices.accelerators import PROVIDERS, Accelerator, is_accelerator, open_accelerator
from autosplit.devices.processes import WorkerProcess, receive, spawn_worker
from autosplit.errors import WorkerError
from autosplit.measuring.hops import Hop, measure_hops
from autosplit.running.ring import Ring, RingEnd, RingHandle
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import HOST, Device, Link

SIZES_BYTES = (4096, 65536, 524288, 4194304)
MESSAGES = (60, 60, 40, 20)
WARM_UP = 5
TIMEOUT_S = 120.0
"""A worker of its own starts first."""
WORKER = "autosplit.measuring.worker:main"
"""What runs in a worker that measures, links or ops."""
MAX_DEVICES = 6
"""Beyond this many devices only the pairs of some are measured; the others take the median of those that are like them."""


@dataclass(frozen=True, slots=True)
class Duty:
    """One side of a measurement: send or receive on these two rings; ``device`` may be an accelerator."""

    role: Literal["send", "receive"]
    forth: RingHandle
    back: RingHandle
    device: str = ""
    providers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Side:
    """What one side saw, in seconds by size: its share, and for the sender the whole round trip."""

    share_s: tuple[float, ...]
    round_s: tuple[float, ...] = ()


class LinkBench:
    """The rings between the devices and the host; workers on the devices that inherited them measure when they are asked.

    On an accelerator the data begins and ends in its memory: its share holds the copy through staging memory.

    Args:
        devices: disjoint; those of other kinds than CPU cores and accelerators are left out.
    Attributes:
        found: the links, once they are measured.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        usable = [device for device in devices if device.kind == "cpu" or is_accelerator(device)]
        # Of many devices the first are measured: accelerators, whose links are like no other one's, before the many cores.
        self._devices = sorted(usable, key=lambda device: not is_accelerator(device))
        names = [HOST, *(device.name for device in self._devices[:MAX_DEVICES])]
        self.found: list[Link] = []
        with ExitStack() as stack:
            self._rings = {pair: stack.enter_context(_rings()) for pair in combinations(names, 2)}
            self._stack = stack.pop_all()

    def fds(self, device: str) -> list[int]:
        """The descriptors that a worker on the device must inherit to measure its links."""
        return [fd for pair, rings in self._rings.items() if device in pair for ring in rings for fd in ring.handle.fds]

    @contextmanager
    def own_workers(self) -> Iterator[dict[str, WorkerProcess]]:
        """Workers for the links alone, by device."""
        with ExitStack() as stack:
            yield {
                device.name: stack.enter_context(measuring_worker(device, "links of", self.fds(device.name), threads=1))
                for device in self._devices[:MAX_DEVICES]
            }

    def measure(self, workers: Mapping[str, WorkerProcess]) -> list[Link]:
        """Links for every ordered pair of devices, and between each of them and the host.

        Args:
            workers: by device; idle ones that run ``WORKER`` and inherited ``fds``.
        Returns: links whose cost is ``a + bytes * b`` for each share, fitted to the medians by relative least squares; ``a`` is
            at least what a request was seen to cost in a pipeline.
        Raises: WorkerError: a worker died, or what it raised.
        """
        links: list[Link] = []
        for (one, other), (forth, back) in self._rings.items():
            links.append(_link(one, other, forth, back, workers))
            links.append(_link(other, one, back, forth, workers))
        links += _like(links, {HOST: HOST, **{device.name: device.kind for device in self._devices}})
        cores = [device for device in self._devices if device.kind == "cpu"]
        if cores:
            warm, cold = measure_hops(cores[:MAX_DEVICES])
            names = {device.name for device in cores}
            links = [with_hops(link, names, warm, cold) for link in links]
        self.found = links
        return self.found

    def __enter__(self) -> "LinkBench":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()


def measure_links(devices: Sequence[Device]) -> list[Link]:
    """The links of these devices, see ``LinkBench``."""
    with LinkBench(devices) as bench, bench.own_workers() as workers:
        return bench.measure(workers)


def fit(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fixed seconds and seconds a byte, neither below 0, with the least squares of the relative errors.

    >>> [round(value, 9) for value in fit([0, 1000, 2000], [1e-3, 2e-3, 3e-3])]
    [0.001, 1e-06]
    """
    times = np.maximum(np.asarray(seconds), 1e-9)
    slope, fixed = np.polyfit(np.asarray(sizes_bytes, float), times, 1, w=1 / times)
    if slope < 0:
        return float(np.median(times)), 0.0
    if fixed < 0:
        return 0.0, float(np.median(times / np.maximum(np.asarray(sizes_bytes, float), 1)))
    return float(fixed), float(slope)


def with_hops(link: Link, cores: Collection[str], warm: Hop, cold: Hop) -> Link:
    """The link with fixed shares that are no less than what a request costs in a pipeline.

    A worker's cost is shared between taking the request and handing it on. All of the host's is its share of taking answers.

    Args:
        link: as the ring alone is.
        cores: names of the devices that are CPU cores.
        warm: what a request costs with stages that leave the caches as they were.
        cold: the same with stages that sweep them.
    """
    if link.source in cores:
        link = replace(link, send_s=max(link.send_s, warm.worker_s / 2), cold_send_s=cold.worker_s / 2)
    if link.target in cores:
        link = replace(link, receive_s=max(link.receive_s, warm.worker_s / 2), cold_receive_s=cold.worker_s / 2)
    if link.target == HOST:
        link = replace(link, receive_s=max(link.receive_s, warm.host_s), cold_receive_s=cold.host_s)
    return link


class Player:
    """Plays the sides that the host names, in a worker."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}

    def play(self, duty: Duty) -> Side:
        """One side of one measurement. A stage copies and reads its messages in one thread."""
        torch.set_num_threads(1)
        PROVIDERS.update(duty.providers)
        if duty.device not in self._places:
            accelerator = open_accelerator(duty.device)
            self._places[duty.device] = InHost() if accelerator is None else OnAccelerator(accelerator)
        return _play(duty.role, Ring(duty.forth), Ring(duty.back), self._places[duty.device])


class Place(Protocol):
    """Where the data is that one side sends, or that it needs."""

    def make(self, size: int) -> None:
        """Compute what is sent next: ``size`` bytes."""

    def put(self, size: int, view: torch.Tensor) -> None:
        """Copy it into a slot."""

    def take(self, size: int, view: torch.Tensor) -> float:
        """Get ``size`` bytes from a slot to where they are needed; returns the seconds that takes."""


class InHost:
    """A stage on CPU cores: it sends from its own memory and reads in the slot."""

    def __init__(self) -> None:
        self._source = torch.ones(SIZES_BYTES[-1] // 4)

    def make(self, size: int) -> None:
        """Touch every element."""
        self._source[: size // 4].add_(1)

    def put(self, size: int, view: torch.Tensor) -> None:
        """One copy."""
        view.copy_(self._source[: size // 4])

    def take(self, size: int, view: torch.Tensor) -> float:
        """What a first read takes longer than a second one."""
        start = time.perf_counter()
        view.sum()
        first = time.perf_counter()
        view.sum()
        return max(0.0, (first - start) - (time.perf_counter() - first))


class OnAccelerator:
    """A stage on an accelerator: the berths that it runs with, one for each size."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._queue, self._done = accelerator, accelerator.queue(), accelerator.event()
        self._berths = {size: Berth(accelerator, TensorSpec("payload", (size // 4,), (1,), "float32")) for size in SIZES_BYTES}

    def make(self, size: int) -> None:
        """Touch every element there."""
        self._accelerator.enqueue(self._queue, lambda: self._berths[size].zero())
        self._wait()

    def put(self, size: int, view: torch.Tensor) -> None:
        """To staging memory, and from there."""
        self._accelerator.enqueue(self._queue, self._berths[size].leave)
        self._wait()
        view.copy_(self._berths[size].host)

    def take(self, size: int, view: torch.Tensor) -> float:
        """To staging memory, and from there to the device."""
        start = time.perf_counter()
        self._berths[size].host.copy_(view)
        self._accelerator.enqueue(self._queue, self._berths[size].arrive)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        self._done.record(self._queue)
        self._done.synchronise()


def _play(role: Literal["send", "receive"], forth: Ring, back: Ring, place: Place) -> Side:
    with torch.inference_mode():
        return _send(forth, back, place) if role == "send" else _receive(forth, back, place)


def _send(forth: Ring, back: Ring, place: Place) -> Side:
    """Send each message and wait for the token that answers it."""
    to, answer = RingEnd(forth, sends=True), RingEnd(back, sends=False)
    shares, rounds = [], []
    sequence = 0
    for size, messages in zip(SIZES_BYTES, MESSAGES, strict=True):
        busy, whole = [], []
        for _ in range(messages + WARM_UP):
            place.make(size)  # what is sent was computed just before, as a stage's output is
            start = time.perf_counter()
            slot = to.acquire(sequence, TIMEOUT_S)
            place.put(size, slot.tensors[0][: size // 4])
            to.release(sequence)
            sent = time.perf_counter()
            answer.acquire(sequence, TIMEOUT_S)
            whole.append(time.perf_counter() - start)
            answer.release(sequence)
            busy.append(sent - start)
            sequence += 1
        shares.append(statistics.median(busy[WARM_UP:]))
        rounds.append(statistics.median(whole[WARM_UP:]))
    return Side(tuple(shares), tuple(rounds))


def _receive(forth: Ring, back: Ring, place: Place) -> Side:
    """Answer each message, then get it to where it is needed."""
    source, answer = RingEnd(forth, sends=False), RingEnd(back, sends=True)
    shares = []
    sequence = 0
    for size, messages in zip(SIZES_BYTES, MESSAGES, strict=True):
        busy = []
        for _ in range(messages + WARM_UP):
            slot = source.acquire(sequence, TIMEOUT_S)
            answer.acquire(sequence, TIMEOUT_S)
            answer.release(sequence)
            taken_s = place.take(size, slot.tensors[0][: size // 4])
            start = time.perf_counter()
            source.release(sequence)
            busy.append(taken_s + time.perf_counter() - start)
            sequence += 1
        shares.append(statistics.median(busy[WARM_UP:]))
    return Side(tuple(shares))


def _link(source: str, target: str, forth: Ring, back: Ring, workers: Mapping[str, WorkerProcess]) -> Link:
    """Let the two ends play, the host its own part, and fit what they saw."""
    forth.refill()
    back.refill()
    roles: tuple[tuple[str, Literal["send", "receive"]], ...] = ((target, "receive"), (source, "send"))
    for name, role in roles:
        if name != HOST:
            workers[name].connection.send(Duty(role, forth.handle, back.handle, name, dict(PROVIDERS)))
    seen = [(name, role, _play(role, forth, back, InHost()) if name == HOST else None) for name, role in roles]
    sides = {role: own or _answer(workers[name]) for name, role, own in seen}
    send, got = sides["send"], sides["receive"]
    send_s, send_s_per_byte = fit(SIZES_BYTES, send.share_s)
    receive_s, receive_s_per_byte = fit(SIZES_BYTES, got.share_s)
    # The answer costs what a small message costs, so half of the small round trip is one hop.
    latency_s = max(0.0, send.round_s[0] / 2 - send.share_s[0] - got.share_s[0])
    return Link(source, target, latency_s, send_s, send_s_per_byte, receive_s, receive_s_per_byte)


def _answer(worker: WorkerProcess) -> Side:
    """What a worker saw. Raises: WorkerError: it died, or what it raised."""
    answer = receive(worker, TIMEOUT_S, "a measurement of links")
    if answer.fault:
        raise WorkerError(f"worker '{worker.name}' failed at a measurement of links. Its traceback:\n{answer.fault}")
    side: Side = answer.value
    return side


@contextmanager
def _rings() -> Iterator[tuple[Ring, Ring]]:
    """Two rings, one for each direction, of slots for the largest message."""
    spec = TensorSpec("payload", (SIZES_BYTES[-1] // 4,), (1,), "float32")
    forth, back = Ring.create([spec], num_slots=2), Ring.create([spec], num_slots=2)
    try:
        yield forth, back
    finally:
        forth.close()
        back.close()


@contextmanager
def measuring_worker(device: Device, what: str, fds: Sequence[int], threads: int | None = None) -> Iterator[WorkerProcess]:
    """A worker on a device that obeys until the block ends; ``what`` it measures, for messages."""
    worker = spawn_worker(WORKER, name=f"{what} {device.name}", cores=device.cores, fds=fds, threads=threads)
    try:
        yield worker
    finally:
        worker.kill()
        worker.close()


def _like(links: Sequence[Link], kinds: Mapping[str, str]) -> list[Link]:
    """Links for the pairs that were not measured, each the median of those between the same kinds, or else of all devices'."""
    measured = {(link.source, link.target) for link in links}
    between: dict[tuple[str, str], list[Link]] = {}
    for link in links:
        between.setdefault((kinds[link.source], kinds[link.target]), []).append(link)
    inner = [link for link in links if HOST not in (link.source, link.target)]
    costs = ("latency_s", "send_s", "send_s_per_byte", "receive_s", "receive_s_per_byte")
    found = []
    for source, target in permutations(kinds, 2):
        if (source, target) not in measured:
            same = between.get((kinds[source], kinds[target]), inner)
            found.append(
                Link(source, target, **{cost: statistics.median(getattr(link, cost) for link in same) for cost in costs})
            )
    return found
