"""solve(): the planners one after the other, each with what the last one found, until the gap is closed or time is up."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from time import monotonic

import numpy as np

from autosplit.cost import evaluate, verify
from autosplit.errors import InfeasibleError
from autosplit.planners import bounds, downsets, ilp, infeasible, latency, linear, reusing
from autosplit.planners.items import Items, contract
from autosplit.planners.noncontiguous import solve_noncontiguous
from autosplit.planners.request import Objective, Request, objective_s, request_faults
from autosplit.planners.usage import sequence_usage, usage_of
from autosplit.problem import Block, Floats, Problem, Solution

CLOSED = 1e-6
"""A gap below this share of the objective is rounding: the plan is optimal."""

MAX_ILP_OPS = 5000
MANY_ITEMS = 5000
SMALL = 200
NEARLY = 0.991
"""On many items, that no plan is better by this factor is proved first: it takes a fraction of the time."""


@dataclass
class Search:
    """The state of one solve: the best plan and bound so far, and who found them."""

    problem: Problem
    request: Request
    started: float
    deadline: float
    say: Callable[[str], None]
    blocks: tuple[Block, ...] = ()
    objective_s: float = inf
    bound_s: float = 0.0
    hopeless: bool = False
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
    name_conflict: bool = True,
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
        name_conflict: where no plan is found, find the constraints that cannot hold together, which takes longer.
    Returns: blocks that verify; status ``optimal`` when bound and objective meet.
    Raises: InfeasibleError: no plan meets all this; UsageError: the arguments make no sense.
    """
    started = monotonic()
    request = Request(
        objective, contiguous, num_stages, max_stages, max_replicas or 1, min_stage_s or 0.0, max_latency_s or inf,
        reuse=num_stages is not None and num_stages > problem.num_devices,
    ).verify(problem)  # fmt: skip
    request = latency.with_reuse(request)
    search = Search(problem, request, started, started + time_limit_s, log or (lambda line: None))
    items = contract(problem, request)
    if np.isinf(problem.compute_s).any() or np.isfinite(problem.memory_bytes).any():
        infeasible.refuse_hopeless(problem, contract(problem, request, merge=False))
    _one_device(search)
    _chain(search, items if contiguous else contract(problem, replace(request, contiguous=True)))
    if request.objective == "throughput":
        if request == Request(contiguous=False):
            _any_sets(search, seed)
        _integer_program(search, seed)
    else:
        _latency(search, seed)
    if not search.blocks and not name_conflict:
        raise InfeasibleError(
            "no plan was found in time that meets all constraints together. Relax one, or raise the time limit."
        )
    if not search.blocks:
        _refuse(search, seed)
    return _solution(search, monotonic() - started)


def _one_device(search: Search) -> None:
    """Everything on one device: always worth a look, and the only plan there is when devices are one."""
    everything = tuple(range(search.problem.num_ops))
    for members in search.problem.device_classes:
        search.offer((Block(everything, (members[0],)),), "one device")


def _chain(search: Search, items: Items) -> None:
    """The chain planners; for a plan that need not be a chain, their answer is where to start from."""
    request = replace(search.request, contiguous=True)
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
    if search.request.contiguous:
        _prove_chain(search, items, weights)


def _prove_chain(search: Search, items: Items, weights: Floats) -> None:
    """Better chains than the best one, over all orders; that there are none is the proof.

    Where the items are not exact, a chain below the limit is a bound, and its true cost is evaluated like any plan's.
    """
    request = search.request
    if search.closed or request.objective != "throughput":
        return
    limit_s = search.objective_s
    if (items.compute_s >= limit_s * request.max_replicas).any():
        items = contract(search.problem, request, limit_s=limit_s)
    usage = usage_of(items, request)
    if usage is None:
        return
    steps = (NEARLY, 1.0) if items.num_items > MANY_ITEMS else (1.0,)
    for share in steps:
        outcome = downsets.best_chain(items, request, usage, weights, share * limit_s, search.deadline)
        search.note(f"down-sets: {outcome.num_sets} reached below {share * limit_s:.6g} s", "down-sets")
        found_s = share * limit_s
        if outcome.chain is not None:
            search.offer(chain_blocks(items, outcome.chain), "down-sets")
            found_s = outcome.chain.value_s
        if outcome.complete and usage.complete and isfinite(found_s):
            search.prove(found_s, "down-sets")
        if outcome.chain is not None or not outcome.complete:
            return


def _any_sets(search: Search, seed: int) -> None:
    """Plans that need no chain: CP-SAT alone where the problem is small, resplits and column generation where it is not."""
    if search.problem.num_ops * search.problem.num_devices <= SMALL:
        _integer_program(search, seed, share=0.5)
    if search.closed or search.hopeless or search.left_s <= 0:
        return
    starts = [search.blocks] if search.blocks else []
    with contextlib.suppress(InfeasibleError):
        found = solve_noncontiguous(search.problem, time_limit_s=search.left_s, seed=seed, log=search.say, starts=starts)
        search.offer(found.blocks, found.method)
        search.prove(found.bound_s, found.method)


def _integer_program(search: Search, seed: int, share: float = 1.0) -> None:
    """CP-SAT for a share of the time that is left, on every rule at once."""
    if search.closed or search.hopeless:
        return
    if search.problem.num_ops > MAX_ILP_OPS:
        return
    answer = _ask_ilp(
        search.problem, search.request, search.objective_s, search.bound_s, search.blocks, share * search.left_s, seed
    )
    if answer is None:
        return
    search.hopeless = answer.infeasible and not search.blocks
    if answer.blocks is not None:
        search.offer(answer.blocks, "CP-SAT")
    if isfinite(answer.bound_s) and search.blocks:
        search.prove(answer.bound_s, "CP-SAT")


def _ask_ilp(
    problem: Problem, request: Request, limit_s: float, bound_s: float, hint: Sequence[Block], time_limit_s: float, seed: int
) -> ilp.Answer | None:
    exact = contract(problem, request).exact
    items = contract(problem, request, limit_s=limit_s, merge=exact)
    most = min(items.num_items, problem.num_devices if not request.reuse else inf)
    num_slots = request.num_stages or int(min(most, request.max_stages or most))
    if not request.contiguous and request.num_stages is None and request.max_stages is None:
        num_slots = problem.num_devices
    if num_slots > items.num_items and request.num_stages:
        return ilp.Answer(None, inf, True)
    return ilp.solve_ilp(
        problem,
        items,
        request,
        num_slots=num_slots,
        limit_s=limit_s,
        bound_s=bound_s,
        hint=hint,
        time_limit_s=time_limit_s,
        seed=seed,
    )


def _latency(search: Search, seed: int) -> None:
    """Schedules of one sample; where memory leaves nothing to start from, CP-SAT is asked for any plan."""
    problem, request = search.problem, search.request
    starts = [search.blocks] if search.blocks else []
    for reuse in () if starts else (request.reuse,) if request.num_stages else (False, True):
        loose = replace(request, objective="throughput", max_latency_s=inf, reuse=reuse)
        if reuse and request.num_stages is None:
            loose = replace(loose, max_stages=request.max_stages or min(2 * problem.num_devices, problem.num_ops))
        answer = _ask_ilp(problem, loose, inf, 0.0, (), search.left_s / 4, seed)
        starts += [answer.blocks] if answer is not None and answer.blocks else []
    found = latency.best_latency(problem, request, starts, search.deadline, seed)
    if found.bound_s > request.max_latency_s * (1 + 1e-9):
        raise InfeasibleError(
            f"no plan fits: a sample takes at least {found.bound_s:.3g} s ({found.bound_method}), and at most "
            f"{request.max_latency_s:.3g} s are asked for. Raise that limit, or use faster devices."
        )
    search.offer(found.blocks, found.method)
    search.prove(found.bound_s, found.bound_method)


def _refuse(search: Search, seed: int) -> None:
    """Raise InfeasibleError with a small set of constraints that cannot hold together, or with what was tried."""

    def feasible(problem: Problem, request: Request) -> bool:
        answer = _ask_ilp(problem, request, inf, 0.0, (), 5.0, seed)
        return answer is None or not answer.infeasible

    request = replace(search.request, max_latency_s=inf)
    if feasible(search.problem, request):
        raise InfeasibleError(
            f"no plan was found in time that meets all constraints together ({', '.join(search.methods) or 'nothing fits'}). "
            "Raise the time limit, or relax a constraint."
        )
    reasons = infeasible.conflict(search.problem, request, feasible)
    listed = "; ".join(reasons) or "no constraint was given"
    raise InfeasibleError(f"no plan fits: these cannot hold together: {listed}. Drop or relax one of them.")


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
