"""Run a plan for requests of several sizes beside its baselines, under the traffic, in interleaved rounds."""

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from autosplit.backends.checking import model_reference
from autosplit.compat.torchparts import pytree
from autosplit.deploying.bench import IN_FLIGHT, Bench, Contender, send_all
from autosplit.deploying.comparing import LOADING_SHARE
from autosplit.deploying.contest import LOADING_TIME, Contest
from autosplit.deploying.service import Call, as_call
from autosplit.deploying.setup import Budget, Setup
from autosplit.errors import UsageError
from autosplit.planning.baselines import baselines_of, unmet_demands
from autosplit.progress import between, progress_shown
from autosplit.reports.judging import decide
from autosplit.reports.outcomes import PLAN, Load, Outcome
from autosplit.reports.results import LatencyStats, StageStats
from autosplit.reports.runreport import RunReport
from autosplit.running.engine import Engine
from autosplit.shapes.service import ShapedService
from autosplit.tracing.capturing import Traced
from autosplit.tracing.differing import NumericalError, difference, larger
from autosplit.tracing.family import At, Family, resized
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.shapes import Traffic, even_traffic

LONGEST = "padded to the longest"
"""The baseline that every request is padded to the largest sizes."""

CURVE = 1, 4, 16, 64
"""Requests in flight at which each plan is measured once more, for the curve in the report."""

NUM_DRAWN, NUM_CHECKED, NUM_ALONE = 64, 3, 8
"""Requests drawn from the traffic; those of them that are compared with the module, and that are sent alone in a round."""

MOST_BASELINES = 3
"""Most baselines beside the plan: those that are predicted fastest."""

Arguments = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass
class _Contender(Contender):
    """A plan for requests of several sizes; ``seconds`` has those of each request in the full rounds, from ``submit`` on."""

    seconds: list[float] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        """Requests that are submitted before the answer to the first one is taken."""
        return IN_FLIGHT

    def run(self, num_items: int) -> None:
        """Send whole passes over the requests, so that each plan gets the same ones; note the rate and each latency."""
        passes = max(1, round(num_items / len(self.calls)))
        self.pace_per_s, seconds = loaded(self.calls, passes * len(self.calls), IN_FLIGHT)
        self.rounds_per_s.append(self.pace_per_s)
        self.seconds += seconds

    def run_alone(self, seconds: float) -> None:
        """Send single requests, the same ones to each plan, and note the seconds of each."""
        self.rounds_alone_s.append(_alone_s(self.calls))

    def restart(self) -> Sequence[StageStats]:
        """As ``Contender.restart``."""
        self.seconds.clear()
        return super().restart()

    def outcome(self) -> Outcome:
        """The measurements so far."""
        return replace(super().outcome(), loaded_latency=LatencyStats.of(self.seconds))


class _SizedBench(Bench):
    """A bench of plans for a family, each with its own variants; all get the same ``requests``."""

    def __init__(
        self, machine: Machine, setup: Setup, budget: Budget, family: Family, requests: Sequence[tuple[At, Arguments]]
    ) -> None:
        super().__init__(machine, setup, budget)
        self._family, self._requests = family, requests

    def _model(self, plan: Plan, traced: Traced) -> Family:
        return self._family if plan.shapes is None else self._family.only(plan.shapes.variants)

    def _check(self, plan: Plan, network: str, pipeline: Engine, traced: Traced) -> Contender:
        service = self._opened.enter_context(ShapedService(self._model(plan, traced), pipeline))
        error, fault = _checked(service, self._family, self._requests, plan)
        calls = [partial(service.submit, *args, **kwargs) for _, (args, kwargs) in self._requests]
        entry = _Contender(plan, network, service.pipeline, calls, error, fault, _alone_s(calls))
        entry.pace_per_s, _ = loaded(calls, 2 * IN_FLIGHT, IN_FLIGHT)
        return entry


def loaded(calls: Sequence[Call], count: int, num_in_flight: int) -> tuple[float, list[float]]:
    """Requests per second, and the seconds of each, of ``count`` requests of which ``num_in_flight`` are in flight."""
    latencies_s, begun_s = list[float](), time.perf_counter()

    def noted(call: Call) -> "Future[Any]":
        future, sent_s = call(), time.perf_counter()
        future.add_done_callback(lambda _: latencies_s.append(time.perf_counter() - sent_s))
        return future

    send_all([partial(noted, call) for call in calls], count, num_in_flight)
    return count / (time.perf_counter() - begun_s), latencies_s


def _alone_s(calls: Sequence[Call]) -> list[float]:
    """Seconds of single requests, of the first ``NUM_ALONE``."""
    found = list[float]()
    for call in calls[:NUM_ALONE]:
        begun_s = time.perf_counter()
        call().result()
        found.append(time.perf_counter() - begun_s)
    return found


def _curve(calls: Sequence[Call], pace_per_s: float, load_s: float) -> tuple[Load, ...]:
    """Throughput and latency, for about ``load_s`` seconds at each number of requests in flight."""
    found = [(most, *loaded(calls, max(most, round(load_s * pace_per_s)), most)) for most in CURVE]
    return tuple(Load(most, per_s, LatencyStats.of(latencies_s)) for most, per_s, latencies_s in found)


def requests_of(family: Family, traffic: Traffic, count: int) -> list[tuple[At, Arguments]]:
    """Requests drawn from the traffic, with the sizes of each: parts of the example inputs of the largest variant."""
    largest, shares = family.variants[0], traffic.shares
    drawn = random.Random(0).choices(list(shares), list(shares.values()), k=count)
    found: list[tuple[At, Arguments]] = []
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
        plan: the plan, with its ``shapes``.
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

    begun_s, requests = time.monotonic(), requests_of(family, flow, NUM_DRAWN)
    late_s, until_s = begun_s + LOADING_TIME * budget.compare_s, begun_s + budget.compare_s
    with progress_shown(setup.progress) as progress, _SizedBench(machine, setup, budget, family, requests) as bench:
        told = between(progress, 0.0, LOADING_SHARE)
        contest = Contest(bench, plan.objective, "", budget.round_s, told, decide=constraints is not None, until_s=until_s)
        left_out = contest.load(plans, {plan.microbatch: family.variants[0]}, late_s)
        for entry in bench.loaded.values():
            entry.restart()
        barred = {name for name, one in bench.loaded.items() if name != PLAN and unfit(one.plan, one.latency.p50_s)}
        contest = replace(contest, progress=between(progress, LOADING_SHARE, 1.0), barred=barred)
        outcomes = contest.run(budget.num_rounds, None)
        for name, entry in bench.loaded.items():
            loads = _curve(entry.calls, entry.pace_per_s, budget.round_s / len(CURVE))
            outcomes[name] = replace(outcomes[name], loads=loads)
        progress("run", 1.0, "done")
    left_out |= {name: outcome.fault for name, outcome in outcomes.items() if outcome.fault}
    error = family.variants[0].module_error
    verdict = decide(outcomes, plan.objective, constraints is None, unfit)
    return RunReport(graph.name, 0, outcomes, verdict, left_out, trace_error=None if error is None else error.relative)


def _checked(
    service: ShapedService, family: Family, requests: Sequence[tuple[At, Arguments]], plan: Plan
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
