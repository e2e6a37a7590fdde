"""Messages between the host and a worker over the control channel; tensors go through rings instead."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autosplit.running.ring import RingHandle
from autosplit.running.stage import StagePlacement
from autosplit.running.statusblock import StatusBlockHandle
from autosplit.values.machine import Device


@dataclass(frozen=True, slots=True)
class RingPort:
    """A worker's end of a channel: request ``k`` is on ``rings[k % len(rings)]``, which is None if it is another worker's.

    ``index``: for each tensor of the ring, its position in the stage's inputs (or outputs).
    """

    rings: tuple[RingHandle | None, ...]
    index: tuple[int, ...]


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
    """The times of one request in one worker, in monotonic nanoseconds.

    The worker waited from ``asked_ns`` to ``got_ns`` for its inputs, which were complete at ``posted_ns``, ran until
    ``ran_ns``, and had handed over its outputs at ``sent_ns``, after ``blocked_ns`` of waiting for free slots.
    """

    sequence: int
    flag: int
    asked_ns: int
    posted_ns: int
    got_ns: int
    ran_ns: int
    sent_ns: int
    blocked_ns: int
