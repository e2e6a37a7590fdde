"""plan.yaml: a plan as a file that a person can read, edit and run again.

A stage lists its ops as spans ``first .. last`` in graph order, both ends included; ``first`` alone is one op.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from autosplit.errors import SHOWN_FAULTS, PlanError, raise_faults
from autosplit.files import content_hash, read_mapping, validated, write_atomic
from autosplit.values.constraints import Objective
from autosplit.values.explanation import Explanation
from autosplit.values.graph import Graph
from autosplit.values.machine import parse_device
from autosplit.values.plan import Plan, Prediction, Source, Stage, Status, check_graph, unknown_op
from autosplit.values.samples import Precision, backend_fault

SCHEMA = 1


def spans(ops: Iterable[str], graph: Graph) -> list[str]:
    """The ops as spans ``first .. last`` of consecutive ops in graph order."""
    positions = sorted(graph.index[op] for op in ops)
    starts = [p for i, p in enumerate(positions) if i == 0 or positions[i - 1] != p - 1]
    ends = [p for i, p in enumerate(positions) if i + 1 == len(positions) or positions[i + 1] != p + 1]
    names = [op.name for op in graph.ops]
    return [names[a] if a == b else f"{names[a]} .. {names[b]}" for a, b in zip(starts, ends, strict=True)]


def write_plan(plan: Plan, graph: Graph, path: Path) -> None:
    """Write the plan as YAML, atomically; without its explanation where that is of other stages."""
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "model": asdict(plan.source),
        "objective": plan.objective,
        "chosen": plan.chosen,
        "method": plan.method,
        "status": plan.status,
        "predicted": asdict(plan.prediction),
        "microbatch": plan.microbatch,
        "queue_depth": plan.queue_depth,
        "precision": plan.precision,
        "stages": [
            {
                "name": stage.name,
                "devices": list(stage.devices),
                "backend": stage.backend,
                "threads": stage.threads,
                "streams": stage.streams,
                "ops": spans(stage.ops, graph),
                "num_ops": len(stage.ops),
                "weight_bytes": graph.stage_bytes(stage.ops),
                "load_s": stage.load_s,
            }
            for stage in plan.stages
        ],
        "loads_s": dict(plan.loads_s),
        **({"why": asdict(plan.why)} if plan.why is not None and plan.why.plan == plan.hash else {}),
        "made_from": {
            "graph": plan.graph_hash,
            "profile": plan.profile_hash,
            "versions": dict(plan.versions),
            "plan": plan.hash,
            "figures": _figures(plan),
        },
    }
    write_atomic(path, yaml.safe_dump(data, sort_keys=False, width=120))


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _StageEntry(_Strict):
    name: str
    devices: list[str] = Field(min_length=1)
    ops: list[str] = Field(min_length=1)
    backend: str = "eager"
    threads: int = Field(default=1, ge=1)
    streams: int = Field(default=1, ge=1)
    num_ops: int | None = None
    weight_bytes: int | None = None
    load_s: float = 0.0

    @field_validator("devices")
    @classmethod
    def _devices(cls, names: list[str]) -> list[str]:
        for name in names:
            parse_device(name)
        return names

    @field_validator("backend")
    @classmethod
    def _backend(cls, name: str, info: ValidationInfo) -> str:
        if fault := backend_fault(name):
            raise ValueError(f"stage '{info.data.get('name')}': {fault}")
        return name


class _SourceEntry(_Strict):
    spec: str
    batch: int = Field(default=1, ge=1)
    seq_len: int | None = None


class _PredictionEntry(_Strict):
    bottleneck_s: float = 0.0
    latency_s: float = 0.0
    bound_s: float = 0.0
    gap: float = 1.0
    throughput_per_s: float = 0.0


class _MadeFrom(_Strict):
    graph: str
    profile: str = ""
    versions: dict[str, str] = {}
    plan: str = ""
    figures: str = ""


class PlanFile(_Strict):
    """A plan.yaml as written; ``resolve`` turns it into a Plan once the graph is known."""

    schema_: int = Field(alias="schema")
    model: _SourceEntry
    stages: list[_StageEntry] = Field(min_length=1)
    made_from: _MadeFrom
    objective: Objective = "throughput"
    chosen: str = "plan"
    method: str = "manual"
    status: Status = "manual"
    predicted: _PredictionEntry = _PredictionEntry()
    microbatch: int = Field(default=1, ge=1)
    queue_depth: int = Field(default=4, ge=1)
    precision: Precision = "f32"
    loads_s: dict[str, float] = {}
    why: Explanation | None = None

    @property
    def source(self) -> Source:
        """The model that the plan is for."""
        return Source(**self.model.model_dump())

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices that its stages are on."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends that its stages run on."""
        return tuple(dict.fromkeys(stage.backend for stage in self.stages))

    def resolve(self, graph: Graph) -> Plan:
        """The plan for this graph; no prediction is kept where stages or what was predicted of them were edited.

        What is right can only be said with the profile, which the file does not hold.

        Raises: PlanError: made for another graph, or a span names an unknown op.
        """
        check_graph(self.made_from.graph, graph)
        faults: list[str] = []
        stages = tuple(
            Stage(s.name, _expand(s.ops, graph, s.name, faults), tuple(s.devices), s.backend, s.threads, s.load_s, s.streams)
            for s in self.stages
        )
        raise_faults(PlanError, f"plan does not fit graph '{graph.name}'", faults)
        plan = Plan(
            source=self.source,
            graph_hash=graph.hash,
            profile_hash=self.made_from.profile,
            stages=stages,
            prediction=Prediction(**self.predicted.model_dump()),
            objective=self.objective,
            method=self.method,
            status=self.status,
            chosen=self.chosen,
            microbatch=self.microbatch,
            queue_depth=self.queue_depth,
            precision=self.precision,
            loads_s=self.loads_s,
            versions=self.made_from.versions,
            why=self.why,
        )
        as_written = self.made_from.plan in ("", plan.hash) and self.made_from.figures in ("", _figures(plan))
        return plan if as_written else plan.unpredicted()


def read_plan(path: Path) -> PlanFile:
    """Read a plan.yaml. Raises: PlanError: missing, truncated, of another schema, or with unknown or missing fields."""
    data = read_mapping(path, "plan", SCHEMA, PlanError)
    return validated(PlanFile, data, PlanError, f"plan file '{path}' is truncated or wrong")


def _figures(plan: Plan) -> str:
    """Identity of what was predicted, as floats: a whole number comes back as one."""
    stages_s = [float(stage.load_s) for stage in plan.stages]
    prediction = [float(value) for value in astuple(plan.prediction)]
    return content_hash([stages_s, prediction, {device: float(load_s) for device, load_s in plan.loads_s.items()}])


def _expand(entries: Sequence[str], graph: Graph, stage: str, faults: list[str]) -> tuple[str, ...]:
    positions: set[int] = set()
    for entry in entries:
        ends = [end.strip() for end in entry.split("..")]
        unknown = [end for end in ends if end not in graph.index]
        faults += [unknown_op(f"'{stage}'", end, graph, len(faults) < SHOWN_FAULTS) for end in unknown]
        if unknown:
            continue
        first, last = graph.index[ends[0]], graph.index[ends[-1]]
        if len(ends) > 2 or last < first:
            faults.append(f"stage '{stage}' has the span '{entry}'; write 'first .. last', two ops in graph order, or one op")
        positions.update(range(first, last + 1))
    return tuple(graph.ops[position].name for position in sorted(positions))
