"""Run a plan for requests of several sizes beside its baselines, under the traffic, in interleaved rounds."""

import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from autosplit.backends.checking import model_reference
from autosplit.backends.workspace import Workspace
from autosplit.compat.torchparts import pytree
from autosplit.deploying.networks import deploy
from autosplit.deploying.service import as_call
from autosplit.deploying.setup import Budget, Setup
from autosplit.errors import AutosplitError, UsageError
from autosplit.planning.baselines import baselines_of, unmet_demands
from autosplit.progress import Progress, progress_shown
from autosplit.reports.judging import decide, in_turn
from autosplit.reports.outcomes import PLAN, Load, Outcome
from autosplit.reports.results import LatencyStats
from autosplit.reports.runreport import RunReport
from autosplit.running.pipeline import Pipeline
from autosplit.running.recording import record
from autosplit.serving.hostmanager import HostManager
from autosplit.shapes.service import ShapedService
from autosplit.tracing.differing import NumericalError, difference, larger
from autosplit.tracing.family import At, Family, resized
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.shapes import Traffic, even_traffic

LONGEST = "padded to the longest"
"""The baseline that every request is padded to the largest sizes."""

IN_FLIGHT = 12
"""Requests in flight while a plan is measured."""

CURVE = 1, 4, 16, 64
"""Requests in flight at which each plan is measured once more, for the curve in the report."""

NUM_DRAWN, NUM_CHECKED, NUM_ALONE = 64, 3, 8
"""Requests drawn from the traffic; those of them that are compared with the module, and that are sent alone in a round."""

MOST_BASELINES = 3
"""Most baselines beside the plan: those that are predicted fastest."""

Call = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass(eq=False)
class _Runner:
    """A plan that is loaded, with its rounds so far."""

    plan: Plan
    service: ShapedService
    error: NumericalError
    fault: str
    pace_per_s: float = 1.0
    rounds_per_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rounds_alone_s: list[list[float]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)

    def run(self, calls: Sequence[Call], count: int) -> None:
        """Send ``count`` requests with ``IN_FLIGHT`` of them in flight, and note the rate and each latency."""
        self.pace_per_s, latencies_s = loaded(self.service, calls, count, IN_FLIGHT)
        self.rounds_per_s.append(self.pace_per_s)
        self.seconds += latencies_s

    def run_loads(self, calls: Sequence[Call], load_s: float) -> None:
        """Measure the curve of throughput and latency: for about ``load_s`` seconds at each number in flight."""
        for num_in_flight in CURVE:
            count = max(num_in_flight, round(load_s * self.pace_per_s))
            per_s, latencies_s = loaded(self.service, calls, count, num_in_flight)
            self.loads.append(Load(num_in_flight, per_s, LatencyStats.of(latencies_s)))

    def run_alone(self, calls: Sequence[Call]) -> None:
        """Send single requests, and note the seconds of each."""
        self.rounds_alone_s.append([])
        for args, kwargs in calls[:NUM_ALONE]:
            begun_s = time.perf_counter()
            self.service(*args, **kwargs)
            self.rounds_alone_s[-1].append(time.perf_counter() - begun_s)

    def restart(self) -> None:
        """Forget the rounds so far."""
        self.rounds_per_s.clear()
        self.seconds.clear()
        self.service.stats(clear=True)

    def outcome(self) -> Outcome:
        """The measurements so far."""
        return Outcome(
            self.plan,
            tuple(self.rounds_per_s),
            tuple(map(median, self.rounds_alone_s)),
            LatencyStats.of([one_s for alone_s in self.rounds_alone_s for one_s in alone_s]),
            LatencyStats.of(self.seconds),
            outputs_equal=not self.fault,
            max_abs_error=self.error.absolute,
            max_relative_error=self.error.relative,
            stats=self.service.stats(),
            actions=record(self.service.pipeline),
            fault=self.fault,
            in_flight=IN_FLIGHT,
            loads=tuple(self.loads),
        )


def loaded(service: ShapedService, calls: Sequence[Call], count: int, num_in_flight: int) -> tuple[float, list[float]]:
    """Requests per second, and the seconds of each, of ``count`` requests of which ``num_in_flight`` are in flight."""
    latencies_s = list[float]()

    def note(sent_s: float, _: "Future[Any]") -> None:
        latencies_s.append(time.perf_counter() - sent_s)

    waiting: deque[Future[Any]] = deque()
    begun_s = time.perf_counter()
    for number in range(count):
        if len(waiting) == num_in_flight:
            waiting.popleft().result()
        args, kwargs = calls[number % len(calls)]
        waiting.append(service.submit(*args, **kwargs))
        waiting[-1].add_done_callback(partial(note, time.perf_counter()))
    for future in waiting:
        future.result()
    return count / (time.perf_counter() - begun_s), latencies_s


def requests_of(family: Family, traffic: Traffic, count: int) -> list[tuple[At, Call]]:
    """Requests drawn from the traffic, with the sizes of each: parts of the example inputs of the largest variant."""
    largest, shares = family.variants[0], traffic.shares
    drawn = random.Random(0).choices(list(shares), list(shares.values()), k=count)
    found: list[tuple[At, Call]] = []
    for sizes in drawn:
        at = dict(zip(traffic.dims, sizes, strict=True))
        pairs = zip(largest.graph.inputs, largest.example_inputs, strict=True)
        found.append((at, as_call(largest, [resized(tensor, family.dims.get(name, {}), at) for name, tensor in pairs])))
    return found


def compare_sizes(
    family: Family,
    plan: Plan,
    machine: Machine,
    constraints: Constraints | None,
    traffic: Traffic | None,
    *,
    profile: Profile | None,
    baselines: bool,
    setup: Setup,
    budget: Budget,
) -> RunReport:
    """The plan beside the usual ways to run the model with the same buckets, and beside itself padded to the longest.

    Args:
        family: the model.
        plan: the plan, with its ``shapes``.
        machine: the devices.
        constraints: demands that a baseline must meet to become the plan; None keeps the plan in any case.
        traffic: how often each size comes; None for all sizes alike.
        profile: predicts the baselines.
        baselines: whether the usual ways run too.
        setup: ``hosts``, ``workspace``, ``backends`` and ``progress``.
        budget: rounds, and their seconds.
    Raises: UsageError: the plan is for one size, or sizes of the traffic are not allowed. AutosplitError: the plan cannot be run.
    """
    if plan.shapes is None:
        raise UsageError("the plan is for requests of one size, and the model is traced for several; search a plan for them")
    flow = (traffic or even_traffic(family.allowed)).verify(family.allowed)
    family, graph = family.only(plan.shapes.variants), family.variants[0].graph
    plans = {PLAN: plan}
    if not family.unpaddable:
        plans[LONGEST] = replace(plan, shapes=plan.shapes.longest).unpredicted()
    if baselines:
        isolate = setup.isolate or setup.hosts is not None  # the caller is on one host
        found = baselines_of(graph, plan, machine, profile, isolate=isolate).plans
        ranked = sorted(found, key=lambda name: -found[name].prediction.throughput_per_s)
        others = [name for name in ranked if replace(found[name], shapes=plan.shapes).hash != plan.hash]
        plans |= {name: replace(found[name], shapes=plan.shapes) for name in others[:MOST_BASELINES]}

    def unfit(other: Plan, latency_s: float) -> list[str]:
        return unmet_demands(other, latency_s, graph, machine, constraints or Constraints(), setup.backends)

    with progress_shown(setup.progress) as progress, Workspace() as own:
        setup = replace(setup, workspace=setup.workspace or own)
        outcomes, left_out = _contest(family, plans, flow, machine, setup, budget, progress)
    left_out |= {name: outcome.fault for name, outcome in outcomes.items() if outcome.fault}
    error = family.variants[0].module_error
    verdict = decide(outcomes, plan.objective, constraints is None, unfit)
    return RunReport(graph.name, 0, outcomes, verdict, left_out, trace_error=None if error is None else error.relative)


def _contest(
    family: Family,
    plans: Mapping[str, Plan],
    traffic: Traffic,
    machine: Machine,
    setup: Setup,
    budget: Budget,
    progress: Progress,
) -> tuple[dict[str, Outcome], dict[str, str]]:
    """The measurements of each plan, and why others are left out. Raises: AutosplitError: the plan itself cannot be run."""
    requests = requests_of(family, traffic, NUM_DRAWN)
    calls = [call for _, call in requests]
    runners: dict[str, _Runner] = {}
    left_out: dict[str, str] = {}
    with ExitStack() as opened:
        hosts, workspace = setup.hosts, setup.workspace
        assert workspace is not None
        host = opened.enter_context(HostManager(engine_factory=Pipeline if hosts is None else hosts.engine_factory()))
        for number, (name, plan) in enumerate(plans.items()):
            progress("run", 0.5 * number / len(plans), f"loading '{name}'")
            try:
                own = family.only(plan.shapes.variants) if plan.shapes is not None else family
                engine = deploy(host, name, own, plan, machine, workspace)
                service = opened.enter_context(ShapedService(own, engine))
                runners[name] = _Runner(plan, service, *_checked(service, family, requests, plan))
                runners[name].run(calls, 2 * IN_FLIGHT)
            except (AutosplitError, OSError) as failure:
                if name == PLAN:
                    raise
                runners.pop(name, None)
                left_out[name] = str(failure)
        for runner in runners.values():
            runner.restart()
        for number in range(budget.num_rounds):
            progress("run", 0.5 + 0.5 * number / budget.num_rounds, f"round {number + 1} of {budget.num_rounds}")
            for name in in_turn(list(runners), number):
                # whole passes over the drawn requests: each plan gets the same ones
                passes = max(1, round(budget.round_s * runners[name].pace_per_s / len(calls)))
                runners[name].run(calls, passes * len(calls))
                runners[name].run_alone(calls)
        for runner in runners.values():
            runner.run_loads(calls, budget.round_s / len(CURVE))
        outcomes = {name: one.outcome() for name, one in runners.items()}
    progress("run", 1.0, "done")
    return outcomes, left_out


def _checked(
    service: ShapedService, family: Family, requests: Sequence[tuple[At, Call]], plan: Plan
) -> tuple[NumericalError, str]:
    """The largest error of answers to requests of several sizes against the model at these sizes, and the fault or ''."""
    worst = NumericalError(0.0, 0.0, "")
    different = list({tuple(at.values()): (at, call) for at, call in requests}.values())
    for at, (args, kwargs) in different[:: max(1, len(different) // NUM_CHECKED)][:NUM_CHECKED]:
        traced = family.at(at)
        reference = model_reference(traced, traced.flatten_inputs(*args, **kwargs))
        limit = max(map(reference.tolerance, {*plan.precisions}))
        pairs = zip(*map(_tensors, (service(*args, **kwargs), traced.unflatten_outputs(reference.outputs[0]))), strict=True)
        for number, (found, expected) in enumerate(pairs):
            sizes = ", ".join(f"{dim} {size}" for dim, size in at.items())
            if found.shape != expected.shape:
                return worst, f"output {number} of a request of {sizes} has shape {list(found.shape)}"
            error = NumericalError(*difference(found, expected), f"output {number} of a request of {sizes}")
            worst = larger(worst, error)
            if not error.relative <= limit:
                return worst, f"{error.output} is off by {error.relative:.2g}, and {limit:.2g} is allowed"
    return worst, ""


def _tensors(answer: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
