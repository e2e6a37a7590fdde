"""Trials of Optuna: their choices, their questions to the planner, their order, and the journal that keeps them.

The lines and trials of a journal are checked before they are used.
"""

import contextlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

with warnings.catch_warnings():
    # In a notebook without ipywidgets, the tqdm of Optuna warns of bars that nothing here draws.
    warnings.filterwarnings("ignore", "IProgress not found")
    import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution, distribution_to_json
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from autosplit.errors import UsageError
from autosplit.files import content_hash, locked
from autosplit.parsing import MAX_REASON, parse_json, read_text
from autosplit.planners.cpsat.integer_program import MORE_BLOCKS
from autosplit.planning.question import Question
from autosplit.values.plan import Plan

Study: TypeAlias = optuna.study.Study
PRUNED = TrialState.PRUNED
QUEUE_DEPTHS = (1, 2, 4, 8)

MAX_JOURNAL_BYTES, MAX_JOURNAL_LINES = 20_000_000, 50_000
"""Limits of a journal. A trial takes about ten lines and 2 KB, and Optuna's time grows with the square of the trials."""

QUEUED, SAMPLED = "fixed_params", "tpe:relative_params"
"""Optuna's names of attributes: the choices of a trial from its queue, and parts of the JSON of those that it sampled."""


def space(question: Question, may_cut: bool = False) -> dict[str, BaseDistribution]:
    """The choices of a trial, within the user's demands; ``may_cut``: requests can be cut into microbatches."""
    found: dict[str, BaseDistribution] = {"queue_depth": CategoricalDistribution(sorted({*QUEUE_DEPTHS, question.queue_depth}))}
    if question.constraints.num_stages is None:
        found["num_stages"] = IntDistribution(1, most_stages(question))
    if question.constraints.max_replicas > 1:
        found["replicate"] = CategoricalDistribution([False, True])
    if len(question.backends) > 1:
        found["backend"] = CategoricalDistribution(question.backends)
    counts = sorted({1, *(max(1, len(device.cores)) for device in question.machine.devices)})
    if len(counts) > 1:
        found["threads"] = CategoricalDistribution(counts)
    if may_cut and question.source.batch > 1:
        divisors = [size for size in range(1, question.source.batch + 1) if question.source.batch % size == 0]
        found["microbatch"] = CategoricalDistribution(divisors)
    return found


def asked_of(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The question of a trial to the planner.

    >>> asked_of({"queue_depth": 4, "replicate": False}), asked_of({"queue_depth": 4, "replicate": True})
    ({'queue_depth': 4, 'max_replicas': 1}, {'queue_depth': 4})
    """
    asked = {name: value for name, value in chosen.items() if name != "replicate"}
    return asked if chosen.get("replicate", True) else asked | {"max_replicas": 1}


def first_trials(question: Question, best: Plan) -> list[dict[str, Any]]:
    """The best plan so far, and then the two extremes with its backend: a stage on each device, and the model on each device.

    Neither speed predicts the other: a cache may hold all stages of a pipeline, but not two whole models.
    A plan may have more stages than a trial may ask for, and stages on backends that were not asked for, for ops that the
    others refuse. Such a plan counts with the most stages that a trial may ask for, and with the first backend of the question.
    """
    asked = {
        "queue_depth": best.queue_depth,
        "num_stages": min(len(best.stages), most_stages(question)),
        "replicate": any(len(stage.devices) > 1 for stage in best.stages),
        "backend": next((stage.way for stage in best.stages if stage.way in question.backends), question.backends[0]),
        "microbatch": best.microbatch,
        "threads": max(stage.threads for stage in best.stages),
    }
    return [
        asked,
        asked | {"num_stages": most_stages(question), "replicate": False},
        asked | {"num_stages": 1, "replicate": True},
    ]


def most_stages(question: Question) -> int:
    """The most devices that one plan can use, or three times as many if they may hold several stages, within the user's limit."""
    usable = len(question.machine.layouts[0].devices) * (MORE_BLOCKS if question.constraints.reuse else 1)
    return min(usable, question.constraints.max_stages or usable)


def open_study(question: Question, journal: str | Path | None, may_cut: bool = False) -> Study:
    """A study in memory, or the one in the journal for this model, these devices and these demands.

    Values of trials do not carry over to others, and Optuna refuses a parameter whose choices have changed. ``may_cut``
    is that of ``space``.

    Raises: UsageError: the journal is damaged, too large or another kind of file, or it cannot be read or written.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    choices = space(question, may_cut)
    devices = [asdict(device) for device in question.machine.devices]
    texts = {name: distribution_to_json(distribution) for name, distribution in choices.items()}
    name = content_hash([question.graph.hash, question.source.batch, devices, asdict(question.constraints), texts])
    sampler = optuna.samplers.TPESampler(seed=question.seed, n_startup_trials=6)
    settings: dict[str, Any] = {"study_name": name, "direction": "maximize", "sampler": sampler, "load_if_exists": True}
    if journal is None:
        return optuna.create_study(**settings)
    path = Path(journal)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _check_lines(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna warns of odd distributions, and writes out the text of the file
            backend = optuna.storages.journal.JournalFileBackend(str(path), lock_obj=_KernelLock(path))
            study = optuna.create_study(storage=optuna.storages.JournalStorage(backend), **settings)
            _check_trials(study, choices)
    except OSError as failure:
        raise UsageError(f"journal '{path}' cannot be read or written: {failure.strerror}; name another file") from None
    except Exception as failure:  # Optuna replays the operations unchecked, so that a wrong one may raise anything
        reason = f"{failure}" if isinstance(failure, ValueError) else repr(failure)
        raise UsageError(
            f"journal '{path}' is damaged or another kind of file: {reason:.{MAX_REASON}}; remove it, or name another file"
        ) from None
    return study


class _KernelLock:
    """The lock of a journal in place of Optuna's, which a killed process leaves behind."""

    def __init__(self, path: Path) -> None:
        self._path, self._held = path, contextlib.ExitStack()

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._held.enter_context(locked(self._path))
        return True

    def release(self) -> None:
        """Give the lock back."""
        self._held.close()


def _check_lines(path: Path) -> None:
    """Raises: OSError: as ``read_text``. ValueError: a line is cut off or is not a JSON object, or there are too many."""
    lines = read_text(path, MAX_JOURNAL_BYTES).split("\n")
    if lines.pop():
        raise ValueError(f"line {len(lines) + 1} is cut off")
    if len(lines) > MAX_JOURNAL_LINES:
        raise ValueError(f"it has {len(lines)} lines, and at most {MAX_JOURNAL_LINES} are read")
    for number, line in enumerate(lines, 1):
        try:
            found = parse_json(line)
        except ValueError as failure:
            raise ValueError(f"line {number}: {failure}") from None
        if not isinstance(found, dict):
            raise ValueError(f"line {number} is not a JSON object")


def _check_trials(study: Study, choices: Mapping[str, BaseDistribution]) -> None:
    """Raises: ValueError, TypeError: a trial has other choices, values outside of them, or a result that no search writes."""
    if study.directions != [StudyDirection.MAXIMIZE]:
        raise ValueError("its study is of another search")
    for trial in study.get_trials(deepcopy=False):
        attributes, is_done = trial.system_attrs, trial.state is TrialState.COMPLETE
        sampled = "".join(text for name, text in attributes.items() if name.startswith(SAMPLED))
        asked = {**attributes.get(QUEUED, {}), **parse_json(sampled or "{}"), **trial.params}
        chosen = {name: value for name, value in asked.items() if name in choices}
        result = trial.value if is_done else 0.0
        create_trial(params=chosen, distributions={name: choices[name] for name in chosen}, value=result)  # Optuna checks values
        wrong = any(choices.get(name) != distribution for name, distribution in trial.distributions.items())
        wrong |= bool(trial.intermediate_values) or (trial.values is not None and not is_done)
        if wrong or not isinstance(result, float) or not math.isfinite(result):
            raise ValueError(f"trial {trial.number} is of another search")
