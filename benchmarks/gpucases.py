"""A model on cores and accelerators: simulated ones, or a real card. Tables are made of either by the same code."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torch
from simulated import Simulated
from simulatedmemory import BUS_BYTES_PER_S, OP_S
from simulatedruns import seconds_of_requests

import autosplit
from autosplit.backends.placing import PlacedStage, place_runnable
from autosplit.costs.planschedule import schedule_plan
from autosplit.deploying.setup import Budget, Setup
from autosplit.devices.accelerators import Accelerator, Event, Queue, Work
from autosplit.devices.cuda import Cuda
from autosplit.devices.discovering import machine_for
from autosplit.planning.caps import plan_within_caps
from autosplit.planning.predicting import predict
from autosplit.planning.question import Question
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import place_stage, unsplit
from autosplit.values.constraints import Constraints
from autosplit.values.links import Link, bus
from autosplit.values.machine import HOST, Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Stage
from autosplit.values.profile import Profile
from autosplit.values.residency import least_bytes

CORE, CORE_BYTES_PER_S = "cpu:0", 1.5e9


@dataclass(frozen=True)
class Case:
    """A model, its profile, and a machine.

    Attributes:
        traced: the model.
        profile: seconds of its ops, and links.
        machine: a core (or a set) first, then accelerators, without caps.
        core_s: on simulated accelerators the given seconds of each op on the core; None on a real card.
        buses: accelerators that share so many bytes a second in each direction, where they are simulated.
    """

    traced: Traced
    profile: Profile
    machine: Machine
    core_s: Mapping[str, float] | None = None
    buses: Sequence[tuple[Sequence[str], float]] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """The names of all ops."""
        return tuple(op.name for op in self.traced.graph.ops)

    @property
    def names(self) -> tuple[str, ...]:
        """The core and the accelerators."""
        return tuple(device.name for device in self.machine.devices)

    def planned(self, room: int, time_limit_s: float = 0.5) -> Plan:
        """The plan where each accelerator has so many bytes for weights; the time limit is that of each question to a solver."""
        graph, caps = self.traced.graph, {d.name: room + self.beside_bytes for d in self.machine.devices[1:]}
        machine = self.machine.with_memory(caps)
        constraints = Constraints(max_replicas=1)
        source = self.traced.source
        question = Question(graph, self.profile, source, machine, ("eager",), constraints, time_limit_s=time_limit_s)
        return plan_within_caps(question).verify(graph, machine)

    def given(self, *stages: Stage) -> Plan:
        """A plan of these stages, with its prediction."""
        return predict(
            Plan(self.traced.source, self.traced.graph.hash, "", stages, UNKNOWN), self.traced.graph, self.machine, self.profile
        )

    def streamed(self) -> Plan:
        """All on the first accelerator, as few weights there as possible."""
        return self.given(Stage("s", self.ops, (self.names[1],), resident_bytes=self.least_bytes))

    @property
    def beside_bytes(self) -> int:
        """Bytes that are left for values, contexts and tensors for inputs and outputs beside weights on an accelerator."""
        graph, context_bytes = self.traced.graph, max(device.context_bytes for device in self.machine.devices)
        ends = sum(graph.values[name].num_bytes for name in (*graph.inputs, *graph.outputs))
        return 4 * ends + sum(value.num_bytes for value in graph.values.values()) // 8 + (1 << 16) + context_bytes

    @property
    def least_bytes(self) -> int:
        """Least bytes of the model's weights on an accelerator."""
        return least_bytes(*self.traced.graph.own_bytes(self.ops))

    def on_core(self) -> Plan:
        """All on the core."""
        return self.given(Stage("s", self.ops, (self.names[0],), threads=max(1, len(self.machine.devices[0].cores))))

    def run_per_s(self, plan: Plan, count: int = 20) -> float:
        """Requests a second: by the clocks of simulated devices over so many requests, or as a card runs them in workers."""
        if self.core_s is not None:
            return 1 / seconds_of_requests(self.traced, plan, self.core_s, self.buses, count)
        setup, budget = Setup(progress=False), Budget(num_rounds=2)
        return autosplit.run(self.traced, plan, self.machine, baselines=False, setup=setup, budget=budget).best.throughput_per_s

    def scheduled_per_s(self, plan: Plan) -> float:
        """Requests a second in the simulation of a schedule."""
        machine = self.machine.with_measured(self.profile.links)
        schedule = schedule_plan(plan, self.traced.graph, self.profile, machine.link, num_requests=60, wires=machine.wires)
        return schedule.steady_per_s

    def rule_per_s(self, room: int) -> float:
        """Requests a second by the rule of accelerate: weights fill the device in order, each later layer is copied first."""
        gpu, filled, total_s = self.names[1], 0, 0.0
        rate = self.machine.with_measured(self.profile.links).link(HOST, gpu).pinned_s_per_byte
        for op, size in zip(self.ops, self.traced.graph.own_bytes(self.ops)[0], strict=True):
            filled += size
            total_s += self.profile.op_s(op, gpu, "eager") + (size * rate if filled > room else 0.0)
        return 1 / total_s


def simulated_case(traced: Traced, num_gpus: int, bytes_per_s: float = 0.0, peer_to_peer: bool = False) -> Case:
    """A core, and accelerators with a link each; they share a bus unless ``bytes_per_s`` is 0."""
    graph, gpus = traced.graph, [f"cuda:{number}" for number in range(num_gpus)]
    ops = [op.name for op in graph.ops]
    core_s = {op: max(OP_S, size / CORE_BYTES_PER_S) for op, size in zip(ops, graph.own_bytes(ops)[0], strict=True)}
    profile = Profile.given(graph, {(op, CORE): core_s[op] for op in ops} | {(op, gpu): OP_S for op in ops for gpu in gpus})
    ends, rate = (HOST, CORE, *gpus), 1 / BUS_BYTES_PER_S
    pairs = [(a, b) for a in ends for b in ends if a != b]
    links = [Link(a, b, 0, 0, 0, 0, 0, pinned_s_per_byte=rate if a == HOST and b in gpus else 0) for a, b in pairs]
    own = [wire for gpu in gpus for wire in bus([gpu], [end for end in ends[1:] if end != gpu], rate)]
    both = bus(gpus, [CORE], 1 / bytes_per_s, peer_to_peer) if bytes_per_s else ()
    machine = Machine.of(map(parse_device, ends[1:]), links, (*own, *both))
    return Case(traced, profile, machine, core_s, [(gpus, bytes_per_s)] if bytes_per_s else ())


def card_case(traced: Traced) -> Case:
    """All cores but one as a set, and the first card, measured."""
    cores = [device.cores[0] for device in machine_for("cpu").devices]
    machine = machine_for(f"cpu:{cores[0]}-{max(cores[-2:-1], default=cores[0])},cuda:0")
    setup = Setup(backends="eager", progress=False)
    return Case(traced, autosplit.measure(traced, machine, setup=setup), machine)


def accelerator(is_card: bool) -> Accelerator:
    """The first card, or a simulated one, in this process."""
    return Cuda(0) if is_card else Simulated()


def placed(traced: Traced, device: Accelerator, record: bool, compiles: bool = False) -> PlacedStage:
    """A model on an accelerator with eager's kernels, or compiled by inductor, recorded as a graph or launched one by one."""
    program = unsplit(traced)
    forward = place_stage(program, device.device).module.forward
    call = torch.compile(forward, fullgraph=True, dynamic=False) if compiles else forward
    return place_runnable(device, lambda *_: (lambda inputs: call(*inputs), True), program.inputs, program.outputs, record=record)


def _settled(device: Accelerator) -> Event:
    """An event for the beginning of a measurement; the queues of a simulated device begin at one time, as those of a card do."""
    device.restart() if isinstance(device, Simulated) else device.synchronise()
    return device.event()


def alone_per_s(stage: PlacedStage, inputs: Sequence[torch.Tensor], count: int) -> float:
    """Requests a second one after the other in one queue: pinned copies in, compute, copies out, a wait for each."""
    device, context, queue = stage.accelerator, stage.contexts[0], stage.computing
    first, last = _settled(device), device.event()
    first.record(queue)
    for _ in range(count):
        for tensor, value in zip(context.sources, inputs, strict=True):
            tensor.host.copy_(value)
        for work in (context.arrive, context.compute, context.leave):
            device.enqueue(queue, work)
        last.record(queue)
        last.synchronise()
    return count / last.seconds_since(first)


def limits_per_s(stage: PlacedStage, count: int) -> tuple[float, float]:
    """Requests a second if copies took no time, and if compute took none: the slower direction, each alone in its queue."""
    context, device = stage.contexts[0], stage.accelerator

    def alone(queue: Queue, work: Work) -> float:
        first, last = _settled(device), device.event()
        first.record(queue)
        for _ in range(count):
            device.enqueue(queue, work)
        last.record(queue)
        last.synchronise()
        return count / last.seconds_since(first)

    ways = (stage._arriving, context.arrive), (stage._leaving, context.leave)
    return alone(stage.computing, context.compute), min(alone(*way) for way in ways)


def ours_per_s(stage: PlacedStage, inputs: Sequence[torch.Tensor], count: int) -> float:
    """Requests a second as a worker runs them, from the end of a first one on: the copies of neighbours beside compute."""
    first, last = _settled(stage.accelerator), stage.accelerator.event()
    stage.begin(inputs)
    first.record(stage._leaving)
    for _ in range(count):
        stage.begin(inputs)
    last.record(stage._leaving)
    last.synchronise()
    return count / last.seconds_since(first)
