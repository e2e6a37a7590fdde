"""Pipeline: one network in worker processes, from placements to answers."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from autosplit.devices.limits import refusals_named
from autosplit.errors import BackendError, PlanError, RefusedError, UsageError, listed, raise_faults
from autosplit.reports.results import RunStats
from autosplit.running.admission import closed
from autosplit.running.engine import Engine
from autosplit.running.executor import Executor
from autosplit.running.messages import WorkerEvent
from autosplit.running.monitor import Monitor, WorkerHealth
from autosplit.running.provisioner import Deployment, provision
from autosplit.running.swapping import stages_with_weights
from autosplit.running.wiring import StagePlacement, Wiring, require_here, wire
from autosplit.tables import bytes_text

log = logging.getLogger(__name__)


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
        max_restarts: int = 5,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        if max_restarts < 0:
            raise UsageError(f"max_restarts must be at least 0, but is {max_restarts}")
        super().__init__(wire(stages, inputs, outputs, max_in_flight), room)
        self.groups = {name: listed(f"group '{name}'", members, str) for name, members in (groups or {}).items()}
        known = [stage.name for stage in stages]
        strange = [(group, stage) for group, members in self.groups.items() for stage in members if stage not in known]
        faults = [f"group '{group}' names '{stage}'; the stages are: {', '.join(known)}" for group, stage in strange]
        raise_faults(PlanError, "the parameter groups do not fit the pipeline", faults)
        self._max_restarts = max_restarts
        self._past_restarts = 0
        self._use(self.wiring, *self._provide(self.wiring))
        self._end_at_exit()

    @refusals_named()
    def _provide(self, wiring: Wiring) -> tuple[Deployment, Executor]:
        """Load the stages, and an executor that takes requests for them."""
        require_here(wiring)
        deployment = provision(wiring)
        try:
            return deployment, Executor(deployment, room=self._room, max_restarts=self._max_restarts)
        except BaseException:
            deployment.close(timeout_s=0.5)
            raise

    def _use(self, wiring: Wiring, deployment: Deployment, executor: Executor) -> None:
        """Send requests to these stages from now on."""
        self.wiring, self._num_lanes = wiring, wiring.num_lanes
        self._deployment, self._executor, self._monitor = deployment, executor, Monitor(deployment, executor)

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
            self._use(self.wiring, *self._provide(self.wiring))
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

        All stages are loaded a second time, beside those in use: until the last request on the old weights is answered, the
        pipeline takes up to twice its memory (see ``swap_bytes``).

        Args:
            group: a parameter group.
            weights: new tensors by weight name, as in the stages' programs; other weights stay.
            folder: an empty folder for the stages with their new weights.
        Returns: the number of the first request that runs on the new weights.
        Raises: UsageError: no such group or weight, or a tensor that does not fit. BackendError, WorkerError: a worker could
            not load them; the old weights stay in use. RefusedError: the pipeline is closed.
        """
        if group not in self.groups:
            raise UsageError(f"there is no parameter group '{group}'; the groups are: {', '.join(self.groups) or 'none'}")
        self.check_thread()
        with self._lifecycle:
            if self._closed:
                raise closed()
            stages = stages_with_weights(self.wiring.stages, self.groups[group], group, weights, folder)
            wiring = replace(self.wiring, stages=stages)
            more = ", ".join(f"{bytes_text(num_bytes)} on {device}" for device, num_bytes in self.swap_bytes.items())
            log.info("stages are loaded beside those in use, which takes %s more until the old ones are closed", more)
            try:
                deployment, executor = self._provide(wiring)
            except BackendError as failure:
                raise BackendError(f"the new weights could not be loaded, and the old ones stay in use: {failure}") from None
            old, old_deployment, first = self._executor, self._deployment, 0

            def switch(num_taken_in: int) -> None:
                nonlocal first
                first = num_taken_in
                executor.count_from(first)
                self._use(wiring, deployment, executor)

            old.hand_over(switch)
            try:
                old.close(drain=True)
            finally:
                old_deployment.close()
            self._past_restarts += old.restarts
        return first

    @property
    def swap_bytes(self) -> dict[str, int]:
        """Device name to the bytes that ``swap`` takes there beside those in use; a stage of unknown size counts as 0."""
        found: Counter[str] = Counter()
        for stage in self.wiring.stages:
            for device in stage.devices:
                found[device.name] += stage.needs_bytes(device.name) or 0
        return dict(found)

    def _end(self, *, drain: bool) -> None:
        """Wait for answers if ``drain``, then end every worker.

        Workers have 5 s to end, or 0.5 s without ``drain`` or after Ctrl-C; then they are killed.
        """
        timeout_s = 0.5
        try:
            self._executor.close(drain=drain)
            timeout_s = 5.0 if drain else 0.5
        finally:
            self._deployment.close(timeout_s)
