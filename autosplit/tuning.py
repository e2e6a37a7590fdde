"""A candidate in Optuna's terms: what a trial asks of the planner, and which ones are asked for first."""

from typing import Any

import optuna

from autosplit.candidates import Job
from autosplit.plan import Plan

QUEUE_DEPTHS = (1, 2, 4, 8)


def suggest(job: Job, trial: optuna.Trial) -> dict[str, Any]:
    """What a trial asks of the planner, within what the user asked for."""
    depths = sorted({*QUEUE_DEPTHS, job.queue_depth})
    asked: dict[str, Any] = {"queue_depth": trial.suggest_categorical("queue_depth", depths)}
    if job.constraints.num_stages is None:
        asked["num_stages"] = trial.suggest_int("num_stages", 1, most_stages(job))
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


def first_trials(job: Job, best: Plan) -> list[dict[str, Any]]:
    """The best plan so far, then with its backend the two extremes: a stage on each device, and the model on each device.

    What one of them measured says little of the other: a cache may hold all stages of a pipeline, and not two whole models.
    """
    asked = as_parameters(job, best)
    return [asked, asked | {"num_stages": most_stages(job), "replicate": False}, asked | {"num_stages": 1, "replicate": True}]


def as_parameters(job: Job, plan: Plan) -> dict[str, Any]:
    """What a trial would have to ask for to get a plan like this one.

    Another backend may take what those asked for refuse; the first of these counts.
    """
    return {
        "queue_depth": plan.queue_depth,
        "num_stages": len(plan.stages),
        "replicate": any(len(stage.devices) > 1 for stage in plan.stages),
        "backend": next((stage.backend for stage in plan.stages if stage.backend in job.backends), job.backends[0]),
        "microbatch": plan.microbatch,
        "threads": max(stage.threads for stage in plan.stages),
    }


def most_stages(job: Job) -> int:
    """As many as there are devices, unless the user wants fewer."""
    num_devices = len(job.machine.devices)
    return min(num_devices, job.constraints.max_stages or num_devices)
