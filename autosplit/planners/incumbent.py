"""Incumbent: the best plan and bound of one solve so far. Every solver is called with it, and adds its plans and bounds."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from threading import RLock
from time import monotonic

from autosplit.costs.cost import CLOSED, TOLERANCE
from autosplit.costs.judge import Judged, Solution, judge
from autosplit.costs.problem import Block, Problem
from autosplit.values.constraints import Demands

ROUNDING = 1e-12
"""Relative difference below which objectives are equal."""

CLOSE = 1e-4
"""The bisection of a load ends where its ends differ by this share."""


@dataclass
class Incumbent:
    """The best plan and bound so far; several threads may add to it.

    Attributes:
        problem, demands: the question.
        seed: of everything random.
        say: called with each line of the log.
        judged: the best plan; None while none is known.
        objective_s: its objective in seconds, below which a plan counts; infinite while none is known.
        bound_s, bound_method: no plan has a smaller objective, and what proved that.
        refuted: demands that no plan meets, once that is proved: the same as ``demands``, or looser ones.
        shared: devices hold several blocks because no plan with one block on a device is known.
        remark: a sentence for the refusal where no plan is found.
        methods: the solvers that found a plan or raised the bound.
        log: a line for each step.
    """

    problem: Problem
    demands: Demands
    seed: int = 0
    say: Callable[[str], None] = lambda line: None
    judged: Judged | None = None
    objective_s: float = inf
    bound_s: float = 0.0
    bound_method: str = ""
    refuted: Demands | None = None
    shared: bool = False
    remark: str = ""
    methods: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    started: float = field(default_factory=lambda: monotonic())  # looked up at each call: tests replace the clock
    lock: RLock = field(default_factory=RLock)

    def offer(self, blocks: tuple[Block, ...], method: str) -> None:
        """Keep the blocks if they meet the demands and are better, or as good and fewer; their objective is evaluated here."""
        judged = judge(self.problem, self.demands, blocks)
        if not blocks or judged.faults:
            return
        value_s = judged.objective_s
        with self.lock:
            fewer = len(blocks) < len(self.blocks) and value_s <= self.objective_s * (1 + ROUNDING)
            if value_s < self.objective_s or fewer:
                self.judged, self.objective_s = judged, value_s
                self.note(f"{method}: plan of {value_s:.6g} s", method)

    def offer_one_device(self) -> None:
        """Offer the best plans on a single device."""
        for blocks in plans_on_one_device(self.problem):
            if self.problem.compute_s[:, blocks[0].devices[0]].sum() < self.objective_s:
                self.offer(blocks, "one device")

    def prove(self, bound_s: float, method: str) -> None:
        """Keep the bound if it is larger. It ends at the objective of the best plan, which rounding must not exceed."""
        with self.lock:
            bound_s = min(bound_s, self.objective_s)
            if bound_s > self.bound_s:
                self.bound_s, self.bound_method = bound_s, method
                self.note(f"{method}: bound of {bound_s:.6g} s", method)

    def note(self, line: str, method: str) -> None:
        """Write a line to the log, with the seconds since the start, and remember its method."""
        line = f"{monotonic() - self.started:.2f} s: {line}"
        self.log.append(line)
        self.say(line)
        if method not in self.methods:
            self.methods.append(method)

    def share_devices(self) -> None:
        """Go on with plans in which devices hold several blocks; earlier bounds do not hold for these."""
        known = "there is no plan" if self.refuted else "no plan was found"
        self.note(f"{known} with one block on a device: devices may hold several", "shared devices")
        self.demands = replace(self.demands, reuse=True)
        self.refuted, self.bound_s, self.shared = None, 0.0, True

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the best plan; empty while none is known."""
        return self.judged.blocks if self.judged else ()

    @property
    def closed(self) -> bool:
        """Whether plan and bound meet."""
        return self.objective_s < inf and self.objective_s - self.bound_s <= CLOSED * self.objective_s

    def solution(self) -> Solution:
        """The best plan, verified."""
        assert self.judged is not None
        return Solution(
            self.judged,
            bound_s=self.objective_s if self.closed else self.bound_s,
            status="shared" if self.shared else "optimal" if self.closed else "feasible",
            method=", ".join(self.methods),
            solve_s=monotonic() - self.started,
            log=tuple(self.log),
        ).verify()


def plans_on_one_device(problem: Problem) -> list[tuple[Block, ...]]:
    """All ops on one device, for each class of devices that can run and hold them; the fastest first."""
    everything, work_s = tuple(range(problem.num_ops)), problem.compute_s.sum(axis=0)
    roomy = problem.memory_bytes * (1 + TOLERANCE) >= problem.total_bytes
    able = [members[0] for members in problem.device_classes if roomy[members[0]] and work_s[members[0]] < inf]
    return [(Block(everything, (device,)),) for device in sorted(able, key=work_s.__getitem__)]


Solver = Callable[[Incumbent, float], None]
"""Improves an incumbent until a deadline, a second of ``now()``."""
