"""A model larger than its accelerator, under caps from 10 to 100 % of its weights, on the simulated accelerator of the tests.

    make bench-gpu

The accelerator takes 10 us for an op and copies 10 GB/s; a core takes an op's weights at 1.5 GB/s. Stages on the accelerator
are run there, their answers are compared in all bits with those of torch on a core, and the seconds of a request are those of
the clock of the device. Seconds of a core are given, not measured. The rule of accelerate is a formula: weights fill the device
in order, and each later layer is copied before it computes, for each request; the copy of the answer is left out.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from simulated import Simulated
from simulatedmemory import BUS_BYTES_PER_S, OP_S

import autosplit
from autosplit.backends.placing import place_runnable
from autosplit.backends.streaming import streamed_runnable
from autosplit.memory.account import Account
from autosplit.planning.caps import plan_within_caps
from autosplit.planning.question import Question
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import split
from autosplit.values.constraints import Constraints
from autosplit.values.links import Link
from autosplit.values.machine import HOST, Machine, parse_device
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.residency import least_bytes

TABLE, MODEL = Path("benchmarks/gpu.md"), "autosplit.examples.mlp:mlp?depth=24&width=512"
CORE, GPU, CORE_BYTES_PER_S = "cpu:0", "cuda:0", 1.5e9
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
NUM_REQUESTS = 20
BESIDE_BYTES = 1 << 16


def on_device_s(traced: Traced, ops: tuple[str, ...], resident_bytes: int) -> float:
    """Simulated seconds of a request in a row of requests. Raises: AssertionError: an answer is another one than on a core."""
    device = Simulated()
    order = [op.name for op in traced.graph.ops]
    rest = [name for name in order if name not in ops]
    before = [name for name in rest if order.index(name) < order.index(ops[0])]
    stages = [part for part in (before, list(ops), [name for name in rest if name not in before]) if part]
    program = split(traced, stages)[stages.index(list(ops))]
    run = place_runnable(
        device,
        lambda one, queue: (streamed_runnable(program, resident_bytes, one, queue), False),
        program.inputs,
        program.outputs,
    )
    inputs = [torch.rand(spec.shape) for spec in program.inputs]
    for made, right in zip(run(inputs), program.module(*inputs), strict=True):
        assert torch.equal(made, right)
    begun_s = run.computing.time_s
    for _ in range(NUM_REQUESTS):
        begun = run.begin(inputs)
    begun.outputs()
    return float((run.computing.time_s - begun_s) / NUM_REQUESTS)


def simulated_s(traced: Traced, plan: Plan, core_s: dict[str, float]) -> float:
    """Seconds of a request of the slowest stage of a plan."""
    found = []
    for stage in plan.stages:
        held = traced.graph.stage_bytes(stage.ops) if stage.resident_bytes is None else stage.resident_bytes
        found.append(sum(core_s[op] for op in stage.ops) if stage.devices == (CORE,) else on_device_s(traced, stage.ops, held))
    return max(found)


def main() -> None:
    """Write the table."""
    traced = autosplit.trace(MODEL)
    graph = traced.graph
    ops = tuple(op.name for op in graph.ops)
    own, shared = graph.own_bytes(ops)
    core_s = {op: max(OP_S, size / CORE_BYTES_PER_S) for op, size in zip(ops, own, strict=True)}
    profile = Profile.given(graph, {(op, CORE): core_s[op] for op in ops} | {(op, GPU): OP_S for op in ops})
    rate = 1 / BUS_BYTES_PER_S
    pairs = [(a, b) for a in (HOST, CORE, GPU) for b in (HOST, CORE, GPU) if a != b]
    links = [Link(a, b, 0, 0, 0, 0, 0, pinned_s_per_byte=rate if (a, b) == (HOST, GPU) else 0) for a, b in pairs]
    lines = [
        "# Models larger than their accelerator",
        "",
        f"Made by `make bench-gpu` on the **simulated** accelerator of the tests, not on a GPU. {MODEL}, "
        f"{graph.weight_bytes / 1e6:.1f} MB of weights; items/s.",
        "",
        (__doc__ or "").partition("make bench-gpu\n\n")[2].strip(),
        "",
        "| cap | plan | predicted | simulated | all streamed | all on the core | accelerate's rule |",
        "|---|---|---|---|---|---|---|",
    ]
    for share in SHARES:
        room = int(share * graph.weight_bytes)
        machine = Machine.of(map(parse_device, (CORE, GPU)), links).with_memory({GPU: room + BESIDE_BYTES})
        source = traced.source
        question = Question(graph, profile, source, machine, ("eager",), Constraints(max_replicas=1), time_limit_s=2.0)
        plan = plan_within_caps(question, Account(graph)).verify(graph, machine)
        ours_s = simulated_s(traced, plan, core_s)
        least = least_bytes(own, shared)
        streamed = f"{1 / on_device_s(traced, ops, least):.0f}" if least <= room else "no room"
        filled, fixed_s = 0, 0.0
        for size in own:
            filled += size
            fixed_s += OP_S + (size * rate if filled > room else 0.0)
        placed = [(s, "streamed" if s.resident_bytes else "resident" if GPU in s.devices else "on the core") for s in plan.stages]
        how = " + ".join(f"{len(stage.ops)} ops {kind}" for stage, kind in placed)
        rates = (plan.prediction.throughput_per_s, 1 / ours_s, streamed, 1 / sum(core_s.values()), 1 / fixed_s)
        told = (one if isinstance(one, str) else f"{one:.0f}" for one in rates)
        lines.append(f"| {share:.0%} | {how} | {' | '.join(told)} |")
        print(lines[-1])
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
