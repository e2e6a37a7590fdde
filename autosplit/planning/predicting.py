"""Predictions: a graph with its profile becomes a problem, and the one evaluator gives the cost of a plan in it.

Planners know ops and devices by their numbers only. This module turns names into numbers.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from autosplit.costs.cost import CLOSED, moves_s
from autosplit.costs.graphproblem import problem_from
from autosplit.costs.judge import Judged, judge
from autosplit.costs.problem import HOST, Block, Floats, Pool, Problem, Transfers
from autosplit.errors import ProfileError
from autosplit.values.constraints import Constraints, Demands
from autosplit.values.graph import Graph
from autosplit.values.links import Link
from autosplit.values.machine import HOST as HOST_NAME
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan, Prediction
from autosplit.values.profile import Profile
from autosplit.values.samples import STREAMING, Setting, runtime_of


def bounded(plan: Plan, bound_s: float) -> Plan:
    """The plan with a bound on all plans that were asked for, and with the status that follows from it.

    A plan that beats the bound is not one of those plans, so nothing is proved about it.
    """
    objective_s = plan.prediction.latency_s if plan.objective == "latency" else plan.prediction.bottleneck_s
    proved_s = min(bound_s, objective_s) if bound_s <= objective_s * (1 + CLOSED) else 0.0
    gap = 1 - proved_s / objective_s if objective_s > 0 else 0.0
    status = plan.status
    if status in ("optimal", "feasible"):
        status = "optimal" if gap <= CLOSED else "feasible"
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
            if names & devices and {d.name for d in alike if not d.backends or runtime_of(backend)[0] in d.backends} <= devices
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


def counts_stages(constraints: Constraints) -> bool:
    """Whether the number of stages is limited. A device then has one backend, and cannot run ops that this backend refuses."""
    return constraints.num_stages is not None or constraints.max_stages is not None


def charge(graph: Graph, machine: Machine, profile: Profile) -> tuple[Machine, float]:
    """The machine with the profile's links as they are for this model, and the most seconds of the host's work on a device.

    A model that is larger than the last cache finds links cold. Where all cores are devices, the host has no core of its own:
    the core that hands over an answer wakes the host there, so for each request that device also pays for feeding the next
    one. Two stages on one device pay as much as two devices would. Links between hosts include the time of their agents.
    """
    provenances = [measured.provenance for measured in profile.measured.values()]
    last_cache_bytes = max((size for one in provenances for size in one.caches.values()), default=0)
    cold = 0 < last_cache_bytes < graph.used_bytes
    paying = machine.with_measured(link.when_cold() if cold else link for link in profile.links)
    paying = replace(paying, wires=machine.wires or profile.wires)
    cores = [device for device in machine.devices if device.kind == "cpu" and not device.host]
    own = [(device.name, paying.link(device.name, HOST_NAME), paying.link(HOST_NAME, device.name)) for device in cores]
    paying = paying.with_links(
        Link(name, name, to.latency_s, to.send_s, to.send_s_per_byte, back.receive_s, back.receive_s_per_byte)
        for name, to, back in own
        if (name, HOST_NAME) in paying.links and (name, name) not in paying.links
    )
    num_cores = max((one.num_cores for one in provenances), default=0)
    made = [graph.values[name] for name in dict.fromkeys(graph.outputs) if name in graph.producer]
    if not made or not 0 < num_cores <= sum(len(device.cores) for device in cores):
        return paying, 0.0
    fed_bytes, taken_bytes = sum(graph.values[name].num_bytes for name in graph.inputs), sum(v.num_bytes for v in made)
    charged, most_s = [], 0.0
    for _, to, back in own:
        fixed_s = to.receive_s + fed_bytes * back.send_s_per_byte
        most_s = max(most_s, fixed_s + taken_bytes * to.receive_s_per_byte)
        send_s, send_s_per_byte = to.send_s + fixed_s / len(made), to.send_s_per_byte + to.receive_s_per_byte
        charged.append(replace(to, send_s=send_s, send_s_per_byte=send_s_per_byte))
    return paying.with_links(charged), most_s


def problem_on(
    graph: Graph, machine: Machine, profile: Profile, constraints: Constraints, settings: Sequence[Setting]
) -> Problem:
    """The problem whose devices are the settings, each a backend on a device; settings of one device share its processor.

    An op costs the seconds of its backend on that device. The stage that receives a value also pays the price of a cut.

    Raises: ProfileError: the profile lacks a measurement.
    """
    charged, host_s = charge(graph, machine, profile)
    placement, devices = constraints.placement(graph, machine), [machine[setting.device] for setting in settings]
    free = problem_from(graph, charged, placement, devices)
    compute_s, received, reasons = free.compute_s.copy(), free.transfers.receive_s_per_byte.copy(), dict(free.reasons)
    for number, setting in enumerate(settings):
        measured = profile.measured[profile.setting(*setting)]
        received[:HOST, number] += measured.cut_s_per_byte or 0.0
        taken_s = profile.table(graph, setting)
        for op, name in enumerate(free.ops):
            compute_s[op, number] += taken_s.get(name, np.inf)
            if np.isinf(compute_s[op, number]):
                refusal = f"op '{name}': {setting.backend} refuses it: {measured.refused.get(name, 'no reason is known')}"
                reasons.setdefault((op, number), refusal)
    places = list(dict.fromkeys(free.devices))
    alone = len(places) == len(settings)
    return replace(
        free,
        devices=tuple(setting.device if alone else f"{setting.device} ({setting.backend})" for setting in settings),
        compute_s=compute_s,
        transfers=replace(free.transfers, receive_s_per_byte=received),
        processors=() if alone else tuple(places.index(name) for name in free.devices),
        reasons=reasons,
        host_s=host_s,
        pinned_s_per_byte=tuple(
            charged.link(HOST_NAME, one.device).pinned_s_per_byte if one.runtime in STREAMING else 0.0 for one in settings
        ),
    ).verify()


def grouped(problem: Problem, groups: Sequence[Sequence[int]], names: Sequence[str], *, first: bool = False) -> Problem:
    """The problem with one device for each group of devices on one processor.

    Each op and transfer costs the least of its group: no plan on the devices of the groups costs less than the same plan here, so
    a bound for this problem holds for all of them. With ``first`` it costs the seconds of the first of the group, and the others
    only count for ops that the first cannot run.
    """
    rows = [*([group[0]] if first else list(group) for group in groups), [HOST]]

    def cheapest(table: Floats) -> Floats:
        return np.array([[table[np.ix_(sources, targets)].min() for targets in rows] for sources in rows])

    compute_s = np.stack([problem.compute_s[:, list(group)].min(axis=1) for group in groups], axis=1)
    if first:
        own_s = problem.compute_s[:, [group[0] for group in groups]]
        compute_s = np.where(np.isinf(own_s), compute_s, own_s)
    return replace(
        problem,
        devices=tuple(names),
        compute_s=compute_s,
        transfers=Transfers(*map(cheapest, problem.transfers.arrays())),
        memory_bytes=problem.memory_bytes[[group[0] for group in groups]],
        pools=tuple(
            Pool(tuple(number for number, group in enumerate(groups) if group[0] in pool.devices), pool.num_bytes)
            for pool in problem.pools
        ),
        processors=(),
        pinned_s_per_byte=tuple(max(problem.pinned_s_per_byte[k] for k in row) for row in rows[:-1] if problem.pinned_s_per_byte),
        reasons={(op, k): problem.reasons[op, groups[k][0]] for op, k in np.argwhere(np.isinf(compute_s)).tolist()},
    )


def predict(plan: Plan, graph: Graph, machine: Machine, profile: Profile, bound_s: float = 0.0) -> Plan:
    """The plan with the loads and the prediction that this profile gives it.

    Args:
        plan: any plan; measurements of its own stages count most.
        graph: the model, traced for the plan's microbatch.
        bound_s: a proved bound for this profile: no plan is better.
    Raises: ProfileError: the profile lacks a measurement that the plan needs.
    """
    if plan.precision != profile.precision:
        raise ProfileError(f"profile of '{profile.graph_name}' is in {profile.precision}; measure in the plan's {plan.precision}")
    profile = profile.with_newest((stage.ops, setting) for stage, setting in plan.workers)
    problem, blocks = problem_alone(plan, graph, machine, profile)
    demands = Demands("latency" if plan.objective == "latency" else "throughput")
    judged = judge(problem, demands, blocks, plan.source.batch // plan.microbatch)
    return predicted(plan, judged, settings_of(plan), bound_s)


def moved_s(plan: Plan, graph: Graph, machine: Machine, profile: Profile) -> list[float]:
    """Seconds of a request that each worker of a plan is predicted to send and receive, in the order of stages and devices.

    Raises: ProfileError: the profile lacks a measurement that the plan needs.
    """
    return [seconds for block in moves_s(*problem_alone(plan, graph, machine, profile)) for seconds in block]


def problem_alone(plan: Plan, graph: Graph, machine: Machine, profile: Profile) -> tuple[Problem, list[Block]]:
    """The problem whose devices are the settings of a plan alone, and its stages as blocks of that.

    Raises: ProfileError: the profile lacks a measurement that the plan needs.
    """
    settings = settings_of(plan)
    problem = problem_on(graph, machine.around(plan.devices), profile, Constraints(), settings)
    return problem, blocks_of(plan, graph, settings)


def settings_of(plan: Plan) -> list[Setting]:
    """Every backend on every device that a plan uses, once each."""
    return list(dict.fromkeys(setting for _, setting in plan.workers))


def blocks_of(plan: Plan, graph: Graph, settings: Sequence[Setting]) -> list[Block]:
    """The stages of a plan as blocks of the problem on these settings."""
    place = {setting: number for number, setting in enumerate(settings)}
    return [
        Block(
            tuple(graph.index[op] for op in stage.ops),
            tuple(place[Setting(name, stage.way, stage.threads)] for name in stage.devices),
            inf if stage.resident_bytes is None else stage.resident_bytes,
        )
        for stage in plan.stages
    ]


def predicted(plan: Plan, judged: Judged, settings: Sequence[Setting], bound_s: float) -> Plan:
    """The plan with the loads and the prediction that the judge gave its blocks, and with the bound ``bound_s``."""
    loads, bottleneck_s = judged.loads, judged.loads.bottleneck_s
    prediction = Prediction(
        bottleneck_s=bottleneck_s,
        latency_s=judged.latency_s,
        throughput_per_s=plan.microbatch / bottleneck_s if bottleneck_s > 0 else float("inf"),
    )
    stages = tuple(replace(s, load_s=float(seconds)) for s, seconds in zip(plan.stages, loads.block_s, strict=True))
    used = sorted({device for block in judged.blocks for device in block.devices})
    loads_s = {settings[number].device: float(loads.device_s[number]) for number in used}
    return bounded(replace(plan, stages=stages, prediction=prediction, loads_s=loads_s, why=None), bound_s)


def problem_of(
    plan: Plan, graph: Graph, machine: Machine, profile: Profile, constraints: Constraints
) -> tuple[Problem, list[Block]]:
    """The problem that a plan answers, with the devices of its layout of the machine, and its stages as blocks of that.

    An op costs the seconds of its stage's backend on the device of its stage. On another device it costs the seconds of the
    backend of that device's largest stage, or of the backend with most ops if the plan does not use that device. A device
    without that measurement is left out.

    Raises: ProfileError: the profile lacks a measurement that the plan needs.
    """
    stages = sorted(plan.stages, key=lambda stage: -len(stage.ops))
    machine = machine.around(plan.devices)
    usual = {name: Setting(name, stage.way, stage.threads) for stage in stages[::-1] for name in stage.devices}
    for name in [device.name for device in machine.devices if device.name not in usual]:
        setting = Setting(name, stages[0].way, threads_on(machine, name))
        usual |= {name: setting} if setting in profile.measured else {}
    names = [device.name for device in machine.devices if device.name in usual]
    others = [setting for setting in profile.measured if setting.device in usual and not counts_stages(constraints)]
    settings = list(dict.fromkeys([*(usual[name] for name in names), *settings_of(plan), *others]))
    problem = problem_on(graph, machine, profile, constraints, settings)
    compute_s, blocks = problem.compute_s.copy(), []
    for block in blocks_of(plan, graph, settings):
        homes = tuple(names.index(settings[number].device) for number in block.devices)
        blocks.append(replace(block, devices=homes))
        for number, home in zip(block.devices, homes, strict=True):
            compute_s[list(block.ops), home] = problem.compute_s[list(block.ops), number]
    groups = [[k, *(m for m in range(len(settings)) if settings[m].device == name and m != k)] for k, name in enumerate(names)]
    return grouped(replace(problem, compute_s=compute_s), groups, names, first=True), blocks
