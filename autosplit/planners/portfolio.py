"""solve(): the solvers in turn, each from the best plan and bound so far, until the gap is closed or time is up."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from autosplit import jit
from autosplit.costs.judge import Solution
from autosplit.costs.pieces import latency_s, pieces
from autosplit.costs.problem import Problem
from autosplit.errors import InfeasibleError
from autosplit.planners import clock, feasibility, infeasible
from autosplit.planners.clock import LEAST_S, halfway, now
from autosplit.planners.clusters import forced_clusters, kept_together
from autosplit.planners.contiguous.chains import improve_chains, offer_first_chain, start_with_chain
from autosplit.planners.cpsat.integer_program import find_any_plan, solve_integer_program
from autosplit.planners.delays import Delays, critical_path_s
from autosplit.planners.incumbent import Incumbent, Solver
from autosplit.planners.instance import contract
from autosplit.planners.latency.scheduling import schedule_sample
from autosplit.planners.noncontiguous.partitioning import partition, walk_once
from autosplit.planners.row_annealing import anneal_rows
from autosplit.planners.wired import plan_with_wires
from autosplit.values.constraints import Demands

FEW_PLACES = 60
"""Ops times devices up to which CP-SAT places blocks and times them exactly, in less time than others take for a bound."""


def refute_every_placement(incumbent: Incumbent, deadline: float) -> None:
    """Find out whether it can be proved that no placement of the ops on the devices exists, chain or not."""
    anything = Incumbent(incumbent.problem, ANY_PLACEMENT, incumbent.seed)
    find_any_plan(anything, deadline)
    incumbent.refuted = anything.refuted


def find_quickest(incumbent: Incumbent, deadline: float) -> None:
    """The plan of the smallest latency, as a start if nothing else meets the limits."""
    quick = Incumbent(incumbent.problem, replace(incumbent.demands, objective="latency", max_latency_s=inf), incumbent.seed)
    quick.offer(incumbent.blocks, "start")
    schedule_sample(quick, deadline)
    feasibility.require_latency(incumbent.demands, quick.bound_s, quick.bound_method)
    incumbent.offer(quick.blocks, "quickest plan")
    if quick.blocks and not incumbent.blocks:
        near_s = latency_s(incumbent.problem, quick.blocks)
        proved = f"at least {quick.bound_s:.6g} s is proved"
        incumbent.remark = f" The quickest plan found takes {near_s:.6g} s a sample, and {proved}."


def split_any_sets(incumbent: Incumbent, deadline: float) -> None:
    """The best plan of any sets, with the ops of each device cut into convex blocks that are then annealed; and its bound.

    The bound holds for several blocks on a device, which cost at least as much as one block of all their ops. It does not hold
    for replicas.
    """
    clusters = forced_clusters(incumbent.problem, contiguous=True)
    free = Incumbent(clusters.problem, ANY_PLACEMENT, incumbent.seed)
    free.offer_one_device()
    partition(free, halfway(deadline))
    if incumbent.demands.max_replicas == 1:
        incumbent.prove(free.bound_s, "any sets")
    if free.blocks:
        row = clusters.expand(pieces(clusters.problem, free.blocks))
        incumbent.offer(row, "any sets")
        anneal_rows(incumbent, deadline, [row])


ANY_PLACEMENT = Demands(contiguous=False)
"""Demands that any sets of ops meet."""


def no_plan(incumbent: Incumbent) -> bool:
    """No plan is known that meets the demands."""
    return not incumbent.blocks


def for_throughput(incumbent: Incumbent) -> bool:
    """The largest device load is the objective."""
    return incumbent.demands.objective == "throughput"


def limits_latency(incumbent: Incumbent) -> bool:
    """The largest device load is the objective, and latency is limited."""
    return for_throughput(incumbent) and incumbent.demands.max_latency_s < inf


def places(incumbent: Incumbent) -> int:
    """Ops times devices."""
    return incumbent.problem.num_ops * incumbent.problem.num_devices


Step = tuple[Solver, Callable[[Incumbent], bool]]
"""A solver, and whether it is asked."""

FIRST_PLAN: tuple[Step, ...] = (
    (find_quickest, lambda i: no_plan(i) and limits_latency(i) and bool(i.demands.reuse)),
    (start_with_chain, lambda i: i.demands.any_sets),
    (improve_chains, lambda i: no_plan(i) or not i.demands.any_sets),
    (refute_every_placement, no_plan),
    (find_any_plan, no_plan),
    (split_any_sets, lambda i: no_plan(i) and for_throughput(i) and bool(i.demands.reuse)),
    (solve_integer_program, no_plan),
    (find_quickest, lambda i: no_plan(i) and (limits_latency(i) or not for_throughput(i))),
)
"""Solvers that find a plan at all; those that take long are asked only where the others find none."""

BETTER_PLANS: tuple[Step, ...] = (
    (solve_integer_program, lambda i: i.demands.any_sets and places(i) <= clock.SMALL_PLACES),
    (walk_once, lambda i: i.demands.any_sets),
    (improve_chains, lambda i: i.demands.any_sets),
    (partition, lambda i: i.demands.any_sets),
    (schedule_sample, lambda i: not for_throughput(i)),
    (solve_integer_program, lambda i: not i.demands.any_sets and (for_throughput(i) or places(i) <= FEW_PLACES)),
    (split_any_sets, lambda i: for_throughput(i) and bool(i.demands.reuse) and places(i) > FEW_PLACES),
)
"""Solvers that better a plan and prove how good it is. CP-SAT declines large problems, so one that takes any time follows it."""


def run(steps: Sequence[Step], incumbent: Incumbent, deadline: float) -> None:
    """Take the steps in order, until the gap is closed or it is proved that there is no plan. The last one gets all the time."""
    for number, (solver, is_asked) in enumerate(steps, start=1):
        if incumbent.closed or incumbent.refuted:
            return
        if is_asked(incumbent):
            until = halfway(deadline) if any(later(incumbent) for _, later in steps[number:]) else deadline
            solver(incumbent, until if incumbent.blocks else max(until, now() + LEAST_S))


@jit.interruptible()
def solve(
    problem: Problem,
    demands: Demands = Demands(),  # noqa: B008 (a frozen value)
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
    log: Callable[[str], None] | None = None,
    name_conflict: bool = True,
) -> Solution:
    """The best plan found within the time limit, with a bound on all plans.

    Args:
        problem: ops, devices, costs and rules.
        demands: the objective, and limits on the plan.
        time_limit_s: seconds after which the best plan so far is returned; of work for small problems (``clock``).
        seed: of everything random.
        log: called with a line for each step.
        name_conflict: if no plan is found, name the constraints that cannot hold together, which takes longer.
    Returns: blocks that verify. Status ``optimal`` when bound and objective meet; ``shared`` when devices hold several blocks
        because no plan with one block on a device was found.
    Raises: InfeasibleError: no plan meets all this; UsageError: the arguments make no sense.
    """
    demands.require_possible(problem.num_ops)
    reuse, demands = demands.reuse, replace(demands, max_replicas=min(demands.max_replicas, problem.num_devices))
    if reuse is None:
        demands = replace(demands, reuse=(demands.num_stages or 0) > problem.num_devices).sharing()
    incumbent = Incumbent(problem, demands, seed, log or (lambda line: None))
    with clock.time_limit(places(incumbent), time_limit_s) as deadline:
        if problem.wires.all:
            wanted = replace(demands, reuse=reuse)

            def unwired(other: Problem, limit_s: float) -> Solution:
                return solve(other, wanted, time_limit_s=limit_s, seed=seed, log=log, name_conflict=name_conflict)

            return plan_with_wires(incumbent, unwired, deadline)
        may_share = reuse is None and not demands.reuse and (demands.contiguous or demands.max_latency_s < inf)
        return _solve(incumbent, deadline, may_share, name_conflict)


def _solve(incumbent: Incumbent, deadline: float, may_share: bool, name_conflict: bool) -> Solution:
    """``solve`` for a problem without wires; ``may_share`` allows several blocks on a device if no other plan is found."""
    problem, demands = incumbent.problem, incumbent.demands
    incumbent.offer_one_device()
    offer_first_chain(incumbent)
    if no_plan(incumbent):
        _require_possible(problem, demands)
    run(FIRST_PLAN, incumbent, halfway(deadline) if may_share and demands.max_latency_s < inf else deadline)
    if no_plan(incumbent) and may_share and incumbent.refuted != ANY_PLACEMENT:
        refuted = incumbent.refuted
        incumbent.share_devices()
        run(FIRST_PLAN, incumbent, deadline)
        if no_plan(incumbent) and not (incumbent.refuted or refuted):
            incumbent.demands = demands
            solve_integer_program(incumbent, deadline)
    if no_plan(incumbent):
        _refuse(incumbent, deadline, name_conflict)
    run(BETTER_PLANS, incumbent, deadline)
    if incumbent.bound_s <= 0:  # the time was up before a solver proved anything
        incumbent.prove(*quick_bound(problem, incumbent.demands))
    return incumbent.solution()


def quick_bound(problem: Problem, demands: Demands) -> tuple[float, str]:
    """A bound in seconds on all plans without a search, infinite where an op can run on no device; and its method."""
    if demands.objective == "latency":
        return critical_path_s(problem, Delays(problem, demands.max_replicas)), "critical path"
    return contract(problem, demands).compute_bound_s, "compute bound"


def _require_possible(problem: Problem, demands: Demands) -> None:
    """Raise InfeasibleError for faults that show without a search."""
    if np.isinf(problem.compute_s).any() or problem.total_bytes > problem.memory_bytes.min():
        feasibility.require_room(problem, kept_together(problem, demands.contiguous), demands.num_stages or demands.max_stages)
    feasibility.require_stage_seconds(problem, demands)
    if demands.max_latency_s < inf:
        feasibility.require_latency(demands, *quick_bound(problem, replace(demands, objective="latency")))


def _refuse(incumbent: Incumbent, deadline: float, name_conflict: bool) -> None:
    """Raise InfeasibleError with a small set of constraints that cannot hold together, or with the log of the solvers."""
    if incumbent.refuted is None:
        tried = ", ".join(incumbent.methods) or "nothing fits"
        raise InfeasibleError(
            f"no plan was found in time that meets all constraints together ({tried}).{incumbent.remark} "
            "Raise the time limit, or relax them."
        )
    if not name_conflict:
        raise InfeasibleError("no plan meets all constraints together. Drop or relax one of them.")
    deadline = max(deadline, now() + LEAST_S)
    found = infeasible.conflict(incumbent.problem, incumbent.refuted, deadline, incumbent.seed)
    raise InfeasibleError(f"no plan fits: {found}. Drop or relax one of them.")
