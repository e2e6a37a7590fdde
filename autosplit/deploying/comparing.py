"""Several plans loaded at once and run in interleaved rounds, so that drift of the machine cancels; outputs are checked."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType

from autosplit.backends.base import NumericalError, compare
from autosplit.deploying.checking import NUM_DISTINCT, SLOW_S, Microbatch, Reference, blame, is_exact, limit_of
from autosplit.deploying.workspace import Workspace, deploy
from autosplit.errors import AutosplitError
from autosplit.reports.results import LatencyStats, RunStats
from autosplit.reports.runreport import PLAN, Outcome, RunReport, Unfit, judge, still_running
from autosplit.running.host import HostManager
from autosplit.running.pipeline import Pipeline
from autosplit.running.recording import record
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan

NUM_ALONE = 20
"""Requests sent one at a time for the latency of an idle pipeline, or as many as fit into ``ALONE_S``, but three."""

ALONE_S = 0.5

MOST_BESIDE = 4
"""Simple ways that run beside the plan and the way to keep in all rounds; where there are more, short runs say which."""

SCREEN_S = 0.2

ROUND_S = 2.0
"""Each way runs for about so long in a round where no number of requests is asked for."""

Progress = Callable[[float, str], None]
Observe = Callable[[HostManager], None]


@dataclass
class Loaded:
    """A plan that is loaded and was checked, and the throughput of its rounds so far, in items per second.

    ``fault`` says what is wrong with its numbers, and in which backend; it is empty where nothing is. ``pace_per_s`` is the
    throughput of the last round, and before any what it would be if all workers were busy.
    """

    plan: Plan
    pipeline: Pipeline
    microbatches: Sequence[Microbatch]
    error: NumericalError
    fault: str
    latency: LatencyStats
    rounds_per_s: list[float] = field(default_factory=list)
    pace_per_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.pace_per_s = self.plan.microbatch * self._workers / self.latency.p50_s

    @property
    def slow(self) -> bool:
        """Whether a request alone takes so long that its wake-ups do not count."""
        return self.latency.p50_s > SLOW_S

    @property
    def _workers(self) -> int:
        """Requests that are worked on at once."""
        return sum(len(stage.devices) * stage.streams for stage in self.plan.stages)

    @property
    def _shares(self) -> bool:
        """Whether stages share a device."""
        names = [name for stage in self.plan.stages for name in stage.devices]
        return len(set(names)) < len(names)

    def run(self, num_items: int) -> None:
        """Run about so many items and note the throughput while all stages are busy.

        Filling and draining the pipeline are left out: for each request at work one runs before the clock and one after it.
        Where requests take long, none runs after it, and before it only if there are several stages, which do not begin together.
        Where stages share a device, as many as may be in flight run before it and after it: a stage that works ahead leaves the
        device to the others later, so that they would be seen faster than they can go on.
        """
        workers, work = self._workers, self.microbatches
        count = max(workers, round(num_items / self.plan.microbatch))
        count += -count % workers
        before = 0 if self.slow and len(self.plan.stages) == 1 else workers
        after = 0 if self.slow else workers
        if self._shares:
            before = after = self.pipeline.window
        total = before + count + after
        begin_ns = time.monotonic_ns()
        self.pipeline.run_many([work[k % len(work)] for k in range(total)])
        answered = [begin_ns, *self.pipeline.answered_ns(total)][before : total + 1 - after]
        seconds = (answered[-1] - answered[0]) / 1e9
        self.pace_per_s = (len(answered) - 1) * self.plan.microbatch / seconds
        self.rounds_per_s.append(self.pace_per_s)

    def restart(self) -> None:
        """Forget the rounds so far."""
        self.rounds_per_s.clear()
        self.pipeline.stats(clear=True)

    def outcome(self) -> Outcome:
        """What was measured until now."""
        stats: RunStats = self.pipeline.stats()
        rounds = tuple(self.rounds_per_s)
        return Outcome(
            self.plan,
            rounds,
            self.latency,
            stats.latency,
            outputs_equal=not self.fault,
            max_abs_error=self.error.absolute,
            max_relative_error=self.error.relative,
            stats=stats,
            actions=record(self.pipeline),
            fault=self.fault,
        )


class Arena:
    """Plans of one model, loaded side by side; open until ``close``, best used in a ``with`` block.

    Args:
        machine: the devices.
        workspace: where stages are saved and prepared, to be shared with others; by default one that ends with the arena.
    """

    def __init__(self, machine: Machine, workspace: Workspace | None = None) -> None:
        self.machine = machine
        self.loaded: dict[str, Loaded] = {}
        self.host = HostManager()
        self._workspace = workspace or Workspace()
        self._owns_workspace = workspace is None
        self._references: list[Reference] = []

    def load(self, name: str, plan: Plan, traced: Traced) -> Loaded:
        """Start the plan's workers, compare answers with the unsplit model, and measure requests one at a time.

        Args:
            name: for ``run_round`` and ``unload``.
            plan: the plan.
            traced: the model, traced for the plan's microbatch.
        Raises: PlanError, BackendError, WorkerError: the plan cannot be run; StageError: a request failed.
        """
        pipeline = deploy(self.host, name, traced, plan, self.machine, self._workspace)
        try:
            self.loaded[name] = self._check(plan, pipeline, traced)
        except BaseException:
            self.host.remove_network(name, when_busy="fail")
            raise
        return self.loaded[name]

    def unload(self, name: str) -> None:
        """End the workers of a plan."""
        del self.loaded[name]
        self.host.remove_network(name)

    def run_round(self, names: Sequence[str], number: int, num_items: int) -> None:
        """Run each named plan once; the order depends on the number of the round, so that none always follows the same.

        The first one runs so many items, those that are slower run about as long as it does.
        """
        most_per_s = self.loaded[names[0]].pace_per_s
        turn = number % len(names)
        order = [*names[turn:], *names[:turn]]
        # Of two, turning alone swaps them.
        for name in order if number % 2 == 0 or len(order) == 2 else reversed(order):
            self.loaded[name].run(round(num_items * min(1.0, self.loaded[name].pace_per_s / most_per_s)))

    def close(self) -> None:
        """End all workers and remove all files of its own."""
        with ExitStack() as stack:
            if self._owns_workspace:
                stack.callback(self._workspace.close)
            stack.callback(self.host.close, drain=False)
        self.loaded.clear()

    def __enter__(self) -> "Arena":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check(self, plan: Plan, pipeline: Pipeline, traced: Traced) -> Loaded:
        reference = self._reference(plan, traced)
        work, expected = reference.work, reference.expected
        passes = 2 if len(work) == NUM_DISTINCT else 1
        count = max(len(work), passes * sum(len(stage.devices) * stage.streams for stage in plan.stages))
        answers = pipeline.run_many([work[k % len(work)] for k in range(count)])
        names = traced.graph.outputs
        errors = [compare(names, answer, expected[k % len(work)]) for k, answer in enumerate(answers)]
        worst = max(errors, key=lambda error: error.relative)
        limit = limit_of(plan, traced, work, expected)
        fault = "" if worst.relative <= limit else blame(plan, traced, work[0], worst, limit)
        per_request = plan.source.batch // plan.microbatch
        alone_s: list[float] = []
        while len(alone_s) < NUM_ALONE and (len(alone_s) < 3 or sum(alone_s) < ALONE_S):
            start = time.perf_counter()
            pipeline.run_many([work[k % len(work)] for k in range(per_request)])
            alone_s.append(time.perf_counter() - start)
            if alone_s[0] > ALONE_S:
                break
        pipeline.stats(clear=True)
        return Loaded(plan, pipeline, work, worst, fault, LatencyStats.of(alone_s))

    def _reference(self, plan: Plan, traced: Traced) -> Reference:
        """What the unsplit model gives in eager; plans whose stages are not exact share one."""
        threads = {op: stage.threads for stage in plan.stages for op in stage.ops} if is_exact(plan) else {}
        found = next((one for one in self._references if one.traced is traced and one.threads == threads), None)
        if found is None:
            found = Reference.of(traced, threads)
            self._references.append(found)
        return found


class _Contest:
    """Which of some simple ways stay in the arena beside the plan: the MOST_BESIDE best ones in short runs."""

    def __init__(self, arena: Arena, num_ways: int, objective: str, keep: str) -> None:
        self._arena = arena
        self._num_ways = num_ways
        self._objective = objective
        self._keep = keep
        self._times_plan: dict[str, float] = {}

    def admit(self, name: str) -> dict[str, str]:
        """Run a way that was loaded beside the plan; unload the worst if they are too many, and say why."""
        plan, entry = self._arena.loaded[PLAN], self._arena.loaded[name]
        if self._num_ways <= MOST_BESIDE:
            return {}
        if self._objective == "latency":
            self._times_plan[name] = plan.latency.p50_s / entry.latency.p50_s
        else:
            if not plan.slow:  # else the requests alone have taken long enough to tell
                num_items = round(min(1e6, SCREEN_S * plan.plan.microbatch / plan.latency.p50_s))
                self._arena.run_round([PLAN, name], 0, num_items)
            self._times_plan[name] = entry.pace_per_s / plan.pace_per_s
        rivals = [other for other in self._times_plan if other != self._keep]
        if len(rivals) <= MOST_BESIDE:
            return {}
        worst = min(rivals, key=self._times_plan.__getitem__)
        self._arena.unload(worst)
        return {worst: f"a short run was {self._times_plan.pop(worst):.2f} times as good as the plan's"}


def run_report(
    traced: Traced,
    plan: Plan,
    simple: Mapping[str, Plan],
    machine: Machine,
    *,
    whole: Traced | None = None,
    objective: str = "throughput",
    forced: bool = False,
    unfit: Unfit = lambda way, s: "",
    keep: str = "",
    left_out: Mapping[str, str] | None = None,
    num_requests: int | None = None,
    num_rounds: int = 5,
    workspace: Workspace | None = None,
    progress: Progress | None = None,
    observe: Observe | None = None,
) -> RunReport:
    """Run the plan and the simple ways in the same rounds, and say which one to use.

    Args:
        traced: the model, traced for the plan's microbatch.
        plan: the plan.
        simple: the simple ways by name; the report names those that cannot be loaded or give wrong numbers, with the reason.
        machine: the devices.
        whole: the model traced for whole requests, where the plan cuts them and some simple ways do not.
        objective: ``throughput`` or ``latency``.
        forced: whether the plan is to be used in any case.
        unfit: why a simple way must not become the plan, or ''.
        keep: the simple way that runs in all rounds however slow it is, or in one where requests of the plan take long.
        left_out: ways that were ruled out before, with the reason, for the report.
        num_requests: requests of the plan, over all rounds; slower ways get as long. By default about ``ROUND_S`` a round.
        num_rounds: rounds; each runs every plan once that is not far behind. The fastest ones may run some more.
        workspace: as for ``Arena``.
        progress: called with the share done and what is being done.
        observe: called once with the host on which all of them run, to look at it meanwhile.
    Raises: PlanError, BackendError, WorkerError: the plan itself cannot be run; StageError: a request failed.
    """
    tell = progress or (lambda share, text: None)
    same_as: dict[str, str] = {}
    reasons = dict(left_out or {})
    with Arena(machine, workspace) as arena:
        if observe is not None:
            observe(arena.host)
        contest = _Contest(arena, len(simple), objective, keep)
        ways: dict[str, Plan] = {}
        for name, candidate in {PLAN: plan, **simple}.items():
            twin = next((other for other, way in ways.items() if way.hash == candidate.hash), None)
            if twin is None:
                ways[name] = candidate
            else:
                same_as[name] = twin
        for number, (name, candidate) in enumerate(ways.items()):
            tell(0.4 * number / len(ways), f"loading '{name}'")
            try:
                arena.load(name, candidate, traced if candidate.microbatch == plan.microbatch else whole or traced)
            except AutosplitError as failure:
                if name == PLAN:
                    raise
                reasons[name] = str(failure)
                continue
            if name != PLAN:
                reasons |= contest.admit(name)
        for entry in arena.loaded.values():
            entry.restart()
        if num_requests is None:
            num_items = round(ROUND_S * arena.loaded[PLAN].pace_per_s)
        else:
            num_items = plan.source.batch * num_requests // num_rounds
        decide = objective == "throughput" and not forced
        kept = {PLAN} if arena.loaded[PLAN].slow else {PLAN, keep}
        barred = {name for name, e in arena.loaded.items() if name != PLAN and unfit(e.plan, e.latency.p50_s)}
        _run_rounds(arena, num_rounds, num_items, kept, barred, decide, lambda share, text: tell(0.4 + 0.6 * share, text))
        outcomes = {name: entry.outcome() for name, entry in arena.loaded.items()}
    outcomes |= {name: outcomes[twin] for name, twin in same_as.items() if twin in outcomes}
    reasons |= {name: reasons[twin] for name, twin in same_as.items() if twin in reasons}
    reasons |= {name: outcome.fault for name, outcome in outcomes.items() if outcome.fault}
    chosen, sentence = judge(outcomes, objective, forced, unfit)
    if restarts := sum(outcome.stats.restarts for outcome in outcomes.values()):
        sentence += f" Workers that died and were started anew, their requests run again: {restarts}."
    tell(1.0, "done")
    return RunReport(traced.graph.name, plan.source.batch, outcomes, chosen, sentence, reasons)


def _run_rounds(
    arena: Arena, num_rounds: int, num_items: int, keep: Collection[str], barred: Collection[str], decide: bool, tell: Progress
) -> None:
    """All ways in ``num_rounds`` rounds; the turns of those that stop early go to the fastest ones, to ``decide`` between them.

    So successive halving shares out its budget (Karnin, Koren and Somekh, 2013). A way with wrong numbers runs once. One that
    is ``barred`` from being chosen runs on where it is fast, but none stops for being slower than it.
    """
    rates = {name: entry.rounds_per_s for name, entry in arena.loaded.items()}
    right = {name for name, entry in arena.loaded.items() if name in keep or not entry.fault}
    running, turns = list(rates), num_rounds * len(rates)
    for number in range(2 * num_rounds if decide else num_rounds):
        if number >= num_rounds and (len(running) == 1 or turns < len(running)):
            return
        tell(min(number / num_rounds, 1.0), f"round {number + 1} of {max(num_rounds, number + 1)}")
        arena.run_round(running, number, num_items)
        turns -= len(running)
        beside = keep if number + 1 < num_rounds else ()
        here = {name: rates[name] for name in running if name in right}
        fit = still_running({name: per_s for name, per_s in here.items() if name not in barred}, beside)
        fast = still_running(here, beside) if beside else []
        running = [name for name in here if name in fit or (name in barred and name in fast)]
