"""The health of a worker, read from shared memory and from the kernel without asking it."""

import time
from dataclasses import dataclass

from autosplit.devices.processes import Worker, resident_bytes
from autosplit.running import statusblock


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
    network: str, stage: str, replica: int, device: str, worker: Worker, status: memoryview, num_queued: int
) -> WorkerHealth:
    """The health of a worker, from its words of the status block."""
    alive = worker.alive()
    since_s = (time.monotonic_ns() - status[statusblock.SINCE_NS]) / 1e9 if status[statusblock.SINCE_NS] else 0.0
    return WorkerHealth(
        network,
        stage,
        replica,
        device,
        worker.pid,
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
        resident_bytes(worker.pid) if alive else 0,
    )
