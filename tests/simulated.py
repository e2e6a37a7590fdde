"""An accelerator without hardware: memory of its own behind queues that do nothing until somebody waits for them.

Being as late as the rules allow, it shows every missing wait: what was not waited for is not there yet, and what is
overwritten too early is read too late. Its memory is that of ``simulatedmemory``, which also counts the time: the host's own
work takes none, but work that it enqueues after a wait begins after what it waited for. Tests put it in the place of CUDA by its
import path, here and in workers.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import simulatedmemory
import torch

from autosplit.devices import accelerators, discovering
from autosplit.devices.accelerators import Accelerator, Facts, Work

accelerators.CALIBRATION_SIZE = 64  # a CPU would take long for the work that a GPU does
forget = discovering._facts_of.cache_clear


@dataclass(eq=False)
class Queue(simulatedmemory.Queue):
    """What is to be done, in order."""

    waiting: deque[Work] = field(default_factory=deque)
    memory: simulatedmemory.Memory = field(default_factory=lambda: simulatedmemory.memory_of(0))

    @property
    def running(self) -> bool:
        return self.memory.running is self

    def step(self) -> None:
        work = self.waiting.popleft()
        with self.memory.working(self):
            work()


class Event:
    """The last mark counts; times are those of the moment when the queue came to it."""

    def __init__(self, owner: "Simulated") -> None:
        self.owner = owner
        self.queue = Queue()
        self.marks = self.done = 0
        self.at_s = 0.0

    def record(self, queue: Queue) -> None:
        self.owner.calls["record"] += 1
        self.marks += 1
        mark = self.marks

        def reach() -> None:
            self.done, self.at_s = mark, queue.time_s if self.owner.clock is None else self.owner.clock()

        self.queue = queue
        reach() if queue.running else queue.waiting.append(reach)

    def hold(self, queue: Queue) -> None:
        mark = self.marks

        def wait() -> None:
            self.reach(mark)
            queue.time_s = max(queue.time_s, self.at_s)

        wait() if queue.running else queue.waiting.append(wait)

    def synchronise(self) -> None:
        self.owner.calls["event.synchronise"] += 1
        self.reach(self.marks)
        if self.owner.host_s is not None:
            self.owner.host_s = max(self.owner.host_s, self.at_s)

    def reach(self, mark: int) -> None:
        while self.done < mark:
            self.queue.step()

    def seconds_since(self, earlier: "Event") -> float:
        assert 0 < self.done == self.marks and 0 < earlier.done == earlier.marks, "an event was read before it was waited for"
        return self.at_s - earlier.at_s


class Simulated(Accelerator):
    """A provider with two devices."""

    ONNX_PROVIDER = "CPUExecutionProvider"

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.memory = simulatedmemory.memory_of(index)
        self.calls: Counter[str] = Counter()
        self.queues: list[Queue] = []
        self.host_s: float | None = 0.0
        """The seconds up to which the host has waited; None if that does not count."""
        self.clock: Callable[[], float] | None = None
        """Tells the time of an event in place of its queue."""

    @staticmethod
    def count() -> int:
        return 2

    @property
    def device(self) -> torch.device:
        return torch.device("simulated", self.index)

    def facts(self) -> Facts:
        return Facts("Simulated", self.memory.most_bytes, self.memory.free_bytes, "0.0", "1.0", "none")

    def queue(self) -> Queue:
        self.queues.append(Queue(memory=self.memory))
        return self.queues[-1]

    def event(self) -> Event:
        return Event(self)

    def enqueue(self, queue: Queue, work: Work) -> None:
        self.calls["enqueue"] += 1
        host_s = self.host_s or 0.0

        def begin() -> None:
            queue.time_s = max(queue.time_s, host_s)
            work()

        queue.waiting.append(begin)

    def capture(self, queue: Queue, work: Work) -> Work:
        self.calls["capture"] += 1
        queue.waiting.append(work)
        self.synchronise()
        return work

    def empty(self, num_bytes: int) -> torch.Tensor:
        return simulatedmemory.Held(self.staging(num_bytes), self.index)

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def allow_tf32(self, allow: bool) -> None:
        self.memory.tf32 = allow

    def synchronise(self) -> None:
        self.calls["synchronise"] += 1
        for queue in self.queues:
            while queue.waiting:
                queue.step()

    def restart(self) -> None:
        """Let the host and all queues begin at 0 s with a link that is free."""
        self.synchronise()
        for queue in self.queues:
            queue.time_s = 0.0
        self.host_s, self.memory.copies = 0.0, simulatedmemory.no_copies()
        if self.memory.bus:
            self.memory.bus.used.clear()


class InHostMemory(Simulated):
    """One whose memory is the host's, for compiled runtimes, which read tensors by their address."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def empty(self, num_bytes: int) -> torch.Tensor:
        return self.staging(num_bytes)


class Unrecordable(Simulated):
    """One that records no graphs."""

    def capture(self, queue: Queue, work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing")


class Lost(Simulated):
    """One that does not answer."""

    def facts(self) -> Facts:
        raise RuntimeError("it fell off the bus")


class Vanishing(Simulated):
    """One that falls off the bus for good after 500 requests of three parts of work each; then there is the file ``$GONE``."""

    def __init__(self, index: int = 0) -> None:
        if Path(os.environ["GONE"]).exists():
            raise RuntimeError("no device")
        super().__init__(index)

    def enqueue(self, queue: Queue, work: Work) -> None:
        if self.calls["enqueue"] > 3 * 500:
            Path(os.environ["GONE"]).touch()
            raise RuntimeError("the device fell off the bus")
        super().enqueue(queue, work)


class Absent(Simulated):
    """None here."""

    @staticmethod
    def count() -> int:
        return 0


@contextmanager
def cuda(path: str = "simulated:Simulated") -> Iterator[None]:
    """Devices ``cuda:0`` and ``cuda:1``, here and in workers started meanwhile."""
    forget()
    with patch.dict(accelerators.PROVIDERS, cuda=path):
        yield
    forget()
