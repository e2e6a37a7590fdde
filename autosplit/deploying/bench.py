"""A bench: plans of one model, loaded side by side and checked, run in turn with many requests in flight or one at a time."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from autosplit.backends.workspace import NUM_DISTINCT, SLOW_S, Workspace
from autosplit.closing import Closing
from autosplit.deploying.checking import blame, threads_of, worst_error
from autosplit.deploying.networks import deploy
from autosplit.deploying.service import Call, Service
from autosplit.deploying.setup import BUDGET, SETUP, Budget, Setup
from autosplit.errors import BackendError, WorkerError
from autosplit.reports.judging import in_turn
from autosplit.reports.outcomes import Outcome
from autosplit.reports.results import LatencyStats, RunStats, StageStats
from autosplit.running.engine import Engine
from autosplit.running.pipeline import Pipeline
from autosplit.running.recording import record
from autosplit.serving.hostmanager import HostManager
from autosplit.tracing.capturing import Traced
from autosplit.tracing.differing import NumericalError
from autosplit.tracing.family import Family
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan

IN_FLIGHT = 12
"""Requests in flight while throughput is measured, or as many as the pipeline works on if these are more."""

NUM_ALONE = 20
"""Most requests sent one at a time in a row, for the latency of an idle pipeline."""

FIRST_S = 0.5
"""Most seconds of single requests sent after loading."""

SETTLE_S = 0.05
"""Seconds that threads of a stage may spin on after its last request; ONNX Runtime's do for 42 ms here."""


@dataclass
class Contender:
    """A plan that is loaded and checked, with its rounds so far.

    Attributes:
        network: its name in the host.
        calls: for each different input, ``submit`` of the service with it: the call that a report recommends.
        fault: the wrong numbers and their backend, as a sentence; empty for right numbers.
        first_s: seconds of single requests just after loading.
        rounds_per_s: items per second of each full round.
        rounds_alone_s: seconds of each request in each round of single requests.
        pace_per_s: items per second in the last full round; before the first one, the throughput if all workers were busy.
    """

    plan: Plan
    network: str
    pipeline: Engine
    calls: Sequence[Call]
    error: NumericalError
    fault: str
    first_s: Sequence[float]
    rounds_per_s: list[float] = field(default_factory=list)
    rounds_alone_s: list[list[float]] = field(default_factory=list)
    pace_per_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.pace_per_s = self.plan.microbatch * self._at_once / self.latency.p50_s

    @property
    def slow(self) -> bool:
        """Whether a single request takes so long that wake-ups do not count."""
        return self.latency.p50_s > SLOW_S

    @property
    def latency(self) -> LatencyStats:
        """Seconds of a single request, from the rounds if there were any."""
        return LatencyStats.of([one_s for alone_s in self.rounds_alone_s for one_s in alone_s] or self.first_s)

    @property
    def alone_s(self) -> tuple[float, ...]:
        """Median seconds of a request in each round of single requests."""
        return tuple(median(alone_s) for alone_s in self.rounds_alone_s)

    def rounds(self, objective: str) -> list[float]:
        """The score of each round: items per second, or for latency single requests per second."""
        return self.rounds_per_s if objective == "throughput" else [1 / alone_s for alone_s in self.alone_s]

    @property
    def in_flight(self) -> int:
        """Requests that are submitted before the answer to the first one is taken.

        Where they take long and stages share devices, two for each device: a window of them runs for minutes in many stages.
        """
        return 2 * self._at_once if self.slow and self._shares else max(IN_FLIGHT, self.pipeline.max_in_flight)

    @property
    def _at_once(self) -> int:
        """Requests that are computed at the same time; stages that share a device take turns."""
        return sum({device: stage.streams for stage in self.plan.stages for device in stage.devices}.values())

    @property
    def _shares(self) -> bool:
        """Whether stages share a device."""
        names = [name for stage in self.plan.stages for name in stage.devices]
        return len(set(names)) < len(names)

    def run(self, num_items: int) -> None:
        """Submit about ``num_items`` with ``in_flight`` requests in flight, and note the throughput while all stages are busy.

        Filling and draining the pipeline are not timed: as many requests as are computed at once run before the timed ones, and
        as many after them. Where a request takes long, none runs after, and before only if there are several stages. Where stages
        share a device, ``in_flight`` run before and after: a stage that works ahead leaves its device to the others later, which
        would make them look faster than they are.
        Replicas that form lanes are timed each until its own last answer, and their throughputs add up: a slow lane still has
        requests when the others have none.
        """
        at_once, calls, in_flight = self._at_once, self.calls, self.in_flight
        count = max(at_once, round(num_items / self.plan.microbatch))
        count += -count % at_once
        before = 0 if self.slow and len(self.plan.stages) == 1 else at_once
        after = 0 if self.slow else at_once
        if self._shares:
            before = after = in_flight if self.slow else self.pipeline.max_in_flight
        total = before + count + after
        begin_ns = time.monotonic_ns()
        send_all(calls, total, in_flight)
        lanes = self.pipeline.made_ns(total)
        per_s = [_per_s([begin_ns, *made_ns], before // len(lanes), after // len(lanes)) for made_ns in lanes]
        self.pace_per_s = self.plan.microbatch * sum(per_s)
        self.rounds_per_s.append(self.pace_per_s)

    def run_alone(self, seconds: float) -> None:
        """Run single requests for about ``seconds``, at least one, and note the seconds of each."""
        self.rounds_alone_s.append(_alone_s(self.plan, self.calls, seconds))

    def restart(self) -> Sequence[StageStats]:
        """Forget the rounds so far. Returns: the work and the memory of the workers until now."""
        self.rounds_per_s.clear()
        self.rounds_alone_s.clear()
        return self.pipeline.stats(clear=True).stages

    def outcome(self) -> Outcome:
        """The measurements so far."""
        stats: RunStats = self.pipeline.stats()
        return Outcome(
            self.plan,
            tuple(self.rounds_per_s),
            self.alone_s,
            self.latency,
            stats.latency,
            outputs_equal=not self.fault,
            max_abs_error=self.error.absolute,
            max_relative_error=self.error.relative,
            stats=stats,
            actions=record(self.pipeline),
            fault=self.fault,
            in_flight=self.in_flight,
        )


class Bench(Closing):
    """Plans of one model loaded side by side; open until ``close``, best used in a ``with`` block.

    Args:
        setup: ``workspace``, where stages are saved and prepared, by default a private one; ``hosts``; and ``max_error``, the
            largest relative error of a plan with stages in a lower precision, None for the tolerance of the precision.
        budget: single requests are sent after loading for half of its ``round_s``, and at most ``FIRST_S``: as many as fit, but
            at least three, or one if it alone takes longer.
    """

    def __init__(self, machine: Machine, setup: Setup = SETUP, budget: Budget = BUDGET) -> None:
        self.machine, self._hosts, self._max_error = machine, setup.hosts, setup.max_error
        self._first_s = min(FIRST_S, budget.round_s / 2)
        self.loaded: dict[str, Contender] = {}
        self._opened = ExitStack()
        self.workspace = setup.workspace or self._opened.enter_context(Workspace())

    @cached_property
    def host(self) -> HostManager:
        """The host of all plans, which others see from the first one on."""
        host = HostManager(engine_factory=Pipeline if self._hosts is None else self._hosts.engine_factory())
        self._opened.callback(host.close, drain=False)
        return host

    def load(self, name: str, plan: Plan, traced: Traced) -> Contender:
        """Start the plan's workers, compare answers with the unsplit model, and measure requests one at a time.

        Args:
            name: for ``run_round`` and ``unload``.
            plan: the plan.
            traced: the model, traced for the plan's microbatch.
        Raises: PlanError, BackendError, WorkerError: the plan cannot be run; StageError: a request failed.
        """
        pipeline = deploy(self.host, name, self._model(plan, traced), plan, self.machine, self.workspace)
        try:
            self.loaded[name] = self._check(plan, name, pipeline, traced)
        except BaseException:
            self.host.remove_network(name, when_busy="fail")
            raise
        return self.loaded[name]

    def unload(self, name: str) -> None:
        """End the workers of a plan."""
        self.host.remove_network(self.loaded.pop(name).network)

    def adopt(self, plans: Mapping[str, Plan]) -> None:
        """Take over those of the named plans that a search has left loaded, with their predictions, and end all other workers."""
        left, self.loaded = {entry.plan.hash: entry for entry in self.loaded.values()}, {}
        for name, plan in plans.items():
            if entry := left.pop(plan.hash, None):
                self.loaded[name], entry.plan = entry, plan
        for entry in left.values():
            self.host.remove_network(entry.network)

    def run_round(self, names: Sequence[str], number: int, num_items: int) -> None:
        """Run each named plan once, in an order that depends on the number of the round.

        The first plan runs ``num_items``; a slower one runs fewer, for about the same time.
        """
        most_per_s = self.loaded[names[0]].pace_per_s
        for name in in_turn(names, number):
            self.loaded[name].run(round(num_items * min(1.0, self.loaded[name].pace_per_s / most_per_s)))
            _settle(self.loaded[name].plan)

    def run_alone(self, names: Sequence[str], number: int, seconds: float) -> None:
        """Send single requests to each named plan for about ``seconds``, in the order of that round."""
        for name in in_turn(names, number):
            self.loaded[name].run_alone(seconds)
            _settle(self.loaded[name].plan)

    def close(self) -> None:
        """End all workers, and remove the files of a private workspace."""
        self._opened.close()
        self.loaded.clear()

    def _model(self, plan: Plan, traced: Traced) -> Traced | Family:
        """The model that the workers of a plan run."""
        return traced

    def _check(self, plan: Plan, network: str, pipeline: Engine, traced: Traced) -> Contender:
        reference = self.workspace.reference(traced, threads_of(plan))
        work = reference.work
        workers = [len(stage.devices) * stage.streams for stage in plan.stages]
        count = max(len(work), 2 * sum(workers) if len(work) == NUM_DISTINCT else max(workers))
        answers = pipeline.run_many([work[k % len(work)] for k in range(count)])
        worst, limit = worst_error(plan, reference, answers)
        if self._max_error is not None and set(plan.precisions) != {"f32"}:
            limit = min(limit, self._max_error)
        fault = "" if worst.relative <= limit else blame(plan, traced, work[0], worst, limit)
        service = Service(traced, pipeline)
        calls = [service.bind_call(inputs) for inputs in work]
        entry = Contender(plan, network, pipeline, calls, worst, fault, _alone_s(plan, calls, self._first_s, least=3))
        pipeline.stats(clear=True)
        return entry


@contextmanager
def bench_of(machine: Machine, setup: Setup, budget: Budget) -> Iterator[Bench]:
    """The bench of the setup, which stays open behind a ``with`` block (a lost worker ends all others), or a private one."""
    if not isinstance(setup.bench, Bench):
        with Bench(machine, setup, budget) as bench:
            yield bench
        return
    try:
        yield setup.bench
    except (BackendError, WorkerError):
        setup.bench.adopt({})
        raise


def _alone_s(plan: Plan, calls: Sequence[Call], seconds: float, least: int = 1) -> list[float]:
    """Seconds of single requests: as many as fit into ``seconds``, and at least ``least`` if the first one fits."""
    num_parts = plan.source.batch // plan.microbatch
    found: list[float] = []
    while len(found) < NUM_ALONE and (len(found) < least or sum(found) < seconds) and (not found or found[0] <= seconds):
        start = time.perf_counter()
        for future in [calls[k % len(calls)]() for k in range(num_parts)]:
            future.result()
        found.append(time.perf_counter() - start)
    return found


def send_all(calls: Sequence[Call], count: int, most: int) -> None:
    """Submit ``count`` requests with ``most`` of them in flight, and wait for all."""
    under_way: deque[Future[Any]] = deque()
    for number in range(count):
        if len(under_way) == most:
            under_way.popleft().result()
        under_way.append(calls[number % len(calls)]())
    for future in under_way:
        future.result()


def _per_s(times_ns: Sequence[int], before: int, after: int) -> float:
    """Answers per second of a lane, without the first ``before`` and the last ``after`` times if at least two others are left."""
    busy_ns = times_ns[before : len(times_ns) - after]
    if len(busy_ns) < 2 or busy_ns[0] == busy_ns[-1]:
        busy_ns = times_ns
    return (len(busy_ns) - 1) * 1e9 / (busy_ns[-1] - busy_ns[0])


def _settle(plan: Plan) -> None:
    """Wait until the threads of this plan leave the cores to the next one."""
    if any(stage.threads > 1 for stage in plan.stages):
        time.sleep(SETTLE_S)
