"""Engine: the protocol of whatever runs a network: worker processes (``Pipeline``) or the caller's process (``InProcess``)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from autosplit.errors import AutosplitError
from autosplit.reports.results import LatencyStats, RunStats
from autosplit.running.messages import WorkerEvent
from autosplit.running.monitor import BatchCounts, WorkerHealth
from autosplit.running.request import AnswerFuture, Tensors
from autosplit.running.wiring import Wiring


class Engine(Protocol):
    """One network that takes requests until it is closed; ``Pipeline`` documents each member."""

    wiring: Wiring
    batches: BatchCounts

    def submit(
        self,
        inputs: Sequence[torch.Tensor],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        returns: Callable[[Tensors], Any] | None = None,
    ) -> AnswerFuture:
        """Take in one request and return its future; the caller may write to the inputs once this returns."""

    def forward(self, inputs: Sequence[torch.Tensor], *, priority: int = 0, deadline_ns: int = 0) -> AnswerFuture:
        """Take in tensors that will not change any more, whether there is room or not."""

    def run(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """Submit one request and wait for its answer."""

    def run_many(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[Tensors]:
        """The answers to all requests, in their order."""

    def stream(self, requests: Iterable[Sequence[torch.Tensor]]) -> Iterator[Tensors]:
        """The answers to any number of requests, in their order, with few of either in memory at a time."""

    @property
    def pids(self) -> list[int]:
        """The process of each copy of each stage."""

    @property
    def restarts(self) -> int:
        """Workers that died and were started anew so far."""

    @property
    def num_waiting(self) -> int:
        """Requests in the admission queue."""

    @property
    def num_held(self) -> int:
        """Requests that wait in memory of their callers."""

    @property
    def num_running(self) -> int:
        """Requests between the first stage and their answer."""

    @property
    def num_answered(self) -> int:
        """Requests that have their answer."""

    @property
    def window(self) -> int:
        """The most requests between the first stage and their answer, for now."""

    @property
    def room(self) -> int:
        """Requests that may wait in the admission queue."""

    @property
    def num_rows(self) -> int | None:
        """Rows of a request; None without dimensions."""

    @property
    def failure(self) -> AutosplitError | None:
        """Why it takes no more requests, if it does not."""

    def latency(self, last: int = 16_384) -> LatencyStats:
        """Seconds from the first stage to the answer, for the ``last`` requests."""

    def made_ns(self, count: int) -> list[list[int]]:
        """Times at which the last ``count`` requests were computed, ascending, for each lane of replicas."""

    def health(self, network: str = "") -> list[WorkerHealth]:
        """The state and the sums of each copy of each stage."""

    def stats(self, *, clear: bool = False) -> RunStats:
        """Latency and the times of each copy, since the start or since the last call with ``clear``."""

    def events(self, *, clear: bool = False) -> list[list[WorkerEvent]]:
        """The times of the last requests of each copy."""

    def close(self, *, drain: bool = True) -> None:
        """Answer the requests that were taken in (``drain``) or fail them, then end."""

    def check_thread(self) -> None:
        """Raises: UsageError: this is a callback of an answer, which must not wait for the engine, nor close it."""
