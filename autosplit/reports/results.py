"""Results of a run: latency, and how each worker spent its time. No torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, quantiles
from typing import Any

from autosplit import tables


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Mean, quantiles and maximum of durations in seconds; all 0 if there are none."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float

    @staticmethod
    def of(samples_s: Sequence[float]) -> "LatencyStats":
        """Sum up samples; quantiles are interpolated between the two nearest.

        >>> LatencyStats.of([0.1, 0.2, 0.3]).p50_s
        0.2
        """
        if not samples_s:
            return LatencyStats(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        if len(samples_s) == 1:
            return LatencyStats(1, *[samples_s[0]] * 5)
        cuts = quantiles(samples_s, n=100, method="inclusive")
        return LatencyStats(len(samples_s), fmean(samples_s), cuts[49], cuts[89], cuts[98], max(samples_s))


@dataclass(frozen=True, slots=True)
class StageStats:
    """The times and the memory of one worker (a replica of a stage).

    Attributes:
        num_requests: requests whose outputs it made, since the pipeline was started. ``num_failed`` requests failed in this
            stage or before it; ``num_skipped`` were cancelled or late there.
        busy: time of running the stage.
        wait: time without a request, or without a free slot for the outputs.
        transfer: time of copying outputs into rings.
        queue: time of requests in the rings before the worker took them.
        base_bytes: memory that the worker was forked with and has written to, so that it has copies of its own.
        held_bytes: most data beyond that: weights, values, memory of its backend, its states in full; rings are left out.
        resident_bytes: physical memory that the worker maps now, shared pages included.
        load_s: seconds of loading and warming up.
        proportional_bytes: physical memory of the worker now; pages that several processes map are divided among them.
        note: a failed optimisation of the worker, such as recording a stage on a GPU as one graph.
    """

    stage: str
    device: str
    replica: int
    backend: str
    threads: int
    num_requests: int
    num_failed: int
    num_skipped: int
    busy: LatencyStats
    wait: LatencyStats
    transfer: LatencyStats
    queue: LatencyStats
    base_bytes: int
    held_bytes: int
    resident_bytes: int
    load_s: float
    note: str = ""
    proportional_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RunStats(tables.Tabular):
    """The measurements of a pipeline: its requests (the last 16,384 at most) and its workers.

    ``latency`` is the time from the first stage to the answer, ``waiting`` the time in the admission queue before that.
    ``restarts`` counts workers that were started again.
    """

    num_requests: int
    elapsed_s: float
    latency: LatencyStats
    waiting: LatencyStats
    stages: tuple[StageStats, ...]
    restarts: int

    @property
    def bottleneck_s(self) -> float:
        """The largest share of a request's time that any stage is busy: its median over the number of its replicas."""
        replicas = [stage.stage for stage in self.stages]
        return max((stage.busy.p50_s / replicas.count(stage.stage) for stage in self.stages), default=0.0)

    def rows(self) -> list[dict[str, Any]]:
        """One row a worker; times are medians."""
        return [
            {
                "stage": stage.stage,
                "device": stage.device,
                "backend": stage.backend,
                "requests": stage.num_requests,
                "busy_s": stage.busy.p50_s,
                "wait_s": stage.wait.p50_s,
                "transfer_s": stage.transfer.p50_s,
                "queue_s": stage.queue.p50_s,
                "base_bytes": stage.base_bytes,
                "held_bytes": stage.held_bytes,
                "resident_bytes": stage.resident_bytes,
                "proportional_bytes": stage.proportional_bytes,
            }
            for stage in self.stages
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """Requests, their median latency, and restarts of workers, in words."""
        latency = f"median latency {tables.seconds_text(self.latency.p50_s)}"
        return f"{self.num_requests} request{'s' * (self.num_requests != 1)}, {latency}, restarts: {self.restarts}"

    def __repr__(self) -> str:
        return f"RunStats({self.summary()})"

    def _repr_html_(self) -> str:
        return tables.html(self.rows(), self.summary())
