"""Words of shared memory: deadlines that every stage reads, and each worker's state that the host reads without asking.

One block for a pipeline: first the deadlines of the requests in flight, then their priorities, then how many were fed before
each, then ``STATUS_WORDS`` for each worker. A word has one writer and 8 aligned bytes, so a reader sees the old value or the
new one.
"""

import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autosplit.running.ring import create_shared, map_shared

STATUS_WORDS = 16
SINCE_NS, SEQUENCE, STATE, DONE, FAILED, SKIPPED, BUSY_NS, WAIT_NS, TRANSFER_NS, QUEUE_NS, RESIDENT_BYTES, FLOOR = range(12)
"""What each status word holds; sums run since the pipeline was started and outlive a restart.

``FLOOR``: in a pipeline that answers as ready, the worker has handed over all its requests before this one, and maybe later
ones; elsewhere ``SEQUENCE`` says so.
"""

SUMS = range(DONE, QUEUE_NS + 1)
"""The words that only grow."""

STARTING, WAITING, RUNNING, SENDING, PAUSED = range(5)
STATES = ("starting", "waiting", "running", "sending", "paused")

_PLACE, _SUMS = struct.Struct("@3q"), struct.Struct(f"@{len(SUMS)}q")
_PAST = 1
_MOST = 2**63 - 1


def write_place(status: memoryview, since_ns: int, sequence: int, state: int) -> None:
    """Say what a worker does since when, and at which request, in its status words as bytes."""
    _PLACE.pack_into(status, 8 * SINCE_NS, since_ns, sequence, state)


def write_sums(status: memoryview, sums: Sequence[int]) -> None:
    """Bring the words of ``SUMS`` up to date, in status words as bytes."""
    _SUMS.pack_into(status, 8 * DONE, *sums)


@dataclass(frozen=True, slots=True)
class StatusBlockHandle:
    """What a process needs to open the block whose descriptor it inherited."""

    fd: int
    window: int
    num_workers: int
    num_lanes: int = 1

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return 8 * (3 * self.num_places + STATUS_WORDS * self.num_workers)

    @property
    def num_places(self) -> int:
        """Requests that have words of their own: a window in each lane."""
        return self.window * self.num_lanes


class StatusBlock:
    """The block, mapped."""

    def __init__(self, handle: StatusBlockHandle) -> None:
        self.handle = handle
        self._words = map_shared(handle.fd, handle.num_bytes).numpy().data.cast("q")

    @staticmethod
    def create(window: int, num_workers: int, num_lanes: int = 1) -> "StatusBlock":
        """A block of zeros for ``window`` requests in flight, be they all in one lane."""
        fd = create_shared(StatusBlockHandle(-1, window, num_workers, num_lanes).num_bytes)
        try:
            return StatusBlock(StatusBlockHandle(fd, window, num_workers, num_lanes))
        except BaseException:
            os.close(fd)
            raise

    def status(self, worker: int) -> memoryview:
        """The status words of one worker."""
        start = 3 * self.handle.num_places + STATUS_WORDS * worker
        return self._words[start : start + STATUS_WORDS]

    def describe(self, sequence: int, deadline_ns: int, priority: int, number: int) -> None:
        """Of request ``sequence``, which was fed after ``number`` others, for the stages.

        They skip it from ``deadline_ns`` (monotonic) on, where 0 stands for never, and those that may choose take the request
        with the lowest priority first.
        """
        place, num_places = self._place(sequence), self.handle.num_places
        self._words[place] = deadline_ns
        self._words[num_places + place] = max(-_MOST, min(priority, _MOST))
        self._words[2 * num_places + place] = number

    def priority(self, sequence: int) -> int:
        """The priority of request ``sequence``."""
        return self._words[self.handle.num_places + self._place(sequence)]

    def number(self, sequence: int) -> int:
        """How many requests were fed before request ``sequence``: what it is called to people."""
        return self._words[2 * self.handle.num_places + self._place(sequence)]

    def skip(self, sequence: int) -> None:
        """Stages skip request ``sequence`` from now on."""
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
