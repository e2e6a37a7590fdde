"""Several tenants on the same resources: one way for each, so that all their rates can grow by the largest common factor.

A way puts a share of each resource to use at the rate that its tenant asks for. The shares of a resource may add up to 1, so the
largest factor is 1 over the largest sum: a choice by minimum makespan (Lenstra, Shmoys and Tardos, 1990), solved by CP-SAT.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from ortools.linear_solver import pywraplp
from ortools.sat.python import cp_model

from autosplit.costs.problem import Floats
from autosplit.planners import clock
from autosplit.planners.cpsat.solver import solve

STEPS, MOST_STEPS = 10**6, 10**10
"""Steps of the smallest makespan that is possible, and most steps of a share: a sum of ten times 10^6 fits in 64 bits."""

TIED = 1e-3
"""Share of the makespan within which choices count as equal: predictions are no better. The cheapest of them is taken."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a tenant.

    Attributes:
        shares: resource to the share of its time that is used at the rate of the tenant.
        cost: decides between choices that are equal otherwise.
        held_bytes: memory to the bytes that are held there.
        most_busy: largest sum of shares, of all tenants, on each resource of this way: below 1 to keep a limit on latency.
        alone: resources that no other tenant may use.
    """

    shares: Mapping[str, float]
    cost: float = 0.0
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    most_busy: float = 1.0
    alone: frozenset[str] = frozenset()

    @property
    def longest(self) -> float:
        """The largest share of a resource: 1 over the factor of a tenant alone without a limit."""
        return max(self.shares.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The number of the way of each tenant, and a factor that no choice of these ways exceeds."""

    ways: tuple[int, ...]
    bound: float


def factor_of(chosen: Sequence[Way]) -> float:
    """The largest factor of all rates with which one way for each tenant keeps every limit; infinite where nothing takes time.

    >>> factor_of([Way({"a": 0.25}), Way({"a": 0.25, "b": 0.1})])
    2.0
    """
    used = sums(chosen)
    limits = [(1.0, resource) for resource in used] + [(way.most_busy, resource) for way in chosen for resource in way.shares]
    return min((most / used[resource] for most, resource in limits if used[resource] > 0), default=inf)


def sums(chosen: Sequence[Way]) -> dict[str, float]:
    """Resource to the sum of its shares."""
    used = Counter[str]()
    for way in chosen:
        used.update(way.shares)
    return dict(used)


def choose(tenants: Sequence[Sequence[Way]], caps_bytes: Mapping[str, int], limit_s: float, seed: int = 0) -> Chosen | None:
    """The ways with the largest common factor of all rates and, among those that are tied, the least cost.

    Args:
        tenants: the ways of each tenant.
        caps_bytes: memory to the most bytes that it may hold; others have no cap.
        limit_s: seconds for the solver.
        seed: its seed.
    Returns: None if no choice keeps the caps, or none was found in time.
    """
    least = max(
        (min((way.longest / way.most_busy for way in ways if way.most_busy > 0), default=0.0) for ways in tenants), default=0.0
    )
    scale = STEPS / least if least > 0 else 1.0
    model = cp_model.CpModel()
    picked = [[model.new_bool_var("") for _ in ways] for ways in tenants]
    every = [(number, way, bit) for number, ways in enumerate(tenants) for way, bit in zip(ways, picked[number], strict=True)]
    makespan = model.new_int_var(0, len(tenants) * MOST_STEPS * 10, "makespan")
    for bits in picked:
        model.add_exactly_one(bits)
    for resource in {name for _, way, _ in every for name in way.shares}:
        there = [(number, way, bit) for number, way, bit in every if resource in way.shares]
        used = sum(min(MOST_STEPS, round(way.shares[resource] * scale)) * bit for _, way, bit in there)
        model.add(used <= makespan)
        for number, way, bit in there:
            if way.most_busy < 1:
                model.add(STEPS * used <= int(STEPS * way.most_busy) * makespan).only_enforce_if(bit)
            if resource in way.alone:
                model.add(sum(other for owner, _, other in there if owner != number) == 0).only_enforce_if(bit)
    for memory, cap_bytes in caps_bytes.items():
        model.add(sum(way.held_bytes.get(memory, 0) * bit for _, way, bit in every) <= cap_bytes)
    model.minimize(makespan)
    deadline = clock.now() + limit_s
    solver, status = solve(model, deadline, seed)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    bound = solver.best_objective_bound / scale
    model.add(makespan <= int(solver.value(makespan) * (1 + TIED)))
    top = max((way.cost for _, way, _ in every), default=0.0) or 1.0
    model.minimize(sum(round(STEPS * way.cost / top) * bit for _, way, bit in every))
    for _, _, bit in every:
        model.add_hint(bit, solver.value(bit))
    cheaper, status = solve(model, deadline, seed)
    best = cheaper if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else solver
    return Chosen(tuple(next(k for k, bit in enumerate(bits) if best.value(bit)) for bits in picked), 1 / bound if bound else inf)


def relaxed_factor(tenants: Sequence[Mapping[str, Floats]], resources: Mapping[str, Sequence[str]]) -> float:
    """A factor that no plans exceed: each op of each tenant may be divided among devices, and moving values takes no time.

    Args:
        tenants: for each tenant, device to the share of its time that each op takes at the asked rate; infinite where the op
            cannot run. Arrays of shape (num_ops,).
        resources: device to the resources that it occupies.
    Returns: the optimum of a linear program; infinite where nothing takes time.
    """
    solver = pywraplp.Solver.CreateSolver("GLOP")
    factor = solver.NumVar(0, solver.infinity(), "factor")
    rows = {name: solver.Constraint(-solver.infinity(), 1.0) for names in resources.values() for name in names}
    for devices in tenants:
        for op in range(len(next(iter(devices.values())))):
            whole = solver.Constraint(0.0, 0.0)
            whole.SetCoefficient(factor, -1.0)
            for device, shares in devices.items():
                if shares[op] < inf:
                    part = solver.NumVar(0, solver.infinity(), "")
                    whole.SetCoefficient(part, 1.0)
                    for name in resources[device]:
                        rows[name].SetCoefficient(part, float(shares[op]))
    solver.Objective().SetCoefficient(factor, 1.0)
    solver.Objective().SetMaximization()
    return float(factor.solution_value()) if solver.Solve() == solver.OPTIMAL else inf
