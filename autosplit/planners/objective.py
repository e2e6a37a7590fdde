"""The figure that a planner makes small, and every way in which blocks break the demands on them."""

from collections.abc import Sequence
from math import inf

from autosplit.costs.cost import TOLERANCE, evaluate, find_faults, latency_s
from autosplit.costs.problem import Block, Problem
from autosplit.values.constraints import Demands


def objective_s(problem: Problem, demands: Demands, blocks: Sequence[Block]) -> float:
    """Seconds that the objective makes small: the largest device load, or the latency of one sample."""
    return latency_s(problem, blocks) if demands.objective == "latency" else evaluate(problem, blocks).bottleneck_s


def demand_faults(problem: Problem, demands: Demands, blocks: Sequence[Block]) -> list[str]:
    """Every way in which the blocks break the problem's rules or the demands, a sentence each."""
    faults = find_faults(problem, blocks, contiguous=demands.contiguous)
    if faults:
        return faults
    used = [device for block in blocks for device in block.devices]
    if len(set(used)) < len(used) and not demands.reuse:
        faults.append("two blocks share a device")
    if demands.num_stages is not None and len(blocks) != demands.num_stages:
        faults.append(f"it has {len(blocks)} stages, and {demands.num_stages} are asked for")
    if demands.max_stages is not None and len(blocks) > demands.max_stages:
        faults.append(f"it has {len(blocks)} stages, and at most {demands.max_stages} are asked for")
    widest = max(len(block.devices) for block in blocks)
    if widest > demands.max_replicas:
        faults.append(f"a block has {widest} replicas, and at most {demands.max_replicas} are asked for")
    shortest_s = float(evaluate(problem, blocks).stage_s.min())
    if shortest_s < demands.min_stage_s * (1 - TOLERANCE):
        faults.append(f"a stage takes {shortest_s:.3g} s, and at least {demands.min_stage_s:.3g} s are asked for")
    if demands.max_latency_s < inf and latency_s(problem, blocks) > demands.max_latency_s * (1 + TOLERANCE):
        faults.append(
            f"a sample takes {latency_s(problem, blocks):.3g} s, and at most {demands.max_latency_s:.3g} s are asked for"
        )
    return faults
