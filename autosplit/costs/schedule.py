"""Schedule: a discrete-event simulation of stages, queues, replicas and links. No torch.

The simulation follows the rules of the runtime. The host hands requests to the first stages in order, and takes results in order.
Between two stages there is a ring of slots for each pair of their replicas. A worker waits until every input of its next
request is there, copies them in and computes, which frees their slots, then copies its outputs out, one connection after
the other, each into a free slot. Stages on one device use it in turns; a worker that waits does not hold it.

    stage0   0 1 2 3 . .      three stages of one tick each, four requests:
    stage1   . 0 1 2 3 .      the first request fills the pipeline, then
    stage2   . . 0 1 2 3      one leaves each tick

If each stage has a device of its own and enough slots, a closed form gives the seconds too: the first request passes every
stage, then the slowest stage sets the pace. There is none for skip connections, shared devices, short queues and random arrivals.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autosplit import tables
from autosplit.costs.simulation import LinkOf, SimStage, Simulation, StageTimes, free_link
from autosplit.costs.wires import NO_WIRES, Wires
from autosplit.errors import UsageError, raise_faults
from autosplit.values.machine import HOST
from autosplit.values.plan import QUEUE_DEPTH
from autosplit.values.timeline import Action, grid


def chain(seconds: Sequence[float], num_bytes: float = 0.0) -> tuple[SimStage, ...]:
    """Stages in a row, each on a device of its own, that hand one value of ``num_bytes`` of each request to the next one."""
    last = len(seconds) - 1
    return tuple(
        SimStage(
            f"stage{i}",
            (f"null:{i}",),
            (float(value),),
            {f"stage{i - 1}" if i else HOST: (num_bytes,)},
            (num_bytes,) if i == last else None,
        )
        for i, value in enumerate(seconds)
    )


def poisson_arrivals(rate_per_s: float, num_requests: int, seed: int = 0) -> tuple[float, ...]:
    """Arrival times, in seconds, of requests that come independently of each other at a mean rate; the first one is at 0.

    Raises: UsageError: the rate is not positive.
    """
    if not rate_per_s > 0:
        raise UsageError(f"rate_per_s must be positive, but is {rate_per_s}")
    source = random.Random(seed)
    times = [0.0]
    for _ in range(num_requests - 1):
        times.append(times[-1] + source.expovariate(rate_per_s))
    return tuple(times[:num_requests])


@dataclass(frozen=True)
class Schedule(tables.Tabular):
    """The result of a simulation.

    Attributes:
        actions: the actions of every stage replica, by start.
        started_s: for each request, when it came (given arrivals) or was let in (closed loop).
        finished_s: for each request, when the host had all of its result.
        times: the time of each stage replica, by use.
    """

    INDEX = "stage"
    actions: tuple[Action, ...]
    started_s: tuple[float, ...]
    finished_s: tuple[float, ...]
    times: tuple[StageTimes, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first request to the last result."""
        return self.finished_s[-1] - self.started_s[0]

    @property
    def throughput_per_s(self) -> float:
        """Requests a second over the whole makespan, filling and draining included."""
        return len(self.finished_s) / self.makespan_s if self.makespan_s else math.inf

    @property
    def steady_per_s(self) -> float:
        """Requests a second while the pipeline is full: over the second half of the results until the last request began.

        After that the first stages are idle, and no longer use shared resources such as a bus.
        """
        last = bisect_right(self.finished_s, self.started_s[-1]) - 1
        last = last if last > 1 else len(self.finished_s) - 1
        half = last // 2
        span = self.finished_s[last] - self.finished_s[half]
        return (last - half) / span if span > 0 else self.throughput_per_s

    @cached_property
    def latencies_s(self) -> tuple[float, ...]:
        """Seconds from start to finish of each request."""
        return tuple(finish - start for start, finish in zip(self.started_s, self.finished_s, strict=True))

    def latency_s(self, quantile: float) -> float:
        """The latency that this share of the requests did not exceed, in seconds.

        Raises: UsageError: ``quantile`` is not between 0 and 1.
        """
        if not 0 <= quantile <= 1:
            raise UsageError(f"quantile must be between 0 and 1 inclusive, but is {quantile}")
        ordered = sorted(self.latencies_s)
        return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]

    @cached_property
    def device_busy_s(self) -> dict[str, float]:
        """Device name to the seconds that it was held."""
        busy: dict[str, float] = {}
        for times in self.times:
            busy[times.device] = busy.get(times.device, 0.0) + times.busy_s
        return busy

    @property
    def bubble(self) -> float:
        """The idle share of all device time within the makespan, 0 to 1."""
        total = self.makespan_s * len(self.device_busy_s)
        return 1 - sum(self.device_busy_s.values()) / total if total else 0.0

    def text(self, tick_s: float | None = None) -> str:
        """The schedule as a table: see ``timeline.grid``."""
        return grid(self.actions, tick_s)

    def rows(self) -> list[dict[str, Any]]:
        """One row a stage replica."""
        return [{**times._asdict(), "busy": times.busy_s / self.makespan_s if self.makespan_s else 0.0} for times in self.times]

    def summary(self) -> str:
        """One sentence: throughput, latency, idle share."""
        p50, p99 = (tables.seconds_text(self.latency_s(q)) for q in (0.5, 0.99))
        rate = f"{tables.number_text(self.steady_per_s)} requests/s once full"
        return f"{len(self.finished_s)} requests simulated: {rate}, latency p50 {p50}, p99 {p99}, bubble {self.bubble:.1%}"

    def _repr_html_(self) -> str:
        return tables.html(self.rows(), self.summary())

    def __repr__(self) -> str:
        return f"Schedule({self.summary()})"


def simulate(
    stages: Sequence[SimStage],
    num_requests: int,
    *,
    link: LinkOf = free_link,
    slots: int = QUEUE_DEPTH,
    arrivals_s: Sequence[float] | None = None,
    microbatches: int = 1,
    delays_s: Mapping[tuple[str, str], float] | None = None,
    wires: Wires = NO_WIRES,
) -> Schedule:
    """Run requests through stages in simulated time.

    Args:
        stages: in topological order.
        num_requests: requests, at least 1.
        link: the link between two devices by name; ``host`` stands for the host.
        slots: slots of each ring, at least 1.
        arrivals_s: when each request comes, ascending; None for a closed loop, where the next one is always there.
        microbatches: the microbatches of a request; they come together, pass the stages one by one, and a request is
            finished with its last one. Bytes and seconds of the stages are those of one microbatch.
        delays_s: (stage, stage that reads it) to the seconds that values are on the way in addition to those of the link;
            ``host`` stands for the host.
        wires: network cards and uplinks between hosts.
    Returns: the schedule; ``request`` in its actions counts microbatches.
    Raises: UsageError: every fault of the arguments.

    >>> print(simulate(chain([1, 1, 1]), 4).text())
    stage0.0 | 0 1 2 3 . .
    stage1.0 | . 0 1 2 3 .
    stage2.0 | . . 0 1 2 3

    The middle stage twice, requests in turns: the bottleneck of 2 s becomes one of 1 s.

    >>> first, middle, last = chain([1, 2, 1])
    >>> twice = SimStage("stage1", ("null:1", "null:3"), (2.0, 2.0), middle.sources)
    >>> print(simulate([first, twice, last], 4).text())
    stage0.0 | 0 1 2 3 . . .
    stage1.0 | . 0 0 2 2 . .
    stage1.1 | . . 1 1 3 3 .
    stage2.0 | . . . 0 1 2 3
    """
    _verify(stages, num_requests, slots, arrivals_s, microbatches)
    units = num_requests * microbatches
    come = [time for time in arrivals_s for _ in range(microbatches)] if arrivals_s is not None else [0.0] * units
    simulation = Simulation(stages, units, link, slots, come, delays_s or {}, wires)
    simulation.run()
    started = tuple(arrivals_s) if arrivals_s is not None else tuple(simulation.admitted_s[::microbatches])
    finished = tuple(simulation.finished_s[microbatches - 1 :: microbatches])
    actions = tuple(sorted(simulation.actions, key=lambda action: action.start_s))
    return Schedule(actions, started, finished, tuple(simulation.times()))


def _verify(
    stages: Sequence[SimStage],
    num_requests: int,
    slots: int,
    arrivals_s: Sequence[float] | None,
    microbatches: int,
) -> None:
    counts = {"num_requests": num_requests, "slots": slots, "microbatches": microbatches}
    faults = [f"{name} must be at least 1, but is {count}" for name, count in counts.items() if count < 1]
    known = {HOST}
    for stage in stages:
        if stage.name in known:
            faults.append(f"a stage is named '{stage.name}', and so is another one or the host")
        if not stage.devices or len(stage.seconds) != len(stage.devices) or len(stage.moved_s) not in (0, len(stage.devices)):
            faults.append(
                f"stage '{stage.name}' has {len(stage.devices)} devices and {len(stage.seconds)} times; give one for each"
            )
        durations = (*stage.seconds, *stage.moved_s)
        faults += [f"stage '{stage.name}' takes {s} s; give a duration" for s in durations if not 0 <= s < math.inf]
        faults += [
            f"stage '{stage.name}' reads '{name}', which is not an earlier stage" for name in stage.sources if name not in known
        ]
        faults += [] if stage.sources else [f"stage '{stage.name}' reads nothing, not even the host"]
        known.add(stage.name)
    faults += [] if stages else ["there are no stages"]
    if arrivals_s is not None:
        if len(arrivals_s) != num_requests:
            faults.append(f"{num_requests} requests have {len(arrivals_s)} arrival times")
        if list(arrivals_s) != sorted(arrivals_s) or any(not 0 <= time < math.inf for time in arrivals_s):
            faults.append("arrival times must be ascending, finite and not negative")
    raise_faults(UsageError, "the schedule cannot be simulated", faults)
