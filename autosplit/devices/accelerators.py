"""Accelerators: devices with memory and queues of their own, behind one seam that a test can serve without hardware.

What an accelerator does is put in a queue (a CUDA stream) and done later, in the order of the queue; an event marks a place in
it. A provider is a class named by its import path, ``module:Class``, one for each kind of device. The host only counts: it
never opens a device, so it takes none of its memory. Every worker is told the providers with its first message.
"""

import contextlib
import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from autosplit.tables import bytes_text
from autosplit.values.machine import Device

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PROVIDERS: dict[str, str] = {"cuda": "autosplit.devices.cuda:Cuda"}
"""Kind of device to the import path of its provider."""

Work = Callable[[], None]
"""Something for a queue: it leaves its results in tensors that were there before."""

Queue = Any
"""What a provider makes of a queue; only the provider looks inside."""

CANARY_SIZE = 512
CANARY_PASSES = 10
_ROUNDS = 20
_AGREE = 3
_AGREEMENT = 0.02


class Event(Protocol):
    """A place in a queue."""

    def record(self, queue: Queue) -> None:
        """Mark the end of what is in the queue now."""

    def hold(self, queue: Queue) -> None:
        """What is put into ``queue`` from now on begins after this event."""

    def synchronise(self) -> None:
        """Block until all before the mark is done. Raises: RuntimeError: some of it failed."""

    def seconds_since(self, earlier: "Event") -> float:
        """Seconds of the device from one mark to the other; both are done."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What an accelerator is: name, memory, version of its instruction set, driver, runtime, and what its canary takes."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: str
    driver: str
    runtime: str
    canary_s: float = 0.0

    @property
    def identity(self) -> dict[str, str]:
        """What must be the same for a measurement to hold."""
        whole = {key: str(value) for key, value in asdict(self).items()}
        return {key: whole[key] for key in ("name", "capability", "driver", "runtime")}

    def __str__(self) -> str:
        return f"{self.name}, {bytes_text(self.total_bytes)}, compute capability {self.capability}"


class Accelerator(Protocol):
    """One device, opened in a worker by its ordinal."""

    def __init__(self, index: int) -> None:
        """Open it."""

    ONNX_PROVIDER: str
    """The name of ONNX Runtime's execution provider for it."""

    @staticmethod
    def count() -> int:
        """How many of these devices are here; opens none."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""

    def facts(self) -> Facts:
        """What it is, and the memory that is free now."""

    def queue(self) -> Queue:
        """A new queue."""

    def event(self) -> Event:
        """A new event, with times."""

    def enqueue(self, queue: Queue, work: Work) -> None:
        """Put ``work`` into the queue; it may be done before this returns, or any time later."""

    def capture(self, queue: Queue, work: Work) -> Work:
        """``work`` recorded once (a CUDA graph): the same on the same tensors, ready to be enqueued in one go.

        Raises: RuntimeError: some of it cannot be recorded.
        """

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Bytes on the device."""

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Bytes in host memory that the device copies from and to by itself (pinned)."""

    def synchronise(self) -> None:
        """Block until every queue is empty. Raises: RuntimeError: something failed; the device may be lost to this process."""

    def onnx_options(self, queue: Queue) -> Mapping[str, str]:
        """Options of ONNX Runtime's execution provider, so that it works in this queue."""


@contextlib.contextmanager
def substituted(**providers: str) -> Iterator[None]:
    """Serve these kinds of devices by other providers, here and in the workers that are started meanwhile."""
    before = dict(PROVIDERS)
    PROVIDERS.update(providers)
    try:
        yield
    finally:
        PROVIDERS.clear()
        PROVIDERS.update(before)


def provider(kind: str) -> type[Accelerator]:
    """The class that serves a kind of device."""
    module, _, name = PROVIDERS[kind].partition(":")
    return cast(type[Accelerator], getattr(importlib.import_module(module), name))


def is_accelerator(device: Device) -> bool:
    """Whether a device is one."""
    return device.kind in PROVIDERS


def open_accelerator(device: str) -> Accelerator | None:
    """The accelerator of this name (``cuda:0``), opened in this process, or None for another kind of device."""
    kind, _, index = device.partition(":")
    if kind not in PROVIDERS:
        return None
    return provider(kind)(int(index))


def answer_facts(connection: "Connection") -> None:
    """The whole life of a worker that is asked what the named devices are; the answer is a dict of Facts, or an error's text."""
    names, providers = connection.recv()
    PROVIDERS.update(providers)
    try:
        found = {}
        for name in names:
            kind, _, index = name.partition(":")
            opened = provider(kind)(int(index))
            found[name] = replace(opened.facts(), canary_s=canary_s(opened))
        connection.send(found)
    except Exception as failure:
        connection.send(f"{type(failure).__name__}: {failure}")


def canary_s(accelerator: Accelerator) -> float:
    """Seconds of a fixed matrix product in float32 at its fastest, by events: tells whether the device is what it was.

    Rounds go on until three agree within 2 % of the fastest: an idle device first has to raise its clock.
    """
    queue, start, end = accelerator.queue(), accelerator.event(), accelerator.event()
    one, two, result = (
        accelerator.empty(4 * CANARY_SIZE**2).view(torch.float32).view(CANARY_SIZE, CANARY_SIZE) for _ in range(3)
    )

    def fill() -> None:
        one.fill_(0.5)
        two.fill_(0.25)

    def multiply() -> None:
        for _ in range(CANARY_PASSES):
            torch.mm(one, two, out=result)

    accelerator.enqueue(queue, fill)
    found: list[float] = []
    for _ in range(_ROUNDS):
        start.record(queue)
        accelerator.enqueue(queue, multiply)
        end.record(queue)
        end.synchronise()
        found.append(end.seconds_since(start))
        agreeing = [seconds for seconds in found if seconds <= min(found) * (1 + _AGREEMENT)]
        if len(agreeing) >= _AGREE:
            return statistics.median(agreeing)
    return min(found)
