"""PipelineConfig: modules joined by name, by hand or from a file, checked at every connection, turned into placements.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Literal

from torch import nn

from autosplit.backends.base import Precision, get_backend
from autosplit.errors import PlanError, UsageError, listed, raise_faults
from autosplit.running.modules import Module, PythonFunction, StageFolder, check_allowed
from autosplit.running.pipeline import Pipeline
from autosplit.running.wiring import StagePlacement
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import Inputs, Model, load_model
from autosplit.tracing.splitting import StageProgram, load_stage, save_stage, unsplit
from autosplit.tracing.tensorspec import TensorSpec, layout
from autosplit.values.machine import Device

Kind = Literal["input", "output", "module input", "module output", "parameter group", "module parameters"]

ALLOWED: dict[Kind, tuple[Kind, ...]] = {
    "input": ("module input",),
    "module output": ("module input", "output"),
    "parameter group": ("module parameters",),
}
"""What may be connected to what."""

_WRONG = {
    ("input", "output"): "pass it around the pipeline instead",
    ("output", "module input"): "an output of the pipeline is no source; connect the module output that makes it",
    ("module input", "module input"): "connect what feeds the first to the second as well",
    ("module output", "module output"): "connect an output to an input",
}


@dataclass(frozen=True, slots=True)
class Port:
    """Something that can be connected; made by a config and by its modules."""

    config: "PipelineConfig"
    kind: Kind
    module: str
    name: str

    def connect(self, target: "Port") -> None:
        """Let the values of this port flow to ``target``. Raises: PlanError: they do not go together; nothing changed."""
        self.config._connect(self, target)

    @property
    def label(self) -> str:
        """The port in messages and files: ``net.pixels`` or ``image``."""
        return f"{self.module}.{self.name}" if self.module else self.name

    def __str__(self) -> str:
        return f"{self.kind} '{self.label}'"


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """A module of a config, with its placement. ``source`` is a stage in memory until the config is saved."""

    config: "PipelineConfig"
    name: str
    source: StageProgram | StageFolder | PythonFunction
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    devices: tuple[Device, ...]
    backend: str = "eager"
    precision: Precision = "f32"
    threads: int | None = None
    queue_depth: int = 4
    hang_s: float | None = 300.0

    def input(self, name: str) -> Port:
        """The input called ``name``. Raises: PlanError: there is none."""
        return Port(self.config, "module input", self.name, self._known("input", name, self.inputs))

    def output(self, which: int | str) -> Port:
        """The output by position or by name. Raises: PlanError: there is none."""
        if isinstance(which, int):
            if not 0 <= which < len(self.outputs):
                raise PlanError(f"module '{self.name}' has no output {which}; it has {len(self.outputs)}")
            which = self.outputs[which].name
        return Port(self.config, "module output", self.name, self._known("output", which, self.outputs))

    @property
    def parameters(self) -> Port:
        """What a parameter group is connected to."""
        return Port(self.config, "module parameters", self.name, "parameters")

    def _known(self, what: str, name: str, specs: Sequence[TensorSpec]) -> str:
        if name not in [spec.name for spec in specs]:
            known = ", ".join(spec.name for spec in specs) or "none"
            raise PlanError(f"module '{self.name}' has no {what} '{name}'; its {what}s are: {known}")
        return name


class PipelineConfig:
    """Modules and their connections; ``build`` makes a Pipeline of it."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleEntry] = {}
        self.connections: dict[str, Port] = {}
        """Label of each fed module input to the port that feeds it."""
        self.outputs: dict[str, Port] = {}
        self.inputs: list[str] = []
        self.groups: dict[str, list[str]] = {}

    def add_stage(
        self,
        name: str,
        source: StageProgram | Path,
        devices: Sequence[Device],
        *,
        allow_native: bool = False,
        **settings: Any,
    ) -> ModuleEntry:
        """Add a stage, in memory or from its folder.

        Args:
            name: what to call it.
            source: the stage, or the folder that holds it.
            devices: where its replicas run.
            allow_native: whether native code in the folder may be loaded (backend inductor).
            settings: as in ModuleEntry.
        Raises: PlanError: the name is taken, or the folder holds no stage. BackendError: native code is not allowed.
        """
        if isinstance(source, StageProgram):
            return self._add(name, source, source.inputs, source.outputs, devices, settings)
        backend, precision = settings.get("backend", "eager"), settings.get("precision", "f32")
        folder = StageFolder(source, backend, precision, allow_native=allow_native)
        folder.require_trust()
        program = load_stage(source)
        return self._add(name, folder, program.inputs, program.outputs, devices, settings)

    def add_model(
        self, name: str, model: Model | nn.Module, devices: Sequence[Device], inputs: Inputs | None = None, **settings: Any
    ) -> ModuleEntry:
        """Add a whole model as one stage; a module, also one of torch.fx, with example ``inputs`` that fix its shapes.

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
        """Add a Python function by its import path, from a module that is allowed; workers import it, the host does not."""
        check_allowed(path, allowed)
        return self._add(name, PythonFunction(path, tuple(allowed)), inputs, outputs, devices, settings)

    def __getitem__(self, name: str) -> ModuleEntry:
        if name not in self.modules:
            raise PlanError(f"there is no module '{name}'; the modules are: {', '.join(self.modules) or 'none'}")
        return self.modules[name]

    def input(self, name: str) -> Port:
        """An input of the pipeline; it exists once it is connected."""
        return Port(self, "input", "", self._plain("input", name))

    def output(self, name: str) -> Port:
        """An output of the pipeline; it exists once it is connected."""
        return Port(self, "output", "", self._plain("output", name))

    def group(self, name: str) -> Port:
        """A group of parameters that can be swapped while the pipeline runs."""
        return Port(self, "parameter group", "", self._plain("parameter group", name))

    def order(self) -> list[str]:
        """The modules so that each stands after those that feed it, otherwise as they were added."""
        before = {name: {port.module for port in self._feeds(name) if port.module} for name in self.modules}
        return list(TopologicalSorter(before).static_order())

    def verify(self) -> "PipelineConfig":
        """Return the config, or raise PlanError with every fault: inputs left open, no output, no device."""
        faults = [
            f"{entry.input(spec.name)} is left open"
            for entry in self.modules.values()
            for spec in entry.inputs
            if f"{entry.name}.{spec.name}" not in self.connections
        ]
        faults += [f"module '{entry.name}' is on no device" for entry in self.modules.values() if not entry.devices]
        faults += [] if self.outputs else ["it has no outputs"]
        raise_faults(PlanError, "the pipeline is not complete", faults)
        return self

    def placements(self, folder: Path) -> list[StagePlacement]:
        """What workers run, in order; stages in memory are saved under ``folder``. Raises: PlanError, BackendError."""
        self.verify()
        stages = []
        for name in self.order():
            entry = self.modules[name]
            values = [port.label for port in self._feeds(name)]  # the names of inputs have no dot
            inputs = tuple(replace(spec, name=value) for spec, value in zip(entry.inputs, values, strict=True))
            outputs = tuple(replace(spec, name=f"{name}.{spec.name}") for spec in entry.outputs)
            placed = entry.devices, entry.threads, entry.queue_depth, entry.hang_s
            stages.append(StagePlacement(name, _module(entry, folder), inputs, outputs, *placed))
        return stages

    def network(self, folder: Path) -> dict[str, Any]:
        """What a Pipeline is made of, and a network of a host: ``host.add_network("shop", **config.network(folder))``.

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
            targets = [label for label, port in self.connections.items() if port.kind == "input" and port.name == name]
            lines.append(f"  {name} -> {', '.join(targets)}")
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
        self._plain("module", name)
        reads, makes = listed(f"inputs of '{name}'", inputs, TensorSpec), listed(f"outputs of '{name}'", outputs, TensorSpec)
        places = listed(f"devices of '{name}'", devices, Device, "; machine.parse_device makes one of a name")
        entry = ModuleEntry(self, name, source, reads, makes, places, **settings)
        if entry.name in self.modules:
            raise PlanError(f"there is a module '{entry.name}' already")
        for kind, specs in (("inputs", entry.inputs), ("outputs", entry.outputs)):
            twice = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
            if twice:
                raise PlanError(f"module '{entry.name}' has two {kind} that are called '{twice[0]}'; give each a name of its own")
        self.modules[entry.name] = entry
        return entry

    def _plain(self, what: str, name: str) -> str:
        if not name or not name.replace("_", "").replace("-", "").isalnum():
            raise PlanError(f"{what} name '{name}' is not understood; use letters, digits, - and _")
        return name

    def _feeds(self, module: str) -> Iterator[Port]:
        """The ports that feed the inputs of a module, in order, where connected."""
        labels = (f"{module}.{spec.name}" for spec in self.modules[module].inputs)
        return (self.connections[label] for label in labels if label in self.connections)

    def _connect(self, source: Port, target: Port) -> None:
        refusal = self._refusal(source, target)
        if refusal:
            raise PlanError(f"cannot connect {source} to {target}: {refusal}")
        if source.kind == "parameter group":
            self.groups.setdefault(source.name, []).append(target.module)
        elif target.kind == "output":
            self.outputs[target.name] = source
        else:
            if source.kind == "input" and source.name not in self.inputs:
                self.inputs.append(source.name)
            self.connections[target.label] = source

    def _refusal(self, source: Port, target: Port) -> str | None:
        """Why the two do not go together, or None."""
        if source.config is not self or target.config is not self:
            return "they belong to two configs"
        if target.kind not in ALLOWED.get(source.kind, ()):
            kinds = [f"{kind.removesuffix('s')}s" for kind in ALLOWED.get(source.kind, ())]
            places = f"{' or '.join(kinds)} only" if kinds else "nothing"
            return _WRONG.get((source.kind, target.kind), f"{source} feeds {places}")
        if source.kind == "parameter group":
            if isinstance(self.modules[target.module].source, PythonFunction):
                return f"module '{target.module}' is a function and has no parameters"
            taken = [name for name, members in self.groups.items() if target.module in members]
            return f"they are in group '{taken[0]}' already" if taken else None
        if source.module and source.module == target.module:
            return "a module cannot feed itself"
        fed = self.outputs.get(target.name) if target.kind == "output" else self.connections.get(target.label)
        if fed is not None:
            return f"{target} is fed by {fed} already"
        return self._misfit(source, target) or self._cycle(source, target)

    def _misfit(self, source: Port, target: Port) -> str | None:
        """How the types differ, or None; what an input of the pipeline carries is known once it is connected."""
        made, wanted = self._spec(source), self._spec(target)
        if made is None or wanted is None or (made.shape, made.dtype) == (wanted.shape, wanted.dtype):
            return None
        return f"the one is {layout(made)} and the other {layout(wanted)}"

    def _spec(self, port: Port) -> TensorSpec | None:
        if port.kind == "input":
            known = [label for label, source in self.connections.items() if source == port]
            if not known:
                return None
            module, _, name = known[0].partition(".")
            return next(spec for spec in self.modules[module].inputs if spec.name == name)
        if port.kind == "output":
            return None
        entry = self.modules[port.module]
        return next(spec for spec in (entry.inputs if port.kind == "module input" else entry.outputs) if spec.name == port.name)

    def _cycle(self, source: Port, target: Port) -> str | None:
        """The circle that the connection would close, or None."""
        if not source.module or not target.module:
            return None
        paths = [[source.module]]
        while paths:
            path = paths.pop()
            if path[-1] == target.module:
                return f"that makes a cycle: {' -> '.join([*reversed(path), target.module])}"
            paths += [[*path, port.module] for port in self._feeds(path[-1]) if port.module]
        return None


def _module(entry: ModuleEntry, folder: Path) -> Module:
    """What a worker loads; a stage in memory is saved, and every stage prepared for its backend."""
    if isinstance(entry.source, PythonFunction):
        return entry.source
    program, place, allow_native = entry.source, folder / entry.name, True
    if isinstance(program, StageFolder):
        place, allow_native, program = program.folder, program.allow_native, load_stage(program.folder)
    else:
        save_stage(program, place)
    get_backend(entry.backend).prepare(program, place, entry.precision)
    return StageFolder(place, entry.backend, entry.precision, program.packages, allow_native=allow_native)


def config_of(
    stages: Sequence[tuple[StageProgram, Sequence[Device], dict[str, Any]]], inputs: Sequence[str], outputs: Sequence[str]
) -> PipelineConfig:
    """A config from the stages of a plan (program, devices, settings), connected by the names of their values.

    Raises: UsageError: an output of the model is an input as it is; a config has no such connection.
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
