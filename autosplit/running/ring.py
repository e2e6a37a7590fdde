"""A ring of slots in shared memory: one sender, one receiver, one copy in, a view out.

Two counting descriptors (eventfds in semaphore mode) carry the tokens::

    sender:   take a ``free`` token  -> copy the tensors into the slot -> give a ``filled`` token
    receiver: take a ``filled`` token -> compute on views of the slot  -> give a ``free`` token

A ring is full when no ``free`` token is left, which is the back-pressure. The slot of a request follows from its number
alone, so neither end keeps a position, and a replay needs no more than new tokens.
"""

import math
import mmap
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autosplit.running.copying import Copier
from autosplit.tensorspec import ALIGNMENT, TensorSpec, storage_bytes, view_storage

PAGE = mmap.PAGESIZE
HEADER_WORDS = 8
SEQUENCE, FLAG, TEXT_BYTES, POSTED_NS = range(4)
DATA, ERROR, SKIPPED = range(3)
"""Flags of a token: tensors, the text of an error, or nothing (the request was cancelled or is past its deadline)."""

EMPTY = -1
"""The number of a slot with nothing in it."""

_TEXT_ROOM = 32 * 1024
"""Least size of a slot, so that a traceback fits; pages that nobody writes take no memory."""


class Interrupted(Exception):  # noqa: N818 - not an error: somebody wants to be heard
    """A wait ended because the interrupt descriptor became readable."""


@dataclass(frozen=True, slots=True)
class RingHandle:
    """What a process needs to open a ring whose descriptors it inherited.

    ``every``: the ring carries each ``every``-th request (two ends with 2 and 3 replicas meet once in 6).
    """

    specs: tuple[TensorSpec, ...]
    num_slots: int
    every: int
    memory_fd: int
    filled_fd: int
    free_fd: int

    @property
    def fds(self) -> tuple[int, int, int]:
        """The descriptors that a worker must inherit."""
        return self.memory_fd, self.filled_fd, self.free_fd


class Slot:
    """One place in a ring: header words, tensors as views, and the same bytes as room for an error's text."""

    def __init__(self, specs: Sequence[TensorSpec], header: memoryview, payload: torch.Tensor, offsets: Sequence[int]) -> None:
        self.header = header
        self.text = payload.numpy().data
        self.tensors = [view_storage(payload[offset:], spec) for spec, offset in zip(specs, offsets, strict=True)]
        self._copiers = [Copier(spec) for spec in specs]

    def write(self, sequence: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors in, with the strides of the specs; shapes and dtypes were checked."""
        for copier, target, source in zip(self._copiers, self.tensors, tensors, strict=True):
            copier.copy(target, source)
        self._stamp(sequence, DATA)

    def write_text(self, sequence: int, flag: int, text: bytes = b"") -> None:
        """Put an error's text (its middle is left out if it is long), or nothing, in place of tensors."""
        if len(text) > len(self.text):
            half = len(self.text) // 2 - 8
            text = text[:half] + b"\n[...]\n" + text[-half:]
        self.text[: len(text)] = text
        self.header[TEXT_BYTES] = len(text)
        self._stamp(sequence, flag)

    def read_text(self) -> bytes:
        """The text of an error."""
        return bytes(self.text[: self.header[TEXT_BYTES]])

    def _stamp(self, sequence: int, flag: int) -> None:
        self.header[SEQUENCE] = sequence
        self.header[FLAG] = flag
        self.header[POSTED_NS] = time.monotonic_ns()


def create_shared(num_bytes: int) -> int:
    """A descriptor of shared memory, zeros, without a name, that only this user may open."""
    fd = os.memfd_create("autosplit")
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, num_bytes)
    return fd


def map_shared(fd: int, num_bytes: int) -> torch.Tensor:
    """The memory behind ``fd`` as bytes, from a page boundary on; it stays as long as any view of it, also without ``fd``.

    Python's own ``mmap`` would keep a second descriptor open for as long.
    """
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)


class Ring:
    """Shared memory and two counting descriptors; ``create`` makes them, ``Ring(handle)`` maps what was inherited."""

    def __init__(self, handle: RingHandle) -> None:
        self.handle = handle
        offsets, header_bytes, slot_bytes = _layout(handle.specs, handle.num_slots)
        memory = map_shared(handle.memory_fd, header_bytes + handle.num_slots * slot_bytes)
        headers = memory[:header_bytes].numpy().data
        self.slots = []
        for number in range(handle.num_slots):
            header = headers[8 * HEADER_WORDS * number :][: 8 * HEADER_WORDS].cast("q")
            payload = memory[header_bytes + slot_bytes * number :][:slot_bytes]
            self.slots.append(Slot(handle.specs, header, payload, offsets))

    @staticmethod
    def create(specs: Sequence[TensorSpec], num_slots: int, every: int = 1) -> "Ring":
        """A ring of empty slots. Raises: OSError: no more descriptors or memory."""
        _, header_bytes, slot_bytes = _layout(specs, num_slots)
        flags = os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC
        memory_fd = create_shared(header_bytes + num_slots * slot_bytes)
        handle = RingHandle(tuple(specs), num_slots, every, memory_fd, os.eventfd(0, flags), os.eventfd(0, flags))
        ring = Ring(handle)
        ring.refill()
        return ring

    def slot(self, sequence: int) -> Slot:
        """The slot of request ``sequence``."""
        return self.slots[sequence // self.handle.every % self.handle.num_slots]

    def refill(self, held: Sequence[int] = ()) -> None:
        """Set tokens and numbers anew: these requests, still in their slots, wait for the receiver. No end may be at work."""
        for slot in self.slots:
            slot.header[SEQUENCE] = EMPTY
        for sequence in held:
            self.slot(sequence).header[SEQUENCE] = sequence
        for fd, count in ((self.handle.filled_fd, len(held)), (self.handle.free_fd, self.handle.num_slots - len(held))):
            while take_token(fd):
                pass
            if count:
                os.eventfd_write(fd, count)

    def close(self) -> None:
        """Close the descriptors; the memory goes when the last view of it does."""
        for fd in self.handle.fds:
            os.close(fd)
        self.slots = []


class RingEnd:
    """One end of a ring: it takes tokens of one kind and gives tokens of the other.

    Args:
        ring: the ring.
        sends: True for the end that fills slots.
        interrupt_fd: a descriptor that ends a wait when it is readable, or -1.
        spin_s: how long to look for a token before blocking; more than 0 only for a worker that owns its core.
    """

    def __init__(self, ring: Ring, *, sends: bool, interrupt_fd: int = -1, spin_s: float = 0.0) -> None:
        self.ring = ring
        filled, free = ring.handle.filled_fd, ring.handle.free_fd
        self.fd, self._gives = (free, filled) if sends else (filled, free)
        self._interrupt_fd = interrupt_fd
        self._spin_s = spin_s
        self._own = select.poll()
        self._own.register(self.fd, select.POLLIN)
        self._poll = select.poll()
        for fd in (self.fd, interrupt_fd):
            if fd >= 0:
                self._poll.register(fd, select.POLLIN)

    def acquire(self, sequence: int, timeout_s: float | None = None) -> Slot:
        """The slot of request ``sequence``, once it is this end's turn.

        Raises:
            Interrupted: the interrupt descriptor became readable first.
            TimeoutError: ``timeout_s`` passed.
        """
        slot = self.ring.slot(sequence)
        if not take_token(self.fd) and not (self._spin_s and self._spin(slot, sequence)):
            self._wait(timeout_s)
        return slot

    def waiting(self) -> bool:
        """Whether ``acquire`` would return at once."""
        return bool(self._own.poll(0))

    def release(self) -> None:
        """Hand the acquired slot to the other end."""
        os.eventfd_write(self._gives, 1)

    def _spin(self, slot: Slot, sequence: int) -> bool:
        """Look for the number in the slot for a while; a look at the descriptor would hold up the sender, who locks it."""
        header, until = slot.header, time.perf_counter() + self._spin_s
        while time.perf_counter() < until:
            if header[SEQUENCE] == sequence and take_token(self.fd):
                return True
            os.sched_yield()  # the host, say, may have work on this core
        return False

    def _wait(self, timeout_s: float | None) -> None:
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = until - time.monotonic()
            if left < 0:
                raise TimeoutError
            events = self._poll.poll(None if left == math.inf else math.ceil(left * 1000))
            if self._ready(events):
                return

    def _ready(self, events: Sequence[tuple[int, int]]) -> bool:
        if any(fd == self._interrupt_fd for fd, _ in events):
            raise Interrupted
        return take_token(self.fd)


def take_token(fd: int) -> bool:
    """Take one token if there is one."""
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return False
    return True


def _layout(specs: Sequence[TensorSpec], num_slots: int) -> tuple[list[int], int, int]:
    """Offsets of the tensors in a slot (aligned), bytes of all headers, bytes of a slot (whole pages)."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += _round_up(storage_bytes(spec), ALIGNMENT)
    header_bytes = _round_up(8 * HEADER_WORDS * num_slots, PAGE)
    return offsets, header_bytes, _round_up(max(end, _TEXT_ROOM), PAGE)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
