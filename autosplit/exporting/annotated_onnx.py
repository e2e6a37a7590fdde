"""Export for ONNX Runtime's own partitioning: one model whose nodes say their stage, and the setting that places stages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autosplit.backends.onnxfile import ONNX, missing_packages
from autosplit.errors import PlanError, raise_faults
from autosplit.exporting.base import Job, Target, write_json, write_onnx_apart
from autosplit.scratch import scratch_folder
from autosplit.tracing.splitting import StageProgram
from autosplit.values.machine import parse_device

WHOLE, OPTIONS, SETTING = "model.onnx", "session_options.json", "session.layer_assignment_settings"

ANNOTATION = "layer_ann"
"""The metadata of a node that ``session.layer_assignment_settings`` looks at."""

PROVIDERS = {"cpu": "cpu", "cuda": "gpu"}
"""Device kind to ONNX Runtime's word for it in the settings."""


def annotated_model(
    paths: Sequence[Path], programs: Sequence[StageProgram], inputs: Sequence[str], outputs: Sequence[str]
) -> Any:
    """One model of all stages, each node with the name of its stage; ``paths`` are the files of the stages."""
    from onnxscript import ir

    values, functions, opsets = dict[str, Any](), dict[Any, Any](), dict[str, int]()
    nodes, weights, version = list[Any](), list[Any](), 0
    for path, program in zip(paths, programs, strict=True):
        model = ir.load(path)
        graph = model.graph
        for value in graph.inputs:
            if (made := values.setdefault(value.name, value)) is not value:
                value.replace_all_uses_with(made)
        values |= {value.name: value for value in graph.outputs}
        for value in [*graph.initializers.values()]:
            if not value.is_graph_output():
                value.name = f"{program.name}/{value.name}"
        for node in graph:
            node.metadata_props[ANNOTATION] = program.name
        nodes += graph
        weights += graph.initializers.values()
        functions |= model.functions
        opsets |= {domain: max(number, opsets.get(domain, 0)) for domain, number in graph.opset_imports.items()}
        version = max(version, model.ir_version)
        for part in (graph.inputs, graph.outputs, graph.initializers):
            part.clear()
        graph.remove(list(graph))
    ends = [values[name] for name in inputs if name in values], [values[name] for name in outputs]
    whole = ir.Graph(*ends, nodes=nodes, initializers=weights, opset_imports=opsets, name="model")
    joined = ir.Model(whole, ir_version=version, functions=functions.values())
    ir.passes.common.NameFixPass()(joined)  # stages have inner names in common
    return joined


def assignment(stages: Sequence[tuple[str, str]]) -> str:
    """The text for ``session.layer_assignment_settings`` from the name and the kind of device of each stage.

    >>> assignment([("stage0", "cuda"), ("stage1", "cpu"), ("stage2", "cuda")])
    'gpu(=stage0, =stage2); cpu(=stage1)'
    """
    found: dict[str, list[str]] = {}
    for name, kind in stages:
        found.setdefault(PROVIDERS.get(kind, kind), []).append(f"={name}")
    return "; ".join(f"{provider}({', '.join(names)})" for provider, names in found.items())


def write(job: Job, folder: Path) -> list[str]:
    """Write the stages apart, and join them to one model. Raises: PlanError: an output is not made by a stage."""
    from onnxscript import ir

    raise_faults(PlanError, "an ONNX model cannot express these connections", job.untouched_outputs("onnxruntime-layers"))
    with scratch_folder() as scratch:
        paths = [scratch / f"{program.name}.onnx" for program in job.programs]
        for program, path in zip(job.programs, paths, strict=True):
            write_onnx_apart(program, path)
        model = annotated_model(paths, job.programs, job.traced.graph.inputs, job.traced.graph.outputs)
        ir.save(model, folder / WHOLE, external_data=f"{WHOLE}.data")
    rows = zip(job.programs, job.plan.stages, strict=True)
    setting = assignment([(program.name, parse_device(stage.devices[0]).kind) for program, stage in rows])
    write_json(folder / OPTIONS, {SETTING: setting})
    return [f"give the session the option {SETTING}={setting}"]


TARGET = Target(
    name="onnxruntime-layers",
    writes=f"{WHOLE}: the whole model, each node with its stage in the metadata '{ANNOTATION}'; {OPTIONS}: {SETTING}",
    lacks="replicas, streams, bf16, CPU cores apart (a provider has all of them), operators that ONNX does not have",
    checked="onnx's checker, and ONNX Runtime runs the model with its setting, with equal outputs",
    write=write,
    missing=lambda: missing_packages("export to onnxruntime-layers", ONNX, "autosplit[onnx]"),
)
