"""Export for Ray Serve: an app with one deployment for each stage, and its config file."""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from autosplit.exporting import onnxruntime_files
from autosplit.exporting.base import Job, Target, refusals_of
from autosplit.values.machine import parse_device
from autosplit.values.plan import Plan

APP, CONFIG, THREADS = "app.py", "serve_config.yaml", "threads.json"


class RayServeTarget:
    """The files of ONNX Runtime, ``app.py``, ``threads.json`` and ``serve_config.yaml``."""

    name = "ray-serve"
    writes = (
        f"{APP} (a deployment for each stage, connected by handles), {CONFIG} (replicas and cores), and ONNX files of the stages"
    )
    lacks = "streams, bf16, the core that a stage is on (Ray counts cores), operators that ONNX does not have"
    checked = "served by Ray on this machine with a request over HTTP where ray[serve] is installed; else the stages run in order"

    def missing(self) -> str | None:
        """Name the packages that are not installed; ray is needed to serve, not to write."""
        return onnxruntime_files.missing_onnx(self.name, onnxruntime_files.NEEDED)

    def accepts(self, plan: Plan) -> list[str]:
        """Refuse streams and bf16."""
        return refusals_of(plan, self.name, replicas=True)

    def write(self, job: Job, folder: Path) -> list[str]:
        """Write the stages for ONNX Runtime, the app and its config."""
        onnxruntime_files.TARGET.write(job, folder)
        shutil.copyfile(Path(__file__).with_name("ray_serve_app.py"), folder / APP)
        (folder / THREADS).write_text(json.dumps([stage.threads for stage in job.plan.stages]) + "\n", encoding="utf-8")
        deployments: list[dict[str, Any]] = [{"name": "ingress", "ray_actor_options": {"num_cpus": 0}}]
        for program, stage in zip(job.programs, job.plan.stages, strict=True):
            on_cpu = all(parse_device(name).kind == "cpu" for name in stage.devices)
            options: dict[str, Any] = {"num_cpus": stage.threads} if on_cpu else {"num_cpus": 0, "num_gpus": 1}
            deployments.append(
                {
                    "name": program.name,
                    "num_replicas": len(stage.devices),
                    "max_ongoing_requests": job.plan.queue_depth,
                    "ray_actor_options": options,
                }
            )
        application = {"name": "model", "route_prefix": "/", "import_path": "app:build", "deployments": deployments}
        text = yaml.safe_dump({"proxy_location": "HeadOnly", "applications": [application]}, sort_keys=False)
        (folder / CONFIG).write_text(text, encoding="utf-8")
        return [f"serve it: cd {folder.name} && serve run {CONFIG}"]


TARGET: Target = RayServeTarget()
