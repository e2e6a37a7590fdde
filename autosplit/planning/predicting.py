"""Plans and problems: a graph with its profile as the problem that planners see, and what that problem says of a plan.

Planners know ops and devices by their numbers only; here is the one place where names become numbers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autosplit.costs.cost import CLOSED, evaluate, latency_s, moves_s
from autosplit.costs.problem import Block, Problem, problem_from
from autosplit.errors import ProfileError
from autosplit.planning.charging import charge
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan, Prediction, Stage
from autosplit.values.profile import Profile


def bounded(plan: Plan, bound_s: float) -> Plan:
    """The plan with what is proved of all plans that were asked for; nothing where it is better, and so none of these.

    That may be less than what was proved of plans with its own choice of backends.
    """
    objective = plan.prediction.latency_s if plan.objective == "latency" else plan.prediction.bottleneck_s
    proved_s = min(bound_s, objective) if bound_s <= objective * (1 + CLOSED) else 0.0
    gap = 1 - proved_s / objective if objective > 0 else 0.0
    status = "feasible" if plan.status == "optimal" and gap > CLOSED else plan.status
    return replace(plan, prediction=replace(plan.prediction, bound_s=proved_s, gap=gap), status=status)


def measured_backends(profile: Profile, machine: Machine) -> tuple[str, ...]:
    """The backends that the profile has on every device of a kind. Raises: ProfileError: a device has none."""
    found: dict[str, set[str]] = {}
    for setting in profile.measured:
        found.setdefault(setting.backend, set()).add(setting.device)
    backends: dict[str, None] = {}
    for kind in dict.fromkeys(device.kind for device in machine.devices):
        alike = [device for device in machine.devices if device.kind == kind]
        names = {device.name for device in alike}
        there = [
            backend
            for backend, devices in found.items()
            if names & devices and {d.name for d in alike if not d.backends or backend in d.backends} <= devices
        ]
        if not there:
            raise ProfileError(
                f"the profile of '{profile.graph_name}' has no backend on all of {', '.join(sorted(names))}; measure it"
            )
        backends |= dict.fromkeys(there)
    return tuple(backends)


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
    problem = problem_from_profile(graph, machine, profile, Constraints(), *_chosen(plan), plan.stages)
    return predicted(plan, problem, blocks_of(plan, graph, problem), bound_s)


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
    problem = problem_from_profile(graph, machine, profile, constraints, choice, threads, plan.stages)
    return problem, blocks_of(plan, graph, problem)


def _chosen(plan: Plan) -> tuple[dict[str, str], dict[str, int]]:
    """The backend and the threads of each device that a plan uses; of several stages there, those of the one with most ops."""
    stages = sorted(plan.stages, key=lambda stage: len(stage.ops))
    choice = {device: stage.backend for stage in stages for device in stage.devices}
    return choice, {device: stage.threads for stage in stages for device in stage.devices}


def backend_of_ops(graph: Graph, profile: Profile, device: str, backend: str) -> dict[str, str]:
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


def blocks_of(plan: Plan, graph: Graph, problem: Problem) -> list[Block]:
    """The stages of a plan as blocks of the problem: names of ops and devices become numbers."""
    places = {name: number for number, name in enumerate(problem.devices)}
    return [Block(tuple(graph.index[op] for op in s.ops), tuple(places[name] for name in s.devices)) for s in plan.stages]


def predicted(plan: Plan, problem: Problem, blocks: Sequence[Block], bound_s: float) -> Plan:
    """The plan with the loads and the prediction that the evaluator gives its blocks, and with what ``bound_s`` proves."""
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


def problem_from_profile(
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
        for op, taker in backend_of_ops(graph, profile, device, backend).items():
            if taker != backend and not counted:
                op_s[op, device] = profile.op_s(op, device, taker, threads.get(device))
    for stage in stages:
        for device in stage.devices:
            if stage.backend != choice[device]:
                op_s |= {(op, device): profile.op_s(op, device, stage.backend, stage.threads) for op in stage.ops}
    charged, host_s = charge(graph, machine, profile, {device: (choice[device], threads.get(device)) for device in choice})
    placement = constraints.placement(graph, machine)
    problem = problem_from(graph, op_s, charged, barred=placement.barred, colocations=placement.groups)
    return replace(problem, host_s=host_s)
