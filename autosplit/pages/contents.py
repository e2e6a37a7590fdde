"""Contents: everything that a report page shows, and the run file that keeps it as JSON."""

import json
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict

from autosplit.errors import UsageError
from autosplit.files import read_mapping, validated, write_atomic
from autosplit.parsing import json_safe
from autosplit.planning.caps import front_rows
from autosplit.reports.accuracy import Run
from autosplit.reports.runreport import RunReport, predicted_actions
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.timeline import Action
from autosplit.versions import version_of

SCHEMA = 3
NUM_REQUESTS = 12
"""Requests of each schedule that a page draws."""
PAUSE = 10.0
"""A time between two requests that is more than this many times the median is a pause."""

Rows = list[dict[str, str | int | float | None]]


class Contents(BaseModel):
    """The contents of a page, which a run file keeps.

    Attributes:
        header: model, machine, date, command and versions.
        details: further facts of the run: request, precision, errors, dates and hashes.
        report: the plan and its baselines, measured; without the times of single requests.
        graph: the model, as the chosen way cuts it.
        caps_bytes: device to its memory cap.
        seconds: op to its seconds in each measured setting.
        demands: op to the user's demands that decide its place.
        schedules: ``predicted`` and ``measured`` work on the same first requests.
        candidates: the trials of the search, as rows of one table.
        front: predicted plans of which none is better than another in throughput, latency and memory, as rows of one table.
        runs: stored runs of the model, oldest first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    header: dict[str, str]
    details: dict[str, str]
    report: RunReport
    graph: Graph
    caps_bytes: dict[str, int]
    seconds: dict[str, dict[str, float]]
    demands: dict[str, list[str]]
    schedules: dict[str, list[Action]]
    candidates: Rows
    front: Rows
    runs: list[Run]

    @property
    def plan(self) -> Plan:
        """The plan of the chosen way."""
        return self.report.best.plan


def contents_of(
    report: RunReport,
    graph: Graph,
    machine: Machine,
    *,
    profile: Profile | None = None,
    constraints: Constraints = Constraints(),  # noqa: B008 (a frozen value)
    candidates: Sequence[Mapping[str, Any]] = (),
    front: Sequence[tuple[Plan, int]] = (),
    runs: Iterable[Run] = (),
) -> Contents:
    """Collect the contents of a page; ``front`` has each plan of the planner's front with the bytes of its fullest device."""
    plan = report.best.plan
    demands: dict[str, list[str]] = {}
    for (op, _), words in constraints.placement(graph, machine).barred.items():
        if words not in demands.setdefault(op, []):
            demands[op].append(words)
    chosen = ["*" if other.hash == plan.hash else "" for other, _ in front]
    return Contents(
        header=_header(report, machine, profile),
        details=_details(report, profile),
        report=replace(report, outcomes={name: replace(outcome, actions=()) for name, outcome in report.outcomes.items()}),
        graph=graph,
        caps_bytes={device.name: device.memory_bytes for device in machine.devices if device.memory_bytes is not None},
        seconds=_seconds(graph, profile),
        demands=demands,
        schedules=_schedules(report, graph),
        candidates=json_safe([dict(row) for row in candidates]),
        front=json_safe([{"chosen": mark, **row} for mark, row in zip(chosen, front_rows(front), strict=True)]),
        runs=list(runs),
    )


def write_contents(contents: Contents, path: Path) -> None:
    """Write a run file."""
    write_atomic(path, json.dumps({"schema": SCHEMA, **_finite(contents.model_dump(mode="json"))}, allow_nan=False))


def _finite(data: Any) -> Any:
    """The data with infinite numbers and NaN as texts, which pydantic reads as numbers; JSON has none."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not isfinite(data) else data


def read_contents(path: Path) -> Contents:
    """Read a run file. Raises: UsageError: with every fault, it is not a run file of this version."""
    data = read_mapping(path, "run", SCHEMA, UsageError)
    del data["schema"]
    return validated(Contents, data, UsageError, f"run file '{path}' is not understood")


def _seconds(graph: Graph, profile: Profile | None) -> dict[str, dict[str, float]]:
    """Seconds of each op in each measured setting that can run it."""
    if profile is None:
        return {}
    accepted = {setting: profile.accepted(setting) for setting in profile.measured}
    return {
        op.name: {str(setting): profile.op_s(op, *setting) for setting, names in accepted.items() if op.name in names}
        for op in graph.ops
    }


def _schedules(report: RunReport, graph: Graph) -> dict[str, list[Action]]:
    """Predicted and measured work on the first requests after a pause, numbered and timed from 0."""
    measured = first_requests(report.best.actions)
    num_requests = len({action.request for action in measured}) or NUM_REQUESTS
    return {"predicted": list(predicted_actions(report.best.plan, graph, num_requests)), "measured": measured}


def first_requests(actions: Sequence[Action]) -> list[Action]:
    """The work on the first requests of a round, at most ``NUM_REQUESTS``: with no pause between them.

    A run pauses between rounds; a round of fewer requests counts if there is no longer one. Requests and times start at 0.
    """
    start_s: dict[int, float] = {}
    for action in actions:
        start_s[action.request] = min(action.start_s, start_s.get(action.request, action.start_s))
    requests = sorted(start_s)
    waits_s = [start_s[later] - start_s[earlier] for earlier, later in pairwise(requests)]
    rounds: list[list[int]] = [requests[:1]]
    for request, wait_s in zip(requests[1:], waits_s, strict=True):
        if wait_s > PAUSE * median(waits_s):
            rounds.append([])
        rounds[-1].append(request)
    kept = next((one for one in rounds if len(one) >= NUM_REQUESTS), max(rounds, key=len))[:NUM_REQUESTS]
    zero_s = min((start_s[request] for request in kept), default=0.0)
    return [
        action._replace(request=kept.index(action.request), start_s=action.start_s - zero_s, end_s=action.end_s - zero_s)
        for action in actions
        if action.request in kept
    ]


def _header(report: RunReport, machine: Machine, profile: Profile | None) -> dict[str, str]:
    """Facts that stand above all figures: model, machine, date, command and versions."""
    source = report.best.plan.source
    stamps = [measured.provenance for measured in profile.measured.values()] if profile is not None else []
    processors = sorted({stamp.cpu for stamp in stamps if stamp.cpu}) or [platform.machine()]
    devices = ", ".join(device.name for device in machine.devices)
    versions = {"autosplit": version_of("autosplit"), "python": platform.python_version(), **report.best.plan.versions}
    return {
        "model": f"{report.model}, made from {source.spec}" if source.spec else f"{report.model}, a Python object",
        "machine": f"{' and '.join(processors)}, {platform.system()}; devices {devices}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": _command(),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
    }


def _command() -> str:
    """The command of this process, with ``autosplit`` in place of the path of its program."""
    program, *arguments = sys.argv or [""]
    name = "autosplit" if Path(program).name == "__main__.py" else Path(program).name or "python"
    return shlex.join([name, *arguments])


def _details(report: RunReport, profile: Profile | None) -> dict[str, str]:
    plan = report.best.plan
    stamps = [measured.provenance.date for measured in profile.measured.values()] if profile is not None else []
    dates = sorted(filter(None, stamps))
    return {
        "request": report.request,
        "precision": plan.precision,
        "errors": report.errors,
        "profile measured": f"{dates[0]} to {dates[-1]}" if dates else "not known",
        "plan found by": f"{plan.method} ({plan.status})",
        "plan, graph and profile": f"{plan.hash}, {plan.graph_hash}, {plan.profile_hash}",
    }
