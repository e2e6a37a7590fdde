"""Transport: the protocol of what carries requests to the stages and their results back, below one ``Admission``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from autosplit.reports.results import StageStats
from autosplit.running.messages import WorkerEvent
from autosplit.running.monitor import WorkerHealth
from autosplit.running.request import Request
from autosplit.running.wiring import Wiring

if TYPE_CHECKING:
    from autosplit.running.admission import Admission
    from autosplit.running.turns import Turns


class Paced(Protocol):
    """The most requests in flight, and the number of answers to collect at once, for now."""

    size: int
    batch_to_collect: int


@dataclass(slots=True)
class FixedPace:
    """A pace that does not change with the load; answers are collected one by one."""

    size: int
    batch_to_collect: int = 1


class Transport(Protocol):
    """Rings between workers (``RingTransport``), the caller's process (``CallerTransport``) or hosts (``HostsTransport``).

    The admission calls ``has_room``, ``hold``, ``send`` and ``cancel`` with its lock held, so they never wait.

    """

    @property
    def turns(self) -> "Turns | None":
        """Computes requests in the threads of their callers, if the transport has no thread of its own."""

    @property
    def wiring(self) -> Wiring:
        """The stages."""

    @property
    def pace(self) -> Paced:
        """The most requests in flight."""

    @property
    def restarts(self) -> int:
        """Workers that were started anew so far."""

    @property
    def pids(self) -> list[int]:
        """The process of each copy of each stage."""

    def start(self, admission: "Admission") -> None:
        """Take requests, and settle them with this admission. Raises: BackendError: a stage could not be loaded."""

    def has_room(self) -> bool:
        """Whether one more request may be sent now."""

    def hold(self, request: Request, *, is_soonest: bool) -> None:
        """Copy the inputs of a request that waits, unless its caller keeps them. ``is_soonest``: no deadline comes earlier."""

    def send(self, request: Request) -> None:
        """Hand a numbered request to the first stages."""

    def cancel(self, request: Request) -> None:
        """Let the stages skip a request, if they have it."""

    def health(self, network: str) -> list[WorkerHealth]:
        """The state and the sums of each copy of each stage."""

    def stats(self, *, clear: bool) -> tuple[Sequence[StageStats], int]:
        """The work of each copy of each stage, and how many workers were started anew."""

    def events(self, *, clear: bool) -> list[list[WorkerEvent]]:
        """The times of the last requests of each copy."""

    def close(self, *, patiently: bool) -> None:
        """Fail requests without an answer, and end the stages; a second call does nothing. ``patiently``: in good order."""
