"""Export for OpenVINO: an IR for each stage, and one IR of the whole model with a device for each operation, for HETERO.

HETERO reads the attribute "affinity" of each operation, which OpenVINO does not write to a file. So the IR holds a table of the
operations and their devices, and ``hetero.py`` sets the attributes when it has read the IR.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autosplit.backends.apart import apart
from autosplit.backends.base import convert
from autosplit.backends.onnxfile import ONNX, missing_packages, write_onnx
from autosplit.backends.openvino import core
from autosplit.backends.quiet import quiet
from autosplit.errors import PlanError, raise_faults
from autosplit.exporting.base import Job, Target, port_names
from autosplit.scratch import scratch_folder
from autosplit.tracing.splitting import StageProgram
from autosplit.values.machine import parse_device

WHOLE, SCRIPT = "model.xml", "hetero.py"

DEVICES = {"cpu": "CPU", "npu": "NPU"}
"""Device kind to OpenVINO's name; its GPU is Intel's, which autosplit does not have."""


def write(job: Job, folder: Path) -> list[str]:
    """Convert each stage through an ONNX file, and join the stages to one model."""
    raise_faults(PlanError, "an IR cannot express these connections", job.untouched_outputs("openvino"))
    devices = [DEVICES[parse_device(stage.devices[0]).kind] for stage in job.plan.stages]
    paths = [(folder / f"stage{number}.xml").absolute() for number in range(len(devices))]
    for program, path in zip(job.programs, paths, strict=True):
        convert(write_model, program, path, doing=f"while OpenVINO converted stage '{program.name}'")
    stages = [(path, device, port_names(program)) for path, device, program in zip(paths, devices, job.programs, strict=True)]
    ends = job.traced.graph.inputs, job.traced.graph.outputs
    apart(write_whole, stages, *ends, (folder / WHOLE).absolute(), doing="while OpenVINO joined the stages")
    shutil.copyfile(Path(__file__).with_name("openvino_hetero_script.py"), folder / SCRIPT)
    note = f"'affinity' in {WHOLE}: {', '.join(devices)}; {SCRIPT} compiles it for HETERO:{','.join(dict.fromkeys(devices))}"
    one = " OpenVINO has one CPU device, so these stages are one there." if set(devices) == {"CPU"} and len(devices) > 1 else ""
    return [f"{note}.{one} Compile stages with INFERENCE_PRECISION_HINT f32: the default may be bf16."]


def write_model(program: StageProgram, path: Path) -> None:
    """Convert a stage through an ONNX file to OpenVINO's own, ``path``."""
    reader = core()
    import openvino

    with scratch_folder() as scratch, quiet():
        write_onnx(program, scratch / "stage.onnx", dense=False)
        openvino.save_model(reader.read_model(scratch / "stage.onnx"), path, compress_to_fp16=False)


def write_whole(
    stages: Sequence[tuple[Path, str, Mapping[str, Sequence[str]]]], inputs: Sequence[str], outputs: Sequence[str], path: Path
) -> None:
    """Write one model of all stages; its ``rt_info`` has a table "affinity" from each operation's name to its device.

    Args:
        stages: of each stage its file, OpenVINO's name of its device, and its ``port_names``.
        inputs, outputs: names of the model's inputs and outputs.
    """
    reader = core()
    import openvino
    from openvino import opset13

    made: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    affinity: dict[str, str] = {}
    for file, device, names in stages:
        model = reader.read_model(file)
        by_name = {port.any_name: port for port in model.inputs}
        results = [result.input(0).get_source_output() for result in model.get_results()]
        for op in model.get_ordered_ops():
            if op.get_type_name() not in ("Parameter", "Result"):
                op.set_friendly_name(f"{file.stem}/{op.get_friendly_name()}")
                affinity[op.get_friendly_name()] = device
        for name in names["inputs"]:
            parameter = by_name[name].get_node()
            source = made.get(name) or parameters.get(name)
            if source is None:
                parameters[name] = parameter.output(0)
            else:
                parameter.output(0).replace(source)
        made |= zip(names["outputs"], results, strict=True)
    ends = [opset13.result(made[name]) for name in outputs]
    for end, name in zip(ends, outputs, strict=True):
        end.output(0).get_tensor().set_names({name})
    for name, output in parameters.items():
        output.get_node().set_friendly_name(name)
        output.get_tensor().set_names({name})
    whole = openvino.Model(ends, [parameters[name].get_node() for name in inputs if name in parameters], "model")
    whole.set_rt_info(json.dumps(affinity), ["affinity"])
    openvino.save_model(whole, path, compress_to_fp16=False)


TARGET = Target(
    name="openvino",
    writes=f"stage0.xml, stage1.xml, ... with weights; {WHOLE} with rt_info 'affinity', which {SCRIPT} compiles for HETERO",
    lacks="CUDA, replicas and streams (compile a stage several times), bf16, operators that ONNX or OpenVINO does not have",
    checked="OpenVINO runs the stages one after the other, and the whole model on HETERO:CPU, with equal outputs",
    write=write,
    kinds=DEVICES,
    missing=lambda: missing_packages("export to openvino", (*ONNX, "openvino"), "autosplit[openvino]"),
)
