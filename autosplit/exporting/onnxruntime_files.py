"""Export for ONNX Runtime: a bundle whose parts are all for it, with a driver that needs numpy and onnxruntime only."""

from dataclasses import replace
from pathlib import Path

from autosplit.backends.onnxfile import ONNX, missing_packages
from autosplit.bundling.bundler import fill_bundle
from autosplit.errors import PlanError, raise_faults
from autosplit.exporting.base import Job, Target, port_names, write_json, write_onnx_apart
from autosplit.values.shapes import sizes_text


def write(job: Job, folder: Path) -> list[str]:
    """Write the bundle, or for requests of several sizes the files alone.

    Raises: PlanError: a value between stages has a dtype that numpy does not have. TraceError: as ``Job.programs``.
    """
    raise_faults(PlanError, f"the stages of '{job.traced.graph.name}' cannot be handed on", job.not_in_numpy())
    if job.family is not None:
        return _write_every_size(job, folder)
    stages = tuple(replace(stage, backend="onnxruntime", streams=1) for stage in job.plan.stages)
    fill_bundle({job.traced.graph.name: (job.traced, replace(job.plan, stages=stages))}, folder)
    return [
        f"stage '{stage.name}' has {count} {noun}: load the folder {count} times, and give each copy requests in turn"
        for stage in job.plan.stages
        for noun, count in (("replicas", len(stage.devices)), ("streams", stage.streams))
        if count > 1
    ]


def _write_every_size(job: Job, folder: Path) -> list[str]:
    """Write an ONNX file for each stage, whose axes are named by dimension, and ``stages.json`` with their order and values."""
    rows = []
    for stage, program in zip(job.plan.stages, job.programs, strict=True):
        write_onnx_apart(program, folder / f"{program.name}.onnx")
        rows.append({"file": f"{program.name}.onnx", "devices": list(stage.devices), **port_names(program)})
    graph = job.traced.graph
    write_json(folder / "stages.json", {"inputs": list(graph.inputs), "outputs": list(graph.outputs), "stages": rows})
    sizes = "; ".join(f"{dim} {sizes_text(found)}" for dim, found in job.family.allowed.items()) if job.family else ""
    return [
        f"axes have any size of {sizes}; run the stages of stages.json in their order (there is no driver.py for several sizes)"
    ]


TARGET = Target(
    name="onnxruntime",
    writes=(
        "a bundle: an ONNX file for each stage, their weights, manifest.json, and driver.py, which needs numpy and onnxruntime; "
        "for several sizes the files with named axes, and stages.json"
    ),
    lacks="replicas and streams (load the folder several times), bf16, operators that ONNX does not have",
    checked="ONNX Runtime runs the driver in a process without torch, with equal outputs",
    write=write,
    missing=lambda: missing_packages("export to onnxruntime", (*ONNX, "onnxruntime"), "autosplit[onnx]"),
    replicas=True,
    sizes=True,
    streams=True,
)
