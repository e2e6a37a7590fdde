"""Recovery: kill hanging workers, replace dead ones, and let the requests in flight run again.

A replay needs no copy of the inputs. The host's rings have one slot more than there are requests in flight, so the slot of a
request is not written again before its answer is given::

    a worker dies -> pause the others -> start a new one -> number the slots anew -> run again from the oldest request

A death is blamed on the request that the worker was running, and a request that is blamed twice fails alone. Other deaths
count against the worker: it is started anew at once, then after pauses that grow. The pipeline gives up only if one worker dies
again and again without progress.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autosplit.devices.calls import begin, reason_of_end
from autosplit.errors import BackendError, RefusedError, WorkerError
from autosplit.memory.slots import HOST
from autosplit.running import statusblock
from autosplit.running.flow import Flow
from autosplit.running.inflight import Lanes
from autosplit.running.provisioner import Deployment
from autosplit.running.stageworker import StageWorker

MAX_TRIES = 2
"""Workers that may die while they run one request, before it is given up."""

PAUSE_TIMEOUT_S = 60.0
"""Seconds within which a worker of a stage without a limit on hanging must pause; it finishes its request first."""

WINDOW_S = 60.0
"""Seconds after which a worker that is still up counts as sound: its earlier deaths are forgotten."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Seconds before the second restart without progress, doubled for each further one up to the longest."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """The deaths of one worker since it last made progress: ``num_fruitless`` of ``num_deaths`` were not idle."""

    num_done: int = 0
    num_deaths: int = 0
    num_fruitless: int = 0

    def after(self, num_done: int, up_s: float, idle: bool) -> "RestartHistory":
        """The history with one more death.

        Args:
            num_done: requests that the worker and its predecessors had finished.
            up_s: seconds since its stage was loaded; 0 if it died while it loaded.
            idle: whether its stage was loaded and no request was in flight, so that its death held up none.

        >>> history = RestartHistory().after(0, 0.0, idle=False).after(0, 0.0, idle=False)
        >>> history.num_fruitless, history.pause_s
        (2, 0.1)
        >>> history.after(1, 3.0, idle=False)
        RestartHistory(num_done=1, num_deaths=1, num_fruitless=0)
        """
        if num_done > self.num_done:
            return RestartHistory(num_done, 1)
        old = self if up_s < WINDOW_S else RestartHistory(self.num_done)
        return replace(old, num_deaths=old.num_deaths + 1, num_fruitless=old.num_fruitless + (not idle))

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next restart."""
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self.num_deaths - 2)) if self.num_deaths > 1 else 0.0


class Recovery:
    """Watches the workers of a deployment. The transport's thread calls it."""

    def __init__(self, deployment: Deployment, max_restarts: int) -> None:
        self.restarts = 0
        self._deployment = deployment
        self._max_restarts = max_restarts
        self._records = [RestartHistory() for _ in deployment.worker_configs]
        self._ready_s = [time.monotonic()] * len(deployment.worker_configs)
        """When each worker had loaded its stage."""
        self._tries: Counter[int] = Counter()
        self._limits_s = [config.stage.hang_s for config in deployment.worker_configs]
        self._flow = Flow(deployment.wiring)
        self._hung: dict[int, str] = {}
        """Worker to the reason why it was killed, or why it ended, until its death is counted."""
        self._seen: dict[int, tuple[tuple[int, int], float]] = {}
        """By worker that held up a request at the last look: its state, when that began, and when it was seen first."""
        self.look_s = min((limit for limit in self._limits_s if limit is not None), default=math.inf) / 4
        """How long the transport's thread may block before it looks for hanging workers."""
        self._next_look_s = 0.0

    def kill_hanging(self, nexts: Sequence[int]) -> None:
        """Kill each worker that has run one request, or has not taken it, for longer than its stage allows.

        A worker that waits for others, for inputs or for a free slot, is not at fault, however long that takes. ``nexts`` as in
        ``Lanes``.
        """
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + self.look_s
        positions = self._flow.positions(self._deployment.status_block)
        for number, limit_s in enumerate(self._limits_s):
            if limit_s is None or not self._flow.at_fault(number, positions, nexts):
                self._seen.pop(number, None)
                continue
            mark = positions[number].state, self._deployment.status_block.status(number)[statusblock.SINCE_NS]
            if self._seen.get(number, (None,))[0] != mark:
                self._seen[number] = mark, now_s
            age_s = now_s - self._seen[number][1]
            if age_s > limit_s:
                worker, doing = self._deployment.workers[number], statusblock.STATES[mark[0]]
                self._hung[number] = f"hung: it was killed after {doing} for {age_s:.1f} s (limit {limit_s:g} s)"
                request = self._deployment.status_block.number(positions[number].sequence)
                log.warning("%s is %s at request %d for %.1f s and is killed", worker.name, doing, request, age_s)
                worker.kill()

    def replace_dead(self, lanes: Lanes) -> dict[int, WorkerError]:
        """Pause the workers that are alive and replace the dead ones, all at once.

        Returns: the requests to give up, with their errors.
        Raises: WorkerError: a worker died too often without progress. BackendError: a stage cannot be loaded any more.
            RefusedError: the pipeline is being closed.
        """
        deployment = self._deployment
        self._hung |= {number: reason for number, worker in enumerate(deployment.workers) if (reason := reason_of_end(worker))}
        dead = self._pause([n for n, worker in enumerate(deployment.workers) if n not in self._hung and worker.alive()])
        given_up, fruitless, deaths = {}, {}, {}
        for number in dead:
            sequence = self._running(number, lanes)
            story = deaths[number] = self._tell(number, sequence)
            if sequence is None or deployment.workers[number].orphaned:  # no request causes the end of the fork server
                fruitless[number] = story
            else:
                self._tries[sequence] += 1
                if self._tries[sequence] >= MAX_TRIES:
                    text = f"{story}; the request was tried {MAX_TRIES} times and is given up"
                    given_up[sequence] = WorkerError(text, *self._place(number))
        self._count(fruitless, {number: time.monotonic() - self._ready_s[number] for number in dead}, idle=not lanes.num_places)
        while dead:
            self.restarts += len(dead)
            try:
                failed = deployment.replace(dead)
            except BackendError as failure:
                reasons = "; ".join([*deaths.values(), str(failure)])
                raise BackendError(reasons, failure.refused, failure.backend, failure.device, failure.where) from failure
            for number in set(dead) - failed.keys():
                self._ready_s[number] = time.monotonic()
            dead = sorted(failed)
            stories = {number: f"{self._name(number)} {story}" for number, story in failed.items()}
            for story in stories.values():
                log.warning("%s", story)
            self._count(stories, dict.fromkeys(dead, 0.0), idle=False)
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
        deployment.run(lanes, alone=bool(self._tries))

    def _running(self, number: int, lanes: Lanes) -> int | None:
        """The request that a worker was running when it died, if any."""
        status = self._deployment.status_block.status(number)
        sequence = status[statusblock.SEQUENCE]
        return sequence if status[statusblock.STATE] == statusblock.RUNNING and sequence >= lanes.base(sequence) else None

    def _tell(self, number: int, sequence: int | None) -> str:
        """Describe a death, in the log too."""
        worker = self._deployment.workers[number]
        story = f"{self._name(number)} {self._hung.pop(number, '') or worker.fate(self._deployment.stopping)}"
        if sequence is not None:
            story += f" while it ran request {self._deployment.status_block.number(sequence)}"
        log.warning("%s", story)
        return story

    def _name(self, number: int) -> str:
        config = self._deployment.worker_configs[number]
        return f"the worker of stage '{config.stage.name}' (replica {config.replica}, device '{config.device.name}')"

    def _place(self, number: int) -> tuple[str, str]:
        """The backend and the device of a worker."""
        config = self._deployment.worker_configs[number]
        return config.stage.module.kind, config.device.name

    def _count(self, stories: Mapping[int, str], up_s: Mapping[int, float], idle: bool) -> None:
        """Count deaths for which no request is to blame, and wait before the restart as long as the worst of them demands.

        Raises: WorkerError: a worker died too often without progress. RefusedError: the pipeline is being closed.
        """
        for number, story in stories.items():
            status = self._deployment.status_block.status(number)
            num_done = sum(status[statusblock.DONE : statusblock.BUSY_NS])
            record = self._records[number] = self._records[number].after(num_done, up_s[number], idle)
            if record.num_fruitless > self._max_restarts:
                noun = "restart" if self._max_restarts == 1 else "restarts"
                raise WorkerError(
                    f"{story}; the pipeline gives up after {self._max_restarts} {noun} of that worker without progress. Remove "
                    "the cause, then open it again with reopen()",
                    *self._place(number),
                )
        pause_s = max((self._records[number].pause_s for number in stories), default=0.0)
        if self._deployment.stopping.wait(pause_s):
            raise RefusedError("the pipeline was closed before the request was done")

    def _pause(self, alive: Sequence[int]) -> list[int]:
        """Pause living workers and kill those that do not confirm in time that they touch no ring; return all dead ones."""
        deployment = self._deployment
        paused = set()
        calls = {number: begin(deployment.workers[number], "during a pause", StageWorker.pause) for number in alive}
        start_s = time.monotonic()
        for number in alive:
            limit_s = start_s + (self._limits_s[number] or PAUSE_TIMEOUT_S) - time.monotonic()
            try:
                calls[number].result(max(0.0, limit_s), stop=deployment.stopping)
                paused.add(number)
            except WorkerError:
                deployment.workers[number].kill()
        return [number for number in range(len(deployment.workers)) if number not in paused]
