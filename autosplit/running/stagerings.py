"""A worker's ends of its rings: where it takes requests from, and where it writes results to."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from autosplit.backends.staticio import StaticIO
from autosplit.running import statusblock
from autosplit.running.copying import prepared_copy
from autosplit.running.messages import RingPort, WorkerConfig
from autosplit.running.ring import DATA, Interrupted, Ring, RingEnd, Slot
from autosplit.running.statusblock import WorkerStatus


class StageRings:
    """The ends of one worker.

    Args:
        status: the words of the worker, in which ``hand_over`` says that it waits.
        control_fd: a descriptor whose messages interrupt each wait.
        handle_interrupt: called with the request at hand when a message has come; the wait goes on when it returns.
    """

    def __init__(
        self, config: WorkerConfig, status: WorkerStatus, control_fd: int, handle_interrupt: Callable[[int], None]
    ) -> None:
        self._status = status
        self._step = len(config.stage.devices)
        self._num_inputs = len(config.stage.inputs)
        self._handle_interrupt = handle_interrupt
        self._sources = [(_open(port, control_fd, config.spin_s, sends=False), port.index) for port in config.sources]
        self._sinks = [(_open(port, control_fd, 0.0, sends=True), port.index) for port in config.sinks]
        self._reads, self._writes = cache(self._read_calls), cache(self._write_calls)
        self._static: Mapping[int, StaticIO] = {}

    def bind(self, static: Mapping[int, StaticIO]) -> None:
        """Read and write the memory of the stage at the variants at which it has some."""
        self._static = static

    def read(self, slots: Sequence[Slot], variant: int) -> None:
        """Copy the inputs of a request into the memory of the stage."""
        for number, slot in enumerate(slots):
            for copy in self._reads(number, slot, variant):
                copy()

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
                blocked_ns -= self._status.enter(statusblock.SENDING, sequence)
                self._acquired([end], sequence)
                blocked_ns += time.monotonic_ns()
            slot = end.acquire(sequence)
            if flag != DATA:
                slot.write_text(flag, result)
            elif variant in self._static:
                for copy in self._writes(number - 1, slot, variant):
                    copy()
                slot.post(variant)
            else:
                slot.write([result[position] for position in index], variant)
            if number == len(self._sinks):  # before the last output: once the host has the answer, it may fill the input slots
                self._free_inputs(sequence)
            end.release(sequence)
        if not self._sinks:
            self._free_inputs(sequence)
        return blocked_ns

    def _read_calls(self, number: int, slot: Slot, variant: int) -> list[Callable[[], object]]:
        """The copies from a slot of a source into the memory of the stage."""
        _, index = self._sources[number]
        targets = [self._static[variant].inputs[position] for position in index]
        return list(map(prepared_copy, slot.layouts[variant], targets, slot.views(variant)))

    def _write_calls(self, number: int, slot: Slot, variant: int) -> list[Callable[[], object]]:
        """The copies from the memory of the stage into a slot of a sink."""
        _, index = self._sinks[number]
        made = [self._static[variant].outputs[position] for position in index]
        return list(map(prepared_copy, slot.layouts[variant], slot.views(variant), made))

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
