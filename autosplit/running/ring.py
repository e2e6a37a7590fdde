"""A ring of slots in shared memory: one sender copies tensors in, one receiver computes on views of them.

A word of each slot holds the number of the request in it, or EMPTY, and so whose turn it is::

                +--------+--------+--------+--------+
    numbers     | EMPTY  |   9    |   10   | EMPTY  |     memory of the ring: 4 slots
    tensors     |        | x9 y9  | x10 y10|        |
                +--------+--------+--------+--------+
                             ^                  ^
                             receiver           sender

    sender:   wait for EMPTY      -> copy the tensors into the slot -> write the request's number -> wake the receiver
    receiver: wait for the number -> compute on views of the slot   -> write EMPTY                -> wake the sender

A ring is full when the next slot is not empty: then the sender waits. The slot of a request follows from its number alone, so
neither end keeps a position, and a replay only needs new numbers in the slots.

An end that must wait polls for a while, writes to its sleep word, polls once more, and blocks on a descriptor. The other end
writes to the descriptor only if that sleep word is set. Each end writes its own word before it reads the other's, with a
barrier between (Dekker's protocol), so one of them always sees the other::

    receiver: sleep word = 1 -> barrier -> is the number there? -> no: block
    sender:   write the number -> barrier -> is the sleep word set? -> yes: clear it, wake the receiver

Two ends that are awake hand over without a system call. A sleep word holds 1 more than the number of a request: an end that
can take several results at once asks to be woken for a later one, because waking it is the most expensive step.
"""

import math
import mmap
import os
import platform
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from autosplit.memory.lives import aligned
from autosplit.running.copying import copier
from autosplit.tracing.tensorspec import TensorSpec, storage_bytes, view_storage

PAGE = mmap.PAGESIZE
HEADER_WORDS = 8
SEQUENCE, FLAG, TEXT_BYTES, POSTED_NS, VARIANT = range(5)
DATA, ERROR, SKIPPED = range(3)
"""Flags of a slot: it holds tensors, the text of an error, or nothing (the request was cancelled or is past its deadline)."""

HALF_S = 2e-3
"""Seconds for which a sender waits until half of a full ring is free, so that it is woken less often; then one slot will do."""

EMPTY = -1
"""The number of an empty slot."""

_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")
"""Whether the processor keeps the order of stores and that of loads; only a store and a later load may change places."""

_TEXT_ROOM = 32 * 1024
"""The least bytes of a slot, so that a traceback fits; pages that are never written take no memory."""


class Interrupted(Exception):  # noqa: N818 - not an error: a message is there
    """A wait ended because the interrupt descriptor became readable."""


@dataclass(frozen=True, slots=True)
class RingHandle:
    """The values with which a process opens a ring whose descriptors it inherited.

    ``layouts`` holds the layouts of the tensors for each variant, which share the bytes of a slot. The ring carries each
    ``every``-th request (one between 2 and 3 replicas carries each sixth). ``filled_fd`` wakes the receiver, ``free_fd`` the
    sender.
    """

    layouts: tuple[tuple[TensorSpec, ...], ...]
    num_slots: int
    every: int
    memory_fd: int
    filled_fd: int
    free_fd: int

    @property
    def fds(self) -> tuple[int, int, int]:
        """The descriptors that a worker inherits."""
        return self.memory_fd, self.filled_fd, self.free_fd


class Slot:
    """One slot: its header words, and its bytes as views of tensors, for each variant, or as room for the text of an error.

    The views of a variant are made at its first request: there may be thousands of variants.
    """

    def __init__(
        self, layouts: Sequence[Sequence[TensorSpec]], header: memoryview, payload: torch.Tensor, offsets: Sequence[int]
    ) -> None:
        self.header, self.layouts = header, layouts
        self.text = payload.numpy().data
        self.views = cache(
            lambda variant: [view_storage(payload[at:], one) for one, at in zip(layouts[variant], offsets, strict=True)]
        )
        self._copiers = cache(lambda variant: [copier(spec) for spec in layouts[variant]])

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that were written, as views."""
        return self.views(self.header[VARIANT])

    def write(self, tensors: Sequence[torch.Tensor], variant: int = 0) -> None:
        """Copy the tensors in; they have the shapes and dtypes of the variant's layout."""
        for copy, target, source in zip(self._copiers(variant), self.views(variant), tensors, strict=True):
            copy(target, source)
        self.post(variant)

    def post(self, variant: int) -> None:
        """Say that the tensors of a variant were written."""
        self.header[VARIANT] = variant
        self.header[FLAG] = DATA
        self.header[POSTED_NS] = time.monotonic_ns()

    def write_text(self, flag: int, text: bytes = b"") -> None:
        """Write the text of an error (without its middle if it is too long), or nothing, in place of tensors."""
        if len(text) > len(self.text):
            half = len(self.text) // 2 - 8
            text = text[:half] + b"\n[...]\n" + text[-half:]
        self.text[: len(text)] = text
        self.header[TEXT_BYTES] = len(text)
        self.header[FLAG] = flag
        self.header[POSTED_NS] = time.monotonic_ns()

    def read_text(self) -> bytes:
        """The text of an error."""
        return bytes(self.text[: self.header[TEXT_BYTES]])


def create_shared(num_bytes: int) -> int:
    """A descriptor of new shared memory: zeros, without a name in a file system, readable by this user only."""
    fd = os.memfd_create("autosplit")
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_shared(fd: int, num_bytes: int) -> torch.Tensor:
    """The memory behind ``fd`` as bytes, on a page boundary. It stays mapped while a view of it exists, even without ``fd``.

    Python's own ``mmap`` would keep a second descriptor open.
    """
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)


class Ring:
    """Shared memory and two descriptors; ``create`` makes them, ``Ring(handle)`` maps inherited ones.

    Attributes:
        slots: in the order of the requests.
        sleep_words: of the sender and of the receiver: 1 more than the number of the first request for which that end is to
            be woken, or 0 if it is not to be woken.
    """

    def __init__(self, handle: RingHandle) -> None:
        self.handle = handle
        offsets, header_bytes, slot_bytes = _layout(handle.layouts, handle.num_slots)
        memory = map_shared(handle.memory_fd, header_bytes + handle.num_slots * slot_bytes)
        headers = memory[:header_bytes].numpy().data.cast("q")
        rows = [headers[start:][:HEADER_WORDS] for start in range(0, (handle.num_slots + 2) * HEADER_WORDS, HEADER_WORDS)]
        self.sleep_words = rows[-2], rows[-1]
        self.slots = []
        for number, header in enumerate(rows[:-2]):
            payload = memory[header_bytes + slot_bytes * number :][:slot_bytes]
            self.slots.append(Slot(handle.layouts, header, payload, offsets))

    @staticmethod
    def create(layouts: Sequence[Sequence[TensorSpec]], num_slots: int, every: int = 1) -> "Ring":
        """A ring of empty slots, for tensors in one of the layouts. Raises: OSError: no more descriptors or memory."""
        _, header_bytes, slot_bytes = _layout(layouts, num_slots)
        fds = [create_shared(header_bytes + num_slots * slot_bytes)]
        try:
            fds += [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)]
            fds += [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)]
            ring = Ring(RingHandle(tuple(map(tuple, layouts)), num_slots, every, *fds))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        ring.refill()
        return ring

    def slot(self, sequence: int) -> Slot:
        """The slot of request ``sequence``."""
        return self.slots[sequence // self.handle.every % self.handle.num_slots]

    def refill(self, held: Sequence[int] = ()) -> None:
        """Number the slots anew: the ``held`` requests wait for the receiver, and other slots are empty. No end may be in use."""
        for slot in self.slots:
            slot.header[SEQUENCE] = EMPTY
        for sequence in held:
            self.slot(sequence).header[SEQUENCE] = sequence
        for sleep_word, fd in zip(self.sleep_words, (self.handle.free_fd, self.handle.filled_fd), strict=True):
            sleep_word[0] = 0
            clear(fd)

    def close(self) -> None:
        """Close the descriptors; the memory is freed with the last view of it."""
        for fd in self.handle.fds:
            os.close(fd)
        self.slots = []


class RingEnd:
    """One end of a ring.

    Args:
        sends: True for the end that fills slots.
        interrupt_fd: a descriptor that ends a wait when it is readable, or -1.
        spin_s: seconds of polling before a wait blocks; more than 0 only for a worker that owns its core.
    """

    def __init__(self, ring: Ring, *, sends: bool, interrupt_fd: int = -1, spin_s: float = 0.0) -> None:
        self.ring = ring
        self.fd = ring.handle.free_fd if sends else ring.handle.filled_fd
        self._other_fd = ring.handle.filled_fd if sends else ring.handle.free_fd
        self._asleep, self._other_asleep = ring.sleep_words if sends else ring.sleep_words[::-1]
        self._sends = sends
        self._headers = [slot.header for slot in ring.slots]
        self._every, self._num_slots = ring.handle.every, ring.handle.num_slots
        self._rung = False
        """Whether ``fd`` may be readable; it is cleared before the next sleep, so that taking a slot needs no system call."""
        half = self._num_slots // 2
        self._until_half = (self._num_slots - half + 1) * self._every if sends and half > 1 else 0
        """Distance back to the request whose release makes half of a full ring free; or 0."""
        self._interrupt_fd = interrupt_fd
        self._spin_s = spin_s
        self._poll = select.poll()
        for fd in (self.fd, interrupt_fd):
            if fd >= 0:
                self._poll.register(fd, select.POLLIN)

    def acquire(self, sequence: int, timeout_s: float | None = None) -> Slot:
        """Wait for this end's turn and return the slot of request ``sequence``; until ``release``, again at once.

        Raises:
            Interrupted: the interrupt descriptor became readable first.
            TimeoutError: ``timeout_s`` passed.
        """
        number = sequence // self._every % self._num_slots
        header, turn = self._headers[number], EMPTY if self._sends else sequence
        if header[SEQUENCE] != turn and not (self._spin_s and self._spin(header, turn)):
            self._wait(sequence, timeout_s)
        if not _ORDERED:
            fence()
        return self.ring.slots[number]

    def ready(self, sequence: int) -> bool:
        """Whether ``acquire`` would return at once."""
        turn = EMPTY if self._sends else sequence
        return self._headers[sequence // self._every % self._num_slots][SEQUENCE] == turn

    def release(self, sequence: int) -> None:
        """Hand the acquired slot to the other end, and wake that end if it sleeps."""
        if not _ORDERED:
            fence()
        self._headers[sequence // self._every % self._num_slots][SEQUENCE] = sequence if self._sends else EMPTY
        fence()
        if 0 < self._other_asleep[0] <= sequence + 1:
            self._other_asleep[0] = 0  # before the wake-up: if the other end sets it again, it needs a second wake-up
            os.eventfd_write(self._other_fd, 1)

    def fall_asleep(self, until: int = 0) -> None:
        """Ask for a wake-up once the other end hands over request ``until`` or a later one.

        The caller must then look at its slot once more before it blocks on ``fd``.
        """
        if self._rung:
            self._rung = False
            clear(self.fd)
        self._asleep[0] = until + 1
        fence()

    def wake_up(self, *, called: bool) -> None:
        """Ask for no more wake-ups; ``called``: ``fd`` was readable. A late wake-up only makes a later wait look twice."""
        self._asleep[0] = 0
        self._rung = self._rung or called

    def _spin(self, header: memoryview, turn: int) -> bool:
        """Poll the slot for ``spin_s``; whether the turn has come."""
        until = time.perf_counter() + self._spin_s
        while time.perf_counter() < until:
            if header[SEQUENCE] == turn:
                return True
            os.sched_yield()  # another process, such as the host, may have work on this core
        return False

    def _wait(self, sequence: int, timeout_s: float | None) -> None:
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        until, patience_s = (sequence - self._until_half, HALF_S) if self._until_half else (0, math.inf)
        while True:
            self.fall_asleep(max(0, until))
            events: list[tuple[int, int]] = []
            try:
                if self.ready(sequence):
                    return
                left_s = patience_s if end_s == math.inf else min(patience_s, end_s - time.monotonic())
                if left_s <= 0:
                    raise TimeoutError
                events = self._poll.poll(None if left_s == math.inf else math.ceil(left_s * 1000))
            finally:
                self.wake_up(called=(self.fd, select.POLLIN) in events)
            if self.ready(sequence):
                return
            if events and self._interrupt_fd in dict(events):
                raise Interrupted
            until, patience_s = 0, math.inf


_barrier = threading.Lock()


def fence() -> None:
    """A full memory barrier: every core sees the stores before it before the loads after it are done.

    Taking and releasing a lock are the atomic operations that Python offers.
    """
    with _barrier:
        pass


def clear(fd: int) -> None:
    """Make an event descriptor unreadable."""
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return


def _layout(layouts: Sequence[Sequence[TensorSpec]], num_slots: int) -> tuple[list[int], int, int]:
    """Aligned offsets of the tensors in a slot, bytes of all headers and sleep words, bytes of a slot in whole pages.

    A tensor has the same offset in every layout, and room for the largest.
    """
    offsets, end = [], 0
    for specs in zip(*layouts, strict=True):
        offsets.append(end)
        end += aligned(max(map(storage_bytes, specs)))
    header_bytes = _whole_pages(8 * HEADER_WORDS * (num_slots + 2))
    return offsets, header_bytes, _whole_pages(max(end, _TEXT_ROOM))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
