"""Demands on a plan; Constraints add demands on the ops that a pattern matches."""

import fnmatch
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal, Self, get_args

from autosplit.arguments import checked
from autosplit.errors import UsageError, close_names, listed, raise_faults
from autosplit.tables import seconds_text
from autosplit.values.graph import Graph
from autosplit.values.machine import Device, Machine

Objective = Literal["throughput", "latency"]

ANY_NUMBER = sys.maxsize
"""Limit of replicas that is above any number of devices, so that the planner chooses their number."""


ROUNDING = 1e-9
"""Relative tolerance of limits. Sums that are added in another order differ by less."""


@dataclass(frozen=True, slots=True)
class Demands:
    """Demands on the shape, the latency and the objective of a plan; a field at its default demands nothing.

    Attributes:
        objective: ``throughput`` minimizes the largest device load, ``latency`` the time of one request.
        contiguous: stages form a chain: each value goes to the same stage or to a later one.
        num_stages: exact number of stages; if it is above the number of devices, devices hold several.
        max_stages: largest number of stages.
        max_replicas: largest number of devices for one stage; 1 forbids replication.
        min_stage_s: shortest time of a stage per request, in seconds.
        max_latency_s: longest time of one request through an idle pipeline, in seconds.
        reuse: whether several stages may share a device. None lets the planner decide: stages share devices if they outnumber the
            devices, if latency is the objective, or if no chain with one stage on a device meets the demands.
    """

    objective: Objective = "throughput"
    contiguous: bool = True
    num_stages: int | None = None
    max_stages: int | None = None
    max_replicas: int = 1
    min_stage_s: float = 0.0
    max_latency_s: float = inf
    reuse: bool | None = None

    @property
    def counted(self) -> bool:
        """Whether stages are counted or timed, may share devices, or latency is the objective; ops must not be merged then."""
        limited = self.num_stages is not None or self.min_stage_s > 0 or self.max_latency_s < inf
        return limited or bool(self.reuse) or self.objective == "latency"

    @property
    def any_sets(self) -> bool:
        """Whether stages may hold any ops, and only throughput counts."""
        return not (self.contiguous or self.counted) and self.max_stages is None and self.max_replicas == 1

    def sharing(self) -> Self:
        """The demands with several stages on one device allowed where latency is the objective, unless they count stages."""
        return replace(self, reuse=self.reuse or (self.objective == "latency" and self.num_stages is None))

    def faults(self, num_ops: int) -> list[str]:
        """A sentence for every demand that no plan of a graph with ``num_ops`` ops can meet."""
        faults = []
        if self.objective not in get_args(Objective):
            faults.append(f"objective '{self.objective}' is unknown; choose throughput or latency")
        for label in ("num_stages", "max_stages", "max_replicas"):
            number = getattr(self, label)
            if number is not None and (not isinstance(number, int) or number < 1):
                faults.append(f"{label} must be at least 1, but is {number!r}")
        if isinstance(self.num_stages, int):
            if isinstance(self.max_stages, int) and 1 <= self.max_stages < self.num_stages:
                faults.append(f"num_stages {self.num_stages} is above max_stages {self.max_stages}")
            if self.num_stages > num_ops:
                faults.append(f"num_stages is {self.num_stages}, but the graph has only {num_ops} ops")
        if not self.min_stage_s >= 0:
            faults.append(f"min_stage_s must be 0 s or more, but is {self.min_stage_s}")
        if not self.max_latency_s > 0:
            faults.append(f"max_latency_s must be above 0 s, but is {self.max_latency_s}")
        return faults

    def broken(self, num_stages: int, num_replicas: int, shortest_s: float, latency_s: float) -> list[str]:
        """A sentence for every demand on shape and times that a plan breaks.

        Args:
            num_replicas: replicas of the widest stage.
            shortest_s: seconds per request of the shortest stage.
            latency_s: seconds of one request through the idle pipeline.
        """
        faults = []
        if self.num_stages not in (None, num_stages):
            faults.append(f"the number of its stages is {num_stages}, and {self.num_stages} is asked for")
        if self.max_stages is not None and num_stages > self.max_stages:
            faults.append(f"the number of its stages is {num_stages}, and at most {self.max_stages} is allowed")
        if num_replicas > self.max_replicas:
            faults.append(f"one of its stages has {num_replicas} replicas, and at most {self.max_replicas} is allowed")
        if shortest_s < self.min_stage_s * (1 - ROUNDING):
            faults.append(
                f"one of its stages takes {seconds_text(shortest_s)}, and at least {seconds_text(self.min_stage_s)} is asked for"
            )
        if latency_s > self.max_latency_s * (1 + ROUNDING):
            faults.append(f"a request takes {seconds_text(latency_s)}, and at most {seconds_text(self.max_latency_s)} is allowed")
        return faults

    def require_possible(self, num_ops: int) -> "Demands":
        """Return the demands. Raises: UsageError: a graph with ``num_ops`` ops cannot meet them; every fault is named."""
        raise_faults(UsageError, "the demands cannot be met", self.faults(num_ops))
        return self


@dataclass(frozen=True, slots=True)
class Placement:
    """Constraints on the ops of one graph, with names of ops in place of patterns.

    Attributes:
        barred: (op name, device name) to the demand that keeps the op off the device, in words.
        groups: names of ops that stay in one stage; each op is in one group at most.
    """

    barred: Mapping[tuple[str, str], str] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()

    def conflicts(self, graph: Graph, machine: Machine) -> list[str]:
        """A sentence for each set of demands that leaves an op without a device."""
        ops: dict[tuple[str, ...], list[str]] = {}
        for op in graph.ops:
            bars = [self.barred.get((op.name, device.name)) for device in machine.devices]
            if None not in bars:
                ops.setdefault(tuple(dict.fromkeys(map(str, bars))), []).append(op.name)
        return [
            f"these cannot hold together for op '{names[0]}'{f' and {len(names) - 1} more' * (len(names) > 1)}: {'; '.join(bars)}"
            for bars, names in ops.items()
        ]


@checked
@dataclass(frozen=True, slots=True)
class Constraints(Demands):
    """Demands on a plan for a model: its shape, and the devices of ops. By default stages may have replicas.

    A stage of a model runs as a whole, so the stages of a plan are always a chain. With ``contiguous=False``, a device may still
    hold any set of ops, as several stages: ``verify`` makes ``reuse=True`` of it.

    Attributes:
        pins: op pattern to the device it must run on.
        forbids: op pattern to devices it must not run on.
        allows: op pattern to devices that support it; a device that is named here runs no ops but those allowed on it.
        together: op patterns; all ops that one pattern matches stay in one stage. Patterns that match one op share its stage.
    """

    max_replicas: int = ANY_NUMBER
    pins: Mapping[str, str] = field(default_factory=dict)
    forbids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    allows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    together: tuple[str, ...] = ()

    @property
    def forced(self) -> bool:
        """Whether the user asked for a certain plan; it is kept even if a baseline is faster."""
        return self.num_stages is not None or bool(self.pins or self.forbids or self.together)

    def verify(self, graph: Graph, machine: Machine) -> "Constraints":
        """Return the constraints for stages that are a chain.

        Raises: UsageError: with every fault: bad numbers, unknown devices, patterns without ops, any sets of ops without several
            stages on a device, or demands that leave an op no device.
        """
        faults = self._faults(len(graph.ops), machine)
        for pattern in dict.fromkeys([*self.pins, *self.forbids, *listed("together", self.together, str)]):
            listing = pattern in self.forbids and _GENERAL.search(pattern)
            if not listing and not matching_ops(graph, pattern):
                faults.append(matches_nothing(graph, pattern))
        conflicts = [] if faults else self.placement(graph, machine).conflicts(graph, machine)
        raise_faults(UsageError, "the constraints do not fit", faults or conflicts)
        return replace(self, contiguous=True, reuse=self.reuse if self.contiguous else True)

    def require_consistent(self, machine: Machine) -> "Constraints":
        """Return the constraints. Raises: UsageError: with every fault that shows without a graph, as for ``verify``."""
        both = [
            f"'{pattern}' is pinned to '{device}' and forbidden there; drop one of them"
            for pattern, device in self.pins.items()
            if device in self.forbids.get(pattern, ())
        ]
        raise_faults(UsageError, "the constraints do not fit", [*self._faults(sys.maxsize, machine), *both])
        return self

    def _faults(self, num_ops: int, machine: Machine) -> list[str]:
        faults = [*self.faults(num_ops), *self._unknown_devices(machine)]
        if not self.contiguous and self.reuse is False:
            faults.append("contiguous=False puts several stages on a device, and reuse=False forbids that; drop one of them")
        return faults

    def _unknown_devices(self, machine: Machine) -> list[str]:
        names = {device.name for device in machine.devices}
        named = [(pattern, (device,)) for pattern, device in self.pins.items()]
        return [
            f"'{pattern}' names device '{device}', which is not one of {', '.join(sorted(names))}"
            for pattern, devices in (*named, *self.forbids.items(), *self.allows.items())
            for device in listed(f"devices of '{pattern}'", devices, str)
            if device not in names
        ]

    def notes(self, graph: Graph) -> list[str]:
        """A note on each pattern of ``forbids`` and ``allows`` that matches no op; a list for many models may have some."""
        return [
            f"'{pattern}' matches no op of '{graph.name}', so it has no effect here"
            for pattern in dict.fromkeys([*self.forbids, *self.allows])
            if not matching_ops(graph, pattern)
        ]

    def _bars(self, graph: Graph, machine: Machine) -> Iterator[tuple[str, str, str]]:
        """Each op and each device that it must not run on, with the demand in words, the stronger demands first."""
        for pattern, pinned in self.pins.items():
            ops, others = matching_ops(graph, pattern), [one.name for one in machine.devices if one.name != pinned]
            yield from ((op, name, f"'{pattern}' is pinned to '{pinned}'") for op in ops for name in others)
        for pattern, names in self.forbids.items():
            ops = matching_ops(graph, pattern)
            yield from ((op, name, f"'{pattern}' is forbidden on '{name}'") for op in ops for name in names)
        for name in dict.fromkeys(name for names in self.allows.values() for name in names):
            patterns = [pattern for pattern, names in self.allows.items() if name in names]
            taken, words = {op for one in patterns for op in matching_ops(graph, one)}, ", ".join(map(repr, patterns))
            yield from ((op.name, name, f"'{name}' allows only {words}") for op in graph.ops if op.name not in taken)
        for device in machine.devices:
            told = unsupported(graph, device).items()
            yield from ((op, device.name, f"'{device.name}' does not support {reason}") for op, reason in told)

    def placement(self, graph: Graph, machine: Machine) -> Placement:
        """The demands with names of ops in place of patterns, for the devices of the machine. Demands on the same op add up."""
        names, barred = {device.name for device in machine.devices}, dict[tuple[str, str], str]()
        for op, name, words in self._bars(graph, machine):
            if name in names:
                barred.setdefault((op, name), words)
        groups: list[set[str]] = []
        for pattern in self.together:
            ops = set(matching_ops(graph, pattern))
            joined = ops.union(*(group for group in groups if group & ops))
            groups = [*(group for group in groups if not group & ops), joined]
        return Placement(barred, tuple(tuple(sorted(group, key=graph.index.__getitem__)) for group in groups))


def unsupported(graph: Graph, device: Device) -> dict[str, str]:
    """Op name to its operator or dtype, for each op that the device's rules exclude.

    >>> from autosplit.values.graph import Graph, Op, Value
    >>> op = Op("embedding", "aten.embedding.default", "", ("ids",), ("x",), (), "")
    >>> values = {"ids": Value("ids", (2,), "int64", 16), "x": Value("x", (2, 4), "float32", 32)}
    >>> graph = Graph("toy", ("ids",), ("x",), (op,), values, {})
    >>> unsupported(graph, Device("npu:0", "npu", dtypes=("float32",)))
    {'embedding': 'dtype int64'}
    """
    if not (device.operators or device.dtypes):
        return {}
    taken = {name for pattern in device.operators for name in matching_ops(graph, pattern)}
    reasons = {}
    for op in graph.ops:
        used = [graph.values[name].dtype for name in (*op.inputs, *op.outputs)]
        used += [graph.weights[name].dtype for name in op.weights]
        foreign = [dtype for dtype in dict.fromkeys(used) if device.dtypes and dtype not in device.dtypes]
        if device.operators and op.name not in taken:
            reasons[op.name] = f"operator {op.operator}"
        elif foreign:
            reasons[op.name] = f"dtype {', '.join(foreign)}"
    return reasons


_GENERAL = re.compile(r"[*?]|^aten\.")
"""Marks of a pattern for a kind of ops. A list of such patterns may serve many models, so one of them may match no op."""


def matching_ops(graph: Graph, pattern: str) -> tuple[str, ...]:
    """The ops that a pattern matches, in graph order.

    A pattern is an op name, a module path (with all below it), an operator, or any of these with ``*`` and ``?``.
    """
    return tuple(
        op.name
        for op in graph.ops
        if op.module.startswith(f"{pattern}.")
        or any(fnmatch.fnmatchcase(text, pattern) for text in (op.name, op.module, op.operator))
    )


def matches_nothing(graph: Graph, pattern: str) -> str:
    """The fault of a pattern that no op matches, with the names that come close."""
    paths = {op.module for op in graph.ops} | {op.operator.rpartition(".")[0] for op in graph.ops}
    hint = close_names(pattern.strip("*?."), [*graph.index, *sorted(paths - {""})])
    return f"'{pattern}' matches no op, module path or operator{hint}"
