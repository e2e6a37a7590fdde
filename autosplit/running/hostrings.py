"""The host's ends of the rings: requests go into some, results come out of others.

::

    caller or transport's thread -> InputRings -> stages -> ResultRings -> transport's thread
"""

import contextlib
import os
import select
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from autosplit.errors import AutosplitError, DeadlineError, StageError
from autosplit.memory.slots import HOST
from autosplit.running.copying import CopyPool
from autosplit.running.inflight import Lanes
from autosplit.running.provisioner import Deployment
from autosplit.running.request import Request
from autosplit.running.ring import DATA, ERROR, FLAG, POSTED_NS, SKIPPED, RingEnd, Slot
from autosplit.tracing.tensorspec import TensorSpec, storage_bytes

SMALL_BYTES = 4096
"""A value of so few bytes gets new memory in each answer. Beside stages whose data fill the caches, memory that is used again
takes three times as long for it (96 us in place of 40 for 8 numbers, on a core of an AMD EPYC)."""

_UNREAD = torch.empty(0)
"""In the place of an input that no stage reads."""


class InputRings:
    """The sending ends of the rings that lead from the host to stages."""

    def __init__(self, deployment: Deployment) -> None:
        wiring = deployment.wiring
        self._ends = [
            ([RingEnd(ring, sends=True) for ring in rings], channel.source_index)
            for channel, rings in zip(wiring.channels, deployment.rings, strict=True)
            if channel.source == HOST
        ]
        self._passed = [(name, wiring.inputs.index(name)) for name in wiring.outputs if name in wiring.inputs]
        self._num_inputs = len(wiring.inputs)

    def write(self, request: Request) -> None:
        """Hand the inputs of a request to the first stages; inputs that are outputs too go into its values.

        This never waits. A worker frees the slots of its inputs before it hands over its last output, so the slots of a
        finished request are free. Raises: TimeoutError: a slot is not free all the same.
        """
        try:
            for name, position in self._passed:
                request.values[name] = request.inputs[position].clone()
            for ends, index in self._ends:
                end = ends[request.sequence % len(ends)]
                slot = end.acquire(request.sequence, timeout_s=0.0)
                slot.write([request.inputs[position] for position in index], request.variant)
                end.release(request.sequence)
        except BaseException:  # Ctrl-C in a caller's thread, for example
            self._skip(request.sequence)
            raise
        request.inputs = ()

    def take_back(self, request: Request) -> None:
        """Give a request without an answer its inputs again, as copies of those in its slots; unread inputs are left out."""
        found: dict[int, torch.Tensor] = {position: request.values[name] for name, position in self._passed}
        for ends, index in self._ends:
            slot = ends[request.sequence % len(ends)].ring.slot(request.sequence)
            found |= {position: view.clone() for position, view in zip(index, slot.views(request.variant), strict=True)}
        request.inputs = tuple([found.get(position, _UNREAD) for position in range(self._num_inputs)])

    def _skip(self, sequence: int) -> None:
        """Hand over a partly written request as one to skip, so that it does not block the requests behind it."""
        for ends, _ in self._ends:
            end = ends[sequence % len(ends)]
            if end.ready(sequence):
                end.acquire(sequence).write_text(SKIPPED)
                end.release(sequence)


@dataclass(slots=True)
class ResultRing:
    """The receiving end of one ring that leads to the host: its values by name, and its next request."""

    end: RingEnd
    copies: dict[str, CopyPool | None]
    first: int
    every: int
    next: int

    def rewind(self, lanes: Lanes) -> None:
        """Expect the oldest unfinished request of this ring next."""
        base = lanes.base(self.first)
        self.next = base + (self.first - base) % self.every

    def last_of(self, num_results: int, lanes: Lanes) -> int:
        """The request to wait for if ``num_results`` requests in flight are to be collected together."""
        ahead = min(num_results, lanes.next(self.first) - self.next) - 1
        return self.next + max(0, ahead) // self.every * self.every

    def take(self) -> Iterator[tuple[int, Slot]]:
        """The requests whose results are here, with their slots."""
        while self.end.ready(sequence := self.next):
            self.next += self.every
            yield sequence, self.end.acquire(sequence)

    def read(self, slot: Slot, request: Request) -> None:
        """Copy a result, or its error, into the request, and free the slot."""
        request.tokens -= 1
        if request.answered:  # it ran again beside an older request
            self.end.release(request.sequence)
            return
        request.made_ns = max(request.made_ns, slot.header[POSTED_NS])
        if slot.header[FLAG] == DATA:
            for (name, copies), value in zip(self.copies.items(), slot.tensors, strict=True):
                request.values[name] = value.clone() if copies is None else copies.copy(value, request.variant)
        elif request.error is None:
            request.error = error_of(slot, request.number)
        self.end.release(request.sequence)


def _are_small(specs: Sequence[TensorSpec]) -> bool:
    """Whether tensors of these specs have at most ``SMALL_BYTES``, on a boundary and without gaps, as new memory has none."""
    return all(storage_bytes(spec) == spec.num_bytes <= SMALL_BYTES for spec in specs)


def error_of(slot: Slot, number: int) -> AutosplitError:
    """The error of request ``number``, whose slot holds no tensors."""
    if slot.header[FLAG] == ERROR:
        return StageError(slot.read_text().decode(errors="replace"))
    return DeadlineError(f"request {number} was skipped: its deadline passed before the last stage")


class ResultRings:
    """All result rings, and the other descriptors that wake the transport's thread: the end of a worker, and ``wake``."""

    def __init__(self, deployment: Deployment) -> None:
        wiring = deployment.wiring
        self._deployment = deployment
        self._rings: list[ResultRing] = []
        for channel, rings in zip(wiring.channels, deployment.rings, strict=True):
            for first, ring in enumerate(rings if channel.target == HOST else ()):
                end = RingEnd(ring, sends=False)
                most = 4 * wiring.most_in_flight
                columns = zip(*channel.layouts, strict=True)
                copies = {specs[0].name: None if _are_small(specs) else CopyPool(specs, most) for specs in columns}
                self._rings.append(ResultRing(end, copies, first, channel.every, first))
        self._ring_fds = {ring.end.fd for ring in self._rings}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.RLock()
        """Held around each use of the descriptor: after ``close`` its number may be that of another one."""
        self._poll = select.poll()
        for fd in (*self._ring_fds, self._wake_fd):
            self._poll.register(fd, select.POLLIN)
        self.watch_workers()

    def __iter__(self) -> Iterator[ResultRing]:
        return iter(self._rings)

    def wake(self) -> None:
        """End the present or the next ``wait``; may be called from any thread, and at any moment by a finalizer."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def watch_workers(self) -> None:
        """Let the end of a worker end a ``wait``."""
        for worker in self._deployment.workers:
            self._poll.register(worker.pidfd, select.POLLIN)

    def forget_workers(self) -> None:
        """Stop waking up for workers, which are about to be replaced."""
        for worker in self._deployment.workers:
            with contextlib.suppress(KeyError, OSError):
                self._poll.unregister(worker.pidfd)

    def rewind(self, lanes: Lanes) -> None:
        """Expect the oldest unfinished request of each ring next."""
        for ring in self._rings:
            ring.rewind(lanes)

    def wait(self, patience_ms: int | None, num_results: int, lanes: Lanes) -> bool:
        """Wait until results are here, a worker has ended, or ``wake`` was called; True if a worker has ended.

        Args:
            patience_ms: the longest wait; None waits without limit. There is no wait if results are here already.
            num_results: results to wait for, at most as many as there are requests under way.
            lanes: the requests that were sent.
        """
        here = False
        for ring in self._rings:
            until = ring.last_of(num_results, lanes)
            ring.end.fall_asleep(until)
            here = ring.end.ready(until) or here
        found = {fd for fd, _ in self._poll.poll(0 if here else patience_ms)}
        for ring in self._rings:
            ring.end.wake_up(called=ring.end.fd in found)
        if self._wake_fd in found:
            os.eventfd_read(self._wake_fd)
        return not found <= self._ring_fds | {self._wake_fd}

    def close(self) -> None:
        """Close the descriptor of ``wake``."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                descriptor, self._wake_fd = self._wake_fd, -1
                os.close(descriptor)
