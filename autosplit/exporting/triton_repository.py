"""Export for Triton Inference Server: a model repository with a model for each stage and an ensemble that connects them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autosplit.backends.onnxfile import ONNX, missing_packages
from autosplit.errors import PlanError, raise_faults
from autosplit.exporting.base import Job, Target, write_onnx_apart
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import parse_device
from autosplit.values.plan import Plan, Stage

DTYPES = {
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "float16": "TYPE_FP16",
    "int64": "TYPE_INT64",
    "int32": "TYPE_INT32",
    "int16": "TYPE_INT16",
    "int8": "TYPE_INT8",
    "uint8": "TYPE_UINT8",
    "bool": "TYPE_BOOL",
}

Config = dict[str, Any]


class Word(str):
    """A text that stands without quotes in a config: the name of an enum's value."""


def mixed_kinds(plan: Plan) -> list[str]:
    """A sentence for each stage with replicas on several kinds of devices."""
    return [
        f"stage '{stage.name}' has replicas on {', '.join(stage.devices)}, and an instance group is of one kind"
        for stage in plan.stages
        if len({parse_device(name).kind for name in stage.devices}) > 1
    ]


def write(job: Job, folder: Path) -> list[str]:
    """Write the repository. Raises: PlanError: a type or a connection cannot be expressed."""
    graph, specs = job.traced.graph, job.traced.specs
    strange = {s.name: f"'{s.name}' is {s.dtype}, which has no type in Triton" for s in job.ports if s.dtype not in DTYPES}
    faults = [*strange.values(), *job.untouched_outputs("triton")]
    raise_faults(PlanError, "Triton cannot express these values", faults)
    name = re.sub(r"[^\w.-]", "_", graph.name) or "model"
    stages = [f"{name}_{stage.name}" for stage in job.plan.stages]
    configs = [
        stage_config(title, stage, program.inputs, program.outputs)
        for title, stage, program in zip(stages, job.plan.stages, job.programs, strict=True)
    ]
    read = {spec.name for program in job.programs for spec in program.inputs}
    inputs = [specs[value] for value in graph.inputs if value in read]
    ensemble = ensemble_config(name, configs, inputs, [specs[value] for value in graph.outputs])
    for config in (*configs, ensemble):
        (folder / config["name"] / "1").mkdir(parents=True)
        (folder / config["name"] / "config.pbtxt").write_text(pbtxt(config), encoding="utf-8")
    for title, program in zip(stages, job.programs, strict=True):
        write_onnx_apart(program, folder / title / "1" / "model.onnx")
    return [f"start it: tritonserver --model-repository FOLDER; clients call the model '{name}'"]


def _port(spec: TensorSpec) -> Config:
    scalar: Config = {"reshape": {"shape": []}} if not spec.shape else {}
    return {"name": spec.name, "data_type": Word(DTYPES[spec.dtype]), "dims": list(spec.shape) or [1], **scalar}


def stage_config(name: str, stage: Stage, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Config:
    """The config of a stage: its ports, and as many instances as it has replicas, times their streams."""
    kinds = [parse_device(device) for device in stage.devices]
    group: Config = {"count": len(kinds) * stage.streams, "kind": Word("KIND_CPU")}
    if kinds[0].kind != "cpu":
        group = {"count": stage.streams, "kind": Word("KIND_GPU"), "gpus": [int(d.name.rpartition(":")[2]) for d in kinds]}
    return {
        "name": name,
        "backend": "onnxruntime",
        "max_batch_size": 0,
        "input": [_port(spec) for spec in inputs],
        "output": [_port(spec) for spec in outputs],
        "instance_group": [group],
        "parameters": [{"key": "intra_op_thread_count", "value": {"string_value": str(stage.threads)}}],
    }


def ensemble_config(name: str, stages: Sequence[Config], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Config:
    """The config of the ensemble: each stage is a step, and values keep their names."""
    steps = [
        {
            "model_name": stage["name"],
            "model_version": -1,
            "input_map": [{"key": port["name"], "value": port["name"]} for port in stage["input"]],
            "output_map": [{"key": port["name"], "value": port["name"]} for port in stage["output"]],
        }
        for stage in stages
    ]
    ports = {"input": [_port(spec) for spec in inputs], "output": [_port(spec) for spec in outputs]}
    return {"name": name, "platform": "ensemble", "max_batch_size": 0, **ports, "ensemble_scheduling": {"step": steps}}


def pbtxt(config: Mapping[str, Any], indent: str = "") -> str:
    """A config as protobuf text.

    >>> print(pbtxt({"name": "a", "dims": [1, 2], "kind": Word("KIND_CPU"), "input": [{"name": "x"}]}), end="")
    name: "a"
    dims: 1
    dims: 2
    kind: KIND_CPU
    input {
      name: "x"
    }
    """
    lines = []
    for key, value in config.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                lines.append(f"{indent}{key} {{\n{pbtxt(item, indent + '  ')}{indent}}}\n")
            else:
                text = item if isinstance(item, Word | int) else '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'
                lines.append(f"{indent}{key}: {text}\n")
    return "".join(lines)


TARGET = Target(
    name="triton",
    writes=(
        "a model repository: config.pbtxt and 1/model.onnx for each stage, instance_group from replicas and streams, an ensemble"
    ),
    lacks="bf16, replicas on several kinds of devices, scalars as inputs of the model, operators that ONNX does not have",
    checked=(
        "ONNX Runtime runs the ensemble's steps, equal outputs; tritonclient's protobuf reads each config where it is installed"
    ),
    write=write,
    missing=lambda: missing_packages("export to triton", ONNX, "autosplit[onnx]"),
    replicas=True,
    streams=True,
    refuses=mixed_kinds,
)
