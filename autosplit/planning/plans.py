"""Plans for a graph on a machine: the planner is asked once for each choice of backends, its answers become Plans."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from autosplit.costs.cost import CLOSED, TOLERANCE, evaluate, latency_s, moves_s
from autosplit.costs.problem import Block, Problem, Solution, problem_from
from autosplit.errors import InfeasibleError
from autosplit.planners.objective import demand_faults
from autosplit.planners.pareto import front_of, pareto, point_of
from autosplit.planners.portfolio import solve
from autosplit.planning.charging import charge
from autosplit.values.constraints import Constraints, Demands, matching_ops
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import UNKNOWN, Plan, Prediction, Source, Stage
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
            problem = _problem(self.graph, self.machine, self.profile, self.constraints, choice, threads)
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
            takers = _takers(graph, self.profile, devices[0], choice[devices[0]])
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
        blocks = _blocks(plan, graph, problem)
        return _meeting(_predicted(plan, problem, blocks, solution.bound_s), problem, blocks, self.constraints)


def objective_s(constraints: Constraints) -> Callable[[Plan], float]:
    """What a plan is judged by: predicted seconds for an item, or predicted latency."""
    if constraints.objective == "latency":
        return lambda plan: plan.prediction.latency_s
    return lambda plan: plan.prediction.bottleneck_s / plan.microbatch


def bounded(plan: Plan, bound_s: float) -> Plan:
    """The plan with what is proved of all plans that were asked for; nothing where it is better, and so none of these.

    That may be less than what was proved of plans with its own choice of backends.
    """
    objective = plan.prediction.latency_s if plan.objective == "latency" else plan.prediction.bottleneck_s
    proved_s = min(bound_s, objective) if bound_s <= objective * (1 + CLOSED) else 0.0
    gap = 1 - proved_s / objective if objective > 0 else 0.0
    status = "feasible" if plan.status == "optimal" and gap > CLOSED else plan.status
    return replace(plan, prediction=replace(plan.prediction, bound_s=proved_s, gap=gap), status=status)


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


def threads_on(machine: Machine, device: str, most: int | None = None) -> int:
    """The threads of a stage on a device: one for each core, but not more than ``most``."""
    cores = max(1, len(machine[device].cores))
    return cores if most is None else min(cores, most)


def predict(plan: Plan, graph: Graph, machine: Machine, profile: Profile, bound_s: float = 0.0) -> Plan:
    """The same plan with the loads and the prediction that this profile gives it.

    Args:
        plan: any plan; its own stages count most, where they were measured.
        graph: the model, traced for the plan's microbatch.
        machine: the devices that the plan names.
        profile: seconds of the ops there.
        bound_s: what was proved for this profile: no plan is better.
    Raises: ProfileError: the profile lacks a measurement that the plan needs.
    """
    profile = profile.with_newest((stage.ops, setting) for stage, setting in plan.workers)
    problem = _problem(graph, machine, profile, Constraints(), *_chosen(plan), plan.stages)
    return _predicted(plan, problem, _blocks(plan, graph, problem), bound_s)


def problem_of(
    plan: Plan, graph: Graph, machine: Machine, profile: Profile, constraints: Constraints
) -> tuple[Problem, list[Block]]:
    """The problem that a plan answers, with the backends and threads that it chose, and its stages as blocks of that.

    A device that the plan does not use gets the backend that most of its stages have, where the profile has it there.

    Raises: ProfileError: the profile lacks a measurement that the plan needs.
    """
    choice, threads = _chosen(plan)
    main = Counter(choice.values()).most_common(1)[0][0]
    measured = {(setting.device, setting.backend) for setting in profile.measured}
    choice |= {d.name: main for d in machine.devices if d.name not in choice and (d.name, main) in measured}
    threads |= {name: threads_on(machine, name) for name in choice if name not in threads}
    problem = _problem(graph, machine, profile, constraints, choice, threads, plan.stages)
    return problem, _blocks(plan, graph, problem)


def _chosen(plan: Plan) -> tuple[dict[str, str], dict[str, int]]:
    """The backend and the threads of each device that a plan uses; of several stages there, those of the one with most ops."""
    stages = sorted(plan.stages, key=lambda stage: len(stage.ops))
    choice = {device: stage.backend for stage in stages for device in stage.devices}
    return choice, {device: stage.threads for stage in stages for device in stage.devices}


def _takers(graph: Graph, profile: Profile, device: str, backend: str) -> dict[str, str]:
    """Op name to the backend that runs it on a device: the one chosen, or the first measured there that takes what it refuses."""
    others = dict.fromkeys(setting.backend for setting in profile.measured if setting.device == device)
    refused = {name: profile.measured[profile.setting(device, name)].refused for name in [backend, *others]}
    return {op.name: next((name for name in refused if op.name not in refused[name]), backend) for op in graph.ops}


def moved_s(plan: Plan, graph: Graph, machine: Machine, profile: Profile) -> list[float]:
    """Seconds of a request that each worker of a plan is predicted to send and receive, in the order of stages and devices.

    Raises: ProfileError: the profile lacks a measurement that the plan needs.
    """
    problem, blocks = problem_of(plan, graph, machine, profile, Constraints())
    return [seconds for block in moves_s(problem, blocks) for seconds in block]


def _blocks(plan: Plan, graph: Graph, problem: Problem) -> list[Block]:
    places = {name: number for number, name in enumerate(problem.devices)}
    return [Block(tuple(graph.index[op] for op in s.ops), tuple(places[name] for name in s.devices)) for s in plan.stages]


def _predicted(plan: Plan, problem: Problem, blocks: Sequence[Block], bound_s: float) -> Plan:
    loads = evaluate(problem, blocks)
    bottleneck_s = loads.bottleneck_s
    alone_s = latency_s(problem, blocks) + (plan.source.batch // plan.microbatch - 1) * bottleneck_s
    prediction = Prediction(
        bottleneck_s=bottleneck_s,
        latency_s=alone_s,
        bound_s=0.0,
        gap=1.0,
        throughput_per_s=plan.microbatch / bottleneck_s if bottleneck_s > 0 else float("inf"),
    )
    stages = tuple(replace(s, load_s=float(seconds)) for s, seconds in zip(plan.stages, loads.block_s, strict=True))
    used = {device for block in blocks for device in block.devices}
    loads_s = {name: float(loads.device_s[number]) for number, name in enumerate(problem.devices) if number in used}
    return bounded(replace(plan, stages=stages, prediction=prediction, loads_s=loads_s, why=None), bound_s)


def _problem(
    graph: Graph,
    machine: Machine,
    profile: Profile,
    constraints: Constraints,
    choice: Mapping[str, str],
    threads: Mapping[str, int],
    stages: Sequence[Stage] = (),
) -> Problem:
    """What is asked with a backend for each device; ``stages`` are known to run with theirs.

    Another backend on the same device takes what one refuses, as a stage of its own; not where stages are counted.
    """
    counted = constraints.num_stages is not None or constraints.max_stages is not None
    op_s: dict[tuple[str, str], float] = {}
    for device, backend in choice.items():
        op_s |= profile.table(graph, backend, [device], threads)
        for op, taker in _takers(graph, profile, device, backend).items():
            if taker != backend and not counted:
                op_s[op, device] = profile.op_s(op, device, taker, threads.get(device))
    for stage in stages:
        for device in stage.devices:
            if stage.backend != choice[device]:
                op_s |= {(op, device): profile.op_s(op, device, stage.backend, stage.threads) for op in stage.ops}
    charged, host_s = charge(graph, machine, profile, {device: (choice[device], threads.get(device)) for device in choice})
    problem = problem_from(
        graph,
        op_s,
        charged,
        pins={op: device for pattern, device in constraints.pins.items() for op in matching_ops(graph, pattern)},
        forbids={op: devices for pattern, devices in constraints.forbids.items() for op in matching_ops(graph, pattern)},
        colocations=[matching_ops(graph, pattern) for pattern in constraints.together],
    )
    return replace(problem, host_s=host_s)


def _meeting(plan: Plan, problem: Problem, blocks: Sequence[Block], constraints: Constraints) -> Plan:
    """Return the plan, or raise InfeasibleError where microbatches or stages of a second backend break a demand."""
    demands = Demands(max_replicas=problem.num_devices, min_stage_s=constraints.min_stage_s, reuse=True)
    faults = demand_faults(problem, demands, blocks)
    alone_s, most_s = plan.prediction.latency_s, constraints.max_latency_s
    if alone_s > most_s * (1 + TOLERANCE):
        cut = f" in microbatches of {plan.microbatch}" if plan.microbatch < plan.source.batch else ""
        faults.append(f"a request takes {alone_s:.3g} s{cut}, and at most {most_s:.3g} s are asked for")
    if faults:
        raise InfeasibleError(f"no plan was found that meets all constraints: {faults[0]}. Relax it, or change the backends.")
    return plan
