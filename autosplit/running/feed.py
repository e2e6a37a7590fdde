"""Feed: the protocol of what runs the requests of an engine; Occupancy: how many requests it holds."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from autosplit.errors import AutosplitError
from autosplit.running.request import AnswerFuture, Request, RequestTimes, Tensors


class Occupancy(NamedTuple):
    """How many requests an engine holds.

    ``num_waiting`` of at most ``room`` are in the admission queue, ``num_held`` wait beside them in memory of their callers,
    ``num_running`` of at most ``window`` are between the first stage and their answer; ``num_answered`` are past it.
    """

    num_waiting: int
    room: int
    num_held: int
    num_running: int
    window: int
    num_answered: int


class Paced(Protocol):
    """How many requests may be in flight, and how many answers to wait for at once, for now."""

    size: int
    num_soon: int


@dataclass(slots=True)
class FixedPace:
    """A window that does not change with the load; answers are waited for one by one."""

    size: int
    num_soon: int = 1


class Feed(Protocol):
    """Runs requests; ``Executor`` for workers, ``LocalExecutor`` for the caller's process, ``HostsFeed`` for several hosts."""

    @property
    def pace(self) -> Paced:
        """How many requests may be in flight."""

    @property
    def failure(self) -> AutosplitError | None:
        """Why every further request is refused, if there is a reason."""

    def submit(self, request: Request, priority: int, timeout_s: float | None) -> AnswerFuture:
        """``enter``, and the future of the answer."""

    def enter(self, request: Request, priority: int = 0, timeout_s: float | None = None) -> None:
        """Take a request in, which waits for room for at most ``timeout_s``. Raises: RefusedError: no room in time, or closed."""

    def result(self, request: Request) -> Tensors:
        """The outputs of a request, once it is answered. Raises: the error with which it failed."""

    def last_times(self) -> list[RequestTimes]:
        """The times of the last requests, the newest last."""

    def occupancy(self) -> Occupancy:
        """How many requests are here."""

    def prompt(self) -> bool:
        """Whether ``submit`` would return soon, so that the thread of an event loop may call it."""

    def check_thread(self) -> None:
        """Raises: UsageError: see ``Answers.check_thread``."""
