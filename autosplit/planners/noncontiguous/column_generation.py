"""Column generation: a lower bound on the largest device load, from prices on the items.

Give every item a price. If all devices together cannot hold the price of all items, each within a load T, then T is too low. For
any prices, the least T that is not refuted is a bound; ``pricing`` computes it exactly. With compute as the price it is the cut
profile. Better prices are the duals of the restricted master, a linear program that covers all items with the known sets of load
at most T (Gilmore and Gomory, 1961), stabilized by staying near the best prices (Wentges, 1997).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from autosplit.costs.cost import TOLERANCE
from autosplit.costs.problem import Floats
from autosplit.planners.clock import CELL_S, halfway, now, spend
from autosplit.planners.instance import MANY_ITEMS, Instance
from autosplit.planners.loads import Ints
from autosplit.planners.noncontiguous.hypergraph import load_s, with_nets
from autosplit.planners.noncontiguous.pricing import ROOM, Pricer
from autosplit.planners.noncontiguous.sweeps import capped_sweep, cheap_nets, narrow_order, sweep_of

Members = NDArray[np.bool_]


class RestrictedMaster:
    """The linear program: the largest share of every item that the devices can hold together, using the known sets."""

    def __init__(self, num_items: int, counts: Sequence[int]) -> None:
        """A program without sets, for the given number of devices of each class."""
        self.solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        endless = self.solver.infinity()
        self.share = self.solver.NumVar(0, endless, "share")
        self.rows = [self.solver.Constraint(0, endless) for _ in range(num_items)]
        for row in self.rows:
            row.SetCoefficient(self.share, -1)
        self.limits = [self.solver.Constraint(-endless, count) for count in counts]
        self.columns: list[list[Members]] = [[] for _ in counts]
        self.seen: set[tuple[int, bytes]] = set()
        self.solver.Maximize(self.share)

    def add(self, kind: int, members: Members) -> bool:
        """Add a set that a device of a class can hold. Returns: whether it is new."""
        key = kind, members.tobytes()
        if key in self.seen or not members.any():
            return False
        self.seen.add(key)
        self.columns[kind].append(members)
        column = self.solver.NumVar(0, self.solver.infinity(), "")
        self.limits[kind].SetCoefficient(column, 1)
        for item in np.flatnonzero(members):
            self.rows[item].SetCoefficient(column, 1)
        return True

    def solve(self) -> tuple[float, Floats]:
        """The share, and the price of each item; prices add up to 1. If the solver gives up: 0 and equal prices."""
        if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
            return 0.0, np.full(len(self.rows), 1 / len(self.rows))
        prices = np.maximum([-row.dual_value() for row in self.rows], 0.0)
        if not 0.0 < prices.sum() < np.inf:
            prices = np.ones(len(self.rows))
        return float(self.share.solution_value()), prices / prices.sum()


MOST_STATES = 60_000
"""Most states of a sweep; without levels of bytes eight for each item, if that is more."""

TABLE_CELLS = 120_000_000
"""Most cells of a table of states and values, 8 bytes each."""

BYTE_LEVELS = (32, 16, 8, 4, 2)
"""Levels of bytes to distinguish where a memory cap binds: the first that leaves at most ``MOST_STATES`` states."""

GRAINS = (4000, 20_000, 60_000)
"""Sums to which prices are rounded, from coarse to fine."""

FINEST_CELLS = 300_000_000
"""Most states times values of a cut profile: 1.5 s."""


def pricers_of(graph: Instance, deadline: float = inf) -> list[Pricer]:
    """A pricer for each class of devices. If the graph is too wide, its cheapest nets are left out.

    After the deadline, as a second of ``now()``, one order of the items is tried.
    """
    tries = 200 if graph.num_items <= MANY_ITEMS else 24
    everything = np.ones(graph.num_items, dtype=np.bool_)
    max_states = max(MOST_STATES, 8 * graph.num_items)
    found = []
    for k, members in enumerate(graph.classes):
        paying = with_nets(graph, graph.send_s[:, k] > 0)
        order = narrow_order(paying, everything, tries=tries if now() <= deadline else 1)
        thin, room = paying, float(max_states)
        while (sweep := sweep_of(thin, order, everything, k, k, max_states=max_states)) is None:
            thin = with_nets(paying, ~cheap_nets(paying, order, k, max(room, 4.0 * graph.num_items)))
            room /= 2.0
        found.append(Pricer(sweep, np.ascontiguousarray(graph.compute_s[:, k]), len(members)))
    return found


def capped_pricers(graph: Instance, pricers: Sequence[Pricer]) -> list[Pricer]:
    """Pricers without most of the sets above a memory cap. If a cap binds they are slower."""
    found = []
    for pricer, room_bytes in zip(pricers, graph.memory_bytes.tolist(), strict=True):
        sweep = pricer.sweep
        if room_bytes < graph.num_bytes.sum():
            tried = (capped_sweep(sweep, graph.num_bytes, room_bytes, num_levels) for num_levels in BYTE_LEVELS)
            sweep = next((each for each in tried if each.num_states <= MOST_STATES), sweep)
        found.append(Pricer(sweep, pricer.work_s, pricer.count))
    return found


def refuted_s(pricers: Sequence[Pricer], profiles: Sequence[Floats], total: int, limit_s: float) -> float:
    """The least load at which all devices together hold a value of ``total``, at most ``limit_s``."""
    loads = np.unique(np.concatenate(profiles))
    held = np.zeros(len(loads), dtype=np.int64)
    for pricer, profile in zip(pricers, profiles, strict=True):
        held += pricer.count * (np.searchsorted(profile, loads, side="right") - 1)
    enough = int(np.searchsorted(held, total))
    return float(loads[enough]) if enough < len(loads) else limit_s


@dataclass
class ColumnBound:
    """A bound that rises while time is spent on it.

    Attributes:
        graph: the hypergraph whose loads are bounded.
        pricers: one for each class of devices.
        limit_s: the load of a known plan, at which bounds end.
        bound_s: proved so far.
        prices: of the best bound, adding up to 1.
        grain: prices are rounded to whole numbers with about this sum.
        deadline: as a second of ``now()``.
        seconds_per_cell: time of the last profile for each state and value.
    """

    graph: Instance
    pricers: Sequence[Pricer]
    limit_s: float
    bound_s: float = 0.0
    prices: Floats | None = None
    grain: int = 4000
    deadline: float = np.inf
    seconds_per_cell: float = CELL_S

    @property
    def num_states(self) -> int:
        """States of all sweeps together; times the grain, the cells of one pricing."""
        return sum(pricer.sweep.num_states for pricer in self.pricers)

    def affords(self, grain: int) -> bool:
        """Whether a pricing with this grain should end before the deadline."""
        return now() + self.num_states * grain * self.seconds_per_cell < self.deadline

    def whole(self, prices: Floats) -> Ints:
        """Prices as whole numbers that add up to about the grain."""
        return np.asarray(np.round(prices * (self.grain / prices.sum())), dtype=np.int64)

    def try_prices(self, prices: Floats) -> None:
        """Raise the bound to the least load that these prices do not refute. They are coarser where time is short."""
        while self.grain > 1000 and not self.affords(self.grain):
            self.grain //= 2
        started, cells = now(), self.num_states * self.grain
        values = self.whole(prices)
        profiles = [pricer.profile(values, self.limit_s) for pricer in self.pricers]
        spend(cells * CELL_S)
        found_s = refuted_s(self.pricers, profiles, int(values.sum()), self.limit_s)
        self.seconds_per_cell = max(1e-10, (now() - started) / cells)
        if found_s > self.bound_s:
            self.bound_s, self.prices = found_s, values / values.sum()

    def price(self, prices: Floats, target_s: float, known: Sequence[Sequence[Members]]) -> tuple[float, list[Members]]:
        """The share of all value that the devices can hold within a target, and the best set of each class.

        Raises the bound to the target where the share is below 1.
        """
        values, held, sets = self.whole(prices), 0, []
        for pricer, columns in zip(self.pricers, known, strict=True):
            floor = int((np.array(columns) @ values).max()) if columns else 0
            members = pricer.best_set(values, target_s, floor)
            spend(pricer.sweep.num_states * self.grain * CELL_S)
            held += pricer.count * int(values[members].sum())
            sets.append(members)
        if held < values.sum() and target_s > self.bound_s:
            self.bound_s, self.prices = target_s, values / values.sum()
        return held / int(values.sum()), sets


def generate_columns(
    bound: ColumnBound,
    known: Sequence[Sequence[Members]],
    target_s: float,
    halt: Callable[[], bool],
    centre: Floats | None,
) -> tuple[str, Floats, list[list[Members]]]:
    """Raise a bound by column generation until it reaches the target, the target is out of reach, or ``halt`` returns True.

    Args:
        bound: raised in place.
        known: for each class, sets that one of its devices may hold; sets above the target are ignored.
        target_s: load to refute.
        halt: asked after each pricing.
        centre: prices to stay near at first; by default the duals of the known sets.
    Returns: ``refuted``, ``covered`` (fractional sets within the target exist: no prices can refute it), ``stalled`` (prices as
        coarse as these bring no new set) or ``halted``; the best prices; and all known sets.
    """
    graph, pricers = bound.graph, bound.pricers
    master = RestrictedMaster(graph.num_items, [pricer.count for pricer in pricers])
    for kind, room_bytes in enumerate(graph.memory_bytes):
        for part in known[kind]:
            if graph.num_bytes[part].sum() <= room_bytes and load_s(graph, part, kind) <= target_s:
                master.add(kind, part)
    _, fresh = master.solve()
    centre = fresh if centre is None else centre
    weight, best_share = 0.9, np.inf
    while True:
        mix, added, better = weight, False, False
        while not added and not better and mix >= 0.0:
            prices = mix * centre + (1.0 - mix) * fresh
            held, sets = bound.price(prices, target_s, master.columns)
            better = held < best_share
            if better:
                best_share, centre = held, prices
            for kind, part in enumerate(sets):
                added = master.add(kind, part) or added
            if bound.bound_s >= target_s:
                return "refuted", centre, master.columns
            if halt():
                return "halted", centre, master.columns
            mix = -1.0 if mix == 0.0 else 0.5 * mix if mix > 0.1 else 0.0
        if not added and not better:
            return "stalled", centre, master.columns
        weight = min(0.95, max(mix, 0.0) * 2.0 + (0.1 if better else 0.02))
        share, fresh = master.solve()
        if share >= 1.0 - 1e-7:
            return "covered", centre, master.columns


def _first_prices(bound: ColumnBound, report: Callable[[float, str], None]) -> None:
    """Try compute as the price, rounded ever more finely."""
    for grain in GRAINS:
        if now() > bound.deadline:
            return
        if grain == GRAINS[0] or (bound.num_states * grain < FINEST_CELLS and bound.affords(3 * grain)):
            bound.grain = grain
            bound.try_prices(bound.graph.compute_s.min(axis=1) + 1e-300)
            report(bound.bound_s * (1.0 - TOLERANCE), "cut profile")


def _grains(bound: ColumnBound) -> list[int]:
    """Sums to which prices are rounded, from coarse to fine."""
    most = min(int(TABLE_CELLS * pricer.count / (ROOM * pricer.sweep.num_states)) for pricer in bound.pricers)
    return [min(grain, max(1000, min(most, FINEST_CELLS // bound.num_states))) for grain in GRAINS]


def rising_bound(
    graph: Instance, best: Callable[[], tuple[float, Ints | None]], report: Callable[[float, str], None], deadline: float
) -> ColumnBound | None:
    """Raise a bound until a deadline: the cut profile, then column generation for ever closer targets.

    Args:
        graph: the hypergraph whose loads are bounded.
        best: returns the load of the best plan, and its assignment if there is one.
        report: called with each better bound and its method.
        deadline: second of ``now()``.
    Returns: the bound with its prices; None where no plan is known.
    """
    value_s, home = best()
    if not 0.0 < value_s < np.inf:
        return None
    bound = ColumnBound(graph, pricers_of(graph, deadline), value_s, deadline=deadline)
    _first_prices(bound, report)
    if (graph.memory_bytes < graph.num_bytes.sum()).any() and now() < deadline:
        bound.pricers = capped_pricers(graph, bound.pricers)
        _first_prices(bound, report)
    grains = _grains(bound)
    columns: list[list[Members]] = [[] for _ in graph.classes]
    prices = bound.prices
    reach, level = 1.0, 0
    while now() < deadline and graph.num_items <= MANY_ITEMS:
        value_s, home = best()
        if bound.bound_s >= value_s * (1.0 - TOLERANCE):
            break
        for found, devices in zip(columns, graph.classes, strict=True):
            found += [np.asarray(home == device, dtype=np.bool_) for device in devices if home is not None]
        target_s = (bound.bound_s + (value_s - bound.bound_s) * reach) * (1.0 - TOLERANCE)
        bound.grain, bound.limit_s = grains[level], value_s
        until = halfway(deadline)

        def halt(value_s: float = value_s, until: float = until) -> bool:
            return now() > until or not bound.affords(2 * bound.grain) or best()[0] < value_s * (1.0 - 1e-4)

        outcome, prices, columns = generate_columns(bound, columns, target_s, halt, prices)
        bound.try_prices(prices)
        report(bound.bound_s * (1.0 - TOLERANCE), "columns")
        if outcome == "stalled" and level + 1 < len(grains):
            level += 1
        elif outcome == "halted" and level + 1 < len(grains) and best()[0] == value_s:
            level, reach = level + 1, 0.8 * reach
        elif outcome == "refuted":
            reach = min(1.0, 1.3 * reach)
        elif best()[0] == value_s:
            reach *= 0.6
        if reach < 0.02:
            break
    return bound
