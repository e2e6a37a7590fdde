"""What the host and a worker say to each other over the control channel; tensors never go this way."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autosplit.running.modules import Module
from autosplit.running.ring import RingHandle
from autosplit.running.statusblock import StatusBlockHandle


@dataclass(frozen=True, slots=True)
class RingPort:
    """A worker's end of a channel: request ``k`` is on ``rings[k % len(rings)]``, or on none of this worker's.

    ``index``: for each tensor of the ring, its position among the stage's inputs (or outputs).
    """

    rings: tuple[RingHandle | None, ...]
    index: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Version:
    """A module, and the first request that runs on it."""

    first: int
    module: Module


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The first message to a worker: what to load, which requests to take, where from and where to.

    There is more than one of ``versions`` while requests from before a swap may have to be replayed.
    """

    stage: str
    device: str
    versions: tuple[Version, ...]
    num_inputs: int
    num_outputs: int
    threads: int
    replica: int
    num_replicas: int
    sources: tuple[RingPort, ...]
    sinks: tuple[RingPort, ...]
    status_block: StatusBlockHandle
    number: int
    spin_s: float
    in_order: bool = True
    """False lets a worker take the most urgent of the requests that lie ready for it."""
    providers: Mapping[str, str] = field(default_factory=dict)
    """Who serves the kinds of accelerators (``accelerators.PROVIDERS`` of the host)."""

    @property
    def module(self) -> Module:
        """The version for new requests."""
        return self.versions[-1].module


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's answer once its stage is loaded and warm; ``note`` says what could not be done as it should."""

    resident_before_bytes: int
    resident_after_bytes: int
    load_s: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker's answer when it could not do what it was told."""

    text: str


@dataclass(frozen=True, slots=True)
class Run:
    """Take requests, the first of them not before number ``first``."""

    first: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Touch no ring until told to run again; answered with Paused."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The worker touches no ring now."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load this module beside the present one; answered with Loaded or Failed."""

    module: Module


@dataclass(frozen=True, slots=True)
class Loaded:
    """The module of the last Load is ready."""


@dataclass(frozen=True, slots=True)
class Use:
    """From request ``first`` on use the module that was loaded last; answered with Using."""

    first: int


@dataclass(frozen=True, slots=True)
class Using:
    """The worker will switch."""


@dataclass(frozen=True, slots=True)
class Report:
    """Send what was measured (answered with Events); ``clear`` forgets it then."""

    clear: bool = False


class Event(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class Events:
    """One row for each of the last requests, with the fields of an Event."""

    rows: tuple[tuple[int, ...], ...]
