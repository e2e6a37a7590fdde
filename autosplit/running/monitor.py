"""Observe a running pipeline: the places of its requests, their times and those of its workers, and the health of the workers.

Places are read from the status block without asking a worker. The status of a worker names one request. The worker has handed
over all its requests before that one, and while it waits it has not taken that one either. The contents of each ring, and the
worker that holds up another, follow from these numbers.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autosplit.devices.processes import memory_held, resident_bytes
from autosplit.errors import RefusedError, WorkerError
from autosplit.memory.slots import HOST
from autosplit.reports.results import LatencyStats, RunStats, StageStats
from autosplit.running import statusblock
from autosplit.running.inflight import Lanes
from autosplit.running.messages import Ready, WorkerEvent
from autosplit.running.provisioner import Deployment
from autosplit.running.request import RequestTimes
from autosplit.running.stageworker import StageWorker
from autosplit.running.statusblock import StatusBlock
from autosplit.running.wiring import Wiring

Words = Sequence[int] | memoryview
"""The words of a worker in the status block."""


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

    def places(self, block: StatusBlock) -> list[Position]:
        """The position of each worker now."""
        found = (block.status(number) for number in range(len(self._workers)))
        return [Position(status[statusblock.STATE], status[statusblock.SEQUENCE]) for status in found]

    def num_queued(self, number: int, places: Sequence[Position], nexts: Sequence[int]) -> int:
        """Requests that lie ready for a worker, all their inputs there.

        Args:
            number: the worker.
            places: of all workers.
            nexts: for each lane, the request that the host will send next.
        """
        state, sequence = places[number]
        if state in (statusblock.STARTING, statusblock.PAUSED):
            return 0
        stage, _ = self._workers[number]
        every = self._replicas[stage]
        first = sequence if state == statusblock.WAITING else sequence + every
        sources = {channel.source for channel in self._wiring.channels if channel.target == stage}
        count = 0
        while count < self._wiring.most_in_flight and all(
            self._handed_over(source, first + count * every, places, nexts) for source in sources
        ):
            count += 1
        return count

    def at_fault(self, number: int, places: Sequence[Position], nexts: Sequence[int]) -> bool:
        """Whether only this worker can advance its request: it runs the request, or waits although the request is ready."""
        state, sequence = places[number]
        match state:
            case statusblock.WAITING:
                return self.num_queued(number, places, nexts) > 0
            case statusblock.SENDING:
                return not self._blocked(self._workers[number][0], sequence, places)
            case _:
                return state != statusblock.STARTING

    def _handed_over(self, source: int, sequence: int, places: Sequence[Position], nexts: Sequence[int]) -> bool:
        if source == HOST:
            return sequence < nexts[sequence % len(nexts)]
        return places[self._worker(source, sequence)].sequence > sequence

    def _blocked(self, stage: int, sequence: int, places: Sequence[Position]) -> bool:
        """Whether a ring for the outputs of this request is full, as its slot still holds an older request."""
        targets = (channel for channel in self._wiring.channels if channel.source == stage and channel.target != HOST)
        return any(
            places[self._worker(channel.target, sequence)].sequence <= sequence - channel.num_slots * channel.every
            for channel in targets
        )

    def _worker(self, stage: int, sequence: int) -> int:
        return self._first[stage] + sequence % self._replicas[stage]


@dataclass(eq=False)
class BatchCounts:
    """Batches of joined requests so far, the rows of requests in them, and the rows that only fill them up."""

    num_batches: int = 0
    num_rows: int = 0
    num_padding: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, num_rows: int, num_padding: int) -> None:
        """Count one more batch."""
        with self._lock:
            self.num_batches += 1
            self.num_rows += num_rows
            self.num_padding += num_padding


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """The state of one worker and its sums since the pipeline was started.

    ``state`` is ``dead`` or one of ``statusblock.STATES``, since ``since_s`` seconds. ``num_queued`` requests are ready for the
    worker, and ``queue_s`` is the sum of the seconds for which requests were ready before it took them.
    ``resident_bytes`` is the physical memory that its process maps now, shared pages included; 0 for a dead worker.
    """

    network: str
    stage: str
    replica: int
    device: str
    pid: int
    state: str
    since_s: float
    num_requests: int
    num_failed: int
    num_skipped: int
    busy_s: float
    wait_s: float
    transfer_s: float
    queue_s: float
    num_queued: int
    resident_bytes: int


def worker_health(
    network: str,
    stage: str,
    replica: int,
    device: str,
    pid: int,
    alive: bool,
    status: Words,
    num_queued: int,
) -> WorkerHealth:
    """The health of a worker, from its words of the status block."""
    since_s = (time.monotonic_ns() - status[statusblock.SINCE_NS]) / 1e9 if status[statusblock.SINCE_NS] else 0.0
    return WorkerHealth(
        network,
        stage,
        replica,
        device,
        pid,
        statusblock.STATES[status[statusblock.STATE]] if alive else "dead",
        since_s,
        status[statusblock.DONE],
        status[statusblock.FAILED],
        status[statusblock.SKIPPED],
        status[statusblock.BUSY_NS] / 1e9,
        status[statusblock.WAIT_NS] / 1e9,
        status[statusblock.TRANSFER_NS] / 1e9,
        status[statusblock.QUEUE_NS] / 1e9,
        num_queued,
        resident_bytes(pid) if alive else 0,
    )


def latency_of(times: Sequence[RequestTimes]) -> LatencyStats:
    """Seconds from the first stage to the answer."""
    return LatencyStats.of([(one.done_ns - one.sent_ns) / 1e9 for one in times])


def run_stats(times: Sequence[RequestTimes], elapsed_s: float, stages: Iterable[StageStats], restarts: int) -> RunStats:
    """The statistics of the requests with these times, and of the workers of the stages."""
    waiting = LatencyStats.of([(one.sent_ns - one.submitted_ns) / 1e9 for one in times])
    return RunStats(len(times), elapsed_s, latency_of(times), waiting, tuple(stages), restarts)


class Monitor:
    """Observes the workers of one deployment."""

    def __init__(self, deployment: Deployment, lanes: Lanes) -> None:
        self._deployment, self._lanes = deployment, lanes
        self._flow = Flow(deployment.wiring)

    def health(self, network: str) -> list[WorkerHealth]:
        """The state and the sums of each worker, read from shared memory without asking it."""
        found = []
        places = self._flow.places(self._deployment.status_block)
        for number, (config, worker) in enumerate(zip(self._deployment.worker_configs, self._deployment.workers, strict=True)):
            status = self._deployment.status_block.status(number)
            num_queued = self._flow.num_queued(number, places, self._lanes.nexts)
            place = config.stage.name, config.replica, config.device.name
            found.append(worker_health(network, *place, worker.pid, worker.alive(), status, num_queued))
        return found

    def stats(self, *, clear: bool) -> list[StageStats]:
        """The work of each worker, since its start or since the last call with ``clear``."""
        return [self._stage_stats(number, events) for number, events in enumerate(self.events(clear=clear))]

    def events(self, *, clear: bool) -> list[list[WorkerEvent]]:
        """The times of the last requests in each worker; empty for a worker that does not answer."""
        found: list[list[WorkerEvent]] = []
        with self._deployment.control_lock:
            for number in range(len(self._deployment.workers)):
                found.append([])
                with contextlib.suppress(WorkerError, RefusedError):
                    rows = self._deployment.call(number, "during a report", StageWorker.events, clear)
                    found[-1] = [WorkerEvent(*row) for row in rows.result(60.0, stop=self._deployment.stopping)]
        return found

    def _stage_stats(self, number: int, events: Sequence[WorkerEvent]) -> StageStats:
        config, ready = self._deployment.worker_configs[number], self._deployment.ready[number]
        status, pid = self._deployment.status_block.status(number), self._deployment.workers[number].pid
        stage, replica = config.stage, config.replica
        place = stage.name, config.device.name, replica, config.stage.module.kind, stage.num_threads(replica)
        found = stage_stats(place, status, events, ready, pid)
        return found if config.states is None else replace(found, held_bytes=found.held_bytes + config.states.num_bytes)


def stage_stats(
    place: tuple[str, str, int, str, int],
    status: Words,
    events: Sequence[WorkerEvent],
    ready: Ready,
    pid: int,
) -> StageStats:
    """The work and the memory of one copy of a stage.

    Args:
        place: stage, device, replica, backend, threads.
        status: its words of the status block.
        events: the times of its last requests.
        ready: its memory and seconds when it was loaded.
        pid: its process.
    """
    return StageStats(
        *place,
        num_requests=status[statusblock.DONE],
        num_failed=status[statusblock.FAILED],
        num_skipped=status[statusblock.SKIPPED],
        busy=LatencyStats.of([(event.ran_ns - event.got_ns) / 1e9 for event in events]),
        wait=LatencyStats.of([(event.got_ns - event.asked_ns + event.blocked_ns) / 1e9 for event in events]),
        transfer=LatencyStats.of([(event.sent_ns - event.ran_ns - event.blocked_ns) / 1e9 for event in events]),
        queue=LatencyStats.of([max(0, event.got_ns - event.posted_ns) / 1e9 for event in events]),
        load_s=ready.load_s,
        note=ready.note,
        **memory_held(pid, ready.before_bytes)._asdict(),
    )
