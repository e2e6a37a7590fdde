"""Messages between the host and a worker over the control channel; tensors go through rings instead."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from autosplit.memory.lives import aligned
from autosplit.running.ring import RingHandle, create_shared, map_shared
from autosplit.running.stage import StagePlacement
from autosplit.running.statusblock import StatusBlockHandle
from autosplit.tracing.tensorspec import TensorSpec, storage_bytes
from autosplit.values.machine import Device


@dataclass(frozen=True, slots=True)
class RingPort:
    """A worker's end of a channel: request ``k`` is on ``rings[k % len(rings)]``, which is None if it is another worker's.

    ``index``: for each tensor of the ring, its position in the stage's inputs (or outputs).
    """

    rings: tuple[RingHandle | None, ...]
    index: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StatesHandle:
    """The states of a replica (see ``splitting``) in memory of the host, which a new worker finds as a dead one left it."""

    fd: int
    specs: tuple[TensorSpec, ...]

    @staticmethod
    def create(specs: Sequence[TensorSpec]) -> "StatesHandle":
        """New memory of zeros. Raises: OSError: no more descriptors."""
        return StatesHandle(create_shared(sum(aligned(storage_bytes(spec)) for spec in specs)), tuple(specs))

    @property
    def num_bytes(self) -> int:
        """Bytes of all states, also of parts that were never written."""
        return sum(aligned(storage_bytes(spec)) for spec in self.specs)

    def open(self) -> dict[str, torch.Tensor]:
        """The bytes of each state by its name."""
        found, end = dict[str, torch.Tensor](), 0
        memory = map_shared(self.fd, self.num_bytes)
        for spec in self.specs:
            start, end = end, end + aligned(storage_bytes(spec))
            found[spec.name] = memory[start:end]
        return found


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The first message to a worker: its stage, which replica of it, and its rings."""

    stage: StagePlacement
    replica: int
    sources: tuple[RingPort, ...]
    sinks: tuple[RingPort, ...]
    status_block: StatusBlockHandle
    number: int
    spin_s: float
    states: StatesHandle | None = None
    providers: Mapping[str, str] = field(default_factory=dict)
    """Import path of the provider of each kind of accelerator (``accelerators.PROVIDERS`` of the host)."""

    @property
    def device(self) -> Device:
        """The device of the replica."""
        return self.stage.devices[self.replica]


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's answer once its stage is loaded and warm.

    ``before_bytes`` is its anonymous memory before it loaded the stage, most of it shared with the fork server. ``note`` is a
    remark of the stage, for example on a fallback.
    """

    before_bytes: int
    load_s: float
    note: str = ""


class WorkerEvent(NamedTuple):
    """The times of request ``number`` in one worker, in monotonic nanoseconds.

    The worker waited from ``asked_ns`` to ``got_ns`` for its inputs, which were complete at ``posted_ns``, ran until
    ``ran_ns``, and had handed over its outputs at ``sent_ns``, after ``blocked_ns`` of waiting for free slots.
    """

    number: int
    flag: int
    asked_ns: int
    posted_ns: int
    got_ns: int
    ran_ns: int
    sent_ns: int
    blocked_ns: int
