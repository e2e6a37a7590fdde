"""Observe the workers of a running pipeline: their times and their health."""

import contextlib
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from autosplit.devices.calls import begin
from autosplit.devices.processes import memory_held, resident_bytes
from autosplit.errors import RefusedError, WorkerError
from autosplit.reports.results import LatencyStats, StageStats
from autosplit.running import statusblock
from autosplit.running.flow import Flow
from autosplit.running.inflight import Lanes
from autosplit.running.messages import Ready, WorkerEvent
from autosplit.running.provisioner import Deployment
from autosplit.running.stage import StagePlacement
from autosplit.running.stageworker import StageWorker


@dataclass(eq=False)
class BatchCounts:
    """Batches of joined requests so far, the rows of requests in them, and the rows that only fill them up. One thread counts."""

    num_batches: int = 0
    num_rows: int = 0
    num_padding: int = 0

    def add(self, num_rows: int, num_padding: int) -> None:
        """Count one more batch."""
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


class WorkerReport(NamedTuple):
    """The work and the memory of one copy of a stage, and the times of its last requests, of which the figures are."""

    stats: StageStats
    events: list[WorkerEvent]


def worker_health(
    stage: StagePlacement, replica: int, pid: int, alive: bool, status: memoryview, num_queued: int
) -> WorkerHealth:
    """The health of a worker, from its words of the status block."""
    since_s = (time.monotonic_ns() - status[statusblock.SINCE_NS]) / 1e9 if status[statusblock.SINCE_NS] else 0.0
    return WorkerHealth(
        stage.name,
        replica,
        stage.devices[replica].name,
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


def health_of(deployment: Deployment, lanes: Lanes) -> list[WorkerHealth]:
    """The state and the sums of each worker of a deployment, read from shared memory without asking it."""
    found, flow = [], Flow(deployment.wiring)
    positions = flow.positions(deployment.status_block)
    for number, (config, worker) in enumerate(zip(deployment.worker_configs, deployment.workers, strict=True)):
        status, num_queued = deployment.status_block.status(number), flow.num_queued(number, positions, lanes.nexts)
        found.append(worker_health(config.stage, config.replica, worker.pid, worker.alive(), status, num_queued))
    return found


def reports_of(deployment: Deployment, *, clear: bool) -> list[WorkerReport]:
    """The work of each worker of a deployment; a worker that does not answer has no times."""
    found: list[list[WorkerEvent]] = []
    with deployment.control_lock:
        for number in range(len(deployment.workers)):
            found.append([])
            with contextlib.suppress(WorkerError, RefusedError):
                rows = begin(deployment.workers[number], "during a report", StageWorker.events, clear)
                found[-1] = [WorkerEvent(*row) for row in rows.result(60.0, stop=deployment.stopping)]
    reports = []
    for number, (config, events) in enumerate(zip(deployment.worker_configs, found, strict=True)):
        status, pid = deployment.status_block.status(number), deployment.workers[number].pid
        report = worker_report(config.stage, config.replica, status, events, deployment.ready[number], pid)
        held_bytes = report.stats.held_bytes + (0 if config.states is None else config.states.num_bytes)
        reports.append(report._replace(stats=replace(report.stats, held_bytes=held_bytes)))
    return reports


def worker_report(
    stage: StagePlacement, replica: int, status: memoryview, events: list[WorkerEvent], ready: Ready, pid: int
) -> WorkerReport:
    """The work and the memory of one copy of a stage; ``status`` are its words of the status block."""
    stats = StageStats(
        stage.name,
        stage.devices[replica].name,
        replica,
        stage.module.kind,
        stage.num_threads(replica),
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
    return WorkerReport(stats, events)
