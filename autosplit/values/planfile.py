"""plan.yaml: a plan as a file that a person can read, edit and run again.

A stage lists its ops as spans ``first .. last`` in graph order, both ends included, as single ops, or as patterns of op names,
modules and operators. One stage may list no ops: it takes the ops that no other stage lists. Stages may stand in any order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, fields, is_dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from autosplit.arguments import checked
from autosplit.errors import SHOWN_FAULTS, PlanError, UsageError, raise_faults
from autosplit.files import content_hash, read_mapping, validated, write_atomic
from autosplit.parsing import shown
from autosplit.values.constraints import Objective, matching_ops
from autosplit.values.explanation import Explanation
from autosplit.values.graph import Graph, check_graph
from autosplit.values.machine import parse_device
from autosplit.values.placement import ops_are, unknown_op
from autosplit.values.plan import QUEUE_DEPTH, UNKNOWN, Plan, Prediction, Process, Source, Stage, StageMemory, Status
from autosplit.values.residency import Residency, least_bytes
from autosplit.values.samples import Precision, backend_fault
from autosplit.values.sequences import Sequences
from autosplit.values.shapes import Shapes, parse_sizes, sizes_text

SCHEMA = 1
MOST_LISTED = 16
"""Most numbers of consecutive buckets that a file lists; of more it says the first and the last."""

MAX_PATTERNS, MAX_PATTERN = 200, 200
"""Most patterns of ops in a plan, and most characters of one: each is compared with every op of the graph."""


def spans(ops: Iterable[str], graph: Graph) -> list[str]:
    """The ops as spans ``first .. last`` of consecutive ops in graph order."""
    positions = sorted(graph.index[op] for op in ops)
    starts = [p for i, p in enumerate(positions) if i == 0 or positions[i - 1] != p - 1]
    ends = [p for i, p in enumerate(positions) if i + 1 == len(positions) or positions[i + 1] != p + 1]
    names = [op.name for op in graph.ops]
    return [names[a] if a == b else f"{names[a]} .. {names[b]}" for a, b in zip(starts, ends, strict=True)]


@checked
def write_plan(plan: Plan, graph: Graph, path: str | Path) -> None:
    """Write the plan as YAML, atomically. An explanation of other stages is left out."""
    data = _entry(
        PlanFile,
        plan,
        schema_=SCHEMA,
        model=plan.source,
        predicted=plan.prediction,
        stages=[_stage_entry(stage, graph) for stage in plan.stages],
        loads_s=dict(plan.loads_s),
        shapes=plan.shapes and _shapes_entry(plan.shapes),
        sequences=plan.sequences and plan.sequences.given,
        why=plan.why if plan.why is not None and plan.why.plan == plan.hash else None,
        made_from={
            "graph": plan.graph_hash,
            "profile": plan.profile_hash,
            "versions": dict(plan.versions),
            "plan": plan.hash,
            "figures": _figures(plan),
        },
    )
    write_atomic(Path(path), yaml.safe_dump(data, sort_keys=False, width=120))


def _entry(kind: type[BaseModel], value: Any, **others: Any) -> dict[str, Any]:
    """The fields of a section of the file: ``others``, and those that the value has by the same name. None is left out."""
    found = {
        field.alias or name: others[name] if name in others else getattr(value, name) for name, field in kind.model_fields.items()
    }
    plain = {name: list(one) if isinstance(one, tuple) else one for name, one in found.items() if one is not None}
    return {name: asdict(one) if is_dataclass(one) and not isinstance(one, type) else one for name, one in plain.items()}


def _same(value: Any, kind: type) -> dict[str, Any]:
    """The fields of a section that a dataclass has by the same name."""
    return {field.name: getattr(value, field.name) for field in fields(kind) if hasattr(value, field.name)}


def _stage_entry(stage: Stage, graph: Graph) -> dict[str, Any]:
    return _entry(
        _StageEntry,
        stage,
        residency=None if stage.resident_bytes is None else "streamed",
        ops=spans(stage.ops, graph),
        num_ops=len(stage.ops),
        weight_bytes=graph.stage_bytes(stage.ops),
    )


def _shapes_entry(shapes: Shapes) -> dict[str, Any]:
    """The section of a plan with its sizes and buckets: lists for tuples, and ``16..512`` for many numbers without gaps."""
    buckets: dict[str, Any] = {dim: list(found) for dim, found in shapes.buckets.items()}
    for dim, found in buckets.items():
        if len(found) > MOST_LISTED and found == list(every := range(found[0], found[-1] + 1)):
            buckets[dim] = sizes_text(every)
    return {**asdict(shapes), "buckets": buckets, "dynamic": list(shapes.dynamic)}


def _listed_buckets(entry: Any) -> Any:
    """The section of a plan with its sizes, with numbers in place of ``16..512``."""
    buckets = entry.get("buckets") if isinstance(entry, dict) else None
    if not isinstance(buckets, dict) or not any(isinstance(found, str) for found in buckets.values()):
        return entry
    try:
        return {**entry, "buckets": {dim: tuple(parse_sizes(found)) for dim, found in buckets.items()}}
    except UsageError as failure:
        raise ValueError(str(failure)) from None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _at_least(least: int) -> AfterValidator:
    """A check of every number of an entry."""

    def check(entry: Any) -> Any:
        for name, number in asdict(entry).items():
            if isinstance(number, int) and number < least:
                raise ValueError(f"{name} must be at least {least}, but is {number}")
        return entry

    return AfterValidator(check)


class _StageEntry(_Strict):
    """A stage as written; fields stand in the order of the file."""

    name: str
    devices: tuple[str, ...] = Field(min_length=1)
    backend: str = "eager"
    threads: int = Field(default=1, ge=1)
    streams: int = Field(default=1, ge=1)
    precision: Precision | None = None
    residency: Residency = "resident"
    resident_bytes: int | None = Field(default=None, ge=0)
    ops: list[str] = []
    num_ops: int | None = None
    weight_bytes: int | None = None
    load_s: float = 0.0
    memory: Annotated[StageMemory, _at_least(0)] | None = None

    @field_validator("devices")
    @classmethod
    def _devices(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            parse_device(name)
        return names

    @field_validator("resident_bytes")
    @classmethod
    def _resident(cls, num_bytes: int | None, info: ValidationInfo) -> int | None:
        if num_bytes is not None and info.data.get("residency") == "resident":
            raise ValueError(
                f"stage '{info.data.get('name')}' has resident_bytes, and all its weights stay; add residency: streamed"
            )
        return num_bytes

    @field_validator("backend")
    @classmethod
    def _backend(cls, name: str, info: ValidationInfo) -> str:
        if fault := backend_fault(name):
            raise ValueError(f"stage '{info.data.get('name')}': {fault}")
        return name


class _MadeFrom(_Strict):
    graph: str
    profile: str = ""
    versions: dict[str, str] = {}
    plan: str = ""
    figures: str = ""


class PlanFile(_Strict):
    """A plan.yaml as written; ``resolve`` turns it into a Plan once the graph is known.

    Fields stand in the order of the file. A further field of ``Plan`` needs its line here, and no other one.
    """

    schema_: int = Field(alias="schema")
    model: Annotated[Source, _at_least(1)]
    objective: Objective = "throughput"
    chosen: str = "plan"
    method: str = "manual"
    status: Status = "manual"
    predicted: Prediction = UNKNOWN
    microbatch: int = Field(default=1, ge=1)
    queue_depth: int = Field(default=QUEUE_DEPTH, ge=1)
    precision: Precision = "f32"
    process: Process = "workers"
    stages: list[_StageEntry] = Field(min_length=1)
    loads_s: dict[str, float] = {}
    shapes: Annotated[Shapes | None, BeforeValidator(_listed_buckets)] = None
    sequences: Sequences | None = None
    why: Explanation | None = None
    made_from: _MadeFrom

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices that its stages are on."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends that its stages run on."""
        return tuple(dict.fromkeys(stage.backend for stage in self.stages))

    def resolve(self, graph: Graph) -> Plan:
        """The plan for this graph. It has no prediction if its stages or its predicted figures were edited.

        The file does not hold the profile, so no new prediction can be made here.

        Raises: PlanError: made for another graph, a stage names an unknown op, or two stages have the same op.
        """
        check_graph(self.made_from.graph, graph)
        ops = _ops_of(self.stages, graph)
        stages = [
            Stage(**_same(one, Stage) | {"ops": ops[number], "resident_bytes": _resident_bytes(one, ops[number], graph)})
            for number, one in ((number, self.stages[number]) for number in _sorted_stages(ops, graph))
        ]
        found = {"source": self.model, "graph_hash": graph.hash, "profile_hash": self.made_from.profile}
        found |= {"stages": tuple(stages), "prediction": self.predicted, "versions": self.made_from.versions}
        plan = Plan(**_same(self, Plan) | found)
        as_written = self.made_from.plan in ("", plan.hash) and self.made_from.figures in ("", _figures(plan))
        return plan if as_written else plan.unpredicted()


def read_plan(path: Path) -> PlanFile:
    """Read a plan.yaml. Raises: PlanError: missing, truncated, of another schema, or with unknown or missing fields."""
    data = read_mapping(path, "plan", SCHEMA, PlanError)
    return validated(PlanFile, data, PlanError, f"plan file '{path}' is truncated or wrong")


def _figures(plan: Plan) -> str:
    """A hash of the predicted figures, as floats: YAML may return a whole number for a float."""
    stages_s = [float(stage.load_s) for stage in plan.stages]
    stages_s += [float(stage.memory.beside_bytes) for stage in plan.stages if stage.memory is not None]
    prediction = [float(value) for value in astuple(plan.prediction)]
    return content_hash([stages_s, prediction, {device: float(load_s) for device, load_s in plan.loads_s.items()}])


def _resident_bytes(stage: _StageEntry, ops: Sequence[str], graph: Graph) -> int | None:
    """The bytes of weights on the device of a streamed stage; the least that works if the file does not say."""
    if stage.residency == "resident" or stage.resident_bytes is not None:
        return stage.resident_bytes
    return least_bytes(*graph.own_bytes(ops))


def _ops_of(stages: Sequence[_StageEntry], graph: Graph) -> list[tuple[str, ...]]:
    """The ops of each stage in graph order. Raises: PlanError: with every fault."""
    faults: list[str] = []
    home: dict[int, int] = {}
    if (num_patterns := sum(_is_pattern(entry, graph) for stage in stages for entry in stage.ops)) > MAX_PATTERNS:
        raise PlanError(f"the plan has {num_patterns} patterns of ops, and at most {MAX_PATTERNS} are allowed; write spans")
    for number, stage in enumerate(stages):
        twice: dict[int, list[str]] = {}
        for position in _positions(stage, graph, faults):
            if (other := home.setdefault(position, number)) != number:
                twice.setdefault(other, []).append(graph.ops[position].name)
        faults += [ops_are(f"on stage '{stages[other].name}' and on stage '{stage.name}'", ops) for other, ops in twice.items()]
        if len(faults) > SHOWN_FAULTS:  # every further stage may be as long as the graph
            break
    rest = [number for number, stage in enumerate(stages) if not stage.ops]
    if len(rest) > 1:
        named = ", ".join(f"'{stages[number].name}'" for number in rest[:SHOWN_FAULTS])
        faults.append(f"stages {named} have no ops; only one stage may be left without, and takes the rest")
    raise_faults(PlanError, f"plan does not fit graph '{graph.name}'", faults)
    ops: list[list[str]] = [[] for _ in stages]
    for position, op in enumerate(graph.ops):
        for number in [home[position]] if position in home else rest:
            ops[number].append(op.name)
    return [tuple(names) for names in ops]


def _positions(stage: _StageEntry, graph: Graph, faults: list[str]) -> Iterable[int]:
    """The positions of a stage's ops in the graph, in order; overlapping spans take no longer than one."""
    steps = [0] * (len(graph.ops) + 1)
    for entry in stage.ops:
        ends = [end.strip() for end in entry.split("..", 2)]
        if len(ends) == 1 and _is_pattern(entry, graph) and (found := matching_ops(graph, entry)):
            spans_found = [(graph.index[op], graph.index[op]) for op in found]
        elif unknown := [end for end in ends if end not in graph.index]:
            faults += [unknown_op(f"'{stage.name}'", end, graph, len(faults) < SHOWN_FAULTS) for end in unknown]
            continue
        else:
            spans_found = [(graph.index[ends[0]], graph.index[ends[-1]])]
        if len(ends) > 2 or spans_found[0][1] < spans_found[0][0]:
            faults.append(f"stage '{stage.name}' has the span {shown(entry)}; write 'first .. last', two ops in graph order")
            continue
        for first, last in spans_found:
            steps[first] += 1
            steps[last + 1] -= 1
    return (position for position, depth in enumerate(accumulate(steps)) if depth > 0)


def _is_pattern(entry: str, graph: Graph) -> bool:
    return entry not in graph.index and ".." not in entry and len(entry) <= MAX_PATTERN


def _sorted_stages(ops: Sequence[Sequence[str]], graph: Graph) -> list[int]:
    """The stages in an order in which tensors only go forward, if there is one; else in the order of the file."""
    home = {op: number for number, names in enumerate(ops) for op in names}
    before: dict[int, set[int]] = {number: set() for number in range(len(ops))}
    for op in graph.ops:
        for value in op.inputs:
            source = home.get(graph.producer.get(value, ""))
            if op.name in home and source is not None and source != home[op.name]:
                before[home[op.name]].add(source)
    written = list(before)
    if all(source < target for target, sources in before.items() for source in sources):
        return written
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError:  # verify() names the tensors that go back
        return written
