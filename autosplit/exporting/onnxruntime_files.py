"""Export for ONNX Runtime: a bundle whose parts are all for it, with a driver that needs numpy and onnxruntime only."""

from dataclasses import replace
from pathlib import Path

from autosplit.backends.onnxfile import ONNX, missing_packages
from autosplit.bundling.bundler import fill_bundle
from autosplit.errors import PlanError, raise_faults
from autosplit.exporting.base import Job, Target


def write(job: Job, folder: Path) -> list[str]:
    """Write the bundle; for requests of several sizes each file takes every size, and its axes are named by dimension.

    Raises: PlanError: a value between stages has a dtype that numpy does not have. TraceError: as ``write_bundle``.
    """
    raise_faults(PlanError, f"the stages of '{job.traced.graph.name}' cannot be handed on", job.not_in_numpy())
    stages = tuple(replace(stage, backend="onnxruntime", streams=1) for stage in job.plan.stages)
    shapes = None if job.plan.shapes is None else replace(job.plan.shapes, dynamic=("onnxruntime",))
    fill_bundle({job.traced.graph.name: (job.family or job.traced, replace(job.plan, stages=stages, shapes=shapes))}, folder)
    return [
        f"stage '{stage.name}' has {count} {noun}: load the folder {count} times, and give each copy requests in turn"
        for stage in job.plan.stages
        for noun, count in (("replicas", len(stage.devices)), ("streams", stage.streams))
        if count > 1
    ]


TARGET = Target(
    name="onnxruntime",
    writes=(
        "a bundle: an ONNX file for each stage (for several sizes with named axes), their weights, manifest.json, and driver.py, "
        "which needs numpy and onnxruntime"
    ),
    lacks="replicas and streams (load the folder several times), bf16, operators that ONNX does not have",
    checked="ONNX Runtime runs the driver in a process without torch, with equal outputs",
    write=write,
    missing=lambda: missing_packages("export to onnxruntime", (*ONNX, "onnxruntime"), "autosplit[onnx]"),
    replicas=True,
    sizes=True,
    streams=True,
)
