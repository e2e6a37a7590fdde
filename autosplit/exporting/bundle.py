"""Export for ONNX Runtime: one ONNX file a stage, a manifest with the connections, and a loader of a hundred lines.

The folder runs where only numpy and onnxruntime are installed. Inputs and outputs have their logical shapes: strides
are not kept.
"""

import json
import platform
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autosplit.backends.base import get_backend
from autosplit.backends.onnxfile import write_onnx
from autosplit.errors import PlanError, UsageError, raise_faults
from autosplit.exporting.containers import output_containers
from autosplit.files import hidden_beside, unwritable
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import TensorSpec

SCHEMA = 2
LOADER = "loader.py"
MANIFEST = "manifest.json"


def export(traced: Traced, programs: Sequence[StageProgram], folder: Path) -> Path:
    """Write the stages to ``folder``, which must not exist yet or be empty; it appears whole or not at all.

    A folder that is there stays the same one, for it may be a link, a mount or the current one; its manifest comes last.

    Args:
        traced: the model.
        programs: its stages in pipeline order: each reads model inputs and what stages before it made.
        folder: where to.
    Returns: the folder.
    Raises:
        MissingExtraError: onnx, onnxscript or onnxruntime is not installed.
        UsageError: the folder holds something already, or the model returns a container that cannot be built without its class.
        PlanError: a value is read before it is made, made twice, or of a dtype that numpy does not have.
        BackendError: a stage holds an op that ONNX cannot express.
    """
    folder = Path(folder)
    require_free(folder)
    graph = traced.graph
    manifest = describe(programs, [traced.specs[name] for name in graph.inputs], graph.outputs, graph.name)
    manifest["answer"] = output_containers(traced)
    there = folder.exists()
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = hidden_beside(folder / "export" if there else folder)
    building.mkdir()
    try:
        for program, entry in zip(programs, manifest["stages"], strict=True):
            write_onnx(program, building / entry["file"], dense=False)
        shutil.copyfile(Path(__file__).with_name("onnxruntime_loader.py"), building / LOADER)
        (building / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if there:
            for file in sorted(building.iterdir(), key=lambda file: file.name == MANIFEST):
                file.rename(folder / file.name)
        else:
            building.replace(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def require_free(folder: Path) -> None:
    """Raises: UsageError: the folder holds something already, or cannot be written. MissingExtraError: as ``export``."""
    get_backend("onnxruntime")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"export folder '{folder}' holds something already: give another one, or remove it")
    if why := unwritable(folder):
        raise UsageError(f"export folder '{folder}' cannot be written: {why}; give another one")


def describe(
    programs: Sequence[StageProgram], inputs: Sequence[TensorSpec], outputs: Sequence[str], model: str
) -> dict[str, Any]:
    """The manifest: inputs, outputs, and for each stage its file, values, where each input comes from and what it may drop.

    Raises: PlanError: a value is read before it is made, made twice, or of a dtype that numpy does not have.
    """
    maker: dict[str, str] = {}
    specs = {spec.name: spec for spec in inputs}
    faults = []
    for program in programs:
        faults += [
            f"stage '{program.name}' reads '{spec.name}', which no stage before it makes"
            for spec in program.inputs
            if spec.name not in specs
        ]
        for spec in program.outputs:
            if spec.name in specs:
                faults.append(f"stage '{program.name}' makes '{spec.name}', which is there before it runs")
            specs[spec.name] = spec
            maker[spec.name] = program.name
    faults += [f"output '{name}' is made by no stage" for name in outputs if name not in maker]
    faults += [f"'{spec.name}' is {spec.dtype}, which numpy does not have" for spec in specs.values() if not spec.in_numpy]
    raise_faults(PlanError, f"the stages of '{model}' do not fit together", faults)
    return {
        "schema": SCHEMA,
        "model": model,
        "inputs": [_value(spec) for spec in inputs],
        "outputs": [_value(specs[name]) for name in outputs],
        "stages": [
            {
                "name": program.name,
                "file": f"stage{position}.onnx",
                "inputs": [{**_value(spec), "from": maker.get(spec.name)} for spec in program.inputs],
                "outputs": [_value(spec) for spec in program.outputs],
                "drop": _dead_after(programs, position, outputs),
            }
            for position, program in enumerate(programs)
        ],
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")},
        },
    }


def _value(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype}


def _dead_after(programs: Sequence[StageProgram], position: int, outputs: Sequence[str]) -> list[str]:
    """The values that are there once the stage at ``position`` has run, and that nothing after it reads."""
    here = {spec.name: None for spec in (*programs[position].inputs, *programs[position].outputs)}
    later = {spec.name for program in programs[position + 1 :] for spec in program.inputs}
    return [name for name in here if name not in later and name not in outputs]
