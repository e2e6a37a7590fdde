"""RunReport: a plan beside the baselines to run the same model, all measured in the same rounds. No torch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import nan
from statistics import median
from typing import Any

from autosplit import tables
from autosplit.costs.schedule import plan_stages, simulate
from autosplit.reports.results import LatencyStats, RunStats
from autosplit.values.graph import Graph
from autosplit.values.plan import Plan
from autosplit.values.timeline import Action, chrome_trace

PLAN = "plan"

FAR_BEHIND = (0.6, 0.8)
"""A baseline that never reached this share of the fastest one stops after the first round, or after a later one."""

RIVAL = 1.03
"""A way that was so many times as fast as the fastest one in some round may be the better one."""

NUM_SIMULATED = 64
"""Requests of the schedule that a trace shows beside what was measured."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one plan ran.

    Attributes:
        rounds_per_s: items per second in each round, all requests in flight that the rings hold; a way that is far behind
            stops after a few rounds, and the fastest one and its rivals may run some more.
        alone_s: median seconds of a request alone in the pipeline, in rounds of their own that interleave likewise.
        latency: the same of all these requests.
        loaded_latency: seconds of a request in the full pipeline, from its first stage to its answer.
        outputs_equal: bit for bit where every stage is exact, else within the tolerance of its backends.
        max_abs_error: largest difference from the unsplit model in f32 eager.
        max_relative_error: the same divided by the largest value of its output.
        stats: each worker's times in the rounds.
        actions: what the workers did in the last round.
        fault: what is wrong with the numbers, and in which backend; empty where the outputs are equal.
    """

    plan: Plan
    rounds_per_s: tuple[float, ...]
    alone_s: tuple[float, ...]
    latency: LatencyStats
    loaded_latency: LatencyStats
    outputs_equal: bool
    max_abs_error: float
    max_relative_error: float
    stats: RunStats
    actions: tuple[Action, ...] = field(default=(), repr=False)
    fault: str = ""

    @property
    def throughput_per_s(self) -> float:
        """Median over the rounds, in items per second."""
        return median(self.rounds_per_s)

    @property
    def spread(self) -> float:
        """Largest less smallest round over the median."""
        return _spread(self.rounds_per_s)

    def figures(self, objective: str) -> dict[str, float]:
        """What was measured beside what was predicted, for a table: first what the objective asks for."""
        predicted = self.plan.prediction
        rate = {"items_per_s": self.throughput_per_s}
        alone = {"latency_p50_s": self.latency.p50_s}
        if objective == "latency":
            return {**alone, "spread": _shown_spread(self.alone_s), "predicted_s": predicted.latency_s or nan, **rate}
        return {**rate, "spread": _shown_spread(self.rounds_per_s), "predicted_per_s": predicted.throughput_per_s or nan, **alone}

    def faster_than(self, other: "Outcome", objective: str) -> float:
        """How many times as good as the other one: the median over rounds of the ratio of throughputs, or of latencies.

        Where one of the two stopped before the other, the rounds count that both ran.
        """
        mine, theirs = (other.alone_s, self.alone_s) if objective == "latency" else (self.rounds_per_s, other.rounds_per_s)
        return median(a / b for a, b in zip(mine, theirs, strict=False))


def _spread(rounds: Sequence[float]) -> float:
    return (max(rounds) - min(rounds)) / median(rounds)


def _shown_spread(rounds: Sequence[float]) -> float:
    """One round tells nothing about the spread: a way that stopped after it must not look like the steadiest one."""
    return _spread(rounds) if len(rounds) > 1 else nan


@dataclass(frozen=True)
class RunReport:
    """What ``run`` and ``auto`` show.

    Attributes:
        model: the model's name.
        batch: items in one request.
        outcomes: the plan (``plan``) and each baseline, by name.
        chosen: the name of the one to use.
        sentence: why that one.
        left_out: ways that could not be run, or must not be used, with the reason.
        notes: what else went wrong, and leaves the measurements as they are.
    """

    model: str
    batch: int
    outcomes: Mapping[str, Outcome]
    chosen: str
    sentence: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> Outcome:
        """The plan that was asked for."""
        return self.outcomes[PLAN]

    @property
    def best(self) -> Outcome:
        """The one to use."""
        return self.outcomes[self.chosen]

    @property
    def request(self) -> str:
        """What a request is, in words."""
        return f"{self.batch} item{'s' * (self.batch != 1)} a request"

    def rows(self) -> list[dict[str, Any]]:
        """One row for the plan and each baseline, the best one first, by what the plan is for."""
        objective = self.plan.plan.objective
        first = next(iter(self.plan.figures(objective)))
        rows = [
            {
                "way": name,
                "stages": len(outcome.plan.stages),
                "backend": "+".join(dict.fromkeys(stage.backend for stage in outcome.plan.stages)),
                **outcome.figures(objective),
                "max_error": outcome.max_relative_error,
                "of_plan": outcome.faster_than(self.plan, objective),
                "chosen": "*" if name == self.chosen else "",
            }
            for name, outcome in self.outcomes.items()
        ]
        return sorted(rows, key=lambda row: row[first], reverse=objective == "throughput")

    def stage_rows(self) -> list[dict[str, Any]]:
        """One row for each worker of the plan: where its time goes, predicted beside measured."""
        predicted = {stage.name: stage for stage in self.best.plan.stages}
        return [
            {
                "stage": stats.stage,
                "device": stats.device,
                "backend": predicted[stats.stage].backend,
                "ops": len(predicted[stats.stage].ops),
                "predicted_s": predicted[stats.stage].load_s or None,
                "busy_s": stats.busy.p50_s,
                "wait_s": stats.wait.p50_s,
                "transfer_s": stats.transfer.p50_s,
                "resident_bytes": stats.resident_after_bytes,
                "proportional_bytes": stats.proportional_bytes,
                "stage_bytes": stats.stage_bytes,
            }
            for stats in self.best.stats.stages
        ]

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints, without the path of the plan."""
        best = self.best
        return {
            "model": self.model,
            "batch": self.batch,
            "chosen": self.chosen,
            "sentence": self.sentence,
            "outputs_equal": best.outputs_equal,
            "precision": best.plan.precision,
            "max_abs_error": best.max_abs_error,
            "max_relative_error": best.max_relative_error,
            "throughput_per_s": best.throughput_per_s,
            "predicted_throughput_per_s": best.plan.prediction.throughput_per_s or None,
            "latency_s": {key: getattr(best.latency, f"{key}_s") for key in ("p50", "p90", "p99")},
            "predicted_latency_s": best.plan.prediction.latency_s or None,
            "loaded_latency_s": {key: getattr(best.loaded_latency, f"{key}_s") for key in ("p50", "p90", "p99")},
            "plan_throughput_per_s": self.plan.throughput_per_s,
            "baselines": {name: outcome.throughput_per_s for name, outcome in self.outcomes.items() if name != PLAN},
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
            "restarts": best.stats.restarts,
            "stages": self.stage_rows(),
            "outcomes": {
                name: {
                    "predicted_per_s": outcome.plan.prediction.throughput_per_s or None,
                    "stages": [[list(stage.devices), stage.backend, len(stage.ops)] for stage in outcome.plan.stages],
                    "spread": outcome.spread,
                    "rounds_per_s": list(outcome.rounds_per_s),
                    "latency": asdict(outcome.latency),
                    "outputs_equal": outcome.outputs_equal,
                    "max_abs_error": outcome.max_abs_error,
                    "max_relative_error": outcome.max_relative_error,
                }
                for name, outcome in self.outcomes.items()
            },
        }

    def frame(self) -> Any:
        """The rows as a pandas DataFrame indexed by way."""
        return tables.frame(self.rows(), index="way")

    def __repr__(self) -> str:
        return f"RunReport({self.model!r}, {len(self.outcomes)} ways: {self.sentence})"

    def _repr_html_(self) -> str:
        stages = tables.html(self.stage_rows(), "stages")
        return tables.html(self.rows(), f"{self.model}, {self.request}: {self.sentence}") + stages


Unfit = Callable[[Plan, float], Sequence[str]]
"""Why a baseline must not become the plan, given the seconds of a request alone: the demands that it does not meet."""


def judge(outcomes: Mapping[str, Outcome], objective: str, forced: bool, unfit: Unfit = lambda way, s: ()) -> tuple[str, str]:
    """The way to use, and a sentence that says why.

    The best baseline takes the place of the plan if it measured better, or if the plan gives wrong numbers, unless the plan
    is ``forced``, to be used in any case, or the way is ``unfit``.
    """
    plan = outcomes[PLAN]
    simple = {name: outcome for name, outcome in outcomes.items() if name != PLAN and outcome.outputs_equal}
    if not simple:
        return PLAN, "No baseline ran beside the plan, so there is nothing to compare it with."
    reasons = {
        name: "its shape was asked for" if forced else next(iter(unfit(outcome.plan, outcome.latency.p50_s)), "")
        for name, outcome in simple.items()
    }
    fastest = _best(simple, plan, objective)
    fit = {name: outcome for name, outcome in simple.items() if not reasons[name]}
    best = _best(fit, plan, objective) if fit else fastest
    if fit and not plan.outputs_equal:
        return best, f"The plan gives wrong numbers, so '{best}' becomes the plan."
    ratio = simple[best].faster_than(plan, objective)
    what = "as low a latency" if objective == "latency" else "as fast"
    if fit and ratio > 1 and simple[best] is not plan:
        sentence = f"'{best}' measures {ratio:.2f} times {what} as the plan, so it becomes the plan."
        ahead = max(fit, key=lambda name: fit[name].faster_than(plan, objective))
        if fit[ahead].faster_than(plan, objective) > ratio:
            times = f"{fit[best].faster_than(fit[ahead], objective):.2f} times {what}"
            sentence += f" '{ahead}' is further ahead of the plan, but in all rounds of both '{best}' was {times}."
        return best, sentence
    most = simple[fastest].faster_than(plan, objective)
    if most > 1 and reasons[fastest]:
        verdict = f"'{fastest}' measures {most:.2f} times {what} as the plan"
        because = reasons[fastest] if forced else f"that way is not what was asked for: {reasons[fastest]}"
        return PLAN, f"{verdict}; the plan is kept because {because}."
    if simple[best] is plan:
        return PLAN, f"The plan is the baseline '{best}', and no other one measures better."
    return PLAN, f"The plan measures {1 / ratio:.2f} times {what} as the best baseline, '{best}'."


def _best(ways: Mapping[str, Outcome], plan: Outcome, objective: str) -> str:
    """The best of some ways. Rivals ran more rounds beside each other than beside the plan: one that is behind the plan must
    not save it from another."""
    best = max(ways, key=lambda name: ways[name].faster_than(plan, objective))
    ahead = [name for name in ways if ways[name].faster_than(plan, objective) > 1]
    return max([best, *ahead], key=lambda name: ways[name].faster_than(ways[best], objective))


def still_running(rates: Mapping[str, Sequence[float]], keep: Collection[str]) -> list[str]:
    """The ways that are worth another round: those not far behind; with nothing to keep, the fastest one and its rivals.

    Args:
        rates: throughput of each way, in the same rounds.
        keep: ways that run on in any case.

    >>> still_running({"plan": [9.0, 9.0], "slow": [5.0, 7.0], "fast": [10.0, 10.0]}, ["plan"])
    ['plan', 'fast']
    >>> still_running({"plan": [9.0, 9.0], "rival": [9.0, 11.0], "fast": [10.0, 10.0]}, [])
    ['rival', 'fast']
    """
    first = next(iter(rates.values()))
    fastest = max(rates, key=lambda name: median(a / b for a, b in zip(rates[name], first, strict=True)))
    most = {name: max(a / b for a, b in zip(per_s, rates[fastest], strict=True)) for name, per_s in rates.items()}
    least = FAR_BEHIND[len(first) > 1] if keep else RIVAL
    return [name for name in rates if name == fastest or name in keep or most[name] >= least]


def run_trace(report: RunReport, graph: Graph) -> dict[str, Any]:
    """The schedule that was predicted for the chosen way beside what its workers did, as a Chrome trace (for Perfetto).

    What transfers take is in the stages. A way that nothing was predicted for is shown as it ran alone, and so is
    one with streams: the simulation has one request at a time on a device.
    """
    plan = report.best.plan
    if not plan.prediction.throughput_per_s or any(stage.streams > 1 for stage in plan.stages):
        return chrome_trace((), report.best.actions)
    stages = plan_stages(plan, graph, lambda stage, device: stage.load_s)
    return chrome_trace(simulate(stages, NUM_SIMULATED, slots=plan.queue_depth).actions, report.best.actions)
