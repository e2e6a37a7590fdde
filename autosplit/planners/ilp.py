"""CP-SAT: what the dynamic programs cannot hold, with a bound: links by pair, pools, shared devices, non-contiguous plans.

Where items stand is for slots.py; here is what they cost. A value costs a slot through one Boolean for each slot that makes
or reads it, or, where the price depends on the neighbour, for each pair of slots. Every coefficient is rounded down, so
what the solver proves is a bound; every plan is evaluated again in float64 by the caller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from autosplit.planners.items import Items
from autosplit.planners.request import Request
from autosplit.planners.slots import Slots
from autosplit.problem import HOST, Block, Problem

SCALE = 1e9
"""Steps that the limit is divided into."""
TERMS_PER_SECOND = 20_000
"""A model with more terms than this for each second left takes too long to build."""


@dataclass(frozen=True)
class Answer:
    """What the solver says: blocks or None, a bound in seconds, and whether it proved that there is no plan below the limit."""

    blocks: tuple[Block, ...] | None
    bound_s: float
    infeasible: bool


def solve_ilp(
    problem: Problem,
    items: Items,
    request: Request,
    *,
    num_slots: int,
    limit_s: float,
    bound_s: float,
    hint: Sequence[Block],
    time_limit_s: float,
    seed: int = 0,
) -> Answer | None:
    """The best plan with at most ``num_slots`` blocks that is no worse than ``limit_s``; None when the model is too large.

    Args:
        problem: for the true costs by device.
        items: unmerged, or merged where the problem allows that.
        request: the limits on a plan.
        num_slots: blocks; exactly so many when the request counts stages.
        limit_s: seconds that some known plan reaches (infinite if none is known).
        bound_s: a known bound.
        hint: blocks of a known plan.
        time_limit_s: for the solver.
        seed: of the solver.
    """
    if _num_terms(problem, items, request, num_slots) > TERMS_PER_SECOND * time_limit_s:
        return None
    model = _Model(problem, items, request, num_slots, limit_s)
    model.bound_below(bound_s)
    if hint:
        model.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_search_workers = 2
    solver.parameters.random_seed = seed
    status = solver.Solve(model.model)
    if status == cp_model.INFEASIBLE:
        return Answer(None, limit_s, True)
    proved = max(bound_s, (solver.BestObjectiveBound() - model.slack) / model.scale)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, proved, False)
    return Answer(model.blocks(solver), proved, False)


def _num_terms(problem: Problem, items: Items, request: Request, num_slots: int) -> int:
    types = problem.num_devices if request.reuse else len(items.classes)
    pairs = 0 if _own_price(problem, items, request) else num_slots * num_slots * types * types
    return num_slots * types * items.num_items + len(items.pins.data) * num_slots + len(problem.nets) * pairs


def _own_price(problem: Problem, items: Items, request: Request) -> bool:
    """Whether what a slot pays depends on nothing but its own items and devices."""
    return items.exact and not request.reuse


class _Model(Slots):
    """The loads of the slots and of the devices, in whole steps of the limit."""

    def __init__(self, problem: Problem, items: Items, request: Request, num_slots: int, limit_s: float) -> None:
        super().__init__(problem, items, request, num_slots)
        finite = np.where(np.isfinite(items.compute_s), items.compute_s, 0.0)
        self.top_s = limit_s if isfinite(limit_s) else float(finite.max(axis=1).sum()) + self._most_transfer_s() + 1e-12
        self.scale = SCALE / self.top_s if self.top_s > 0 else 1.0
        self.slack = 1 if request.max_replicas > 1 else 0
        self.load = self.model.NewIntVar(0, int(SCALE) + 1, "load")
        self._loads(_own_price(problem, items, request))

    def bound_below(self, bound_s: float) -> None:
        """No load below a known bound; the load is what the solver makes small."""
        self.model.Add(self.load >= min(floor(bound_s * self.scale * (1 - 1e-9)), int(SCALE)))
        self.model.Minimize(self.load)

    def _most_transfer_s(self) -> float:
        t = self.problem.transfers
        each = (t.send_s + t.receive_s).max() + self.problem.net_bytes * (t.send_s_per_byte + t.receive_s_per_byte).max()
        pins = np.array([len(net.consumers) for net in self.problem.nets])
        return float((each * pins).sum()) if len(pins) else 0.0

    def _steps(self, seconds: float) -> int:
        return floor(seconds * self.scale * (1 + 1e-15))

    def _loads(self, own: bool) -> None:
        """The load of each slot on each type, and of each device where slots share it."""
        moved = self._own_transfers() if own else self._pair_transfers()
        shares: list[list[Any]] = [[] for _ in self.types]
        moves: list[list[Any]] = [[] for _ in self.types]
        for s in range(self.num_slots):
            for k, column in enumerate(self.type_class):
                work = sum(
                    self.inside[item][s] * self._steps(cost)
                    for item, cost in enumerate(self.items.compute_s[:, column])
                    if isfinite(cost) and cost
                )
                if self.request.reuse:
                    shares[k].append(self._share(work, s, k))
                    moves[k].append(self._share(moved[s][k], s, k))
                    continue
                for r, flag in enumerate(self.wide[s]):
                    parts = [work, moved[s][k]] if self.problem.overlap else [work + moved[s][k]]
                    for part in parts:
                        self.model.Add((r + 1) * self.load >= part).OnlyEnforceIf(self.chosen[s][k], flag)
            if self.request.min_stage_s > 0:
                self._least_stage(s)
        for k in range(len(self.types) if self.request.reuse else 0):
            parts = [sum(shares[k]), sum(moves[k])] if self.problem.overlap else [sum(shares[k]) + sum(moves[k])]
            for part in parts:
                self.model.Add(self.load >= part)

    def _share(self, amount: Any, s: int, k: int) -> Any:
        """What a device bears of a slot: the amount over the replicas if it is chosen, else nothing."""
        share = self.model.NewIntVar(0, int(SCALE) + 1, "")
        for r, flag in enumerate(self.wide[s]):
            self.model.Add((r + 1) * share >= amount - r).OnlyEnforceIf(self.chosen[s][k], flag)
        return share

    def _least_stage(self, s: int) -> None:
        """A stage of at least ``min_stage_s``: necessary on compute and on every transfer that it could have."""
        reach: float = float(sum(net.num_bytes for net in self.problem.nets))
        t = self.problem.transfers
        extra_s = reach * float((t.send_s_per_byte + t.receive_s_per_byte).max())
        extra_s += len(self.problem.nets) * self.num_slots * float((t.send_s + t.receive_s).max())
        slowest = np.where(np.isfinite(self.items.compute_s), self.items.compute_s, 0.0).max(axis=1)
        work = sum(self.inside[item][s] * int(np.ceil(cost * self.scale)) for item, cost in enumerate(slowest) if cost)
        least = floor((self.request.min_stage_s - extra_s) * self.scale)
        if least > 0:
            self.model.Add(work >= least).OnlyEnforceIf(self.used[s])

    def _own_transfers(self) -> list[list[Any]]:
        """What each slot moves on each type: every net costs a sender and each receiver once."""
        moved: list[list[Any]] = [[0] * len(self.types) for _ in range(self.num_slots)]
        for item, costs in enumerate(self.items.fixed_s):
            for k, column in enumerate(self.type_class):
                if costs[column]:
                    for s in range(self.num_slots):
                        moved[s][k] += self.inside[item][s] * self._steps(costs[column])
        for net in range(len(self.items.pins)):
            producer = int(self.items.producer[net])
            readers = [item for item in self.items.pins[net] if item != producer]
            for s in range(self.num_slots):
                made = self.inside[producer][s] if producer != HOST else 0
                sends, receives = self.model.NewBoolVar(""), self.model.NewBoolVar("")
                for reader in readers:
                    if producer != HOST:
                        self.model.Add(sends >= made - self.inside[reader][s])
                    self.model.Add(receives >= self.inside[reader][s] - made)
                for k, column in enumerate(self.type_class):
                    moved[s][k] += sends * self._steps(self.items.send_s[net, column])
                    moved[s][k] += receives * self._steps(self.items.receive_s[net, column])
        return moved

    def _pair_transfers(self) -> list[list[Any]]:
        """What each slot moves on each type when the price depends on the neighbour's device."""
        home = {op: item for item, ops in enumerate(self.items.ops) for op in ops}
        moved: list[list[Any]] = [[0] * len(self.types) for _ in range(self.num_slots)]
        for net in self.problem.nets:
            readers = {home[op] for op in net.consumers if op != HOST}
            producer = home[net.producer] if net.producer != HOST else HOST
            for t in range(self.num_slots):
                if producer == HOST:
                    self._from_host(net.num_bytes, readers, t, moved)
            if producer != HOST:
                for s in range(self.num_slots):
                    self._send_from(net.num_bytes, producer, readers - {producer}, HOST in net.consumers, s, moved)
        return moved

    def _from_host(self, num_bytes: float, readers: set[int], t: int, moved: list[list[Any]]) -> None:
        arrives = self.model.NewBoolVar("")
        for reader in readers:
            self.model.Add(arrives >= self.inside[reader][t])
        transfers = self.problem.transfers
        for k, group in enumerate(self.types):
            cost = transfers.receive_s[HOST, group[0]] + num_bytes * transfers.receive_s_per_byte[HOST, group[0]]
            moved[t][k] += arrives * self._steps(cost)

    def _send_from(
        self, num_bytes: float, producer: int, readers: set[int], to_host: bool, s: int, moved: list[list[Any]]
    ) -> None:
        """The price of one net if slot s makes it: to every slot that reads it, and to the host."""
        transfers = self.problem.transfers
        made = self.inside[producer][s]
        once = [self.model.NewIntVar(0, int(SCALE) + 1, "") for _ in self.types] if self.problem.send_once else None
        for k, group in enumerate(self.types):
            host_s = transfers.send_s[group[0], HOST] + num_bytes * transfers.send_s_per_byte[group[0], HOST]
            if to_host and once is None:
                moved[s][k] += made * self._steps(host_s)
            elif to_host and once is not None:
                self.model.Add(once[k] >= made * self._steps(host_s))
        for t in range(self.num_slots):
            if t == s or not readers:
                continue
            crosses = self.model.NewBoolVar("")
            for reader in readers:
                self.model.Add(crosses >= made + self.inside[reader][t] - 1)
            self._pair_prices(num_bytes, crosses, s, t, once, moved)
        if once is not None:
            for k in range(len(self.types)):
                moved[s][k] += once[k]

    def _pair_prices(
        self, num_bytes: float, crosses: Any, s: int, t: int, once: list[Any] | None, moved: list[list[Any]]
    ) -> None:
        """One crossing from slot s to slot t, for each type that either may have; a type whose price is one needs no pair."""
        send, receive = self._prices(num_bytes)
        for k in range(len(self.types)):
            for price, flag, other in self._cases(send[k], self.chosen[t]):
                when = [crosses, self.chosen[s][k], *other]
                if once is not None and price:
                    self.model.Add(once[k] >= price).OnlyEnforceIf(*when)
                elif price:
                    moved[s][k] += (crosses if flag else self._product(when)) * price
            for price, flag, other in self._cases(receive[:, k], self.chosen[s]):
                if price:
                    moved[t][k] += (crosses if flag else self._product([crosses, self.chosen[t][k], *other])) * price

    def _cases(self, prices: NDArray[np.int64], chosen: Sequence[Any]) -> list[tuple[int, bool, list[Any]]]:
        """(price, whether it holds whatever the neighbour's type, the neighbour's type otherwise); -1 marks no such pair."""
        known = prices[prices >= 0]
        if not len(known):
            return []
        if self.request.max_replicas > 1 or (known == known[0]).all():
            return [(int(known.min()), True, [])]
        return [(int(price), False, [flag]) for price, flag in zip(prices, chosen, strict=True) if price >= 0]

    def _prices(self, num_bytes: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Steps of sending and of receiving a value between types, shape (types, types); -1 where there is no such pair."""
        tr = self.problem.transfers
        seconds = (tr.send_s + num_bytes * tr.send_s_per_byte, tr.receive_s + num_bytes * tr.receive_s_per_byte)
        tables = np.full((2, len(self.types), len(self.types)), -1, dtype=np.int64)
        for k, group in enumerate(self.types):
            for j, other in enumerate(self.types):
                pair = next(((d, e) for d in group for e in other if d != e or self.request.reuse), None)
                if pair is not None:
                    tables[:, k, j] = [self._steps(float(table[pair])) for table in seconds]
        return tables[0], tables[1]

    def _product(self, flags: Sequence[Any]) -> Any:
        both = self.model.NewBoolVar("")
        self.model.AddBoolOr([both, *(flag.Not() for flag in flags)])
        return both
