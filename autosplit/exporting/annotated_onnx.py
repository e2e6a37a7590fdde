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
    """One model of all stages. Values on cuts keep their names; names inside a stage get the stage's in front.

    Args:
        paths: the ONNX file of each stage.
        programs: the stages.
        inputs, outputs: names of the model's inputs and outputs.
    """
    import onnx

    ports = {spec.name for program in programs for spec in (*program.inputs, *program.outputs)}
    nodes: list[Any] = []
    weights: list[Any] = []
    infos: dict[str, Any] = {}
    functions: dict[tuple[str, str, str], Any] = {}
    opsets: dict[str, int] = {}
    version = 0
    for path, program in zip(paths, programs, strict=True):
        model = onnx.load(path)
        opsets |= {entry.domain: max(entry.version, opsets.get(entry.domain, 0)) for entry in model.opset_import}
        functions |= {(f.domain, f.name, f.overload): f for f in model.functions}
        version = max(version, model.ir_version)
        infos |= {info.name: info for info in (*model.graph.input, *model.graph.output)}
        _rename(model.graph, program.name, ports)
        for node in model.graph.node:
            node.name = f"{program.name}/{node.name}"
            entry = node.metadata_props.add()
            entry.key, entry.value = ANNOTATION, program.name
        nodes += model.graph.node
        weights += model.graph.initializer
    graph = onnx.helper.make_graph(
        nodes, "model", [infos[n] for n in inputs if n in infos], [infos[name] for name in outputs], initializer=weights
    )
    imports = [onnx.helper.make_opsetid(domain, number) for domain, number in opsets.items()]
    return onnx.helper.make_model(graph, opset_imports=imports, functions=list(functions.values()), ir_version=version)


def _rename(graph: Any, stage: str, ports: set[str]) -> None:
    """Put the stage's name before every name in a graph and its subgraphs that is not a port."""

    def named(name: str) -> str:
        return name if not name or name in ports else f"{stage}/{name}"

    for tensor in graph.initializer:
        tensor.name = named(tensor.name)
    for node in graph.node:
        node.input[:] = map(named, node.input)
        node.output[:] = map(named, node.output)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node or inner.output:
                    for info in (*inner.input, *inner.output):
                        info.name = named(info.name)
                    _rename(inner, stage, ports)


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
    import onnx

    raise_faults(PlanError, "an ONNX model cannot express these connections", job.untouched_outputs("onnxruntime-layers"))
    with scratch_folder() as scratch:
        paths = [scratch / f"{program.name}.onnx" for program in job.programs]
        for program, path in zip(job.programs, paths, strict=True):
            write_onnx_apart(program, path)
        model = annotated_model(paths, job.programs, job.traced.graph.inputs, job.traced.graph.outputs)
        onnx.save(model, folder / WHOLE, save_as_external_data=True, location=f"{WHOLE}.data")
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
