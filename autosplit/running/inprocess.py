"""InProcess: a network of one stage in the caller's own process, without rings and workers.

A crash of the stage takes the caller along, and a stage that hangs is not killed. Worker processes (``Pipeline``) prevent both.
"""

import os
import time
from collections.abc import Sequence

from autosplit.errors import PlanError
from autosplit.reports.results import RunStats
from autosplit.running.engine import Engine
from autosplit.running.localexecutor import LocalExecutor
from autosplit.running.messages import WorkerEvent
from autosplit.running.monitor import WorkerHealth, run_stats
from autosplit.running.stage import StagePlacement
from autosplit.running.wiring import require_here, wire


class InProcess(Engine):
    """One stage in this process; open until ``close``, best used in a ``with`` block. Arguments as for ``Pipeline``.

    With one copy of the stage, the answer is there when ``submit`` returns.

    Raises: PlanError: there is not exactly one stage, it is on an accelerator, or it comes from a file of an untrusted maker and
        runs in torch. BackendError: it could not be loaded.
    """

    _executor: LocalExecutor

    def __init__(
        self, stages: Sequence[StagePlacement], inputs: Sequence[str], outputs: Sequence[str], *, room: int | None = None
    ) -> None:
        super().__init__(wire(stages, inputs, outputs), room)
        require_here(self.wiring)
        if len(stages) != 1:
            raise PlanError(f"the caller's process can hold one stage, and there are {len(stages)}; run them in workers")
        stages[0].refuse_isolated()
        for device in stages[0].devices:
            if device.kind not in ("cpu", "null"):
                raise PlanError(f"the caller's process computes on cores, and '{device.name}' is an accelerator; use workers")
        self._begun_s = time.monotonic()
        self._executor = LocalExecutor(self.wiring, self._room)
        self._end_at_exit()

    @property
    def pids(self) -> list[int]:
        """This process, once for each copy of the stage."""
        return [os.getpid()] * len(self._executor.copies)

    @property
    def restarts(self) -> int:
        """0: a thread of this process cannot be replaced."""
        return 0

    def health(self, network: str = "") -> list[WorkerHealth]:
        """The state and the sums of each copy."""
        return [copy.health(network) for copy in self._executor.copies]

    def stats(self, *, clear: bool = False) -> RunStats:
        """Latency and the times of each copy, since the start or since the last call with ``clear``."""
        with self._executor.lock:
            now_s = time.monotonic()
            elapsed_s, self._begun_s = now_s - self._begun_s, now_s if clear else self._begun_s
            times = self._executor.take_times(clear=clear)
            told = [(copy, copy.events(clear=clear)) for copy in self._executor.copies]
        return run_stats(times, elapsed_s, [copy.stats(events) for copy, events in told], restarts=0)

    def events(self, *, clear: bool = False) -> list[list[WorkerEvent]]:
        """The times of the last requests of each copy."""
        with self._executor.lock:
            return [copy.events(clear=clear) for copy in self._executor.copies]

    def _end(self, *, drain: bool) -> None:
        """Wait for answers, or without ``drain`` for those that are computed now; then let go of the stage."""
        self._executor.close(drain=drain)
