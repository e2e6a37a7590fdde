"""The CP-SAT model of stages: links by pair, pools, shared devices and plans of any sets, which dynamic programs cannot hold.

``slots`` says where items stand, ``stage_times`` when blocks begin, and this module has their costs. A value has one Boolean for
each pair of slots that make and read it, because its price may depend on both. Every coefficient is rounded
down, so that the optimum is a bound. Every plan is evaluated in float64. A plan that costs more than in the model, or breaks the
demands, is excluded and the solver is asked again (logic-based Benders decomposition, Hooker and Ottosson, 2003).
"""

from itertools import permutations
from math import floor, inf, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from autosplit.costs.cost import TOLERANCE, most_s
from autosplit.costs.judge import judge
from autosplit.costs.problem import HOST, Block, Problem
from autosplit.planners.clock import now
from autosplit.planners.cpsat.solver import MOST_STEPS, SCALE, TERMS_PER_SECOND, solve
from autosplit.planners.cpsat.stage_times import TimedSlots
from autosplit.planners.incumbent import Incumbent
from autosplit.planners.instance import Instance

MOST_ORDERED = 5
"""Most blocks that are tried in every order, where they need not be a chain and latency counts."""


def search_stages(
    incumbent: Incumbent,
    instance: Instance,
    num_slots: int,
    deadline: float,
    *,
    any_plan: bool = False,
    holds_for_all: bool = True,
) -> None:
    """Offer the plans of the solver until one costs what the model says of it, or is enough; the others are excluded in turn.

    Args:
        incumbent: only plans better than its own count; its plan is the solver's hint.
        instance: the ops, merged where the problem allows that.
        num_slots: blocks; exactly this many where the demands count stages.
        deadline: second of ``now()`` after which the solver is not asked again.
        any_plan: the first plan that meets the demands is enough.
        holds_for_all: no plan needs more blocks, so that a bound of the solver holds for all plans.
    """
    problem, demands = incumbent.problem, incumbent.demands
    timeless = any_plan and demands.min_stage_s <= 0 and demands.max_latency_s == inf
    if _num_terms(problem, instance, num_slots, timeless) > TERMS_PER_SECOND * (deadline - now()):
        return
    model = _Model(problem, instance, num_slots, incumbent.objective_s, timeless)
    if not any_plan:
        model.model.Add(model.goal >= min(floor(incumbent.bound_s * model.scale * (1 - TOLERANCE)), int(SCALE)))
        model.model.Minimize(model.goal)
    if incumbent.blocks:
        model.hint(incumbent.blocks)
    while True:
        solver, status = solve(model.model, deadline, incumbent.seed)
        if status == cp_model.INFEASIBLE and holds_for_all:
            if incumbent.blocks:
                incumbent.prove(incumbent.objective_s, "CP-SAT")
            else:
                incumbent.refuted = demands
        elif holds_for_all and not any_plan:
            incumbent.prove((solver.BestObjectiveBound() - model.slack) / model.scale, "CP-SAT")
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return
        blocks = model.true_blocks(solver)
        incumbent.offer(blocks, "CP-SAT")
        if incumbent.closed or (any_plan and incumbent.blocks) or not (blocks or model.sure) or now() > deadline:
            return
        model.exclude(solver)
        if not any_plan:
            model.limit(incumbent.objective_s)


def _num_terms(problem: Problem, instance: Instance, num_slots: int, timeless: bool) -> int:
    types = problem.num_devices if instance.demands.reuse else len(instance.classes)
    if timeless:
        return num_slots * (types * instance.num_items + len(instance.weights.data))
    pairs = num_slots * num_slots * types * types
    return num_slots * types * instance.num_items + len(instance.pins.data) * num_slots + len(problem.nets) * pairs


class _Model(TimedSlots):
    """The loads of the slots and of the devices, in whole steps of the limit.

    ``goal`` is minimized. ``sure`` says whether every order of the last blocks was tried. A ``timeless`` model has no loads and
    asks only for what fits.
    """

    def __init__(self, problem: Problem, instance: Instance, num_slots: int, limit_s: float, timeless: bool) -> None:
        super().__init__(problem, instance, num_slots)
        demands = instance.demands
        all_s = most_s(problem) + 1e-12
        self.top_s = limit_s if isfinite(limit_s) else all_s
        self.scale = SCALE / self.top_s if self.top_s > 0 else 1.0
        self.sure = True
        if timeless:
            return
        quick = demands.objective == "latency"
        self.load = self.model.NewIntVar(0, int(MOST_STEPS if quick else SCALE + 1), "load")
        self.slack = 1 if demands.max_replicas > 1 else 0
        self.work = [[self._work(s, column) for column in self.type_class] for s in range(num_slots)]
        self.moved = self._transfers()
        self._loads(self.work, self.moved)
        if demands.min_stage_s > 0 and demands.max_replicas == 1:
            self.least_stage(demands.min_stage_s)
        self.goal = self.load
        if quick or demands.max_latency_s < all_s:
            makespan = self.makespan(min(demands.max_latency_s, all_s, self.top_s if quick else inf))
            self.goal = makespan if quick else self.load

    def limit(self, limit_s: float) -> None:
        """The goal is at most the objective of a known plan."""
        if limit_s < self.top_s:
            self.model.Add(self.goal <= int(np.ceil(limit_s * self.scale * (1 + TOLERANCE))))

    def true_blocks(self, solver: cp_model.CpSolver) -> tuple[Block, ...]:
        """The blocks of the solver in their best order, or none if they break the demands."""
        row = self.blocks(solver)
        rows = [row]
        if not self.demands.contiguous and (self.demands.objective == "latency" or self.demands.max_latency_s < inf):
            self.sure = len(row) <= MOST_ORDERED
            rows = list(permutations(row)) if self.sure else [row]
        judged = [one for row in rows if not (one := judge(self.problem, self.demands, row)).faults]
        return min(judged, key=lambda one: one.objective_s).blocks if judged else ()

    def _steps(self, seconds: float) -> int:
        return floor(min(seconds * self.scale * (1 + 1e-15), MOST_STEPS / 10))

    def _work(self, s: int, column: int) -> Any:
        """The compute of a slot on a class, in steps."""
        costs = self.instance.compute_s[:, column]
        return sum(self.inside[item][s] * self._steps(cost) for item, cost in enumerate(costs) if isfinite(cost) and cost)

    def _loads(self, work: list[list[Any]], moved: list[list[Any]]) -> None:
        """The load of each slot on each type, and of each device where slots share it."""
        shares: list[list[Any]] = [[] for _ in self.types]
        moves: list[list[Any]] = [[] for _ in self.types]
        for s in range(self.num_slots):
            for k in range(len(self.types)):
                if self.demands.reuse:
                    shares[k].append(self._share(work[s][k], s, k))
                    moves[k].append(self._share(moved[s][k], s, k))
                    continue
                for r, flag in enumerate(self.wide[s]):
                    for part in self._parts(work[s][k], moved[s][k]):
                        self.model.Add((r + 1) * self.load >= part).OnlyEnforceIf(self.chosen[s][k], flag)
        for k in range(len(self.types) if self.demands.reuse else 0):
            for part in self._parts(sum(shares[k]), sum(moves[k])):
                self.model.Add(self.load >= part)

    def _share(self, amount: Any, s: int, k: int) -> Any:
        """The share of a device in a slot: the amount over the number of replicas if it is chosen, otherwise 0."""
        share = self.model.NewIntVar(0, int(MOST_STEPS), "")
        for r, flag in enumerate(self.wide[s]):
            self.model.Add((r + 1) * share >= amount - r).OnlyEnforceIf(self.chosen[s][k], flag)
        return share

    def _transfers(self) -> list[list[Any]]:
        """The transfers of each slot on each type, in steps; their price depends on the types at both ends."""
        moved: list[list[Any]] = [[0] * len(self.types) for _ in range(self.num_slots)]
        for net in self.problem.nets:
            maker, *readers = (self.item_of[op] if op != HOST else HOST for op in (net.producer, *net.consumers))
            send, receive = self._prices(net.num_bytes)
            for s in [HOST] if maker == HOST else range(self.num_slots):
                once = [self.model.NewIntVar(0, int(MOST_STEPS), "") for _ in self.types] if self.problem.send_once else []
                for t in (*range(self.num_slots), HOST):
                    there = {item for item in readers if (item == HOST) == (t == HOST) and item != maker}
                    if t == s or not there:
                        continue
                    crosses = self.model.NewBoolVar("")
                    for item in there:
                        self.model.Add(crosses >= self._holds(maker, s) + self._holds(item, t) - 1)
                    for k, steps in enumerate(self._paid(crosses, send, t) if s != HOST else ()):
                        if once:
                            self.model.Add(once[k] >= steps)
                        else:
                            moved[s][k] += steps
                    for k, steps in enumerate(self._paid(crosses, receive.T, s) if t != HOST else ()):
                        moved[t][k] += steps
                if once and s != HOST:
                    moved[s] = [steps + dearest for steps, dearest in zip(moved[s], once, strict=True)]
        return moved

    def _holds(self, item: int, slot: int) -> Any:
        """Whether an item is in a slot; the host's values are at the host."""
        return 1 if slot == HOST else self.inside[item][slot]

    def _paid(self, crosses: Any, prices: NDArray[np.int64], other: int) -> list[Any]:
        """The steps that each type pays for a value that crosses.

        Args:
            crosses: whether the value crosses.
            prices: by the type that pays and that of the other end, see ``_prices``.
            other: the slot of the other end, or HOST.
        """
        paid, flags = [], list[Any]()
        for row in prices[:HOST].tolist():
            known = row[HOST:] if other == HOST else [price for price in row[:HOST] if price >= 0]
            least, more = min(known, default=0), []
            if other != HOST and self.demands.max_replicas == 1:
                more = [(j, price - least) for j, price in enumerate(row[:HOST]) if price > least]
            if more and not flags:
                flags = [self._both(crosses, chosen) for chosen in self.chosen[other]]
            paid.append(crosses * least + sum(flags[j] * price for j, price in more))
        return paid

    def _prices(self, num_bytes: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Steps of sending and of receiving a value between types, shape (types + 1, types + 1); -1 where no two slots have them.

        The last type is the host.
        """
        seconds = self.problem.transfers.sending_s(num_bytes), self.problem.transfers.receiving_s(num_bytes)
        tables = np.full((2, len(self.types) + 1, len(self.types) + 1), -1, dtype=np.int64)
        hosts = [(k, HOST, (group[0], HOST)) for k, group in enumerate(self.types)]
        for k, j, pair in [*self.pairs, *hosts, *((j, k, pair[::-1]) for k, j, pair in hosts)]:
            tables[:, k, j] = [self._steps(float(table[pair])) for table in seconds]
        return tables[0], tables[1]

    def _both(self, one: Any, other: Any) -> Any:
        both = self.model.NewBoolVar("")
        self.model.AddBoolOr([both, one.Not(), other.Not()])
        return both
