"""solve(): the planners one after the other, each with what the last one found, until the gap is closed or time is up."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite
from random import Random
from time import monotonic

import numpy as np

from autosplit.costs.cost import latency_s
from autosplit.costs.problem import HOST, Floats, Problem, Solution
from autosplit.errors import InfeasibleError
from autosplit.planners import bounds, infeasible, jit
from autosplit.planners.clusters import fewer_lumps, forced_lumps
from autosplit.planners.contiguous import interleaved, linear
from autosplit.planners.contiguous.device_usage import Usage, sequence_usage, usage_of
from autosplit.planners.contiguous.latency_limited import quick_chains
from autosplit.planners.contiguous.proving import chain_blocks, prove_chain
from autosplit.planners.cpsat.integer_program import MAX_OPS, MORE_BLOCKS, ask, rows_on_one_device
from autosplit.planners.delays import Delays, critical_path_s
from autosplit.planners.incumbent import Search
from autosplit.planners.items import Items, contract, kept_together
from autosplit.planners.latency import scheduling
from autosplit.planners.latency.row_annealing import RowSearch
from autosplit.planners.noncontiguous.partitioning import solve_noncontiguous
from autosplit.planners.objective import demand_faults, objective_s
from autosplit.values.constraints import Demands

SMALL = 200
FEW = 60
"""So many ops times devices let CP-SAT place blocks and time them exactly."""
PLACES_PER_SECOND = 4000
"""So many ops times devices for each second that CP-SAT has to better a plan: nothing can stop the making of its model."""
REUSE_SHARE = 0.2
FIRST_SHARE = 0.4
"""Of the time, for plans with one block on a device where latency is limited: if there is none, devices may be shared."""
LEAST_TO_START_S = 0.2
"""For each look for a first plan, even where compiling has taken all the time."""
LEAST_TO_NAME_S = 0.5
"""For finding out what conflicts."""
PROOF_SHARE, PROOF_SHARE_OF_MANY = 0.8, 0.93
"""Of the time that is left, for chains over all orders; CP-SAT has the rest, where there are not too many ops for it."""


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
        demands: what is optimized, and limits on the plan.
        time_limit_s: seconds after which the best plan so far is returned.
        seed: of everything random.
        log: called with a line for each step.
        name_conflict: where no plan is found, find the constraints that cannot hold together, which takes longer.
    Returns: blocks that verify; status ``optimal`` when bound and objective meet.
    Raises: InfeasibleError: no plan meets all this; UsageError: the arguments make no sense.
    """
    started = monotonic()
    demands.require_possible(problem.num_ops)
    demands, reuse = replace(demands, max_replicas=min(demands.max_replicas, problem.num_devices)), demands.reuse
    if reuse is None:
        more = demands.num_stages is not None and demands.num_stages > problem.num_devices
        demands = scheduling.with_reuse(replace(demands, reuse=more))
    search = Search(problem, demands, started, started + time_limit_s, log or (lambda line: None))
    _refuse_hopeless(problem, demands)
    may_share = reuse is None and not demands.reuse and (demands.contiguous or demands.max_latency_s < inf)
    _attempt(search, seed, FIRST_SHARE if may_share and demands.max_latency_s < inf else 1.0)
    if not (search.blocks or search.nowhere) and may_share:
        search.note("no plan has one block on a device: devices may hold several", "shared devices")
        search.demands, refuted, search.hopeless, search.bound_s = replace(demands, reuse=True), search.hopeless, False, 0.0
        _attempt(search, seed)
        if not (search.blocks or search.hopeless or refuted):
            search.demands = demands
            _integer_program(search, seed)
    if not search.blocks:
        _refuse(search, seed, name_conflict)
    return search.solution()


def _refuse_hopeless(problem: Problem, demands: Demands) -> None:
    """Raise InfeasibleError for what can be seen without a search."""
    if np.isinf(problem.compute_s).any() or problem.total_bytes > problem.memory_bytes.min():
        infeasible.refuse_hopeless(problem, kept_together(problem, demands.contiguous), demands.num_stages or demands.max_stages)
    infeasible.refuse_short(problem, demands)
    if demands.max_latency_s < inf:
        bound_s = critical_path_s(problem, Delays(problem, demands.max_replicas))
        infeasible.refuse_latency(demands, bound_s, "critical path")


def _attempt(search: Search, seed: int, share: float = 1.0) -> None:
    """All planners that suit the demands, with a share of the time until there is a plan and all that is left from then on."""
    demands, deadline = search.demands, search.deadline
    search.deadline = monotonic() + share * search.left_s
    _first_plan(search, seed)
    search.deadline = deadline
    if not search.blocks:
        return
    if demands.objective == "latency":
        _latency(search, seed)
        return
    if demands.any_sets:
        _any_sets(search, seed)
    elif demands.max_latency_s < inf:
        _integer_program(search, seed, share=0.3)
        _anneal(search, seed)
    _integer_program(search, seed)


def _first_plan(search: Search, seed: int) -> None:
    """The planners that find a plan at all, those that take long only where the others find none."""
    problem, demands = search.problem, search.demands
    _one_device(search)
    if demands.reuse and demands.max_latency_s < inf and not search.blocks:
        _quickest(search, seed, share=0.4)  # one that is quick enough is what CP-SAT and annealing begin with
    alone_s, in_a_row = search.objective_s, replace(demands, contiguous=True)
    light = problem.num_ops > linear.MANY_ITEMS and problem.total_bytes > problem.memory_bytes.min()
    _chain(search, contract(problem, in_a_row, bytes_of_merged=not light))
    if light and search.objective_s == alone_s:
        _chain(search, contract(problem, in_a_row))
    if not search.blocks and _is_nowhere(search, seed):
        return
    if not search.blocks:
        _integer_program(search, seed, share=0.25, any_plan=True)
    if not search.blocks:
        _integer_program(search, seed, share=0.5)
    if not search.blocks and not search.hopeless and (demands.objective == "latency" or demands.max_latency_s < inf):
        _quickest(search, seed, share=0.5)


def _is_nowhere(search: Search, seed: int) -> bool:
    """Whether it is proved that the ops go on the devices in no way, chain or not: what conflicts is then looked for in that."""
    loosest = Demands(contiguous=False)
    answer = ask(search.problem, loosest, inf, 0.0, (), 0.2 * search.left_s, seed, any_plan=True)
    if answer is not None and answer.infeasible:
        search.demands, search.hopeless, search.nowhere = loosest, True, True
    return search.nowhere


def _one_device(search: Search) -> None:
    """Everything on one device: always worth a look, and the only plan there is when devices are one."""
    for row in rows_on_one_device(search.problem):
        search.offer(row, "one device")


def _chain(search: Search, items: Items) -> None:
    """The chain planners; for a plan that need not be a chain, their answer is where to start from."""
    demands = replace(search.demands, contiguous=True)
    weights = bounds.multipliers(items)
    bound_s = bounds.compute_bound_s(items, demands, weights)
    if demands.objective == "throughput":
        _prove_compute(search, items, bound_s)
    if demands.reuse and demands.objective == "throughput":
        _reuse(search, items, weights)
        return
    usage = usage_of(items, demands) or sequence_usage(items, demands, _by_speed(items))
    chain = linear.best_chain(items, demands, usage, weights, bound_s, search.objective_s, search.deadline)
    if chain is not None:
        search.offer(chain_blocks(items, chain), "linear orders")
    if demands.max_latency_s < inf and not search.closed:
        _quick_chains(search, items, usage, weights)
    if search.demands.contiguous:
        share = PROOF_SHARE if search.problem.num_ops <= MAX_OPS else PROOF_SHARE_OF_MANY
        share = share if search.blocks else 0.2
        prove_chain(search, items, weights, monotonic() + share * search.left_s)


def _prove_compute(search: Search, items: Items, bound_s: float) -> None:
    """The compute bound; a plan that is no chain may divide what every chain keeps together."""
    if not search.demands.contiguous:
        items = contract(search.problem, search.demands)
        bound_s = bounds.compute_bound_s(items, search.demands, bounds.multipliers(items))
    if isfinite(bound_s):
        search.prove(bound_s, "compute bound")


def _reuse(search: Search, items: Items, weights: Floats) -> None:
    """Chains in which several blocks share a device: of as many blocks as are asked for, else of ever more."""
    demands, problem = search.demands, search.problem
    most = min(items.num_items, demands.max_stages or MORE_BLOCKS * problem.num_devices)
    for count in (demands.num_stages,) if demands.num_stages else range(2, most + 1):
        if count != demands.num_stages and search.left_s <= 0:
            return
        found = interleaved.best_reuse(problem, items, demands, weights, count, monotonic() + REUSE_SHARE * search.left_s)
        if found:
            search.offer(found[0], "beam search")


def _quick_chains(search: Search, items: Items, usage: Usage, weights: Floats) -> None:
    """Chains along single orders that hold the latency limit."""
    problem = search.problem
    demands = replace(search.demands, contiguous=True)

    def judge(chain: linear.Chain) -> float:
        blocks = chain_blocks(items, chain)
        faults = demand_faults(problem, search.demands, blocks)
        return inf if faults else objective_s(problem, search.demands, blocks)

    delay_s = float(problem.transfers.latency_s[:HOST, :HOST].max())
    deadline = monotonic() + 0.3 * search.left_s
    for chain in quick_chains(items, demands, usage, weights, delay_s, search.bound_s, judge, deadline):
        search.offer(chain_blocks(items, chain), "quick chains")


def _quickest(search: Search, seed: int, share: float) -> None:
    """The plan of the smallest latency, as a start where nothing else meets the limits."""
    starts = [search.blocks] if search.blocks else []
    quick = replace(search.demands, objective="latency")
    found = scheduling.best_latency(search.problem, quick, starts, monotonic() + share * search.left_s, seed)
    infeasible.refuse_latency(search.demands, found.bound_s, found.bound_method)
    search.offer(found.blocks, found.method)
    if found.blocks and not search.blocks:
        near_s = latency_s(search.problem, found.blocks)
        search.near = f" The quickest plan found takes {near_s:.6g} s a sample, and at least {found.bound_s:.6g} s is proved."


def _anneal(search: Search, seed: int) -> None:
    """Moves of single ops and borders from the best plan: under a latency limit, chains along single orders are not all."""
    if search.closed or search.left_s <= 0:
        return
    deadline = monotonic() + 0.5 * search.left_s
    forced = forced_lumps(search.problem, search.demands.contiguous)
    for lumps in (fewer_lumps(forced, scheduling.MAX_LUMPS), forced):
        rows = RowSearch(lumps, search.demands, Random(seed), deadline)
        rows.offer(search.blocks, "start")
        rows.anneal(deadline, search.bound_s)
        if rows.row is not None:
            search.offer(lumps.expand(rows.row), "annealing")
        if lumps is forced or search.left_s <= 0:
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


def _integer_program(search: Search, seed: int, share: float = 1.0, any_plan: bool = False) -> None:
    """CP-SAT for a share of the time that is left, on every rule at once; for the best plan, or for any."""
    if search.closed or search.hopeless or (search.blocks and search.left_s <= 0):
        return
    limit_s, bound_s = search.objective_s, search.bound_s
    time_limit_s = share * search.left_s if search.blocks else max(share * search.left_s, LEAST_TO_START_S)
    if search.blocks and search.problem.num_ops * search.problem.num_devices > PLACES_PER_SECOND * time_limit_s:
        return
    answer = ask(search.problem, search.demands, limit_s, bound_s, search.blocks, time_limit_s, seed, any_plan)
    if answer is None:
        return
    search.hopeless = answer.infeasible and not search.blocks
    if answer.blocks is not None:
        search.offer(answer.blocks, "CP-SAT")
    if isfinite(answer.bound_s) and search.blocks:
        search.prove(answer.bound_s, "CP-SAT")


def _latency(search: Search, seed: int) -> None:
    """Schedules of one sample; where ops are few and these are not proved, CP-SAT is asked for the best row of blocks."""
    few = search.problem.num_ops * search.problem.num_devices <= FEW
    deadline = monotonic() + 0.5 * search.left_s if few else search.deadline
    found = scheduling.best_latency(search.problem, search.demands, [search.blocks], deadline, seed)
    search.offer(found.blocks, found.method)
    search.prove(found.bound_s, found.bound_method)
    if few:
        _integer_program(search, seed)


def _refuse(search: Search, seed: int, name_conflict: bool) -> None:
    """Raise InfeasibleError with a small set of constraints that cannot hold together, or with what was tried."""
    if not search.hopeless:
        tried = ", ".join(search.methods) or "nothing fits"
        raise InfeasibleError(
            f"no plan was found in time that meets all constraints together ({tried}).{search.near} "
            "Raise the time limit, or relax them."
        )
    if not name_conflict:
        raise InfeasibleError("no plan meets all constraints together. Drop or relax one of them.")
    deadline = max(search.deadline, monotonic() + LEAST_TO_NAME_S)
    found = infeasible.conflict(search.problem, search.demands, deadline, seed)
    raise InfeasibleError(f"no plan fits: {found}. Drop or relax one of them.")


def _by_speed(items: Items) -> list[int]:
    """The class of each device, fast ones first."""
    mean = items.compute_s.clip(max=1e300).mean(axis=0)
    return [int(k) for k in mean.argsort() for _ in items.classes[k]]
