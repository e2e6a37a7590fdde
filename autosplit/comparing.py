"""Several plans loaded at once and run in interleaved rounds, so that drift of the machine cancels; outputs are checked."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import fx

from autosplit.backends.base import NumericalError, check, compare, exact_on, get_backend, tolerance
from autosplit.backends.lowering import lower_to_bf16
from autosplit.deploying import Workspace, deploy
from autosplit.errors import AutosplitError, BackendError
from autosplit.machine import Machine
from autosplit.plan import Plan
from autosplit.results import LatencyStats, RunStats
from autosplit.running.host import HostManager
from autosplit.running.pipeline import Pipeline
from autosplit.running.recording import record
from autosplit.runreport import PLAN, Outcome, RunReport, judge
from autosplit.splitting import split
from autosplit.tracing import Traced

NUM_DISTINCT = 4
"""Different inputs that are sent in turn, so that answers in the wrong order are seen."""

NUM_ALONE = 20
"""Requests sent one at a time for the latency of an idle pipeline, or as many as fit into ``ALONE_S``."""

ALONE_S = 1.0

MOST_BESIDE = 5
"""Simple ways that run beside the plan in all rounds; where there are more, short runs say which."""

SCREEN_S = 0.2

ROUND_S = 2.0
"""Each way runs for about so long in a round where no number of requests is asked for."""

Progress = Callable[[float, str], None]
Observe = Callable[[HostManager], None]
Microbatch = tuple[torch.Tensor, ...]


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
    def _workers(self) -> int:
        """Requests that are worked on at once."""
        return sum(len(stage.devices) * stage.streams for stage in self.plan.stages)

    def run(self, num_items: int) -> None:
        """Run about so many items and note the throughput while all stages are busy.

        Filling and draining the pipeline are left out: for each request at work one runs before the clock and one after it.
        """
        workers = self._workers
        count = max(2 * len(self.microbatches), round(num_items / self.plan.microbatch))
        count += -count % workers
        self.pipeline.run_many([self.microbatches[k % len(self.microbatches)] for k in range(count + 2 * workers)])
        answered = self.pipeline.answered_ns(count + workers + 1)[:-workers]
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
        for name in order if number % 2 == 0 else reversed(order):
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
        work = distinct_inputs(traced.example_inputs)
        expected = _expected(traced, work, plan)
        answers = pipeline.run_many([work[k % len(work)] for k in range(2 * len(work))])
        names = traced.graph.outputs
        errors = [compare(names, answer, expected[k % len(work)]) for k, answer in enumerate(answers)]
        worst = max(errors, key=lambda error: error.relative)
        limit = _limit(plan, traced, work, expected)
        fault = "" if worst.relative <= limit else _blame(plan, traced, work[0], worst, limit)
        per_request = plan.source.batch // plan.microbatch
        alone_s: list[float] = []
        while len(alone_s) < NUM_ALONE and (len(alone_s) < 3 or sum(alone_s) < ALONE_S):
            start = time.perf_counter()
            pipeline.run_many([work[k % len(work)] for k in range(per_request)])
            alone_s.append(time.perf_counter() - start)
        pipeline.stats(clear=True)
        return Loaded(plan, pipeline, work, worst, fault, LatencyStats.of(alone_s))


def _expected(traced: Traced, work: Sequence[Microbatch], plan: Plan) -> list[Microbatch]:
    """What the unsplit model gives in eager, each op with the threads of its stage: their number can change the bits."""
    unsplit = _Threaded(traced, {op: stage.threads for stage in plan.stages for op in stage.ops})
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            return [tuple(unsplit.run(*inputs)) for inputs in work]
    finally:
        torch.set_num_threads(before)


def _limit(plan: Plan, traced: Traced, work: Sequence[Microbatch], expected: Sequence[Microbatch]) -> float:
    """The largest relative error that the plan's outputs may have: 0 where every stage is exact."""
    if plan.precision == "f32":
        exact = (exact_on(get_backend(stage.backend), name, "f32") for stage in plan.stages for name in stage.devices)
        return 0.0 if all(exact) else tolerance("f32")
    [program] = split(traced, [[op.name for op in traced.graph.ops]])
    lowered = lower_to_bf16(program).module
    with torch.inference_mode():
        errors = [compare(traced.graph.outputs, lowered(*inputs), right) for inputs, right in zip(work, expected, strict=True)]
    return tolerance(plan.precision, max(errors, key=lambda error: error.relative))


def _blame(plan: Plan, traced: Traced, inputs: Microbatch, error: NumericalError, limit: float) -> str:
    """What is wrong with a plan's numbers: the first stage whose backend is wrong when it is given right ones."""
    values = dict(zip(traced.graph.inputs, inputs, strict=True))
    for stage, program in zip(plan.stages, split(traced, [stage.ops for stage in plan.stages]), strict=True):
        given = [values[spec.name] for spec in program.inputs]
        try:
            check(get_backend(stage.backend), program, given, precision=plan.precision, threads=stage.threads)
        except BackendError as failure:
            return str(failure)
        with torch.inference_mode():
            values |= zip((spec.name for spec in program.outputs), program.module(*given), strict=True)
    backends = ", ".join(dict.fromkeys(stage.backend for stage in plan.stages))
    return (
        f"the outputs of {len(plan.stages)} stages ({backends}, {plan.precision}) differ from f32 eager: '{error.output}' is "
        f"off by {error.relative:.3g} of the largest value, and the tolerance is {limit:.3g}; no stage alone is wrong"
    )


class _Threaded(fx.Interpreter):
    """Runs the unsplit program op by op, with a number of threads for each."""

    def __init__(self, traced: Traced, threads: Mapping[str, int]) -> None:
        super().__init__(traced.program)
        self._threads = threads

    def run_node(self, n: fx.Node) -> object:
        wanted = self._threads.get(n.name)
        if wanted is not None and wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)
        return super().run_node(n)


class _Contest:
    """Which simple ways stay in the arena beside the plan: the MOST_BESIDE best ones in short runs."""

    def __init__(self, arena: Arena, objective: str, keep: str) -> None:
        self._arena = arena
        self._objective = objective
        self._keep = keep
        self._times_plan: dict[str, float] = {}

    def admit(self, name: str) -> dict[str, str]:
        """Run a way that was loaded beside the plan; unload the worst if they are too many, and say why."""
        plan, entry = self._arena.loaded[PLAN], self._arena.loaded[name]
        if self._objective == "latency":
            self._times_plan[name] = plan.latency.p50_s / entry.latency.p50_s
        else:
            num_items = round(min(1e6, SCREEN_S * plan.plan.microbatch / plan.latency.p50_s))
            self._arena.run_round([PLAN, name], 0, num_items)
            self._times_plan[name] = entry.rounds_per_s[-1] / plan.rounds_per_s[-1]
        if len(self._times_plan) <= MOST_BESIDE:
            return {}
        worst = min((other for other in self._times_plan if other != self._keep), key=self._times_plan.__getitem__)
        self._arena.unload(worst)
        return {worst: f"a short run was {self._times_plan.pop(worst):.2f} times as good as the plan's"}


def run_report(
    traced: Traced,
    plan: Plan,
    simple: Mapping[str, Plan],
    machine: Machine,
    *,
    objective: str = "throughput",
    forced: bool = False,
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
        objective: ``throughput`` or ``latency``.
        forced: whether the user asked for a plan of this shape.
        keep: the simple way that runs in all rounds however slow it is.
        left_out: ways that were ruled out before, with the reason, for the report.
        num_requests: requests of the plan, over all rounds; slower ways get as long. By default about ``ROUND_S`` a round.
        num_rounds: rounds; each runs every plan once.
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
        contest = _Contest(arena, objective, keep) if len(simple) > MOST_BESIDE else None
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
                arena.load(name, candidate, traced)
            except AutosplitError as failure:
                if name == PLAN:
                    raise
                reasons[name] = str(failure)
                continue
            if contest is not None and name != PLAN:
                reasons |= contest.admit(name)
        for entry in arena.loaded.values():
            entry.restart()
        if num_requests is None:
            num_items = round(ROUND_S * arena.loaded[PLAN].pace_per_s)
        else:
            num_items = plan.source.batch * num_requests // num_rounds
        for number in range(num_rounds):
            tell(0.4 + 0.6 * number / num_rounds, f"round {number + 1} of {num_rounds}")
            arena.run_round(list(arena.loaded), number, num_items)
        outcomes = {name: entry.outcome() for name, entry in arena.loaded.items()}
    outcomes |= {name: outcomes[twin] for name, twin in same_as.items() if twin in outcomes}
    reasons |= {name: reasons[twin] for name, twin in same_as.items() if twin in reasons}
    reasons |= {name: outcome.fault for name, outcome in outcomes.items() if outcome.fault}
    chosen, sentence = judge(outcomes, objective, forced)
    if restarts := sum(outcome.stats.restarts for outcome in outcomes.values()):
        sentence += f" Workers that died and were started anew, their requests run again: {restarts}."
    tell(1.0, "done")
    return RunReport(traced.graph.name, plan.source.batch, outcomes, chosen, sentence, reasons)


def distinct_inputs(example: Sequence[torch.Tensor], count: int = NUM_DISTINCT, seed: int = 0) -> list[Microbatch]:
    """Inputs like the example, all different where that is possible: floats are disturbed, integers change places."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(example), *(tuple(_another(tensor, generator) for tensor in example) for _ in range(count - 1))]


def _another(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if tensor.is_floating_point():
        return copy.copy_(tensor + 0.1 * torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype))
    order = torch.randperm(tensor.numel(), generator=generator)
    return copy.copy_(tensor.reshape(-1)[order].reshape(tensor.shape))
