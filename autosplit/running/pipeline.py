"""Pipeline: one network in worker processes, from placements to answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from autosplit.devices.limits import refusals_named
from autosplit.errors import PlanError, RefusedError, UsageError, listed, raise_faults
from autosplit.reports.results import RunStats
from autosplit.running.engine import Engine
from autosplit.running.executor import Executor
from autosplit.running.messages import WorkerEvent
from autosplit.running.monitor import Monitor, WorkerHealth
from autosplit.running.provisioner import provision
from autosplit.running.stage import StagePlacement
from autosplit.running.swapping import swap_weights
from autosplit.running.wiring import Wiring, require_here, wire


class Pipeline(Engine):
    """Stages in worker processes, joined by rings; open until ``close``, best used in a ``with`` block.

    Args:
        stages: in topological order.
        inputs: names of the inputs, in the order in which requests give them.
        outputs: names of the outputs, in the order in which answers bring them; an input may be an output too.
        max_in_flight: requests between the first stage and their answer; by default enough to keep every stage at work,
            and up to 16 small ones while answers come fast.
        room: requests that may wait in the admission queue before ``submit`` blocks or refuses; by default the number of
            requests in flight.
        in_order: answer in the order of admission; False answers each request as soon as it is done, and lets more urgent
            ones overtake it at every stage.
        max_restarts: restarts of one worker without progress before the pipeline gives up. Deaths that a request is to blame for
            do not count.
        groups: names of parameter groups, each with the names of its stages, for ``swap``.
    Raises:
        PlanError: the stages do not fit together.
        BackendError: a stage could not be loaded. WorkerError: a worker died. Nothing is left running.
    """

    _executor: Executor

    def __init__(
        self,
        stages: Sequence[StagePlacement],
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        max_in_flight: int | None = None,
        room: int | None = None,
        in_order: bool = True,
        max_restarts: int = 5,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        if max_restarts < 0:
            raise UsageError(f"max_restarts must be at least 0, but is {max_restarts}")
        super().__init__(wire(stages, inputs, outputs, max_in_flight, in_order), room)
        self.groups = {name: listed(f"group '{name}'", members, str) for name, members in (groups or {}).items()}
        known = [stage.name for stage in stages]
        strange = [(group, stage) for group, members in self.groups.items() for stage in members if stage not in known]
        faults = [f"group '{group}' names '{stage}'; the stages are: {', '.join(known)}" for group, stage in strange]
        raise_faults(PlanError, "the parameter groups do not fit the pipeline", faults)
        self._max_restarts = max_restarts
        self._past_restarts = 0
        self._open(self.wiring)
        self._end_at_exit()

    @refusals_named()
    def _open(self, wiring: Wiring) -> None:
        require_here(wiring)
        deployment = provision(wiring)
        try:
            executor = Executor(deployment, room=self._room, max_restarts=self._max_restarts)
        except BaseException:
            deployment.close(timeout_s=0.5)
            raise
        self._deployment, self._executor, self._monitor = deployment, executor, Monitor(deployment, executor)
        self._num_lanes = wiring.num_lanes

    def reopen(self) -> None:
        """Start all workers anew after the pipeline has given up; it takes requests again, on the weights that it had.

        Raises: UsageError: it has not given up, or this is a callback. RefusedError: it is closed. BackendError, WorkerError: a
            stage could not be loaded; the pipeline can be opened again later.
        """
        self.check_thread()
        with self._lifecycle:
            if self._closed:
                raise RefusedError("the pipeline is closed and cannot be opened again; make a new one")
            if self.failure is None:
                raise UsageError("the pipeline runs and need not be opened again")
            old = self._executor
            old.finish()  # else a request of the new one may be answered before those that failed with the old one
            self._deployment.close(timeout_s=0.5)
            modules = {config.stage.name: config.module for config in self._deployment.worker_configs}
            stages = tuple(replace(stage, module=modules[stage.name]) for stage in self.wiring.stages)
            self._open(replace(self.wiring, stages=stages))
            self._past_restarts += old.restarts
            old.close(drain=False)

    @property
    def pids(self) -> list[int]:
        """The process of each worker, in the order of stages and replicas; a null device runs in this process."""
        return [worker.pid for worker in self._deployment.workers]

    @property
    def restarts(self) -> int:
        """Workers that died and were started anew so far."""
        return self._past_restarts + self._executor.restarts

    def health(self, network: str = "") -> list[WorkerHealth]:
        """The state and the sums of each worker, read from shared memory without asking it."""
        return self._monitor.health(network)

    def stats(self, *, clear: bool = False) -> RunStats:
        """Latency and the times of each worker, since the workers were started or since the last call with ``clear``."""
        return self._monitor.stats(self.restarts, clear=clear)

    def events(self, *, clear: bool = False) -> list[list[WorkerEvent]]:
        """The times of the last requests in each worker; empty for a worker that does not answer."""
        return self._monitor.events(clear=clear)

    def swap(self, group: str, weights: Mapping[str, torch.Tensor], folder: Path) -> int:
        """Give the stages of a parameter group other weights while requests run; no request sees both old and new ones.

        Args:
            group: a parameter group.
            weights: new tensors by weight name, as in the stages' programs; other weights stay.
            folder: an empty folder for the stages with their new weights.
        Returns: the number of the first request that runs on the new weights.
        Raises: UsageError: no such group or weight, or a tensor that does not fit. BackendError, WorkerError: a worker could
            not load them; the old weights stay in use.
        """
        return swap_weights(self._deployment, self._executor, self.groups, group, weights, folder)

    def _end(self, *, drain: bool) -> None:
        """Wait for answers if ``drain``, at most ``FILL_S`` for a buffer that others wait for; then end every worker.

        Workers have 5 s to end, or 0.5 s without ``drain`` or after Ctrl-C; then they are killed.
        """
        timeout_s = 0.5
        try:
            self._executor.close(drain=drain)
            timeout_s = 5.0 if drain else 0.5
        finally:
            self._deployment.close(timeout_s)
