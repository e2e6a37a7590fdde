"""Search: the best plan and bound of one solve, to which every planner adds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from time import monotonic

from autosplit.costs.cost import CLOSED, evaluate, verify
from autosplit.costs.problem import Block, Problem, Solution
from autosplit.planners.objective import demand_faults, objective_s
from autosplit.values.constraints import Demands


@dataclass
class Search:
    """The state of one solve: the best plan and bound so far, and who found them."""

    problem: Problem
    demands: Demands
    started: float
    deadline: float
    say: Callable[[str], None]
    blocks: tuple[Block, ...] = ()
    objective_s: float = inf
    bound_s: float = 0.0
    hopeless: bool = False
    nowhere: bool = False
    near: str = ""
    methods: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def offer(self, blocks: tuple[Block, ...], method: str) -> None:
        """Keep the blocks if they meet the demands and are better; their cost is evaluated here, nobody's claim counts."""
        if not blocks or demand_faults(self.problem, self.demands, blocks):
            return
        value_s = objective_s(self.problem, self.demands, blocks)
        if value_s < self.objective_s:
            self.blocks, self.objective_s = blocks, value_s
            self.note(f"{method}: plan of {value_s:.6g} s", method)

    def prove(self, bound_s: float, method: str) -> None:
        """Keep the bound if it is larger; rounding may not lift it above a plan that exists."""
        bound_s = min(bound_s, self.objective_s)
        if bound_s > self.bound_s:
            self.bound_s = bound_s
            self.note(f"{method}: bound of {bound_s:.6g} s", method)

    def note(self, line: str, method: str) -> None:
        """Write a line to the log, with the seconds since the start, and remember who did it."""
        line = f"{monotonic() - self.started:.2f} s: {line}"
        self.log.append(line)
        self.say(line)
        if method not in self.methods:
            self.methods.append(method)

    @property
    def closed(self) -> bool:
        """Whether plan and bound meet."""
        return bool(self.blocks) and self.objective_s - self.bound_s <= CLOSED * self.objective_s

    @property
    def left_s(self) -> float:
        """Seconds until time is up."""
        return self.deadline - monotonic()

    def solution(self) -> Solution:
        """The best plan, verified."""
        loads = evaluate(self.problem, self.blocks)
        solution = Solution(
            blocks=self.blocks,
            objective_s=self.objective_s,
            bound_s=self.objective_s if self.closed else self.bound_s,
            status="optimal" if self.closed else "feasible",
            method=", ".join(self.methods),
            solve_s=monotonic() - self.started,
            loads_s=tuple(float(load) for load in loads.device_s),
            log=tuple(self.log),
        )
        return verify(self.problem, solution, contiguous=self.demands.contiguous, objective=self.demands.objective)
