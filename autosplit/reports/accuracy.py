"""Accuracy: predicted beside measured, for each plan that ran and each of its workers. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from autosplit import tables
from autosplit.files import from_plain
from autosplit.reports.outcomes import Outcome
from autosplit.reports.results import RunStats
from autosplit.reports.runreport import RunReport
from autosplit.values.plan import Plan
from autosplit.values.samples import Precision


@dataclass(frozen=True, slots=True)
class StageRun:
    """One worker of a run: seconds of each request that were predicted and, transfers included, measured (the mean)."""

    stage: str
    device: str
    backend: str
    threads: int
    num_ops: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """The error of the prediction as a share of the measured value; positive where the stage was faster."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """One plan that ran.

    Attributes:
        kind: ``searched`` (a candidate, predicted from the profile before its run) or ``run`` (from a report).
        way: ``plan``, or the name of the baseline that ran.
        plan: the plan's hash.
        predicted_per_s: items per second, as the plan says.
        measured_per_s: the median over the rounds.
        spread: largest less smallest round over the median.
        date: the time of the run, in ISO 8601.
    """

    kind: str
    model: str
    way: str
    plan: str
    precision: Precision
    predicted_per_s: float
    measured_per_s: float
    spread: float
    stages: tuple[StageRun, ...]
    date: str

    @property
    def error(self) -> float:
        """How far the predicted throughput is off, as a share of the measured one; positive where too much was promised."""
        return self.predicted_per_s / self.measured_per_s - 1

    @property
    def backends(self) -> str:
        """The backends of its stages, each once."""
        return "+".join(dict.fromkeys(stage.backend for stage in self.stages))

    @property
    def shape(self) -> str:
        """Its number of stages, and whether one of them runs on several devices.

        >>> stages = [StageRun(name, device, "eager", 1, 1, 1.0, 1.0) for name, device in (("a", "cpu:0"), ("b", "cpu:1"))]
        >>> Run("run", "mlp", "plan", "", "f32", 1.0, 1.0, 0.0, tuple(stages), "").shape
        '2 stages'
        """
        count = len({stage.stage for stage in self.stages})
        return f"{count} stage{'s' * (count != 1)}{', replicated' * (len(self.stages) > count)}"

    @property
    def undisturbed(self) -> list[StageRun]:
        """The workers that had a device to themselves. The seconds of other workers include time slices of their neighbours."""
        devices = [stage.device for stage in self.stages]
        return [stage for stage in self.stages if devices.count(stage.device) == 1]

    def row(self) -> dict[str, Any]:
        """One row of the table of runs; ``stage_error`` is the one of its undisturbed workers that is largest in size."""
        return {
            "model": self.model,
            "kind": self.kind,
            "way": self.way,
            "backends": self.backends,
            "precision": self.precision,
            "stages": len({stage.stage for stage in self.stages}),
            "workers": len(self.stages),
            "predicted_per_s": self.predicted_per_s,
            "measured_per_s": self.measured_per_s,
            "spread": self.spread,
            "error": self.error,
            "stage_error": max((stage.error for stage in self.undisturbed), key=abs, default=float("nan")),
            "date": self.date,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Run":
        """The inverse of ``dataclasses.asdict``. Raises: ValueError: a field is missing or of another type."""
        run = from_plain(Run, data)
        if not (run.predicted_per_s > 0 and run.measured_per_s > 0):
            raise ValueError(f"a run needs figures above 0, but {run.measured_per_s} and {run.predicted_per_s} items/s are given")
        return run


@dataclass(frozen=True)
class Accuracy(tables.Tabular):
    """All runs of a store, and how good their predictions were."""

    runs: tuple[Run, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row a run, oldest first."""
        return [run.row() for run in self.runs]

    def summary(self) -> list[dict[str, Any]]:
        """Median and worst size of the error, for all runs, for each shape, and for each kind and choice of backends.

        >>> Accuracy(()).summary()
        []
        """
        groups: dict[tuple[str, str, str], list[Run]] = {}
        for run in self.runs:
            of_kind = (run.kind, "all", "all"), (run.kind, run.backends, "all")
            for key in (("all", "all", "all"), ("all", "all", run.shape), *of_kind):
                groups.setdefault(key, []).append(run)
        return [
            {
                "kind": kind,
                "backends": backends,
                "shape": shape,
                "models": len({run.model for run in runs}),
                "runs": len(runs),
                **_sizes("error", [run.error for run in runs]),
                "workers": sum(len(run.undisturbed) for run in runs),
                **_sizes("stage_error", [stage.error for run in runs for stage in run.undisturbed]),
            }
            for (kind, backends, shape), runs in sorted(
                groups.items(), key=lambda group: [part.removeprefix("all") for part in group[0]]
            )
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"summary": self.summary(), "runs": [{**asdict(run), "error": run.error} for run in self.runs]}

    def _repr_html_(self) -> str:
        return tables.html(self.summary(), "predicted against measured") + tables.html(self.rows(), "runs")


def runs_of_report(report: RunReport, date: str) -> list[Run]:
    """The plans of a report that had a prediction and right numbers. A plan with two names counts once."""
    distinct: dict[int, tuple[str, Outcome]] = {}
    for way, outcome in report.outcomes.items():
        distinct.setdefault(id(outcome), (way, outcome))
    made = (run_of("run", report.model, way, outcome.plan, outcome, date) for way, outcome in distinct.values())
    return [run for run in made if run is not None]


def run_of(kind: str, model: str, way: str, plan: Plan, outcome: Outcome, date: str) -> Run | None:
    """The run of a plan; None if it had no prediction, or its numbers were wrong.

    Args:
        kind: ``searched`` or ``run``.
        plan: the plan with its prediction from before the run.
    """
    predicted = plan.prediction.throughput_per_s
    if not 0 < predicted < float("inf") or outcome.fault:
        return None
    stages = _stages(plan, outcome.stats)
    return Run(
        kind, model, way, plan.hash, plan.precision, predicted, outcome.throughput_per_s, outcome.spread, tuple(stages), date
    )


def _stages(plan: Plan, stats: RunStats) -> Iterable[StageRun]:
    named = {stage.name: stage for stage in plan.stages}
    for worker in stats.stages:
        stage = named[worker.stage]
        measured_s = worker.busy.mean_s + worker.transfer.mean_s
        yield StageRun(stage.name, worker.device, stage.backend, stage.threads, len(stage.ops), float(stage.load_s), measured_s)


def _sizes(name: str, errors: Sequence[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors] or [float("nan")]
    return {f"median_{name}": median(sizes), f"worst_{name}": max(sizes)}
