"""Shared memory of one pipeline: deadlines and numbers of requests, and the state of each worker.

::

    one deadline    one number     STATUS_WORDS
    a request       a request      a worker
    [............]  [............]  [................] [................] ...
     written by the host, read by workers           written by the worker, read by the host

Each word has 8 aligned bytes and one writer, so a reader sees the old value or the new one.
"""

import os
import struct
import time
from collections import deque
from dataclasses import dataclass

from autosplit.running.request import NUM_TIMES, taken
from autosplit.running.ring import create_shared, map_shared

STATUS_WORDS = 16
SINCE_NS, SEQUENCE, STATE, DONE, FAILED, SKIPPED, BUSY_NS, WAIT_NS, TRANSFER_NS, QUEUE_NS = range(10)
"""Words of a worker. Sums run since the pipeline was started and outlive a restart: counts of requests, then nanoseconds. The
worker has handed over all its requests before ``SEQUENCE``."""

SUMS = range(DONE, QUEUE_NS + 1)
"""The words that only grow."""

STARTING, WAITING, RUNNING, SENDING, PAUSED = range(5)
STATES = ("starting", "waiting", "running", "sending", "paused")
"""A worker is sending only while it waits for a free slot."""

_PLACE, _SUMS = struct.Struct("@3q"), struct.Struct(f"@{len(SUMS)}q")
_PAST = 1


class WorkerStatus:
    """The words of one worker, or of a stage in the caller's process, for whoever writes them; and the times of its requests."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self._bytes = memoryview(words).cast("B")
        self._sums = [words[word] for word in SUMS]
        self._rows: deque[tuple[int, ...]] = deque(maxlen=NUM_TIMES)

    def enter(self, state: int, sequence: int) -> int:
        """Publish the state of the worker from now on, and its request; return the time in monotonic nanoseconds."""
        now_ns = time.monotonic_ns()
        _PLACE.pack_into(self._bytes, 8 * SINCE_NS, now_ns, sequence, state)
        return now_ns

    def count(self, number: int, flag: int, asked: int, posted: int, got: int, ran: int, sent: int, blocked: int = 0) -> None:
        """Count one request, by the fields of its WorkerEvent."""
        self._rows.append((number, flag, asked, posted, got, ran, sent, blocked))
        sums, spans_ns = self._sums, (ran - got, got - asked + blocked, sent - ran - blocked, max(0, got - posted))
        sums[flag] += 1
        for word, span_ns in enumerate(spans_ns, BUSY_NS - DONE):
            sums[word] += span_ns
        _SUMS.pack_into(self._bytes, 8 * DONE, *sums)

    def rows(self, *, clear: bool) -> list[tuple[int, ...]]:
        """The fields of the WorkerEvents of the last ``NUM_TIMES`` requests; with ``clear``, each comes once."""
        return taken(self._rows, clear=clear)


@dataclass(frozen=True, slots=True)
class StatusBlockHandle:
    """The numbers with which a process opens a block whose descriptor it inherited; ``num_places`` requests have words there."""

    fd: int
    num_places: int
    num_workers: int

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return 8 * (2 * self.num_places + STATUS_WORDS * self.num_workers)


class StatusBlock:
    """The block, mapped."""

    def __init__(self, handle: StatusBlockHandle) -> None:
        self.handle = handle
        self._words = map_shared(handle.fd, handle.num_bytes).numpy().data.cast("q")

    @staticmethod
    def create(num_places: int, num_workers: int) -> "StatusBlock":
        """A block of zeros."""
        fd = create_shared(StatusBlockHandle(-1, num_places, num_workers).num_bytes)
        try:
            return StatusBlock(StatusBlockHandle(fd, num_places, num_workers))
        except BaseException:
            os.close(fd)
            raise

    def status(self, worker: int) -> memoryview:
        """The words of one worker."""
        start = 2 * self.handle.num_places + STATUS_WORDS * worker
        return self._words[start : start + STATUS_WORDS]

    def describe(self, sequence: int, deadline_ns: int, number: int) -> None:
        """Write for the stages that request ``sequence`` was sent after ``number`` others.

        The stages skip the request from ``deadline_ns`` (monotonic) on; 0 stands for never.
        """
        place = self._place(sequence)
        self._words[place] = deadline_ns
        self._words[self.handle.num_places + place] = number

    def number(self, sequence: int) -> int:
        """Requests that were sent before request ``sequence``: its number in messages."""
        return self._words[self.handle.num_places + self._place(sequence)]

    def skip(self, sequence: int) -> None:
        """Let the stages skip request ``sequence`` from now on."""
        self._words[self._place(sequence)] = _PAST

    def expired(self, sequence: int) -> bool:
        """Whether request ``sequence`` is to be skipped."""
        deadline_ns = self._words[self._place(sequence)]
        return deadline_ns != 0 and deadline_ns <= time.monotonic_ns()

    def _place(self, sequence: int) -> int:
        return sequence % self.handle.num_places

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.handle.fd)
