"""The final of a search: the candidates that short rounds leave level run beside each other, in longer rounds.

A short round of a model whose request takes 0.3 s holds one request of each replica, which tells little. Rounds in which all
finalists run cancel the drift of the machine. There is no final where the first candidates spend the budget, as those of a
BERT do with 20 s.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from autosplit.deploying.bench import Bench
from autosplit.errors import AutosplitError
from autosplit.reports.judging import leader, still_running
from autosplit.searching.candidates import Subject, Trial

FINAL_SHARE = 0.25
"""Share of the budget that is kept for the final."""

MOST_FINALISTS, NUM_ROUNDS, ROUND_S = 3, 3, 1.0
"""Most finalists; rounds after which a finalist leaves that was the fastest one in none; seconds of each in a round."""


def finalists(ran: Sequence[Trial], best: Trial) -> list[Trial]:
    """The candidates that rounds do not tell apart from the best one, and the first of all, beside which they ran.

    None if the best one is alone.
    """
    level = [trial for trial in ran if trial is not best and trial.times_first and trial.level_with(best)]
    level.sort(key=lambda trial: trial.times_first or 0.0, reverse=True)
    kept = [best, *level[: MOST_FINALISTS - 1]]
    return [*kept, *(trial for trial in ran[:1] if trial not in kept)] if level else []


def run_final(
    bench: Bench,
    objective: str,
    first: str,
    trials: Sequence[Trial],
    subject: Callable[[int], Subject],
    is_over: Callable[[], bool],
) -> list[Trial]:
    """Run finalists until one of them is ahead of all others or the time is over, in at least one round.

    Args:
        bench: where the first plan of the search is loaded. The finalists are loaded beside it, and unloaded at the end.
        objective: ``throughput`` or ``latency``.
        first: the name of the first plan on the bench.
        trials: the finalists, with the one of the first plan.
        subject: gives the model for a microbatch.
        is_over: whether the time is over.
    Returns: the finalists with their figures of the final; none if fewer than two plans could be loaded in time.
    """
    names = {bench.loaded[first].plan.hash: first}
    with ExitStack() as stack:
        for trial in trials:
            key = trial.plan.hash
            if key in names or is_over():
                continue
            with suppress(AutosplitError, OSError):  # its worker does not start again: its short rounds count
                bench.load(key, trial.plan, subject(trial.plan.microbatch)[0])
                stack.callback(bench.unload, key)
                names[key] = key
        if len(names) == 1:
            return []
        _run_rounds(bench, objective, list(names.values()), is_over)
        outcomes = {key: bench.loaded[name].outcome() for key, name in names.items()}
        reference = bench.loaded[first].outcome()
        ratios = {key: outcome.against(reference, objective) for key, outcome in outcomes.items()}
    ended = [(trial, outcomes[trial.plan.hash], ratios[trial.plan.hash]) for trial in trials if trial.plan.hash in names]
    return [
        replace(trial, measured_per_s=outcome.throughput_per_s, times_first=ratio.median, interval=ratio, outcome=outcome)
        for trial, outcome, ratio in ended
    ]


def _run_rounds(bench: Bench, objective: str, names: Sequence[str], is_over: Callable[[], bool]) -> None:
    """Rounds of the plans that are not behind; all of them run ``NUM_ROUNDS`` times if there is time, but for hopeless ones."""
    entries = {name: bench.loaded[name] for name in names}
    num_items = round(ROUND_S * entries[names[0]].pace_per_s)
    for entry in entries.values():
        entry.restart()
    running, number = list(names), 0
    while len(running) > 1 and not (number and is_over()):
        if objective == "latency":
            bench.run_alone(running, number, ROUND_S)
        else:
            bench.run_round(running, number, num_items)
        number += 1
        scores = {name: entries[name].rounds(objective) for name in running}
        if leader(scores):
            break
        running = still_running(scores, running[:1] if number < NUM_ROUNDS else ())
    if objective == "latency":
        bench.run_round(names, 0, num_items)  # this figure is only for the table
