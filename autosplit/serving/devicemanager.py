"""DeviceManager: the stages that are loaded on a device, its memory and its state. Idle devices get replicas of a network."""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autosplit.errors import DeviceError
from autosplit.running.monitor import WorkerHealth
from autosplit.running.stage import StagePlacement
from autosplit.tables import bytes_text
from autosplit.values.machine import Device

DeviceState = Literal["starting", "ready", "busy", "draining", "failed"]


@dataclass(eq=False)
class DeviceManager:
    """One device of the host. The stages of all networks on it share its memory cap; each stage has its own worker.

    Attributes:
        memory: the manager of the device whose memory it uses; None if it has its own.
        loaded: (network, stage) to the bytes reserved for it; two replicas on the device share the weights of a stage.
        sharing: the managers of the other devices that use its memory.
    """

    device: Device
    memory: "DeviceManager | None" = field(default=None, repr=False)
    loaded: dict[tuple[str, str], int] = field(default_factory=dict)
    sharing: list["DeviceManager"] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Tell the manager of its memory that it uses it, too."""
        if self.memory is not None:
            self.memory.sharing.append(self)

    @property
    def used_bytes(self) -> int:
        """Bytes reserved for the stages in the memory of the device."""
        return sum(self.loaded.values()) + sum(other.used_bytes for other in self.sharing)

    @property
    def free_bytes(self) -> int | None:
        """Bytes left under the cap of its memory, or None if there is no cap."""
        caps = [(one.device.memory_bytes, one.used_bytes) for one in (self, self.memory) if one is not None]
        return min((cap - used for cap, used in caps if cap is not None), default=None)

    def load(self, network: str, stage: str, num_bytes: int | None) -> None:
        """Reserve memory for a stage; None for a stage whose memory is not known, on a device without a cap.

        Raises: DeviceError: not enough is left, and the message has the numbers; the memory of the stage is not known and the
            device has a cap; or the device runs one model, and has another.
        """
        owner = self.memory or self
        with owner._lock:
            others = sorted({other for other, _ in self.loaded} - {network})
            if self.device.one_model and others:
                raise DeviceError(
                    f"network '{network}' cannot be on device '{self.device.name}', which runs one model at a time and has "
                    f"network '{others[0]}'; remove that one first, or choose another device"
                )
            if self.free_bytes is not None and num_bytes is None:
                raise DeviceError(
                    f"stage '{stage}' of network '{network}' is a function, whose memory is not known, and device "
                    f"'{self.device.name}' has a memory cap; say how much: add_function(..., memory='500MB')"
                )
            num_bytes = num_bytes or 0
            if self.free_bytes is not None and num_bytes > self.free_bytes:
                held = [item for one in (owner, *owner.sharing) for item in one.loaded.items()]
                holds = ", ".join(f"{other}/{name} {bytes_text(size)}" for (other, name), size in held) or "nothing"
                caps = [one.device.memory_bytes for one in (self, owner) if one.device.memory_bytes is not None]
                raise DeviceError(
                    f"stage '{stage}' of network '{network}' needs {bytes_text(num_bytes)} on device '{self.device.name}', and "
                    f"{bytes_text(self.free_bytes)} of {bytes_text(min(caps))} are free (it holds {holds}). "
                    "Remove a network, or raise the device's memory."
                )
            self.loaded[network, stage] = num_bytes

    def unload(self, network: str) -> None:
        """Free the memory that is reserved for the stages of a network."""
        with (self.memory or self)._lock:
            self.loaded = {key: size for key, size in self.loaded.items() if key[0] != network}


def device_state(workers: Sequence[WorkerHealth], networks: Collection[str]) -> DeviceState:
    """The state of a device, from the states of its workers and its networks."""
    states = {worker.state for worker in workers}
    if "dead" in states or "failed" in networks:
        return "failed"
    if states & {"starting", "paused"} or "starting" in networks:
        return "starting"
    if "draining" in networks:
        return "draining"
    return "busy" if states & {"running", "sending"} else "ready"


def device_health(manager: DeviceManager, workers: Sequence[WorkerHealth], networks: Collection[str]) -> dict[str, Any]:
    """A device as plain data."""
    return {
        "state": device_state(workers, networks),
        "memory_bytes": manager.device.memory_bytes,
        "used_bytes": manager.used_bytes,
        "free_bytes": manager.free_bytes,
        "resident_bytes": sum(worker.resident_bytes for worker in workers),
        "stages": [f"{network}/{stage}" for network, stage in list(manager.loaded)],
    }


def saturated(stages: Sequence[StagePlacement], idle: Mapping[Device, int | None]) -> list[StagePlacement]:
    """The stages with as many replicas of the whole network as fit on idle devices.

    Each replica has, for each device of the network, a device of the same kind with the same number of cores.

    Args:
        idle: the devices that no network uses, each with the bytes that it can hold; None for no limit.
    """
    num_bytes: dict[Device, int] = {}
    for stage in stages:
        for device in dict.fromkeys(stage.devices):
            num_bytes[device] = num_bytes.get(device, 0) + (stage.needs_bytes(device.name) or 0)
    left = dict(idle)
    devices = {stage.name: stage.devices for stage in stages}
    while True:
        copy: dict[Device, Device] = {}
        for device, needed in num_bytes.items():
            alike = [one for one in left if (one.kind, len(one.cores)) == (device.kind, len(device.cores))]
            fitting = [one for one in alike if (room := left[one]) is None or room >= needed]
            if not fitting:
                return [replace(stage, devices=devices[stage.name]) for stage in stages]
            copy[device] = fitting[0]
            del left[fitting[0]]
        devices = {stage.name: (*devices[stage.name], *(copy[one] for one in stage.devices)) for stage in stages}
