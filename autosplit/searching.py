"""search(): plan, measure the plan's stages as they run, correct the profile, plan again; then try what only running can tell.

The first loop ends when the planner comes back to a plan that was measured, or when its part of the budget is spent.
Optuna (Akiba et al., 2019) then varies the number of stages, replication, the queue depth, threads, backend and microbatch. It
begins with the planner's answer; a trial whose prediction is far behind the best measured plan is pruned without running.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna

from autosplit import tables
from autosplit.comparing import Arena, Progress
from autosplit.constraints import Constraints
from autosplit.correcting import corrected, settings_of, spans_of
from autosplit.deploying import Workspace
from autosplit.errors import AutosplitError, InfeasibleError
from autosplit.explaining import explain
from autosplit.machine import Machine
from autosplit.plan import Plan, Source
from autosplit.planning import Log, moved_s, plan_model, predict
from autosplit.profile import Profile
from autosplit.runreport import PLAN, Outcome
from autosplit.tracing import Traced

NUM_ROUNDS = 3
ROUND_S = 0.4
"""A candidate runs so many rounds of about so many seconds, each beside one of the first plan's."""

CORRECTING_SHARE, PLANNING_SHARE = 0.6, 0.2
"""Of the budget; the rest is for Optuna."""

HOPELESS = 0.8
"""A candidate that is predicted to reach less than this share of the best measured plan is not run."""

EXPLAIN_S = 1.0
"""Most seconds for explaining a plan for throughput: some hundred ops take a third of it. One for latency takes many."""

MAX_TRIALS = 24
QUEUE_DEPTHS = (1, 2, 4, 8)
FIRST = "first"

Subject = tuple[Traced, Profile]
"""The model for one microbatch, and its profile."""


@dataclass(frozen=True)
class Job:
    """What a search is about.

    ``subject_for`` gives the traced model and its profile for a microbatch, or raises an AutosplitError where requests are not
    cut so; without it the microbatch is the whole request.
    ``explain_s`` are the seconds for saying why the plan is no faster, 0 to say nothing; by default it is said of plans for
    throughput only, where it takes less than a second.
    """

    machine: Machine
    source: Source
    constraints: Constraints
    backends: tuple[str, ...]
    queue_depth: int = 4
    time_limit_s: float = 10.0
    seed: int = 0
    log: Log | None = None
    subject_for: Callable[[int], Subject] | None = None
    explain_s: float | None = None

    def plan(self, subject: Subject, asked: Mapping[str, Any]) -> Plan:
        """The planner's best answer; ``asked`` stands in for constraints, backends, queue depth and microbatch."""
        changes = {key: asked[key] for key in ("num_stages", "max_replicas") if key in asked}
        traced, profile = subject
        return plan_model(
            traced.graph,
            self.machine,
            profile,
            self.source,
            replace(self.constraints, **changes),
            [asked["backend"]] if "backend" in asked else self.backends,
            queue_depth=asked.get("queue_depth", self.queue_depth),
            microbatch=asked.get("microbatch"),
            max_threads=asked.get("threads"),
            time_limit_s=self.time_limit_s,
            seed=self.seed,
            log=self.log,
        )[0]

    def explained(self, plan: Plan, subject: Subject) -> Plan:
        """The plan with the reasons why it is no faster."""
        limit_s = self.explain_s
        if limit_s is None:
            limit_s = EXPLAIN_S if self.constraints.objective == "throughput" else 0.0
        if limit_s <= 0:
            return plan
        traced, profile = subject
        return replace(plan, why=explain(traced.graph, plan, self.machine, profile, self.constraints, time_limit_s=limit_s))


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate: what was asked of the planner, its plan, and what was measured beside the first plan.

    ``times_first`` is how many times as good as the first plan it was; None if it did not run, and ``note`` says why.
    ``plan`` has the prediction from before the run, ``outcome`` all that was measured.
    """

    asked: Mapping[str, Any]
    plan: Plan
    measured_per_s: float | None = None
    times_first: float | None = None
    note: str = ""
    outcome: Outcome | None = None

    def row(self) -> dict[str, Any]:
        """One row of the table of trials."""
        return {
            "asked": ", ".join(f"{key}={value}" for key, value in self.asked.items()) or "the planner's choice",
            "stages": " | ".join(f"{len(s.ops)} on {'+'.join(s.devices)} ({s.backend})" for s in self.plan.stages),
            "predicted_per_s": self.plan.prediction.throughput_per_s,
            "measured_per_s": float("nan") if self.measured_per_s is None else self.measured_per_s,
            "times_first": float("nan") if self.times_first is None else self.times_first,
            "note": self.note,
        }


@dataclass(frozen=True)
class SearchResult:
    """The plan to use, the model and profile that it was made from, and every candidate that was looked at."""

    plan: Plan
    traced: Traced
    profile: Profile
    trials: tuple[Trial, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """One row a candidate."""
        return [trial.row() for trial in self.trials]

    def frame(self) -> Any:
        """The rows as a pandas DataFrame."""
        return tables.frame(self.rows())

    def _repr_html_(self) -> str:
        return self.plan._repr_html_() + tables.html(self.rows(), "candidates")


def search(
    job: Job,
    subject: Subject,
    *,
    budget_s: float = 30.0,
    storage: Path | None = None,
    workspace: Workspace | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """The plan that measures best within the budget.

    Args:
        job: the machine and the demands.
        subject: the model, traced for whole requests, and its profile.
        budget_s: seconds for measuring candidates; 0 returns the planner's answer from the profile alone.
        storage: a journal of Optuna's trials, so that a search that was stopped goes on where it was.
        workspace: as for ``Arena``.
        progress: called with the share of the budget spent and what is being done.
    Raises: InfeasibleError: no plan meets the constraints. ProfileError: a measurement is missing.
    """
    first = job.plan(subject, {})
    if budget_s <= 0:
        return SearchResult(job.explained(first, subject), *subject)
    with Arena(job.machine, workspace) as arena:
        hunt = _Hunt(job, subject, arena, budget_s, progress or (lambda share, text: None))
        hunt.correct(first)
        hunt.tune(storage)
    best = hunt.best()
    traced, profile = hunt.subjects[best.plan.microbatch]
    profile = profile.with_newest((stage.ops, setting) for stage, setting in settings_of(best.plan))
    plan = _proved(job, (traced, profile), best.plan)
    return SearchResult(job.explained(plan, (traced, profile)), traced, profile, tuple(hunt.trials))


def _proved(job: Job, subject: Subject, best: Plan) -> Plan:
    """The plan that measured best, with what is proved of all plans that the user's demands allow.

    What only its trial asked for is left out: a bound for that says nothing of the other plans.
    """
    traced, profile = subject
    try:
        proved = job.plan(subject, {"microbatch": best.microbatch, "queue_depth": best.queue_depth})  # no bound depends on these
    except InfeasibleError as failure:
        if failure.conflict:
            raise
        return predict(best, traced.graph, job.machine, profile)  # none was found in so short a time
    if proved.hash == best.hash:
        return proved
    return predict(best, traced.graph, job.machine, profile, proved.prediction.bound_s)


class _Hunt:
    """One search under way: the clock, the corrected profiles, the candidates so far."""

    def __init__(self, job: Job, subject: Subject, arena: Arena, budget_s: float, tell: Progress) -> None:
        self.job = job
        self.arena = arena
        self.subjects = {job.source.batch: subject}
        self.trials: list[Trial] = []
        self._uncut: set[int] = set()
        """Microbatches that the model cannot be traced or measured for."""
        self._tell = tell
        self._budget_s = budget_s
        self._start = time.monotonic()

    def best(self) -> Trial:
        """The candidate that measured best."""
        return max((trial for trial in self.trials if trial.times_first is not None), key=lambda t: t.times_first or 0.0)

    def correct(self, first: Plan) -> None:
        """Plan, measure, correct, until the planner has no new answer."""
        plan = first
        while not self._measured(plan):
            self._measure(plan, {})
            if self._spent() > CORRECTING_SHARE:
                return
            try:
                plan = self._plan(plan.microbatch, {})
            except InfeasibleError:  # none was found in so short a time
                return

    def tune(self, storage: Path | None) -> None:
        """Let Optuna ask the planner for plans of other shapes, and run those that look good."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = None
        if storage is not None:
            storage.parent.mkdir(parents=True, exist_ok=True)
            journal = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(storage)))
        sampler = optuna.samplers.TPESampler(seed=self.job.seed, n_startup_trials=6)
        study = optuna.create_study(
            direction="maximize", sampler=sampler, storage=journal, study_name="autosplit", load_if_exists=True
        )
        for parameters in self._first_trials():
            study.enqueue_trial(parameters, skip_if_exists=True)
        for _ in range(MAX_TRIALS):
            if self._spent() >= 1:
                return
            trial = study.ask()
            value = self._try(self._ask(trial))
            if value is None:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            else:
                study.tell(trial, value)

    def _plan(self, microbatch: int, asked: Mapping[str, Any]) -> Plan:
        """What the planner answers in a part of the time that is left."""
        limit_s = min(self.job.time_limit_s, PLANNING_SHARE * self._budget_s * max(0.0, 1 - self._spent()))
        return replace(self.job, time_limit_s=limit_s).plan(self.subjects[microbatch], asked)

    def _spent(self) -> float:
        return (time.monotonic() - self._start) / self._budget_s

    def _measured(self, plan: Plan) -> Trial | None:
        return next((trial for trial in self.trials if trial.plan.hash == plan.hash), None)

    def _ask(self, trial: optuna.Trial) -> dict[str, Any]:
        job = self.job
        depths = sorted({*QUEUE_DEPTHS, job.queue_depth})
        asked: dict[str, Any] = {"queue_depth": trial.suggest_categorical("queue_depth", depths)}
        if job.constraints.num_stages is None:
            asked["num_stages"] = trial.suggest_int("num_stages", 1, self._most_stages())
        if job.constraints.max_replicas is None and not trial.suggest_categorical("replicate", [False, True]):
            asked["max_replicas"] = 1
        if len(job.backends) > 1:
            asked["backend"] = trial.suggest_categorical("backend", job.backends)
        counts = sorted({1, *(max(1, len(device.cores)) for device in job.machine.devices)})
        if len(counts) > 1:
            asked["threads"] = trial.suggest_categorical("threads", counts)
        if job.subject_for is not None and job.source.batch > 1:
            divisors = [size for size in range(1, job.source.batch + 1) if job.source.batch % size == 0]
            asked["microbatch"] = trial.suggest_categorical("microbatch", divisors)
        return asked

    def _most_stages(self) -> int:
        num_devices = len(self.job.machine.devices)
        return min(num_devices, self.job.constraints.max_stages or num_devices)

    def _first_trials(self) -> list[dict[str, Any]]:
        """The best candidate, then with its backend the two extremes: a stage on each device, and the model on each device.

        What one of them measured says little of the other: a cache may hold all stages of a pipeline, and not two whole models.
        """
        best = self._as_parameters(self.best())
        return [
            best,
            best | {"num_stages": self._most_stages(), "replicate": False},
            best | {"num_stages": 1, "replicate": True},
        ]

    def _as_parameters(self, trial: Trial) -> dict[str, Any]:
        """A candidate in Optuna's terms.

        Another backend may take what those asked for refuse; the first of these counts.
        """
        plan, backends = trial.plan, self.job.backends
        return {
            "queue_depth": plan.queue_depth,
            "num_stages": len(plan.stages),
            "replicate": any(len(stage.devices) > 1 for stage in plan.stages),
            "backend": next((stage.backend for stage in plan.stages if stage.backend in backends), backends[0]),
            "microbatch": plan.microbatch,
            "threads": max(stage.threads for stage in plan.stages),
        }

    def _try(self, asked: dict[str, Any]) -> float | None:
        """The value of what is asked for: measured, known, or None where it is not worth a run."""
        microbatch = asked.get("microbatch", self.job.source.batch)
        if microbatch in self._uncut:
            return None
        if microbatch not in self.subjects and self.job.subject_for is not None:
            self._tell(min(1.0, self._spent()), f"tracing and profiling microbatches of {microbatch}")
            try:
                self.subjects[microbatch] = self.job.subject_for(microbatch)
            except AutosplitError as failure:
                self._uncut.add(microbatch)
                self._tell(min(1.0, self._spent()), f"no microbatches of {microbatch}: {' '.join(str(failure).split())}")
                return None
        try:
            plan = self._plan(microbatch, asked)
        except AutosplitError:
            return None
        if known := self._measured(plan):
            return known.times_first
        best = self.best()
        if self.job.constraints.objective == "throughput":
            hopeful = plan.prediction.throughput_per_s > HOPELESS * (best.measured_per_s or 0.0)
        else:
            hopeful = HOPELESS * plan.prediction.latency_s < best.plan.prediction.latency_s
        if not hopeful:
            self.trials.append(Trial(asked, plan, note=f"predicted below {HOPELESS:.0%} of the best measured"))
            return None
        return self._measure(plan, asked).times_first

    def _measure(self, plan: Plan, asked: dict[str, Any]) -> Trial:
        """Run a candidate beside the first one, put its stages into the profile, and note the trial.

        Raises: AutosplitError: the first plan, beside which all others run, cannot be loaded or has given up.
        """
        traced, profile = self.subjects[plan.microbatch]
        name = FIRST if FIRST not in self.arena.loaded else PLAN
        self._tell(min(1.0, self._spent()), f"measuring {plan.summary()}")
        try:
            entry = self.arena.load(name, plan, traced)
            first = self.arena.loaded[FIRST]
            before = len(first.rounds_per_s)
            self._run_rounds(name, plan)
        except AutosplitError as failure:
            if name == FIRST or self.arena.loaded[FIRST].pipeline.failure is not None:
                raise
            if name in self.arena.loaded:
                self.arena.unload(name)
            self.trials.append(Trial(asked, plan, note=str(failure)))
            return self.trials[-1]
        spans = [list(spans_of(events).values()) for events in entry.pipeline.events()]
        moves_s = moved_s(plan, traced.graph, self.job.machine, profile)
        self.subjects[plan.microbatch] = traced, corrected(profile, plan, spans, moves_s)
        outcome = entry.outcome()
        beside = replace(first.outcome(), rounds_per_s=tuple(first.rounds_per_s[before:]))
        trial = Trial(asked, plan, outcome.throughput_per_s, self._times(outcome, beside), outcome.fault, outcome)
        self.trials.append(trial)
        if name != FIRST:
            self.arena.unload(name)
        return trial

    def _run_rounds(self, name: str, plan: Plan) -> None:
        """Run a candidate in as many rounds as there is time for, each beside one of the first plan's."""
        per_s = plan.prediction.throughput_per_s
        num_items = int(min(1e6, ROUND_S * per_s)) if per_s < float("inf") else 1000
        for number in range(NUM_ROUNDS):
            if number > 1 and self._spent() > 1:
                break
            self.arena.run_round(list(dict.fromkeys([FIRST, name])), number, num_items)

    def _times(self, outcome: Outcome, first: Outcome) -> float:
        return outcome.faster_than(first, self.job.constraints.objective) if outcome.outputs_equal else 0.0
