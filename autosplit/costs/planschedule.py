"""Simulate a plan with the seconds of its profile, or the blocks of a problem with the seconds of the evaluator."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from autosplit.costs.pieces import PieceTransfer, TimedPiece, timed_pieces
from autosplit.costs.problem import HOST as PROBLEM_HOST
from autosplit.costs.problem import Block, Problem
from autosplit.costs.schedule import Schedule, simulate
from autosplit.costs.simulation import LinkOf, SimStage, free_link
from autosplit.costs.streaming import pass_s
from autosplit.costs.wires import Wires
from autosplit.errors import PlanError, raise_faults
from autosplit.values.graph import Graph
from autosplit.values.links import Wire
from autosplit.values.machine import HOST
from autosplit.values.placement import placement_faults
from autosplit.values.plan import Plan, Stage
from autosplit.values.profile import Profile
from autosplit.values.residency import Parts, parts_of

NOWHERE = PieceTransfer(0.0, 0.0, 0.0)
"""A transfer without values, for a piece that only waits for another one on its device."""


def plan_stages(plan: Plan, graph: Graph, stage_s: Callable[[Stage, str], float]) -> tuple[SimStage, ...]:
    """The stages of a plan as the simulation sees them; one request is one pass of ``graph``.

    A value that several ops of a stage read crosses once; one that two stages read crosses to each of them.

    Args:
        stage_s: seconds of a stage on one of its devices, transfers left out.
    Raises: PlanError: the plan is for another graph.
    """
    place = {op: stage.name for stage in plan.stages for op in stage.ops}
    raise_faults(PlanError, f"plan does not fit graph '{graph.name}'", placement_faults(plan.placement, graph))
    maker = {value: place[op] for value, op in graph.producer.items()}
    made = []
    for stage in plan.stages:
        read = dict.fromkeys(value for op in stage.ops for value in graph.ops[graph.index[op]].inputs)
        sources: dict[str, tuple[float, ...]] = {}
        for value in read:
            source = maker.get(value, HOST)
            if source != stage.name:
                sources[source] = (*sources.get(source, ()), graph.values[value].num_bytes)
        results = tuple(graph.values[value].num_bytes for value in dict.fromkeys(graph.outputs) if maker.get(value) == stage.name)
        seconds = tuple(stage_s(stage, device) for device in stage.devices)
        made.append(SimStage(stage.name, stage.devices, seconds, sources or {HOST: ()}, results or None))
    return tuple(made)


def schedule_plan(
    plan: Plan,
    graph: Graph,
    profile: Profile,
    link: LinkOf = free_link,
    num_requests: int = 32,
    *,
    arrivals_s: Sequence[float] | None = None,
    microbatches: int = 1,
    wires: Sequence[Wire] = (),
) -> Schedule:
    """Simulate a plan with the stage seconds of its profile: see ``simulate``.

    Args:
        plan: the plan; its ``queue_depth`` is the number of slots.
        link: link between two devices by name, usually ``machine.link``; that of the host brings streamed weights.
        num_requests: passes of the graph, or as many times ``microbatches``.
        arrivals_s: when each request comes; None for all at once.
        wires: network cards, uplinks and buses, usually ``machine.wires``.
    Raises: ProfileError: a stage's backend was not measured on its device. PlanError: a streamed stage has no room for buffers.
    """

    def parts(stage: Stage) -> tuple[list[int], Parts]:
        own_bytes, shared_bytes = graph.own_bytes(stage.ops)
        found = Parts() if stage.resident_bytes is None else parts_of(own_bytes, shared_bytes, stage.resident_bytes)
        if found is None:
            raise PlanError(f"stage '{stage.name}' cannot be streamed: its resident_bytes have no room for two buffers")
        return own_bytes, found

    def stage_s(stage: Stage, device: str) -> float:
        setting = device, stage.way, stage.threads
        if stage.resident_bytes is None:
            return profile.stage_s(stage.ops, *setting)
        own_bytes, streamed = parts(stage)
        copy_s = [size * link(HOST, device).pinned_s_per_byte for size in own_bytes]
        return pass_s([profile.op_s(op, *setting) for op in stage.ops], copy_s, streamed)

    stages = []
    for stage, one in zip(plan.stages, plan_stages(plan, graph, stage_s), strict=True):
        own_bytes, streamed = parts(stage)
        stages.append(replace(one, streamed_bytes=float(sum(own_bytes[place] for place in streamed.streamed))))
    return simulate(
        stages,
        num_requests,
        link=link,
        slots=plan.queue_depth,
        arrivals_s=arrivals_s,
        microbatches=microbatches,
        wires=Wires(tuple(wires)),
    )


def schedule_blocks(
    problem: Problem,
    blocks: Sequence[Block],
    num_requests: int,
    *,
    arrivals_s: Sequence[float] | None = None,
) -> Schedule:
    """Simulate a solution of a problem with the evaluator's seconds: see ``simulate``.

    A block that is not an interval of a chain runs as its pieces (``pieces.pieces``), which take turns on its devices in one
    order for each sample. If transfers overlap with compute, a device has a lane of its own for them. One sample alone takes
    ``pieces.latency_s``. At full load a device is busy for its ``cost.evaluate`` seconds a sample, and the largest sets the pace.

    Args:
        num_requests: samples; each ring has a slot for each of them.
        arrivals_s: when each sample comes; None for all at once.
    Raises: UsageError: an op is on a device that cannot run it, or the arguments are wrong.
    """
    parts, results = timed_pieces(problem, blocks)
    stages: list[SimStage] = []
    delays: dict[tuple[str, str], float] = {}
    lanes: dict[int, tuple[str, ...]] = {PROBLEM_HOST: (HOST,)}
    last: dict[int, int] = {}
    for number, part in enumerate(parts):
        sources = dict.fromkeys((last[device] for device in part.devices if device in last), NOWHERE) | dict(part.sources)
        reads = {lane: way for source, way in (sources or {PROBLEM_HOST: NOWHERE}).items() for lane in lanes[source]}
        result = results.get(number)
        sizes: dict[str, tuple[float, ...]] = {lane: (way.num_bytes,) if way.num_bytes else () for lane, way in reads.items()}
        made = _part_stages(problem, part, number, sizes, None if result is None else (result.num_bytes,))
        lanes[number] = tuple(stage.name for stage in made)
        stages += made
        delays |= {(source, lane): way.delay_s for lane in lanes[number] for source, way in reads.items()}
        delays |= {(lane, HOST): result.delay_s if result else 0.0 for lane in lanes[number]}
        last |= dict.fromkeys(part.devices, number)
    return simulate(
        stages,
        num_requests,
        slots=num_requests,
        arrivals_s=arrivals_s,
        delays_s=delays,
        wires=problem.wires,
    )


def _part_stages(
    problem: Problem, part: TimedPiece, number: int, sources: dict[str, tuple[float, ...]], results: tuple[float, ...] | None
) -> list[SimStage]:
    """A piece as one stage, or as two that run side by side if transfers overlap with compute."""
    name = f"stage{part.block}" if number == part.block else f"stage{part.block}-{number}"
    devices = tuple(problem.devices[device] for device in part.devices)
    work, moved = tuple(part.work_s.tolist()), tuple(part.moved_s.tolist())
    if not problem.overlap:
        return [SimStage(name, devices, work, sources, results, moved)]
    ports = tuple(f"{device} transfers" for device in devices)
    return [
        SimStage(name, devices, work, sources, results),
        SimStage(f"{name} transfers", ports, (0.0,) * len(ports), sources, results, moved),
    ]
