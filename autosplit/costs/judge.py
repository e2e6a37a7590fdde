"""The one judge: blocks under demands get their loads, latency and faults in one value. Solution: an answer with its bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal

from autosplit.costs.cost import TOLERANCE, Loads, evaluate
from autosplit.costs.faults import find_faults
from autosplit.costs.pieces import latency_s
from autosplit.costs.problem import Block, Problem
from autosplit.errors import PlanError, raise_faults
from autosplit.values.constraints import Demands

Status = Literal["optimal", "feasible", "shared"]


@dataclass(frozen=True)
class Judged:
    """Blocks with their loads, latency and faults.

    Attributes:
        problem, demands: the question.
        blocks: the answer, whose loads, latency and faults are computed at first use.
        num_parts: microbatches that a request is cut into.
    """

    problem: Problem
    demands: Demands
    blocks: tuple[Block, ...]
    num_parts: int = 1

    @cached_property
    def loads(self) -> Loads:
        """Seconds and bytes of each device and block."""
        return evaluate(self.problem, self.blocks)

    @cached_property
    def latency_s(self) -> float:
        """Seconds of one request through the idle pipeline; its parts follow each other at the pace of the bottleneck."""
        more_s = (self.num_parts - 1) * self.loads.bottleneck_s if self.num_parts > 1 else 0.0
        return latency_s(self.problem, self.blocks) + more_s

    @property
    def objective_s(self) -> float:
        """The objective in seconds: the largest device load, or the latency."""
        return self.latency_s if self.demands.objective == "latency" else self.loads.bottleneck_s

    @cached_property
    def faults(self) -> tuple[str, ...]:
        """A sentence for every rule of the problem that the blocks break or, if there is none, for every such demand."""
        faults = find_faults(self.problem, self.blocks, contiguous=self.demands.contiguous)
        if faults:
            return tuple(faults)
        if self.shares_devices and not self.demands.reuse:
            faults.append("two blocks share a device")
        widest = max(len(block.devices) for block in self.blocks)
        shortest_s = float(self.loads.stage_s.min()) if self.demands.min_stage_s > 0 else inf
        alone_s = self.latency_s if self.demands.max_latency_s < inf else 0.0
        return (*faults, *self.demands.broken(len(self.blocks), widest, shortest_s, alone_s))

    @property
    def shares_devices(self) -> bool:
        """Whether a device runs several blocks."""
        used = [device for block in self.blocks for device in block.devices]
        return len(set(used)) < len(used)


def judge(problem: Problem, demands: Demands, blocks: Sequence[Block], num_parts: int = 1) -> Judged:
    """The loads, latency and faults of blocks, allowed or not; every op is in at least one block.

    Args:
        demands: the objective, and demands on the shape and the times of the blocks.
        num_parts: microbatches that a request is cut into.
    """
    return Judged(problem, demands, tuple(blocks), num_parts)


@dataclass(frozen=True)
class Solution:
    """A planner's answer.

    Attributes:
        judged: the blocks, in chain order if the answer is contiguous. Several may share a device: their loads add up.
        bound_s: no answer to the same problem and demands is better than this.
        status: ``optimal`` when objective and bound meet; ``shared`` when devices hold several blocks because no plan with one
            block on a device was found, and the bound holds for plans that share devices.
        method: which algorithms gave the plan and the bound.
        solve_s: seconds spent.
        log: a line for each step of the planner.
    """

    judged: Judged
    bound_s: float
    status: Status
    method: str
    solve_s: float
    log: tuple[str, ...] = ()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the answer."""
        return self.judged.blocks

    @property
    def objective_s(self) -> float:
        """Seconds: the largest device load (throughput), or the time of one sample (latency)."""
        return self.judged.objective_s

    @property
    def gap(self) -> float:
        """The gap, (objective - bound) / objective; 0 if the solution is proved optimal."""
        if self.status == "optimal" or self.objective_s <= 0:
            return 0.0
        return max(0.0, (self.objective_s - self.bound_s) / self.objective_s)

    def verify(self) -> "Solution":
        """Return the solution, or raise PlanError with every fault: broken rules and demands, or a bound above the objective."""
        faults = list(self.judged.faults)
        if not faults and self.bound_s > self.objective_s * (1 + TOLERANCE):
            faults.append(f"it claims a bound of {self.bound_s:.9g} s, which is above its objective of {self.objective_s:.9g} s")
        raise_faults(PlanError, f"the solution does not fit problem '{self.judged.problem.name}'", faults)
        return self
