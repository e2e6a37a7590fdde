"""Start the workers of a pipeline on their devices, all or none, and replace workers that died."""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from autosplit.devices.accelerators import PROVIDERS
from autosplit.devices.calls import Call, begin
from autosplit.devices.limits import affinity
from autosplit.devices.processes import Worker, hang_up, spawn_worker
from autosplit.errors import AutosplitError, BackendError, DeviceError, RefusedError, WorkerError
from autosplit.memory.slots import HOST
from autosplit.running.inflight import Lanes
from autosplit.running.keptfiles import KeptFiles
from autosplit.running.messages import Ready, RingPort, StatesHandle, WorkerConfig
from autosplit.running.modules import StageFolder
from autosplit.running.nullworker import start_thread
from autosplit.running.ring import Ring
from autosplit.running.stageworker import StageWorker
from autosplit.running.statusblock import SEQUENCE, SINCE_NS, STARTING, STATE, StatusBlock
from autosplit.running.wiring import Wiring
from autosplit.tracing.splitting import saved_states

LOAD_TIMEOUT_S = 300.0
RELOAD_LEAST_S = 30.0
RELOAD_FACTOR = 10.0
"""Limits on loading: of a new pipeline, and of a stage that was loaded before (see ``Deployment.reload_limit_s``)."""

SPIN_S = 50e-6
"""Seconds for which a worker that owns its cores polls for its input before it sleeps: a wake-up takes about 35 us."""


@dataclass
class Deployment:
    """The rings, the status block and the workers of one pipeline."""

    wiring: Wiring
    status_block: StatusBlock
    rings: list[list[Ring]] = field(default_factory=list)
    """Those of each channel."""
    worker_configs: list[WorkerConfig] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    ready: list[Ready] = field(default_factory=list)
    control_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while messages are exchanged with workers; if the admission's lock is needed too, this one is taken first."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set to end every wait for a worker, because the pipeline is being closed."""
    kept: dict[Path, KeptFiles] = field(default_factory=dict)
    """By folder: the files of the stages, which a restart reads again."""
    _closed: bool = False

    def start(self) -> None:
        """Start every worker and wait until all stages are loaded."""
        for number in range(len(self.worker_configs)):
            self.workers.append(self._launch(number))
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        for number in range(len(self.worker_configs)):
            self.ready.append(self._await(number, max(0.0, deadline - time.monotonic())))
        for module in (one.module for config in self.worker_configs for one in config.stage.at_each_size()):
            if isinstance(module, StageFolder) and module.folder not in self.kept:
                self.kept[module.folder] = KeptFiles(module.folder)

    def replace(self, numbers: Sequence[int]) -> dict[int, str]:
        """Start new workers in place of dead ones, all at once; return those that failed before they had loaded, with the reason.

        A worker that takes longer than ``reload_limit_s`` is killed, and counts as failed.

        Raises: BackendError: a stage cannot be loaded any more. RefusedError: the pipeline is being closed.
        """
        failed = {}
        start_s = time.monotonic()
        for number in numbers:
            self.workers[number].close(timeout_s=0.0)
            try:
                for files in self.kept.values():
                    files.restore()
                self.workers[number] = self._launch(number)
            except (WorkerError, OSError) as failure:
                failed[number] = f"could not be started: {failure}"
        for number in numbers:
            if number not in failed:
                try:
                    self.ready[number] = self._await(number, start_s + self.reload_limit_s(number) - time.monotonic())
                except WorkerError as failure:
                    self.workers[number].kill()
                    failed[number] = f"failed while it loaded: {failure}"
        return failed

    def reload_limit_s(self, number: int) -> float:
        """Seconds within which a worker must have loaded its stage again: several times the seconds of the last time."""
        return min(LOAD_TIMEOUT_S, RELOAD_LEAST_S + RELOAD_FACTOR * self.ready[number].load_s)

    def run(self, lanes: Lanes, *, alone: bool = False) -> None:
        """Let every worker take requests from the oldest unfinished one on; with ``alone``, those in flight one by one."""
        for number, config in enumerate(self.worker_configs):  # the death of a worker is found by its descriptor
            alone_until = lanes.next(config.replica) if alone else 0
            begin(self.workers[number], "when it should run", StageWorker.run_from, lanes.base(config.replica), alone_until)

    def close(self, timeout_s: float = 5.0) -> None:
        """End every worker and free every descriptor; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for worker in self.workers:
            with contextlib.suppress(OSError):
                hang_up(worker.connection)
        until_s = time.monotonic() + timeout_s
        with contextlib.ExitStack() as ends:  # Ctrl-C ends one of them, and the others follow
            for files in self.kept.values():
                ends.callback(files.close)
            ends.callback(self.status_block.close)
            for states in (config.states for config in self.worker_configs):
                if states is not None:
                    ends.callback(os.close, states.fd)
            for ring in (ring for rings in self.rings for ring in rings):
                ends.callback(ring.close)
            for worker in reversed(self.workers):
                ends.callback(_end, worker, until_s)

    def _launch(self, number: int) -> Worker:
        config = self.worker_configs[number]
        device = config.device
        status = self.status_block.status(number)
        # The words of its predecessor do not hold for this worker.
        status[STATE], status[SEQUENCE], status[SINCE_NS] = STARTING, 0, time.monotonic_ns()
        name = f"{config.stage.name}/{config.replica} on {device.name}"
        if device.kind == "null":
            config.stage.refuse_isolated()
            return start_thread(name, config)
        handles = [handle for port in (*config.sources, *config.sinks) for handle in port.rings if handle is not None]
        fds = [config.status_block.fd, *(fd for handle in handles for fd in handle.fds)]
        fds += [] if config.states is None else [config.states.fd]
        worker = spawn_worker(
            "autosplit.running.stageworker:main",
            name=name,
            cores=device.cores,
            fds=fds,
            threads=config.stage.num_threads(config.replica),
            stop=self.stopping,
        )
        with contextlib.suppress(ConnectionError):
            worker.connection.send(config)
        return worker

    def _await(self, number: int, timeout_s: float) -> Ready:
        config = self.worker_configs[number]
        try:
            loading: Call[Ready] = Call(self.workers[number], "during loading its stage")
            return loading.result(timeout_s, stop=self.stopping)
        except RefusedError:
            raise
        except WorkerError as failure:
            failure.backend, failure.where = config.stage.module.kind, config.device.name
            raise
        except AutosplitError as failure:
            text = f"stage '{config.stage.name}' could not be loaded on device '{config.device.name}': {failure}"
            device = config.device.name if isinstance(failure, DeviceError) else ""
            raise BackendError(text, backend=config.stage.module.kind, device=device, where=config.device.name) from None


def _end(worker: Worker, until_s: float) -> None:
    """Let a worker end until that second, or until Ctrl-C; then it is killed."""
    try:
        worker.close(until_s=until_s)
    except BaseException:
        worker.close(0.0)
        raise


def provision(wiring: Wiring, stopping: threading.Event | None = None) -> Deployment:
    """Make the rings of ``wiring`` and start its workers; they are loaded and wait to run.

    ``stopping``: that of the deployment in whose place this one comes, so that closing the pipeline ends either.
    """
    workers = list(wiring.workers())
    status_block = StatusBlock.create(wiring.most_in_flight * wiring.num_lanes, len(workers))  # all may be in one lane
    deployment = Deployment(wiring, status_block, stopping=stopping or threading.Event())
    try:
        for channel in wiring.channels:
            deployment.rings.append([])
            for _ in channel.pairs():
                deployment.rings[-1].append(Ring.create(channel.layouts, channel.num_slots, channel.every))
        shared = Counter(core for stage in wiring.stages for device in stage.devices for core in device.cores)
        for position, replica in workers:
            deployment.worker_configs.append(_config_of(deployment, position, replica, shared))
        deployment.start()
    except BaseException:
        deployment.close(timeout_s=0.5)
        raise
    return deployment


def _config_of(deployment: Deployment, position: int, replica: int, shared: Counter[int]) -> WorkerConfig:
    """The config of the next worker. Raises: OSError: no more descriptors for its states."""
    wiring = deployment.wiring
    stage = wiring.stages[position]
    states = saved_states(stage.module.folder) if isinstance(stage.module, StageFolder) else ()  # those of a function: unknown
    device = stage.devices[replica]
    owns = bool(device.cores) and len(affinity()) > 1 and all(shared[core] == 1 for core in device.cores)

    def ports(side: int) -> tuple[RingPort, ...]:
        """The ports of this worker as target (side 1) or source (side 0).

        Ports to workers on its own cores come last: waking one of those preempts the sender, and by then the workers on other
        cores are at work.
        """
        found = []
        for channel, made in zip(wiring.channels, deployment.rings, strict=True):
            ends, pairs = (channel.source, channel.target), channel.pairs()
            if ends[side] == position:
                handles = [ring.handle if pair[side] == replica else None for ring, pair in zip(made, pairs, strict=True)]
                others = wiring.stages[ends[1 - side]].devices if ends[1 - side] != HOST else ()
                near = any(
                    set(device.cores) & set(others[pair[1 - side]].cores) for pair in pairs if pair[side] == replica and others
                )
                found.append((near, RingPort(tuple(handles), (channel.source_index, channel.target_index)[side])))
        return tuple(port for _, port in sorted(found, key=itemgetter(0)))

    return WorkerConfig(
        stage=stage,
        replica=replica,
        sources=ports(1),
        sinks=ports(0),
        status_block=deployment.status_block.handle,
        number=len(deployment.worker_configs),
        spin_s=SPIN_S if owns else 0.0,
        states=StatesHandle.create(states) if states else None,
        providers=dict(PROVIDERS),
    )
