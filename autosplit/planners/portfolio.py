"""solve(): the planners one after the other, each with what the last one found, until the gap is closed or time is up."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from time import monotonic

from autosplit.cost import evaluate, verify
from autosplit.errors import InfeasibleError
from autosplit.planners import bounds, infeasible, linear, reusing
from autosplit.planners.items import Items, contract
from autosplit.planners.request import Objective, Request, objective_s, request_faults
from autosplit.planners.usage import sequence_usage, usage_of
from autosplit.problem import Block, Problem, Solution

CLOSED = 1e-9
"""A gap below this share of the objective is rounding: the plan is optimal."""


@dataclass
class Search:
    """The state of one solve: the best plan and bound so far, and who found them."""

    problem: Problem
    request: Request
    deadline: float
    say: Callable[[str], None]
    blocks: tuple[Block, ...] = ()
    objective_s: float = inf
    bound_s: float = 0.0
    methods: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def offer(self, blocks: tuple[Block, ...], method: str) -> None:
        """Keep the blocks if they meet the request and are better; their cost is evaluated here, nobody's claim counts."""
        if not blocks or request_faults(self.problem, self.request, blocks):
            return
        value_s = objective_s(self.problem, self.request, blocks)
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
        """Write a line to the log, and remember who did it."""
        self.log.append(line)
        self.say(line)
        if method not in self.methods:
            self.methods.append(method)

    @property
    def closed(self) -> bool:
        """Whether plan and bound meet."""
        return self.objective_s - self.bound_s <= CLOSED * self.objective_s

    @property
    def late(self) -> bool:
        """Whether time is up."""
        return monotonic() >= self.deadline


def solve(
    problem: Problem,
    *,
    objective: Objective = "throughput",
    contiguous: bool = True,
    num_stages: int | None = None,
    max_stages: int | None = None,
    max_replicas: int | None = None,
    min_stage_s: float | None = None,
    max_latency_s: float | None = None,
    time_limit_s: float = 10.0,
    seed: int = 0,
    log: Callable[[str], None] | None = None,
) -> Solution:
    """The best plan found within the time limit, with a bound on all plans.

    Args:
        problem: ops, devices, costs and rules.
        objective: ``throughput`` makes the largest device load small, ``latency`` the time of one sample.
        contiguous: blocks form a chain; otherwise a device may hold any set of ops.
        num_stages: exactly so many blocks; more than devices means that devices hold several.
        max_stages: at most so many blocks.
        max_replicas: at most so many devices for one block; None for no replication.
        min_stage_s: every block takes at least so many seconds per sample.
        max_latency_s: one sample takes at most so many seconds.
        time_limit_s: seconds after which the best plan so far is returned.
        seed: of everything random.
        log: called with a line for each step.
    Returns: blocks that verify; status ``optimal`` when bound and objective meet.
    Raises: InfeasibleError: no plan meets all this; UsageError: the arguments make no sense.
    """
    started = monotonic()
    request = Request(
        objective, contiguous, num_stages, max_stages, max_replicas or 1, min_stage_s or 0.0, max_latency_s or inf,
        reuse=num_stages is not None and num_stages > problem.num_devices,
    ).verify(problem)  # fmt: skip
    search = Search(problem, request, started + time_limit_s, log or (lambda line: None))
    items = contract(problem, replace(request, contiguous=True))
    infeasible.refuse_hopeless(problem, contract(problem, request) if not contiguous else items)
    _one_device(search)
    _contiguous(search, items)
    if not search.blocks:
        raise InfeasibleError("no plan fits: no split was found that meets all constraints together. Relax one of them.")
    return _solution(search, monotonic() - started)


def _one_device(search: Search) -> None:
    """Everything on one device: always worth a look, and the only plan there is when devices are one."""
    everything = tuple(range(search.problem.num_ops))
    for device in range(search.problem.num_devices):
        search.offer((Block(everything, (device,)),), "one device")


def _contiguous(search: Search, items: Items) -> None:
    """The chain planners."""
    request = search.request
    weights = bounds.multipliers(items)
    bound_s = bounds.compute_bound_s(items, request, weights)
    if request.objective == "throughput" and isfinite(bound_s):
        search.prove(bound_s, "compute bound")
    if request.reuse and request.num_stages:
        found = reusing.best_reuse(search.problem, items, request, weights, request.num_stages, search.deadline)
        if found:
            search.offer(found[0], "beam search")
        return
    usage = usage_of(items, request) or sequence_usage(items, request, _by_speed(items))
    chain = linear.best_chain(items, request, usage, weights, bound_s, search.objective_s, search.deadline)
    if chain is not None:
        search.offer(chain_blocks(items, chain), "linear orders")


def _by_speed(items: Items) -> list[int]:
    """The class of each device, fast ones first."""
    mean = items.compute_s.clip(max=1e300).mean(axis=0)
    return [int(k) for k in mean.argsort() for _ in items.classes[k]]


def chain_blocks(items: Items, chain: linear.Chain) -> tuple[Block, ...]:
    """The chain with its devices by name: of each class, the next that are free."""
    free = [list(members) for members in items.classes]
    blocks = []
    for members, takes in chain.blocks:
        devices = [free[k].pop(0) for k, count in enumerate(takes) for _ in range(count)]
        blocks.append(Block(items.expand(members), tuple(sorted(devices))))
    return tuple(blocks)


def _solution(search: Search, solve_s: float) -> Solution:
    loads = evaluate(search.problem, search.blocks)
    solution = Solution(
        blocks=search.blocks,
        objective_s=search.objective_s,
        bound_s=search.objective_s if search.closed else search.bound_s,
        status="optimal" if search.closed else "feasible",
        method=", ".join(search.methods),
        solve_s=solve_s,
        loads_s=tuple(float(load) for load in loads.device_s),
        log=tuple(search.log),
    )
    return verify(search.problem, solution, contiguous=search.request.contiguous, objective=search.request.objective)
