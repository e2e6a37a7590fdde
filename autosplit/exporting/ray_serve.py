"""Export for Ray Serve: an app with one deployment for each stage, and its config file."""

import shutil
from pathlib import Path
from typing import Any

import yaml

from autosplit.backends.onnxfile import ONNX, missing_packages
from autosplit.errors import PlanError, raise_faults
from autosplit.exporting.base import Job, Target, port_names, write_json, write_onnx_apart
from autosplit.values.machine import parse_device

APP, CONFIG, STAGES = "app.py", "serve_config.yaml", "stages.json"


def write(job: Job, folder: Path) -> list[str]:
    """Write the stages, the app and its config. Raises: PlanError: numpy lacks a dtype, or an input is returned."""
    graph, specs = job.traced.graph, job.traced.specs
    raise_faults(PlanError, "an app cannot express these values", [*job.not_in_numpy(), *job.untouched_outputs("ray-serve")])
    rows = []
    for program, stage in zip(job.programs, job.plan.stages, strict=True):
        write_onnx_apart(program, folder / f"{program.name}.onnx")
        rows.append({"name": program.name, "file": f"{program.name}.onnx", "threads": stage.threads, **port_names(program)})
    inputs = {name: specs[name].dtype for name in graph.inputs}
    write_json(folder / STAGES, {"inputs": inputs, "outputs": list(graph.outputs), "stages": rows})
    shutil.copyfile(Path(__file__).with_name("ray_serve_app.py"), folder / APP)
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
    return [f"serve it, in this folder: serve run {CONFIG}"]


TARGET = Target(
    name="ray-serve",
    writes=(
        f"{APP} (a deployment for each stage, connected by handles), {CONFIG} (replicas and cores), and ONNX files of the stages"
    ),
    lacks="streams, bf16, the core that a stage is on (Ray counts cores), operators that ONNX does not have",
    checked="served by Ray on this machine with a request over HTTP where ray[serve] is installed; else the stages run in order",
    write=write,
    missing=lambda: missing_packages("export to ray-serve", ONNX, "autosplit[onnx]"),
    replicas=True,
)
