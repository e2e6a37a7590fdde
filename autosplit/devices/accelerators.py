"""Accelerators: devices with memory and queues of their own, behind one interface that a test can implement without hardware.

Work for an accelerator is put in a queue (a CUDA stream) and done later, in the order of the queue; an event marks a place in
the queue. A provider is a class, one for each kind of device, named by its import path ``module:Class``. Other packages add
theirs as entry points ``autosplit.providers``, named after the kind. The host only counts devices: an open device takes memory.
Every worker learns the providers from its first message.
"""

import importlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, cast

import torch

from autosplit.errors import DeviceError, one_line
from autosplit.tables import bytes_text
from autosplit.values.machine import HOST_KINDS, Device
from autosplit.versions import added

PROVIDERS: dict[str, str] = {"cuda": "autosplit.devices.cuda:Cuda"}
"""Kind of device to the import path of its provider, of those that no package added."""

Work = Callable[[], None]
"""A function for a queue; it leaves its results in tensors that exist already."""

Queue = Any
"""A provider's own type of queue; only the provider looks inside."""

WITHOUT_IT = "; leave it out: name the other devices with --devices"
"""The way out of an error of a device that cannot be used."""

CALIBRATION_SIZE = 512
CALIBRATION_PASSES = 10
PINNED_BYTES = 32 << 20
_REPEATS = 20
_NUM_AGREEING = 3
_AGREEMENT = 0.02


class Event(Protocol):
    """A place in a queue."""

    def record(self, queue: Queue) -> None:
        """Mark the end of the work in the queue now."""

    def hold(self, queue: Queue) -> None:
        """Let work that is put into ``queue`` from now on begin after this event."""

    def synchronise(self) -> None:
        """Block until all work before the mark is done. Raises: RuntimeError: some of it failed."""

    def seconds_since(self, earlier: "Event") -> float:
        """Seconds of the device from the earlier mark to this one; both are done."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Name, memory, compute capability, driver and runtime of an accelerator, and seconds of its calibration kernel.

    ``context_bytes`` is the memory that a process takes there for drivers and libraries.
    """

    name: str
    total_bytes: int
    free_bytes: int
    capability: str
    driver: str
    runtime: str
    calibration_s: float = 0.0
    context_bytes: int = 0

    @property
    def identity(self) -> dict[str, str]:
        """The facts that must be equal for a measurement to hold."""
        whole = {key: str(value) for key, value in asdict(self).items()}
        return {key: whole[key] for key in ("name", "capability", "driver", "runtime")}

    def __str__(self) -> str:
        return f"{self.name}, {bytes_text(self.total_bytes)}, compute capability {self.capability}"


class Accelerator(Protocol):
    """One device, opened in a worker by its ordinal. A provider inherits from it; methods with a body here are optional."""

    def __init__(self, index: int) -> None:
        """Open it."""

    ONNX_PROVIDER: str = ""
    """The name of ONNX Runtime's execution provider for it; '' for none."""

    @staticmethod
    def count() -> int:
        """Number of these devices on this machine; opens none."""

    @staticmethod
    def remark() -> str:
        """A hint, why devices that the user expects are not counted; '' for none."""
        return ""

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""

    def facts(self) -> Facts:
        """Its facts, with the memory that is free now."""

    def queue(self) -> Queue:
        """A new queue."""

    def event(self) -> Event:
        """A new event, with times."""

    def enqueue(self, queue: Queue, work: Work) -> None:
        """Put ``work`` into the queue; it runs before this returns, or any time later."""

    def capture(self, queue: Queue, work: Work) -> Work:
        """Record ``work`` (as a CUDA graph): the result does the same on the same tensors, enqueued in one go.

        Raises: RuntimeError: some of it cannot be recorded.
        """
        raise RuntimeError("its provider records none")

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Bytes on the device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Bytes in host memory, pinned if the device can then copy them by itself."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def allow_tf32(self, allow: bool) -> None:
        """Whether products and convolutions of this process may round their inputs to TF32; nothing where there is none."""

    def synchronise(self) -> None:
        """Block until every queue is empty. Raises: RuntimeError: work failed; the device may be lost to this process."""

    def onnx_options(self, queue: Queue) -> Mapping[str, str]:
        """Options that make ONNX Runtime's execution provider work in this queue."""
        return {}


def accelerator_kinds() -> tuple[str, ...]:
    """The kinds of devices that a provider serves."""
    return tuple(dict.fromkeys((*PROVIDERS, *added("autosplit.providers"))))


def is_served(kind: str) -> bool:
    """Whether a provider serves a kind of device."""
    return kind not in HOST_KINDS and kind in accelerator_kinds()


def provider(kind: str) -> type[Accelerator]:
    """The class that serves a kind of device. Raises: DeviceError: the package that adds it cannot be imported."""
    path = PROVIDERS.get(kind) or added("autosplit.providers")[kind]
    module, _, name = path.partition(":")
    try:
        return cast(type[Accelerator], getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as failure:
        raise DeviceError(f"the provider '{path}' of {kind} devices cannot be imported: {failure}; mend its package") from failure


def is_accelerator(device: Device) -> bool:
    """Whether a provider serves this kind of device."""
    return is_served(device.kind)


def absence(name: str) -> str:
    """Why an accelerator (``cuda:0``) cannot be opened on this machine, '' if it can."""
    kind, _, index = name.partition(":")
    served = provider(kind)
    count = served.count()
    if int(index) < count:
        return ""
    seen, remark = f"{count} {kind.upper()} device{'s' * (count != 1)}", served.remark()
    return f"device '{name}' is not here: this machine has {seen}{remark and f' ({remark})'}"


def open_accelerator(device: str) -> Accelerator | None:
    """The accelerator of this name (``cuda:0``), opened in this process, or None for another kind of device.

    Raises: DeviceError: this machine does not have it, or it does not answer.
    """
    kind, _, index = device.partition(":")
    if not is_served(kind):
        return None
    if fault := absence(device):
        raise DeviceError(fault)
    try:
        return provider(kind)(int(index))
    except Exception as failure:
        raise DeviceError(f"device '{device}' cannot be used: {type(failure).__name__}: {failure}{WITHOUT_IT}") from failure


def open_all(_: object, names: Sequence[str], providers: Mapping[str, str]) -> dict[str, Facts]:
    """The facts of these accelerators, each opened in this worker. Raises: DeviceError: one cannot be opened."""
    PROVIDERS.update(providers)
    found = {}
    for name in names:
        kind, _, index = name.partition(":")
        try:
            opened = provider(kind)(int(index))
            found[name] = replace(opened.facts(), calibration_s=calibration_s(opened))
        except Exception as failure:
            raise DeviceError(f"device '{name}' cannot be used: {type(failure).__name__}: {failure}{WITHOUT_IT}") from failure
    return found


def failure_of(accelerator: Accelerator) -> str:
    """Why a device carries out no more work, '' if it does: it is asked with empty work in a queue of its own.

    A request may fail alone, for example of too little memory. After other failures of a driver every further call fails, and
    only a new process may open the device again.
    """
    try:
        queue, done = accelerator.queue(), accelerator.event()
        accelerator.enqueue(queue, lambda: None)
        done.record(queue)
        done.synchronise()
    except Exception as failure:
        return f"{type(failure).__name__}: {one_line(failure)}"
    return ""


def calibration_s(accelerator: Accelerator) -> float:
    """Fastest time of the calibration kernel (matrix products in float32) by events, in seconds."""
    queue = accelerator.queue()
    one, two, result = (
        accelerator.empty(4 * CALIBRATION_SIZE**2).view(torch.float32).view(CALIBRATION_SIZE, CALIBRATION_SIZE) for _ in range(3)
    )

    def fill() -> None:
        one.fill_(0.5)
        two.fill_(0.25)

    def multiply() -> None:
        for _ in range(CALIBRATION_PASSES):
            torch.mm(one, two, out=result)

    accelerator.enqueue(queue, fill)
    return _fastest_s(accelerator, queue, multiply)


def pinned_s_per_byte(accelerator: Accelerator) -> float:
    """Seconds in which the device copies a byte of pinned memory of the host to itself, by events."""
    num_bytes = max(1, min(PINNED_BYTES, accelerator.facts().free_bytes // 4))
    here, there = accelerator.staging(num_bytes), accelerator.empty(num_bytes)

    def copy() -> None:
        there.copy_(here, non_blocking=True)

    return _fastest_s(accelerator, accelerator.queue(), copy) / num_bytes


def _fastest_s(accelerator: Accelerator, queue: Queue, work: Work) -> float:
    """Fastest time of some work by events, in seconds.

    Repeats end when three lie within 2 % of the fastest: an idle device has to raise its clock first.
    """
    start, end, found = accelerator.event(), accelerator.event(), list[float]()
    for _ in range(_REPEATS):
        start.record(queue)
        accelerator.enqueue(queue, work)
        end.record(queue)
        end.synchronise()
        found.append(end.seconds_since(start))
        agreeing = [seconds for seconds in found if seconds <= min(found) * (1 + _AGREEMENT)]
        if len(agreeing) >= _NUM_AGREEING:
            return statistics.median(agreeing)
    return min(found)
