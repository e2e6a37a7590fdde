"""The objective of a plan, the demands that it breaks, and the plans that need no search."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from autosplit.costs.cost import TOLERANCE, evaluate
from autosplit.costs.faults import find_faults
from autosplit.costs.pieces import latency_s
from autosplit.costs.problem import Block, Problem
from autosplit.values.constraints import Demands


def objective_s(problem: Problem, demands: Demands, blocks: Sequence[Block]) -> float:
    """The objective in seconds: the largest device load, or the latency of one sample."""
    return latency_s(problem, blocks) if demands.objective == "latency" else evaluate(problem, blocks).bottleneck_s


def demand_faults(problem: Problem, demands: Demands, blocks: Sequence[Block]) -> list[str]:
    """A sentence for every rule of the problem and every demand that the blocks break."""
    faults = find_faults(problem, blocks, contiguous=demands.contiguous)
    if faults:
        return faults
    used = [device for block in blocks for device in block.devices]
    if len(set(used)) < len(used) and not demands.reuse:
        faults.append("two blocks share a device")
    widest = max(len(block.devices) for block in blocks)
    shortest_s = float(evaluate(problem, blocks).stage_s.min()) if demands.min_stage_s > 0 else inf
    alone_s = latency_s(problem, blocks) if demands.max_latency_s < inf else 0.0
    return faults + demands.broken(len(blocks), widest, shortest_s, alone_s)


def with_reuse(demands: Demands) -> Demands:
    """The demands with several blocks on one device allowed where latency is the objective, unless they count stages."""
    return replace(demands, reuse=demands.reuse or (demands.objective == "latency" and demands.num_stages is None))


def plans_on_one_device(problem: Problem) -> list[tuple[Block, ...]]:
    """All ops on one device, for each class of devices that can run and hold them; the fastest first."""
    everything, work_s = tuple(range(problem.num_ops)), problem.compute_s.sum(axis=0)
    roomy = problem.memory_bytes * (1 + TOLERANCE) >= problem.total_bytes
    able = [members[0] for members in problem.device_classes if roomy[members[0]] and work_s[members[0]] < inf]
    return [(Block(everything, (device,)),) for device in sorted(able, key=work_s.__getitem__)]
