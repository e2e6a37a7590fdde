"""Connections between the stages of a PipelineConfig: which port may feed which, checked at each connection.

Whether the tensors fit is checked where all stages are wired (``wiring.faults_of``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from autosplit.errors import PlanError
from autosplit.running.modules import PythonFunction
from autosplit.running.stage import StagePlacement
from autosplit.tracing.tensorspec import TensorSpec

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
    ("module input", "module input"): "connect the source of the first to the second as well",
    ("module output", "module output"): "connect an output to an input",
}


@dataclass(frozen=True, slots=True)
class TensorPort:
    """An end of a connection; made by a config and by its modules."""

    connections: "Connections"
    kind: Kind
    module: str
    name: str

    def connect(self, target: "TensorPort") -> None:
        """Let the values of this port flow to ``target``. Raises: PlanError: they do not fit together; nothing changed."""
        self.connections.connect(self, target)

    @property
    def label(self) -> str:
        """The port in messages and files: ``net.pixels`` or ``image``."""
        return f"{self.module}.{self.name}" if self.module else self.name

    def __str__(self) -> str:
        return f"{self.kind} '{self.label}'"


@dataclass(frozen=True, slots=True)
class ModulePorts:
    """A module of a config: its stage, and the ports to connect it."""

    connections: "Connections"
    stage: StagePlacement

    def input(self, name: str) -> TensorPort:
        """The input called ``name``. Raises: PlanError: there is none."""
        return self._port("module input", name, self.stage.inputs)

    def output(self, which: int | str) -> TensorPort:
        """The output by position or by name. Raises: PlanError: there is none."""
        outputs = self.stage.outputs
        if isinstance(which, int):
            if not 0 <= which < len(outputs):
                raise PlanError(f"module '{self.stage.name}' has no output {which}; it has {len(outputs)}")
            which = outputs[which].name
        return self._port("module output", which, outputs)

    @property
    def parameters(self) -> TensorPort:
        """The port for a parameter group."""
        return TensorPort(self.connections, "module parameters", self.stage.name, "parameters")

    def _port(self, kind: Kind, name: str, specs: Sequence[TensorSpec]) -> TensorPort:
        if name not in [spec.name for spec in specs]:
            what, known = kind.removeprefix("module "), ", ".join(spec.name for spec in specs) or "none"
            raise PlanError(f"module '{self.stage.name}' has no {what} '{name!s:.200}'; its {what}s are: {known}")
        return TensorPort(self.connections, kind, self.stage.name, name)


class Connections:
    """The stages of a config, and the source of each of their inputs.

    Attributes:
        stages: by name, in the order in which they were added; their values have the names that the modules use.
        fed: label of each fed module input to the port that feeds it.
        outputs: name of each output of the pipeline to the port that feeds it.
        groups: name of each parameter group to the names of its modules.
    """

    def __init__(self) -> None:
        self.stages: dict[str, StagePlacement] = {}
        self.fed: dict[str, TensorPort] = {}
        self.outputs: dict[str, TensorPort] = {}
        self.groups: dict[str, list[str]] = {}

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs of the pipeline, in the order of their first connection."""
        return list(dict.fromkeys(port.name for port in self.fed.values() if port.kind == "input"))

    def connect(self, source: TensorPort, target: TensorPort) -> None:
        """Connect two ports. Raises: PlanError: they do not fit together; nothing changed."""
        if not isinstance(target, TensorPort):
            raise PlanError(
                f"cannot connect {source} to {target!r}: a port is expected, such as config['net'].input('x') "
                "or config.output('y')"
            )
        if refusal := self._refusal(source, target):
            raise PlanError(f"cannot connect {source} to {target}: {refusal}")
        if source.kind == "parameter group":
            self.groups.setdefault(source.name, []).append(target.module)
        elif target.kind == "output":
            self.outputs[target.name] = source
        else:
            self.fed[target.label] = source

    def feeding(self, name: str) -> Iterator[tuple[TensorSpec, TensorPort]]:
        """The connected inputs of a module, in order, each with the port that feeds it."""
        labels = ((spec, f"{name}.{spec.name}") for spec in self.stages[name].inputs)
        return ((spec, self.fed[label]) for spec, label in labels if label in self.fed)

    def order(self) -> list[str]:
        """The modules, each after its feeders, otherwise as they were added."""
        return list(TopologicalSorter(self._before()).static_order())

    def targets(self, name: str) -> list[str]:
        """Labels of the module inputs that an input of the pipeline feeds."""
        return [label for label, port in self.fed.items() if port.kind == "input" and port.name == name]

    def _before(self) -> dict[str, set[str]]:
        """Each module with its feeders."""
        return {name: {port.module for _, port in self.feeding(name) if port.module} for name in self.stages}

    def _refusal(self, source: TensorPort, target: TensorPort) -> str | None:
        """Why the two ports do not fit together, or None."""
        if source.connections is not self or target.connections is not self:
            return "they belong to two configs"
        if target.kind not in ALLOWED.get(source.kind, ()):
            kinds = [f"{kind.removesuffix('s')}s" for kind in ALLOWED.get(source.kind, ())]
            places = f"{' or '.join(kinds)} only" if kinds else "nothing"
            return _WRONG.get((source.kind, target.kind), f"{source} feeds {places}")
        if source.kind == "parameter group":
            if isinstance(self.stages[target.module].module, PythonFunction):
                return f"module '{target.module}' is a function and has no parameters"
            taken = [name for name, members in self.groups.items() if target.module in members]
            return f"they are in group '{taken[0]}' already" if taken else None
        if source.module and source.module == target.module:
            return "a module cannot feed itself"
        feeder = self.outputs.get(target.name) if target.kind == "output" else self.fed.get(target.label)
        if feeder is not None:
            return f"{target} is fed by {feeder} already"
        return self._cycle(source.module, target.module) if source.module and target.module else None

    def _cycle(self, source: str, target: str) -> str | None:
        """The cycle that a connection between two modules would close, or None."""
        before = self._before()
        before[target].add(source)
        try:
            TopologicalSorter(before).prepare()
        except CycleError as failure:
            cycle: list[str] = failure.args[1][:-1]
            begin = cycle.index(target)
            return f"that makes a cycle: {' -> '.join([*cycle[begin:], *cycle[:begin], target])}"
        return None
