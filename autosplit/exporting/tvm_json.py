"""Export for TVM's pipeline executor (Relay, up to TVM 0.19): its JSON of connections, and the stages as ONNX files."""

from pathlib import Path
from typing import Any

from autosplit.backends.onnxfile import ONNX, missing_packages
from autosplit.errors import PlanError, raise_faults
from autosplit.exporting.base import Job, Target, write_json, write_onnx_apart
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


TARGET = Target(
    name="tvm-json",
    writes=f"{FILE}: module, input and parameter connections of the pipeline executor; stageN.onnx for relay.frontend.from_onnx",
    lacks="an input of the model that two stages read, replicas, streams, bf16; TVM removed Relay and this executor in 2025",
    checked="stages run along its connections with equal outputs",
    write=write,
    missing=lambda: missing_packages("export to tvm-json", ONNX, "autosplit[onnx]"),
    kinds=DEVICE_TYPES,
)
