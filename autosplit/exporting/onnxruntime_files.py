"""Export for ONNX Runtime as a target: a file for each stage, a manifest and a loader that needs no torch."""

import importlib.util
from pathlib import Path

from autosplit.exporting import bundle
from autosplit.exporting.base import Job, Target, refusals_of
from autosplit.values.plan import Plan

NEEDED = ("onnx", "onnxscript", "onnxruntime")


class OnnxRuntimeTarget:
    """``stage0.onnx`` and so on, ``manifest.json`` and ``loader.py``."""

    name = "onnxruntime"
    writes = "stage0.onnx, stage1.onnx, ..., manifest.json with the connections, and loader.py, which needs numpy and onnxruntime"
    lacks = "replicas and streams (load the folder several times), bf16, operators that ONNX does not have"
    checked = "ONNX Runtime runs the loader in a process without torch, with equal outputs"

    def missing(self) -> str | None:
        """Name the packages that are not installed."""
        return missing_onnx(self.name, NEEDED)

    def accepts(self, plan: Plan) -> list[str]:
        """Refuse bf16; whoever loads the folder several times has replicas."""
        return refusals_of(plan, self.name, replicas=True, streams=True)

    def write(self, job: Job, folder: Path) -> list[str]:
        """Write the files of the stages, the manifest and the loader."""
        bundle.export(job.traced, job.programs, folder)
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
