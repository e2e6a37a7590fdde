"""Plan: the stages of a model and their devices, with a check against the graph and the machine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from autosplit import tables
from autosplit.arguments import checked
from autosplit.errors import PlanError, UsageError, raise_faults
from autosplit.files import content_hash
from autosplit.values.explanation import Explanation
from autosplit.values.graph import Graph, check_graph
from autosplit.values.machine import HOST_KINDS, Device, Machine, overlaps
from autosplit.values.placement import placement_faults
from autosplit.values.residency import streaming_faults
from autosplit.values.samples import Precision, Setting, backend_fault, backend_in
from autosplit.values.sequences import Sequences
from autosplit.values.shapes import Shapes

Status = Literal["optimal", "feasible", "shared", "measured", "manual"]
"""How good a plan is; ``shared``: devices hold several stages because no chain with one stage on a device was found."""

Process = Literal["workers", "caller"]
"""``workers``: a process for each replica of a stage. ``caller``: the calling process, for one stage, whose requests pass no ring
and whose crash ends the caller. The calling thread computes it; replicas have a thread each."""

QUEUE_DEPTH, MAX_QUEUE_DEPTH = 4, 1024
"""Slots of a ring: by default, and at most. Each takes memory from the start, and more only make requests wait longer."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Predicted bytes of one replica of a stage.

    Attributes:
        weight_bytes: its weights, each once; of a streamed stage those that stay on the device, and two buffers.
        arena_bytes: largest sum of bytes of values that are live at an op, times the number of streams; inputs lie in rings.
        backend_bytes: bytes that its backend takes beside weights and values: copies of weights, scratch memory, free blocks.
        ring_bytes: slots of the rings that bring its inputs, and of the rings that take its results to the host. On an
            accelerator: the tensors there that take inputs and outputs.
        base_bytes: bytes that its process takes for itself; 0 if they were not measured, or on an accelerator.
        measured: whether this stage was measured while it ran.
    """

    weight_bytes: int
    arena_bytes: int
    backend_bytes: int
    ring_bytes: int
    base_bytes: int
    measured: bool = False

    @property
    def held_bytes(self) -> int:
        """Bytes of weights, values and the backend. A worker is measured to hold these beyond its base."""
        return self.weight_bytes + self.arena_bytes + self.backend_bytes

    @property
    def beside_bytes(self) -> int:
        """Bytes of everything but the weights."""
        return self.arena_bytes + self.backend_bytes + self.ring_bytes + self.base_bytes


@dataclass(frozen=True, slots=True)
class Stage:
    """A convex set of ops on a device, or on several devices as replicas that take requests in turn.

    Attributes:
        ops: op names in graph order.
        devices: one device name for each replica.
        backend: the backend of each replica.
        threads: threads of each replica.
        load_s: predicted busy seconds of one replica for each request that it takes.
        streams: requests that each replica works on at once; they share its threads and one copy of its weights.
        memory: predicted memory of each replica (``memory.stages``); None where it was not counted.
        precision: the precision in which it computes, if it is not that of the plan.
        resident_bytes: bytes of weights that stay on its accelerator while others are streamed (``residency``); None if all stay.
    """

    name: str
    ops: tuple[str, ...]
    devices: tuple[str, ...]
    backend: str = "eager"
    threads: int = 1
    load_s: float = 0.0
    streams: int = 1
    memory: StageMemory | None = None
    precision: Precision | None = None
    resident_bytes: int | None = None

    @property
    def way(self) -> str:
        """The backend, with the precision of the stage if it has one: the name in settings of profiles."""
        return backend_in(self.backend, self.precision)

    @property
    def shown(self) -> str:
        """The way in tables and sentences; it says where weights are streamed."""
        return self.way + ", streamed" * (self.resident_bytes is not None)


@dataclass(frozen=True, slots=True)
class Source:
    """The spec and sizes from which the model can be made again, and the values of its requests.

    ``values``: ``finite`` for finite floats and ids in their tables, else ``any``. ``trusted`` backends may err on the others.
    """

    spec: str
    batch: int = 1
    seq_len: int | None = None
    values: Literal["finite", "any"] = "finite"
    trusted: tuple[str, ...] = ()


ON_ESTIMATES = "on estimates of"
"""Words in the method of a plan that names the devices without measured times."""

PYTHON_OBJECT = Source("")
"""The source of a model that no spec names."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted seconds of each request of ``batch`` items, and the proved bound.

    Of a generator, ``bottleneck_s`` and ``bound_s`` are of a step, ``throughput_per_s`` counts new tokens, and ``latency_s`` is
    the time from one token of a sequence to its next one.

    No plan of the same kind has a bottleneck below ``bound_s`` in the same cost model; ``gap`` is ``1 - bound_s / bottleneck_s``.
    """

    bottleneck_s: float = 0.0
    latency_s: float = 0.0
    bound_s: float = 0.0
    gap: float = 1.0
    throughput_per_s: float = 0.0


UNKNOWN = Prediction()
"""The prediction of a plan without one, such as an edited plan."""


@checked
@dataclass(frozen=True, slots=True)
class Plan(tables.Tabular):
    """Stages in topological order, and their prediction.

    ``microbatch`` items pass the stages together; a request has ``source.batch``. ``queue_depth``: slots of each ring. ``why``
    explains the plan; ``explain()`` returns it if it belongs to these stages. ``precision``: that of stages that name no other.
    ``shapes``: sizes of requests that have several; the graph is that of the largest. ``sequences``: what the caches of a
    generator hold, and what it was planned for.
    """

    INDEX = "stage"
    source: Source
    graph_hash: str
    profile_hash: str
    stages: tuple[Stage, ...]
    prediction: Prediction
    objective: str = "throughput"
    method: str = "manual"
    status: Status = "manual"
    chosen: str = "plan"
    microbatch: int = 1
    queue_depth: int = QUEUE_DEPTH
    precision: Precision = "f32"
    loads_s: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    why: Explanation | None = None
    process: Process = "workers"
    shapes: Shapes | None = None
    sequences: Sequences | None = None

    @property
    def workers(self) -> list[tuple[Stage, Setting]]:
        """The stage and the setting of each worker, in the order of stages; replicas of a stage stand together."""
        return [(stage, Setting(name, stage.way, stage.threads)) for stage in self.stages for name in stage.devices]

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices of its stages, each once."""
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.devices))

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends of its stages, each once."""
        return tuple(dict.fromkeys(stage.backend for stage in self.stages))

    @property
    def bottleneck(self) -> str:
        """The device with the largest predicted load."""
        return max(self.loads_s, key=self.loads_s.__getitem__)

    @property
    def item(self) -> str:
        """The unit of its throughput: tokens of a generator, else items."""
        return "items" if self.sequences is None else "tokens"

    @property
    def hash(self) -> str:
        """Identity of placement: stages, devices, backends, threads, streams, residency, microbatch, queue depth, precision,
        process, buckets."""
        stages = [[s.ops, s.devices, s.backend, s.threads, *([s.streams] if s.streams > 1 else [])] for s in self.stages]
        placed: list[Any] = [self.graph_hash, stages, self.microbatch, self.queue_depth, self.precision]
        placed += [] if self.process == "workers" else [self.process]
        for own in ([stage.precision for stage in self.stages], [stage.resident_bytes for stage in self.stages]):
            placed += [own] if any(one is not None for one in own) else []
        if self.shapes is not None:
            placed.append({dim: list(found) for dim, found in self.shapes.buckets.items()})
            placed += [{"dynamic": sorted(self.shapes.dynamic)}] if self.shapes.dynamic else []
        return content_hash(placed)

    @property
    def precisions(self) -> list[Precision]:
        """The precision of each stage."""
        return [stage.precision or self.precision for stage in self.stages]

    def unpredicted(self) -> "Plan":
        """The plan without its prediction, of time and of memory."""
        stages = tuple(replace(stage, load_s=0.0, memory=None) for stage in self.stages)
        return replace(self, stages=stages, prediction=UNKNOWN, loads_s={}, status="manual")

    @property
    def placement(self) -> list[tuple[str, tuple[str, ...]]]:
        """The name of each stage in messages, and its ops."""
        return [(f"'{stage.name}'", stage.ops) for stage in self.stages]

    def verify(self, graph: Graph, machine: Machine) -> "Plan":
        """Return the plan, or raise PlanError with every fault against its graph and machine.

        Checked: the graph's hash, the place of each op, the order of stages, devices, backends, threads, streams, memory caps,
        microbatch, queue depth, precision, streamed weights, and that no two devices of the plan have a core in common.
        """
        check_graph(self.graph_hash, graph)
        faults = [*placement_faults(self.placement, graph), *_device_faults(self.stages, graph, machine)]
        if self.microbatch < 1 or self.source.batch % self.microbatch:
            faults.append(f"microbatch {self.microbatch} does not divide the batch of {self.source.batch} items")
        if not 1 <= self.queue_depth <= MAX_QUEUE_DEPTH:
            faults.append(f"queue_depth must be at least 1 and at most {MAX_QUEUE_DEPTH}, but is {self.queue_depth}")
        if self.process == "caller":
            faults += _caller_faults(self.stages, machine)
        faults += [
            f"precision must be one of {', '.join(get_args(Precision))}, but is {precision!r}"
            for precision in dict.fromkeys((self.precision, *self.precisions))
            if precision not in get_args(Precision)
        ]
        faults += [] if self.shapes is None else self.shapes.faults
        raise_faults(PlanError, f"plan does not fit graph '{graph.name}'", faults)
        return self

    def explain(self) -> Explanation:
        """Why the plan is not faster: its bottleneck, the reason, the cost of other cuts and the gain of changes.

        Raises: UsageError: the plan has no explanation, or its stages are not those that were explained.
        """
        if self.why is None or self.why.plan != self.hash:
            kept = "no explanation" if self.why is None else "the explanation of other stages"
            raise UsageError(f"the plan holds {kept}; autosplit.explain(graph, plan, machine, profile) makes one for it")
        return self.why

    def rows(self) -> list[dict[str, Any]]:
        """One row a stage."""
        return [
            {
                "stage": stage.name,
                "devices": " ".join(stage.devices),
                "backend": stage.shown,
                "threads": stage.threads,
                "ops": len(stage.ops),
                "first": stage.ops[0],
                "last": stage.ops[-1],
                "load_s": stage.load_s if self.prediction.throughput_per_s else None,
            }
            for stage in self.stages
        ]

    @property
    def cell(self) -> str:
        """The stages in one cell of a table: number of ops, devices, backend."""
        return " | ".join(f"{len(stage.ops)} on {'+'.join(stage.devices)} ({stage.shown})" for stage in self.stages)

    def __repr__(self) -> str:
        return f"Plan({self.summary()})"

    def _repr_html_(self) -> str:
        return tables.html(self.rows(), self.predicted())

    def predicted(self, verbose: bool = False) -> str:
        """The prediction and its proof in words; ``verbose`` adds the planner's own terms.

        >>> Plan(Source("m"), "g", "p", (), Prediction(0.1, 0.25, 0.06, 0.4, 10.0)).predicted()
        'predicted: 10 items/s, 250.00 ms a request; within 40 % of the best possible'
        """
        told = self.prediction
        if not told.throughput_per_s:
            return "nothing is predicted of this plan"
        gap = f"within {max(told.gap, 0) * 100:.0f} % of the best possible" if told.bound_s > 0 else "no lower bound is known"
        proved = "no plan can be better" if told.bound_s > 0 and self.status == "optimal" else gap
        if self.sequences is not None and told.bound_s > 0:  # of a step: the forecast of tokens has no bound
            proved = f"its busiest device is {gap}"
        terms = f" ({self.status}, gap {told.gap:.2%}, {self.method})" if verbose else ""
        each = "a request" if self.sequences is None else "from a token of a sequence to its next one"
        rate = f"{tables.number_text(told.throughput_per_s)} {self.item}/s, {tables.seconds_text(told.latency_s)} {each}"
        return f"{self.foretold}: {rate}; {proved}{terms}"

    def summary(self) -> str:
        """One sentence: the stages, the predicted throughput, and its proof."""
        ways = [stage.shown + (f", {stage.streams} streams" if stage.streams > 1 else "") for stage in self.stages]
        where = ", ".join(f"{len(s.ops)} ops on {'+'.join(s.devices)} ({w})" for s, w in zip(self.stages, ways, strict=True))
        status = "no chain with one stage on a device found, devices shared" if self.status == "shared" else self.status
        proof = f"{status}, gap {self.prediction.gap:.2%}" if self.prediction.bound_s > 0 else f"{status}, no bound"
        where += "" if self.precision == "f32" else f" in {self.precision}"
        where += "" if self.process == "workers" else " in the caller's process"
        per_s = self.prediction.throughput_per_s
        found = f"{tables.number_text(per_s)} {self.item}/s" if per_s else "nothing"
        return f"{where}: {found} {self.foretold} ({proof}, {self.method})"

    @property
    def foretold(self) -> str:
        """``predicted``; ``estimated`` where the times of a device were not measured."""
        return "estimated" if ON_ESTIMATES in self.method else "predicted"


def _caller_faults(stages: Sequence[Stage], machine: Machine) -> list[str]:
    """Why stages cannot run in the process of the caller."""
    kinds = {device.name: device.kind for device in machine.devices}
    faults = [f"the caller's process can hold one stage, and the plan has {len(stages)}"] if len(stages) > 1 else []
    return faults + [
        f"'{name}' is not a set of cores, and the caller's process computes on cores only"
        for stage in stages
        for name in stage.devices
        if kinds.get(name, "cpu") not in HOST_KINDS
    ]


def _device_faults(stages: Sequence[Stage], graph: Graph, machine: Machine) -> list[str]:
    known = {device.name: device for device in machine.devices}
    faults = []
    for stage in stages:
        away = [name for name in stage.devices if name not in known]
        faults += [f"stage '{stage.name}' is on '{name}', which is not a device here" for name in away]
        if fault := backend_fault(stage.backend):
            faults.append(f"stage '{stage.name}': {fault}")
        if len(set(stage.devices)) < len(stage.devices):
            faults.append(
                f"stage '{stage.name}' names a device twice: {', '.join(stage.devices)}; a replica is on one of its own"
            )
        for name in stage.devices:
            cores = len(known[name].cores) if name in known else 0
            if cores and stage.threads > cores:
                faults.append(f"stage '{stage.name}' wants {stage.threads} threads on '{name}', which has {cores} cores")
        for what, count in (("threads", stage.threads), ("streams", stage.streams)):
            if count < 1:
                faults.append(f"stage '{stage.name}' has {what}={count}; at least 1 is needed")
        if stage.streams > max(1, stage.threads):
            faults.append(f"stage '{stage.name}' has streams={stage.streams} and threads={stage.threads}; each stream takes one")
        if stage.resident_bytes is not None:
            own = graph.own_bytes(op for op in stage.ops if op in graph.index)
            told = streaming_faults(stage.devices, stage.backend, stage.resident_bytes, *own)
            faults += [f"stage '{stage.name}' {fault}" for fault in told]
    used = [device for device in machine.devices if any(device.name in stage.devices for stage in stages)]
    faults += [f"{fault}; a plan uses one of them" for fault in overlaps(used)]
    return faults + list(cap_faults(stages, machine.devices, graph).values())


def held_on(device: Device, stages: Sequence[Stage], devices: Iterable[Device], graph: Graph) -> tuple[int, int]:
    """Bytes of weights in the memory of a device, and bytes beside them, stages on devices that share the memory included.

    Each device has every weight of its stages once, a streamed one ``resident_bytes`` at most, and each worker its context.
    """
    weights = beside = 0
    for one in {device.name: device, **{other.name: other for other in devices if other.shares == device.name}}.values():
        there = [stage for stage in stages if one.name in stage.devices]
        beside += one.context_bytes * len(there)
        beside += sum(stage.memory.beside_bytes for stage in there if stage.memory is not None)
        known = [(stage.resident_bytes, tuple(op for op in stage.ops if op in graph.index)) for stage in there]
        weights += graph.stage_bytes(tuple(op for most, ops in known if most is None for op in ops))
        weights += sum(min(most, graph.stage_bytes(ops)) for most, ops in known if most is not None)
    return weights, beside


def cap_faults(stages: Sequence[Stage], devices: Sequence[Device], graph: Graph) -> dict[str, str]:
    """Device name to the fault, for each device whose memory would hold more than its cap."""
    faults, text = dict[str, str](), tables.bytes_text
    for device in devices:
        weights, beside = held_on(device, stages, devices, graph)
        if device.memory_bytes is None or weights + beside <= device.memory_bytes:
            continue
        parts = "values, rings, backend, process" if device.kind in HOST_KINDS else "values, inputs and outputs, backend, context"
        more = f" and {text(beside)} beside them ({parts})" if beside else ""
        sharing = [other.name for other in devices if other.shares == device.name]
        of = f", with {', '.join(sharing)}," if sharing else ""
        faults[device.name] = (
            f"device '{device.name}'{of} would hold {text(weights)} of weights{more}, and its cap is {text(device.memory_bytes)}"
        )
    return faults
