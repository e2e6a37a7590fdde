"""Contents: everything that a report page shows, as plain values, and the run file that keeps them as JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict

from autosplit.errors import UsageError
from autosplit.figures.layout import lay_out
from autosplit.files import read_mapping, validated, write_atomic
from autosplit.parsing import json_safe
from autosplit.reports.accuracy import Run
from autosplit.reports.outcomes import Outcome
from autosplit.reports.runreport import RunReport, predicted_actions
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph, Op
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.timeline import Action

SCHEMA = 2
NUM_REQUESTS = 12
"""Requests of each schedule that a page draws."""
PAUSE = 10.0
"""A time between two requests that is more than this many times the median is a pause."""

Rows = list[dict[str, str | float | None]]


class Row(BaseModel):
    """A row of the contents: its fields are checked when a run file is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Way(Row):
    """The plan or a baseline: its rounds, its prediction and its largest relative error."""

    name: str
    chosen: bool
    rounds_per_s: list[float]
    alone_s: list[float]
    latency_s: float
    predicted_per_s: float | None
    predicted_latency_s: float | None
    num_stages: int
    max_error: float | None
    fault: str


class StageRow(Row):
    """A stage of the chosen plan."""

    name: str
    devices: list[str]
    backend: str
    num_ops: int
    predicted_s: float | None
    weight_bytes: int
    cap_bytes: int | None


class OpRow(Row):
    """An op: its stage (an index), its place in the drawing, seconds by setting, bytes, and demands that name it."""

    name: str
    operator: str
    module: str
    stage: int
    x: float
    y: float
    seconds: dict[str, float]
    output_bytes: int
    weight_bytes: int
    demands: list[str]


class Edge(Row):
    """A line of the drawing; ``cut`` where its value goes to another stage."""

    points: list[tuple[float, float]]
    cut: bool


class Step(Row):
    """A piece of a worker's work on a request, from ``start_s`` on."""

    lane: str
    request: int
    start_s: float
    duration_s: float
    kind: str


class Worker(Row):
    """The seconds of a worker for each request (medians), and its memory."""

    name: str
    predicted_s: float | None
    busy_s: float
    transfer_s: float
    wait_s: float
    resident_bytes: int
    proportional_bytes: int
    predicted_bytes: int | None
    held_bytes: int


class FrontPlan(Row):
    """A plan of the planner's front: throughput, latency and the memory of its fullest device, as predicted."""

    number: int
    items_per_s: float
    latency_s: float
    peak_bytes: float
    stages: str


class Prediction(Row):
    """A stored run of the model."""

    date: str
    way: str
    predicted_per_s: float
    measured_per_s: float


class Contents(Row):
    """The contents of a page. Times are in seconds, sizes in bytes.

    Attributes:
        model: the model's name.
        verdict: which way to use and why, in a sentence.
        sure: whether the measurements tell that way from the next best one.
        objective: ``throughput`` or ``latency``.
        ways: the plan and each baseline.
        left_out: each baseline that did not run, with the reason.
        peers: the splits of other tools, predicted, as rows of one table.
        notes: further sentences for the user.
        stages: the stages of the chosen plan.
        ops: the ops of the model.
        edges: the lines between them.
        schedules: ``predicted`` and ``measured`` work on the first requests.
        workers: the workers of the chosen plan.
        host_s: what a request alone takes beyond the compute and transfer of its stages.
        candidates: what the search tried, as rows of one table.
        front: predicted plans of which none is better than another in throughput, latency and memory.
        runs: stored runs of the model, oldest first.
        why: why the plan is not faster, a sentence each.
        provenance: model, devices, processor, dates and versions.
    """

    model: str
    verdict: str
    sure: bool
    objective: str
    ways: list[Way]
    left_out: dict[str, str]
    peers: Rows = []
    notes: list[str]
    stages: list[StageRow]
    ops: list[OpRow]
    edges: list[Edge]
    schedules: dict[str, list[Step]]
    workers: list[Worker]
    host_s: float
    candidates: Rows
    front: list[FrontPlan]
    runs: list[Prediction]
    why: list[str]
    provenance: dict[str, str]


def contents_of(
    report: RunReport,
    graph: Graph,
    machine: Machine,
    *,
    profile: Profile | None = None,
    constraints: Constraints = Constraints(),  # noqa: B008 (a frozen value)
    candidates: Sequence[Mapping[str, Any]] = (),
    front: Sequence[Mapping[str, Any]] = (),
    runs: Iterable[Run] = (),
) -> Contents:
    """Collect the contents of a page.

    Args:
        report: the plan beside its baselines, measured.
        graph: the model, as the chosen plan cuts it.
        machine: the devices.
        profile: gives each op its times.
        constraints: the user's demands, named where they decide the place of an op.
        candidates: rows of what a search tried.
        front: rows of the planner's front, as ``front_rows`` gives them.
        runs: stored runs of the model, oldest first.
    """
    plan = report.best.plan
    return Contents(
        model=report.model,
        verdict=report.sentence,
        sure=report.verdict.sure,
        objective=plan.objective,
        ways=[_way(name, outcome, report.chosen) for name, outcome in report.distinct().items()],
        left_out=dict(report.left_out),
        peers=json_safe(report.peer_rows()),
        notes=[report.call, *report.notes],
        stages=_stages(plan, graph, machine),
        ops=_ops(plan, graph, machine, profile, constraints),
        edges=_edges(plan, graph),
        schedules={"predicted": _steps(predicted_actions(plan, graph, NUM_REQUESTS)), "measured": _steps(report.best.actions)},
        workers=[_worker(row) for row in report.stage_rows()],
        host_s=_host_s(report.best),
        candidates=json_safe([dict(row) for row in candidates]),
        front=[FrontPlan(**row) for row in front],
        runs=[
            Prediction(date=run.date, way=run.way, predicted_per_s=run.predicted_per_s, measured_per_s=run.measured_per_s)
            for run in runs
        ],
        why=plan.why.text.splitlines() if plan.why is not None else [],
        provenance=_provenance(plan, report, machine, profile),
    )


def write_contents(contents: Contents, path: Path) -> None:
    """Write a run file. Raises: UsageError: the file cannot be written."""
    write_atomic(path, json.dumps({"schema": SCHEMA, **contents.model_dump()}, allow_nan=False))


def read_contents(path: Path) -> Contents:
    """Read a run file. Raises: UsageError: with every fault, it is not a run file of this version."""
    data = read_mapping(path, "run", SCHEMA, UsageError)
    del data["schema"]
    return validated(Contents, data, UsageError, f"run file '{path}' is not understood")


def _way(name: str, outcome: Outcome, chosen: str) -> Way:
    prediction = outcome.plan.prediction
    return Way(
        name=name,
        chosen=chosen in name.split(" = "),
        rounds_per_s=list(outcome.rounds_per_s),
        alone_s=list(outcome.alone_s),
        latency_s=outcome.latency.p50_s,
        predicted_per_s=prediction.throughput_per_s or None,
        predicted_latency_s=prediction.latency_s or None,
        num_stages=len(outcome.plan.stages),
        max_error=json_safe(outcome.max_relative_error),
        fault=outcome.fault,
    )


def _stages(plan: Plan, graph: Graph, machine: Machine) -> list[StageRow]:
    caps = {device.name: device.memory_bytes for device in machine.devices if device.memory_bytes is not None}
    return [
        StageRow(
            name=stage.name,
            devices=list(stage.devices),
            backend=stage.backend,
            num_ops=len(stage.ops),
            predicted_s=stage.load_s or None,
            weight_bytes=graph.stage_bytes(stage.ops),
            cap_bytes=min((caps[name] for name in stage.devices if name in caps), default=None),
        )
        for stage in plan.stages
    ]


def _ops(plan: Plan, graph: Graph, machine: Machine, profile: Profile | None, constraints: Constraints) -> list[OpRow]:
    positions, stage_of = lay_out(graph).positions, _stage_of(plan)
    demands: dict[str, list[str]] = {}
    for (name, _), words in constraints.placement(graph, machine).barred.items():
        demands.setdefault(name, []).append(words)
    return [
        OpRow(
            name=op.name,
            operator=op.operator,
            module=op.module,
            stage=stage_of[op.name],
            x=positions[op.name][0],
            y=positions[op.name][1],
            seconds=_seconds(op, profile),
            output_bytes=sum(graph.values[name].num_bytes for name in op.outputs),
            weight_bytes=sum(graph.weights[name].num_bytes for name in op.weights),
            demands=sorted(set(demands.get(op.name, []))),
        )
        for op in graph.ops
    ]


def _stage_of(plan: Plan) -> dict[str, int]:
    return {op: number for number, stage in enumerate(plan.stages) for op in stage.ops}


def _seconds(op: Op, profile: Profile | None) -> dict[str, float]:
    """Seconds of an op in each measured setting that can run it."""
    if profile is None:
        return {}
    return {str(setting): profile.op_s(op, *setting) for setting in profile.measured if op.name in profile.accepted(setting)}


def _edges(plan: Plan, graph: Graph) -> list[Edge]:
    stage_of = _stage_of(plan)
    return [
        Edge(points=list(curve), cut=stage_of[maker] != stage_of[reader])
        for (maker, reader), curves in lay_out(graph).edges.items()
        for curve in curves
    ]


def _steps(actions: Sequence[Action]) -> list[Step]:
    """The work on requests that follow each other without a pause, from 0 s on."""
    chosen = _burst(actions)
    kept = [action for action in actions if action.request in chosen]
    start_s = min((action.start_s for action in kept), default=0.0)
    return [Step(lane=a.lane, request=a.request, start_s=a.start_s - start_s, duration_s=a.duration_s, kind=a.kind) for a in kept]


def _burst(actions: Sequence[Action]) -> list[int]:
    """The first ``NUM_REQUESTS`` requests with no pause between them, or as many as there are. A run pauses between rounds."""
    start_s: dict[int, float] = {}
    for action in actions:
        start_s[action.request] = min(action.start_s, start_s.get(action.request, action.start_s))
    requests = sorted(start_s)
    waits_s = [start_s[later] - start_s[earlier] for earlier, later in pairwise(requests)]
    bursts: list[list[int]] = [requests[:1]]
    for request, wait_s in zip(requests[1:], waits_s, strict=True):
        if wait_s > PAUSE * median(waits_s):
            bursts.append([])
        bursts[-1].append(request)
    return next((burst for burst in bursts if len(burst) >= NUM_REQUESTS), max(bursts, key=len))[:NUM_REQUESTS]


def _worker(row: Mapping[str, Any]) -> Worker:
    return Worker(
        name=f"{row['stage']} on {row['device']}",
        **{name: row[name] for name in Worker.model_fields if name != "name"},
    )


def _host_s(outcome: Outcome) -> float:
    """Median seconds of a request alone, less those that its stages compute and transfer."""
    stages: dict[str, float] = {}
    for stats in outcome.stats.stages:
        stages[stats.stage] = max(stages.get(stats.stage, 0.0), stats.busy.p50_s + stats.transfer.p50_s)
    return max(0.0, outcome.latency.p50_s - sum(stages.values()))


def _provenance(plan: Plan, report: RunReport, machine: Machine, profile: Profile | None) -> dict[str, str]:
    stamps = [measured.provenance for measured in profile.measured.values()] if profile is not None else []
    dates = sorted(stamp.date for stamp in stamps if stamp.date)
    return {
        "model": plan.source.spec or "a Python object",
        "request": report.request,
        "precision": plan.precision,
        "errors": report.errors,
        "devices": ", ".join(device.name for device in machine.devices),
        "processor": ", ".join(sorted({stamp.cpu for stamp in stamps if stamp.cpu})) or "unknown",
        "profile measured": f"{dates[0]} to {dates[-1]}" if dates else "not known",
        "plan found by": f"{plan.method} ({plan.status})",
        "plan, graph and profile": f"{plan.hash}, {plan.graph_hash}, {plan.profile_hash}",
        **{f"{name} version": number for name, number in plan.versions.items()},
    }
