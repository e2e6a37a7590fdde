"""A PipelineConfig as a folder: ``pipeline.yaml`` and the stages beside it, so that the folder can be moved.

Reading one runs no code: a stage is data, a function is only named until a worker imports it from an allowed module, and
native code in a stage's folder is refused unless it is allowed. Nothing outside the folder is read or written.
"""

import itertools
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from autosplit.backends.base import Precision
from autosplit.errors import PlanError
from autosplit.files import read_mapping, validated, write_atomic
from autosplit.parsing import shown
from autosplit.running.modules import PythonFunction, StageFolder, check_allowed
from autosplit.running.stage import HANG_S
from autosplit.serving.connections import TensorPort
from autosplit.serving.pipelineconfig import SETTINGS, PipelineConfig
from autosplit.tracing.operators import WRITING, allowed_graph
from autosplit.tracing.splitting import load_stage, save_stage
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import parse_device
from autosplit.values.plan import QUEUE_DEPTH

SCHEMA = 1
FILE = "pipeline.yaml"


_Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Module(_Strict):
    stage: _Name | None = None
    function: _Name | None = None
    inputs: list[TensorSpec] = []
    outputs: list[TensorSpec] = []
    devices: list[str] = Field(min_length=1)
    backend: str = "eager"
    precision: Precision = "f32"
    threads: int | None = None
    queue_depth: int = QUEUE_DEPTH
    hang_s: float | None = HANG_S
    memory: str | int | None = None


class _File(_Strict):
    schema_: int = Field(alias="schema")
    modules: dict[_Name, _Module]
    inputs: dict[_Name, list[_Name]] = {}
    connections: list[tuple[_Name, _Name]] = []
    outputs: dict[_Name, _Name]
    groups: dict[_Name, list[_Name]] = {}


def save_config(config: PipelineConfig, folder: Path, *, trust: bool = False) -> None:
    """Write the config and its stages to ``folder``; with ``trust``, also stages whose operators need trust in their maker.

    Raises: PlanError: the config is not complete, or an operator needs ``trust``. OSError: no room.
    """
    config.verify()
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "schema": SCHEMA,
        "modules": {name: _module(config, name, folder, trust) for name in config.stages},
        "inputs": {name: config.targets(name) for name in config.inputs},
        "connections": [[port.label, label] for label, port in config.fed.items() if port.kind != "input"],
        "outputs": {name: port.label for name, port in config.outputs.items()},
        "groups": config.groups,
    }
    write_atomic(folder / FILE, yaml.safe_dump(data, sort_keys=False, width=120))


def load_config(folder: Path, allowed: Sequence[str] = (), *, trust: bool = False) -> PipelineConfig:
    """Read the config in ``folder``.

    Args:
        folder: as ``save_config`` wrote it, here or on another machine.
        allowed: modules (or packages) whose functions and operators may be run; the file cannot allow any itself.
        trust: whether you trust the maker of the folder. Then native code in it runs, which the backend inductor needs, and
            stages may call every operator.
    Raises: PlanError: the file is not understood, its connections do not hold, a path leads out of the folder, or a stage
        calls an operator that needs trust. UsageError: a function or custom operator is not in an allowed module.
        BackendError: native code is not allowed.
    """
    path = folder / FILE
    data = read_mapping(path, "pipeline", SCHEMA, PlanError)
    content = validated(_File, data, PlanError, f"pipeline file '{path}' is not understood")
    config = PipelineConfig()
    for name, entry in content.modules.items():
        _add(config, folder, name, entry, allowed, trust)
    for name, targets in content.inputs.items():
        for target in targets:
            config.input(name).connect(_port(config, target, "input"))
    for source, target in content.connections:
        _port(config, source, "output").connect(_port(config, target, "input"))
    for name, source in content.outputs.items():
        _port(config, source, "output").connect(config.output(name))
    for name, members in content.groups.items():
        for member in members:
            config.group(name).connect(config[member].parameters)
    return config.verify()


def _module(config: PipelineConfig, name: str, folder: Path, trust: bool) -> dict[str, Any]:
    """The row of a module, whose stage is written to the folder."""
    stage, module = config.stages[name], config.stages[name].module
    row = {
        "devices": [device.name for device in stage.devices],
        "threads": stage.threads,
        "queue_depth": stage.queue_depth,
        "hang_s": stage.hang_s,
        "memory": max(stage.memory_bytes.values(), default=None),
    }
    if isinstance(module, PythonFunction):
        return {"function": module.path, "inputs": _plain(stage.inputs), "outputs": _plain(stage.outputs), **row}
    assert isinstance(module, StageFolder)
    if program := config.programs.get(name):
        if not trust:
            allowed_graph(program.module.graph, f"stage '{name}' is not for everybody: {WRITING}")
        save_stage(program, folder / name)
    elif module.folder.resolve() != (folder / name).resolve():
        shutil.copytree(module.folder, folder / name, dirs_exist_ok=True)
    return {"stage": name, "backend": module.backend, "precision": module.precision, **row}


def _plain(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{**asdict(spec), "shape": list(spec.shape), "stride": list(spec.stride)} for spec in specs]


def _add(config: PipelineConfig, folder: Path, name: str, row: _Module, allowed: Sequence[str], trust: bool) -> None:
    devices = [parse_device(device) for device in row.devices]
    settings = row.model_dump(include=set(SETTINGS))
    if (row.stage is None) == (row.function is None):
        raise PlanError(f"module '{name}' must name a stage or a function, one of the two")
    if row.stage is not None:
        place = _inside(folder, row.stage)
        for package in load_stage(place, trust=trust).packages:
            check_allowed(f"{package}:operator", allowed)
        config.add_stage(name, place, devices, trust=trust, **settings)
    else:
        config.add_function(name, str(row.function), allowed, row.inputs, row.outputs, devices, **settings)


def _inside(folder: Path, stage: str) -> Path:
    """The folder of a stage. Raises: PlanError: it, or a link in it, leads out of the pipeline's folder."""
    place, root = folder / stage, folder.resolve()
    if "\0" in stage:
        raise PlanError(f"stage {shown(stage)} of pipeline folder '{folder}' is not a name of a folder")
    for path in itertools.chain([place], place.rglob("*")):  # a place outside is refused before it is searched
        if not path.resolve().is_relative_to(root):
            raise PlanError(f"stage '{stage}' of pipeline folder '{folder}' leads out of it, to '{path.resolve()}'")
    return place


def _port(config: PipelineConfig, label: str, side: Literal["input", "output"]) -> TensorPort:
    module, _, name = label.partition(".")
    return config[module].input(name) if side == "input" else config[module].output(name)
