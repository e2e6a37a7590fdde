"""DeviceManager: the stages that are loaded on a device, its memory and its state."""

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autosplit.errors import DeviceError
from autosplit.running.monitor import WorkerHealth
from autosplit.tables import bytes_text
from autosplit.values.machine import Device

DeviceState = Literal["starting", "ready", "busy", "draining", "failed"]


@dataclass(eq=False)
class DeviceManager:
    """One device of the host. The stages of all networks on it share its memory cap; each stage has its own worker."""

    device: Device
    loaded: dict[tuple[str, str], int] = field(default_factory=dict)
    """(network, stage) to the bytes reserved for it; two replicas on the device share the weights of a stage."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def used_bytes(self) -> int:
        """Bytes reserved for the stages on the device."""
        return sum(self.loaded.values())

    @property
    def free_bytes(self) -> int | None:
        """Bytes left under the cap, or None if there is no cap."""
        return None if self.device.memory_bytes is None else self.device.memory_bytes - self.used_bytes

    def load(self, network: str, stage: str, num_bytes: int) -> None:
        """Reserve memory for a stage. Raises: DeviceError: not enough is left; the message has the numbers."""
        with self._lock:
            if self.free_bytes is not None and num_bytes > self.free_bytes:
                holds = (
                    ", ".join(f"{other}/{name} {bytes_text(size)}" for (other, name), size in self.loaded.items()) or "nothing"
                )
                raise DeviceError(
                    f"stage '{stage}' of network '{network}' needs {bytes_text(num_bytes)} on device '{self.device.name}', and "
                    f"{bytes_text(self.free_bytes)} of {bytes_text(self.device.memory_bytes or 0)} are free (it holds {holds}). "
                    "Remove a network, or raise the device's memory."
                )
            self.loaded[network, stage] = num_bytes

    def unload(self, network: str) -> None:
        """Free the memory that is reserved for the stages of a network."""
        with self._lock:
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
