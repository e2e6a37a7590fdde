"""Connections between the modules of a PipelineConfig: what may feed what, checked at each connection."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Literal

from autosplit.backends.base import Precision
from autosplit.errors import PlanError
from autosplit.running.modules import PythonFunction, StageFolder
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import TensorSpec, layout
from autosplit.values.machine import Device

Kind = Literal["input", "output", "module input", "module output", "parameter group", "module parameters"]

ALLOWED: dict[Kind, tuple[Kind, ...]] = {
    "input": ("module input",),
    "module output": ("module input", "output"),
    "parameter group": ("module parameters",),
}
"""Which kinds of port a kind of port may feed."""

_WRONG = {
    ("input", "output"): "pass it around the pipeline instead",
    ("output", "module input"): "an output of the pipeline feeds nothing; connect the module output that makes it",
    ("module input", "module input"): "connect what feeds the first to the second as well",
    ("module output", "module output"): "connect an output to an input",
}


@dataclass(frozen=True, slots=True)
class Port:
    """An end of a connection; made by a config and by its modules."""

    connections: "Connections"
    kind: Kind
    module: str
    name: str
    spec: TensorSpec | None = None
    """The type of the values of a module's input or output."""

    def connect(self, target: "Port") -> None:
        """Let the values of this port flow to ``target``. Raises: PlanError: they do not fit together; nothing changed."""
        self.connections.connect(self, target)

    @property
    def label(self) -> str:
        """The port in messages and files: ``net.pixels`` or ``image``."""
        return f"{self.module}.{self.name}" if self.module else self.name

    def __str__(self) -> str:
        return f"{self.kind} '{self.label}'"


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """A module of a config, with its placement.

    ``source`` is a stage in memory until the config is saved. ``memory`` is what each replica holds, such as ``500MB``; None for
    the bytes of its weights.
    """

    connections: "Connections"
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
    memory: str | int | None = None

    def input(self, name: str) -> Port:
        """The input called ``name``. Raises: PlanError: there is none."""
        return self._port("module input", name, self.inputs)

    def output(self, which: int | str) -> Port:
        """The output by position or by name. Raises: PlanError: there is none."""
        if isinstance(which, int):
            if not 0 <= which < len(self.outputs):
                raise PlanError(f"module '{self.name}' has no output {which}; it has {len(self.outputs)}")
            which = self.outputs[which].name
        return self._port("module output", which, self.outputs)

    @property
    def parameters(self) -> Port:
        """The port for a parameter group."""
        return Port(self.connections, "module parameters", self.name, "parameters")

    def _port(self, kind: Kind, name: str, specs: Sequence[TensorSpec]) -> Port:
        spec = next((spec for spec in specs if spec.name == name), None)
        if spec is None:
            what, known = kind.removeprefix("module "), ", ".join(spec.name for spec in specs) or "none"
            raise PlanError(f"module '{self.name}' has no {what} '{name!s:.200}'; its {what}s are: {known}")
        return Port(self.connections, kind, self.name, name, spec)


class Connections:
    """The modules of a config and what feeds each of their inputs.

    Attributes:
        modules: by name, in the order in which they were added.
        fed: label of each fed module input to the port that feeds it.
        outputs: name of each output of the pipeline to the port that feeds it.
        inputs: names of the inputs of the pipeline, in the order of their first connection.
        groups: name of each parameter group to the names of its modules.
    """

    def __init__(self) -> None:
        self.modules: dict[str, ModuleEntry] = {}
        self.fed: dict[str, Port] = {}
        self.outputs: dict[str, Port] = {}
        self.inputs: list[str] = []
        self.groups: dict[str, list[str]] = {}
        self._carried: dict[str, TensorSpec | None] = {}
        """The type of each input of the pipeline, which follows from its first connection."""

    def connect(self, source: Port, target: Port) -> None:
        """Connect two ports. Raises: PlanError: they do not fit together; nothing changed."""
        if not isinstance(target, Port):
            raise PlanError(
                f"cannot connect {source} to {target!r}: a port is expected, such as config['net'].input('x') "
                "or config.output('y')"
            )
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
                self._carried[source.name] = target.spec
            self.fed[target.label] = source

    def feeding(self, module: str) -> Iterator[Port]:
        """The ports that feed the inputs of a module, in order; inputs that are not connected are left out."""
        labels = (f"{module}.{spec.name}" for spec in self.modules[module].inputs)
        return (self.fed[label] for label in labels if label in self.fed)

    def order(self) -> list[str]:
        """The modules so that each comes after those that feed it, otherwise as they were added."""
        before = {name: {port.module for port in self.feeding(name) if port.module} for name in self.modules}
        return list(TopologicalSorter(before).static_order())

    def targets(self, name: str) -> list[str]:
        """Labels of the module inputs that an input of the pipeline feeds."""
        return [label for label, port in self.fed.items() if port.kind == "input" and port.name == name]

    def _refusal(self, source: Port, target: Port) -> str | None:
        """Why the two ports do not fit together, or None."""
        if source.connections is not self or target.connections is not self:
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
        feeder = self.outputs.get(target.name) if target.kind == "output" else self.fed.get(target.label)
        if feeder is not None:
            return f"{target} is fed by {feeder} already"
        return self._misfit(source, target) or self._cycle(source, target)

    def _misfit(self, source: Port, target: Port) -> str | None:
        """How the types differ, or None."""
        made, wanted = source.spec or self._carried.get(source.name), target.spec
        if made is None or wanted is None or (made.shape, made.dtype) == (wanted.shape, wanted.dtype):
            return None
        return f"the one is {layout(made)} and the other {layout(wanted)}"

    def _cycle(self, source: Port, target: Port) -> str | None:
        """The cycle that the connection would close, or None."""
        if not source.module or not target.module:
            return None
        paths = [[source.module]]
        while paths:
            path = paths.pop()
            if path[-1] == target.module:
                return f"that makes a cycle: {' -> '.join([*reversed(path), target.module])}"
            paths += [[*path, port.module] for port in self.feeding(path[-1]) if port.module]
        return None
