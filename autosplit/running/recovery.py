"""Recovery: kill hanging workers, replace dead ones, and let the requests in flight run again.

A replay needs no copy of the inputs. The host's rings have one slot more than there are requests in flight, so the slot of a
request is not written again before its answer is given::

    a worker dies -> pause the others -> start a new one -> number the slots anew -> run again from the oldest request

A request during which workers died twice is given up, so that it does not end the pipeline for the others.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence

from autosplit.errors import WorkerError
from autosplit.running import statusblock
from autosplit.running.flow import Flow
from autosplit.running.lanes import Lanes
from autosplit.running.messages import Pause, Paused
from autosplit.running.provisioner import Deployment
from autosplit.running.wiring import HOST

MAX_TRIES = 2
"""Workers that may die while they run one request, before it is given up."""

PAUSE_TIMEOUT_S = 60.0

log = logging.getLogger(__name__)


class Recovery:
    """Watches the workers of a deployment. The executor's thread calls it."""

    def __init__(self, deployment: Deployment, max_restarts: int) -> None:
        self.restarts = 0
        self._deployment = deployment
        self._max_restarts = max_restarts
        self._in_a_row = 0
        self._tries: Counter[int] = Counter()
        self._limits_s = [
            next(stage.hang_s for stage in deployment.wiring.stages if stage.name == config.stage)
            for config in deployment.worker_configs
        ]
        self._flow = Flow(deployment.wiring)
        self._hung: dict[int, str] = {}
        """By worker, why it was killed, until its death is counted."""
        self._seen: dict[int, tuple[tuple[int, int], float]] = {}
        """By worker that held up a request at the last look: its state, when that began, and when it was seen first."""
        self.look_s = min((limit for limit in self._limits_s if limit is not None), default=math.inf) / 4
        """How long the executor may block before it looks for hanging workers."""
        self._next_look_s = 0.0

    def progressed(self) -> None:
        """Count restarts from 0 again, because a request is done."""
        self._in_a_row = 0

    def kill_hanging(self, nexts: Sequence[int]) -> None:
        """Kill each worker that has run one request, or has not taken it, for longer than its stage allows.

        A worker that waits for others, for inputs or for a free slot, is not at fault, however long that takes.

        Args:
            nexts: for each lane, the request that will be fed next.
        """
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + self.look_s
        places = self._flow.places(self._deployment.status_block)
        for number, limit_s in enumerate(self._limits_s):
            if limit_s is None or not self._flow.at_fault(number, places, nexts):
                self._seen.pop(number, None)
                continue
            mark = places[number].state, self._deployment.status_block.status(number)[statusblock.SINCE_NS]
            if self._seen.get(number, (None,))[0] != mark:
                self._seen[number] = mark, now_s
            age_s = now_s - self._seen[number][1]
            if age_s > limit_s:
                worker, doing = self._deployment.workers[number], statusblock.STATES[mark[0]]
                self._hung[number] = f"hung: it was killed after {doing} for {age_s:.1f} s (limit {limit_s:g} s)"
                request = self._deployment.status_block.number(places[number].sequence)
                log.warning("%s is %s at request %d for %.1f s and is killed", worker.name, doing, request, age_s)
                worker.kill()

    def replace_dead(self, lanes: Lanes) -> dict[int, WorkerError]:
        """Pause the workers that are alive and replace the dead ones.

        Args:
            lanes: the requests that are not done.
        Returns: the requests to give up, with their errors.
        Raises: WorkerError: too many restarts in a row. BackendError: a stage cannot be loaded any more.
        """
        deployment = self._deployment
        dead = {number for number, worker in enumerate(deployment.workers) if not worker.alive()}
        for number, worker in enumerate(deployment.workers):
            if number not in dead and not self._pause(number):
                worker.kill()
                dead.add(number)
        given_up = {}
        for number in sorted(dead):
            sequence = self._running(number, lanes)
            story = self._count_death(number, sequence)
            if sequence is not None:
                self._tries[sequence] += 1
                if self._tries[sequence] >= MAX_TRIES:
                    given_up[sequence] = WorkerError(f"{story}; the request was tried {MAX_TRIES} times and is given up")
            while not deployment.replace(number):
                self._count_death(number, None)
        for sequence in [sequence for sequence in self._tries if sequence < lanes.base(sequence)]:
            del self._tries[sequence]
        return given_up

    def resume(self, lanes: Lanes) -> None:
        """Number the slots anew and let all workers run the unfinished requests, whose inputs are still in the host's rings."""
        deployment = self._deployment
        for channel, rings in zip(deployment.wiring.channels, deployment.rings, strict=True):
            for first, ring in enumerate(rings):
                base = lanes.base(first)
                oldest = base + (first - base) % channel.every
                ring.refill(range(oldest, lanes.next(first), channel.every) if channel.source == HOST else ())
        deployment.run(lanes)

    def _running(self, number: int, lanes: Lanes) -> int | None:
        """The request that a worker was running when it died, if any."""
        status = self._deployment.status_block.status(number)
        sequence = status[statusblock.SEQUENCE]
        return sequence if status[statusblock.STATE] == statusblock.RUNNING and sequence >= lanes.base(sequence) else None

    def _count_death(self, number: int, sequence: int | None) -> str:
        """Count one death and describe it. Raises: WorkerError: it is one too many in a row."""
        worker, config = self._deployment.workers[number], self._deployment.worker_configs[number]
        story = f"the worker of stage '{config.stage}' (replica {config.replica}, device '{config.device}') "
        story += self._hung.pop(number, "") or worker.fate()
        if sequence is not None:
            story += f" while it ran request {self._deployment.status_block.number(sequence)}"
        if self._in_a_row >= self._max_restarts:
            noun = "restart" if self._max_restarts == 1 else "restarts"
            raise WorkerError(f"{story}; the pipeline gives up after {self._max_restarts} {noun} without a request done")
        self._in_a_row += 1
        self.restarts += 1
        log.warning("%s; restart %d", story, self.restarts)
        return story

    def _pause(self, number: int) -> bool:
        """Pause a worker; False if it did not confirm in time that it touches no ring any more."""
        try:
            self._deployment.workers[number].connection.send(Pause())
            self._deployment.hear(number, self._limits_s[number] or PAUSE_TIMEOUT_S, "a pause", Paused)
        except (WorkerError, OSError):
            return False
        return True
