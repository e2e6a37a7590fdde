"""search(): plan, measure the plan's stages as they run, correct the profile, plan again; then let Optuna vary the settings.

The first loop ends when the planner comes back to a plan that was measured, or when its part of the budget is spent.
Optuna (Akiba et al., 2019) then varies the number of stages, replication, the queue depth, threads, backend and microbatch. It
begins with the planner's answer; a trial whose prediction is far behind the best measured plan is pruned without running.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autosplit import tables
from autosplit.backends.workspace import Workspace
from autosplit.deploying.bench import FIRST_S, Bench, Contender
from autosplit.deploying.setup import SMALL_S, Hosts, round_s
from autosplit.errors import AutosplitError, BackendError, InfeasibleError, WorkerError
from autosplit.memory.stages import with_footprints
from autosplit.planning.predicting import bounded, moved_s, predict
from autosplit.progress import Progress, quiet
from autosplit.reports.outcomes import PLAN
from autosplit.searching.candidates import EXPLAIN_S, Job, Subject, Trial
from autosplit.searching.correcting import Seen, at_usual_speed, beside_s, corrected, spans_of, taken_s
from autosplit.searching.journal import open_study
from autosplit.searching.tuning import PRUNED, Study, asked_of, first_trials, space
from autosplit.tracing.capturing import Traced
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.samples import Samples

NUM_ROUNDS = 3
ROUND_S = 0.4
"""Number of rounds in which a candidate runs, and most seconds of a round. The first plan runs in the same rounds.

For throughput, a round is full of requests; for latency, requests run one at a time."""

CORRECTING_SHARE = 0.6
"""Share of the budget for planning with corrected profiles. Optuna gets the rest."""

ALONE_SHARE = 1 / 30
"""Most of the budget for the single requests that are sent to a candidate just after loading, as a share."""

PLANNING_SHARE, LEAST_PLANNING_S = 0.2, 1.0
"""Share of the budget for one question to the planner, and least seconds of the first and the last question. A second is enough:
for ResNet-50, BERT, ViT, GPT-2 and others, 10 s gave the same plans, and only bounds grew."""

HOPELESS = 0.8
"""A candidate that is predicted to reach less than this share of the best measured plan is not run."""

MAX_TRIALS = 24
FIRST = "first"


@dataclass(frozen=True)
class SearchResult:
    """The plan to use, the model and profile that it was made from, and every candidate."""

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

    def __repr__(self) -> str:
        return f"SearchResult({self.plan!r}, {len(self.trials)} candidates)"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_() + tables.html(self.rows(), "candidates")


def search(
    job: Job,
    subject: Subject,
    *,
    budget_s: float = 30.0,
    journal: str | Path | None = None,
    workspace: Workspace | None = None,
    hosts: Hosts | None = None,
    progress: Progress = quiet,
    keep: Callable[[SearchResult], None] = lambda found: None,
) -> SearchResult:
    """The plan that measures best within the budget.

    Args:
        job: the machine and the demands.
        subject: the model, traced for whole requests, and its profile.
        budget_s: seconds for planning and measuring candidates. An explanation gets at most a tenth of them, unless it has its
            own limit. 0 returns the planner's answer from the profile alone. So does ``SMALL_S`` where its stages ran before.
        journal: a file of Optuna's trials, so that a search that was stopped continues. Another question begins anew in it.
        workspace, hosts: as for ``Bench``.
        progress: called with the share of the budget that is spent, for the step ``search``.
        keep: called with the result so far, if a candidate was measured before the search is stopped by Ctrl-C or a failure.
    Raises: InfeasibleError: no plan meets the constraints. ProfileError: a measurement is missing. UsageError: the journal is
        damaged, and nothing was run.
    """
    while True:
        try:
            return _search(job, subject, budget_s, journal, workspace, hosts, progress, keep)
        except (BackendError, WorkerError) as failure:
            others = tuple(name for name in job.backends if name != failure.backend)
            if not others or others == job.backends:
                raise
            known = subject[1].without([failure.backend], f"{failure.backend} is left out: {failure}")
            job, subject = replace(job, backends=others), (subject[0], known)


def _search(
    job: Job,
    subject: Subject,
    budget_s: float,
    journal: str | Path | None,
    workspace: Workspace | None,
    hosts: Hosts | None,
    progress: Progress,
    keep: Callable[[SearchResult], None],
) -> SearchResult:
    """``search`` with the backends of the job; it ends at the first plan that cannot be loaded."""
    subject = (subject[0], subject[1].on(job.machine))
    progress("search", 0.0, "planning")
    quick_s = max(LEAST_PLANNING_S, PLANNING_SHARE * budget_s) if budget_s > 0 or job.hurried else job.time_limit_s
    limited = replace(job, time_limit_s=min(job.time_limit_s, quick_s))
    begun_s = time.monotonic()
    first = _first(job, limited, subject)
    if budget_s > 0 and job.explain_s is None and job.constraints.objective == "throughput":
        job = replace(job, explain_s=min(EXPLAIN_S, budget_s / 10))
    if budget_s <= 0 or (budget_s <= SMALL_S and _ran(first, subject[1])):
        plan = job.explained(first, subject)
        progress("search", 1.0, "done")
        return _counted(job, SearchResult(plan, *subject))
    study = open_study(job, subject[0].graph, journal)
    bench = Bench(job.machine, workspace, hosts, min(FIRST_S, ALONE_SHARE * budget_s))
    hunt = _Hunt(job, subject, bench, budget_s, progress, begun_s)
    try:
        with bench:
            hunt.correct(first)
            progress("search", min(1.0, hunt.spent()), "trying plans of other shapes")
            hunt.tune(study)
            progress("search", 1.0, "ending the candidates")
        found = hunt.result()
        progress("search", 1.0, "looking for the bound of the best candidate")
        proved = _proved(limited, (found.traced, found.profile), found.plan)
        progress("search", 1.0, "finding out why it is not faster")
        plan = job.explained(proved, (found.traced, found.profile))
    except BaseException:
        if hunt.ran:
            keep(hunt.result())
        raise
    progress("search", 1.0, "done")
    return _counted(job, replace(found, plan=plan))


def _counted(job: Job, found: SearchResult) -> SearchResult:
    """The result with the memory of the plan's stages, and with the footprints of all stages that ran in its profile."""
    if job.footprints is None:
        return found
    account = job.footprints.account(found.traced, found.profile)
    return replace(found, plan=account.counted(found.plan), profile=with_footprints(found.profile, account.known))


def _first(job: Job, limited: Job, subject: Subject) -> Plan:
    """The planner's answer within its share of the budget, or within its whole time limit if it finds none in that share."""
    try:
        return limited.plan(subject, {})
    except InfeasibleError as failure:
        if failure.conflict:
            raise
        return job.plan(subject, {})


def _ran(plan: Plan, profile: Profile) -> bool:
    """Whether every stage of the plan ran in a search whose measurements the profile holds."""
    known = {(stage.setting, stage.ops) for stage in profile.stages}
    return all((setting, frozenset(stage.ops)) in known for stage, setting in plan.workers)


def _proved(job: Job, subject: Subject, best: Plan) -> Plan:
    """The plan that measured best, with the bound for all plans that the user's demands allow.

    Demands that only its trial had are left out, because a bound for them does not hold for other plans. If the plan beats the
    bound with the threads of its trial, the bound covers plans with as many threads, too.
    """
    traced, profile = subject
    asked = {"microbatch": best.microbatch, "queue_depth": best.queue_depth}  # no bound depends on the depth
    try:
        proved = job.plan(subject, asked)
    except InfeasibleError as failure:
        if failure.conflict:
            raise
        bound_s = job.least_s(subject, asked)  # no plan was found in time
    else:
        bound_s = proved.prediction.bound_s
        if proved.hash == best.hash:
            return proved
    threads = max(stage.threads for stage in best.stages)
    found = predict(best, traced.graph, job.machine, profile, bound_s)
    if found.prediction.bound_s > 0:
        return found
    return bounded(found, min(bound_s, job.least_s(subject, {**asked, "threads": threads})))


class _Hunt:
    """One search under way: the clock, the corrected profiles, the candidates so far."""

    def __init__(
        self,
        job: Job,
        subject: Subject,
        bench: Bench,
        budget_s: float,
        progress: Progress,
        begun_s: float | None = None,
    ) -> None:
        self.job = job
        self.bench = bench
        self._known = {job.source.batch: subject}
        """The model for each microbatch, and its profile before anything ran."""
        self._profiles = {job.source.batch: subject[1]}
        """The profiles with all corrections since."""
        self._seen: list[Seen] = []
        self.trials: list[Trial] = []
        self._uncut: set[int] = set()
        """Microbatches that the model cannot be traced or measured for."""
        self._progress = progress
        self._budget_s = budget_s
        self._round_s = round_s(budget_s, ROUND_S)
        self._start = time.monotonic() if begun_s is None else begun_s

    def subject(self, microbatch: int) -> Subject:
        """The model for a microbatch, and its corrected profile."""
        return self._known[microbatch][0], self._profiles[microbatch]

    @property
    def ran(self) -> list[Trial]:
        """The candidates that were measured."""
        return [trial for trial in self.trials if trial.times_first is not None]

    def best(self) -> Trial:
        """The candidate that measured best."""
        return max(self.ran, key=lambda trial: trial.times_first or 0.0)

    def result(self) -> SearchResult:
        """The candidate that measured best, with the newest seconds of its stages, and all candidates."""
        best = self.best().plan
        traced, profile = self.subject(best.microbatch)
        profile = profile.with_newest((stage.ops, setting) for stage, setting in best.workers)
        return SearchResult(best, traced, profile, tuple(self.trials))

    def correct(self, first: Plan) -> None:
        """Plan, measure, correct, until the planner has no new answer."""
        plan = first
        while not self._measured(plan):
            self._measure(plan, {})
            if self.spent() > CORRECTING_SHARE:
                return
            try:
                plan = self._plan(plan.microbatch, {})
            except InfeasibleError:  # no plan was found in time
                return

    def tune(self, study: Study) -> None:
        """Let Optuna ask the planner for plans of other shapes, and run those that look good."""
        for parameters in first_trials(self.job, self.best().plan):
            study.enqueue_trial(parameters, skip_if_exists=True)
        for _ in range(MAX_TRIALS):
            if self.spent() >= 1:
                return
            trial = study.ask(space(self.job))
            value = self._try(asked_of(trial.params))
            if value is None:
                study.tell(trial, state=PRUNED)
            else:
                study.tell(trial, value)

    def _plan(self, microbatch: int, asked: Mapping[str, Any]) -> Plan:
        """The planner's answer within a share of the time that is left."""
        limit_s = min(self.job.time_limit_s, PLANNING_SHARE * self._budget_s * max(0.0, 1 - self.spent()))
        return replace(self.job, time_limit_s=limit_s).plan(self.subject(microbatch), asked)

    def _tell(self, text: str) -> None:
        """Report the share of the budget that is spent, and what is being done."""
        self._progress("search", min(1.0, self.spent()), text)

    def spent(self) -> float:
        """The share of the budget that is spent."""
        return (time.monotonic() - self._start) / self._budget_s

    def _measured(self, plan: Plan) -> Trial | None:
        return next((trial for trial in self.trials if trial.plan.hash == plan.hash), None)

    def _try(self, asked: dict[str, Any]) -> float | None:
        """How many times as good as the first plan the asked plan is; None if it is not worth a run."""
        microbatch = asked.get("microbatch", self.job.source.batch)
        if microbatch in self._uncut:
            return None
        if microbatch not in self._known and self.job.subject_for is not None:
            self._tell(f"tracing and profiling microbatches of {microbatch}")
            try:
                self._known[microbatch] = self.job.subject_for(microbatch)
                self._profiles[microbatch] = self._known[microbatch][1]
            except AutosplitError as failure:
                self._uncut.add(microbatch)
                self._tell(f"no microbatches of {microbatch}: {' '.join(str(failure).split())}")
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

        Raises: AutosplitError, OSError: the first plan, beside which all others run, cannot be loaded or has given up.
        """
        traced, known = self._known[plan.microbatch]
        name = FIRST if FIRST not in self.bench.loaded else PLAN
        self._tell(f"measuring {plan.summary()}")
        try:
            entry = self.bench.load(name, plan, traced)
            first = self.bench.loaded[FIRST]
            before, alone, begun_ns = len(first.rounds_per_s), len(first.rounds_alone_s), time.monotonic_ns()
            names, num_items = list(dict.fromkeys([FIRST, name])), self._num_items(plan)
            self._run_rounds(names, num_items)
            meanwhile = _taken(first, begun_ns)
            taken = meanwhile if entry is first else _taken(entry)
            if self.job.constraints.objective == "latency":
                self.bench.run_round(names, 0, num_items)  # this figure is only for the table
        except (AutosplitError, OSError) as failure:
            if name == FIRST or self.bench.loaded[FIRST].pipeline.failure is not None:
                raise
            if name in self.bench.loaded:
                self.bench.unload(name)
            self.trials.append(Trial(asked, plan, note=str(failure)))
            return self.trials[-1]
        if self.job.footprints is not None:
            self.job.footprints.note(traced, plan, entry.pipeline.stats().stages)
        expected = predict(plan, traced.graph, self.job.machine, known)
        expected_s = [stage.load_s for stage, _ in expected.workers]
        self._seen.append(Seen(plan, taken, beside_s(first.plan, meanwhile), expected_s))
        self._correct()
        outcome, own = entry.outcome(), first.outcome()
        beside = replace(own, rounds_per_s=own.rounds_per_s[before:], alone_s=own.alone_s[alone:])
        times = outcome.against(beside, self.job.constraints.objective).median if outcome.outputs_equal else 0.0
        trial = Trial(asked, plan, outcome.throughput_per_s, times, outcome.fault, outcome)
        self.trials.append(trial)
        if name != FIRST:
            self.bench.unload(name)
        return trial

    def _correct(self) -> None:
        """Correct the profiles by all measurements so far; each new one changes the estimate of the machine's usual speed."""
        self._profiles = {microbatch: profile for microbatch, (_, profile) in self._known.items()}
        for seen in at_usual_speed(self._seen):
            plan = seen.plan
            traced, profile = self.subject(plan.microbatch)
            moves_s = moved_s(plan, traced.graph, self.job.machine, profile)
            self._profiles[plan.microbatch] = corrected(profile, plan, seen.taken, moves_s)

    def _run_rounds(self, names: Sequence[str], num_items: int) -> None:
        """Run a candidate in as many rounds as there is time for, each together with a round of the first plan.

        The objective decides the kind of the rounds, which correct the profile too: a stage whose core idles between two
        requests takes longer than one that is always busy.
        """
        for number in range(NUM_ROUNDS):
            if number > 1 and self.spent() > 1:
                break
            if self.job.constraints.objective == "latency":
                self.bench.run_alone(names, number, self._round_s)
            else:
                self.bench.run_round(names, number, num_items)

    def _num_items(self, plan: Plan) -> int:
        """Items of a full round of a candidate."""
        per_s = plan.prediction.throughput_per_s
        return int(min(1e6, self._round_s * per_s)) if per_s < float("inf") else 1000


def _taken(entry: Contender, since_ns: int = 0) -> tuple[Samples, ...]:
    """Seconds of each worker's device that a request took, for requests that began after ``since_ns``."""
    told = [spans_of(events) for events in entry.pipeline.events()]
    return taken_s(entry.plan, [[span for span in spans if span[0] >= since_ns] for spans in told])
