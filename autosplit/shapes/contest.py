"""Run plans of a family under the traffic, in interleaved rounds, and say which one to use."""

import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import nan
from statistics import median, quantiles
from typing import Any

import torch

from autosplit.backends.checking import tolerance
from autosplit.backends.workspace import Workspace
from autosplit.compat.torchparts import pytree
from autosplit.deploying.calling import as_call
from autosplit.deploying.networks import deploy
from autosplit.errors import AutosplitError
from autosplit.progress import Progress, quiet
from autosplit.reports.outcomes import PLAN, Ratio
from autosplit.running.pipeline import Pipeline
from autosplit.serving.hostmanager import HostManager
from autosplit.shapes.service import ShapedService
from autosplit.tracing.differing import difference
from autosplit.tracing.family import At, Family, resized
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.shapes import Traffic

LONGEST = "padded to the longest"
"""The baseline that every request is padded to the largest sizes."""

IN_FLIGHT = 12
"""Requests in flight while a plan is measured."""

NUM_DRAWN, NUM_CHECKED = 64, 3
"""Requests drawn from the traffic, and how many of them are compared with the module at their own sizes."""

Call = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class ShapedOutcome:
    """The measurements of a plan under the traffic.

    Attributes:
        plan: the plan.
        num_variants: variants of each stage.
        rounds_per_s: requests per second in each round.
        seconds: latency of every request, with ``IN_FLIGHT`` of them in flight.
        fault: what is wrong with its answers, or ''.
        requests_per_s: predicted requests per second; 0 where nothing is predicted.
    """

    plan: Plan
    num_variants: int
    rounds_per_s: tuple[float, ...]
    seconds: tuple[float, ...]
    fault: str = ""
    predicted_per_s: float = 0.0

    @property
    def per_s(self) -> float:
        """Median requests per second."""
        return median(self.rounds_per_s)

    def against(self, other: "ShapedOutcome") -> Ratio:
        """How many times as fast this plan is, round by round."""
        return Ratio.of([a / b for a, b in zip(self.rounds_per_s, other.rounds_per_s, strict=True)])


@dataclass(frozen=True)
class ShapedReport:
    """Plans that ran beside each other under the traffic, which one to use, and why others are left out."""

    model: str
    outcomes: Mapping[str, ShapedOutcome]
    chosen: str
    sentence: str
    left_out: Mapping[str, str]

    @property
    def best(self) -> ShapedOutcome:
        """The plan to use."""
        return self.outcomes[self.chosen]

    def rows(self) -> list[dict[str, Any]]:
        """One row a plan, the fastest first."""
        rows = []
        for name, outcome in sorted(self.outcomes.items(), key=lambda item: -item[1].per_s):
            tail = quantiles(outcome.seconds, n=100)
            ratio = outcome.per_s / self.outcomes[LONGEST].per_s if LONGEST in self.outcomes else nan
            rows.append(
                {
                    "way": f"{name} *" if name == self.chosen else name,
                    "stages": len(outcome.plan.stages),
                    "variants": outcome.num_variants,
                    "requests_per_s": outcome.per_s,
                    "predicted_per_s": outcome.predicted_per_s or nan,
                    "times_longest": ratio,
                    "p50_s": median(outcome.seconds),
                    "p99_s": tail[98],
                    "note": outcome.fault,
                }
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "model": self.model,
            "chosen": self.chosen,
            "sentence": self.sentence,
            "rows": self.rows(),
            "left_out": dict(self.left_out),
        }


@dataclass(eq=False)
class _Runner:
    """A plan that is loaded, with its rounds so far."""

    plan: Plan
    service: ShapedService
    fault: str
    pace_per_s: float = 1.0
    rounds_per_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, calls: Sequence[Call], count: int) -> None:
        """Send ``count`` requests with ``IN_FLIGHT`` of them in flight, and note the rate and each latency."""
        waiting: deque[Future[Any]] = deque()
        begun_s = time.perf_counter()
        for number in range(count):
            if len(waiting) == IN_FLIGHT:
                waiting.popleft().result()
            args, kwargs = calls[number % len(calls)]
            future = self.service.submit(*args, **kwargs)
            future.add_done_callback(partial(self._note, time.perf_counter()))
            waiting.append(future)
        for future in waiting:
            future.result()
        self.pace_per_s = count / (time.perf_counter() - begun_s)
        self.rounds_per_s.append(self.pace_per_s)

    def _note(self, sent_s: float, _: "Future[Any]") -> None:
        self.seconds.append(time.perf_counter() - sent_s)


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


def contest(
    contenders: Mapping[str, tuple[Plan, Family]],
    traffic: Traffic,
    machine: Machine,
    workspace: Workspace,
    *,
    num_rounds: int,
    round_s: float,
    predicted: Mapping[str, float],
    progress: Progress = quiet,
) -> ShapedReport:
    """Run plans under the traffic.

    Args:
        contenders: name to plan and the variants with which it runs; ``PLAN`` is among them.
        traffic: how often each size comes.
        machine: the devices.
        workspace: where stages are saved and prepared.
        num_rounds: rounds; each plan runs once a round.
        round_s: seconds of a round of a plan.
        predicted: predicted requests per second, where they are known.
        progress: called with the share of the step ``run``.
    Raises: AutosplitError: the plan itself cannot be run.
    """
    family = contenders[PLAN][1]
    requests = requests_of(family, traffic, NUM_DRAWN)
    calls = [call for _, call in requests]
    runners: dict[str, _Runner] = {}
    left_out: dict[str, str] = {}
    with ExitStack() as opened:
        host = opened.enter_context(HostManager(engine_factory=Pipeline))
        for number, (name, (plan, own)) in enumerate(contenders.items()):
            progress("run", 0.5 * number / len(contenders), f"loading '{name}'")
            try:
                engine = deploy(host, name, own.variants[0], plan, machine, workspace, own.variants[1:])
                service = opened.enter_context(ShapedService(own, engine))
                runners[name] = _Runner(plan, service, _fault(service, family, requests, plan))
                runners[name].run(calls, 2 * IN_FLIGHT)
            except (AutosplitError, OSError) as failure:
                if name == PLAN:
                    raise
                runners.pop(name, None)
                left_out[name] = str(failure)
        for runner in runners.values():
            runner.rounds_per_s.clear()
            runner.seconds.clear()
        for number in range(num_rounds):
            progress("run", 0.5 + 0.5 * number / num_rounds, f"round {number + 1} of {num_rounds}")
            names = list(runners)[number % len(runners) :] + list(runners)[: number % len(runners)]
            for name in names if number % 2 == 0 else names[::-1]:
                # whole passes over the drawn requests: each plan gets the same ones
                passes = max(1, round(round_s * runners[name].pace_per_s / len(calls)))
                runners[name].run(calls, passes * len(calls))
    outcomes = {
        name: ShapedOutcome(
            one.plan,
            len(contenders[name][1].variants),
            tuple(one.rounds_per_s),
            tuple(one.seconds),
            one.fault,
            predicted.get(name, 0.0),
        )
        for name, one in runners.items()
    }
    progress("run", 1.0, "done")
    return ShapedReport(family.variants[0].graph.name, outcomes, *choose(outcomes), left_out)


def choose(outcomes: Mapping[str, ShapedOutcome]) -> tuple[str, str]:
    """Which plan to use, and why: the fastest one beyond the noise; of level ones that with fewer stages, or else the faster."""
    plan = outcomes[PLAN]
    right = {name: one for name, one in outcomes.items() if not one.fault and name != PLAN}
    if plan.fault:
        if not right:
            return PLAN, f"The plan gives wrong answers, and nothing else ran: {plan.fault}"
        best = max(right, key=lambda name: right[name].per_s)
        return best, f"The plan gives wrong answers, so '{best}' is the chosen way: {plan.fault}"
    if not right:
        return PLAN, "No baseline ran beside the plan, so there is nothing to compare it with."
    best = max(right, key=lambda name: right[name].against(plan).median)
    ratio, against = right[best].against(plan), plan.against(right[best])
    if ratio.ahead:
        return best, f"'{best}' answers {ratio.median:.2f} times as many requests as the plan ({ratio}), so it is the chosen way."
    if against.ahead:
        return PLAN, f"The plan answers {against.median:.2f} times as many requests as the best other way, '{best}' ({against})."
    level = f"The plan and '{best}' are level within the noise (the plan answers {against.median:.2f} times as many, {against})"
    if len(right[best].plan.stages) < len(plan.plan.stages):
        return best, f"{level}, and '{best}' is simpler, so it is the chosen way."
    if ratio.median > 1:
        return best, f"{level}, and '{best}' measured more, so it is the chosen way."
    return PLAN, f"{level}, so the plan stays the chosen way."


def _fault(service: ShapedService, family: Family, requests: Sequence[tuple[At, Call]], plan: Plan) -> str:
    """What is wrong with the answers to requests of several sizes; '' if they are those of the model at these sizes."""
    limit = max(tolerance(precision) for precision in plan.precisions)
    different = list({tuple(at.values()): (at, call) for at, call in requests}.values())
    for at, (args, kwargs) in different[:: max(1, len(different) // NUM_CHECKED)][:NUM_CHECKED]:
        pairs = zip(*map(_tensors, (service(*args, **kwargs), family.at(at).run(*args, **kwargs))), strict=True)
        for number, (found, expected) in enumerate(pairs):
            if found.shape != expected.shape or (error := difference(found, expected)[1]) > limit:
                sizes = ", ".join(f"{dim} {size}" for dim, size in at.items())
                off = f"has shape {list(found.shape)}" if found.shape != expected.shape else f"is off by {error:.2g}"
                return f"output {number} of a request of {sizes} {off}, and {limit:.2g} is allowed"
    return ""


def _tensors(answer: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
