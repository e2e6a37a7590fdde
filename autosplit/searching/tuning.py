"""Trials of Optuna: their choices, their questions to the planner, and their order."""

import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

with warnings.catch_warnings():
    # In a notebook without ipywidgets, the tqdm of Optuna warns of bars that nothing here draws.
    warnings.filterwarnings("ignore", "IProgress not found")
    import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from autosplit.planners.cpsat.integer_program import MORE_BLOCKS
from autosplit.planning.question import Question
from autosplit.values.plan import Plan

Study: TypeAlias = optuna.study.Study
PRUNED = TrialState.PRUNED
QUEUE_DEPTHS = (1, 2, 4, 8)


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
