"""The Pareto front of throughput, latency and peak memory: plans of which none is better than another in all three.

One of the three is limited and another one is optimized, for limits between the ends (the epsilon-constraint method, Haimes et
al., 1971). Plans with other numbers of stages and replicas are candidates too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.judge import Judged, Solution, Status, judge
from autosplit.costs.problem import Block, Problem
from autosplit.errors import InfeasibleError
from autosplit.planners.clock import now, time_limit
from autosplit.planners.portfolio import quick_bound, solve
from autosplit.values.constraints import Demands

NUM_LIMITS = 4
"""Limits between the ends of latency, and as many between those of memory."""


C = TypeVar("C")
Values = tuple[float, float, float]
"""Seconds per sample, seconds of one sample, and bytes of the fullest device; smaller is better."""


def values_of(judged: Judged) -> Values:
    """The three figures of a plan."""
    return judged.loads.bottleneck_s, judged.latency_s, float(judged.loads.memory_bytes.max())


def dominates(one: Values, other: Values) -> bool:
    """Whether one plan is as good as the other in all three values, but for rounding, and better in one."""
    pairs = list(zip(one, other, strict=True))
    return all(a <= b * (1 + TOLERANCE) for a, b in pairs) and any(a < b * (1 - TOLERANCE) for a, b in pairs)


def front_of(plans: Iterable[tuple[Values, int, C]]) -> list[C]:
    """The plans that no other dominates, the best throughput first; of equal ones the one with fewer stages.

    Args:
        plans: the values, the number of stages, and the plan.
    """
    ranked = sorted(plans, key=lambda plan: (plan[1], plan[0]))
    kept: list[tuple[Values, C]] = []
    for values, _, plan in ranked:
        same = any(np.allclose(values, other, rtol=TOLERANCE, atol=0) for other, _ in kept)
        if not same and not any(dominates(other, values) for other, _, _ in ranked):
            kept.append((values, plan))
    return [plan for _, plan in sorted(kept, key=lambda one: one[0])]


def pareto(
    problem: Problem,
    demands: Demands = Demands(),  # noqa: B008 (a frozen value)
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
    log: Callable[[str], None] | None = None,
) -> tuple[Solution, ...]:
    """Plans of which none is better than another in throughput, latency and peak memory, the best throughput first.

    The objective of a solution is its largest device load. The two ends are as good as ``solve`` makes them. Points between
    them are not proved, so only the best throughput can have the status ``optimal``.

    Args:
        problem: ops, devices, costs and rules.
        demands: limits on every plan of the front.
        time_limit_s: for everything together.
        seed: of everything random.
        log: called with a line for each point.
    Raises: InfeasibleError: no plan meets the limits.
    """
    # The end of least latency has a quarter of the time.
    with time_limit(problem.num_ops * problem.num_devices, time_limit_s, num_solves=4) as deadline:
        return _Front(problem, demands, deadline, seed, log or (lambda line: None)).solutions()


class _Front:
    """The points found so far, and the deadline."""

    def __init__(self, problem: Problem, demands: Demands, deadline: float, seed: int, say: Callable[[str], None]) -> None:
        self.problem, self.deadline, self.seed, self.say = problem, deadline, seed, say
        self.points: list[Solution] = []
        self.asked = replace(demands, objective="throughput")
        """The demands of the caller."""
        more = demands.num_stages is not None and demands.num_stages > problem.num_devices
        self.demands = replace(self.asked, reuse=more)
        """The demands of the caller, with whether the best plans share devices."""

    def solutions(self) -> tuple[Solution, ...]:
        """Solve for the ends, other shapes and limits, and keep the points that are not dominated."""
        left_s = self.deadline - now()
        best = self._solve(self.problem, left_s / 2, first=True)
        self._ask(self.problem, min(left_s / 4, (self.deadline - now()) / 2), objective="latency")
        self._simple()
        for change in self._shapes():
            self._ask(self.problem, left_s / 24, **change)
        for limited, change in self._limits():
            self._ask(limited, left_s / 24, **change)
        return tuple(self._bounded(point, best) for point in self._front())

    def _front(self) -> list[Solution]:
        """The points so far that no other one dominates."""
        return front_of((values_of(point.judged), len(point.blocks), point) for point in self.points)

    def _bounded(self, point: Solution, best: Solution) -> Solution:
        """A point with the bound on throughput that holds for it.

        The bound of the best plan with one block on a device does not hold for plans that share devices.
        """
        shares = point.judged.shares_devices
        alike = best.judged.shares_devices or not shares
        bound_s = min(
            best.bound_s if alike else quick_bound(self.problem, replace(self.demands, reuse=True))[0], point.objective_s
        )
        closed = alike and best.gap == 0.0 and point.objective_s <= best.objective_s * (1 + TOLERANCE)
        proved: Status = "optimal" if closed or bound_s == point.objective_s else "feasible"
        return replace(point, bound_s=bound_s, status="shared" if best.status == "shared" and shares else proved)

    def _simple(self) -> None:
        """Offer all ops on one device, or on replicas of it: often the smallest latency or the largest throughput."""
        everything = tuple(range(self.problem.num_ops))
        for width in range(1, self.asked.max_replicas + 1):
            for members in self.problem.device_classes:
                if len(members) >= width:
                    self._offer((Block(everything, members[:width]),), "replicas" if width > 1 else "one device")

    def _shapes(self) -> Iterator[dict[str, Any]]:
        """Other numbers of stages and replicas, where the caller leaves them open."""
        if self.asked.num_stages is not None:
            return
        for count in range(2, min(self.problem.num_devices, self.problem.num_ops, self.asked.max_stages or 8) + 1):
            yield {"num_stages": count, "max_stages": None}
            if self.asked.max_replicas > 1:
                yield {"num_stages": count, "max_stages": None, "max_replicas": 1}

    def _limits(self) -> Iterator[tuple[Problem, dict[str, Any]]]:
        """Memory caps and latency limits between the ends of the present front."""
        _, latencies, peaks = zip(*(values_of(point.judged) for point in self._front()), strict=True)
        for cap in (*reversed(_between(peaks)), self._least_memory()):
            capped = replace(self.problem, memory_bytes=np.minimum(self.problem.memory_bytes, cap))
            yield capped, {}
            yield capped, {"objective": "latency"}
        for limit in _between(latencies):
            yield self.problem, {"max_latency_s": min(limit, self.demands.max_latency_s)}

    def _least_memory(self) -> float:
        """An even share of all bytes, or the largest op if that is more, with a small margin."""
        largest = float(self.problem.op_bytes.max(initial=0.0))
        return max(self.problem.total_bytes / self.problem.num_devices, largest) * 1.02 + 1

    def _ask(self, problem: Problem, time_limit_s: float, **change: Any) -> None:
        """Solve with other limits if there is time; limits that cannot be met add no point."""
        left_s = self.deadline - now()
        if left_s > 0:
            try:
                self._solve(problem, min(time_limit_s, left_s), **change)
            except InfeasibleError:
                return

    def _solve(self, problem: Problem, time_limit_s: float, first: bool = False, **change: Any) -> Solution:
        solution = solve(problem, replace(self.asked, **change), time_limit_s=time_limit_s, seed=self.seed, name_conflict=first)
        if first and solution.judged.shares_devices:  # no other plan meets the limits, so all later plans may share devices
            self.demands = replace(self.demands, reuse=True)
        self._offer(solution.blocks, solution.method, solution)
        return solution

    def _offer(self, blocks: tuple[Block, ...], method: str, solution: Solution | None = None) -> None:
        """Keep blocks that meet the limits of the caller; plans for latency may share devices."""
        quick = replace(self.demands, objective="latency").sharing()
        judged = judge(self.problem, replace(quick, objective="throughput"), blocks)
        if judged.faults or any(blocks == other.blocks for other in self.points):
            return
        solve_s, log = (solution.solve_s, solution.log) if solution else (0.0, ())
        self.points.append(Solution(judged, 0.0, "feasible", method, solve_s, log))
        bottleneck_s, alone_s, peak_bytes = values_of(judged)
        self.say(f"{bottleneck_s:.6g} s a sample, latency {alone_s:.6g} s, {peak_bytes:.6g} B ({method})")


def _between(values: Sequence[float]) -> list[float]:
    """Evenly spread limits strictly between the smallest and the largest value, and just below the largest."""
    low, high = min(values), max(values)
    if high <= low * (1 + TOLERANCE):
        return []
    return [float(limit) for limit in np.linspace(low, high, NUM_LIMITS + 2)[1:-1]]
