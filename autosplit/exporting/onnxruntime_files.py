"""Export for ONNX Runtime: a bundle whose parts are all for it, with a driver that needs numpy and onnxruntime only."""

import importlib.util
from dataclasses import replace
from pathlib import Path

from autosplit.bundling.bundler import fill_bundle
from autosplit.errors import PlanError, raise_faults
from autosplit.exporting.base import Job, Target, refusals_of
from autosplit.values.plan import Plan

NEEDED = ("onnx", "onnxscript", "onnxruntime")


class OnnxRuntimeTarget:
    """A bundle: an ONNX file for each stage, one weights file, ``manifest.json`` and ``driver.py``."""

    name = "onnxruntime"
    writes = (
        "a bundle: an ONNX file for each stage, their weights, manifest.json, and driver.py, which needs numpy and onnxruntime"
    )
    lacks = "replicas and streams (load the folder several times), bf16, operators that ONNX does not have"
    checked = "ONNX Runtime runs the driver in a process without torch, with equal outputs"

    def missing(self) -> str | None:
        """Name the packages that are not installed."""
        return missing_onnx(self.name, NEEDED)

    def accepts(self, plan: Plan) -> list[str]:
        """Refuse bf16; whoever loads the folder several times has replicas."""
        return refusals_of(plan, self.name, replicas=True, streams=True)

    def write(self, job: Job, folder: Path) -> list[str]:
        """Write the bundle. Raises: PlanError: a value between stages has a dtype that numpy does not have."""
        specs = dict.fromkeys(spec for program in job.programs for spec in (*program.inputs, *program.outputs))
        faults = [f"'{spec.name}' is {spec.dtype}, which numpy does not have" for spec in specs if not spec.in_numpy]
        raise_faults(PlanError, f"the stages of '{job.traced.graph.name}' cannot be handed on", faults)
        stages = tuple(replace(stage, backend="onnxruntime", streams=1) for stage in job.plan.stages)
        fill_bundle({job.traced.graph.name: (job.traced, replace(job.plan, stages=stages))}, folder)
        return [
            f"stage '{stage.name}' has {count} {noun}: load the folder {count} times, and give each copy requests in turn"
            for stage in job.plan.stages
            for noun, count in (("replicas", len(stage.devices)), ("streams", stage.streams))
            if count > 1
        ]


def missing_onnx(target: str, needed: tuple[str, ...]) -> str | None:
    """None if the packages for ONNX files are installed, else a line with the missing ones and the pip command."""
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"export to {target} needs {' and '.join(absent)}: pip install 'autosplit[onnx]'"


TARGET: Target = OnnxRuntimeTarget()
