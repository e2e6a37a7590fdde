"""``share``: several models planned together for one host, run beside each other, and opened as running services."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, nan
from statistics import median
from typing import Any

from autosplit import tables
from autosplit.api import Model, measure, question_of, trace
from autosplit.arguments import checked
from autosplit.backends.workspace import Workspace
from autosplit.costs.problem import Floats
from autosplit.deploying.bench import Bench
from autosplit.deploying.footprints import Footprints
from autosplit.deploying.mixing import Mix, run_mix, run_paced
from autosplit.deploying.networks import deploy
from autosplit.deploying.service import Service
from autosplit.deploying.setup import BUDGET, SETUP, Budget, Setup, as_budget, round_s
from autosplit.devices.discovering import Devices, as_machine
from autosplit.devices.processes import prepare_to_spawn
from autosplit.errors import UsageError
from autosplit.planning.estimating import with_estimates
from autosplit.planning.sharing import Sharing, Tenant, cheapest_s, share_devices, tenants_of, ways_of
from autosplit.progress import Progress, progress_shown
from autosplit.reports.results import LatencyStats
from autosplit.searching.candidates import PREDICTION_ERROR
from autosplit.searching.correcting import Span, slowdowns, spans_of
from autosplit.serving.hostmanager import HostManager
from autosplit.tracing.capturing import Traced
from autosplit.values.plan import Plan
from autosplit.versions import makers

PART_S = 1.0
"""Seconds for one question to the planner, unless the budget has its own limit."""

MOST_S = 2.0
"""Most seconds of a mix."""

CALM = 0.7
"""Largest share of the saturation at which latencies are measured: nearer to it they depend on the length of the run."""


@dataclass(frozen=True)
class Shared:
    """Several models with their plans for one host, and their measurements.

    Attributes:
        sharing: the plans, as predicted; if they ran, with the slowdown of each model in mixes beside the rounds.
        traced: the models by name.
        rounds: the factor of each mix, as fast as it went; empty if nothing ran.
        paced: by name, latencies at ``paced_at`` times the rates, with arrivals at random; empty if nothing ran.
        paced_at: the multiple of the rates at which ``paced`` was measured.
        faults: models with wrong numbers, as sentences.
        notes: the notes of the profiles, such as which times are estimates.
    """

    sharing: Sharing
    traced: Mapping[str, Traced]
    rounds: tuple[float, ...] = ()
    paced: Mapping[str, LatencyStats] = field(default_factory=dict)
    paced_at: float = 1.0
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def plans(self) -> dict[str, Plan]:
        """The plan of each model."""
        return {tenant.name: plan for tenant, plan in zip(self.sharing.tenants, self.sharing.plans, strict=True)}

    @property
    def measured(self) -> float:
        """The median factor of all mixes, as fast as they went; NaN if nothing ran."""
        return median(self.rounds) if self.rounds else nan

    def rows(self) -> list[dict[str, Any]]:
        """One row a model: rates, plan, loads, latency alone and at a load, predicted and, if it ran, measured."""
        rows = self.sharing.rows()
        if not self.paced:
            return rows
        at = self.sharing.latencies_s(self.paced_at)
        told = [self.paced[row["model"]] for row in rows]
        return [
            {
                **row,
                "slowdown": tenant.slowdown,
                "latency_s": s if s < inf else None,
                "measured_latency_s": one.mean_s,
                "measured_p99_s": one.p99_s,
            }
            for row, tenant, s, one in zip(rows, self.sharing.tenants, at, told, strict=True)
        ]

    @property
    def sentences(self) -> list[str]:
        """The plans with their predictions and, if they ran, their measurements, in words."""
        told = [self.sharing.sentence]
        if self.rounds:
            times = ", ".join(f"'{tenant.name}' {tenant.slowdown:.2f}" for tenant in self.sharing.tenants)
            told += [
                f"together requests took {times} times as long as predicted for each model alone; the figures include this",
                f"as fast as it goes {self.sharing.saturation:.3g} times the rates as predicted, {self.measured:.3g} as measured "
                f"({min(self.rounds):.3g} to {max(self.rounds):.3g} in {len(self.rounds)} rounds)",
                f"latencies are means at {self.paced_at:.2g} times the rates, with arrivals at random",
            ]
        else:
            told.append("models that share a host slow each other down; that is not in these figures, and a budget measures it")
        return [*told, *self.faults]

    @contextmanager
    def open(self) -> Iterator[dict[str, Service]]:
        """All models as running services on one ``HostManager``, by name, until the end of the ``with`` block.

        Raises: PlanError, BackendError, WorkerError: as ``open_pipeline``.
        """
        machine = self.sharing.machine
        with Workspace() as workspace, HostManager(machine) as host:
            yield {
                name: Service(self.traced[name], deploy(host, name, self.traced[name], plan, machine, workspace))
                for name, plan in self.plans.items()
            }

    def __repr__(self) -> str:
        return f"Shared({self.sharing.sentence})"

    def _repr_html_(self) -> str:
        return tables.html(self.rows(), "; ".join(self.sentences))


@checked
def share(
    models: Mapping[str, Model | Traced],
    rates: Mapping[str, float],
    devices: Devices | None = None,
    *,
    max_latency_s: Mapping[str, float] | None = None,
    weights: Mapping[str, float] | None = None,
    setup: Setup = SETUP,
    budget: Budget | float = BUDGET,
) -> Shared:
    """Plan several models for one host, so that all rates hold, or the largest common factor of them. ::

        shared = autosplit.share({"a": traced_a, "b": traced_b}, rates={"a": 100, "b": 20}, devices="cpu:0,cpu:1")
        with shared.open() as services:
            y = services["a"](x)

    Args:
        models: name to a spec, an ``ExportedProgram``, or the value of ``trace`` for a module.
        rates: name to the requests a second that the model should take.
        devices: the devices, or their names, as a list or with commas between; by default all of this machine.
        max_latency_s: name to the most mean seconds of a request while all models run.
        weights: name to how much a model's latency counts where choices have the same factor; 1 by default.
        setup: backends, precision, store, seed, and the progress function.
        budget: rounds in which all models run together, longer ones for a larger ``search_s``, and as many mixes that correct
            the prediction. With 0 seconds nothing runs, and the prediction supposes that models cost each other nothing.
    Raises: UsageError: rates, limits or weights do not fit the models. InfeasibleError: a model cannot run, or not within its
        limit, or memory cannot hold all.
    """
    tenants, budget = tenants_of(list(models), rates, max_latency_s, weights), as_budget(budget)
    if setup.hosts is not None:
        raise UsageError("several models are planned for one host; leave out the cluster")
    machine = as_machine(devices)
    prepare_to_spawn()
    with progress_shown(setup.progress) as progress, Workspace() as own:
        setup = replace(setup, progress=progress, workspace=setup.workspace or own)
        traced, ways, cheapest = dict[str, Traced](), list[list[Plan]](), list[Mapping[str, Floats]]()
        notes = list[str]()
        for tenant in tenants:
            model = models[tenant.name]
            progress("trace", 0.0, f"loading '{tenant.name}' and capturing its graph")
            traced[tenant.name] = one = model if isinstance(model, Traced) else trace(model)
            profile = measure(one, machine, setup=setup).on(machine)
            progress("search", len(ways) / len(tenants), f"planning '{tenant.name}' on parts of the devices")
            usable = profile.usable(machine)
            question = question_of(one, profile, usable, setup, PART_S if budget.planner_s is None else budget.planner_s)
            question = replace(question, shares_time=True, account=Footprints(usable, setup.workspace).account(one, profile))
            found = ways_of(question, tenant, len(tenants))
            ways.append([with_estimates(replace(plan, versions=makers()), profile) for plan in found])
            notes += [f"'{tenant.name}': {note}" for note in profile.notes]
            cheapest.append(cheapest_s(question))
        graphs = [one.graph for one in traced.values()]
        choose = partial(share_devices, plans=ways, graphs=graphs, machine=machine, cheapest=cheapest, seed=setup.seed)
        shared = Shared(choose(tenants), traced, notes=tuple(notes))
        return _run(shared, choose, setup, budget, progress) if budget.search_s > 0 else shared


def _run(
    shared: Shared, choose: Callable[[Sequence[Tenant]], Sharing], setup: Setup, budget: Budget, progress: Progress
) -> Shared:
    """Load the plans on one host, check each against its unsplit model, and choose again by the slowdowns of a first mix.

    Then the models run as fast as they go, and at their rates. Half of the mixes as fast as they go are rounds, and the others
    correct the prediction. They take turns, so that drift of the machine cancels.
    """
    sharing, mix_s = shared.sharing, round_s(budget.search_s, MOST_S)
    rates = {tenant.name: tenant.rate_per_s for tenant in sharing.tenants}
    with Bench(sharing.machine, setup, budget) as bench:
        if setup.observe is not None:
            setup.observe(bench.host)
        for number, (name, plan) in enumerate(shared.plans.items()):
            progress("run", 0.3 * number / len(rates), f"loading '{name}'")
            bench.load(name, plan, shared.traced[name])
        progress("run", 0.3, "all models, the first mix")
        sharing = chosen_again(sharing, _slowdowns(bench, sharing, run_mix(bench, rates, mix_s * sharing.saturation)), choose)
        others = {name: plan for name, plan in replace(shared, sharing=sharing).plans.items() if plan != shared.plans[name]}
        for name in others:  # all of them first: together, old and new plans may not fit the memory
            bench.unload(name)
        for name, plan in others.items():
            bench.load(name, plan, shared.traced[name])
        rounds, slowed, seconds = list[float](), list[list[float]](), mix_s * sharing.saturation
        for number in range(2 * budget.num_rounds):
            progress("run", 0.4 + 0.25 * number / budget.num_rounds, f"all models, mix {number + 1} of {2 * budget.num_rounds}")
            mix = run_mix(bench, rates, seconds)
            if number % 4 in (0, 3):
                slowed.append(_slowdowns(bench, sharing, mix))
            else:
                rounds.append(mix.factor)
        sharing = replace(choose(_slowed(sharing, list(map(median, zip(*slowed, strict=True))))), plans=sharing.plans)
        measured = replace(shared, sharing=sharing, rounds=tuple(rounds))
        paced_at = min(1.0, sharing.factor, CALM * measured.measured)
        progress("run", 0.9, f"latencies at {paced_at:.2g} times the rates")
        paced = run_paced(bench, {name: paced_at * rate for name, rate in rates.items()}, 2 * mix_s, setup.seed)
        faults = tuple(f"'{name}': {entry.fault}" for name, entry in bench.loaded.items() if entry.fault)
    progress("run", 1.0, "done")
    return replace(measured, paced=paced, paced_at=paced_at, faults=faults)


def _slowdowns(bench: Bench, sharing: Sharing, mix: Mix) -> list[float]:
    """The slowdown of each model while a mix was timed: afterwards the models that are left have the host for themselves."""
    begun_ns, ended_ns, spans = round(mix.begun_s * 1e9), round(mix.ended_s * 1e9), list[list[list[Span]]]()
    for tenant in sharing.tenants:
        workers = map(spans_of, bench.loaded[tenant.name].pipeline.events())
        spans.append([[one for one in worker if begun_ns <= one[0] and one[1] <= ended_ns] for worker in workers])
    return slowdowns(sharing.plans, spans)


def _slowed(sharing: Sharing, by: Sequence[float]) -> list[Tenant]:
    return [replace(tenant, slowdown=one) for tenant, one in zip(sharing.tenants, by, strict=True)]


def chosen_again(sharing: Sharing, by: Sequence[float], choose: Callable[[Sequence[Tenant]], Sharing]) -> Sharing:
    """The choice with the slowdown of each tenant; other plans only if they are ahead by more than predictions err."""
    found = choose(_slowed(sharing, by))
    kept = replace(found, plans=sharing.plans)
    return found if found.factor > kept.factor * (1 + PREDICTION_ERROR) else kept
