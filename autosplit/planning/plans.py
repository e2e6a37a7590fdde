"""Plans for a graph on a machine: the planner is asked once for each choice of backends, its answers become Plans."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from autosplit.costs.cost import evaluate, find_faults
from autosplit.costs.problem import Block, Problem, Solution
from autosplit.errors import InfeasibleError
from autosplit.planners.pareto import front_of, pareto, point_of
from autosplit.planners.portfolio import solve
from autosplit.planning.predicting import backend_of_ops, blocks_of, bounded, predicted, problem_from_profile, threads_on
from autosplit.values.constraints import Constraints, Demands
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage
from autosplit.values.profile import Profile

MAX_CHOICES = 9
"""Above so many ways to give each device a backend, all devices get the same one."""

Log = Callable[[str], None]

LEAST_S = 0.3
"""Seconds that the solvers get for a choice of backends at least."""


def plan_model(
    graph: Graph,
    machine: Machine,
    profile: Profile,
    source: Source,
    constraints: Constraints,
    backends: Sequence[str],
    *,
    queue_depth: int = 4,
    microbatch: int | None = None,
    max_threads: int | None = None,
    time_limit_s: float = 10.0,
    seed: int = 0,
    log: Log | None = None,
) -> list[Plan]:
    """The best plan for each choice of backends, the best first; their bound holds for all choices.

    Args:
        graph: the model, traced for ``microbatch`` items.
        machine: devices, memory caps and measured links.
        profile: seconds of each op with each backend on each device.
        source: what the model was made from.
        constraints: what the user demands.
        backends: the backends that a device may run.
        queue_depth: slots of each ring.
        microbatch: items that pass the stages together; by default the whole request.
        max_threads: most threads of a stage; by default one for each core of its device.
        time_limit_s: seconds for all choices of backends together.
        seed: seed of the solvers.
        log: called with a line of the solver's log.
    Raises:
        InfeasibleError: no choice of backends meets the constraints.
        ProfileError: the profile lacks a measurement.
    """
    end_s = time.monotonic() + time_limit_s

    def ask(problem: Problem, demands: Demands, num_left: int) -> Sequence[Solution]:
        left_s = max(LEAST_S, (end_s - time.monotonic()) / num_left)
        return [solve(problem, demands, time_limit_s=left_s, seed=seed, log=log)]

    choices = backend_choices(machine, backends, profile)
    asked = _Asked(graph, machine, profile, source, constraints, queue_depth, microbatch, max_threads)
    return sorted((plan for plan, _, _ in asked.plans(choices, ask)), key=objective_s(constraints))


def plan_front(
    graph: Graph,
    machine: Machine,
    profile: Profile,
    source: Source,
    constraints: Constraints,
    backends: Sequence[str],
    *,
    queue_depth: int = 4,
    microbatch: int | None = None,
    time_limit_s: float = 10.0,
    seed: int = 0,
    log: Log | None = None,
) -> list[tuple[Plan, float]]:
    """Plans of which none is better than another in throughput, latency and peak memory, the best throughput first.

    The arguments are those of ``plan_model``.

    Returns: plans, each with the bytes that its fullest device holds.
    Raises: InfeasibleError, ProfileError: as ``plan_model``.
    """
    choices = backend_choices(machine, backends, profile)

    def ask(problem: Problem, demands: Demands, num_left: int) -> Sequence[Solution]:
        return pareto(problem, demands, time_limit_s=time_limit_s / len(choices), seed=seed, log=log)

    asked = _Asked(graph, machine, profile, source, constraints, queue_depth, microbatch)
    plans = {point_of(problem, solution): plan for plan, problem, solution in asked.plans(choices, ask)}
    return [(plans[point], point.peak_bytes) for point in front_of(list(plans))]


@dataclass(frozen=True)
class _Asked:
    """What is asked of the planner for every choice of backends; the fields are the arguments of ``plan_model``."""

    graph: Graph
    machine: Machine
    profile: Profile
    source: Source
    constraints: Constraints
    queue_depth: int
    microbatch: int | None
    max_threads: int | None = None

    def plans(
        self,
        choices: Sequence[Mapping[str, str]],
        ask: Callable[[Problem, Demands, int], Sequence[Solution]],
    ) -> list[tuple[Plan, Problem, Solution]]:
        """The plans that ``ask`` has for the problems of all choices, with a bound that holds for all.

        ``ask`` takes a problem, the demands on a plan, and how many problems are left with this one.

        Raises: InfeasibleError: no choice meets the constraints.
        """
        self.constraints.verify(self.graph, self.machine)
        found: list[tuple[Plan, Problem, Solution]] = []
        bound_s = inf
        refusal: InfeasibleError | None = None
        for number, choice in enumerate(choices):
            threads = {name: threads_on(self.machine, name, self.max_threads) for name in choice}
            problem = problem_from_profile(self.graph, self.machine, self.profile, self.constraints, choice, threads)
            most_replicas = max(Counter(choice.values()).values())
            demands = replace(self.constraints, max_replicas=min(self.constraints.max_replicas, most_replicas))
            try:
                solutions = ask(problem, demands, len(choices) - number)
            except InfeasibleError as failure:
                refusal, bound_s = failure, bound_s if failure.conflict else 0.0
                continue
            bound_s = min(bound_s, solutions[0].bound_s)
            for solution in solutions:
                try:
                    plan = self._plan(problem, solution, choice, threads)
                except InfeasibleError as failure:
                    refusal = failure
                else:
                    found.append((plan, problem, solution))
        if not found:
            raise refusal or InfeasibleError("no plan was found: no backend is left to run the model on")
        return [(bounded(plan, bound_s), problem, solution) for plan, problem, solution in found]

    def _plan(self, problem: Problem, solution: Solution, choice: Mapping[str, str], threads: Mapping[str, int]) -> Plan:
        """The plan of a solution. Raises InfeasibleError where it breaks a demand that the solver did not see."""
        graph, stages = self.graph, list[Stage]()
        for block in solution.blocks:
            devices = tuple(problem.devices[device] for device in block.devices)
            if len({choice[device] for device in devices}) > 1:
                raise InfeasibleError(
                    f"no plan was found without replicas on both of two backends ({devices}). Allow one replica only."
                )
            takers = backend_of_ops(graph, self.profile, devices[0], choice[devices[0]])
            for ops in graph.runs((problem.ops[op] for op in block.ops), takers):
                least = min(threads[device] for device in devices)
                stages.append(Stage(f"stage{len(stages)}", ops, devices, takers[ops[0]], least))
        plan = Plan(
            source=self.source,
            graph_hash=graph.hash,
            profile_hash=self.profile.hash,
            stages=tuple(stages),
            prediction=UNKNOWN,
            objective=self.constraints.objective,
            method=solution.method,
            status="optimal" if solution.status == "optimal" else "feasible",
            microbatch=self.microbatch or self.source.batch,
            queue_depth=self.queue_depth,
            precision=self.profile.precision,
        )
        blocks = blocks_of(plan, graph, problem)
        return _meeting(predicted(plan, problem, blocks, solution.bound_s), problem, blocks, self.constraints)


def objective_s(constraints: Constraints) -> Callable[[Plan], float]:
    """What a plan is judged by: predicted seconds for an item, or predicted latency."""
    if constraints.objective == "latency":
        return lambda plan: plan.prediction.latency_s
    return lambda plan: plan.prediction.bottleneck_s / plan.microbatch


def backend_choices(machine: Machine, backends: Sequence[str], profile: Profile | None = None) -> list[Mapping[str, str]]:
    """Device name to backend: one backend for all first, then the mixtures, where they are few.

    Where they are many, all devices of a kind get the same one. A profile leaves out what was not measured: a backend may not
    run on a kind of device at all.

    >>> from autosplit.values.machine import parse_device
    >>> [list(c.values()) for c in backend_choices(Machine.of([parse_device("cpu:0"), parse_device("cpu:1")]), ["a", "b"])]
    [['a', 'a'], ['b', 'b'], ['a', 'b'], ['b', 'a']]
    """
    names = [device.name for device in machine.devices]
    kinds = [device.kind for device in machine.devices]
    parts = names if len(backends) ** len(names) <= MAX_CHOICES else list(dict.fromkeys(kinds))
    same = [dict.fromkeys(parts, backend) for backend in backends]
    mixed = [dict(zip(parts, choice, strict=True)) for choice in product(backends, repeat=len(parts)) if len(set(choice)) > 1]
    choices: list[Mapping[str, str]] = [
        {name: by.get(name) or by[kind] for name, kind in zip(names, kinds, strict=True)} for by in [*same, *mixed]
    ]
    if profile is None:
        return choices
    measured = {(setting.device, setting.backend) for setting in profile.measured}
    return [choice for choice in choices if choice.items() <= measured] or choices


def _meeting(plan: Plan, problem: Problem, blocks: Sequence[Block], constraints: Constraints) -> Plan:
    """Return the plan, or raise InfeasibleError where microbatches or stages of a second backend break a demand."""
    widest, shortest_s = max(len(block.devices) for block in blocks), float(evaluate(problem, blocks).stage_s.min())
    faults = find_faults(problem, blocks, contiguous=constraints.contiguous)
    faults = faults or constraints.broken(len(blocks), widest, shortest_s, plan.prediction.latency_s)
    if faults:
        cut = f" in microbatches of {plan.microbatch}" if plan.microbatch < plan.source.batch else ""
        raise InfeasibleError(
            f"no plan was found{cut} that meets all constraints: {faults[0]}. Relax it, or change the backends."
        )
    return plan
