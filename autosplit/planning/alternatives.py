"""The simple ways to run a model, as plans like any other: what a plan must beat before anybody is told to use it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from autosplit.tables import cell, seconds_text
from autosplit.values.constraints import Constraints, matching_ops
from autosplit.values.graph import Graph
from autosplit.values.machine import Device, Machine, parse_device, union
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage
from autosplit.values.samples import Precision

ONE_DEVICE = "one device"
ALL_CORES = "all cores"
REPLICAS = "replicas"
STREAMS = "streams"
EVEN_SPLIT = "even split"

UNCERTAIN = 1.3
"""A way may be so many times as fast as it is predicted, or as its threads times one alone."""

QUICK_S, UNCERTAIN_QUICK = 0.02, 1.8
"""Of models whose requests take less: there predictions are the least certain, and to try a way costs a second."""


def simple_plans(
    graph: Graph, machine: Machine, source: Source, backend: str, best_device: str, streams: bool = False
) -> dict[str, Plan]:
    """The simple ways with one backend, less those whose weights do not fit the memory caps.

    - one device: the whole model on the fastest device;
    - all cores: the whole model in one process that has every CPU core of the machine;
    - streams: the same, with a request for each core at once and the weights in memory once;
    - replicas: the whole model on each device, requests in turn;
    - even split: as many stages as devices, equal numbers of ops in graph order.

    Args:
        graph: the model.
        machine: its devices; ``all cores`` and ``streams`` are left out where they are not all CPU cores.
        source: what the model was made from.
        backend: the backend of every stage.
        best_device: name of the device that is fastest on the whole model.
        streams: whether the backend can work on several requests at once.
    """
    everything = tuple(op.name for op in graph.ops)
    fitting = [device for device in machine.devices if _fits(graph, everything, device)]
    plans: dict[str, Plan] = {}
    if any(device.name == best_device for device in fitting):
        plans[ONE_DEVICE] = _plan(graph, source, ONE_DEVICE, backend, [(everything, [machine[best_device]])])
    if all(device.kind == "cpu" for device in machine.devices):
        whole = union(machine.devices)
        if _fits(graph, everything, whole) and whole.name not in {device.name for device in machine.devices}:
            plans[ALL_CORES] = _plan(graph, source, ALL_CORES, backend, [(everything, [whole])])
        if streams and len(whole.cores) > 1 and _fits(graph, everything, whole):
            plan = _plan(graph, source, STREAMS, backend, [(everything, [whole])])
            plans[STREAMS] = replace(plan, stages=tuple(replace(stage, streams=stage.threads) for stage in plan.stages))
    if len(fitting) > 1:
        plans[REPLICAS] = _plan(graph, source, REPLICAS, backend, [(everything, fitting)])
    parts = list(zip(_even(everything, len(machine.devices)), machine.devices, strict=False))
    if len(parts) > 1 and all(_fits(graph, ops, device) for ops, device in parts):
        plans[EVEN_SPLIT] = _plan(graph, source, EVEN_SPLIT, backend, [(ops, [device]) for ops, device in parts])
    return plans


def every_way(
    graph: Graph,
    machine: Machine,
    source: Source,
    backends: Sequence[str],
    main: str,
    best_device: str,
    streaming: Collection[str] = (),
) -> dict[str, Plan]:
    """The simple ways with the main backend, and with each other backend those that use the whole machine.

    Args:
        graph: the model.
        machine: its devices.
        source: what the model was made from.
        backends: the other backends.
        main: the backend whose simple ways are all wanted.
        best_device: name of the device that is fastest on the whole model.
        streaming: the backends that can work on several requests at once.
    Returns: plans by name, which says the backend: ``replicas (openvino)``.
    """
    ways = {}
    for backend in dict.fromkeys([main, *backends]):
        plans = simple_plans(graph, machine, source, backend, best_device, backend in streaming)
        whole = {ALL_CORES if ALL_CORES in plans else ONE_DEVICE, REPLICAS, STREAMS}
        for name, plan in plans.items():
            if backend == main or name in whole:
                title = f"{name} ({backend})"
                ways[title] = replace(plan, chosen=title)
    return ways


def with_streams_predicted(ways: Mapping[str, Plan]) -> dict[str, Plan]:
    """The same ways; streams are predicted to do what replicas do, one on each of their cores: there the computing is the same.

    What sharing one copy of the weights brings is not in it. Where no such replicas are predicted, streams are not either.
    """
    twins = {(way.stages[0].backend, len(way.stages[0].devices)): way for way in ways.values() if len(way.stages) == 1}
    found = dict(ways)
    for name, way in ways.items():
        twin = twins.get((way.stages[0].backend, way.stages[0].streams))
        if way.stages[0].streams > 1 and twin is not None and twin.prediction.throughput_per_s > 0:
            load_s = twin.prediction.bottleneck_s
            stages = tuple(replace(stage, load_s=load_s) for stage in way.stages)
            loads_s = dict.fromkeys(way.stages[0].devices, load_s)
            found[name] = replace(way, stages=stages, loads_s=loads_s, prediction=replace(twin.prediction, bound_s=0.0, gap=1.0))
    return found


def today(ways: Iterable[str]) -> str:
    """Of the names of ways, what a user has before autosplit: torch eager in one process with every core; or nothing."""
    names = set(ways)
    return next((name for name in (f"{ALL_CORES} (eager)", f"{ONE_DEVICE} (eager)") if name in names), "")


def out_of_reach(ways: Mapping[str, Plan], planned_per_s: float, alone_s: Mapping[str, float]) -> dict[str, str]:
    """The ways that cannot be the fastest by what was measured of single devices, with the reason.

    Args:
        ways: the simple ways, predicted where the profile can.
        planned_per_s: items per second that the plan is predicted to reach.
        alone_s: backend name to seconds of a request on the fastest device with the others idle.
    """
    best_per_s = max([planned_per_s, *(way.prediction.throughput_per_s for way in ways.values())])
    uncertain = UNCERTAIN_QUICK if min(alone_s.values(), default=QUICK_S) < QUICK_S else UNCERTAIN
    reasons = {}
    for name, way in ways.items():
        stage = way.stages[0]
        most_per_s = way.prediction.throughput_per_s
        if len(way.stages) == 1 and alone_s.get(stage.backend):  # devices may have been timed together at a slow moment
            most_per_s = max(most_per_s, len(stage.devices) * stage.threads * way.microbatch / alone_s[stage.backend])
        most_per_s *= uncertain
        if 0 < most_per_s < best_per_s:
            reasons[name] = f"the profile lets it reach {cell(most_per_s)} items/s at most, and {cell(best_per_s)} are predicted"
    return reasons


def unfit(way: Plan, latency_s: float, graph: Graph, wanted: Constraints, backends: Collection[str] | None = None) -> str:
    """Why a way must not become the plan, however fast it is: the first demand that it does not meet; '' if it meets all.

    Args:
        way: a simple way.
        latency_s: seconds of a request alone, as measured.
        graph: the model.
        wanted: what was asked for.
        backends: those that were asked for; None for any.
    """
    num_stages, replicas = len(way.stages), max(len(stage.devices) for stage in way.stages)
    others = [stage.backend for stage in way.stages if backends is not None and stage.backend not in backends]
    if others:
        return f"it runs on {others[0]}, and asked for is {', '.join(backends or ())}"
    if wanted.num_stages not in (None, num_stages):
        return f"the number of its stages is {num_stages}, and {wanted.num_stages} is asked for"
    if num_stages > (wanted.max_stages or num_stages):
        return f"the number of its stages is {num_stages}, and at most {wanted.max_stages} is allowed"
    if replicas > wanted.max_replicas:
        return f"the number of its replicas is {replicas}, and at most {wanted.max_replicas} is allowed"
    if latency_s > wanted.max_latency_s:
        return f"a request takes it {seconds_text(latency_s)}, and at most {seconds_text(wanted.max_latency_s)} is allowed"
    if any(0 < stage.load_s / len(stage.devices) < wanted.min_stage_s for stage in way.stages):
        return f"a stage of it is shorter than {seconds_text(wanted.min_stage_s)}"
    return _misplaced(way, graph, wanted)


def _misplaced(way: Plan, graph: Graph, wanted: Constraints) -> str:
    """The first op pattern that is not where it was asked to be, or ''."""
    home = {op: stage for stage in way.stages for op in stage.ops}
    for pattern, device in wanted.pins.items():
        if any(set(home[op].devices) != {device} for op in matching_ops(graph, pattern)):
            return f"'{pattern}' is not on '{device}' alone"
    for pattern, devices in wanted.forbids.items():
        barred = {place for device in devices for place in _places(device)}
        taken = {place for op in matching_ops(graph, pattern) for name in home[op].devices for place in _places(name)}
        if both := sorted(barred & taken):
            return f"'{pattern}' is on '{both[0]}'"
    for pattern in wanted.together:
        if len({home[op].name for op in matching_ops(graph, pattern)}) > 1:
            return f"'{pattern}' is in several stages"
    return ""


def _places(device: str) -> list[str]:
    """The cores of a device, or the device itself if it has none: what two devices may share."""
    return [f"cpu:{core}" for core in parse_device(device).cores] or [device]


def in_precision(plan: Plan, precision: Precision) -> Plan:
    """The same stages computing in another precision, which nothing was predicted for."""
    return plan if precision == plan.precision else replace(plan, precision=precision).unpredicted()


def machine_of(plans: Iterable[Plan], machine: Machine) -> Machine:
    """The machine, or the one with its cores united, that the plans name: what each of them verifies against."""
    names = {name for plan in plans for stage in plan.stages for name in stage.devices}
    if names <= {device.name for device in machine.devices}:
        return machine
    return Machine.of([union(machine.devices)], machine.links.values())


def _even(ops: Sequence[str], num_parts: int) -> list[tuple[str, ...]]:
    ends = [round(len(ops) * part / num_parts) for part in range(num_parts + 1)]
    return [tuple(ops[a:b]) for a, b in pairwise(ends) if b > a]


def _fits(graph: Graph, ops: tuple[str, ...], device: Device) -> bool:
    return device.memory_bytes is None or graph.stage_bytes(ops) <= device.memory_bytes


def _plan(
    graph: Graph, source: Source, name: str, backend: str, placed: Sequence[tuple[tuple[str, ...], Sequence[Device]]]
) -> Plan:
    stages = tuple(
        Stage(f"stage{number}", ops, tuple(d.name for d in devices), backend, threads=max(1, min(len(d.cores) for d in devices)))
        for number, (ops, devices) in enumerate(placed)
    )
    return Plan(source, graph.hash, "", stages, UNKNOWN, method="simple", status="manual", chosen=name)
