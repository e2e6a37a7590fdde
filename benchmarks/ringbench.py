"""The ring between two pinned processes: one-way seconds, and bytes per second when streamed."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import torch

from autosplit.devices.limits import affinity
from autosplit.devices.processes import receive, spawn_worker
from autosplit.running.provisioner import SPIN_S
from autosplit.running.ring import Ring, RingEnd, RingHandle
from autosplit.tracing.tensorspec import TensorSpec

SIZES = (4_096, 65_536, 614_400, 6_291_456)
NUM_SLOTS = 4


@dataclass(frozen=True)
class Role:
    """The task of one end: echo (there and back), stream (one way) or only copy, ``count`` times, polling ``spin_s`` first."""

    there: RingHandle
    back: RingHandle
    leads: bool
    kind: Literal["echo", "stream", "copy"]
    count: int
    spin_s: float


def play(control: Connection) -> None:
    """One end, in a worker: answers each role with the seconds that it took."""
    while True:
        role: Role = control.recv()
        mine, other = (role.there, role.back) if role.leads else (role.back, role.there)
        sender = RingEnd(Ring(mine), sends=True)
        receiver = RingEnd(Ring(other), sends=False, spin_s=role.spin_s)
        payload = [torch.ones(view.shape) for view in sender.ring.slots[0].tensors]
        control.send("ready")
        control.recv()
        start = time.perf_counter()
        for number in range(role.count):
            if role.kind == "copy":
                if role.leads:
                    sender.ring.slot(number).write(payload)
                continue
            if not role.leads:
                read(receiver, number)
            if role.leads or role.kind == "echo":
                sender.acquire(number, 30).write(payload)
                sender.release(number)
            if role.leads and role.kind == "echo":
                read(receiver, number)
        control.send(time.perf_counter() - start)


def read(receiver: RingEnd, number: int) -> None:
    """Take a slot, touch both ends of its tensor, and release it."""
    tensor = receiver.acquire(number, 30).tensors[0]
    tensor[0].item(), tensor[-1].item()
    receiver.release(number)


def measure(rounds: int = 5) -> Iterator[dict[str, object]]:
    """One row for each size and way of waiting: medians over interleaved rounds; also the rate of the sender's copies alone."""
    cores = affinity()
    kinds: tuple[Literal["echo", "stream", "copy"], ...] = ("echo", "copy", "stream")
    settings = [(size, spin_s) for size in SIZES for spin_s in (0.0, SPIN_S)]
    rings = {
        size: [Ring.create([[TensorSpec("x", (size // 4,), (1,), "float32")]], NUM_SLOTS) for _ in range(2)] for size in SIZES
    }
    fds = [fd for pair in rings.values() for ring in pair for fd in ring.handle.fds]
    workers = [
        spawn_worker("benchmarks.ringbench:play", name=f"end {core}", cores=[core], fds=fds) for core in (cores[0], cores[-1])
    ]
    one_way: dict[tuple[int, float], list[float]] = {setting: [] for setting in settings}
    streamed: dict[tuple[int, float], list[float]] = {setting: [] for setting in settings}
    copied: dict[tuple[int, float], list[float]] = {setting: [] for setting in settings}
    try:
        for _ in range(rounds):
            for size, spin_s in settings:
                count = max(100, min(2000, 200_000_000 // size))
                for kind, found in zip(kinds, (one_way, copied, streamed), strict=True):
                    for ring in rings[size]:
                        ring.refill()
                    for worker, leads in zip(workers, (True, False), strict=True):
                        there, back = (ring.handle for ring in rings[size])
                        worker.connection.send(Role(there, back, leads, kind, count, spin_s))
                    for worker in workers:
                        receive(worker, 60, "during its role")
                    for worker in workers:
                        worker.connection.send("go")
                    seconds = max(receive(worker, 60, "during the end") for worker in workers) / count
                    found[size, spin_s].append(seconds / 2 if kind == "echo" else size / seconds)
    finally:
        for worker in workers:
            worker.close()
    for size, spin_s in settings:
        times, rates = one_way[size, spin_s], streamed[size, spin_s]
        yield {
            "bytes": size,
            "receiver": "spins 50 us" if spin_s else "sleeps",
            "one_way_us": statistics.median(times) * 1e6,
            "min_us": min(times) * 1e6,
            "max_us": max(times) * 1e6,
            "streamed_gb_per_s": statistics.median(rates) / 1e9,
            "best_gb_per_s": max(rates) / 1e9,
            "copy_alone_gb_per_s": statistics.median(copied[size, spin_s]) / 1e9,
        }
