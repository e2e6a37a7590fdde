"""Export for TVM's pipeline executor (Relay, up to TVM 0.19): its JSON of connections, and the stages as ONNX files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autosplit.backends.onnxfile import ONNX, missing_packages
from autosplit.errors import PlanError, raise_faults
from autosplit.exporting.base import Job, Target, write_json, write_onnx_apart
from autosplit.files import read_data
from autosplit.parsing import MALFORMED, parse_json
from autosplit.serving.pipelineconfig import PipelineConfig
from autosplit.tracing.splitting import StageProgram
from autosplit.values.machine import parse_device

FILE = "pipeline_config.json"

DEVICE_TYPES = {"cpu": 1, "cuda": 2}
"""Numbers of device kinds in DLPack, which TVM writes."""


def write(job: Job, folder: Path) -> list[str]:
    """Write the connections and the stages. Raises: PlanError: two stages read an input, or an output is not made."""
    write_json(folder / FILE, connections(job))
    for number, program in enumerate(job.programs):
        write_onnx_apart(program, folder / f"stage{number}.onnx")
    return []


def connections(job: Job) -> dict[str, Any]:
    """The content of the JSON file. Raises: PlanError: two stages read an input of the model, or an output is not made."""
    graph, stages, programs = job.traced.graph, job.plan.stages, job.programs
    readers: dict[str, list[int]] = {}
    for number, program in enumerate(programs):
        for spec in program.inputs:
            readers.setdefault(spec.name, []).append(number)
    faults = job.untouched_outputs("TVM")
    for name in graph.inputs:
        if len(readers.get(name, [])) > 1:
            named = ", ".join(f"'{stages[number].name}'" for number in readers[name])
            faults.append(f"input '{name}' of the model is read by stages {named}, and TVM connects it to one")
    raise_faults(PlanError, "TVM's pipeline executor cannot express these connections", faults)
    modules = []
    for number, (stage, program) in enumerate(zip(stages, programs, strict=True)):
        device = parse_device(stage.devices[0])
        outputs = []
        for position, spec in enumerate(program.outputs):
            targets: list[dict[str, Any]] = [
                {"mod_idx": reader, "input_name": spec.name} for reader in readers.get(spec.name, []) if reader > number
            ]
            if spec.name in graph.outputs:
                targets.append({"global_output_index": graph.outputs.index(spec.name)})
            outputs.append({"output_idx": position, "dependencies": targets})
        place = 0 if device.kind == "cpu" else int(device.name.rpartition(":")[2])
        modules.append(
            {
                "mod_idx": number,
                "cpu_affinity": ",".join(map(str, device.cores)),
                "dev": f"{DEVICE_TYPES[device.kind]},{place}",
                "output": outputs,
            }
        )
    inputs = [
        {"global_interface_name": name, "mod_idx": number, "module_interface_name": name}
        for name in graph.inputs
        for number in readers.get(name, [])
    ]
    return {"module_connection": modules, "input_connection": inputs, "param_connection": []}


def read_connections(path: Path, programs: Sequence[StageProgram]) -> PipelineConfig:
    """The pipeline that a file in TVM's format describes, on the cores that it names.

    Args:
        path: the JSON file.
        programs: the stages, in the order of ``mod_idx``.
    Raises: PlanError: the file is malformed, or names a stage, an input or an output that is not there.
    """
    data = read_data(path, "TVM pipeline", PlanError, parse_json)
    config = PipelineConfig()
    try:
        modules = sorted(data["module_connection"], key=lambda module: int(module["mod_idx"]))
        if [module["mod_idx"] for module in modules] != list(range(len(programs))):
            raise PlanError(f"'{path}' has {len(modules)} modules, and {len(programs)} stages are given; each needs its number")
        for module, program in zip(modules, programs, strict=True):
            device = parse_device(f"cpu:{module['cpu_affinity'] or 0}")
            config.add_stage(program.name, program, [device], threads=max(1, len(device.cores)))
        for link in data["input_connection"]:
            target = config[programs[link["mod_idx"]].name].input(link["module_interface_name"])
            config.input(link["global_interface_name"]).connect(target)
        for module, program in zip(modules, programs, strict=True):
            for output in module["output"]:
                port = config[program.name].output(output["output_idx"])
                for target in output["dependencies"]:
                    if "global_output_index" in target:
                        port.connect(config.output(str(target["global_output_index"])))
                    else:
                        port.connect(config[programs[target["mod_idx"]].name].input(target["input_name"]))
    except MALFORMED as failure:
        raise PlanError(f"'{path}' is not a pipeline in TVM's format: {type(failure).__name__} {failure}") from None
    return config


TARGET = Target(
    name="tvm-json",
    writes=f"{FILE}: module, input and parameter connections of the pipeline executor; stageN.onnx for relay.frontend.from_onnx",
    lacks="an input of the model that two stages read, replicas, streams, bf16; TVM removed Relay and this executor in 2025",
    checked="read back as an autosplit PipelineConfig, which runs with equal outputs",
    write=write,
    missing=lambda: missing_packages("export to tvm-json", ONNX, "autosplit[onnx]"),
    kinds=DEVICE_TYPES,
)
