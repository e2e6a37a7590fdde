"""Several models on the devices of one host: each gets a plan, so that all limits hold and all rates can grow by one factor.

The planner makes the ways to run each model, with replicas and as stages: on each subset of the devices or, of many devices, on
blocks of neighbours. ``planners.cpsat.sharing`` chooses one for each model. A core set takes time of each of its cores.

A request at a load takes its time on an idle host over the idle share of its busiest resource: the mean of processor sharing with
arrivals at random (Kleinrock, 1967). It is an estimate from above where service times are even and one model has the device.

Models that share cores evict each other's data from the caches, and the host's threads work on the same cores. The profile of a
model alone holds neither, so a tenant has a slowdown, which is measured while all models run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf
from typing import Any

from autosplit.costs.problem import Floats
from autosplit.errors import InfeasibleError, UsageError, raise_faults
from autosplit.planners.cpsat.sharing import Way, choose, factor_of, relaxed_factor, sums
from autosplit.planning.backends import backends_of
from autosplit.planning.caps import plan_within_caps
from autosplit.planning.predicting import charge, measured_backends
from autosplit.planning.question import TIME_LIMIT_S, Question
from autosplit.tables import bytes_text, number_text, seconds_text
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine, places
from autosplit.values.plan import Plan, held_on

MAX_SUBSETS = 4
"""Most devices of which every subset is tried; of more, blocks of 1, 2, 4, ... neighbours in the order of the machine."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A model that shares a host.

    Attributes:
        name: its name on the host.
        rate_per_s: requests a second that it should take.
        max_latency_s: most seconds of a request, on average, while all models run.
        weight: how much its latency counts where choices have the same factor.
        slowdown: how many times as long its requests take beside the other models as predicted for it alone.
    """

    name: str
    rate_per_s: float
    max_latency_s: float = inf
    weight: float = 1.0
    slowdown: float = 1.0

    def faults(self) -> list[str]:
        """A sentence for each value that cannot be used."""
        found = (
            [] if 0 < self.rate_per_s < inf else [f"the rate of '{self.name}' must be above 0 a second, but is {self.rate_per_s}"]
        )
        if not self.max_latency_s > 0:
            found.append(f"the latency limit of '{self.name}' must be above 0 s, but is {self.max_latency_s}")
        if not 0 <= self.weight < inf:
            found.append(f"the weight of '{self.name}' must be 0 or more, but is {self.weight}")
        return found


def tenants_of(
    models: Sequence[str],
    rates: Mapping[str, float],
    max_latency_s: Mapping[str, float] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[Tenant]:
    """A tenant for each model. Raises: UsageError: with every fault, a name without a model or rate, or a value out of range."""
    limits, weights = max_latency_s or {}, weights or {}
    faults = [] if models else ["there are no models; name at least one"]
    faults += [f"'{name}' has no rate" for name in models if name not in rates]
    for what, given in (("rates", rates), ("max_latency_s", limits), ("weights", weights)):
        faults += [f"{what} names '{name}', and there is no such model" for name in given if name not in models]
    found = [
        Tenant(name, float(rates[name]), float(limits.get(name, inf)), float(weights.get(name, 1.0)))
        for name in models
        if name in rates
    ]
    raise_faults(UsageError, "these models cannot be planned together", faults + [one for t in found for one in t.faults()])
    return found


@dataclass(frozen=True, slots=True)
class Sharing:
    """One plan for each tenant.

    Attributes:
        tenants: the models, their rates and limits.
        bound: a factor that no choice of the same ways exceeds.
        relaxed: a factor that no plans exceed in the same cost model; infinite where none is known.
    """

    tenants: tuple[Tenant, ...]
    plans: tuple[Plan, ...]
    machine: Machine
    bound: float
    relaxed: float = inf

    @property
    def ways(self) -> list[Way]:
        """The plans as the chooser sees them."""
        return [way_of(tenant, plan, self.machine) for tenant, plan in zip(self.tenants, self.plans, strict=True)]

    @property
    def factor(self) -> float:
        """The largest number by which all rates can be multiplied while every limit holds; below 1 the rates cannot be met."""
        return factor_of(self.ways)

    @property
    def saturation(self) -> float:
        """The factor at which a resource has no idle time; limits on latency may hold only below it."""
        return factor_of([replace(way, most_busy=1.0) for way in self.ways])

    def latencies_s(self, factor: float = 1.0) -> list[float]:
        """Predicted mean seconds of a request of each tenant at ``factor`` times the rates; infinite where that is too much."""
        ways, used = self.ways, sums(self.ways)
        busy = [factor * max((used[name] for name in way.shares), default=0.0) for way in ways]
        beside_s = [t.slowdown * plan.prediction.latency_s for t, plan in zip(self.tenants, self.plans, strict=True)]
        return [seconds / (1 - b) if b < 1 else inf for seconds, b in zip(beside_s, busy, strict=True)]

    def rows(self) -> list[dict[str, Any]]:
        """One row a model: its demands, and the prediction at the rates or, where they cannot be met, at the factor."""
        factor = self.factor
        latencies_s = self.latencies_s(1.0 if factor >= 1 else factor)
        return [
            {
                "model": tenant.name,
                "asked_per_s": tenant.rate_per_s,
                "predicted_per_s": tenant.rate_per_s * factor,
                "way": " | ".join(f"{len(s.ops)} ops on {'+'.join(s.devices)} ({s.backend})" for s in plan.stages),
                "loads": ", ".join(f"{name} {share:.0%}" for name, share in way.shares.items()),
                "alone_s": plan.prediction.latency_s,
                "latency_s": latency_s if latency_s < inf else None,
            }
            for tenant, plan, way, latency_s in zip(self.tenants, self.plans, self.ways, latencies_s, strict=True)
        ]

    @property
    def sentence(self) -> str:
        """Whether the rates can be met, the resource that limits them, and the proved bound, in words."""
        factor, used = self.factor, sums(self.ways)
        met = "all rates and limits hold" if factor >= 1 else "the rates cannot be met"
        fullest = max(used, key=lambda name: used[name], default="")
        reason = f"'{fullest}' is full then"
        for tenant, way in zip(self.tenants, self.ways, strict=True):
            if any(used[name] and way.most_busy / used[name] <= factor * (1 + 1e-9) for name in way.shares) and way.most_busy < 1:
                reason = f"'{tenant.name}' is at its limit of {seconds_text(tenant.max_latency_s)} then"
        proved = "no other choice of these ways is better" if self.bound <= factor * (1 + 1e-3) else f"at most {self.bound:.3g}"
        most = "" if self.relaxed == inf else f"; no plans at all reach more than {max(factor, self.relaxed):.3g}"
        return f"{met}: the largest common factor is {number_text(factor)} ({reason}; {proved}{most})"


def ways_of(question: Question, tenant: Tenant, num_tenants: int) -> list[Plan]:
    """The planner's plans for a tenant on parts of a machine, each once; those that keep its limit on latency when it runs alone.

    Where devices have memory caps, plans within an equal part of each cap are asked for too; they have shorter queues.

    Args:
        question: the model and the machine; its limit of time is for each part.
        num_tenants: how many models share the machine.
    Raises: InfeasibleError: there is none; the message names the tenant.
    """
    limit_s = tenant.max_latency_s
    found, failures = dict[str, Plan](), list[Exception]()
    for part in _parts(question):
        demands: list[dict[str, Any]] = [{}, *([{"max_replicas": 1}] if len(part.devices) > 1 else [])]
        demands += [{"objective": "latency"}] if limit_s < inf else []
        lean = {device.name: max(1, device.memory_bytes // num_tenants) for device in part.devices if device.memory_bytes}
        for there in [part, *([part.with_memory(lean)] if lean else [])]:
            backends = tuple(name for name in measured_backends(question.profile, there) if name in question.backends)
            asked = replace(question, machine=there, backends=backends)
            for wanted in demands:
                try:
                    plan = plan_within_caps(asked.demanding(**wanted, max_latency_s=limit_s).verify())
                except (InfeasibleError, UsageError) as failure:  # a part may lack a device that an op needs
                    failures.append(failure)
                else:
                    found.setdefault(plan.hash, plan)
    if not found:
        raise InfeasibleError(f"model '{tenant.name}' alone: {failures[-1]}")
    return list(found.values())


def _parts(question: Question) -> Iterator[Machine]:
    """Parts of each layout of a machine, with the devices whose memory is shared; each once.

    Other models use the rest, so where all cores are devices, the host has no core of its own: each part pays for its work.
    """
    seen = set[frozenset[str]]()
    for layout in question.machine.layouts:
        names = [device.name for device in layout.devices]
        sizes = [1 << k for k in range(len(names).bit_length()) if 1 << k < len(names)]
        blocks = [tuple(names[a : a + size]) for size in sizes for a in range(0, len(names), size)] + [tuple(names)]
        few = [part for k in range(len(names)) for part in combinations(names, k + 1)] if len(names) <= MAX_SUBSETS else blocks
        paying, _ = charge(question.graph, layout, question.profile)
        for some in few:
            kept = frozenset(some) | {layout[name].shares for name in some if layout[name].shares}
            if kept not in seen:
                seen.add(kept)
                yield layout if len(kept) == len(names) else paying.only(name for name in names if name in kept)


def way_of(tenant: Tenant, plan: Plan, machine: Machine) -> Way:
    """A plan as the chooser sees it: the shares of cores and devices that it takes at the rate of its tenant."""
    shares, parts = dict[str, float](), plan.source.batch // plan.microbatch
    for device, load_s in plan.loads_s.items():
        for place in places(device):
            shares[place] = shares.get(place, 0.0) + tenant.rate_per_s * parts * tenant.slowdown * load_s
    latency_s = tenant.slowdown * plan.prediction.latency_s
    return Way(
        shares,
        cost=tenant.weight * latency_s,
        most_busy=1.0 - latency_s / tenant.max_latency_s,
        alone=frozenset(place for name in plan.loads_s if machine[name].one_model for place in places(name)),
    )


def share_devices(
    tenants: Sequence[Tenant],
    plans: Sequence[Sequence[Plan]],
    graphs: Sequence[Graph],
    machine: Machine,
    *,
    cheapest: Sequence[Mapping[str, Floats]] = (),
    seed: int = 0,
) -> Sharing:
    """The plan of each tenant with which all rates can grow by the largest common factor.

    Args:
        plans: the ways of each, with their prediction and memory.
        machine: the devices; each memory cap holds for all models together.
        cheapest: the tables of ``cheapest_s`` for each, for a bound on all plans; empty for none.
    Raises: InfeasibleError: no choice keeps the caps, or none was found in time.
    """
    caps = {device.name: device.memory_bytes for device in machine.devices if device.memory_bytes is not None}
    ways = list[list[Way]]()
    for tenant, found, graph in zip(tenants, plans, graphs, strict=True):
        held = [{name: sum(held_on(machine[name], plan.stages, machine.devices, graph)) for name in caps} for plan in found]
        ways.append([replace(way_of(tenant, plan, machine), held_bytes=one) for plan, one in zip(found, held, strict=True)])
    chosen = choose(ways, caps, TIME_LIMIT_S, seed)
    if chosen is None:
        least = (min(sum(way.held_bytes.values()) for way in some) for some in ways)
        need = ", ".join(f"'{tenant.name}' {bytes_text(held)}" for tenant, held in zip(tenants, least, strict=True))
        told = ", ".join(f"'{name}' {bytes_text(cap)}" for name, cap in caps.items()) or "none"
        raise InfeasibleError(
            f"no choice of plans was found that fits all models together: they need at least {need}, and the caps are: {told}. "
            "Raise a cap, add a device, or leave a model out."
        )
    relaxed = inf
    if cheapest:
        taken_s = [
            {name: tenant.rate_per_s * tenant.slowdown * op_s for name, op_s in one.items()}
            for tenant, one in zip(tenants, cheapest, strict=True)
        ]
        relaxed = relaxed_factor(taken_s, {device.name: places(device.name) for device in machine.devices})
    picked = tuple(found[number] for found, number in zip(plans, chosen.ways, strict=True))
    return Sharing(tuple(tenants), picked, machine, chosen.bound, relaxed)


def cheapest_s(question: Question) -> dict[str, Floats]:
    """Device to the least seconds of each op there over all backends, shape (num_ops,); infinite where it cannot run.

    Raises: ProfileError: a device has no measurement.
    """
    found: dict[str, Floats] = {}
    for layout in question.machine.layouts:
        problem, _ = backends_of(replace(question, machine=layout).verify()).relaxed()
        found |= dict(zip(problem.devices, problem.compute_s.T, strict=True))
    return found
