"""Hunt: the candidates of a search, one after the other, and the corrections of the profile after each."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autosplit.deploying.bench import Bench
from autosplit.deploying.footprints import Footprints
from autosplit.deploying.setup import round_s
from autosplit.errors import AutosplitError, InfeasibleError
from autosplit.planning.baselines import UNCERTAIN
from autosplit.planning.caps import plan_within_caps
from autosplit.planning.plans import plan_key
from autosplit.planning.predicting import moved_s, predict
from autosplit.planning.question import Question
from autosplit.progress import Progress
from autosplit.reports.judging import is_simpler
from autosplit.reports.outcomes import Ratio
from autosplit.searching.candidates import (
    PREDICTION_ERROR,
    SearchResult,
    Subject,
    Trial,
    asking,
    breaks_caps,
    is_hopeful,
    is_worth,
)
from autosplit.searching.correcting import Seen, at_usual_speed, beside_s, corrected, taken_of
from autosplit.searching.precisions import without_worst
from autosplit.searching.tuning import PRUNED, Study, asked_of, first_trials, space
from autosplit.tracing.capturing import Traced
from autosplit.values.plan import Plan

NUM_ROUNDS = 3
ROUND_S = 0.4
"""Number of rounds in which a candidate runs, and most seconds of a round. The first plan runs in the same rounds.

For throughput, a round is full of requests; for latency, requests run one at a time."""

CORRECTING_SHARE = 0.6
"""Share of the budget for planning with corrected profiles. Optuna gets the rest."""

PLANNING_SHARE = 0.2
"""Share of the time that is left for one question to the planner."""

MAX_TRIALS = 24
FIRST, BESIDE = "first", "candidate"
"""Names of the first candidate, and of the one beside it. It stays loaded until the next one, for a report may run both again."""


class Hunt:
    """One search under way: the clock, the corrected profiles, the candidates so far."""

    def __init__(
        self,
        question: Question,
        traced: Traced,
        bench: Bench,
        budget_s: float,
        progress: Progress,
        begun_s: float | None = None,
        subject_for: Callable[[int], Subject] | None = None,
        footprints: Footprints | None = None,
    ) -> None:
        self.question = question
        self.bench = bench
        self._subject_for, self._footprints = subject_for, footprints
        self._known: dict[int, Subject] = {question.source.batch: (traced, question.profile)}
        """The model for each microbatch, and its profile before anything ran."""
        self._profiles = {question.source.batch: question.profile}
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
        """The candidate that measured best; of those that the rounds do not tell apart from it, the best one that is simpler.

        One that was measured to break a cap counts only where all do.
        """
        over = [breaks_caps(self._asking(self.question, one.plan.microbatch, {}), one.plan) for one in self.ran]
        ran = [trial for trial, is_over in zip(self.ran, over, strict=True) if not is_over] or self.ran
        top = max(ran, key=lambda trial: trial.times_first or 0.0)
        simpler = [trial for trial in ran if is_simpler(trial.plan, top.plan) and trial.level_with(top)]
        return max(simpler, key=lambda trial: trial.times_first or 0.0, default=top)

    def result(self) -> SearchResult:
        """The candidate that measured best, with the newest seconds of its stages, and all candidates."""
        best = self.best().plan
        traced, profile = self.subject(best.microbatch)
        newest = profile.with_newest((stage.ops, setting) for stage, setting in best.workers)
        return SearchResult(best, traced, newest, tuple(self.trials))

    def correct(self, first: Plan, *others: Plan) -> None:
        """Measure the plans that are known, then plan, measure and correct until the planner has no new answer worth a run.

        Another plan runs if there is time, if its prediction is better than the first one's, or if it is the first one on its
        backend and the budget is not spent.
        """
        self._run_planned(first)
        key = plan_key(self.question.constraints)
        for other in others:
            is_new = {s.way for s in other.stages}.isdisjoint(s.way for trial in self.trials for s in trial.plan.stages)
            is_due = self.spent() < (1 if is_new else CORRECTING_SHARE) or key(other) < key(first)
            if is_due and is_hopeful(self.question, other, self.best()) and self._is_worth_a_run(other):
                self._run_planned(other)
        while self.spent() < CORRECTING_SHARE:
            try:
                plan = self._plan(first.microbatch, {})
            except InfeasibleError:  # no plan was found in time
                return
            if self._measured(plan) or not self._is_worth_a_run(plan):
                return
            self._run_planned(plan)

    def _run_planned(self, plan: Plan) -> None:
        """Measure a plan. If its outputs are wrong, no later question is for the least exact precision of its stages."""
        outcome = self._measure(plan, {}).outcome
        if outcome is not None and outcome.fault:
            self.question = without_worst(self.question, plan, outcome.fault)

    def _is_worth_a_run(self, plan: Plan) -> bool:
        """``is_worth`` beside the best candidate, as it measured, with the error of the predictions of all candidates so far."""
        best = self.best().plan
        traced, profile = self.subject(best.microbatch)
        return is_worth(self.question, plan, predict(best, traced.graph, self.question.machine, profile), self._error())

    def _error(self) -> float:
        """The largest error of the predicted ratio of two candidates so far, as a share; at least ``PREDICTION_ERROR``."""
        key = plan_key(self.question.constraints)
        times_predicted = [trial.times_first * key(trial.plan) for trial in self.ran if trial.times_first]
        return max(PREDICTION_ERROR, max(times_predicted, default=1.0) / min(times_predicted, default=1.0) - 1)

    def tune(self, study: Study) -> None:
        """Let Optuna ask the planner for plans of other shapes, and run those that look good."""
        for parameters in first_trials(self.question, self.best().plan):
            study.enqueue_trial(parameters, skip_if_exists=True)
        for _ in range(MAX_TRIALS):
            if self.spent() >= 1:
                return
            trial = study.ask(space(self.question, self._subject_for is not None))
            value = self._try(asked_of(trial.params))
            if value is None:
                study.tell(trial, state=PRUNED)
            else:
                study.tell(trial, value)

    def _plan(self, microbatch: int, asked: Mapping[str, Any]) -> Plan:
        """The planner's answer within a share of the time that is left."""
        limited = self.question.within(PLANNING_SHARE * self._budget_s * max(0.0, 1 - self.spent()))
        return plan_within_caps(self._asking(limited, microbatch, asked))

    def _asking(self, question: Question, microbatch: int, asked: Mapping[str, Any]) -> Question:
        """The question of a trial about the model for a microbatch."""
        return asking(question, self.subject(microbatch), asked, self._footprints)

    def _tell(self, text: str) -> None:
        """Report the share of the budget that is spent, and the present step."""
        self._progress("search", min(1.0, self.spent()), text)

    def spent(self) -> float:
        """The share of the budget that is spent."""
        return (time.monotonic() - self._start) / self._budget_s

    def _measured(self, plan: Plan) -> Trial | None:
        return next((trial for trial in self.trials if trial.plan.hash == plan.hash), None)

    def _try(self, asked: dict[str, Any]) -> float | None:
        """How many times as good as the first plan the asked plan is; None if it is not worth a run."""
        microbatch = asked.get("microbatch", self.question.source.batch)
        if microbatch in self._uncut:
            return None
        if microbatch not in self._known and self._subject_for is not None:
            self._tell(f"tracing and profiling microbatches of {microbatch}")
            try:
                self._known[microbatch] = self._subject_for(microbatch)
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
        if not is_hopeful(self.question, plan, self.best()):
            self.trials.append(Trial(asked, plan, note=f"predicted below {1 / UNCERTAIN:.0%} of the best measured"))
            return None
        return self._measure(plan, asked).times_first

    def _measure(self, plan: Plan, asked: dict[str, Any]) -> Trial:
        """Run a candidate beside the first one, put its stages into the profile, and note the trial.

        Raises: AutosplitError, OSError: the first plan, beside which all others run, cannot be loaded or has given up.
        """
        (traced, known), name = self._known[plan.microbatch], FIRST if FIRST not in self.bench.loaded else BESIDE
        self._tell(f"measuring {plan.summary()}")
        try:
            if name in self.bench.loaded:
                self.bench.unload(name)
            entry = self.bench.load(name, plan, traced)
            first = self.bench.loaded[FIRST]
            before, alone, begun_ns = len(first.rounds_per_s), len(first.rounds_alone_s), time.monotonic_ns()
            names, num_items = list(dict.fromkeys([FIRST, name])), self._num_items(plan)
            self._run_rounds(names, num_items)
            meanwhile = taken_of(first, begun_ns)
            taken = meanwhile if entry is first else taken_of(entry)
            if self.question.constraints.objective == "latency":
                self.bench.run_round(names, 0, num_items)  # this figure is only for the table
        except (AutosplitError, OSError) as failure:
            if name == FIRST or self.bench.loaded[FIRST].pipeline.failure is not None:
                raise
            if name in self.bench.loaded:
                self.bench.unload(name)
            self.trials.append(Trial(asked, plan, note=str(failure)))
            return self.trials[-1]
        outcome = entry.outcome()
        own = outcome if entry is first else first.outcome()
        if self._footprints is not None:
            self._footprints.note(traced, plan, outcome.stats.stages)
        expected = predict(plan, traced.graph, self.question.machine, known)
        expected_s = [stage.load_s for stage, _ in expected.workers]
        self._seen.append(Seen(plan, taken, beside_s(first.plan, meanwhile), expected_s))
        self._correct()
        beside = replace(own, rounds_per_s=own.rounds_per_s[before:], alone_s=own.alone_s[alone:])
        ratio = outcome.against(beside, self.question.constraints.objective) if outcome.outputs_equal else Ratio(0.0, 0.0, 0.0, 0)
        trial = Trial(asked, plan, outcome.throughput_per_s, ratio, outcome.fault, outcome)
        self.trials.append(trial)
        return trial

    def _correct(self) -> None:
        """Correct the profiles by all measurements so far; each new one changes the estimate of the machine's usual speed."""
        self._profiles = {microbatch: profile for microbatch, (_, profile) in self._known.items()}
        for seen in at_usual_speed(self._seen):
            plan = seen.plan
            traced, profile = self.subject(plan.microbatch)
            moves_s = moved_s(plan, traced.graph, self.question.machine, profile)
            self._profiles[plan.microbatch] = corrected(profile, plan, seen.taken, moves_s)

    def _run_rounds(self, names: Sequence[str], num_items: int) -> None:
        """Run a candidate in as many rounds as there is time for, each together with a round of the first plan.

        The objective decides the kind of the rounds, which correct the profile too: a stage whose core idles between two
        requests takes longer than one that is always busy.
        """
        for number in range(NUM_ROUNDS):
            if number > 1 and self.spent() > 1:
                break
            if self.question.constraints.objective == "latency":
                self.bench.run_alone(names, number, self._round_s)
            else:
                self.bench.run_round(names, number, num_items)

    def _num_items(self, plan: Plan) -> int:
        """Items of a full round of a candidate."""
        per_s = plan.prediction.throughput_per_s
        return int(min(1e6, self._round_s * per_s)) if per_s < float("inf") else 1000
