"""Constraints: what the user demands of a plan, and the ops that a pattern means."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autosplit.errors import UsageError, close_names, listed, raise_faults
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine

Objective = Literal["throughput", "latency"]


@dataclass(frozen=True, slots=True)
class Constraints:
    """Demands on a plan; everything left out is free.

    Attributes:
        objective: the largest throughput, or the smallest latency of one request.
        num_stages: exactly so many stages; more than devices means that devices hold several.
        max_stages: at most so many stages.
        max_replicas: most replicas of one stage; None leaves it to the planner, 1 forbids replication.
        pins: op pattern to the device it must run on.
        forbids: op pattern to devices it must not run on.
        together: op patterns; the ops that one matches stay in one stage.
        max_latency_s: latency that one request may take, in seconds.
        min_stage_s: shortest stage worth a process of its own, in seconds.
    """

    objective: Objective = "throughput"
    num_stages: int | None = None
    max_stages: int | None = None
    max_replicas: int | None = None
    pins: Mapping[str, str] = field(default_factory=dict)
    forbids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    together: tuple[str, ...] = ()
    max_latency_s: float | None = None
    min_stage_s: float | None = None

    @property
    def forced(self) -> bool:
        """Whether the user asked for a plan of a certain shape, which is then kept even where a simple way is faster."""
        return self.num_stages is not None or bool(self.pins or self.forbids or self.together)

    def limits(self, most_replicas: int) -> dict[str, Any]:
        """What a planner is asked beside the objective; a stage can have ``most_replicas``, and may where nothing is said."""
        return {
            "num_stages": self.num_stages,
            "max_stages": self.max_stages,
            "max_replicas": min(self.max_replicas or most_replicas, most_replicas),
            "min_stage_s": self.min_stage_s,
            "max_latency_s": self.max_latency_s,
        }

    def verify(self, graph: Graph, machine: Machine) -> "Constraints":
        """Return the constraints, or raise UsageError with every fault: patterns without ops, unknown devices, bad numbers."""
        names = {device.name for device in machine.devices}
        faults = []
        for label in ("num_stages", "max_stages", "max_replicas"):
            number = getattr(self, label)
            if number is not None and number < 1:
                faults.append(f"{label} must be at least 1, but is {number}")
        if self.num_stages and self.max_stages and self.num_stages > self.max_stages:
            faults.append(f"num_stages {self.num_stages} is above max_stages {self.max_stages}")
        if self.num_stages is not None and self.num_stages > len(graph.ops):
            faults.append(f"num_stages is {self.num_stages}, but the graph has only {len(graph.ops)} ops")
        for label, seconds in (("max_latency_s", self.max_latency_s), ("min_stage_s", self.min_stage_s)):
            if seconds is not None and not seconds > 0:
                faults.append(f"{label} must be above 0 s, but is {seconds}")
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
