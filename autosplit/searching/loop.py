"""search(): plan, measure the plan's stages as they run, correct the profile, plan again; then let Optuna vary the settings.

The best usual way to run a model on each backend comes first. The planner's first answer is next, if it is predicted to be ahead
of them by more than predictions erred here; then the other usual ways. The loop ends when the planner comes back to a plan that
was measured, or has none that is worth a run, or when its part of the budget is spent.
Optuna (Akiba et al., 2019) then varies the number of stages, replication, the queue depth, threads, backend and microbatch. It
begins with the planner's answer; a trial whose prediction is far behind the best measured plan is pruned without running.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from autosplit.deploying.bench import bench_of
from autosplit.deploying.footprints import Footprints
from autosplit.deploying.setup import BUDGET, SETUP, SMALL_S, Budget, Setup
from autosplit.errors import AutosplitError, BackendError, DeviceError, UsageError, WorkerError
from autosplit.memory.stages import with_footprints
from autosplit.planning.question import Question
from autosplit.progress import Progress, quiet
from autosplit.searching import candidates
from autosplit.searching.candidates import SearchResult, Subject, asking, explained
from autosplit.searching.hunt import PLANNING_SHARE, Hunt
from autosplit.searching.precisions import other_precisions, with_precisions
from autosplit.searching.tuning import open_study
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import kind_of

LEAST_PLANNING_S = 1.0
"""Least seconds of the first and the last question to the planner. A second is enough: for ResNet-50, BERT, ViT, GPT-2 and
others, 10 s gave the same plans, and only bounds grew."""


def search(
    question: Question,
    traced: Traced,
    *,
    budget: Budget = BUDGET,
    setup: Setup = SETUP,
    subject_for: Callable[[int], Subject] | None = None,
    footprints: Footprints | None = None,
    progress: Progress = quiet,
    keep: Callable[[SearchResult], None] = lambda found: None,
) -> SearchResult:
    """The plan that measures best within the budget.

    Args:
        question, traced: the model for whole requests.
        budget: ``search_s`` for candidates, of which an explanation without a limit of its own gets a tenth. 0 returns the
            planner's answer from the profile alone; so does ``SMALL_S`` where its stages ran before.
        setup: ``journal``, a file of Optuna's trials, with which a stopped search goes on; ``workspace``, ``hosts`` and
            ``max_error``, as for ``Bench``; ``bench``, where the first and the last candidate stay.
        subject_for: gives the traced model and its profile for a microbatch, or raises an AutosplitError if requests cannot be
            cut into such microbatches; None keeps whole requests.
        footprints: measures the memory of stages if a device has a cap; None counts the bytes of values and weights.
        progress: called with the share of the budget that is spent, for the step ``search``.
        keep: called with the result so far, if a candidate was measured before the search is stopped by Ctrl-C or a failure.
    A backend that fails to load or run a stage is left out on devices of that kind. A device without another backend is left
    out, when it was measured too, and so is one that cannot be opened any more. Notes say why.

    Raises: InfeasibleError: no plan meets the constraints. ProfileError: a measurement is missing. UsageError: the journal is
        damaged, and nothing was run.
    """
    for name, why in question.profile.left_out(question.machine).items():
        question = _without_device(question, name, BackendError(why))
    question = with_precisions(question, traced, setup)
    while True:
        try:
            return _search(question, traced, budget, setup, subject_for, footprints, progress, keep)
        except (BackendError, WorkerError) as failure:
            question = _without_failed(question, failure)


def _without_failed(question: Question, failure: BackendError | WorkerError) -> Question:
    """The question without what failed: a device that cannot be opened, else a backend on all devices of a kind, else a device
    where no other backend was measured. Raises: the failure: nothing is left.
    """
    profile, lost, kind = question.profile, getattr(failure, "device", ""), kind_of(failure.where)
    failed = [one for one in profile.measured if one.runtime == failure.backend and kind in ("", kind_of(one.device))]
    left = [one for one in profile.measured if one not in failed and one.backend in question.backends]
    alone = {one.device for one in failed} - {one.device for one in left}
    if lost or (alone and failure.where):
        return _without_device(question, lost or failure.where, failure)
    if alone or not failed:
        raise failure
    ways = tuple(name for name in question.backends if any(one.backend == name for one in left))
    elsewhere = any(one.runtime == failure.backend for one in left)
    what = f"{failure.backend} on {kind} devices" if elsewhere else failure.backend
    return replace(question, backends=ways, profile=profile.without(failed, f"{what} is left out: {failure}"))


def _without_device(question: Question, lost: str, failure: AutosplitError) -> Question:
    """The question for the devices that are left. Raises: the failure: none are, or the demands name the device."""
    try:
        machine = question.machine.without(lost)
        question.constraints.verify(question.graph, machine)
    except (DeviceError, UsageError):
        raise failure from None
    told = str(failure) if str(failure) in question.profile.notes else f"{lost} is left out: {failure}"
    profile = question.profile.without([setting for setting in question.profile.measured if setting.device == lost])
    notes = tuple(dict.fromkeys((*profile.notes, told)))
    return replace(question, machine=machine, profile=replace(profile, notes=notes))


def _search(
    question: Question,
    traced: Traced,
    budget: Budget,
    setup: Setup,
    subject_for: Callable[[int], Subject] | None,
    footprints: Footprints | None,
    progress: Progress,
    keep: Callable[[SearchResult], None],
) -> SearchResult:
    """``search`` with the backends of the question; it ends at the first plan that cannot be loaded."""
    profile, budget_s = question.profile.on(question.machine), budget.search_s
    question = asking(question, (traced, profile), {}, footprints)
    progress("search", 0.0, "planning")
    hurried = budget_s > 0 or budget.planner_s is None
    limited = question.within(max(LEAST_PLANNING_S, PLANNING_SHARE * budget_s)) if hurried else question
    begun_s = time.monotonic()
    first = candidates.first_answer(question, limited)
    explain_s = budget.explain_s
    if explain_s is None:
        explain_s = min(candidates.EXPLAIN_S, budget_s / 10 if budget_s > 0 else candidates.EXPLAIN_S)
        explain_s *= question.constraints.objective == "throughput"
    if budget_s <= 0 or (budget_s <= SMALL_S and candidates.ran_before(first, question.profile)):
        plan = explained(question, first, explain_s)
        progress("search", 1.0, "done")
        return _counted(footprints, SearchResult(plan, traced, profile))
    study = open_study(question, setup.journal, subject_for is not None)
    benches = ExitStack()
    bench = benches.enter_context(bench_of(question.machine, setup, budget))
    hunt = Hunt(question, traced, bench, budget_s, progress, begun_s, subject_for, footprints)
    try:
        with benches:
            usual = candidates.usual_plans(question)
            hunt.correct(*candidates.run_order(question, first, usual))
            progress("search", min(1.0, hunt.spent()), "trying plans of other shapes")
            hunt.tune(study)
            progress("search", 1.0, "ending the candidates")
        found = hunt.result()
        progress("search", 1.0, "looking for the bound of the best candidate")
        about = asking(limited, (found.traced, found.profile), {"microbatch": found.plan.microbatch}, footprints)
        proved = candidates.with_bound(about, found.plan)
        progress("search", 1.0, "finding out why it is not faster")
        plan = explained(about, proved, explain_s)
    except BaseException:
        if hunt.ran:
            keep(hunt.result())
        raise
    told = other_precisions(found.traced, plan, question.machine, found.profile, setup)
    notes = tuple(dict.fromkeys((*found.profile.notes, *hunt.question.profile.notes, *told)))
    found = replace(found, plan=plan, profile=replace(found.profile, notes=notes))
    progress("search", 1.0, "done")
    return _counted(footprints, found)


def _counted(footprints: Footprints | None, found: SearchResult) -> SearchResult:
    """The result with the memory of the plan's stages, and with the footprints of all stages that ran in its profile."""
    if footprints is None:
        return found
    account = footprints.account(found.traced, found.profile)
    return replace(found, plan=account.counted(found.plan), profile=with_footprints(found.profile, account.known))
