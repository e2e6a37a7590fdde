"""A worker's ends of its rings: where it takes requests from, and where it writes results to.

A stage that works on several requests at once begins requests while an earlier one is computed: copies then run beside the
computing, no stream waits for another, and the device never waits for the worker in between.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from autosplit.running.messages import RingPort, WorkerConfig
from autosplit.running.ring import DATA, FLAG, VARIANT, Interrupted, Ring, RingEnd, Slot
from autosplit.running.statusblock import StatusBlock

if TYPE_CHECKING:
    from autosplit.backends.base import Begun, Runnable

LOOK_AHEAD_S = 1e-3
"""How long a request that comes while another one is computed may have to wait for an idle stream."""


class StageRings:
    """The ends of one worker.

    Args:
        config: names the rings.
        control_fd: a descriptor whose messages interrupt each wait.
        handle_interrupt: called with the request at hand when a message has come; the wait goes on when it returns.
    """

    def __init__(self, config: WorkerConfig, control_fd: int, handle_interrupt: Callable[[int], None]) -> None:
        self._step = len(config.stage.devices)
        self._num_inputs = len(config.stage.inputs)
        self._handle_interrupt = handle_interrupt
        self._sources = [(_open(port, control_fd, config.spin_s, sends=False), port.index) for port in config.sources]
        self._sinks = [(_open(port, control_fd, 0.0, sends=True), port.index) for port in config.sinks]

    def output_slots(self, variant: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Position of each output that a ring takes, and a tensor of the shape and dtype that its slots have."""
        for ends, index in self._sinks:
            ring = next(end for end in ends if end is not None).ring  # all rings of a port have the same layout
            yield from zip(index, ring.slots[0].views(variant), strict=True)

    def inputs(self, slots: Sequence[Slot]) -> list[Any]:
        """The stage's inputs, as views of the slots."""
        inputs: list[Any] = [None] * self._num_inputs
        for slot, (_, index) in zip(slots, self._sources, strict=True):
            for position, view in zip(index, slot.tensors, strict=True):
                inputs[position] = view
        return inputs

    def take(self, sequence: int) -> list[Slot]:
        """Wait for the inputs of a request; return the slots that hold them, one for each source."""
        return self._acquired([_end(ends, sequence) for ends, _ in self._sources], sequence)

    def take_ready(self, sequence: int) -> tuple[int, list[Slot]] | None:
        """The request after ``sequence`` and the slots of its inputs, if these have arrived."""
        following = sequence + self._step
        ends = [_end(ends, following) for ends, _ in self._sources]
        ready = all(end.ready(following) for end in ends)
        return (following, [end.acquire(following) for end in ends]) if ready else None

    def hand_over(self, sequence: int, flag: int, result: Any, variant: int) -> int:
        """Write the outputs of a request of a variant (or its text), and free its inputs before the last output is handed over.

        Returns: nanoseconds of waiting for free slots.
        """
        blocked_ns = 0
        for number, (ends, index) in enumerate(self._sinks, 1):
            end = _end(ends, sequence)
            if not end.ready(sequence):
                blocked_ns -= time.monotonic_ns()
                self._acquired([end], sequence)
                blocked_ns += time.monotonic_ns()
            slot = end.acquire(sequence)
            if flag == DATA:
                slot.write([result[position] for position in index], variant)
            else:
                slot.write_text(flag, result)
            if number == len(self._sinks):  # before the last output: once the host has the answer, it may fill the input slots
                self._free_inputs(sequence)
            end.release(sequence)
        if not self._sinks:
            self._free_inputs(sequence)
        return blocked_ns

    def _acquired(self, ends: Sequence[RingEnd], sequence: int) -> list[Slot]:
        """Wait for the slots of a request, and carry out messages that come meanwhile."""
        while True:
            try:
                return [end.acquire(sequence) for end in ends]
            except Interrupted:
                self._handle_interrupt(sequence)

    def _free_inputs(self, sequence: int) -> None:
        for ends, _ in self._sources:
            _end(ends, sequence).release(sequence)


def _open(port: RingPort, control_fd: int, spin_s: float, *, sends: bool) -> list[RingEnd | None]:
    return [
        None if handle is None else RingEnd(Ring(handle), sends=sends, interrupt_fd=control_fd, spin_s=spin_s)
        for handle in port.rings
    ]


def _end(ends: Sequence[RingEnd | None], sequence: int) -> RingEnd:
    end = ends[sequence % len(ends)]
    assert end is not None  # the wiring gives this worker the rings of all its requests
    return end


@dataclass(frozen=True, slots=True)
class _NotBegun:
    """A request that failed when it was begun; it raises the failure in its turn."""

    failure: Exception

    def wait(self, most_s: float = 0.0) -> bool:
        """Raises: the failure."""
        raise self.failure

    def outputs(self) -> Sequence[torch.Tensor]:
        """Raises: the failure."""
        raise self.failure


class Ahead(NamedTuple):
    """A request that was taken early: its slots, and the request as it was begun, or None without tensors."""

    sequence: int
    slots: list[Slot]
    begun: "Begun | None" = None


class Lookahead:
    """The requests that were taken while an earlier one was computed, oldest first.

    Attributes:
        alone_until: no request is begun while one before this number is computed.
    """

    def __init__(self, rings: StageRings, runs: "Sequence[Runnable]", num_contexts: int, status_block: StatusBlock) -> None:
        self._rings = rings
        self._runs, self._num_contexts = runs, num_contexts
        self._status_block = status_block
        self._taken: deque[Ahead] = deque()
        self.alone_until = 0

    def pop(self) -> Ahead | None:
        """The oldest request that was taken, if there is one."""
        return self._taken.popleft() if self._taken else None

    def clear(self) -> None:
        """Forget all of them; they come again."""
        self._taken.clear()

    def compute(self, sequence: int, slots: Sequence[Slot], begun: "Begun | None") -> "Begun":
        """Begin a request unless it is begun, and wait until it is computed; meanwhile begin those after it."""
        begun = begun or self._begin(slots)
        self._begin_following(sequence)
        while len(self._taken) < self._num_contexts - 1:
            if begun.wait(LOOK_AHEAD_S):
                return begun
            self._begin_following(sequence)
        begun.wait()
        return begun

    def _begin_following(self, sequence: int) -> None:
        """Begin requests whose inputs are here, as many as the stage takes."""
        if sequence < self.alone_until:
            return
        newest = self._taken[-1].sequence if self._taken else sequence
        while len(self._taken) < self._num_contexts - 1 and (found := self._rings.take_ready(newest)) is not None:
            newest, slots = found
            ahead = Ahead(newest, slots)
            if all(slot.header[FLAG] == DATA for slot in slots) and not self._status_block.expired(newest):
                ahead = Ahead(newest, slots, self._begin_once(slots))
            self._taken.append(ahead)

    def _begin(self, slots: Sequence[Slot]) -> "Begun":
        run = self._runs[slots[0].header[VARIANT]]
        return run.begin(self._rings.inputs(slots))  # type: ignore[attr-defined, no-any-return]

    def _begin_once(self, slots: Sequence[Slot]) -> "Begun":
        """Begin a request, once only: another try would come after later requests, which have their turns in order."""
        try:
            return self._begin(slots)
        except Exception as failure:
            return _NotBegun(failure)
