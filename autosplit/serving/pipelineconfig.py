"""PipelineConfig: modules connected by name, by hand or from a file, and turned into a pipeline.

::

    config = PipelineConfig()
    config.add_function("resize", "shop.images:resize", ["shop"], inputs=[image], outputs=[pixels], devices=[cpu0])
    config.add_stage("net", program, devices=[cpu1])
    config.input("image").connect(config["resize"].input("image"))
    config["resize"].output(0).connect(config["net"].input("pixels"))
    config["net"].output(0).connect(config.output("logits"))
    pipeline = config.build(folder)
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from torch import nn

from autosplit.arguments import checked
from autosplit.backends.base import get_backend
from autosplit.errors import PlanError, UsageError, close_names, listed, raise_faults
from autosplit.running.modules import Module, PythonFunction, StageFolder, check_allowed
from autosplit.running.pipeline import Pipeline
from autosplit.running.stage import StagePlacement
from autosplit.serving.connections import Connections, ModuleEntry, Port
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import Inputs, Model, load_model
from autosplit.tracing.splitting import StageProgram, load_stage, save_stage, unsplit
from autosplit.tracing.tensorspec import TensorSpec, spec_fault
from autosplit.values.machine import MAX_ON_CORE, Device, parse_bytes
from autosplit.values.samples import Precision, backend_fault

SETTINGS = ("backend", "precision", "threads", "queue_depth", "hang_s", "memory")
"""Settings of a module, as in ModuleEntry."""


@checked
class PipelineConfig:
    """Modules and their connections; ``build`` makes a Pipeline of them."""

    def __init__(self) -> None:
        self._connected = connected = Connections()
        self.modules, self.connections, self.groups = connected.modules, connected.fed, connected.groups
        self.inputs, self.outputs = connected.inputs, connected.outputs

    def add_stage(
        self,
        name: str,
        source: StageProgram | Path,
        devices: Sequence[Device],
        *,
        trust: bool = False,
        **settings: Any,
    ) -> ModuleEntry:
        """Add a stage, in memory or from its folder.

        Args:
            name: the name of the module.
            source: the stage, or the folder that holds it.
            devices: where its replicas run.
            trust: whether you trust the maker of the folder. Then native code in it is loaded, which inductor needs, and the
                stage may call every operator.
            settings: as in ModuleEntry.
        Raises: PlanError: the name is taken, the folder holds no stage, or it calls an operator that is not allowed.
            BackendError: native code is not allowed.
        """
        if isinstance(source, StageProgram):
            return self._add(name, source, source.inputs, source.outputs, devices, settings)
        backend, precision = settings.get("backend", "eager"), settings.get("precision", "f32")
        folder = StageFolder(source, backend, precision, trust=trust)
        folder.require_trust()
        program = load_stage(source, trust=trust)
        return self._add(name, folder, program.inputs, program.outputs, devices, settings)

    def add_model(
        self, name: str, model: Model | nn.Module, devices: Sequence[Device], inputs: Inputs | None = None, **settings: Any
    ) -> ModuleEntry:
        """Add a whole model as one stage: a Model, or a module (also one of torch.fx) with example ``inputs``.

        Raises: ModelError: the inputs are missing or do not fit. TraceError: it cannot be captured as one graph.
        """
        traced = trace(model if isinstance(model, Model) else load_model(model, inputs=inputs))
        return self.add_stage(name, replace(unsplit(traced), name=name), devices, **settings)

    def add_function(
        self,
        name: str,
        path: str,
        allowed: Sequence[str],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        devices: Sequence[Device],
        **settings: Any,
    ) -> ModuleEntry:
        """Add a Python function of an allowed module by its import path; workers import it, the host does not.

        On a device with a memory cap the settings need ``memory``: what a replica holds, such as ``500MB``.
        """
        check_allowed(path, allowed)
        return self._add(name, PythonFunction(path, tuple(allowed)), inputs, outputs, devices, settings)

    def __getitem__(self, name: str) -> ModuleEntry:
        if name not in self.modules:
            raise PlanError(f"there is no module '{name!s:.200}'; the modules are: {', '.join(self.modules) or 'none'}")
        return self.modules[name]

    def input(self, name: str) -> Port:
        """An input of the pipeline; it exists once it is connected."""
        return Port(self._connected, "input", "", _checked("input", name))

    def output(self, name: str) -> Port:
        """An output of the pipeline; it exists once it is connected."""
        return Port(self._connected, "output", "", _checked("output", name))

    def group(self, name: str) -> Port:
        """A group of parameters that can be swapped while the pipeline runs."""
        return Port(self._connected, "parameter group", "", _checked("parameter group", name))

    def order(self) -> list[str]:
        """The modules so that each comes after those that feed it, otherwise as they were added."""
        return self._connected.order()

    def verify(self) -> "PipelineConfig":
        """Return the config.

        Raises: PlanError: inputs left open, no output, no device, too many replicas on one; the message has every fault.
        """
        faults = [
            f"{entry.input(spec.name)} is left open"
            for entry in self.modules.values()
            for spec in entry.inputs
            if f"{entry.name}.{spec.name}" not in self.connections
        ]
        faults += [f"module '{entry.name}' is on no device" for entry in self.modules.values() if not entry.devices]
        faults += [
            f"module '{entry.name}' has {count} replicas on '{device}', and at most {MAX_ON_CORE} are allowed; name more devices"
            for entry in self.modules.values()
            for device, count in Counter(device.name for device in entry.devices).items()
            if count > MAX_ON_CORE
        ]
        faults += [] if self.outputs else ["it has no outputs"]
        raise_faults(PlanError, "the pipeline is not complete", faults)
        return self

    def placements(self, folder: Path) -> list[StagePlacement]:
        """The stages for workers, in order; stages in memory are saved under ``folder``. Raises: PlanError, BackendError."""
        self.verify()
        stages = []
        for name in self.order():
            entry = self.modules[name]
            values = [port.label for port in self._connected.feeding(name)]  # the names of inputs have no dot
            inputs = tuple(replace(spec, name=value) for spec, value in zip(entry.inputs, values, strict=True))
            outputs = tuple(replace(spec, name=f"{name}.{spec.name}") for spec in entry.outputs)
            placed = entry.devices, entry.threads, entry.queue_depth, entry.hang_s
            held = {} if entry.memory is None else {device.name: parse_bytes(entry.memory) for device in entry.devices}
            stages.append(StagePlacement(name, _module(entry, folder), inputs, outputs, *placed, memory_bytes=held))
        return stages

    def network(self, folder: Path) -> dict[str, Any]:
        """Arguments of Pipeline, and of a network of a host: ``host.add_network("shop", **config.network(folder))``.

        Raises: PlanError, BackendError: as ``placements``.
        """
        outputs = [port.label for port in self.outputs.values()]
        return {"stages": self.placements(folder), "inputs": self.inputs, "outputs": outputs, "groups": self.groups}

    def build(self, folder: Path, **settings: Any) -> Pipeline:
        """The pipeline, running; ``settings`` as in Pipeline. Stages in memory are saved under ``folder`` first."""
        return Pipeline(**self.network(folder), **settings)

    def __str__(self) -> str:
        lines = ["inputs"]
        for name in self.inputs:
            lines.append(f"  {name} -> {', '.join(self._connected.targets(name))}")
        lines.append("modules")
        for name in self.order():
            entry = self.modules[name]
            devices = " ".join(device.name for device in entry.devices) or "no device"
            kind = entry.source.path if isinstance(entry.source, PythonFunction) else f"stage, {entry.backend}"
            lines.append(f"  {name} ({kind}) on {devices}")
        lines.append("connections")
        lines += [f"  {port.label} -> {label}" for label, port in self.connections.items() if port.kind == "module output"]
        lines.append("outputs")
        lines += [f"  {name} <- {port.label}" for name, port in self.outputs.items()]
        lines += ["parameter groups"] if self.groups else []
        lines += [f"  {name}: {', '.join(members)}" for name, members in self.groups.items()]
        return "\n".join(lines)

    def _add(
        self,
        name: str,
        source: StageProgram | StageFolder | PythonFunction,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        devices: Sequence[Device],
        settings: Mapping[str, Any],
    ) -> ModuleEntry:
        _checked("module", name)
        reads, makes = listed(f"inputs of '{name}'", inputs, TensorSpec), listed(f"outputs of '{name}'", outputs, TensorSpec)
        places = listed(f"devices of '{name}'", devices, Device, "; machine.parse_device makes one of a name")
        faults = [f"{key!r} is not a setting{close_names(key, SETTINGS)}" for key in settings if key not in SETTINGS]
        faults += [backend_fault(settings.get("backend", "eager")) or ""]
        if (precision := settings.get("precision", "f32")) not in get_args(Precision):
            faults.append(f"precision {precision!r} does not exist, the precisions are {', '.join(get_args(Precision))}")
        faults += [spec_fault(spec) for spec in (*reads, *makes)]
        faults += [_threads_fault(settings.get("threads"), device) for device in places]
        faults += [_memory_fault(settings.get("memory"))]
        raise_faults(PlanError, f"module '{name}' cannot be added", [fault for fault in faults if fault])
        entry = ModuleEntry(self._connected, name, source, reads, makes, places, **settings)
        if entry.name in self.modules:
            raise PlanError(f"there is a module '{entry.name}' already")
        for kind, specs in (("inputs", entry.inputs), ("outputs", entry.outputs)):
            twice = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
            if twice:
                raise PlanError(f"module '{entry.name}' has two {kind} that are called '{twice[0]}'; give each a name of its own")
        self.modules[entry.name] = entry
        return entry


def _threads_fault(threads: object, device: Device) -> str:
    """Why a device cannot run so many threads, '' if it can."""
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        return f"threads must be a whole number of at least 1, but is {threads!r}"
    if threads and device.cores and threads > len(device.cores):
        return f"threads is {threads}, and '{device.name}' has {len(device.cores)} core{'s' * (len(device.cores) != 1)}"
    return ""


def _memory_fault(memory: str | int | None) -> str:
    """Why this is no size of memory, '' if it is one or none is given."""
    try:
        return "" if memory is None or parse_bytes(memory) else "memory must be at least 1 byte, but is 0"
    except UsageError as fault:
        return str(fault)


def _checked(what: str, name: str) -> str:
    """The name. Raises: PlanError: it has other characters than letters, digits, - and _, or none."""
    if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
        raise PlanError(f"{what} name {name!r:.200} is not understood; use letters, digits, - and _")
    return name


def _module(entry: ModuleEntry, folder: Path) -> Module:
    """The module for workers: a stage in memory is saved, and every stage is prepared for its backend."""
    if isinstance(entry.source, PythonFunction):
        return entry.source
    program, place, trust = entry.source, folder / entry.name, True
    if isinstance(program, StageFolder):
        place, trust, program = program.folder, program.trust, load_stage(program.folder, trust=program.trust)
    else:
        save_stage(program, place)
    get_backend(entry.backend).prepare(program, place, entry.precision)
    return StageFolder(place, entry.backend, entry.precision, program.packages, trust=trust)


def config_of(
    stages: Sequence[tuple[StageProgram, Sequence[Device], dict[str, Any]]], inputs: Sequence[str], outputs: Sequence[str]
) -> PipelineConfig:
    """A config from the stages of a plan (program, devices, settings), connected by the names of their values.

    Raises: UsageError: an output of the model is one of its inputs; a config has no such connection.
    """
    config = PipelineConfig()
    makers: dict[str, Port] = {name: config.input(name) for name in inputs}
    for program, devices, settings in stages:
        entry = config.add_stage(program.name, program, devices, **settings)
        makers |= {spec.name: entry.output(spec.name) for spec in program.outputs}
    for program, _, _ in stages:
        for spec in program.inputs:
            makers[spec.name].connect(config[program.name].input(spec.name))
    for name in outputs:
        if makers[name].kind == "input":
            raise UsageError(f"output '{name}' is an input of the model as it is: leave it out, and pass it around the pipeline")
        makers[name].connect(config.output(name))
    return config
