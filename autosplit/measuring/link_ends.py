"""One end of a link measurement: messages go forth over one ring, tokens come back over another, for four sizes.

The sender's share is its copy into the slot and the hand-over. The receiver's share is its hand-over and the extra time of its
first read of the data over a second read.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from autosplit.backends.placing import StagedTensor
from autosplit.devices.accelerators import Accelerator
from autosplit.running.ring import Ring, RingEnd, RingHandle
from autosplit.tracing.tensorspec import TensorSpec

SIZES_BYTES = (4096, 65536, 524288, 4194304)
MESSAGES = (60, 60, 40, 20)
WARM_UP = 5
TIMEOUT_S = 120.0
"""Seconds that one end waits for the other, which may have to start first."""


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """One end of a measurement, for a worker: send or receive on these two rings."""

    role: Literal["send", "receive"]
    forth: RingHandle
    back: RingHandle


@dataclass(frozen=True, slots=True)
class EndTimes:
    """Median seconds by message size: the share of one end, and for the sender the round trip."""

    share_s: tuple[float, ...]
    round_s: tuple[float, ...] = ()


class Place(Protocol):
    """The memory that an end sends from, or needs its data in."""

    def make(self, size: int) -> None:
        """Compute the ``size`` bytes that are sent next."""

    def put(self, size: int, view: torch.Tensor) -> None:
        """Copy them into a slot."""

    def take(self, size: int, view: torch.Tensor) -> float:
        """Bring ``size`` bytes from a slot to the place; returns the seconds."""


class OnCores:
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
        """The extra time of a first read over a second one."""
        start = time.perf_counter()
        view.sum()
        first = time.perf_counter()
        view.sum()
        return max(0.0, (first - start) - (time.perf_counter() - first))


class OnAccelerator:
    """A stage on an accelerator, with a staged tensor for each size."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._queue, self._done = accelerator, accelerator.queue(), accelerator.event()
        self._staged = {
            size: StagedTensor(accelerator, TensorSpec("payload", (size // 4,), (1,), "float32")) for size in SIZES_BYTES
        }

    def make(self, size: int) -> None:
        """Touch every element on the device."""
        self._run(self._staged[size].zero)

    def put(self, size: int, view: torch.Tensor) -> None:
        """Copy to staging memory, and from there to the slot."""
        self._run(self._staged[size].leave)
        view.copy_(self._staged[size].host)

    def take(self, size: int, view: torch.Tensor) -> float:
        """Copy to staging memory, and from there to the device."""
        start = time.perf_counter()
        self._staged[size].host.copy_(view)
        self._run(self._staged[size].arrive)
        return time.perf_counter() - start

    def _run(self, work: Callable[[], None]) -> None:
        self._accelerator.enqueue(self._queue, work)
        self._done.record(self._queue)
        self._done.synchronise()


def play(end: LinkEnd, place: Place, rings: tuple[Ring, Ring] | None = None) -> EndTimes:
    """Play one end of a measurement; ``rings``: forth and back, where they are open in this process."""
    forth, back = rings or (Ring(end.forth), Ring(end.back))
    with torch.inference_mode():
        return _send(forth, back, place) if end.role == "send" else _receive(forth, back, place)


def _send(forth: Ring, back: Ring, place: Place) -> EndTimes:
    """Send each message and wait for the token that answers it."""
    target, answer = RingEnd(forth, sends=True), RingEnd(back, sends=False)
    shares, rounds = [], []
    sequence = 0
    for size, messages in zip(SIZES_BYTES, MESSAGES, strict=True):
        busy, whole = [], []
        for _ in range(messages + WARM_UP):
            place.make(size)  # a stage's output was computed just before it is sent
            start = time.perf_counter()
            slot = target.acquire(sequence, TIMEOUT_S)
            place.put(size, slot.tensors[0][: size // 4])
            target.release(sequence)
            sent = time.perf_counter()
            answer.acquire(sequence, TIMEOUT_S)
            whole.append(time.perf_counter() - start)
            answer.release(sequence)
            busy.append(sent - start)
            sequence += 1
        shares.append(statistics.median(busy[WARM_UP:]))
        rounds.append(statistics.median(whole[WARM_UP:]))
    return EndTimes(tuple(shares), tuple(rounds))


def _receive(forth: Ring, back: Ring, place: Place) -> EndTimes:
    """Answer each message, then bring it to its place."""
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
    return EndTimes(tuple(shares))
