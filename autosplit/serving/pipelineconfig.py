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
from autosplit.running.modules import PythonFunction, StageFolder, check_allowed
from autosplit.running.pipeline import Pipeline
from autosplit.running.stage import StagePlacement
from autosplit.running.wiring import faults_of
from autosplit.serving.connections import Connections, ModulePorts, TensorPort
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import Inputs, Model, load_model
from autosplit.tracing.splitting import StageProgram, load_stage, save_stage, unsplit
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import Device, parse_bytes
from autosplit.values.samples import Precision, backend_fault

PLACING = ("threads", "queue_depth", "hang_s", "memory")
SETTINGS = ("backend", "precision", *PLACING)
"""Settings of a module: of its stage, how it is prepared, and of its placement (see ``StagePlacement``).

``memory`` is the memory of each replica, such as ``500MB``; without it, a stage holds its weights."""


@checked
class PipelineConfig(Connections):
    """Modules and their connections; ``build`` makes a Pipeline of them."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: dict[str, StageProgram] = {}
        """The stages in memory, by module; ``build`` saves them."""

    def add_stage(
        self, name: str, source: StageProgram | Path, devices: Sequence[Device], *, trust: bool = False, **settings: Any
    ) -> ModulePorts:
        """Add a stage, in memory or from its folder.

        Args:
            name: the name of the module.
            source: the stage, or the folder that holds it.
            devices: where its replicas run.
            trust: whether you trust the maker of the folder. Then native code in it is loaded, which inductor needs, and the
                stage may call every operator.
            settings: see ``SETTINGS``.
        Raises: PlanError: the name is taken, the folder holds no stage, or it calls an operator that is not allowed.
            BackendError: native code is not allowed.
        """
        backend, precision = _prepared(name, settings)
        if isinstance(source, StageProgram):
            folder = StageFolder(Path(name), backend, precision, source.packages, trust=True)
            added = self._add(StagePlacement(name, folder, source.inputs, source.outputs, ()), devices, settings)
            self.programs[name] = source
            return added
        folder = StageFolder(source, backend, precision, trust=trust)
        folder.require_trust()
        program = load_stage(source, trust=trust)
        folder = replace(folder, packages=program.packages)
        return self._add(StagePlacement(name, folder, program.inputs, program.outputs, ()), devices, settings)

    def add_model(
        self, name: str, model: Model | nn.Module, devices: Sequence[Device], inputs: Inputs | None = None, **settings: Any
    ) -> ModulePorts:
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
    ) -> ModulePorts:
        """Add a Python function of an allowed module by its import path; workers import it, the host does not.

        On a device with a memory cap the settings need ``memory``: the memory of a replica, such as ``500MB``.
        """
        check_allowed(path, allowed)
        _prepared(name, settings)
        reads, makes = listed(f"inputs of '{name}'", inputs, TensorSpec), listed(f"outputs of '{name}'", outputs, TensorSpec)
        return self._add(StagePlacement(name, PythonFunction(path, tuple(allowed)), reads, makes, ()), devices, settings)

    def __getitem__(self, name: str) -> ModulePorts:
        if name not in self.stages:
            raise PlanError(f"there is no module '{name!s:.200}'; the modules are: {', '.join(self.stages) or 'none'}")
        return ModulePorts(self, self.stages[name])

    def input(self, name: str) -> TensorPort:
        """An input of the pipeline; it exists once it is connected."""
        return TensorPort(self, "input", "", _named("input", name))

    def output(self, name: str) -> TensorPort:
        """An output of the pipeline; it exists once it is connected."""
        return TensorPort(self, "output", "", _named("output", name))

    def group(self, name: str) -> TensorPort:
        """A group of parameters that can be swapped while the pipeline runs."""
        return TensorPort(self, "parameter group", "", _named("parameter group", name))

    def verify(self) -> "PipelineConfig":
        """Return the config.

        Raises: PlanError: inputs left open, no output, tensors that do not fit; the message has every fault.
        """
        open_ports = [ModulePorts(self, stage).input(spec.name) for stage in self.stages.values() for spec in stage.inputs]
        faults = [f"{port} is left open" for port in open_ports if port.label not in self.fed]
        faults += [] if self.outputs else ["it has no outputs"]
        faults += faults_of(self._wired(), self.inputs, self._outputs())
        raise_faults(PlanError, "the pipeline is not complete", faults)
        return self

    def placements(self, folder: Path) -> list[StagePlacement]:
        """The stages for workers, in order; stages in memory are saved under ``folder``. Raises: PlanError, BackendError."""
        self.verify()
        return [self._ready(stage, folder) for stage in self._wired()]

    def network(self, folder: Path) -> dict[str, Any]:
        """Arguments of Pipeline, and of a network of a host: ``host.add_network("shop", **config.network(folder))``.

        Raises: PlanError, BackendError: as ``placements``.
        """
        stages = self.placements(folder)
        return {"stages": stages, "inputs": self.inputs, "outputs": self._outputs(), "groups": self.groups}

    def build(self, folder: Path, **settings: Any) -> Pipeline:
        """The pipeline, running; ``settings`` as in Pipeline. Stages in memory are saved under ``folder`` first."""
        return Pipeline(**self.network(folder), **settings)

    def __str__(self) -> str:
        lines = ["inputs"]
        for name in self.inputs:
            lines.append(f"  {name} -> {', '.join(self.targets(name))}")
        lines.append("modules")
        for name in self.order():
            stage = self.stages[name]
            kind = stage.module.path if isinstance(stage.module, PythonFunction) else f"stage, {stage.module.kind}"
            lines.append(f"  {name} ({kind}) on {' '.join(device.name for device in stage.devices)}")
        lines.append("connections")
        lines += [f"  {port.label} -> {label}" for label, port in self.fed.items() if port.kind == "module output"]
        lines.append("outputs")
        lines += [f"  {name} <- {port.label}" for name, port in self.outputs.items()]
        lines += ["parameter groups"] if self.groups else []
        lines += [f"  {name}: {', '.join(members)}" for name, members in self.groups.items()]
        return "\n".join(lines)

    def _add(self, stage: StagePlacement, devices: Sequence[Device], settings: Mapping[str, Any]) -> ModulePorts:
        name = stage.name
        if name in self.stages:
            raise PlanError(f"there is a module '{name}' already")
        places = listed(f"devices of '{name}'", devices, Device, "; machine.parse_device makes one of a name")
        placing = {key: settings[key] for key in PLACING if key in settings}
        held, faults = dict[str, int](), list[str]()
        try:
            if (memory := placing.pop("memory", None)) is not None:
                held = {device.name: parse_bytes(memory) for device in places}
        except UsageError as fault:
            faults.append(str(fault))
        stage = replace(stage, devices=places, memory_bytes=held, **placing)
        faults += stage.faults()
        for kind, specs in (("inputs", stage.inputs), ("outputs", stage.outputs)):
            twice = [one for one, count in Counter(spec.name for spec in specs).items() if count > 1]
            faults += [f"it has two {kind} that are called '{one}'; give each a name of its own" for one in twice]
        raise_faults(PlanError, f"module '{name}' cannot be added", faults)
        self.stages[name] = stage
        return ModulePorts(self, stage)

    def _outputs(self) -> list[str]:
        return [port.label for port in self.outputs.values()]

    def _wired(self) -> list[StagePlacement]:
        """The stages in order, their values called by the ports that make them; the names of inputs have no dot."""
        return [
            replace(
                self.stages[name],
                inputs=tuple(replace(spec, name=port.label) for spec, port in self.feeding(name)),
                outputs=tuple(replace(spec, name=f"{name}.{spec.name}") for spec in self.stages[name].outputs),
            )
            for name in self.order()
        ]

    def _ready(self, stage: StagePlacement, folder: Path) -> StagePlacement:
        """The stage, saved if it was in memory, and prepared for its backend."""
        module = stage.module
        if not isinstance(module, StageFolder):
            return stage
        if program := self.programs.get(stage.name):
            module = replace(module, folder=folder / stage.name)
            save_stage(program, module.folder)
        else:
            program = load_stage(module.folder, trust=module.trust)
        get_backend(module.backend).prepare(program, module.folder, module.precision)
        return replace(stage, module=module)


def _prepared(name: str, settings: Mapping[str, Any]) -> tuple[str, Precision]:
    """Backend and precision among the settings. Raises: PlanError: with every fault, a name or a setting that does not exist."""
    _named("module", name)
    backend, precision = settings.get("backend", "eager"), settings.get("precision", "f32")
    faults = [f"{key!r} is not a setting{close_names(key, SETTINGS)}" for key in settings if key not in SETTINGS]
    faults += filter(None, [backend_fault(backend)])
    if precision not in get_args(Precision):
        faults.append(f"precision {precision!r} does not exist, the precisions are {', '.join(get_args(Precision))}")
    raise_faults(PlanError, f"module '{name}' cannot be added", faults)
    return backend, precision


def _named(what: str, name: str) -> str:
    """The name. Raises: PlanError: it has other characters than letters, digits, - and _, or none."""
    if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
        raise PlanError(f"{what} name {name!r:.200} is not understood; use letters, digits, - and _")
    return name
