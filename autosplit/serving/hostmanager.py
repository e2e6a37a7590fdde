"""HostManager: several networks on one machine, each added, run and removed while the others run."""

import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from autosplit.arguments import checked
from autosplit.closing import Draining
from autosplit.errors import RefusedError, UsageError
from autosplit.reports.status import Beacon
from autosplit.running.engine import Engine
from autosplit.running.pipeline import InProcess, Pipeline
from autosplit.running.recording import record
from autosplit.running.request import AnswerFuture, Tensors
from autosplit.running.stage import StagePlacement
from autosplit.running.wiring import Replan
from autosplit.serving.chaining import Chain
from autosplit.serving.devicemanager import DeviceManager, device_health, saturated
from autosplit.serving.limit import Limit, Policy
from autosplit.serving.metrics import HostMetrics
from autosplit.values.machine import Machine
from autosplit.values.plan import Process
from autosplit.values.timeline import Action

NetworkState = Literal["starting", "ready", "draining", "failed"]

NUM_LATEST = 1024
"""Requests from which the latency in a network's health is taken."""


@dataclass
class Network:
    """A network of a host: its devices, and its pipeline once it is loaded."""

    phase: Literal["starting", "ready", "draining"]
    devices: tuple[str, ...]
    pipeline: Engine | None = None

    @property
    def ready(self) -> Engine | None:
        """The pipeline, if the network is neither being loaded nor removed."""
        return self.pipeline if self.phase == "ready" else None

    @property
    def state(self) -> NetworkState:
        """The phase, or ``failed`` for a network that has given up, which can be removed."""
        return "failed" if self.ready is not None and self.ready.failure is not None else self.phase


@checked
class HostManager(Draining):
    """Several networks on the devices of one machine; every method may be called from any thread.

    While the host is open, other processes of the user can read its health (``autosplit status``).

    Args:
        machine: the devices; each memory cap holds for all networks together. Without a machine, devices come with their
            networks and have no cap.
        engine_factory: makes the pipeline of a network; another one than ``Pipeline`` for devices on other hosts.
        limit: requests of ``submit``, ``run`` and ``run_async`` that may be without an answer in all networks together; None for
            no limit.
        when_full: the policy for a request beyond the limit: see ``Limit``.
    Raises: UsageError: no machine, a limit below 1, or no such policy.
    """

    def __init__(
        self,
        machine: Machine | None = None,
        engine_factory: Callable[..., Engine] = Pipeline,
        *,
        limit: int | None = None,
        when_full: Policy = "block",
    ) -> None:
        self._engine_factory = engine_factory
        self._limit = None if limit is None else Limit(limit, when_full, "request", self._check_thread)
        self.devices = _managers(machine) if machine else {}
        self._takes_any = machine is None
        self._networks: dict[str, Network] = {}
        self._lock = threading.Lock()
        self._beacon = Beacon(self.health)

    @property
    def capped(self) -> bool:
        """Whether a device has a memory cap."""
        return any(manager.device.memory_bytes is not None for manager in list(self.devices.values()))

    def add_network(
        self,
        name: str,
        stages: Sequence[StagePlacement],
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        saturate: bool = False,
        process: Process = "workers",
        replan: Replan | None = None,
        **settings: Any,
    ) -> Engine:
        """Load a network, all of it or nothing; the others run meanwhile.

        Args:
            name: a name that no other network of the host has.
            stages: as for Pipeline, on devices of this host.
            inputs: names of the inputs.
            outputs: names of the outputs.
            saturate: whether further replicas of the whole network take the devices of the host that no network uses.
            process: ``workers``, a process for each replica of a stage; or ``caller``, the only stage runs in this process.
            replan: as for Pipeline. The memory of the new stages is reserved on their devices. Of no use in this process.
            settings: further arguments of Pipeline, or of InProcess.
        Raises:
            UsageError: the name is taken, or a device is not one of the host's.
            DeviceError: memory is short; the message has the numbers.
            PlanError, BackendError, WorkerError: as Pipeline.
        """
        with self._lock:
            if saturate:
                used = {device for other in self._networks.values() for device in other.devices}
                used |= {device.name for stage in stages for device in stage.devices}
                idle = [manager for one, manager in self.devices.items() if one not in used]
                stages = saturated(stages, {manager.device: manager.free_bytes for manager in idle})
            if name in self._networks:
                raise UsageError(f"there is a network '{name}' already; remove it first, or choose another name")
            wanted = self._admit(name, stages)
            network = self._networks[name] = Network("starting", _devices_of(stages))
        try:
            self._reserve(name, stages)
            engine: Callable[..., Engine] = self._engine_factory if process == "workers" else InProcess
            if replan is not None and process == "workers":
                settings["replan"] = functools.partial(self._replanned, name, replan)
            network.pipeline = engine(stages, inputs, outputs, **settings)
        except BaseException:
            self._forget(name)
            with self._lock:
                used = {device for other in self._networks.values() for device in other.devices}
                self.devices = {one: manager for one, manager in self.devices.items() if one not in wanted or one in used}
            raise
        network.phase = "ready"
        return network.pipeline

    def _admit(self, name: str, stages: Sequence[StagePlacement]) -> Collection[str]:
        """Take in the devices of stages that are not known yet; return their names (the lock is held). Raises: UsageError."""
        wanted = {device.name: device for stage in stages for device in stage.devices if device.name not in self.devices}
        if wanted and not self._takes_any:
            known = ", ".join(self.devices)
            raise UsageError(f"network '{name}' wants device '{min(wanted)}'; the devices here are: {known}")
        self.devices |= {one: DeviceManager(replace(device, memory_bytes=None)) for one, device in wanted.items()}
        return wanted

    def _reserve(self, name: str, stages: Sequence[StagePlacement]) -> None:
        """Reserve the memory of a network on its devices. Raises: DeviceError: it is short."""
        for stage in stages:
            for device in dict.fromkeys(device.name for device in stage.devices):
                self.devices[device].load(name, stage.name, stage.needs_bytes(device))

    def _replanned(self, name: str, replan: Replan, lost: str) -> Sequence[StagePlacement]:
        """The stages of a network without a lost device; their memory takes the place of the former stages'."""
        stages = replan(lost)
        with self._lock:
            self._admit(name, stages)
            self._known(name).devices = _devices_of(stages)
        for manager in list(self.devices.values()):
            manager.unload(name)
        self._reserve(name, stages)
        return stages

    def remove_network(self, name: str, *, when_busy: Literal["drain", "refuse", "fail"] = "drain") -> None:
        """Unload a network: after its last answer (``drain``), only if it has no requests (``refuse``), or at once (``fail``).

        Raises: UsageError: there is no such network, or this is a callback of one of its answers. RefusedError: it has requests,
            or is being added or removed; then it stays as it is.
        """
        if when_busy not in ("drain", "refuse", "fail"):
            raise UsageError(f"when_busy must be drain, refuse or fail, but is {when_busy!r}")
        with self._lock:
            network = self._known(name)
            if (pipeline := network.ready) is None:
                raise RefusedError(f"network '{name}' is {network.state}: it cannot be removed now; try again when it is ready")
            here = pipeline.occupancy
            held = here.num_waiting + here.num_held + here.num_running
            if held and when_busy == "refuse":
                raise RefusedError(
                    f"network '{name}' has {held} requests without an answer; wait, or remove it with when_busy='drain'"
                )
            pipeline.check_thread()
            network.phase = "draining"
        try:
            pipeline.close(drain=when_busy != "fail")
        finally:
            self._forget(name)

    def __getitem__(self, name: str) -> Engine:
        """The pipeline of a network. Raises: UsageError: no such network. RefusedError: it is not ready."""
        with self._lock:
            network = self._known(name)
            if (pipeline := network.ready) is None:
                raise RefusedError(f"network '{name}' is {network.state}: it takes no requests")
            return pipeline

    def submit(self, name: str, inputs: Sequence[torch.Tensor], **settings: Any) -> AnswerFuture:
        """Submit one request to a network; ``settings`` as in ``Pipeline.submit``.

        Raises: RefusedError: no place within ``timeout_s`` under the host's limit, or in the network's queue.
        """
        if self._limit is None:
            return self[name].submit(inputs, **settings)
        timeout_s = settings.pop("timeout_s", None)
        return self._limit.submit(lambda left_s: self[name].submit(inputs, timeout_s=left_s, **settings), timeout_s)

    def run(self, name: str, inputs: Sequence[torch.Tensor], **settings: Any) -> Tensors:
        """Submit one request and wait for its answer."""
        outputs: Tensors = self.submit(name, inputs, **settings).result()
        return outputs

    async def run_async(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        *,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        **settings: Any,
    ) -> Tensors:
        """Submit one request and await its answer; waiting for room in the queue does not block the event loop either."""
        engine, submit = self[name], functools.partial(self.submit, name, inputs, **settings)
        immediately = self._limit is None and engine.returns_immediately
        outputs: Tensors = await engine.awaiting(
            submit, returns_immediately=immediately, timeout_s=timeout_s, deadline_s=deadline_s
        )
        return outputs

    def chain(self, *names: str) -> Chain:
        """Networks one behind the other: each runs a request while the network after it runs the one before.

        Raises: UsageError: no such network, or the outputs of one do not fit the inputs of the next.
        """
        return Chain([(name, self[name]) for name in names])

    def record(self, *, clear: bool = False) -> tuple[Action, ...]:
        """The last actions of the workers of all networks, on one time axis, for ``timeline.chrome_trace``."""
        return record(self._ready(), clear=clear)

    def networks(self) -> dict[str, NetworkState]:
        """The state of each network."""
        with self._lock:
            return {name: network.state for name, network in self._networks.items()}

    def health(self) -> Mapping[str, Any]:
        """Devices, networks and workers as plain data, read without asking a worker; ``autosplit status`` shows them."""
        with self._lock:
            networks = dict(self._networks)
        workers = {name: pipeline.health() for name, network in networks.items() if (pipeline := network.ready) is not None}
        devices = {}
        for name, manager in list(self.devices.items()):
            states = {network.state for network in networks.values() if name in network.devices}
            devices[name] = device_health(
                manager, [one for mine in workers.values() for one in mine if one.device == name], states
            )
        return {
            "devices": devices,
            "networks": {name: _network_health(network) for name, network in networks.items()},
            "workers": [{"network": name, **asdict(one)} for name, mine in workers.items() for one in mine],
        }

    def prometheus(self) -> str:
        """All counters and gauges in the text format that Prometheus reads.

        Raises: MissingExtraError: prometheus_client is not installed.
        """
        return HostMetrics(self.health).text()

    def close(self, *, drain: bool = True) -> None:
        """Remove every network and the status file.

        Raises: UsageError: called in a callback of an answer; nothing is removed then.
        """
        self._check_thread()
        with ExitStack() as stack:
            stack.callback(self._beacon.close)
            for name in list(self.networks()):
                with self._lock:
                    network = self._networks.get(name)
                stack.callback(self._forget, name)
                if network is not None and network.pipeline is not None:
                    network.phase = "draining"
                    stack.callback(network.pipeline.close, drain=drain)

    def _check_thread(self) -> None:
        """Raises: UsageError: this is a callback of an answer of any network."""
        for pipeline in self._ready().values():
            pipeline.check_thread()

    def _ready(self) -> dict[str, Engine]:
        with self._lock:
            return {name: pipeline for name, one in self._networks.items() if (pipeline := one.ready) is not None}

    def _known(self, name: str) -> Network:
        if name not in self._networks:
            raise UsageError(f"there is no network '{name}'; the networks are: {', '.join(self._networks) or 'none'}")
        return self._networks[name]

    def _forget(self, name: str) -> None:
        for manager in list(self.devices.values()):  # others may add devices meanwhile
            manager.unload(name)
        with self._lock:
            self._networks.pop(name, None)


def _devices_of(stages: Sequence[StagePlacement]) -> tuple[str, ...]:
    """The names of the devices of stages."""
    return tuple(dict.fromkeys(device.name for stage in stages for device in stage.devices))


def _managers(machine: Machine) -> dict[str, DeviceManager]:
    """A manager for each device; those of devices that share a memory know the manager of that memory."""
    owners = {device.name: DeviceManager(device) for device in machine.devices if not device.shares}
    managers = (owners.get(device.name) or DeviceManager(device, owners[device.shares]) for device in machine.devices)
    return {manager.device.name: manager for manager in managers}


def _network_health(network: Network) -> dict[str, Any]:
    """A network as plain data; if it is not ready, only its state."""
    if (pipeline := network.ready) is None:
        return {"state": network.state}
    latency, batches, here = pipeline.latency(NUM_LATEST), pipeline.batches, pipeline.occupancy
    return {
        "state": network.state,
        "num_waiting": here.num_waiting,
        "num_held": here.num_held,
        "room": here.queue_capacity,
        "num_running": here.num_running,
        "window": here.max_in_flight,
        "num_answered": here.num_answered,
        "restarts": pipeline.restarts,
        "replanned": list(pipeline.replanned),
        "latency_s": {"p50": latency.p50_s, "p90": latency.p90_s, "p99": latency.p99_s},
        "rows_per_request": batches.num_rows / batches.num_batches if batches.num_batches else pipeline.num_rows,
        "num_batches": batches.num_batches,
        "num_padding": batches.num_padding,
    }
