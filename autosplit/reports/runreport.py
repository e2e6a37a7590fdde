"""RunReport: a plan beside its baselines, all measured in the same rounds, and which one to use. No torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

from autosplit import tables
from autosplit.costs.planschedule import plan_stages
from autosplit.costs.schedule import simulate
from autosplit.planning.baselines import Baselines
from autosplit.planning.predicting import bounded
from autosplit.reports.judging import Verdict
from autosplit.reports.outcomes import PLAN, Outcome
from autosplit.values.graph import Graph
from autosplit.values.plan import Plan, Prediction
from autosplit.values.timeline import Action, chrome_trace

NUM_SIMULATED = 64
"""Number of requests of the predicted schedule in a trace."""


@dataclass(frozen=True)
class RunReport(tables.Tabular):
    """The report of ``run`` and ``auto``.

    Attributes:
        batch: items in one request; 0 for requests of several sizes.
        outcomes: the plan (``plan``) and each baseline, by name.
        verdict: which of these to use, and why.
        left_out: baselines that could not be run, or must not be used, with the reason.
        notes: faults that do not change the measurements.
        peers: the splits of other tools (vLLM, accelerate, exo, ollama), predicted, and those that do not apply, with the reason.
        trace_error: largest relative error of the traced model against the user's module; None if they were not compared.
    """

    INDEX = "plan"
    model: str
    batch: int
    outcomes: Mapping[str, Outcome]
    verdict: Verdict
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    peers: Baselines = field(default_factory=Baselines)
    trace_error: float | None = None

    @property
    def chosen(self) -> str:
        """The name of the chosen way."""
        return self.verdict.chosen

    @property
    def searched(self) -> str:
        """The plan that was asked for, in two words: a planner found it, or a person wrote it."""
        return "given plan" if self.plan.plan.status == "manual" else "searched plan"

    def label(self, name: str) -> str:
        """The name of a way for a reader; that of the plan says which plan it is, and how it runs."""
        first, *others = name.split(" = ")
        if first != PLAN:
            return name
        plan = self.plan.plan
        way = f"{self.searched}, {len(plan.stages)} stage{'s' * (len(plan.stages) != 1)} ({', '.join(plan.backends)})"
        return " = ".join([way, *others])

    @property
    def sentence(self) -> str:
        """Why the chosen way is to be used."""
        return self.verdict.sentence

    @property
    def plan(self) -> Outcome:
        """The outcome of the plan that was asked for."""
        return self.outcomes[PLAN]

    @property
    def best(self) -> Outcome:
        """The outcome of the plan to use."""
        return self.outcomes[self.chosen]

    @property
    def best_plan(self) -> Plan:
        """The plan to use. If nothing was predicted of it, its figures are those measured, and the bound covers it."""
        plan, rate = self.best.plan, self.best.throughput_per_s
        if plan.prediction.throughput_per_s > 0 or not 0 < rate < inf:
            return plan
        alike = [other.plan for other in self.outcomes.values() if other.plan.microbatch == plan.microbatch]
        measured = Prediction(plan.microbatch / rate, self.best.latency.p50_s, throughput_per_s=rate)
        value_s = measured.latency_s if plan.objective == "latency" else measured.bottleneck_s
        bound_s = max(other.prediction.bound_s for other in alike)
        return bounded(replace(plan, prediction=measured), min(bound_s, value_s))

    @property
    def errors(self) -> str:
        """Both errors in a sentence: the chosen plan against the traced model, and that against the user's module.

        Each pair ran with one number of threads, because another number changes the last bits of many kernels.
        """
        if self.best.token_rates is not None:
            return (
                "First new tokens are those of one process on torch eager, whose steps were compared with the model when traced."
            )
        relative = self.best.max_relative_error
        subject = f"Outputs {_error_words(relative)} the traced model's{' in f32 or f64' if relative else ''}"
        if not relative:
            threads = sorted({stage.threads for stage in self.best.plan.stages})
            subject += f" on as many threads ({' or '.join(map(str, threads))} a stage)"
        if self.trace_error is None:
            return f"{subject}, which were not compared with the module's."
        return f"{subject}, and these {_error_words(self.trace_error)} the module's, both on torch's own number of threads."

    @property
    def call(self) -> str:
        """The call and the requests in flight with which the throughput was measured, and the curve over more of them."""
        curve = "; ".join(
            f"{load.in_flight}: {load.per_s:.4g}/s, {1e3 * load.latency.p50_s:.4g} ms, {1e3 * load.latency.p99_s:.4g} ms"
            for load in self.best.loads
        )
        if self.best.token_rates is not None:
            return f"Rates and times are those of {self.best.in_flight} sequences that come at once."
        told = f"Throughput is that of submit, from one thread with {self.best.in_flight} requests in flight."
        return f"{told} In flight: requests/s, p50, p99: {curve}." if curve else told

    @property
    def request(self) -> str:
        """The items of a request, in words."""
        if self.best.token_rates is not None:
            return "sequences of tokens"
        if not self.batch:
            return "requests of several sizes"
        return f"{self.batch} item{'s' * (self.batch != 1)} a request"

    def distinct(self) -> dict[str, Outcome]:
        """The outcomes, each once: baselines that are the plan itself are named with it, as in ``plan = replicas (eager)``."""
        names: dict[int, list[str]] = {}
        for name, outcome in self.outcomes.items():
            names.setdefault(id(outcome), []).append(name)
        return {" = ".join(named): self.outcomes[named[0]] for named in names.values()}

    def rows(self) -> list[dict[str, Any]]:
        """One row for the plan and each baseline, the best one first by the objective of the plan.

        ``of_plan`` is the first figure of the row divided by that of the plan; the verdict compares round by round instead.
        """
        objective = self.plan.plan.objective
        first, own = next(iter(self.plan.figures(objective).items()))
        rows = []
        for name, outcome in self.distinct().items():
            figures = outcome.figures(objective)
            ratio = own / figures[first] if objective == "latency" else figures[first] / own
            rows.append(
                {
                    "chosen": "*" if self.chosen in name.split(" = ") else "",
                    "plan": name,
                    first: figures.pop(first),
                    "of_plan": ratio,
                    **figures,
                    "stages": len(outcome.plan.stages),
                    "backend": "+".join(dict.fromkeys(stage.shown for stage in outcome.plan.stages)),
                    "rounds": len(outcome.alone_s if objective == "latency" else outcome.rounds_per_s),
                    "max_error": outcome.max_relative_error,
                }
            )
        return sorted(rows, key=lambda row: row[first], reverse=objective == "throughput")

    def peer_rows(self) -> list[dict[str, Any]]:
        """One row for each split by the rules of another tool, the fastest one first; all figures are predicted."""
        own_per_s = self.best.plan.prediction.throughput_per_s
        rows = [
            {
                "split": name,
                "predicted_per_s": plan.prediction.throughput_per_s,
                "of_chosen": plan.prediction.throughput_per_s / own_per_s if own_per_s else None,
                "latency_s": plan.prediction.latency_s,
                "bottleneck": plan.bottleneck,
                "stages": len(plan.stages),
            }
            for name, plan in self.peers.plans.items()
        ]
        return sorted(rows, key=lambda row: row["predicted_per_s"], reverse=True)

    def stage_rows(self) -> list[dict[str, Any]]:
        """One row for each worker of the plan: its seconds by use, predicted beside measured.

        Of a generator ``busy_s`` is a mean, as its prediction is: its steps are of two kinds.
        """
        predicted = {stage.name: stage for stage in self.best.plan.stages}
        return [
            {
                "stage": stats.stage,
                "device": stats.device,
                "backend": predicted[stats.stage].shown,
                "ops": len(predicted[stats.stage].ops),
                "predicted_s": predicted[stats.stage].load_s or None,
                "busy_s": stats.busy.p50_s if self.best.token_rates is None else stats.busy.mean_s,
                "wait_s": stats.wait.p50_s,
                "transfer_s": stats.transfer.p50_s,
                "resident_bytes": stats.resident_bytes,
                "proportional_bytes": stats.proportional_bytes,
                "predicted_bytes": memory.held_bytes if (memory := predicted[stats.stage].memory) is not None else None,
                "held_bytes": stats.held_bytes,
            }
            for stats in self.best.stats.stages
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``, without the path of the plan."""
        best = self.best
        return {
            "model": self.model,
            "batch": self.batch,
            "chosen": self.chosen,
            "sentence": self.sentence,
            "sure": self.verdict.sure,
            "outputs_equal": best.outputs_equal,
            "precision": best.plan.precision,
            "max_abs_error": best.max_abs_error,
            "max_relative_error": best.max_relative_error,
            "trace_relative_error": self.trace_error,
            "throughput_per_s": best.throughput_per_s,
            "in_flight": best.in_flight,
            "loads": [
                {"in_flight": load.in_flight, "per_s": load.per_s, "p50_s": load.latency.p50_s, "p99_s": load.latency.p99_s}
                for load in best.loads
            ],
            "predicted_throughput_per_s": best.plan.prediction.throughput_per_s or None,
            "latency_s": {key: getattr(best.latency, f"{key}_s") for key in ("p50", "p90", "p99")},
            "predicted_latency_s": best.plan.prediction.latency_s or None,
            "loaded_latency_s": {key: getattr(best.loaded_latency, f"{key}_s") for key in ("p50", "p90", "p99")},
            "plan_throughput_per_s": self.plan.throughput_per_s,
            "baselines": {name: outcome.throughput_per_s for name, outcome in self.outcomes.items() if name != PLAN},
            "left_out": dict(self.left_out),
            "peers": {"splits": self.peer_rows(), "left_out": dict(self.peers.left_out)},
            "notes": list(self.notes),
            "restarts": best.stats.restarts,
            "stages": self.stage_rows(),
            "outcomes": {
                name: {
                    "predicted_per_s": outcome.plan.prediction.throughput_per_s or None,
                    "stages": [[list(stage.devices), stage.backend, len(stage.ops)] for stage in outcome.plan.stages],
                    "token_rates": None if outcome.token_rates is None else asdict(outcome.token_rates),
                    "predicted_token_rates": (
                        None if outcome.predicted_token_rates is None else asdict(outcome.predicted_token_rates)
                    ),
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

    def __repr__(self) -> str:
        return f"RunReport({self.model!r}, {len(self.outcomes)} plans: {self.sentence})"

    def _repr_html_(self) -> str:
        reasons = [{"way": name, "reason": reason} for name, reason in self.left_out.items()]
        left_out = tables.html(reasons, "ways left out") if reasons else ""
        stages = tables.html(self.stage_rows(), f"where the time of '{self.chosen}' goes, for each request")
        notes = tables.html([{"note": note} for note in self.notes], "notes") if self.notes else ""
        return tables.html(self.rows(), f"{self.model}, {self.request}: {self.sentence}") + left_out + stages + notes


def _error_words(relative: float) -> str:
    """A relative error in words: equal to the last bit, or how far off.

    >>> _error_words(0.0), _error_words(2e-7)
    ('are equal bit for bit to', 'differ by 2e-07 of the largest value from')
    """
    return f"differ by {relative:.1g} of the largest value from" if relative else "are equal bit for bit to"


def run_trace(report: RunReport, graph: Graph) -> dict[str, Any]:
    """The predicted schedule of the chosen plan beside the measured one, as a Chrome trace (for Perfetto)."""
    return chrome_trace(predicted_actions(report.best.plan, graph, NUM_SIMULATED), report.best.actions)


def predicted_actions(plan: Plan, graph: Graph, num_requests: int) -> tuple[Action, ...]:
    """The predicted work of a plan's workers; the stages include their transfers.

    Empty for a plan without a prediction, and for one with streams: the simulation has one request at a time on a device.
    """
    if not plan.prediction.throughput_per_s or any(stage.streams > 1 for stage in plan.stages):
        return ()
    stages = plan_stages(plan, graph, lambda stage, device: stage.load_s)
    return simulate(stages, num_requests, slots=plan.queue_depth).actions
