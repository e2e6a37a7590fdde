"""One end of a link measurement: messages go forth over one ring, tokens come back over another, for four sizes.

The sender's share is its copy into the slot and the hand-over. The receiver's share is its hand-over and the extra time of its
first read of the data over a second read.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch

from autosplit.backends.checking import torch_threads
from autosplit.backends.placing import StagedTensor
from autosplit.devices.accelerators import Accelerator
from autosplit.running.ring import Ring, RingEnd, RingHandle
from autosplit.tracing.tensorspec import TensorSpec

SIZES_BYTES = (4096, 65536, 524288, 4194304)
WARM_UP = 5
TIMEOUT_S = 120.0
"""Seconds that one end waits for the other, which may have to start first."""


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """One end of a measurement, for a worker: send or receive on these two rings; ``messages``: how many of each size."""

    role: Literal["send", "receive"]
    forth: RingHandle
    back: RingHandle
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndTimes:
    """Median seconds by message size: the share of one end, and for the sender the round trip."""

    share_s: tuple[float, ...]
    round_s: tuple[float, ...] = ()


class OnCores:
    """The data of a stage on CPU cores: it is sent from the stage's own memory and read in the slot."""

    def __init__(self) -> None:
        self._source = torch.ones(SIZES_BYTES[-1] // 4)

    def make(self, size: int) -> None:
        """Touch every element of the ``size`` bytes that are sent next."""
        self._source[: size // 4].add_(1)

    def put(self, size: int, view: torch.Tensor) -> None:
        """Copy the bytes into a slot."""
        view.copy_(self._source[: size // 4])

    def take(self, size: int, view: torch.Tensor) -> float:
        """Read ``size`` bytes in a slot twice; returns the seconds that the first read takes longer."""
        start = time.perf_counter()
        view.sum()
        first = time.perf_counter()
        view.sum()
        return max(0.0, (first - start) - (time.perf_counter() - first))


class OnAccelerator:
    """The data of a stage on an accelerator, in a staged tensor for each size."""

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
        """Copy from a slot to staging memory, and from there to the device; returns the seconds."""
        start = time.perf_counter()
        self._staged[size].host.copy_(view)
        self._run(self._staged[size].arrive)
        return time.perf_counter() - start

    def _run(self, work: Callable[[], None]) -> None:
        self._accelerator.enqueue(self._queue, work)
        self._done.record(self._queue)
        self._done.synchronise()


def play(end: LinkEnd, place: OnCores | OnAccelerator, rings: tuple[Ring, Ring] | None = None) -> EndTimes:
    """Play one end of a measurement; ``rings``: forth and back, where they are open in this process."""
    forth, back = rings or (Ring(end.forth), Ring(end.back))
    sends = end.role == "send"
    data, token = RingEnd(forth, sends=sends), RingEnd(back, sends=not sends)
    exchange = _send if sends else _receive
    medians, sequence = [], count()
    # as stages and host copy and read messages on one thread: further ones would wait for the other end's core
    with torch.inference_mode(), torch_threads(1):
        for size, messages in zip(SIZES_BYTES, end.messages, strict=True):
            times = [exchange(data, token, place, size, next(sequence)) for _ in range(messages + WARM_UP)]
            medians.append([statistics.median(column) for column in zip(*times[WARM_UP:], strict=True)])
    return EndTimes(*zip(*medians, strict=True))


def _send(data: RingEnd, token: RingEnd, place: OnCores | OnAccelerator, size: int, sequence: int) -> tuple[float, float]:
    """Send a message and wait for its token; returns seconds of the own share and of the round trip."""
    place.make(size)  # a stage's output was computed just before it is sent
    start = time.perf_counter()
    slot = data.acquire(sequence, TIMEOUT_S)
    place.put(size, slot.tensors[0][: size // 4])
    data.release(sequence)
    sent = time.perf_counter()
    token.acquire(sequence, TIMEOUT_S)
    answered = time.perf_counter()
    token.release(sequence)
    return sent - start, answered - start


def _receive(data: RingEnd, token: RingEnd, place: OnCores | OnAccelerator, size: int, sequence: int) -> tuple[float]:
    """Answer a message, then bring it to its place; returns seconds of the own share."""
    slot = data.acquire(sequence, TIMEOUT_S)
    token.acquire(sequence, TIMEOUT_S)
    token.release(sequence)
    taken_s = place.take(size, slot.tensors[0][: size // 4])
    start = time.perf_counter()
    data.release(sequence)
    return (taken_s + time.perf_counter() - start,)
