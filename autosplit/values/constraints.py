"""Demands: what the user demands of a plan. Constraints: the same with patterns of ops; and the ops that a pattern means."""

import fnmatch
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal, get_args

from autosplit.errors import UsageError, close_names, listed, raise_faults
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine

Objective = Literal["throughput", "latency"]

ANY_NUMBER = sys.maxsize
"""More replicas than there are devices: the planner chooses."""


@dataclass(frozen=True, slots=True)
class Demands:
    """Demands on the shape, the latency and the objective of a plan; everything left out is free.

    Attributes:
        objective: what is optimized: ``throughput`` makes the largest device load small, ``latency`` the time of one request.
        contiguous: stages form a chain: each value goes to the same stage or to a later one.
        num_stages: exact number of stages; more stages than devices means that devices hold several.
        max_stages: largest number of stages.
        max_replicas: largest number of devices for one stage; 1 forbids replication.
        min_stage_s: shortest time of a stage per request, in seconds.
        max_latency_s: longest time of one request through an idle pipeline, in seconds.
        reuse: whether several stages may share a device. With None they may where there are more stages than devices, where it
            makes the latency small, and where no chain with one stage on a device meets the demands.
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
        """Whether more counts than the largest load of a chain with one stage on a device, so that ops may not be merged."""
        limited = self.num_stages is not None or self.min_stage_s > 0 or self.max_latency_s < inf
        return limited or bool(self.reuse) or self.objective == "latency"

    @property
    def any_sets(self) -> bool:
        """Whether stages may hold any ops, and nothing but throughput counts."""
        return not (self.contiguous or self.counted) and self.max_stages is None and self.max_replicas == 1

    def faults(self, num_ops: int) -> list[str]:
        """Every demand that no plan of a graph with so many ops can meet, a sentence each."""
        faults = []
        if self.objective not in get_args(Objective):
            faults.append(f"objective '{self.objective}' is unknown; choose throughput or latency")
        for label in ("num_stages", "max_stages", "max_replicas"):
            number = getattr(self, label)
            if number is not None and number < 1:
                faults.append(f"{label} must be at least 1, but is {number}")
        if self.num_stages and self.max_stages and self.num_stages > self.max_stages:
            faults.append(f"num_stages {self.num_stages} is above max_stages {self.max_stages}")
        if self.num_stages is not None and self.num_stages > num_ops:
            faults.append(f"num_stages is {self.num_stages}, but the graph has only {num_ops} ops")
        if not self.min_stage_s >= 0:
            faults.append(f"min_stage_s must be 0 s or more, but is {self.min_stage_s}")
        if not self.max_latency_s > 0:
            faults.append(f"max_latency_s must be above 0 s, but is {self.max_latency_s}")
        return faults

    def require_possible(self, num_ops: int) -> "Demands":
        """Return the demands. Raises: UsageError: with every fault, for a graph with so many ops."""
        raise_faults(UsageError, "the demands cannot be met", self.faults(num_ops))
        return self


@dataclass(frozen=True, slots=True)
class Constraints(Demands):
    """Demands on a plan for a model: those on its shape, and those on where ops run. Replication is free by default.

    Attributes:
        pins: op pattern to the device it must run on.
        forbids: op pattern to devices it must not run on.
        together: op patterns; the ops that one matches stay in one stage.
    """

    max_replicas: int = ANY_NUMBER
    pins: Mapping[str, str] = field(default_factory=dict)
    forbids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    together: tuple[str, ...] = ()

    @property
    def forced(self) -> bool:
        """Whether the user asked for a plan of a certain shape, which is then kept even where a baseline is faster."""
        return self.num_stages is not None or bool(self.pins or self.forbids or self.together)

    def verify(self, graph: Graph, machine: Machine) -> "Constraints":
        """Return the constraints, or raise UsageError with every fault: patterns without ops, unknown devices, bad numbers."""
        names = {device.name for device in machine.devices}
        faults = self.faults(len(graph.ops))
        wanted = {**{p: (d,) for p, d in self.pins.items()}, **dict(self.forbids)}
        for pattern, devices in wanted.items():
            faults += [
                f"'{pattern}' names device '{device}', which is not one of {', '.join(sorted(names))}"
                for device in listed(f"forbids of '{pattern}'", devices, str)
                if device not in names
            ]
        for pattern in [*wanted, *listed("together", self.together, str)]:
            if not matching_ops(graph, pattern):
                hint = close_names(pattern, [*graph.index, *sorted({op.module for op in graph.ops})])
                faults.append(f"'{pattern}' matches no op, module path or operator{hint}")
        raise_faults(UsageError, "the constraints do not fit", faults)
        return self


def matching_ops(graph: Graph, pattern: str) -> tuple[str, ...]:
    """The ops that a pattern means, in graph order.

    A pattern is an op name, a module path (with all below it), an operator, or any of these with ``*`` and ``?``.
    """
    return tuple(
        op.name
        for op in graph.ops
        if op.module.startswith(f"{pattern}.")
        or any(fnmatch.fnmatchcase(text, pattern) for text in (op.name, op.module, op.operator))
    )
