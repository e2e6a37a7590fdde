"""The places of requests in a running pipeline, read from the status block without asking a worker.

The status of a worker names one request. The worker has handed over all its requests before that one, and while it waits it has
not taken that one either. The contents of each ring, and the worker that holds up another, follow from these numbers.
"""

from collections.abc import Sequence
from typing import NamedTuple

from autosplit.memory.slots import HOST
from autosplit.running import statusblock
from autosplit.running.statusblock import StatusBlock
from autosplit.running.wiring import Wiring


class Position(NamedTuple):
    """The state of a worker (see ``statusblock``), and its request: the first that it has not handed over."""

    state: int
    sequence: int


class Flow:
    """The path of requests through a wiring, for workers in the order of ``Wiring.workers``."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._workers = list(wiring.workers())
        self._replicas = [len(stage.devices) for stage in wiring.stages]
        self._first = [sum(self._replicas[:stage]) for stage in range(len(self._replicas))]

    def positions(self, block: StatusBlock) -> list[Position]:
        """The position of each worker now."""
        found = (block.status(number) for number in range(len(self._workers)))
        return [Position(status[statusblock.STATE], status[statusblock.SEQUENCE]) for status in found]

    def num_queued(self, number: int, positions: Sequence[Position], nexts: Sequence[int]) -> int:
        """Requests that lie ready for a worker, all their inputs there.

        Args:
            number: the worker.
            positions: of all workers.
            nexts: for each lane, the request that the host will send next.
        """
        state, sequence = positions[number]
        if state in (statusblock.STARTING, statusblock.PAUSED):
            return 0
        stage, _ = self._workers[number]
        every = self._replicas[stage]
        first = sequence if state == statusblock.WAITING else sequence + every
        sources = {channel.source for channel in self._wiring.channels if channel.target == stage}
        count = 0
        while count < self._wiring.most_in_flight and all(
            self._handed_over(source, first + count * every, positions, nexts) for source in sources
        ):
            count += 1
        return count

    def at_fault(self, number: int, positions: Sequence[Position], nexts: Sequence[int]) -> bool:
        """Whether only this worker can advance its request: it runs the request, or waits although the request is ready."""
        state, sequence = positions[number]
        match state:
            case statusblock.WAITING:
                return self.num_queued(number, positions, nexts) > 0
            case statusblock.SENDING:
                return not self._blocked(self._workers[number][0], sequence, positions)
            case _:
                return state != statusblock.STARTING

    def _handed_over(self, source: int, sequence: int, positions: Sequence[Position], nexts: Sequence[int]) -> bool:
        if source == HOST:
            return sequence < nexts[sequence % len(nexts)]
        return positions[self._worker(source, sequence)].sequence > sequence

    def _blocked(self, stage: int, sequence: int, positions: Sequence[Position]) -> bool:
        """Whether a ring for the outputs of this request is full, as its slot still holds an older request."""
        targets = (channel for channel in self._wiring.channels if channel.source == stage and channel.target != HOST)
        return any(
            positions[self._worker(channel.target, sequence)].sequence <= sequence - channel.num_slots * channel.every
            for channel in targets
        )

    def _worker(self, stage: int, sequence: int) -> int:
        return self._first[stage] + sequence % self._replicas[stage]
