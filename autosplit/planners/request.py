"""What a caller may ask of a plan beside the problem itself, and whether blocks meet it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from autosplit.costs.cost import TOLERANCE, evaluate, find_faults, latency_s
from autosplit.costs.problem import Block, Problem
from autosplit.errors import UsageError, raise_faults

Objective = Literal["throughput", "latency"]


@dataclass(frozen=True, slots=True)
class Request:
    """Limits on a plan.

    Attributes:
        objective: what is made small: the largest device load, or the time of one sample.
        contiguous: blocks form a chain, each value goes to the same block or a later one.
        num_stages: exactly so many blocks; more than there are devices means that devices are used again.
        max_stages: at most so many blocks.
        max_replicas: at most so many devices for one block; 1 for no replication.
        min_stage_s: every block takes at least so long per sample.
        max_latency_s: one sample through an idle system takes at most so long.
        reuse: several blocks may share a device (follows from ``num_stages``, or is chosen by a planner).
    """

    objective: Objective = "throughput"
    contiguous: bool = True
    num_stages: int | None = None
    max_stages: int | None = None
    max_replicas: int = 1
    min_stage_s: float = 0.0
    max_latency_s: float = inf
    reuse: bool = False

    def verify(self, problem: Problem) -> "Request":
        """Return the request, or raise UsageError with every fault."""
        faults = []
        if self.objective not in ("throughput", "latency"):
            faults.append(f"objective '{self.objective}' is unknown; choose throughput or latency")
        for name, value in (
            ("num_stages", self.num_stages),
            ("max_stages", self.max_stages),
            ("max_replicas", self.max_replicas),
        ):
            if value is not None and value < 1:
                faults.append(f"{name} must be at least 1, but is {value}")
        if self.num_stages and self.max_stages and self.num_stages > self.max_stages:
            faults.append(f"num_stages {self.num_stages} is above max_stages {self.max_stages}")
        if self.num_stages and self.num_stages > problem.num_ops:
            faults.append(f"num_stages {self.num_stages} is above the number of ops, {problem.num_ops}")
        if not self.min_stage_s >= 0 or not self.max_latency_s > 0:
            faults.append(f"min_stage_s {self.min_stage_s} must be 0 or more, and max_latency_s {self.max_latency_s} above 0")
        raise_faults(UsageError, "the request is not understood", faults)
        return self

    @property
    def counted(self) -> bool:
        """Whether more counts than the largest load of a chain with one block on a device, so that ops may not be merged."""
        limited = self.num_stages is not None or self.min_stage_s > 0 or self.max_latency_s < inf
        return limited or self.reuse or self.objective == "latency"


def objective_s(problem: Problem, request: Request, blocks: Sequence[Block]) -> float:
    """What the request makes small, in seconds."""
    return latency_s(problem, blocks) if request.objective == "latency" else evaluate(problem, blocks).bottleneck_s


def request_faults(problem: Problem, request: Request, blocks: Sequence[Block]) -> list[str]:
    """Every way in which the blocks break the problem's rules or the request, a sentence each."""
    faults = find_faults(problem, blocks, contiguous=request.contiguous)
    if faults:
        return faults
    used = [device for block in blocks for device in block.devices]
    if len(set(used)) < len(used) and not request.reuse:
        faults.append("two blocks share a device")
    if request.num_stages is not None and len(blocks) != request.num_stages:
        faults.append(f"it has {len(blocks)} stages, and {request.num_stages} are asked for")
    if request.max_stages is not None and len(blocks) > request.max_stages:
        faults.append(f"it has {len(blocks)} stages, and at most {request.max_stages} are asked for")
    widest = max(len(block.devices) for block in blocks)
    if widest > request.max_replicas:
        faults.append(f"a block has {widest} replicas, and at most {request.max_replicas} are asked for")
    shortest_s = float(evaluate(problem, blocks).stage_s.min())
    if shortest_s < request.min_stage_s * (1 - TOLERANCE):
        faults.append(f"a stage takes {shortest_s:.3g} s, and at least {request.min_stage_s:.3g} s are asked for")
    if request.max_latency_s < inf and latency_s(problem, blocks) > request.max_latency_s * (1 + TOLERANCE):
        faults.append(
            f"a sample takes {latency_s(problem, blocks):.3g} s, and at most {request.max_latency_s:.3g} s are asked for"
        )
    return faults
