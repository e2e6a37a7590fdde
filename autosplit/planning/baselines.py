"""Baselines: the usual ways to run a model without a search, as plans. A plan is only recommended if it beats them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from autosplit.errors import refusals
from autosplit.planning.predicting import bounded, measured_backends, predict
from autosplit.tables import number_text
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph
from autosplit.values.machine import Device, Machine, kind_of, places, union
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage, cap_faults
from autosplit.values.profile import Profile
from autosplit.values.samples import FROM_ONNX, runtime_of

ONE_DEVICE = "one device"
ALL_CORES = "all cores"
REPLICAS = "replicas"
STREAMS = "streams"
EVEN_SPLIT = "even split"
IN_CALLER = "in the caller"
CALLER_THREADS = "threads of the caller"
CALLER_CORE = "one core of the caller"

UNCERTAIN = 1.3
"""Largest factor by which a baseline may be faster than its prediction, or than one thread times its number of threads."""

QUICK_S, UNCERTAIN_QUICK = 0.02, 1.8
"""Seconds of a request below which predictions are least certain: ``UNCERTAIN_QUICK`` then replaces ``UNCERTAIN``.

Below it the caller's process is tried too. For a request of 95 ms its gain is within the noise.
"""


def uncertainty(request_s: float) -> float:
    """The factor by which predictions may err for requests that take so long; 0 where that is not known."""
    return UNCERTAIN_QUICK if 0 < request_s < QUICK_S else UNCERTAIN


@dataclass(frozen=True, slots=True)
class Baselines:
    """The baselines to run beside a plan, by name, and those that cannot win or run, with the reason."""

    plans: Mapping[str, Plan] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def baselines_of(
    graph: Graph,
    plan: Plan,
    machine: Machine,
    profile: Profile | None,
    *,
    compiled: Sequence[str] = (),
    streaming: Collection[str] = (),
    isolate: bool = False,
) -> Baselines:
    """The baselines of a model with every backend that may win: the backends of plan and profile, compiled ones, and eager.

    Args:
        plan: the plan beside which they run.
        profile: gives the baselines their prediction, and says which device is the fastest.
        compiled: backends without a profile for which the whole model was compiled.
        streaming: the backends that can work on several requests at once.
        isolate: whether the caller's process is ruled out as a place for the model.
    """
    known = measured_backends(profile, machine) if profile is not None else ()
    whole_machine, machine = machine, machine.layouts[0]
    refusing = {name: found for name in known if profile is not None and (found := profile.refused(name))}
    left_out = {f"{name} alone": f"it refuses {refusals(found)}" for name, found in refusing.items()}
    known = tuple(name for name in known if name not in refusing)
    used = [stage.backend for stage in plan.stages for _ in stage.ops if stage.backend not in refusing] or ["eager"]
    main = most_used(used)
    fastest, alone_s = machine.devices[0].name, {}
    if profile is not None and main in known:
        there = [device for device in machine.devices if _is_measured(profile, device.name, main)]
        able = [device.name for device in there if fits(graph, tuple(op.name for op in graph.ops), device)]
        fastest = min(able or [device.name for device in there], key=lambda name: profile.whole_s(name, main))
        alone_s = {b: profile.whole_s(fastest, b, busy=False) for b in known if _is_measured(profile, fastest, b)}
    quick = 0 < min(alone_s.values(), default=0.0) < QUICK_S
    in_caller = FROM_ONNX if quick and not isolate else ()
    names = [*known, *used, *compiled, "eager"]
    plans = baselines_by_backend(graph, machine, plan.source, names, main, fastest, streaming, in_caller)
    shared = {key: getattr(plan, key) for key in ("microbatch", "objective", "precision", "profile_hash", "versions")}
    for name, baseline in list(plans.items()):
        plans[name] = baseline = replace(baseline, **shared, status="measured")
        first = baseline.stages[0]
        one_at_a_time = first.streams == 1  # the profile holds nothing else
        if profile is not None and one_at_a_time and all(_is_measured(profile, name, first.way) for name in baseline.devices):
            plans[name] = predict(baseline, graph, machine_of([baseline], whole_machine), profile)
        elif first.precision is not None:  # cores have no use for it
            del plans[name]
    plans = _proved(with_streams_predicted(plans), plan.prediction.bound_s)
    if plan.objective == "throughput":
        unit = "items" if plan.sequences is None else "steps"
        slow = out_of_reach(plans, plan.prediction.throughput_per_s, alone_s, unit)
        kept = [without_autosplit(plans), f"{ALL_CORES} ({main})"]
        alike = len({device.kind for device in machine.devices}) == 1
        for name in [*kept, f"{REPLICAS} ({main})"] if alike else kept:
            slow.pop(name, None)
        left_out |= slow
    return Baselines({name: baseline for name, baseline in plans.items() if name not in left_out}, left_out)


def _proved(plans: Mapping[str, Plan], bound_s: float) -> dict[str, Plan]:
    """The baselines with a bound on themselves and on all plans that are not below ``bound_s``, where they are predicted.

    A baseline may beat the bound on the planner's answers, for example on a device that joins all cores.
    """
    told = {name: plan.prediction for name, plan in plans.items() if plan.prediction.throughput_per_s > 0}
    values_s = (one.latency_s if plans[name].objective == "latency" else one.bottleneck_s for name, one in told.items())
    least_s = min(bound_s, *values_s) if told else bound_s
    return {name: bounded(plan, least_s) if name in told else plan for name, plan in plans.items()}


def most_used(backends: Sequence[str]) -> str:
    """The backend that occurs most often, the first of those that occur equally often."""
    return max(backends, key=backends.count)


def with_cut_requests(whole: Baselines, cut: Baselines, microbatch: int) -> Baselines:
    """The baselines that take whole requests, and those that cut them, whose names then say so."""
    parts = f", {microbatch} at a time"
    return Baselines(
        {**whole.plans, **{f"{name}{parts}": baseline for name, baseline in cut.plans.items()}},
        {**whole.left_out, **{f"{name}{parts}": reason for name, reason in cut.left_out.items()}},
    )


def baselines_by_backend(
    graph: Graph,
    machine: Machine,
    source: Source,
    backends: Sequence[str],
    main: str,
    best_device: str,
    streaming: Collection[str] = (),
    in_caller: Collection[str] = (),
) -> dict[str, Plan]:
    """All baselines with the main backend, and for each other backend the baselines that use the whole machine.

    Args:
        streaming, in_caller: the backends for which ``baselines_with`` has ``streams`` and ``in_caller``.
    Returns: plans by name, which says the backend: ``replicas (openvino)``.
    """
    named = {}
    for backend in dict.fromkeys([main, *backends]):
        plans = baselines_with(graph, machine, source, backend, best_device, backend in streaming, backend in in_caller)
        whole = {ALL_CORES if ALL_CORES in plans else ONE_DEVICE, REPLICAS, STREAMS, IN_CALLER, CALLER_THREADS}
        for name, plan in plans.items():
            if backend == main or name in whole:
                title = f"{name} ({backend})"
                named[title] = replace(plan, chosen=title)
    return named


def baselines_with(
    graph: Graph,
    machine: Machine,
    source: Source,
    backend: str,
    best_device: str,
    streams: bool = False,
    in_caller: bool = False,
) -> dict[str, Plan]:
    """The baselines with one backend whose weights fit the memory caps.

    - one device: the whole model on ``best_device``, if its cap allows;
    - all cores: the whole model in one process with every core, if all devices are cores of one host;
    - streams: that process works on a request for each core at once, with the weights in memory once;
    - replicas: the whole model on each device, requests in turn;
    - in the caller, threads of the caller, one core of the caller: ``all cores``, ``streams`` or else ``replicas``, and
      ``one device`` in the calling process;
    - even split: as many stages as devices, equal numbers of ops in graph order.

    Args:
        best_device: name of the device that is fastest on the whole model.
        streams: whether the backend can work on several requests at once.
        in_caller: whether it may run in the caller's process.
    """
    everything = tuple(op.name for op in graph.ops)
    fitting = [device for device in machine.devices if fits(graph, everything, device)]
    plans: dict[str, Plan] = {}
    if any(device.name == best_device for device in fitting):
        plans[ONE_DEVICE] = baseline_plan(graph, source, ONE_DEVICE, backend, [(everything, [machine[best_device]])])
    if all(device.kind == "cpu" and device.host == machine.devices[0].host for device in machine.devices):
        whole = union(machine.devices)
        if fits(graph, everything, whole) and whole.name not in {device.name for device in machine.devices}:
            plans[ALL_CORES] = baseline_plan(graph, source, ALL_CORES, backend, [(everything, [whole])])
        if streams and len(whole.cores) > 1 and fits(graph, everything, whole):
            plan = baseline_plan(graph, source, STREAMS, backend, [(everything, [whole])])
            plans[STREAMS] = replace(plan, stages=tuple(replace(stage, streams=stage.threads) for stage in plan.stages))
    if len(fitting) > 1:
        plans[REPLICAS] = baseline_plan(graph, source, REPLICAS, backend, [(everything, fitting)])
    if in_caller and all(device.kind == "cpu" for device in machine.devices):
        ways = {IN_CALLER: plans.get(ALL_CORES, plans.get(ONE_DEVICE)), CALLER_THREADS: plans.get(STREAMS, plans.get(REPLICAS))}
        if ALL_CORES in plans:
            ways[CALLER_CORE] = plans.get(ONE_DEVICE)
        plans |= {name: replace(plan, process="caller", chosen=name) for name, plan in ways.items() if plan is not None}
    parts = list(zip(_even(everything, len(machine.devices)), machine.devices, strict=False))
    if len(parts) > 1 and all(fits(graph, ops, device) for ops, device in parts):
        plans[EVEN_SPLIT] = baseline_plan(graph, source, EVEN_SPLIT, backend, [(ops, [device]) for ops, device in parts])
    return plans


def with_streams_predicted(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """The baselines, with streams predicted like replicas on each of their cores, if these are predicted.

    The gain from sharing one copy of the weights is left out.
    """
    replicas = {(plan.stages[0].way, len(plan.stages[0].devices)): plan for plan in plans.values() if len(plan.stages) == 1}
    found = dict(plans)
    for name, plan in plans.items():
        alike = replicas.get((plan.stages[0].way, plan.stages[0].streams))
        if plan.stages[0].streams > 1 and alike is not None and alike.prediction.throughput_per_s > 0:
            load_s = alike.prediction.bottleneck_s
            stages = tuple(replace(stage, load_s=load_s) for stage in plan.stages)
            loads_s = dict.fromkeys(plan.stages[0].devices, load_s)
            found[name] = replace(plan, stages=stages, loads_s=loads_s, prediction=alike.prediction)
    return found


def without_autosplit(names: Iterable[str]) -> str:
    """The baseline that users have before autosplit: torch eager in one process with every core; '' if it is not among them."""
    found = set(names)
    return next((name for name in (f"{ALL_CORES} (eager)", f"{ONE_DEVICE} (eager)") if name in found), "")


def out_of_reach(
    plans: Mapping[str, Plan], planned_per_s: float, alone_s: Mapping[str, float], unit: str = "items"
) -> dict[str, str]:
    """The baselines that the profile of single devices rules out as the fastest, each with the reason.

    Args:
        plans: the baselines, predicted where the profile can.
        planned_per_s: items per second that the plan is predicted to reach.
        alone_s: backend name to seconds of a request on the fastest device while the others are idle.
        unit: the counted thing, ``items`` or ``tokens``.
    """
    best_per_s = max([planned_per_s, *(plan.prediction.throughput_per_s for plan in plans.values())])
    uncertain = uncertainty(min(alone_s.values(), default=0.0))
    reasons = {}
    for name, plan in plans.items():
        stage = plan.stages[0]
        most_per_s = plan.prediction.throughput_per_s
        alike = len({kind_of(name) for name in stage.devices}) == 1  # the fastest device says nothing of another kind
        if len(plan.stages) == 1 and alike and alone_s.get(stage.way):  # cores may have been timed together, slowly
            most_per_s = max(most_per_s, len(stage.devices) * stage.threads * plan.microbatch / alone_s[stage.way])
        most_per_s *= uncertain
        if 0 < most_per_s < best_per_s:
            most, best = number_text(most_per_s), number_text(best_per_s)
            reasons[name] = f"the best way is predicted at {best} {unit}/s, which it cannot reach ({most} {unit}/s at most)"
    return reasons


def unmet_demands(
    plan: Plan,
    latency_s: float,
    graph: Graph,
    machine: Machine,
    constraints: Constraints,
    backends: Collection[str] | None = None,
) -> list[str]:
    """A sentence for each demand that a baseline does not meet. Such a baseline must not become the plan, however fast it is.

    Args:
        latency_s: seconds of a request alone, as measured.
        backends: the backends that the user named; None for any.
    """
    others = [stage.backend for stage in plan.stages if backends is not None and stage.backend not in backends]
    faults = [f"it runs on {others[0]}, and {', '.join(backends or ())} is asked for"] if others else []
    num_replicas = max(len(stage.devices) for stage in plan.stages)
    loads_s = [stage.load_s / len(stage.devices) for stage in plan.stages if stage.load_s > 0]
    faults += constraints.broken(len(plan.stages), num_replicas, min(loads_s, default=float("inf")), latency_s)
    placement, home = constraints.placement(graph, machine), {op: stage for stage in plan.stages for op in stage.ops}
    for (op, device), demand in placement.barred.items():
        if op in home and any(_is_barred(name, device, machine) for name in home[op].devices):
            faults.append(f"{demand}, and op '{op}' runs on '{device}'")
    for group in placement.groups:
        if len({home[op].name for op in group}) > 1:
            faults.append(f"op '{group[0]}' and others that stay together are in several stages")
    return faults + list(cap_faults(plan.stages, machine.devices, graph).values())


def _is_barred(name: str, barred: str, machine: Machine) -> bool:
    """Whether a device is barred: it is the barred device, or it is not in the machine and has a core of the barred device."""
    listed = name in {device.name for device in machine.devices}
    return name == barred if listed else bool(set(places(name)) & set(places(barred)))


def machine_of(plans: Iterable[Plan], machine: Machine) -> Machine:
    """The machine that the plans name: the given one, or the one device that unites all its cores."""
    if {name for plan in plans for name in plan.devices} <= {device.name for device in machine.devices}:
        return machine
    return Machine.of([union(machine.layouts[0].devices)], machine.links.values())


def _is_measured(profile: Profile, device: str, backend: str) -> bool:
    return any((setting.device, setting.backend) == (device, backend) for setting in profile.measured)


def _even(ops: Sequence[str], num_parts: int) -> list[tuple[str, ...]]:
    ends = [round(len(ops) * part / num_parts) for part in range(num_parts + 1)]
    return [tuple(ops[a:b]) for a, b in pairwise(ends) if b > a]


def fits(graph: Graph, ops: tuple[str, ...], device: Device) -> bool:
    """Whether the weights of the ops fit the device's cap, beside what a worker's context takes there."""
    return device.memory_bytes is None or graph.stage_bytes(ops) + device.context_bytes <= device.memory_bytes


def baseline_plan(
    graph: Graph, source: Source, name: str, backend: str, placed: Sequence[tuple[tuple[str, ...], Sequence[Device]]]
) -> Plan:
    """A plan of whole requests with these ops on these devices, one thread for each core; nothing is predicted."""
    runtime, precision = runtime_of(backend)
    stages = []
    for number, (ops, devices) in enumerate(placed):
        threads = max(1, min(len(device.cores) for device in devices))
        names = tuple(device.name for device in devices)
        stages.append(Stage(f"stage{number}", ops, names, runtime, threads, precision=precision))
    return Plan(source, graph.hash, "", tuple(stages), UNKNOWN, method="baseline", chosen=name, microbatch=source.batch)
