"""The memory account: the bytes of each stage of a plan, for planners, the host, tables and reports alike.

A measured stage counts with its footprint. Another one counts its weights, its values at their peak, the bytes of its backend for
each of its programs, and the least that any measured stage of its backend took beside these on the same kind of device.

On an accelerator only the memory of the accelerator counts: in place of the worker's rings and process, the inputs and outputs of
the requests in progress. ``Device.context_bytes`` has the bytes of the context of a worker there.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autosplit.memory.arena import bound_of
from autosplit.memory.lives import Step, aligned, lives_of
from autosplit.memory.slots import HOST, NUM_CONTEXTS, Workers, at_once, in_flight, num_slots
from autosplit.values.graph import Graph, Op
from autosplit.values.machine import HOST_KINDS, Device, Machine, kind_of
from autosplit.values.plan import Plan, Stage, StageMemory
from autosplit.values.profile import Profile
from autosplit.values.samples import FROM_ONNX, Footprint, Precision, Setting, runtime_of, stage_key

LOOKUP = "aten.embedding.default"
"""The operator that reads rows of a weight as it is."""

PRODUCT = "aten.linear.default"
"""The operator that may read its weight as it is (``backends.rowops``)."""

COMPILED = "compiled"
"""In place of a backend: the steps of a stage whose products read weights as they are stored, which need no file of a runtime."""

SHARING = ("eager", "onnxruntime")
"""Backends with one copy of the weights for all programs of a stage. The others pack the weights anew for each."""

BUFFER_BYTES = {"eager": 3_900_000, "onnxruntime": 14_000_000, "openvino": 16_000_000, COMPILED: 4_600_000}
"""Bytes that a backend holds once in a worker with several programs: its library's state, buffers of matrix products, free blocks
of its arena. Fitted with ``OP_BYTES`` to workers of a Llama of 25 M parameters, whole and in two stages; those of runtimes while
files of theirs computed its products. Workers beside the counted bytes (``benchmarks.generation_memory``):

=====================================  ========  ===============  =======
worker, held / counted, MB             programs  compiled         eager
=====================================  ========  ===============  =======
that Llama, whole, 16 sequences        8         161/160
in halves of its layers, 8 sequences   7         50/51, 98/97
that Llama, whole                      7                          154/154
GPT-2 of 124 M, 12 layers              5                          617/612
=====================================  ========  ===============  =======

With OpenVINO as the backend of these stages, its workers held the same as with ONNX Runtime to 0.2 MB.
In bf16, where each of four programs packs, the worker for one sequence held 366 MB, and 392 are counted.
"""

OP_BYTES = {"eager": 4_550, "onnxruntime": 4_200, "openvino": 43_000, COMPILED: 2_200}
"""Bytes that a backend holds for each op of each such program: code, nodes of its graph, kernels, the plan of their memory."""

HALVES: tuple[Precision, ...] = ("bf16", "f16")
"""Precisions in which a weight of float32 takes half of its bytes."""

OF_TORCH = ("aten.", "prims.")
"""Namespaces of operators that files of a runtime hold; others run in torch between these (``backends.pieces``)."""


class StageKey(NamedTuple):
    """The key of a footprint: how a stage runs, and its ops (``stage_key``). Of its device only the kind counts."""

    kind: str
    backend: str
    threads: int
    precision: Precision
    ops: str


Known = Mapping[StageKey, Footprint]
"""Footprints of stages of one model."""


def key_of(plan: Plan, stage: Stage) -> StageKey:
    """The key of a stage of a plan."""
    precision, ops = stage.precision or plan.precision, stage_key(stage.ops, stage.streams)
    return StageKey(_kind(stage), stage.backend, stage.threads, precision, ops)


def footprints_of(profile: Profile | None) -> dict[StageKey, Footprint]:
    """The footprints that a profile holds; none if there is no profile."""
    if profile is None:
        return {}
    return {
        StageKey(*_place(setting, profile), ops): one
        for setting, measured in profile.measured.items()
        for ops, one in measured.footprints.items()
    }


def _place(setting: Setting, profile: Profile) -> tuple[str, str, int, Precision]:
    """The key of footprints in a setting, without the ops."""
    return kind_of(setting.device), setting.runtime, setting.threads, setting.precision or profile.precision


@dataclass(frozen=True, slots=True)
class ValueMemory:
    """Bytes of memory of each value, and for each view the value or weight whose memory it shares.

    ``others`` are the bytes at each further size of the model, for which a worker holds a program of its own.
    """

    num_bytes: Mapping[str, int]
    views: Mapping[str, str] = field(default_factory=dict)
    others: Sequence[Mapping[str, int]] = ()

    @staticmethod
    def of(graph: Graph) -> "ValueMemory":
        """The values of a graph as dense tensors, each in memory of its own."""
        return ValueMemory({name: value.num_bytes for name, value in graph.values.items()})


def stage_memories(graph: Graph, plan: Plan, values: ValueMemory | None = None, known: Known | None = None) -> list[StageMemory]:
    """The memory of each stage.

    No op is taken to write over its input: torch eager writes every result to new memory.

    Args:
        graph: the model, traced for the plan's microbatch.
        values: the bytes of the values; by default those of dense tensors.
        known: measured footprints.
    """
    values = values or ValueMemory.of(graph)
    rings = _ring_bytes(graph, plan, values.num_bytes)
    return [_stage_memory(graph, plan, number, values, known or {}, rings[number]) for number in range(len(plan.stages))]


def count(graph: Graph, plan: Plan, values: ValueMemory | None = None, known: Known | None = None) -> Plan:
    """The plan with the memory of each of its stages; arguments as for ``stage_memories``."""
    found = stage_memories(graph, plan, values, known)
    return replace(plan, stages=tuple(replace(stage, memory=one) for stage, one in zip(plan.stages, found, strict=True)))


def with_footprints(profile: Profile, known: Known) -> Profile:
    """The profile with these footprints. Each goes to the first setting with its kind, backend, threads and precision."""
    measured = dict(profile.measured)
    for key, one in known.items():
        alike = (s for s in measured if _place(s, profile) == key[:-1])
        setting = next(alike, None)
        if setting is not None:
            measured[setting] = replace(measured[setting], footprints={**measured[setting].footprints, key.ops: one})
    return replace(profile, measured=measured)


def least_base_bytes(known: Known, backends: Iterable[str], device: Device) -> int:
    """The least that a bare worker of any of the backends takes on a device; 0 where one of them was not measured."""
    least = (min((one.base_bytes for one in _of(known, device.kind, runtime_of(name)[0])), default=0) for name in backends)
    return device.context_bytes or min(least, default=0)


def within(machine: Machine, taken: Mapping[str, int]) -> Machine:
    """The machine whose caps are smaller by the bytes that each device has taken, but at least 1 B."""
    caps = {
        device.name: max(1, device.memory_bytes - taken.get(device.name, 0))
        for device in machine.devices
        if device.memory_bytes is not None
    }
    return machine.with_memory(caps)


def uncapped(machine: Machine) -> Machine:
    """The machine without caps, on which plans are measured that may turn out too large for them."""
    return replace(machine, devices=tuple(replace(device, memory_bytes=None) for device in machine.devices))


def _stage_memory(graph: Graph, plan: Plan, number: int, values: ValueMemory, known: Known, ring_bytes: int) -> StageMemory:
    stage = plan.stages[number]
    weight_bytes, kind = graph.stage_bytes(stage.ops), _kind(stage)
    if plan.shapes is not None and stage.backend in plan.shapes.dynamic:
        values = replace(values, others=())
    if stage.resident_bytes is not None:
        weight_bytes = min(weight_bytes, stage.resident_bytes)
    as_stored = _multiplies_as_stored(graph, plan, stage)
    parts = _parts(graph, stage, values) if kind in HOST_KINDS else []
    handed = {value for part in parts for value in (*part.reads, *part.writes)}
    arena_bytes = _arena_bytes(graph, stage, values, handed) * stage.streams
    found, others = known.get(key_of(plan, stage)), _of(known, kind, stage.backend)
    base_bytes = 0 if plan.process == "caller" else max((one.base_bytes for one in others), default=0)
    backend_bytes = min((one.extra_bytes for one in others), default=0)
    num_programs, is_halved = 1 + len(values.others) * (kind in HOST_KINDS), (stage.precision or plan.precision) in HALVES
    backend_bytes += _copied_bytes(graph, stage, num_programs, as_stored, is_halved)
    if kind in HOST_KINDS:
        backend_bytes += _program_bytes(graph, stage, values, parts, COMPILED if as_stored else stage.backend)
    if found is not None:
        base_bytes = found.base_bytes
        backend_bytes = max(0, found.held_bytes - weight_bytes - arena_bytes)
        arena_bytes = min(arena_bytes, max(0, found.held_bytes - weight_bytes))
    return StageMemory(weight_bytes, arena_bytes, backend_bytes, ring_bytes, base_bytes, found is not None)


def _copied_bytes(graph: Graph, stage: Stage, num_programs: int, as_stored: bool, is_halved: bool) -> int:
    """Bytes of packed weights beside their file: those of each of several programs that share none, else tables that are packed
    for a product and read as they are stored by a lookup. ``is_halved``: those of float32 are packed in 2 bytes."""
    ops = [graph.ops[graph.index[name]] for name in stage.ops]
    packing = [op for op in ops if op.operator != LOOKUP and not _is_custom(op) and not (as_stored and _is_product(graph, op))]
    packed = {name for op in packing for name in op.weights}
    if num_programs == 1 or stage.backend in SHARING:
        num_programs = 1
        packed &= {name for op in ops if op.operator == LOOKUP and stage.backend in FROM_ONNX for name in op.weights}
    weights = [graph.weights[name] for name in packed]
    return num_programs * sum(one.num_bytes // (2 if is_halved and one.dtype == "float32" else 1) for one in weights)


def _multiplies_as_stored(graph: Graph, plan: Plan, stage: Stage) -> bool:
    """Whether products read weights as they are stored (``backends.simplifying``): in f32 beside custom operators."""
    is_free = plan.shapes is not None and stage.backend in plan.shapes.dynamic
    is_f32 = (stage.precision or plan.precision) == "f32"
    ops = [graph.ops[graph.index[name]] for name in stage.ops]
    has_both = any(map(_is_custom, ops)) and any(_is_product(graph, op) for op in ops)
    return stage.backend in FROM_ONNX and is_f32 and not is_free and has_both


def _is_product(graph: Graph, op: Op) -> bool:
    return op.operator == PRODUCT and graph.values[op.outputs[0]].dtype == "float32"


def _is_custom(op: Op) -> bool:
    return "." in op.operator and not op.operator.startswith(OF_TORCH)


def _parts(graph: Graph, stage: Stage, values: ValueMemory) -> list[Step]:
    """The files of a runtime and the custom operators between them, with the values that they hand each other; none without such
    operators. They are those of ``backends.pieces``. The values lie in memory that stays for all requests. Where a compiled loop
    takes the place of the files, it holds about as many bytes at its peak."""
    ops = [graph.ops[graph.index[name]] for name in stage.ops if stage.backend in FROM_ONNX]
    custom = {op.name for op in filter(_is_custom, ops)}
    part, reads = dict[str, int](), dict[int, dict[str, None]]()
    for op in ops if custom else ():
        read = [_root(value, values) for value in op.inputs]
        last = max((part.get(value, 0) for value in read), default=0)
        number = last + (last % 2 != (op.name in custom))
        reads.setdefault(number, {}).update(dict.fromkeys(value for value in read if part.get(value) != number))
        part |= {value: number for value in op.outputs if value not in values.views}
    handed = {value for some in reads.values() for value in some} | {_root(value, values) for value in _leaving(graph, stage)}
    return [
        Step(tuple(reads[number]), tuple(value for value, home in part.items() if home == number and value in handed))
        for number in sorted(reads)
    ]


def _root(value: str, values: ValueMemory) -> str:
    """The value whose memory a value shares; its own name for one with memory of its own."""
    while value in values.views:
        value = values.views[value]
    return value


def _program_bytes(graph: Graph, stage: Stage, values: ValueMemory, parts: Sequence[Step], by: str) -> int:
    """Bytes of the programs of a stage where it has several, one for each size, and of the values that their parts hand over."""
    sizes = values.num_bytes, *values.others
    own_bytes = BUFFER_BYTES.get(by, 0) + len(sizes) * len(stage.ops) * OP_BYTES.get(by, 0)
    made = {value for part in parts for value in part.writes}
    given = {value for part in parts for value in part.reads} - made
    kept = given | {_root(value, values) for value in _leaving(graph, stage)}
    own_bytes *= bool(values.others)
    return own_bytes + sum(bound_of(lives_of(parts, some, given=given, kept=kept & (made | given))) for some in sizes if parts)


def _leaving(graph: Graph, stage: Stage) -> set[str]:
    """The values that a stage makes for others."""
    inside = set(stage.ops)
    made = {value for op in stage.ops for value in graph.ops[graph.index[op]].outputs}
    return {value for value in made if value in graph.outputs or not inside.issuperset(graph.consumers[value])}


def _kind(stage: Stage) -> str:
    """The kind of a stage's devices. With replicas of several kinds it is that of a core, where a worker takes more."""
    return min(map(kind_of, stage.devices), key=lambda kind: kind not in HOST_KINDS)


def _of(known: Known, kind: str, backend: str) -> list[Footprint]:
    """The footprints of a backend on a kind of device."""
    return [one for key, one in known.items() if (key.kind, key.backend) == (kind, backend)]


def _arena_bytes(graph: Graph, stage: Stage, values: ValueMemory, elsewhere: Collection[str]) -> int:
    """The peak of the values that a stage makes, but for those that lie elsewhere."""
    ops = [graph.ops[graph.index[name]] for name in stage.ops]
    made = {value for op in ops for value in op.outputs}
    lives = lives_of(
        [Step(op.inputs, op.outputs) for op in ops],
        {value: size for value, size in values.num_bytes.items() if value in made and value not in elsewhere},
        given={value for op in ops for value in op.inputs} - made,
        kept=_leaving(graph, stage),
        views=values.views,
    )
    return bound_of(lives)


def _ring_bytes(graph: Graph, plan: Plan, num_bytes: Mapping[str, int]) -> list[int]:
    """For each stage the bytes of slots that one replica reads, and of those from which the host reads its results.

    For a stage on an accelerator these are the tensors on the device that take its inputs and outputs, for each context.
    """
    at_work = [at_once(map(kind_of, stage.devices), stage.streams) for stage in plan.stages]
    workers = [Workers(len(one.devices), busy, plan.queue_depth) for one, busy in zip(plan.stages, at_work, strict=True)]
    if plan.process == "caller":
        return [0] * len(workers)
    home = {
        value: number
        for number, stage in enumerate(plan.stages)
        for op in stage.ops
        for value in graph.ops[graph.index[op]].outputs
    }
    read = [{v for op in stage.ops for v in graph.ops[graph.index[op]].inputs} for stage in plan.stages]
    entering = [{v for v in values if home.get(v, HOST) != number} for number, values in enumerate(read)]
    answers = [{v for v in graph.outputs if home.get(v) == number} for number in range(len(workers))]
    host_values = [v for values in entering for v in values if v not in home] + [v for values in answers for v in values]
    _, most = in_flight(workers, sum(graph.values[v].num_bytes for v in host_values))
    levels, found, staged = list[int](), [], dict[int, int]()
    for number, values in enumerate(entering):
        if _kind(plan.stages[number]) not in HOST_KINDS:
            outside = {v for other, found in enumerate(read) if other != number for v in found} | {*graph.outputs}
            leaving = {v for v in outside if home.get(v) == number}
            staged[number] = NUM_CONTEXTS * sum(aligned(num_bytes[v]) for v in values | leaving)
        by_source: dict[int, int] = {}
        for value in values:
            by_source[home.get(value, HOST)] = by_source.get(home.get(value, HOST), 0) + aligned(num_bytes[value])
        levels.append(1 + max((levels[source] for source in by_source if source != HOST), default=-1))
        total = 0
        for source, size in by_source.items():
            replicas = 1 if source == HOST else workers[source].replicas
            rings = math.lcm(replicas, workers[number].replicas) // workers[number].replicas
            total += rings * num_slots(workers, source, number, levels, most) * size
        out_bytes = sum(aligned(num_bytes[value]) for value in answers[number])
        found.append(total + (num_slots(workers, number, HOST, levels, most) * out_bytes if out_bytes else 0))
    return [staged.get(number, ring_bytes) for number, ring_bytes in enumerate(found)]
