"""Plans for a graph on a machine: the planner is asked about choices of core sets and backends, its answers become Plans.

If devices have cores in common, each layout of the machine is a question of its own; the bound holds for all layouts.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from math import inf
from operator import itemgetter

from autosplit.costs.cost import CLOSED, evaluate
from autosplit.costs.faults import find_faults
from autosplit.costs.pieces import latency_s
from autosplit.costs.problem import Block, Problem, Solution
from autosplit.errors import InfeasibleError
from autosplit.planners.pareto import pareto
from autosplit.planners.portfolio import TINY_PLACES, quick_bound, solve
from autosplit.planning.backends import MAX_CHOICES, MAX_PROVING, Backends, backend_choices, backends_of
from autosplit.planning.predicting import bounded, predicted
from autosplit.values.constraints import Constraints, Demands
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import QUEUE_DEPTH, UNKNOWN, Plan, Source, Stage
from autosplit.values.profile import Profile

Log = Callable[[str], None]

LEAST_S = 0.3
"""Least seconds for one call of the solvers."""

RELAXED_SHARE = 0.3
"""Share of the time for the problem with each op at its cheapest backend; its bound is the only one that holds for all plans."""

MAX_LISTED = 2000
"""Most plans that ``every_plan`` lists."""

Ask = Callable[[Problem, Demands, float, float], Sequence[Solution]]
"""A function from a problem, demands, the seconds for the answer and the best bottleneck so far to the answers, best first."""


@dataclass(frozen=True, slots=True)
class Query:
    """A question to the planner, for any machine and any backends.

    Attributes:
        graph: the model, traced for ``microbatch`` items.
        profile: seconds of each op with each backend on each device.
        source: the spec and the batch of the model.
        constraints: the user's demands.
        queue_depth: slots of each ring.
        microbatch: items that pass the stages together; None for the whole request.
        max_threads: most threads of a stage; None for one for each core of its device.
        time_limit_s: seconds for all choices of backends together.
        seed: seed of the solvers.
        log: called with a line of the solver's log.
    """

    graph: Graph
    profile: Profile
    source: Source
    constraints: Constraints = field(default_factory=Constraints)
    queue_depth: int = QUEUE_DEPTH
    microbatch: int | None = None
    max_threads: int | None = None
    time_limit_s: float = 10.0
    seed: int = 0
    log: Log | None = None


def plan_model(query: Query, machine: Machine, backends: Sequence[str]) -> Plan:
    """The best plan that is found, with a bound that holds for every mixture of backends. Caps count weights alone.

    A mixture gives each stage a backend; stages of several backends on one device follow each other. The plan is optimal if
    it meets the bound. If the number of stages is limited, each device has one backend.

    Args:
        query: the model, its times and the demands.
        machine: devices, memory caps and measured links.
        backends: the backends that a device may run.
    Raises:
        InfeasibleError: no choice of backends meets the constraints.
        ProfileError: the profile lacks a measurement.
    """

    def ask(problem: Problem, demands: Demands, left_s: float, best_s: float) -> Sequence[Solution]:
        if best_s < inf and demands.objective == "throughput" and quick_bound(problem, demands)[0] >= best_s:
            return []
        return [solve(problem, demands, time_limit_s=left_s, seed=query.seed, log=query.log)]

    return min(_plans(query, machine, backends, ask), key=objective_s(query.constraints))


def plan_front(query: Query, machine: Machine, backends: Sequence[str]) -> list[Plan]:
    """Plans of the fronts of throughput, latency and weights on the fullest device, for all choices of backends.

    Arguments and errors are those of ``plan_model``.
    """

    def ask(problem: Problem, demands: Demands, left_s: float, best_s: float) -> Sequence[Solution]:
        return pareto(problem, demands, time_limit_s=left_s, seed=query.seed, log=query.log)

    return _plans(query, machine, backends, ask, every=True)


def every_plan(query: Query, machine: Machine, backends: Sequence[str]) -> Iterator[Plan]:
    """Every plan whose stages are runs of ops in graph order on devices of their own, best first; nothing if there are too many.

    Arguments are those of ``plan_model``; at most ``MAX_LISTED`` plans are listed.
    """
    constraints = query.constraints.verify(query.graph, machine)
    score_s = latency_s if constraints.objective == "latency" else lambda problem, blocks: evaluate(problem, blocks).bottleneck_s
    listed = list[tuple[float, Backends, list[Block]]]()
    for layout in machine.layouts:
        own = backends_of(query.graph, layout, query.profile, constraints, backends, query.max_threads)
        for blocks in islice(own.every_chain(), MAX_LISTED + 1):
            listed.append((score_s(own.problem, blocks), own, blocks))
        if len(listed) > MAX_LISTED:
            return
    for score, own, blocks in sorted(listed, key=itemgetter(0)):
        if score < inf:
            with suppress(InfeasibleError):  # a demand is broken
                yield _plan(query, own, Solution(tuple(blocks), score, 0.0, "feasible", "every chain of stages", 0.0, ()), blocks)


def least_s(query: Query, machine: Machine, backends: Sequence[str]) -> float:
    """A bound in seconds on all plans for a query, without a search; arguments and errors as for ``plan_model``."""
    constraints = query.constraints.verify(query.graph, machine)
    asked = (
        backends_of(query.graph, layout, query.profile, constraints, backends, query.max_threads) for layout in machine.layouts
    )
    return min(quick_bound(*own.relaxed())[0] for own in asked)


def _plans(query: Query, machine: Machine, backends: Sequence[str], ask: Ask, every: bool = False) -> list[Plan]:
    """The plans on all layouts of a machine, with a bound that holds for all of them.

    Raises: InfeasibleError: no layout has a plan that meets the constraints.
    """
    deadline = time.monotonic() + query.time_limit_s
    constraints = query.constraints.verify(query.graph, machine)
    found: list[Plan] = []
    bound_s = single_s = best_s = inf
    refusals = []
    for number, layout in enumerate(machine.layouts):
        own = backends_of(query.graph, layout, query.profile, constraints, backends, query.max_threads)
        most = MAX_PROVING if own.alone else MAX_CHOICES
        now = time.monotonic()
        end = now + max(0.0, deadline - now) / (len(machine.layouts) - number)
        choices = backend_choices(layout, backends, query.profile, most)
        question = _Question(query, own, choices, ask, end, inf if every else best_s)
        try:
            bounds_s = question.ask_all(every)
        except InfeasibleError as failure:
            refusals.append(failure)
            bounds_s = (inf, inf) if failure.conflict else (quick_bound(*own.relaxed())[0], 0.0)
        if question.found and not every:
            for kept in (kept for count in range(len(backends) - 1, 1, -1) for kept in combinations(backends, count)):
                question.ask_with_fewer(kept, backend_choices(layout, kept, query.profile, most), bounds_s[0])
        bound_s, single_s = min(bound_s, bounds_s[0]), min(single_s, bounds_s[1])
        found += question.found
        best_s = min((plan.prediction.bottleneck_s for plan in found), default=inf)
    if not found:
        raise next((failure for failure in refusals if not failure.conflict), refusals[0])
    return [_proved(bounded(plan, bound_s), single_s) for plan in found]


@dataclass
class _Question:
    """One question to the planner on one layout, and the plans found so far.

    ``known_s`` is the bottleneck of a plan on another layout; if no plan here can beat it, none is looked for.
    """

    query: Query
    backends: Backends
    choices: list[Mapping[str, str]]
    ask: Ask
    deadline: float
    known_s: float
    found: list[Plan] = field(default_factory=list)
    refusal: InfeasibleError | None = None

    @property
    def best(self) -> Plan | None:
        """The best plan so far."""
        return min(self.found, key=objective_s(self.backends.constraints), default=None)

    def ask_all(self, every: bool) -> tuple[float, float]:
        """Find plans.

        First each op may have its cheapest backend: that bounds all plans. If no plan meets the bound, the planner is asked with
        one backend on each device, for the choices of the best plans first. Choices that are not listed are tried only if a
        best plan suggests them.

        Args:
            every: ask for every choice, even if the best plan meets the bound.
        Returns: a bound on all plans, and a bound on plans with one backend on each device, in seconds; 0 where unknown.
        Raises: InfeasibleError: no plan meets the constraints.
        """
        several = any(len(group) > 1 for group in self.backends.groups)
        bound_s, single_s = self._add(*self.backends.relaxed(), RELAXED_SHARE) if several else 0.0, inf
        if self.refusal is not None and self.refusal.conflict:
            raise self.refusal
        waiting, tried = list(self.choices), list[Mapping[str, str]]()
        while waiting and (every or not self._meets(bound_s)) and not (self.found and self._is_late()):
            if (
                len(tried) < max(MAX_CHOICES, len(self.choices))
                and (choice := self._suggested()) is not None
                and choice not in tried
            ):
                waiting = [choice, *(other for other in waiting if other != choice)]
            tried.append(waiting.pop(0))
            single_s = min(single_s, self._add(*self.backends.with_one_each(tried[-1]), 1 / (1 + len(waiting))))
        if not self.found and (self.refusal is not None or self.known_s == inf):
            raise self.refusal or InfeasibleError("no plan was found: no backend is left to run the model on")
        complete = len(tried) == self.backends.num_choices
        if complete and (self.backends.alone or not several):
            bound_s = max(bound_s, single_s)
        if self.best is not None:  # a bound above a plan says nothing
            bound_s = bounded(self.best, bound_s).prediction.bound_s
        return bound_s, single_s if complete else 0.0

    def ask_with_fewer(self, kept: Sequence[str], choices: list[Mapping[str, str]], bound_s: float) -> None:
        """Find the plans that fewer backends give, unless the best plan meets the bound. So no backend worsens an answer.

        What one backend gives alone is known: it is a choice of ``ask_all``.
        """
        own = self.backends.only(kept)
        if all(own.groups) and not self._meets(bound_s) and not self._is_late():
            fewer = replace(self, backends=own, choices=choices, found=[], refusal=None)
            with suppress(InfeasibleError):
                fewer.ask_all(every=False)
            self.found += fewer.found

    def _is_late(self) -> bool:
        """Whether the time is up. Tiny problems have all the time that they need."""
        num_places = self.backends.problem.num_ops * len(self.backends.groups)
        return num_places > TINY_PLACES and time.monotonic() >= self.deadline

    def _meets(self, bound_s: float) -> bool:
        return self.best is not None and bounded(self.best, bound_s).prediction.gap <= CLOSED

    def _suggested(self) -> Mapping[str, str] | None:
        """The backend that runs most ops of the best plan on each device, or anywhere if the plan leaves the device out."""
        if self.best is None:
            return None
        main = Counter(stage.backend for stage in self.best.stages for _ in stage.ops)
        there = Counter((name, stage.backend) for stage in self.best.stages for name in stage.devices for _ in stage.ops)
        listed = {device: {choice[device] for choice in self.choices} for device in self.backends.devices}
        return {name: max(known, key=lambda b: (there[name, b], main[b], b)) for name, known in listed.items()}

    def _add(self, problem: Problem, demands: Demands, share: float) -> float:
        """Add the plans of the planner's answers. Returns: a bound in seconds on all plans but the best one so far."""
        best_s = self.best.prediction.bottleneck_s if self.best else self.known_s
        left_s = max(LEAST_S, share * (self.deadline - time.monotonic()))
        try:
            solutions = self.ask(problem, demands, left_s, best_s)
        except InfeasibleError as failure:
            self.refusal = failure
            return inf if failure.conflict else quick_bound(problem, demands)[0]
        rows = [(solution, blocks) for solution in solutions for blocks in self.backends.rows(solution.blocks)]
        if solutions and not rows and demands.max_replicas > 1:  # replicas are on devices without a backend in common
            return min(solutions[0].bound_s, self._add(problem, replace(demands, max_replicas=1), share))
        for solution, blocks in rows:
            try:
                self.found.append(_plan(self.query, self.backends, solution, blocks))
            except InfeasibleError as failure:
                self.refusal = failure
        return solutions[0].bound_s if solutions else best_s


def _plan(query: Query, there: Backends, solution: Solution, blocks: Sequence[Block]) -> Plan:
    """The plan of blocks on backends. Raises: InfeasibleError: it breaks a demand that the solver did not see."""
    problem, stages = there.problem, []
    for number, block in enumerate(blocks):
        settings = [there.settings[device] for device in block.devices]
        ops, devices = (tuple(problem.ops[op] for op in block.ops), tuple(setting.device for setting in settings))
        threads = min(setting.threads for setting in settings)
        stages.append(Stage(f"stage{number}", ops, devices, settings[0].backend, threads))
    plan = Plan(
        source=query.source,
        graph_hash=there.graph.hash,
        profile_hash=query.profile.hash,
        stages=tuple(stages),
        prediction=UNKNOWN,
        objective=there.constraints.objective,
        method=solution.method,
        status="shared" if solution.status == "shared" else "feasible",
        microbatch=query.microbatch or query.source.batch,
        queue_depth=query.queue_depth,
        precision=query.profile.precision,
    )
    return _meeting(predicted(plan, problem, blocks, there.settings, 0.0), problem, blocks, there.constraints)


def objective_s(constraints: Constraints) -> Callable[[Plan], float]:
    """The function that judges a plan: its predicted seconds for an item, or its predicted latency."""
    if constraints.objective == "latency":
        return lambda plan: plan.prediction.latency_s
    return lambda plan: plan.prediction.bottleneck_s / plan.microbatch


def _proved(plan: Plan, single_s: float) -> Plan:
    """The plan. Its method says if the proof covers only plans with one backend on each device."""
    if plan.status == "optimal" or bounded(plan, single_s).status != "optimal":
        return plan
    return replace(plan, method=f"{plan.method}, no better plan with one backend on each device")


def _meeting(plan: Plan, problem: Problem, blocks: Sequence[Block], constraints: Constraints) -> Plan:
    """Return the plan, or raise InfeasibleError if microbatches or stages of a second backend break a demand."""
    widest, shortest_s = max(len(block.devices) for block in blocks), float(evaluate(problem, blocks).stage_s.min())
    faults = find_faults(problem, blocks, contiguous=constraints.contiguous)
    faults = faults or constraints.broken(len(blocks), widest, shortest_s, plan.prediction.latency_s)
    if faults:
        cut = f" in microbatches of {plan.microbatch}" if plan.microbatch < plan.source.batch else ""
        raise InfeasibleError(
            f"no plan was found{cut} that meets all constraints: {faults[0]}. Relax it, or change the backends."
        )
    return plan
