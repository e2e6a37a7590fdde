"""Compiles model.xml for HETERO, each operation on the device of its stage. Needs openvino, nothing else.

    from hetero import compile_whole
    compiled = compile_whole()                    # the folder that this file lies in

OpenVINO keeps the attribute "affinity" of an operation in memory only, so ``model.xml`` holds a table of them.
"""

import json
from pathlib import Path
from typing import Any

import openvino


def compile_whole(folder: str | Path | None = None, devices: str | None = None) -> Any:
    """The whole model, compiled for ``devices`` such as ``HETERO:GPU.0,CPU``; by default for those of the table."""
    folder = Path(folder) if folder is not None else Path(__file__).resolve().parent
    core = openvino.Core()
    model = core.read_model(folder / "model.xml")
    affinity = json.loads(model.get_rt_info(["affinity"]).astype(str))
    for op in model.get_ordered_ops():
        if (
            op.get_type_name() == "Parameter"
        ):  # HETERO wants every node to have a device: inputs and outputs get their neighbour's
            neighbour = next(iter(op.output(0).get_target_inputs())).get_node()
        else:
            neighbour = op.input_value(0).get_node() if op.get_type_name() == "Result" else op
        op.rt_info["affinity"] = affinity[neighbour.get_friendly_name()]
    chosen = devices or f"HETERO:{','.join(dict.fromkeys(affinity.values()))}"
    # The default precision of a device may be bf16 or f16.
    return core.compile_model(model, chosen, {"INFERENCE_PRECISION_HINT": "f32"})
