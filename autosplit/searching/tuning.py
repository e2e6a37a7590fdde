"""Trials of Optuna: their choices, what they ask of the planner, and which come first."""

import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

with warnings.catch_warnings():
    # In a notebook without ipywidgets, the tqdm of Optuna warns of bars that nothing here draws.
    warnings.filterwarnings("ignore", "IProgress not found")
    import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from autosplit.searching.candidates import Job
from autosplit.values.plan import Plan

Study: TypeAlias = optuna.study.Study
PRUNED = TrialState.PRUNED
QUEUE_DEPTHS = (1, 2, 4, 8)


def space(job: Job) -> dict[str, BaseDistribution]:
    """The choices of a trial, within the user's demands."""
    found: dict[str, BaseDistribution] = {"queue_depth": CategoricalDistribution(sorted({*QUEUE_DEPTHS, job.queue_depth}))}
    if job.constraints.num_stages is None:
        found["num_stages"] = IntDistribution(1, most_stages(job))
    if job.constraints.max_replicas > 1:
        found["replicate"] = CategoricalDistribution([False, True])
    if len(job.backends) > 1:
        found["backend"] = CategoricalDistribution(job.backends)
    counts = sorted({1, *(max(1, len(device.cores)) for device in job.machine.devices)})
    if len(counts) > 1:
        found["threads"] = CategoricalDistribution(counts)
    if job.subject_for is not None and job.source.batch > 1:
        divisors = [size for size in range(1, job.source.batch + 1) if job.source.batch % size == 0]
        found["microbatch"] = CategoricalDistribution(divisors)
    return found


def asked_of(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What a trial asks of the planner.

    >>> asked_of({"queue_depth": 4, "replicate": False}), asked_of({"queue_depth": 4, "replicate": True})
    ({'queue_depth': 4, 'max_replicas': 1}, {'queue_depth': 4})
    """
    asked = {name: value for name, value in chosen.items() if name != "replicate"}
    return asked if chosen.get("replicate", True) else asked | {"max_replicas": 1}


def first_trials(job: Job, best: Plan) -> list[dict[str, Any]]:
    """The best plan so far, and then the two extremes with its backend: a stage on each device, and the model on each device.

    Neither speed predicts the other: a cache may hold all stages of a pipeline, but not two whole models.
    """
    asked = as_parameters(job, best)
    return [asked, asked | {"num_stages": most_stages(job), "replicate": False}, asked | {"num_stages": 1, "replicate": True}]


def as_parameters(job: Job, plan: Plan) -> dict[str, Any]:
    """The choices of a trial that would give a plan like this one.

    A plan may have several stages on a device, and stages on backends that are not the job's, for ops that the job's backends
    refuse. No trial asks for either. Such a plan counts with the most stages that a trial may ask for, and with the first
    backend of the job.
    """
    return {
        "queue_depth": plan.queue_depth,
        "num_stages": min(len(plan.stages), most_stages(job)),
        "replicate": any(len(stage.devices) > 1 for stage in plan.stages),
        "backend": next((stage.backend for stage in plan.stages if stage.backend in job.backends), job.backends[0]),
        "microbatch": plan.microbatch,
        "threads": max(stage.threads for stage in plan.stages),
    }


def most_stages(job: Job) -> int:
    """The most devices that one plan can use, or the user's own limit if it is lower."""
    num_devices = len(job.machine.layouts[0].devices)
    return min(num_devices, job.constraints.max_stages or num_devices)
