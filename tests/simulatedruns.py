"""Run a plan on simulated accelerators and cores in one process, in simulated time, as its workers would run it together.

Each stage on an accelerator is placed as in a worker; its queues keep the time. A stage on a core computes in given seconds. A
request enters a stage when its inputs are there, and not before the next stage has taken the one ``depth`` requests earlier. That
a worker waits for the answer of a request before it begins the third one after it is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import simulatedmemory
import torch
from simulated import Simulated

from autosplit.backends.placing import PlacedStage, place_runnable
from autosplit.backends.streaming import streamed_runnable
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import StageProgram, place_stage, split
from autosplit.values.plan import Plan, Stage


@dataclass
class _OnCore:
    """A replica on a core."""

    program: StageProgram
    seconds: float
    free_s: float = 0.0

    def __call__(self, inputs: Sequence[torch.Tensor], ready_s: float) -> tuple[list[torch.Tensor], float, float]:
        """The outputs, when it took the request, and when they are there."""
        taken_s = max(ready_s, self.free_s)
        self.free_s = taken_s + self.seconds
        return list(self.program.module(*inputs)), taken_s, self.free_s


@dataclass
class _OnDevice:
    """A replica on an accelerator."""

    stage: PlacedStage

    def __call__(self, inputs: Sequence[torch.Tensor], ready_s: float) -> tuple[list[torch.Tensor], float, float]:
        self.stage._arriving.time_s = max(self.stage._arriving.time_s, ready_s)
        begun = self.stage.begin(inputs)
        made = [one.clone() for one in begun.outputs()]
        return made, begun.arrived.at_s, begun.left.at_s


def placed(program: StageProgram, device: Simulated, resident_bytes: int | None) -> PlacedStage:
    """A stage on a device, its weights streamed if they do not all stay."""

    def place(one, queue):
        if resident_bytes is not None:
            return streamed_runnable(program, resident_bytes, one, queue), False
        forward = place_stage(program, one.device).module.forward
        return lambda inputs: forward(*inputs), True

    return place_runnable(device, place, program.inputs, program.outputs)


def seconds_of_requests(
    traced: Traced, plan: Plan, core_s: Mapping[str, float], buses: Sequence[tuple[Sequence[str], float]] = (), count: int = 20
) -> float:
    """Simulated seconds of a request once the stages are full.

    Args:
        traced: the model.
        plan: its plan; a device has one stage.
        core_s: seconds of each op on a core.
        buses: names of accelerators that share so many bytes a second in each direction.
        count: requests, of which the second half counts.
    Raises: AssertionError: an answer is another one than on a core.
    """
    order = {op.name: number for number, op in enumerate(traced.graph.ops)}
    stages = sorted(plan.stages, key=lambda stage: order[stage.ops[0]])
    shared = {name: simulatedmemory.Bus(rate) for names, rate in buses for name in [",".join(names)]}
    bus_of = {name: shared[",".join(names)] for names, _ in buses for name in names}
    programs = split(traced, [list(stage.ops) for stage in stages])
    rows = [_replicas(program, stage, core_s, bus_of) for program, stage in zip(programs, stages, strict=True)]
    try:
        finished_s = _finished_s(traced, plan.queue_depth, programs, rows, count)
    finally:
        for memory in simulatedmemory.Memory.devices.values():
            memory.bus = None
    half = count // 2
    return (max(finished_s) - max(finished_s[:half])) / (count - half)


def _finished_s(
    traced: Traced, depth: int, programs: Sequence[StageProgram], rows: Sequence[Sequence[_OnCore | _OnDevice]], count: int
) -> list[float]:
    """When each request is done."""
    taken_s: list[list[float]] = [[] for _ in rows]
    finished_s: list[float] = []
    for number in range(count):
        given = [torch.rand_like(one) if one.is_floating_point() else one for one in traced.example_inputs]
        values = dict(zip(traced.graph.inputs, given, strict=True))
        there_s, inputs = dict.fromkeys(values, 0.0), list(values.values())
        for position, (program, replicas) in enumerate(zip(programs, rows, strict=True)):
            ready_s = max(there_s[spec.name] for spec in program.inputs)
            if position + 1 < len(rows) and number >= depth:
                ready_s = max(ready_s, taken_s[position + 1][number - depth])
            made, begun_s, done_s = replicas[number % len(replicas)]([values[spec.name] for spec in program.inputs], ready_s)
            taken_s[position].append(begun_s)
            values |= dict(zip((spec.name for spec in program.outputs), made, strict=True))
            there_s |= {spec.name: done_s for spec in program.outputs}
        for name, right in zip(traced.graph.outputs, traced.program(*inputs), strict=True):
            assert torch.equal(values[name], right)
        finished_s.append(max(there_s[name] for name in traced.graph.outputs))
    return finished_s


def _replicas(
    program: StageProgram, stage: Stage, core_s: Mapping[str, float], bus_of: Mapping[str, simulatedmemory.Bus]
) -> list[_OnCore | _OnDevice]:
    found: list[_OnCore | _OnDevice] = []
    for name in stage.devices:
        kind, _, index = name.partition(":")
        if kind != "cuda":
            found.append(_OnCore(program, sum(core_s[op] for op in stage.ops)))
            continue
        device = Simulated(int(index))
        device.memory.bus = bus_of.get(name)
        found.append(_OnDevice(placed(program, device, stage.resident_bytes)))
        device.restart()
        device.host_s = None
    return found
